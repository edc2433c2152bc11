"""How a model's experts get onto many ranks: the ParallelStyle, the meshes, FSDP and DDP around them, and conversion by name.

Gradients are sums everywhere: an expert's gradient already holds the tokens of its whole EP group, so averaging over data-parallel
ranks would leave it off by the EP degree.  The caller divides the loss by the number of valid tokens of all ranks instead.
"""

from __future__ import annotations

import fnmatch
import logging
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from mxep.ep.checks import check_rows
from mxep.ep.journey import Permuted, combine, dispatch, permute, unpermute
from mxep.ep.plan import ExchangePlan
from mxep.grouped_mm import recipe_grouped_mm
from mxep.moe import MoE
from mxep.moe.experts import Experts
from mxep.mx.weight_cache import WeightCache
from mxep.recipe import Recipe, resolve_recipe

_log = logging.getLogger(__name__)


class MXFP8ExpertParallel(ParallelStyle):
    """Expert parallelism for a module `experts(routed_input, num_tokens_per_expert)` with stacked weights (E, ...).

    Every parameter is sharded over the experts.  Before the module's forward the rows (T', D), sorted by expert, travel to the
    ranks of their experts and are permuted and padded; the module sees (P, D) and the padded counts (L,), `MXTensor` rows when the
    recipe dispatches in MXFP8.  After it the rows travel home, in the order in which they came.

    One object may serve many modules, nothing is kept on it between calls; a forward that is recomputed by activation
    checkpointing walks the same road again.

    Args:
        recipe: precision of the exchanges (and of the GEMMs of `mxep.moe.Experts`; code of your own calls its GEMM itself, or is
            converted with `convert_experts`).
    """

    def __init__(self, recipe: str | Recipe | None = None) -> None:
        super().__init__()
        self.recipe = resolve_recipe(recipe)

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        shard_experts(mod, device_mesh)
        if isinstance(mod, Experts):
            mod.recipe = self.recipe

    @torch.compiler.disable  # the splits need the host, so a graph breaks here, and an MX tensor cannot leave one
    def _token_dispatch(self, mod: nn.Module, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        """(rows (T', D), counts (E,)) -> (rows (P, D), padded counts (L,)); further positional inputs pass through."""
        where = type(self).__name__
        if len(inputs) < 2:
            raise ValueError(
                f"{where}: {type(mod).__name__} got {len(inputs)} positional inputs, want (routed_input, num_tokens_per_expert)"
            )
        rows, counts, *others = inputs
        check_rows(where, rows, quantised=self.recipe.dispatch == "mxfp8")
        plan = ExchangePlan.from_counts(counts.to(torch.int64), device_mesh.get_group())
        permuted = permute(dispatch(rows, plan, self.recipe), plan, self.recipe)
        # The way home is kept on the module, between its pre-forward and its forward hook only.
        mod._ep_way_home = (plan, permuted._replace(rows=permuted.row_map))  # type: ignore[assignment]
        return (permuted.rows, permuted.padded_counts, *others)

    @torch.compiler.disable
    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """rows (P, N) -> (T', N) on the ranks that sent them."""
        way_home: tuple[ExchangePlan, Permuted] = mod._ep_way_home  # type: ignore[assignment]
        mod._ep_way_home = None  # type: ignore[assignment]
        plan, permuted = way_home
        return combine(unpermute(routed_output, permuted), plan, self.recipe)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition_fn, self._token_dispatch, self._token_combine)  # type: ignore[arg-type]


def shard_experts(module: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Replace each of the module's own parameters (E, ...) by a DTensor sharded over the experts; rank 0's values count.

    Raises:
        ValueError: a mesh that is not 1-D, or E not divisible by its size.
    """
    if ep_mesh.ndim != 1:
        raise ValueError(f"expert parallelism: the mesh has dimensions {ep_mesh.mesh_dim_names}, want one; pass mesh['ep']")
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() == 0 or parameter.shape[0] % ep_mesh.size():
            raise ValueError(
                f"expert parallelism: {type(module).__name__}.{name} is {tuple(parameter.shape)} and the EP degree {ep_mesh.size()}, "
                "want the first dimension (experts) divisible by it; change the number of experts or the mesh"
            )
        sharded = distribute_tensor(parameter.detach(), ep_mesh, [Shard(0)])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def apply_mxfp8_expert_parallel(moe_layer: nn.Module, ep_mesh: DeviceMesh, recipe: str | Recipe | None = None) -> nn.Module:
    """Shard a MoE layer's `experts` over `ep_mesh` and route tokens to them in MXFP8, in place.

    Args:
        moe_layer: a `mxep.MoE`, or any module whose `experts(routed_input, num_tokens_per_expert)` has weights (E, ...).
        ep_mesh: 1-D mesh whose size divides E.
        recipe: see `MXFP8ExpertParallel`; None is the default preset (a `mxep.MoE` keeps its own).

    Raises:
        ValueError: no `experts` in the layer, unknown recipe, E not divisible by the EP degree.
    """
    if isinstance(moe_layer, MoE):
        if recipe is not None:
            moe_layer.experts.recipe = recipe  # type: ignore[assignment]
        return parallelize_moe(moe_layer, ep_mesh)
    if not isinstance(getattr(moe_layer, "experts", None), nn.Module):
        raise ValueError(f"apply_mxfp8_expert_parallel: {type(moe_layer).__name__} has no module `experts`, want one with weights (E, ...)")
    parallelize_module(moe_layer.experts, ep_mesh, MXFP8ExpertParallel(recipe))  # type: ignore[arg-type]
    return moe_layer


def parallelize_moe(moe: MoE, ep_mesh: DeviceMesh) -> MoE:
    """Shard a `MoE`'s routed experts over `ep_mesh` and let its forward exchange tokens in that group, in place."""
    shard_experts(moe.experts, ep_mesh)
    moe.group = ep_mesh.get_group()
    return moe


@dataclass(frozen=True)
class Meshes:
    """The same ranks seen three ways; expert parallelism is folded out of data parallelism.

    Attributes:
        dp: all ranks, 1-D: everything but experts is sharded (or replicated) over it.
        ep: the EP group of this rank, neighbours in rank order.
        dp_mod_ep: the ranks that hold the same experts; these are sharded again over it.
    """

    dp: DeviceMesh
    ep: DeviceMesh
    dp_mod_ep: DeviceMesh


def build_meshes(world_size: int, ep_degree: int, device_type: str) -> Meshes:
    """Meshes for `world_size` ranks in EP groups of `ep_degree`; torch.distributed must be initialised.

    With 4 ranks and an EP degree of 2: dp {0 1 2 3}, ep {0 1} {2 3}, dp_mod_ep {0 2} {1 3}.

    Raises:
        ValueError: world_size not divisible by ep_degree.
    """
    if ep_degree < 1 or world_size % ep_degree:
        raise ValueError(f"build_meshes: world size {world_size} is not divisible by the EP degree {ep_degree}; choose a divisor of it")
    mesh = init_device_mesh(device_type, (world_size // ep_degree, ep_degree), mesh_dim_names=("dp_mod_ep", "ep"))
    return Meshes(dp=mesh["dp_mod_ep", "ep"]._flatten("dp"), ep=mesh["ep"], dp_mod_ep=mesh["dp_mod_ep"])


def apply_fsdp(
    model: nn.Module,
    meshes: Meshes,
    *,
    blocks: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """FSDP2 with summed gradients: EP-sharded experts over `dp_mod_ep`, everything else over `dp`, in place.

    Args:
        model: experts already sharded by `parallelize_moe` or `MXFP8ExpertParallel`.
        blocks: modules to gather and free one at a time; None takes `model.layers` when there is one.
        param_dtype: dtype of the gathered parameters and of activations, None = the parameters' own.
        reduce_dtype: dtype in which gradients are summed over ranks.
        reshard_after_forward: free the gathered parameters between forward and backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    def wrap(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)

    for module in list(model.modules()):
        own = list(module.parameters(recurse=False))
        if own and all(isinstance(parameter, DTensor) for parameter in own):
            few = own[0].shape[0] // meshes.ep.size() < meshes.dp_mod_ep.size()  # fewer experts here than ranks to shard them over
            wrap(module, meshes.dp_mod_ep, shard_placement_fn=(lambda _: Shard(1)) if few else None)
    if blocks is None:
        layers = getattr(model, "layers", None)
        blocks = [] if layers is None else layers.values() if isinstance(layers, nn.ModuleDict) else layers
    for block in blocks:
        wrap(block, meshes.dp)
    wrap(model, meshes.dp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no other, and NCCL needs no scaling
    return model


def _sum_gradients(group, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations by identity, and these would be strings
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def apply_ddp(model: nn.Module, meshes: Meshes) -> DistributedDataParallel:
    """DDP with summed gradients, for EP groups that span all ranks (an expert's shard is then on one rank, its gradient complete).

    Raises:
        ValueError: EP-sharded experts with several EP groups; those need `apply_fsdp`.
    """
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded and meshes.dp_mod_ep.size() > 1:
        raise ValueError(
            f"apply_ddp: {len(sharded)} expert parameters live on {meshes.dp_mod_ep.size()} EP groups, which DDP cannot sum over; "
            "use apply_fsdp, or an EP degree equal to the world size"
        )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    ddp = DistributedDataParallel(model, process_group=meshes.dp.get_group(), broadcast_buffers=False)
    ddp.register_comm_hook(meshes.dp.get_group(), _sum_gradients)
    return ddp


def cache_quantized_weights(model: nn.Module, *optimizers: torch.optim.Optimizer) -> WeightCache:
    """Quantise the weights of every `mxep.moe.Experts` once per optimizer step, for forward and for dgrad; numbers stay as they are.

    To be called when the model is sharded (its parameters are then the ones that the optimizers step). A step of any of the
    optimizers and a load_state_dict of the experts empty the cache, in-place edits of the parameters are noticed. Every other way to
    change a weight (`parameter.data`, a kernel of one's own) must be followed by `advance()` of what is returned; in checking mode
    (`MXEP_CHECK=1`, always on a CPU) a forgotten one is an error.

    Both forms of each weight stay in memory from their first use on, about 2 bytes for every weight of this rank's experts; where
    FSDP shards these over several ranks, that is the gathered size. Compiled graphs quantise in every call.

    Raises:
        ValueError: no optimizer, or no `Experts` in the model.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    if not optimizers or not experts:
        raise ValueError(
            f"cache_quantized_weights: {len(optimizers)} optimizers and {len(experts)} mxep.moe.Experts in {type(model).__name__}, "
            "want at least one of each: whoever steps the weights empties the cache"
        )
    cache = WeightCache()
    for module in experts:
        module.keep_quantized(cache)
        module.register_load_state_dict_post_hook(cache.advance)
    for optimizer in optimizers:
        optimizer.register_step_post_hook(cache.advance)
    return cache


class _GroupedMMSwap(TorchFunctionMode):
    """While active, torch's grouped GEMMs of 2-D rows with stacked 3-D weights run as a recipe wants them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm or func is F.grouped_mm:
            self.calls += 1
            if self.recipe.gemm == "mxfp8":
                return self._grouped_mm(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _grouped_mm(
        self, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if a.dim() != 2 or b.dim() != 3:  # not rows times experts
            return func(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
        out_dtype = a.dtype if out_dtype is None else out_dtype
        return recipe_grouped_mm(a, b, offs, bias, out_dtype, self.recipe, pad_groups=self.recipe.wgrad == "mxfp8")  # 32x1 blocks


def _converted_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    swap = _GroupedMMSwap(self._mxep_recipe)  # type: ignore[arg-type]
    with swap:
        out = type(self).forward(self, *args, **kwargs)
    if swap.calls == 0:
        raise ValueError(
            f"convert_experts: the forward of {type(self).__name__} called neither torch._grouped_mm nor torch.nn.functional.grouped_mm, "
            "so nothing of it runs in MXFP8; switch its grouped GEMM on, or leave it out of the conversion"
        )
    return out


def _compiler_sees_grouped_mm() -> bool:
    """Put torch._grouped_mm among the functions that torch.compile offers to function modes; False where that list is not to be had.

    torch 2.11 lists public functions only, and would leave a converted module in bf16 inside a compiled graph.
    """
    try:
        from torch._dynamo.variables.torch import get_overridable_functions
    except ImportError:
        return False
    get_overridable_functions().add(torch._grouped_mm)
    return torch._grouped_mm in get_overridable_functions()


_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def _fqn_matches(fqn: str, pattern: str) -> bool:
    """Whether a pattern's dotted parts stand next to each other in the name; a part may hold wildcards.

    >>> _fqn_matches("layers.1.moe.experts", "experts"), _fqn_matches("layers.1.moe.shared_experts", "experts")
    (True, False)
    >>> _fqn_matches("layers.1.moe.experts", "layers.*.moe")
    True
    """
    parts, wanted = [part for part in fqn.split(".") if part not in _WRAPPERS], pattern.split(".")
    windows = (parts[start : start + len(wanted)] for start in range(len(parts) - len(wanted) + 1))
    return any(all(map(fnmatch.fnmatchcase, window, wanted)) for window in windows)


def convert_experts(
    model: nn.Module, fqns: str | Sequence[str] = "experts", recipe: str | Recipe | Mapping[str, str | Recipe] | None = None
) -> list[str]:
    """Make the experts of an existing model compute in MXFP8, in place.

    A `mxep.moe.Experts` gets the recipe.  Any other module with stacked 3-D weights has the grouped GEMMs that its forward calls
    (`torch._grouped_mm`, `torch.nn.functional.grouped_mm`) replaced while its forward runs; checkpoint and compile around it, not
    inside.  Parameters, names and checkpoints stay as they are.

    Args:
        fqns: dotted names or parts of them, with wildcards: "experts", "layers.*.moe.experts", "layers.3".
        recipe: for all of them, or a dict from such names to recipes, of which the first that fits a module decides.

    Returns:
        the names of the converted modules.

    Raises:
        ValueError: a name that matched no module with expert weights (the message lists those it saw), an unknown recipe.
    """
    patterns = [fqns] if isinstance(fqns, str) else list(fqns)
    recipes = {pattern: resolve_recipe(value) for pattern, value in recipe.items()} if isinstance(recipe, Mapping) else None
    single = None if isinstance(recipe, Mapping) else resolve_recipe(recipe)
    seen = {fqn: module for fqn, module in model.named_modules() if any(p.dim() == 3 for p in module.parameters(recurse=False))}
    for pattern in [*patterns, *(recipes or {})]:
        if not any(_fqn_matches(fqn, pattern) for fqn in seen):
            names = list(seen) or [f"none; its modules are {', '.join(name for name, _ in list(model.named_modules())[1:21])}"]
            raise ValueError(f"convert_experts: {pattern!r} matched no module with stacked 3-D expert weights; saw {', '.join(names)}")
    chosen = {fqn: module for fqn, module in seen.items() if any(_fqn_matches(fqn, pattern) for pattern in patterns)}
    if not chosen:
        raise ValueError(f"convert_experts: fqns={fqns!r} names nothing, want one of {', '.join(seen)}")
    decided: dict[str, Recipe] = {}
    for fqn in chosen:
        fitting = [single] if recipes is None else [value for pattern, value in recipes.items() if _fqn_matches(fqn, pattern)]
        if not fitting or fitting[0] is None:
            raise ValueError(f"convert_experts: no recipe for {fqn}, the dict has {', '.join(recipes or {})}; add it, or '*' for the rest")
        decided[fqn] = fitting[0]
    # Where the compiler cannot be told, converted modules run outside of its graphs.
    forward = _converted_forward if _compiler_sees_grouped_mm() else torch.compiler.disable(_converted_forward)
    for fqn, module in chosen.items():
        if isinstance(module, Experts):
            module.recipe = decided[fqn]  # type: ignore[assignment]
        else:
            module._mxep_recipe = decided[fqn]  # type: ignore[assignment]
            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
        _log.info("%s computes with recipe %s", fqn, decided[fqn].name)
    return list(chosen)

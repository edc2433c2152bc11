"""Expert parallelism: a ParallelStyle for any experts module, and the sharding of a `mxep.MoE`."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.weak import WeakTensorKeyDictionary

from mxep.checks import check_rows
from mxep.deprecation import warn_deprecated
from mxep.ep.blocks import Permuted, combine, dispatch, permute, unpermute
from mxep.ep.exchange_plan import ExchangePlan
from mxep.moe import MoE
from mxep.moe.experts import Experts
from mxep.mx.weight import KeptForms, MXWeight
from mxep.parallel.conversion import converted_recipe
from mxep.recipe import Recipe, resolve_recipe

_sharded = WeakTensorKeyDictionary()  # a parameter that another module may still hold -> the mesh, and the one in its place


class MXFP8ExpertParallel(ParallelStyle):
    """Expert parallelism for a module `experts(routed_input, num_tokens_per_expert)` with stacked weights (E, ...).

    Every parameter is sharded over the experts.  Before the module's forward the rows (T', D), sorted by expert, are sent to the ranks of
    their experts, permuted and padded.  The module takes (P, D), `MXTensor` rows when the recipe dispatches in MXFP8, and the padded
    counts (L,).  Its output rows return to their ranks, in the order of the input.

    One object may serve many modules, because it keeps nothing between calls.  Activation checkpointing may recompute a forward, which
    then exchanges again.

    Args:
        recipe: precision of the exchanges (and of the GEMMs of `mxep.moe.Experts`; code of your own calls its GEMM itself, or is
            converted with `convert_experts`).  None is that of a `mxep.moe.Experts`, or the one that `convert_experts` gave the module,
            at each call; else the default preset.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        >>> experts = mxep.moe.Experts(dim=64, hidden=32, num_experts=4)
        >>> experts = parallelize_module(experts, mesh, mxep.MXFP8ExpertParallel())
        >>> experts(torch.randn(8, 64), torch.tensor([2, 2, 2, 2])).shape  # rows sorted by expert, and their counts
        torch.Size([8, 64])
    """

    def __init__(self, recipe: str | Recipe | None = None) -> None:
        super().__init__()
        self.recipe = None if recipe is None else resolve_recipe(recipe)

    def _recipe_of(self, module: nn.Module) -> Recipe:
        own = (recipe for inner in module.modules() if (recipe := converted_recipe(inner)) is not None)  # also of what a wrapper holds
        return self.recipe or next(own, None) or resolve_recipe(None)

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        shard_experts(mod, device_mesh)
        if isinstance(mod, Experts) and self.recipe is not None:
            mod.recipe = self.recipe

    @torch.compiler.disable  # the splits need the host, so a graph breaks here, and an MX tensor cannot be an output of one
    def _token_dispatch(self, mod: nn.Module, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        """(rows (T', D), counts (E,)) -> (rows (P, D), padded counts (L,)); further positional inputs are unchanged."""
        where = type(self).__name__
        if len(inputs) < 2:
            raise ValueError(
                f"{where}: {type(mod).__name__} got {len(inputs)} positional inputs, want (routed_input, num_tokens_per_expert)"
            )
        rows, counts, *others = inputs
        recipe = self._recipe_of(mod)
        check_rows(where, rows, quantised=recipe.dispatch == "mxfp8")
        held = _num_experts(mod)
        if held is not None and counts.numel() != held:
            raise ValueError(
                f"{where}: num_tokens_per_expert of {type(mod).__name__} is {tuple(counts.shape)}, its weights are of {held} experts; want "
                f"({held},), a count for every expert of all ranks, 0 where no row goes to it"
            )
        plan = ExchangePlan.from_counts(counts.to(torch.int64), device_mesh.get_group())
        permuted = permute(dispatch(rows, plan, recipe), plan, recipe)
        # On the module only between its pre-forward and its forward hook.
        mod._ep_dispatched = (plan, permuted._replace(rows=permuted.row_map), recipe)  # type: ignore[assignment]
        return (permuted.rows, permuted.padded_counts, *others)

    @torch.compiler.disable
    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """rows (P, N) -> (T', N) on the ranks that sent them."""
        dispatched: tuple[ExchangePlan, Permuted, Recipe] = mod._ep_dispatched  # type: ignore[assignment]
        mod._ep_dispatched = None  # type: ignore[assignment]
        plan, permuted, recipe = dispatched
        return combine(unpermute(routed_output, permuted), plan, recipe)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition_fn, self._token_dispatch, self._token_combine)  # type: ignore[arg-type]


def _num_experts(module: nn.Module) -> int | None:
    """E of the module's sharded parameters, None where it has none of its own."""
    own = (p for p in module.parameters(recurse=False) if isinstance(p, DTensor) and Shard(0) in p.placements)
    return next((p.shape[0] for p in own), None)


def _check_mesh(ep_mesh: DeviceMesh) -> None:
    """Raise ValueError unless it is a mesh of one dimension."""
    if not isinstance(ep_mesh, DeviceMesh):
        raise ValueError(
            f"expert parallelism: the mesh is {ep_mesh!r}, want a torch DeviceMesh of one dimension; "
            "create one by init_device_mesh(device_type, (ranks,), mesh_dim_names=('ep',))"
        )
    if ep_mesh.ndim != 1:
        names = ep_mesh.mesh_dim_names
        if names is None:
            do = "name them (mesh_dim_names) and pass one of them"
        elif "ep" in names:
            do = "pass mesh['ep']"
        else:
            do = f"pass the one of the ranks that share the experts, as mesh[{names[-1]!r}]"
        raise ValueError(f"expert parallelism: the mesh has the dimensions {names or ep_mesh.ndim}, want one; {do}")


def shard_experts(module: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Replace each of the module's own parameters (E, ...) by a DTensor sharded over the experts.

    Rank 0's values are used on all ranks.  A parameter that several modules share stays shared when each of them is sharded.

    Args:
        module: its own parameters are stacked weights (E, ...); those of its children are left alone.
        ep_mesh: 1-D mesh whose size divides E.

    Raises:
        ValueError: no mesh, one that is not 1-D, E not divisible by its size, or a parameter with hooks, which would be lost.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        >>> experts = mxep.moe.Experts(dim=64, hidden=32, num_experts=4)
        >>> mxep.parallel.shard_experts(experts, mesh)
        >>> type(experts.w1.data).__name__, experts.w1.placements
        ('DTensor', (Shard(dim=0),))
    """
    _check_mesh(ep_mesh)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor) and (parameter.device_mesh, parameter.placements) == (ep_mesh, (Shard(0),)):
            continue
        if parameter.dim() == 0 or parameter.shape[0] % ep_mesh.size():
            raise ValueError(
                f"expert parallelism: {type(module).__name__}.{name} is {tuple(parameter.shape)} and the EP degree {ep_mesh.size()}, "
                "want the first dimension (experts) divisible by it; change the number of experts or the mesh"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"expert parallelism: {type(module).__name__}.{name} has hooks, which the sharded parameter in its place would not run, "
                "want none yet; register them afterwards"
            )
        mesh, shared = _sharded.get(parameter, (None, None))
        sharded = shared() if shared is not None and mesh == ep_mesh else None
        if sharded is None:
            sharded = nn.Parameter(_distributed(parameter.detach(), ep_mesh), requires_grad=parameter.requires_grad)
            _sharded[parameter] = ep_mesh, weakref.ref(sharded)
        module.register_parameter(name, sharded)


def _distributed(values: Tensor, ep_mesh: DeviceMesh) -> Tensor:
    """Rank 0's values sharded over the experts; of a weight that is frozen in MX its bytes, since torch scatters plain tensors alone."""
    if not isinstance(values, MXWeight):
        return distribute_tensor(values, ep_mesh, [Shard(0)])
    parts = (distribute_tensor(part.view(torch.uint8), ep_mesh, [Shard(0)]).to_local() for part in (values.qdata, values.scale))
    qdata, scale = next(parts).view(values.qdata.dtype), next(parts).view(values.scale.dtype)
    kept = None if values.kept is None else KeptForms()
    return DTensor.from_local(values._like(qdata, scale, kept=kept), ep_mesh, [Shard(0)], run_check=False)


def apply_mxfp8_expert_parallel(moe_layer: nn.Module, ep_mesh: DeviceMesh, recipe: str | Recipe | None = None) -> nn.Module:
    """Shard a MoE layer's `experts` over `ep_mesh` and route tokens to them in MXFP8, in place.

    Args:
        moe_layer: a `mxep.MoE` or `mxep.FusedMoE`, or any module whose `experts(routed_input, num_tokens_per_expert)` has weights (E, ...).
        ep_mesh: 1-D mesh whose size divides E.
        recipe: see `MXFP8ExpertParallel`.

    Returns:
        moe_layer.

    Raises:
        ValueError: no `experts` in the layer, unknown recipe, E not divisible by the EP degree.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        >>> layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> layer = mxep.apply_mxfp8_expert_parallel(layer, mesh)
        >>> layer(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """
    if isinstance(moe_layer, MoE):
        if recipe is not None:
            moe_layer.experts.recipe = recipe  # type: ignore[assignment]
        shard_experts(moe_layer.experts, ep_mesh)
        moe_layer.group = ep_mesh.get_group()
        return moe_layer
    if not isinstance(getattr(moe_layer, "experts", None), nn.Module):
        got = f"{type(moe_layer).__name__} has no module `experts`"
        raise ValueError(f"apply_mxfp8_expert_parallel: {got}, want one with weights (E, ...); pass the layer around it")
    _check_mesh(ep_mesh)
    parallelize_module(moe_layer.experts, ep_mesh, MXFP8ExpertParallel(recipe))  # type: ignore[arg-type]
    return moe_layer


def parallelize_moe(moe: MoE, ep_mesh: DeviceMesh) -> MoE:
    """The former name of `apply_mxfp8_expert_parallel`, for a `MoE`."""
    warn_deprecated("mxep.parallel.parallelize_moe", "mxep.parallel.apply_mxfp8_expert_parallel", "0.3")
    apply_mxfp8_expert_parallel(moe, ep_mesh)
    return moe

"""Data parallelism around experts and tensor shards: FSDP2, HSDP and DDP with summed gradients."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxep.fused.layer import FusedExperts
from mxep.moe.experts import Experts
from mxep.moe.router import Router
from mxep.parallel.meshes import Meshes

_ROUND_THEIR_PARAMETERS = (Experts, FusedExperts)  # to `compute_dtype`, when they read them; subclasses may read other parameters


def apply_fsdp(
    model: nn.Module,
    meshes: Meshes,
    *,
    blocks: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    accumulates: bool = False,
) -> nn.Module:
    """FSDP2 with summed gradients: experts over `dp_mod_ep`, tensor shards over `dp_mod_tp`, everything else over `dp`, in place.

    Meshes of (replicate, shard) make it HSDP: sharded inside a replica, summed over all.  `mxep.moe.Experts` whose shards no other rank has
    (a `dp_mod_ep` of one rank) stay out of it: nothing has to be gathered or summed, and FSDP would cast and copy them nevertheless.
    They read their own parameters in `param_dtype` (`Experts.compute_dtype`).  With `accumulates`, bf16 experts that train are wrapped too:
    FSDP adds their gradients up in `reduce_dtype`, where autograd would add in bf16.  Each `mxep.moe.Router` whose product is in float32
    (`MoEConfig.router_dtype`) is a unit of its own that gathers its gate in float32 and casts none of its inputs; the block around it
    prefetches it, and it stays gathered until the end of its backward.

    Args:
        model: experts already sharded by `apply_mxfp8_expert_parallel` or `MXFP8ExpertParallel`, linear layers by the styles of
            `parallel.tensor`.
        meshes: of this rank, as `build_meshes` returns them.
        blocks: modules to gather and free one at a time; None takes `model.layers` when there is one.
        param_dtype: dtype of the gathered parameters and of activations, None = the parameters' own.
        reduce_dtype: dtype in which gradients are summed over ranks.
        reshard_after_forward: free the gathered parameters of `blocks` between forward and backward.
        accumulates: several backward passes add up before a step (gradient accumulation, a pipeline's microbatches).

    Returns:
        model.

    Raises:
        ValueError: `blocks` that are no modules of the model; a parameter in two blocks; experts or linear layers that are sharded over
            other ranks than those of `meshes`.

    Examples:
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> model = torch.nn.Sequential(mxep.apply_mxfp8_expert_parallel(layer, meshes.ep))
        >>> model = mxep.parallel.apply_fsdp(model, meshes, blocks=[layer], param_dtype=torch.bfloat16)
        >>> model(torch.randn(16, 64)).dtype
        torch.bfloat16
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    unrounded = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce_dtype, cast_forward_inputs=False)

    def wrap(module: nn.Module | list[nn.Module], mesh: DeviceMesh, **options: Any) -> None:
        # The model's own parameters (embedding, output) are gathered until its forward ends, and backward begins with them: freeing them
        # in between would gather them twice a step and lower no peak.
        reshard = reshard_after_forward and module is not model
        fully_shard(module, mesh=mesh, **{"mp_policy": policy, "reshard_after_forward": reshard, **options})
        if mesh.size() > 1:  # of one rank there is nothing to divide, and torch would make a float32 copy of every gradient for it
            first = module[0] if isinstance(module, list) else module  # the others are gathered with it
            assert isinstance(first, FSDPModule)
            first.set_gradient_divide_factor(1.0)

    if blocks is None:
        layers = getattr(model, "layers", None)
        blocks = [] if layers is None else layers.values() if isinstance(layers, nn.ModuleDict) else layers
    order = {module: index for index, module in enumerate(model.modules())}  # the same on all ranks
    inner_first = sorted(set(blocks) - {model}, key=lambda block: (len(list(block.modules())), order.get(block, -1)))
    blocks = [*inner_first, model]
    if outside := set(blocks).difference(model.modules()):
        got = ", ".join(sorted(type(block).__name__ for block in outside))
        raise ValueError(f"apply_fsdp: blocks of {got} are no modules of the model, want some of model.modules(); pass those that it holds")
    _check_groups("apply_fsdp", model, meshes)
    sharded = [module for module in model.modules() if _is_sharded(module)]
    rounds = param_dtype not in (None, torch.float32)
    routers = [module for module in model.modules() if rounds and isinstance(module, Router) and module.config.router_dtype == "fp32"]
    apart = [*routers, *(module for module in sharded if not isinstance(module, nn.Linear))]
    _check_one_block_each(blocks, {parameter for module in apart for parameter in module.parameters()})
    left_out: set[nn.Parameter] = set()
    if meshes.dp_mod_ep.size() == 1:
        for experts in [module for module in sharded if isinstance(module, Experts) and type(module) in _ROUND_THEIR_PARAMETERS]:
            if accumulates and any(p.requires_grad and p.dtype != torch.float32 for p in experts.parameters()):
                continue
            experts.compute_dtype = param_dtype
            left_out.update(experts.parameters())
            sharded.remove(experts)
    for module in sharded:
        if not isinstance(module, nn.Linear):  # experts; where fewer are here than ranks shard them, by their width in equal parts
            shards, shapes = meshes.dp_mod_ep.size() // meshes.degrees.replicate, [p.shape for p in module.parameters()]
            few = shapes[0][0] // meshes.ep.size() < shards and all(len(shape) > 1 and shape[1] % shards == 0 for shape in shapes)
            wrap(module, meshes.dp_mod_ep, shard_placement_fn=(lambda _: Shard(1)) if few else None)
    for router in routers:
        wrap(router, meshes.dp, mp_policy=unrounded, reshard_after_forward=False)  # freed, it would be gone before a fused layer reads it
        register_fsdp_forward_method(router, "hold_gate")
    for block in blocks:
        tensor_shards = [module for module in block.modules() if module in sharded and not isinstance(module, FSDPModule)]
        if tensor_shards:
            wrap(tensor_shards, meshes.dp_mod_tp)  # gathered together
        wrap(block, meshes.dp, ignored_params=left_out)
        if block is not model and (inside := [module for module in block.modules() if module in routers]):
            assert isinstance(block, FSDPModule)
            block.set_modules_to_forward_prefetch(inside)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no other, and NCCL needs no scaling
    _count_steps()
    for module in blocks:  # each of them, since a part of the model may be called or evaluated alone
        module.register_forward_pre_hook(_free_old_values, prepend=True)  # before those of FSDP, which gather
        module.register_forward_hook(functools.partial(_free_after_evaluation, whole=weakref.ref(model)))
    return model


def _check_one_block_each(blocks: Sequence[nn.Module], apart: set[nn.Parameter]) -> None:
    """Raise ValueError for a parameter in two blocks neither of which holds the other; `apart`: those that no block gathers."""
    first_with: dict[nn.Parameter, nn.Module] = {}
    for block in blocks:  # inner ones first
        inside = set(block.modules())
        for name, parameter in block.named_parameters():
            first = first_with.setdefault(parameter, block)
            if first not in inside and parameter not in apart:
                kinds = f"{type(first).__name__} and {type(block).__name__}"
                raise ValueError(
                    f"apply_fsdp: {name} is in two blocks, {kinds}, want it in one, since FSDP gathers and frees it with that alone; pass "
                    "the module that has it as a block as well"
                )


def _check_groups(where: str, model: nn.Module, meshes: Meshes) -> None:
    """Raise ValueError for shards over other ranks than those of `meshes`: their gradients would be summed over the wrong ranks."""
    for fqn, module in model.named_modules():
        kind, want = ("tp", meshes.tp) if isinstance(module, nn.Linear) else ("ep", meshes.ep)
        for name, parameter in module.named_parameters(fqn, recurse=False):
            if isinstance(parameter, DTensor) and not torch.equal(parameter.device_mesh.mesh, want.mesh):
                got = parameter.device_mesh.mesh.tolist()
                raise ValueError(
                    f"{where}: {name} is sharded over the ranks {got}, want those of meshes.{kind}, {want.mesh.tolist()}; shard it over "
                    f"meshes.{kind}, or build the meshes with its degree"
                )


_steps = [0]  # number of steps of all optimizers
_freed_at: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # FSDP unit -> `_steps` when it was freed


def _count_step(*_: Any) -> None:
    _steps[0] += 1


@functools.cache
def _count_steps() -> None:
    """Register one hook that counts the steps of all optimizers of the process."""
    register_optimizer_step_post_hook(_count_step)


@torch.compiler.disable
def _free_old_values(module: nn.Module, args: Any) -> None:
    """Free units after an optimizer's step: one that a forward left gathered, and no backward freed, has the values of before the step."""
    if _freed_at.get(module, 0) == _steps[0]:
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule) and _freed_at.get(unit, 0) != _steps[0]:
            _freed_at[unit] = _steps[0]
            unit.reshard()


def _free_after_evaluation(part: nn.Module, args: Any, output: Any, whole: weakref.ref[nn.Module]) -> None:
    """Free units after a forward without gradients: no backward frees them, and the next forward would read old values."""
    if not torch.is_grad_enabled() and whole() not in _reshard_later:
        for unit in part.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


_reshard_later = set[nn.Module]()


@contextlib.contextmanager
def reshard_once(models: Sequence[nn.Module]) -> Iterator[None]:
    """Around several forwards without gradients: models of `apply_fsdp` are resharded at the end, and not after each forward."""
    _reshard_later.update(models)
    try:
        yield
    finally:
        _reshard_later.difference_update(models)
        for model in models:
            _free_after_evaluation(model, (), None, weakref.ref(model))


def _is_sharded(module: nn.Module) -> bool:
    """Whether all of a module's own parameters are shards over an EP or TP group."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(isinstance(parameter, DTensor) for parameter in own)


class _SummedGradients:
    """A communication hook of DDP that sums over the ranks, however many backwards reduce before a step.

    DDP reduces `.grad`, so a second backward before the step reduces the sum of the first one again, which is harmless for averages only.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Iterable[nn.Parameter]) -> None:
        self._group, self._summed = group, set[nn.Parameter]()
        self._nodes = []  # which add to `.grad`; a hook of the parameter also runs where its gradient is only asked for
        for parameter in parameters:
            with torch.enable_grad():
                node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_prehook(functools.partial(self._before, parameter))
            self._nodes.append(node)

    def _before(self, parameter: nn.Parameter, _: tuple[torch.Tensor, ...]) -> None:
        """Called before a gradient is added to `.grad`: divides what has been summed by W, since the next reduction sums it again."""
        if parameter in self._summed:
            self._summed.remove(parameter)
            if parameter.grad is not None:
                parameter.grad.div_(self._group.size())

    def reduce(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations by identity, and these would be strings
        self._summed.update(bucket.parameters())
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def apply_ddp(model: nn.Module, meshes: Meshes) -> DistributedDataParallel:
    """DDP with summed gradients, for EP groups that span all ranks.

    An expert's shard is then on one rank, and its gradient there is complete.

    Args:
        model: experts already sharded by `apply_mxfp8_expert_parallel` or `MXFP8ExpertParallel`.
        meshes: of this rank, as `build_meshes` returns them.

    Returns:
        the wrapped model.

    Raises:
        ValueError: EP-sharded experts with several EP groups, tensor shards, or replicas; those need `apply_fsdp`. Experts that are
            sharded over other ranks than `meshes.ep`.

    Examples:
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> model = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> model = mxep.parallel.apply_ddp(mxep.apply_mxfp8_expert_parallel(model, meshes.ep), meshes)
    """
    if meshes.degrees.tp > 1 or meshes.degrees.replicate > 1:
        raise ValueError(f"apply_ddp: tp={meshes.degrees.tp}, replicate={meshes.degrees.replicate}, want 1 of both; use apply_fsdp")
    _check_groups("apply_ddp", model, meshes)
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded and meshes.dp_mod_ep.size() > 1:
        raise ValueError(
            f"apply_ddp: {len(sharded)} expert parameters live on {meshes.dp_mod_ep.size()} EP groups, which DDP cannot sum over; "
            "use apply_fsdp, or an EP degree equal to the world size"
        )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    ddp = DistributedDataParallel(model, process_group=meshes.dp.get_group(), broadcast_buffers=False)
    reduced = [parameter for name, parameter in model.named_parameters() if name not in sharded and parameter.requires_grad]
    ddp.register_comm_hook(None, _SummedGradients(meshes.dp.get_group(), reduced).reduce)
    return ddp

"""Activation checkpointing and torch.compile, block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
import torch.nn.attention.varlen  # has the operator
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mxep.moe import MoE

# FSDP names its parts for a profiler, and the parts of a second forward are others.  From torch 2.15 on that would be an error.
_NAMES = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction

Recompute = Literal["none", "keep_moe", "selective", "full"]


@functools.cache
def kept_operators() -> frozenset[Any]:
    """The operators whose results "selective" keeps: attention, dense products and exchanges."""
    aten, wire = torch.ops.aten, torch.ops._c10d_functional
    attention = (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        torch.ops.torch_attn._varlen_attn,
        torch.ops.mxep.causal_attention,
    )
    products = (aten.mm, aten.addmm, aten.bmm)
    exchanges = (
        torch.ops.mxep.exchange_rows,
        torch.ops.mxep.exchange_quantized,
        torch.ops.mxep.exchange_dequantized,
        wire.reduce_scatter_tensor,
        wire.all_gather_into_tensor,
    )
    return frozenset(packet.default for packet in (*attention, *products, *exchanges))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_blocks(blocks: Iterable[nn.Module], mode: Recompute, preserve_rng_state: bool = True) -> None:
    """Let each block's forward run again in backward, in place; before `apply_fsdp`, after `compile_blocks`.

    The second forward ends with the last tensor that it has to save again (the early stop of torch.utils.checkpoint).  A `FusedMoE` saves
    everything before its down GEMM.  If no later operation of the block saves a tensor (a residual addition does not), its down GEMM, the
    sums and combine run once.  Otherwise they run again, because their result may have been read.

    Args:
        blocks: modules, such as the layers of a model.
        mode: "full" keeps a block's inputs only, and dispatches everything once more; "selective" keeps `kept_operators` as well, so that
            norms, activations, permutations and the experts' products are what runs twice, and of the exchanges the E counts of rows
            that `mxep.moe.MoE` plans with; "keep_moe" keeps what each `mxep.moe.MoE` in a block saves and recomputes the rest of the
            block, all of it where it has none; "none" changes nothing.
        preserve_rng_state: the second forward draws the same random numbers, so that dropout drops the same values ("selective" keeps
            attention's results and does not draw for them again: no dropout inside of attention there).  False saves the host's time for
            it, for blocks that draw none.  A CUDA graph can be captured with False alone.

    Raises:
        ValueError: another mode.

    Examples:
        >>> blocks = [mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2)) for _ in range(2)]
        >>> mxep.parallel.recompute_blocks(blocks, "selective")
        >>> torch.nn.Sequential(*blocks)(torch.randn(16, 64)).sum().backward()
    """
    if mode not in get_args(Recompute):
        raise ValueError(f"recompute_blocks: mode={mode!r}, want 'none', 'keep_moe', 'selective' or 'full'")
    if mode == "none":
        return
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if mode == "selective":
        SAC_IGNORED_OPS.update(_NAMES)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        for module in block.modules() if mode == "keep_moe" else ():
            if isinstance(module, MoE):
                module.forward = _with(torch.compiler.disable(_kept_for_backward), module.forward)  # type: ignore[method-assign]
        block.forward = _with(_again_in_backward, block.forward, options)  # type: ignore[method-assign]


def _with(call: Callable, forward: Callable, *arguments: Any) -> Callable:
    """A partial of call(forward, *arguments, ...) in the place of `forward`: a copy of the module runs its own forward.

    deepcopy shares closures, and copies what a partial holds.
    """
    return functools.update_wrapper(functools.partial(call, forward, *arguments), forward)


def _kept_for_backward(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """A forward whose saved tensors a checkpoint around it does not replace: of nested hooks, the innermost alone are called."""

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach(), tensor._version  # a saved output would hold the node that holds it

    def unpack(kept: tuple[Tensor, int]) -> Tensor:
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                f"recompute_blocks: a tensor {tuple(tensor.shape)} that an MoE keeps for backward was changed in place after its forward, "
                "want it as it was; change a copy"
            )
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


def _again_in_backward(forward: Callable, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    def with_names(*values: Any) -> Any:  # torch finds the devices whose random numbers it preserves by positional tensors
        return forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    return checkpoint(with_names, *args, *kwargs.values(), use_reentrant=False, **options)


def _of_copies(wrap: Callable[[Callable], Callable], module: nn.Module) -> Callable:
    """wrap(module.forward), which a copy of the module calls with the copy; not if its forward is wrapped already."""
    if "forward" in vars(module):
        return wrap(module.forward)
    return functools.partial(wrap(type(module).forward), module)


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """torch.compile for each block's forward, in place; before `recompute_blocks` and `apply_fsdp`.

    A `mxep.MoE` inside a block stays eager, since FSDP's hooks on its experts would break the graph where rows are in MX, and that is an
    error (docs/troubleshooting.md).  Its shared experts are compiled on their own.

    Args:
        blocks: modules, such as the layers of a model.
        backend: of torch.compile.

    Examples:
        >>> blocks = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]
        >>> mxep.parallel.compile_blocks(blocks, backend="eager")
        >>> torch.nn.Sequential(*blocks)(torch.randn(4, 64)).shape
        torch.Size([4, 64])
    """
    compiled = functools.partial(torch.compile, backend=backend)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, MoE):
                if module.shared_experts is not None:
                    module.shared_experts.forward = _of_copies(compiled, module.shared_experts)  # type: ignore[method-assign]
                module.forward = _of_copies(torch.compiler.disable, module)  # type: ignore[method-assign]
        block.forward = _of_copies(compiled, block)  # type: ignore[method-assign]

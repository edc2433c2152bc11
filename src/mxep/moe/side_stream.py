"""Work beside the exchanges: on a second CUDA stream it starts before the first exchange and joins after the last one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mxep.mx.first_order import first_order


def start_on_side_stream(work: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Starts work(x) and returns a function that returns its result.

    On a GPU the work and its backward run on a second stream, in parallel with what follows on the current one.  On a CPU, under a
    compiler, which orders work itself, and where `_has_shards`, the work is done first.  In either case what it saves is saved before
    anything of what follows, where the recomputation of a checkpoint may end, and its gradient of x is one term of that of x.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or _has_shards(work):
        out = work(x.view_as(x))
        return lambda: out
    second = _second_stream(x.device)
    there = _Fork.apply(x, second)
    with torch.cuda.stream(second):
        out = work(there)
    return lambda: _Join.apply(out, second)


def _has_shards(work: nn.Module) -> bool:
    """Whether FSDP or tensor parallelism shard parameters inside of `work`.

    FSDP frees a group's weights after the last forward of the group's modules, on the stream that gathered them.  If the group has modules
    outside of `work`, that is the current stream: its next allocations would get the memory while the second stream still reads it.
    """
    return any(isinstance(module, FSDPModule) for module in work.modules()) or any(isinstance(p, DTensor) for p in work.parameters())


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _follow(first: torch.cuda.Stream, then: torch.cuda.Stream, held: Tensor) -> None:
    """`then` waits for the work that is on `first` now, and may use `held`, a tensor of `first`."""
    then.wait_stream(first)
    held.record_stream(then)


@first_order
class _Fork(torch.autograd.Function):
    """x for the second stream. Backward: the current stream waits for the second one, gradients of weights included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, second: torch.cuda.Stream) -> Tensor:
        ctx.second = second
        _follow(torch.cuda.current_stream(x.device), second, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _follow(ctx.second, torch.cuda.current_stream(grads[0].device), grads[0])
        return grads[0], None


@first_order
class _Join(torch.autograd.Function):
    """The second stream's result for the current stream; backward the other way round."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, second: torch.cuda.Stream) -> Tensor:
        ctx.second = second
        _follow(second, torch.cuda.current_stream(out.device), out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _follow(torch.cuda.current_stream(grads[0].device), ctx.second, grads[0])
        return grads[0], None

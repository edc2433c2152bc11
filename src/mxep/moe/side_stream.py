"""Work on a second CUDA stream during the exchanges: it starts before the first exchange and is joined after the last one."""

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
    there = _Handover.apply(x, None, second)
    with torch.cuda.stream(second):
        out = work(there)
    return lambda: _Handover.apply(out, second, None)


def _has_shards(work: nn.Module) -> bool:
    """Whether FSDP or tensor parallelism shard parameters inside of `work`.

    FSDP frees a group's weights after the last forward of the group's modules, on the stream that gathered them.  If the group has modules
    outside of `work`, that is the current stream: its next allocations would get the memory while the second stream still reads it.
    """
    return any(isinstance(module, FSDPModule) for module in work.modules()) or any(isinstance(p, DTensor) for p in work.parameters())


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _follow(first: torch.cuda.Stream | None, then: torch.cuda.Stream | None, held: Tensor) -> None:
    """`then` waits for the work that is on `first` now, and may use `held`, a tensor of `first`; None: the current stream."""
    current = torch.cuda.current_stream(held.device)
    (then or current).wait_stream(first or current)
    held.record_stream(then or current)


@first_order
class _Handover(torch.autograd.Function):
    """A tensor of the stream `first` for the stream `then`, see `_follow`; backward the other way round, gradients of weights included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: torch.cuda.Stream | None, then: torch.cuda.Stream | None) -> Tensor:
        ctx.first, ctx.then = first, then
        _follow(first, then, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _follow(ctx.then, ctx.first, grads[0])
        return grads[0], None, None

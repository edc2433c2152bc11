"""Work that runs beside the exchanges: on a second stream of the GPU, from before the first exchange to behind the last one."""

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
    """Begin work(x); call what this returns for the result.

    On a GPU it runs on a second stream, beside what follows on the current one, and so does its backward.  On a CPU, for a compiler,
    which orders work itself, and where `_has_shards`, it runs when the result is asked for.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or _has_shards(work):
        return lambda: work(x)
    second = _second_stream(x.device)
    there = _Fork.apply(x, second)
    with torch.cuda.stream(second):
        out = work(there)
    return lambda: _Join.apply(out, second)


def _has_shards(work: nn.Module) -> bool:
    """Whether FSDP or tensor parallelism act in the midst of `work`, and not around all of what it runs beside.

    FSDP frees a group's weights behind the last of its modules' forwards, for the stream that gathered them: this one, where the group
    has modules outside of `work`.  What follows here would get that memory while the second stream still reads the weights.
    """
    return any(isinstance(module, FSDPModule) for module in work.modules()) or any(isinstance(p, DTensor) for p in work.parameters())


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _follow(first: torch.cuda.Stream, then: torch.cuda.Stream, held: Tensor) -> None:
    """`then` goes on behind what is on `first` now and may use `held`, which was made there."""
    then.wait_stream(first)
    held.record_stream(then)


@first_order
class _Fork(torch.autograd.Function):
    """x as the second stream sees it. Backward: all that it has done by now, gradients of weights too, comes before what follows here."""

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
    """The second stream's result as the current stream sees it; backward the other way round."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, second: torch.cuda.Stream) -> Tensor:
        ctx.second = second
        _follow(second, torch.cuda.current_stream(out.device), out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _follow(torch.cuda.current_stream(grads[0].device), ctx.second, grads[0])
        return grads[0], None

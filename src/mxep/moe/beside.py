"""Work that runs beside the exchanges: on a second stream of the GPU, from before the first exchange to behind the last one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def start_beside(work: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Begin work(x); call what this returns for the result.

    On a GPU it runs on a second stream, beside what follows on the current one, and so does its backward.  On a CPU, and for a compiler,
    which orders work itself, it runs when the result is asked for.
    """
    if not x.is_cuda or torch.compiler.is_compiling():
        return lambda: work(x)
    second = _second_stream(x.device)
    there = _Part.apply(x, second)
    with torch.cuda.stream(second):
        out = work(there)
    return lambda: _Meet.apply(out, second)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _follow(first: torch.cuda.Stream, then: torch.cuda.Stream, held: Tensor) -> None:
    """`then` goes on behind what is on `first` now and may use `held`, which was made there."""
    then.wait_stream(first)
    held.record_stream(then)


class _Part(torch.autograd.Function):
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


class _Meet(torch.autograd.Function):
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

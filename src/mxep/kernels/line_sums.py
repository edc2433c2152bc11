"""Sums along the lines of a matrix that another kernel has written in parts; lines that hold nothing are not looked at."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.shapes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["T"])
def _sum_lines_kernel(
    parts,  # (T, COUNT) float32, contiguous
    live,  # (1,) int32, or None
    out,  # (T,) float32
    T,
    COUNT: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least COUNT
):
    lines = T if live is None else tl.minimum(tl.load(live), T)
    column = tl.arange(0, PARTS)
    for tile in range(tl.program_id(0), tl.cdiv(lines, LINES), tl.num_programs(0)):
        line = tile * LINES + tl.arange(0, LINES)
        inside = (line < lines)[:, None] & (column < COUNT)[None, :]
        values = tl.load(parts + line.to(tl.int64)[:, None] * COUNT + column[None, :], mask=inside, other=0)
        tl.store(out + line, tl.sum(values, axis=1), mask=line < lines)


def sum_lines(parts: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """(T, B) float32, contiguous -> (T,), the sum of each line; past live (1,) int32, if given, whatever is there."""
    count, width = parts.shape
    out = torch.empty(count, dtype=parts.dtype, device=parts.device)
    padded = next_power_of_2(width)
    lines = max(tiles.LINES_VALUES // padded, 1)

    if out.numel():
        programs = cdiv(count, lines)
        launch(
            _sum_lines_kernel,
            programs if live is None else min(programs, tiles.PASS_PROGRAMS),
            {"parts": parts, "live": live, "out": out, "T": count, "COUNT": width, "LINES": lines, "PARTS": padded},
            num_warps=4,
        )
    return out

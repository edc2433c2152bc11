"""The weighted sum over a token's choices on the GPU, and its gradients: every row read once and written once, sums in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.shapes import cdiv

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["T", "column_tiles"])
def _weigh_kernel(
    rows,  # (T, CHOICES, D) bf16 or float32, contiguous
    weights,  # (T, CHOICES) float32, contiguous
    out,  # (T, D) rows' dtype, contiguous
    T,
    D,
    column_tiles,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < T)[:, None] & (column < D)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for choice in range(CHOICES):
        row = token * CHOICES + choice
        weight = tl.load(weights + row, mask=token < T, other=0)
        total += weight[:, None] * tl.load(rows + row[:, None] * D + column[None, :], mask=inside, other=0).to(tl.float32)
    tl.store(out + token[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _weigh_backward_kernel(
    grad,  # (T, D) bf16 or float32, contiguous
    rows,  # (R = T * CHOICES, D) bf16 or float32, contiguous
    weights,  # (R,) float32, contiguous
    d_rows,  # (R, D) rows' dtype, contiguous
    d_weights,  # (R,) float32
    R,
    D,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + row, mask=row < R, other=0)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < R)[:, None] & (column < D)[None, :]
        dy = tl.load(grad + (row // CHOICES)[:, None] * D + column[None, :], mask=inside, other=0).to(tl.float32)
        products += dy * tl.load(rows + row[:, None] * D + column[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(d_rows + row[:, None] * D + column[None, :], (weight[:, None] * dy).to(d_rows.dtype.element_ty), mask=inside)
    tl.store(d_weights + row, tl.sum(products, 1), mask=row < R)


def _check(where: str, rows: torch.Tensor, weights: torch.Tensor) -> None:
    if rows.dim() != 3 or rows.dtype not in _INPUTS or weights.shape != rows.shape[:2] or weights.dtype != torch.float32:
        raise ValueError(
            f"{where}: rows {tuple(rows.shape)} {rows.dtype} with weights {tuple(weights.shape)} {weights.dtype}, want (T, C, D) bfloat16 "
            "or float32 with (T, C) float32"
        )


def weigh(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over c of weights[t, c] * rows[t, c], one after the other. Twin: `reference.weigh`.

    Args:
        rows: (T, C, D) bf16 or float32.  weights: (T, C) float32.

    Returns:
        (T, D) of rows' dtype, contiguous.
    """
    _check("weigh", rows, weights)
    tokens, choices, width = rows.shape

    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)

    if out.numel():
        tile_rows, tile_columns = tiles.WEIGH.fit(width)
        column_tiles = cdiv(width, tile_columns)
        launch(
            _weigh_kernel,
            cdiv(tokens, tile_rows) * column_tiles,
            {
                "rows": rows.contiguous(),
                "weights": weights.contiguous(),
                "out": out,
                "T": tokens,
                "D": width,
                "column_tiles": column_tiles,
                "CHOICES": choices,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
            },
            num_warps=tiles.WEIGH.warps,
        )
    return out


def weigh_backward(grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient (T, D) of `weigh`: those of rows (T, C, D) and of weights (T, C). Twin: `reference.weigh_backward`.

    Args:
        grad: (T, D) bf16 or float32.  rows, weights: as in `weigh`.
    """
    _check("weigh_backward", rows, weights)
    tokens, choices, width = rows.shape
    if grad.shape != (tokens, width) or grad.dtype not in _INPUTS:
        raise ValueError(f"weigh_backward: grad is {tuple(grad.shape)} {grad.dtype}, want ({tokens}, {width}) bfloat16 or float32")

    d_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    d_weights = torch.empty((tokens, choices), dtype=torch.float32, device=rows.device)

    if d_weights.numel():
        tile_rows, tile_columns = tiles.WEIGH.fit(max(width, 1))
        launch(
            _weigh_backward_kernel,
            cdiv(tokens * choices, tile_rows),
            {
                "grad": grad.contiguous(),
                "rows": rows.contiguous(),
                "weights": weights.contiguous(),
                "d_rows": d_rows,
                "d_weights": d_weights,
                "R": tokens * choices,
                "D": width,
                "CHOICES": choices,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
            },
            num_warps=tiles.WEIGH.warps,
        )
    return d_rows, d_weights

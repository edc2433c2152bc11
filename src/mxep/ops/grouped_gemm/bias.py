"""A bias for the rows of each group, and what a row's score gets from it, each in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.grouped_gemm.reference import check_row_map
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit
def _groups_of(row, offs, G, GROUPS: tl.constexpr):
    """The group of each row (ROWS, 1), G after the last end."""
    index = tl.arange(0, GROUPS)
    ends = tl.load(offs + index, mask=index < G, other=0x7FFFFFFF)
    return tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)[:, None]


@triton.jit(do_not_specialize=["M", "G", "column_tiles"])
def _add_group_bias_kernel(
    rows,  # (M, N) bf16 or float32
    rows_row,
    bias,  # (G, N) bf16 or float32, contiguous
    offs,  # (G,) int32
    scores,  # (M,) float32, or None
    out,  # (M, N) rows' dtype, contiguous
    M,
    N,
    G,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least G
):
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    group = _groups_of(row, offs, G, GROUPS)
    inside = (row < M)[:, None] & (column < N)[None, :]
    owned = inside & (group < G)

    value = tl.load(rows + row[:, None] * rows_row + column[None, :], mask=inside, other=0)  # (ROWS, COLUMNS)
    added = tl.load(bias + group.to(tl.int64) * N + column[None, :], mask=owned, other=0).to(value.dtype)
    added = added.to(tl.float32)
    if scores is not None:
        added = tl.load(scores + row, mask=row < M, other=0)[:, None] * added
    total = (value.to(tl.float32) + added).to(value.dtype)
    tl.store(out + row[:, None] * N + column[None, :], tl.where(owned, total, value), mask=inside)


@triton.jit(do_not_specialize=["M", "G"])
def _dot_group_bias_kernel(
    rows,  # (M, N) bf16 or float32, or as many rows as row_map knows
    rows_row,
    row_map,  # (M,) int32, or None
    bias,  # (G, N) bf16 or float32, contiguous
    offs,  # (G,) int32
    out,  # (M,) float32
    M,
    N,
    G,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least G
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = _groups_of(row, offs, G, GROUPS)
    owned = (row < M)[:, None] & (group < G)
    source = row
    if row_map is not None:
        source = tl.load(row_map + row, mask=row < M, other=-1).to(tl.int64)
        owned &= (source >= 0)[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, N, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mine = owned & (column < N)[None, :]
        value = tl.load(rows + source[:, None] * rows_row + column[None, :], mask=mine, other=0)  # (ROWS, COLUMNS)
        factor = tl.load(bias + group.to(tl.int64) * N + column[None, :], mask=mine, other=0).to(value.dtype)
        total += value.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=1), mask=row < M)


def _check(where: str, rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, scores: torch.Tensor | None) -> None:
    fits = rows.dim() == 2 and offs.dim() == 1 and bias.shape == (offs.shape[0], rows.shape[1])
    if not fits or rows.dtype not in _INPUTS or bias.dtype not in _INPUTS:
        raise ValueError(
            f"{where}: rows {tuple(rows.shape)} {rows.dtype}, bias {tuple(bias.shape)} {bias.dtype}, offs {tuple(offs.shape)}, "
            "want (M, N), (G, N), (G,), bfloat16 or float32"
        )
    if scores is not None and (scores.shape != rows.shape[:1] or scores.dtype != torch.float32 or not scores.is_contiguous()):
        raise ValueError(f"{where}: scores are {tuple(scores.shape)} {scores.dtype}, want ({rows.shape[0]},) float32, contiguous")


def _operands(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> dict[str, torch.Tensor | int]:
    """What both kernels take in the same way."""
    values = rows if rows.stride(1) == 1 else rows.contiguous()
    return {
        "rows": values,
        "rows_row": values.stride(0),
        "bias": bias.contiguous(),
        "offs": offs.to(torch.int32).contiguous(),
        "M": rows.shape[0],
        "N": rows.shape[1],
        "G": offs.shape[0],
        "GROUPS": next_power_of_2(max(offs.shape[0], 1)),
    }


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
    """rows plus their group's bias, which is rounded to rows' dtype first.

    Args:
        rows: (M, N) bf16 or float32, any strides (copied first unless the last one is 1).  bias: (G, N) bf16 or float32.
        offs: (G,) int32 or int64 END rows of the groups on the device.
        scores: (M,) float32, contiguous, factors of the bias in each row.

    Returns:
        (M, N) of rows' dtype, contiguous; rows after the last group unchanged.
    """
    _check("add_group_bias", rows, bias, offs, scores)
    num_rows, width = rows.shape
    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)

    if out.numel():
        programs, tile = tiles.QUANTIZE.grid(num_rows, width)
        launch(
            _add_group_bias_kernel,
            programs,
            {**_operands(rows, bias, offs), "scores": scores, "out": out, **tile},
            num_warps=tiles.QUANTIZE.warps,
            enable_fp_fusion=False,
        )
    return out


def dot_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None = None) -> torch.Tensor:
    """Each row's product with its group's bias, rounded to rows' dtype first. The reference sums in another order.

    Args:
        rows, bias, offs: as in `add_group_bias`.
        row_map: (M,) int32, the row that row m reads, -1 for one of zeros; None: row m reads row m.

    Returns:
        (M,) float32; 0 after the last group.
    """
    _check("dot_group_bias", rows, bias, offs, None)
    check_row_map("dot_group_bias", row_map)
    num_rows, width = rows.shape[0] if row_map is None else row_map.shape[0], rows.shape[1]
    out = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    if num_rows:
        tile_rows, tile_columns = tiles.DOT.fit(max(width, 1))
        launch(
            _dot_group_bias_kernel,
            cdiv(num_rows, tile_rows),
            {
                **_operands(rows, bias, offs),
                "row_map": None if row_map is None else row_map.contiguous(),
                "out": out,
                "M": num_rows,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
            },
            num_warps=tiles.DOT.warps,
        )
    return out

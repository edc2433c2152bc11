"""A bias for the rows of each group, in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.shapes import cdiv, next_power_of_2

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["M", "G", "column_tiles"])
def _add_group_bias_kernel(
    rows,  # (M, N) bf16 or float32
    rows_row,
    bias,  # (G, N) bf16 or float32, contiguous
    offs,  # (G,) int32
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
    index = tl.arange(0, GROUPS)
    ends = tl.load(offs + index, mask=index < G, other=0x7FFFFFFF)
    group = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)[:, None]  # (ROWS, 1), G behind the last end
    inside = (row < M)[:, None] & (column < N)[None, :]
    owned = inside & (group < G)

    value = tl.load(rows + row[:, None] * rows_row + column[None, :], mask=inside, other=0)  # (ROWS, COLUMNS)
    added = tl.load(bias + group.to(tl.int64) * N + column[None, :], mask=owned, other=0).to(value.dtype)
    total = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    tl.store(out + row[:, None] * N + column[None, :], tl.where(owned, total, value), mask=inside)


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """rows plus their group's bias, which is rounded to rows' dtype first. Twin: `reference.add_group_bias`.

    Args:
        rows: (M, N) bf16 or float32, any strides (copied first unless the last one is 1).  bias: (G, N) bf16 or float32.
        offs: (G,) int32 or int64 END rows of the groups on the device.

    Returns:
        (M, N) of rows' dtype, contiguous; rows behind the last group as they were.
    """
    fits = rows.dim() == 2 and offs.dim() == 1 and bias.shape == (offs.shape[0], rows.shape[1])
    if not fits or rows.dtype not in _INPUTS or bias.dtype not in _INPUTS:
        raise ValueError(
            f"add_group_bias: rows {tuple(rows.shape)} {rows.dtype}, bias {tuple(bias.shape)} {bias.dtype}, offs {tuple(offs.shape)}, "
            "want (M, N), (G, N), (G,), bfloat16 or float32"
        )

    num_rows, width = rows.shape
    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)

    if out.numel():
        tile_rows, tile_columns = tiles.QUANTIZE.fit(width)
        column_tiles = cdiv(width, tile_columns)
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        launch(
            _add_group_bias_kernel,
            cdiv(num_rows, tile_rows) * column_tiles,
            {
                "rows": values,
                "rows_row": values.stride(0),
                "bias": bias.contiguous(),
                "offs": offs.to(torch.int32).contiguous(),
                "out": out,
                "M": num_rows,
                "N": width,
                "G": offs.shape[0],
                "column_tiles": column_tiles,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
                "GROUPS": next_power_of_2(max(offs.shape[0], 1)),
            },
            num_warps=tiles.QUANTIZE.warps,
        )
    return out

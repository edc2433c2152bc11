"""The sum of the rows that belong together on the GPU: every row read once, every sum written once, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["R", "N", "column_tiles"])
def _sum_rows_kernel(
    rows,  # (R, D) bf16 or float32
    rows_row,
    slots,  # (N, SLOTS) int32, contiguous
    added,  # (N, D) bf16 or float32, or None
    added_row,
    out,  # (N, D) rows' dtype, contiguous
    R,
    N,
    D,
    column_tiles,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (column < D)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for slot in range(SLOTS):
        source = tl.load(slots + row * SLOTS + slot, mask=row < N, other=-1).to(tl.int64)  # (ROWS,)
        live = ((source >= 0) & (source < R))[:, None] & inside
        total += tl.load(rows + source[:, None] * rows_row + column[None, :], mask=live, other=0).to(tl.float32)
    if added is not None:
        total += tl.load(added + row[:, None] * added_row + column[None, :], mask=inside, other=0).to(tl.float32)
    tl.store(out + row[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def sum_rows(rows: torch.Tensor, slots: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """out[n] = sum over s of rows[slots[n, s]], nothing where slots[n, s] is -1. Twin: `reference.sum_rows`.

    Args:
        rows: (R, D) bf16 or float32, row-strided or contiguous.  slots: (N, S) int32, every value in [-1, R); one past that adds nothing
            here, the twin raises.
        added: (N, D) bf16 or float32, the last term of every sum.

    Returns:
        (N, D) of rows' dtype, contiguous.
    """
    if rows.dim() != 2 or slots.dim() != 2 or rows.dtype not in _INPUTS or slots.dtype != torch.int32:
        raise ValueError(
            f"sum_rows: rows {tuple(rows.shape)} {rows.dtype} with slots {tuple(slots.shape)} {slots.dtype}, want (R, D) bfloat16 or "
            "float32 with (N, S) int32"
        )
    num_rows, width = slots.shape[0], rows.shape[1]
    if added is not None and (added.shape != (num_rows, width) or added.dtype not in _INPUTS):
        raise ValueError(f"sum_rows: added is {tuple(added.shape)} {added.dtype}, want ({num_rows}, {width}) bfloat16 or float32")

    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)

    if out.numel():
        tile_rows, tile_columns = tiles.SUM.fit(width)
        column_tiles = triton.cdiv(width, tile_columns)
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        terms = None if added is None else added if added.stride(1) == 1 else added.contiguous()
        _sum_rows_kernel[(triton.cdiv(num_rows, tile_rows) * column_tiles,)](
            rows=values,
            rows_row=values.stride(0),
            slots=slots.contiguous(),
            added=terms,
            added_row=0 if terms is None else terms.stride(0),
            out=out,
            R=rows.shape[0],
            N=num_rows,
            D=width,
            column_tiles=column_tiles,
            SLOTS=slots.shape[1],
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            num_warps=tiles.SUM.warps,
        )
    return out

"""The sum of the rows that belong together on the GPU: every row read once, every sum written once, in a fixed order.

Expert rows in chunks are summed chunk by chunk; a chunk without rows costs one launch of a few programs that return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.rows.reference import check_chunk_sums
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["R", "N", "column_tiles"])
def _reduce_rows_kernel(
    rows,  # (R, D) bf16 or float32
    rows_row,
    slots,  # (N, SLOTS) int32, contiguous
    added,  # (N, D) bf16 or float32, or None
    added_row,
    weights,  # (N, SLOTS) float32, contiguous, or None
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
        there = (source >= 0) & (source < R)
        term = tl.load(rows + source[:, None] * rows_row + column[None, :], mask=there[:, None] & inside, other=0).to(tl.float32)
        if weights is not None:
            term *= tl.load(weights + row * SLOTS + slot, mask=there, other=0)[:, None]
        total += term
    if added is not None:
        total += tl.load(added + row[:, None] * added_row + column[None, :], mask=inside, other=0).to(tl.float32)
    tl.store(out + row[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def _check(where: str, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Raise ValueError for what cannot be summed."""
    if rows.dim() != 2 or slots.dim() != 2 or rows.dtype not in _INPUTS or slots.dtype != torch.int32:
        raise ValueError(
            f"{where}: rows {tuple(rows.shape)} {rows.dtype} with slots {tuple(slots.shape)} {slots.dtype}, want (R, D) bfloat16 or "
            "float32 with (N, S) int32"
        )
    if weights is not None and (weights.shape != slots.shape or weights.dtype != torch.float32):
        raise ValueError(f"{where}: weights are {tuple(weights.shape)} {weights.dtype}, want {tuple(slots.shape)} float32")


def reduce_rows(
    rows: torch.Tensor, slots: torch.Tensor, added: torch.Tensor | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """out[n] = sum over s of rows[slots[n, s]], nothing where slots[n, s] is -1.

    Args:
        rows: (R, D) bf16 or float32, row-strided or contiguous.  slots: (N, S) int32, every value in [-1, R); one past that adds nothing
            here, the reference raises.
        added: (N, D) bf16 or float32, the last term of every sum.
        weights: (N, S) float32, by which each row is multiplied.

    Returns:
        (N, D) of rows' dtype, contiguous.
    """
    _check("reduce_rows", rows, slots, weights)
    num_rows, width = slots.shape[0], rows.shape[1]
    if added is not None and (added.shape != (num_rows, width) or added.dtype not in _INPUTS):
        raise ValueError(f"reduce_rows: added is {tuple(added.shape)} {added.dtype}, want ({num_rows}, {width}) bfloat16 or float32")

    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)

    if out.numel():
        programs, tile = tiles.SUM.grid(num_rows, width)
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        terms = None if added is None else added if added.stride(1) == 1 else added.contiguous()
        launch(
            _reduce_rows_kernel,
            programs,
            {
                "rows": values,
                "rows_row": values.stride(0),
                "slots": slots.contiguous(),
                "added": terms,
                "added_row": 0 if terms is None else terms.stride(0),
                "weights": None if weights is None else weights.contiguous(),
                "out": out,
                "R": rows.shape[0],
                "N": num_rows,
                "D": width,
                "SLOTS": slots.shape[1],
                **tile,
            },
            num_warps=tiles.SUM.warps,
            enable_fp_fusion=False,  # the reference's bits: a product is rounded before it is added
        )
    return out


@triton.jit(do_not_specialize=["R"])
def _reduce_rows_backward_kernel(
    grad,  # (N, D) bf16 or float32
    grad_row,
    rows,  # (R = N * SLOTS, D) bf16 or float32
    rows_row,
    slots,  # (R,) int32, contiguous
    weights,  # (R,) float32, contiguous
    d_rows,  # (R, D) rows' dtype, contiguous
    d_weights,  # (R,) float32
    R,
    D,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # A row of the tile is a slot, not a sum: no accumulators for each of a sum's slots, however many it has.  Its slots are neighbours,
    # so memory is asked for its gradient once and L1 for the others.
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert_row = tl.load(slots + slot, mask=slot < R, other=-1).to(tl.int64)  # (ROWS,)
    weight = tl.load(weights + slot, mask=slot < R, other=0)
    there = (expert_row >= 0) & (expert_row < R)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (column < D)[None, :]
        dy = tl.load(grad + (slot // SLOTS)[:, None] * grad_row + column[None, :], mask=inside, other=0).to(tl.float32)
        products += dy * tl.load(rows + expert_row[:, None] * rows_row + column[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(d_rows + expert_row[:, None] * D + column[None, :], (weight[:, None] * dy).to(d_rows.dtype.element_ty), mask=inside)
    tl.store(d_weights + slot, tl.sum(products, 1), mask=slot < R)


def reduce_rows_backward(
    grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rows and of weights, from that of `reduce_rows` without `added`.

    Args:
        grad: (N, D) bf16 or float32.
        rows: (R, D) bf16 or float32, row-strided or contiguous.  slots: (N, S) int32, every one of the R = N * S rows once; a row that
            is in none keeps what happens to be in its memory as its gradient.
        weights: (N, S) float32.

    Returns:
        d_rows (R, D) of rows' dtype, d_weights (N, S) float32, summed in another order than the reference's; contiguous.
    """
    where = "reduce_rows_backward"
    _check(where, rows, slots, weights)
    num_rows, width = rows.shape
    if num_rows != slots.numel():
        raise ValueError(f"{where}: {num_rows} rows with slots {tuple(slots.shape)}, want {slots.numel()} rows, each in one slot")
    if grad.shape != (slots.shape[0], width) or grad.dtype not in _INPUTS:
        raise ValueError(f"{where}: grad is {tuple(grad.shape)} {grad.dtype}, want ({slots.shape[0]}, {width}) bfloat16 or float32")

    d_rows = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    d_weights = torch.empty(slots.shape, dtype=torch.float32, device=rows.device)

    if num_rows:
        tile_rows, tile_columns = tiles.SUM_BACKWARD.fit(max(width, 1))
        values, given = (value if value.stride(1) == 1 else value.contiguous() for value in (rows, grad))
        launch(
            _reduce_rows_backward_kernel,
            cdiv(num_rows, tile_rows),
            {
                "grad": given,
                "grad_row": given.stride(0),
                "rows": values,
                "rows_row": values.stride(0),
                "slots": slots.contiguous(),
                "weights": weights.contiguous(),
                "d_rows": d_rows,
                "d_weights": d_weights,
                "R": num_rows,
                "D": width,
                "SLOTS": slots.shape[1],
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
            },
            num_warps=tiles.SUM_BACKWARD.warps,
        )
    return d_rows, d_weights


@triton.jit(do_not_specialize=["P", "column_tiles"], do_not_specialize_on_alignment=["chunk"])
def _reduce_rows_chunk_kernel(
    rows,  # (P, D) bf16 or float32
    rows_row,
    slots,  # (N, SLOTS) int32, contiguous
    row_map,  # (P,) int32, contiguous
    chunk,  # (2,) int32
    out,  # (N, D) rows' dtype, contiguous
    carry,  # (N, D) int16, or None
    P,
    D,
    column_tiles,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first, end = tl.load(chunk), tl.load(chunk + 1)
    num_rows = tl.minimum(end - first, P)
    slot = tl.arange(0, PADDED_SLOTS)[None, :]
    # Programs walk over the chunk's rows, not over the sums, most of which have no row in a small chunk.
    for tile in range(tl.program_id(0), tl.where(num_rows > 0, tl.cdiv(num_rows, ROWS) * column_tiles, 0), tl.num_programs(0)):
        local = tile // column_tiles * ROWS + tl.arange(0, ROWS)
        column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
        row = tl.load(row_map + local, mask=local < num_rows, other=-1).to(tl.int64)
        expert_row = tl.load(slots + row[:, None] * SLOTS + slot, mask=(row >= 0)[:, None] & (slot < SLOTS), other=-1)
        lowest = tl.min(tl.where((expert_row >= first) & (expert_row < end), expert_row, end), axis=1)
        # The lowest of a sum's rows in the chunk computes it.
        mine = ((row >= 0) & (lowest == first + local))[:, None] & (column < D)[None, :]
        earlier = tl.max(((expert_row >= 0) & (expert_row < first)).to(tl.int32), axis=1)
        later = tl.max((expert_row >= end).to(tl.int32), axis=1)
        at = row[:, None] * D + column[None, :]
        goes_on = mine & (earlier > 0)[:, None]
        if carry is None:
            total = tl.load(out + at, mask=goes_on, other=0)
        else:
            upper = tl.load(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, mask=goes_on, other=0)
            lower = tl.load(carry + at, mask=goes_on, other=0)
            total = ((upper.to(tl.int32) << 16) | (lower.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
        for number in range(SLOTS):
            source = tl.load(slots + row * SLOTS + number, mask=row >= 0, other=-1)
            valid = ((source >= first) & (source < end))[:, None] & mine
            values = rows + (source - first).to(tl.int64)[:, None] * rows_row + column[None, :]
            total += tl.load(values, mask=valid, other=0).to(tl.float32)
        if carry is None:
            tl.store(out + at, total, mask=mine)
        else:
            unfinished = mine & (later > 0)[:, None]
            bits = total.to(tl.int32, bitcast=True)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mine & (later == 0)[:, None])
            tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, (bits >> 16).to(tl.int16), mask=unfinished)
            tl.store(carry + at, bits.to(tl.int16), mask=unfinished)


def reduce_rows_chunk(
    rows: torch.Tensor,
    slots: torch.Tensor,
    row_map: torch.Tensor,
    chunk: torch.Tensor,
    out: torch.Tensor,
    carry: torch.Tensor | None = None,
) -> None:
    """Partial sums of one chunk: every sum gets what the expert rows chunk[0] .. chunk[1] - 1 add to it.

    The reference has a worked example.

    Args:
        rows: (P, D) bf16 or float32, row-strided or contiguous; row i is expert row chunk[0] + i.
        slots: (N, S) int32, expert rows, -1 for none; none of them twice.
        row_map: (P,) int32, the inverse of slots: the sum that row i belongs to, -1 for none; only the chunk's first rows are read.
        chunk: (2,) int32 on the device; chunks come in rising order.
        out: (N, D) of rows' dtype, contiguous; sums without a slot in the chunk stay as they are, whatever that is.
        carry: (N, D) int16, contiguous, for bf16, None for float32, whose sums go on in out.
    """
    check_chunk_sums("reduce_rows_chunk", rows, slots, chunk, out, carry, row_map)

    if rows.numel() and slots.numel():
        programs, tile = tiles.CHUNK_SUM.grid(*rows.shape)
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        launch(
            _reduce_rows_chunk_kernel,
            min(programs, tiles.CHUNK_SUM_PROGRAMS),
            {
                "rows": values,
                "rows_row": values.stride(0),
                "slots": slots.contiguous(),
                "row_map": row_map.contiguous(),
                "chunk": chunk,
                "out": out,
                "carry": carry,
                "P": rows.shape[0],
                "D": rows.shape[1],
                "SLOTS": slots.shape[1],
                "PADDED_SLOTS": next_power_of_2(slots.shape[1]),
                **tile,
            },
            num_warps=tiles.CHUNK_SUM.warps,
        )

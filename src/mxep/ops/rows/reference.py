"""Movers: rows from one order into another, bytes unchanged.

A row map says for every row of the padded order which row of the packed order it is, -1 for padding.

>>> import torch
>>> row_map = torch.tensor([1, -1, 0], dtype=torch.int32)
>>> rows = torch.tensor([[1.0], [2.0]])
>>> gather_rows(rows, row_map).flatten().tolist()
[2.0, 0.0, 1.0]
>>> scatter_rows(gather_rows(rows, row_map), row_map, 2).flatten().tolist()
[1.0, 2.0]
"""

from __future__ import annotations

import torch

from mxep.ops.quantize.reference import quantize


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as uint8: indexing does not support fp8 on every device, and bytes must not change anyway."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def gather_rows(rows: torch.Tensor, row_map: torch.Tensor, num_valid_rows: torch.Tensor | None = None) -> torch.Tensor:
    """out[p] = rows[row_map[p]], zeros where row_map[p] is -1.

    Args:
        rows: (R, D) any dtype, row-strided or contiguous.  row_map: (P,) int32, every value in [-1, R).
        num_valid_rows: (1,) int32, how many rows of the output are wanted; the others are not defined.  Without effect here.

    Returns:
        (P, D) of the same dtype, contiguous.
    """
    source = _as_bytes(rows)
    there = row_map >= 0
    out = torch.zeros(row_map.shape[0], *rows.shape[1:], dtype=source.dtype, device=rows.device)
    out[there] = source[row_map[there].long()]
    return out.view(rows.dtype)


def gather_mx_rows(
    qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_valid_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows` of e4m3 data (R, D) and its scales (R, D/32) in one pass; padding rows are zero data with scale byte 0."""
    return gather_rows(qdata, row_map), gather_rows(scale, row_map)


def in_order(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_mx_rows` where there is a row map; None keeps the rows as they are."""
    return (qdata, scale) if row_map is None else gather_mx_rows(qdata, scale, row_map)


def gather_quantize(rows: torch.Tensor, row_map: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows` of plain rows (R, D), then quantised 1x32 along D: qdata (P, D) and scale (P, D/32), padding rows zero."""
    return quantize(gather_rows(rows, row_map), scaling_mode)


def scatter_rows(rows: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    """out[row_map[p]] = rows[p], the inverse of `gather_rows`.

    Args:
        rows: (P, D) any dtype.  row_map: (P,) int32, values in [-1, num_rows), no value but -1 twice.

    Returns:
        (num_rows, D) of the same dtype, contiguous; rows that no p points to are zero.
    """
    source = _as_bytes(rows)
    valid = row_map >= 0
    out = torch.zeros(num_rows, *rows.shape[1:], dtype=source.dtype, device=rows.device)
    out[row_map[valid].long()] = source[valid]
    return out.view(rows.dtype)


def scatter_mx_rows(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scatter_rows` of e4m3 data (P, D) and its scales (P, D/32) in one pass."""
    return scatter_rows(qdata, row_map, num_rows), scatter_rows(scale, row_map, num_rows)


# ---------------------------------------------------------------- sums of rows


def reduce_rows(
    rows: torch.Tensor, slots: torch.Tensor, added: torch.Tensor | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """out[n] = sum over s of rows[slots[n, s]], nothing where slots[n, s] is -1; in float32, s from left to right, rounded once.

    Args:
        rows: (R, D) bf16 or float32, row-strided or contiguous.  slots: (N, S) int32, every value in [-1, R).
        added: (N, D) bf16 or float32, the last term of every sum.
        weights: (N, S) float32, by which each row is multiplied; the product is rounded to float32 before it is added.

    Returns:
        (N, D) of rows' dtype, contiguous.

    >>> rows = torch.tensor([[1.0], [2.0], [4.0]])
    >>> reduce_rows(rows, torch.tensor([[0, 2], [-1, -1], [1, -1]])).flatten().tolist()
    [5.0, 0.0, 2.0]
    >>> reduce_rows(rows, torch.tensor([[0, 2]]), None, torch.tensor([[10.0, 1.0]])).flatten().tolist()
    [14.0]
    """
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for number, slot in enumerate(slots.unbind(1)):
        terms = gather_rows(rows, slot).float()
        total += terms if weights is None else weights[:, number, None].where(slot[:, None] >= 0, 0) * terms
    if added is not None:
        total += added.float()
    return total.to(rows.dtype)


def reduce_rows_backward(
    grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and of weights, from the gradient (N, D) of `reduce_rows` with weights and without `added`.

    Args:
        grad: (N, D) bf16 or float32.
        rows: (R, D) bf16 or float32, row-strided or contiguous.  slots: (N, S) int32, every one of the R = N * S rows once.
        weights: (N, S) float32.

    Returns:
        d_rows (R, D) of rows' dtype, d_rows[slots[n, s]] = weights[n, s] * grad[n], a product in float32, rounded; d_weights (N, S)
        float32, d_weights[n, s] = the sum over grad[n] * rows[slots[n, s]], in float32.  Both contiguous.

    >>> rows, slots, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0]]), torch.tensor([[10.0, 1.0]])
    >>> [grad.flatten().tolist() for grad in reduce_rows_backward(torch.tensor([[3.0]]), rows, slots, weights)]
    [[3.0, 30.0], [6.0, 3.0]]
    """
    d_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    d_weights = torch.empty(slots.shape, dtype=torch.float32, device=rows.device)
    wide = grad.float()
    for number, slot in enumerate(slots.long().unbind(1)):
        d_rows[slot] = (weights[:, number, None] * wide).to(rows.dtype)
        d_weights[:, number] = (wide * rows[slot].float()).sum(1)
    return d_rows, d_weights


def check_chunk_sums(
    where: str,
    rows: torch.Tensor,
    slots: torch.Tensor,
    chunk: torch.Tensor,
    out: torch.Tensor,
    carry: torch.Tensor | None,
    row_map: torch.Tensor | None = None,
    called: str = "out",
) -> None:
    """Raise ValueError for what `reduce_rows_chunk`, or `where`, whose `out` is `called` so, cannot take."""
    shape = slots.shape[0], rows.shape[-1]
    if rows.dim() != 2 or slots.dim() != 2 or rows.dtype not in (torch.bfloat16, torch.float32) or slots.dtype != torch.int32:
        got = f"rows {tuple(rows.shape)} {rows.dtype} with slots {tuple(slots.shape)} {slots.dtype}"
        raise ValueError(f"{where}: {got}, want (P, D) bfloat16 or float32 with (N, S) int32")
    if row_map is not None and (row_map.shape != rows.shape[:1] or row_map.dtype != torch.int32):
        raise ValueError(
            f"{where}: row_map is {tuple(row_map.shape)} {row_map.dtype}, want {tuple(rows.shape[:1])} int32, the sum of each row"
        )
    if chunk.shape != (2,) or chunk.dtype != torch.int32 or not chunk.is_contiguous():
        raise ValueError(f"{where}: chunk is {tuple(chunk.shape)} {chunk.dtype}, want (2,) int32, contiguous, first row and end")
    if out.shape != shape or out.dtype != rows.dtype or not out.is_contiguous():
        raise ValueError(f"{where}: {called} is {tuple(out.shape)} {out.dtype}, want {shape} {rows.dtype}, contiguous")
    wanted = rows.dtype == torch.bfloat16
    fits = carry is None or (carry.shape == shape and carry.dtype == torch.int16 and carry.is_contiguous())
    if (carry is not None) != wanted or not fits:
        got = "None" if carry is None else f"{tuple(carry.shape)} {carry.dtype}"
        raise ValueError(f"{where}: carry is {got}, want {f'{shape} int16, contiguous,' if wanted else 'None'} with {rows.dtype} rows")


def reduce_rows_chunk(
    rows: torch.Tensor,
    slots: torch.Tensor,
    row_map: torch.Tensor,
    chunk: torch.Tensor,
    out: torch.Tensor,
    carry: torch.Tensor | None = None,
) -> None:
    """Partial sums of one chunk: every sum gets what the expert rows chunk[0] .. chunk[1] - 1 add to it.

    A sum continues from chunk to chunk, in each in order of s, in float32: out holds the upper half of its bits and carry the lower
    half, until the chunk with its last slot rounds it once.  A sum whose slots are all in one chunk has the bits of `reduce_rows`.

    Args:
        rows: (P, D) bf16 or float32, row-strided or contiguous; row i is expert row chunk[0] + i.
        slots: (N, S) int32, expert rows, -1 for none; none of them twice.
        row_map: (P,) int32, the inverse of slots: the sum that row i belongs to, -1 for none.
        chunk: (2,) int32 on the device; chunks come in rising order.
        out: (N, D) of rows' dtype, contiguous; sums without a slot in the chunk stay as they are, whatever that is.
        carry: (N, D) int16, contiguous, for bf16, None for float32, whose sums go on in out.

    >>> rows, out = torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)
    >>> slots = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    >>> first, second = torch.tensor([[0, 1], [0, -1]], dtype=torch.int32)
    >>> reduce_rows_chunk(rows, slots, first, torch.tensor([0, 2], dtype=torch.int32), out)
    >>> reduce_rows_chunk(rows * 10, slots, second, torch.tensor([2, 4], dtype=torch.int32), out)
    >>> out.flatten().tolist()
    [11.0, 2.0]
    """
    check_chunk_sums("reduce_rows_chunk", rows, slots, chunk, out, carry, row_map)
    begin, end = chunk.tolist()
    here = row_map[: max(end - begin, 0)]
    mine = torch.zeros(slots.shape[0], dtype=torch.bool, device=slots.device)
    mine[here[here >= 0].long()] = True
    add_chunk_rows(rows, slots, mine, begin, end, out, carry)


def add_chunk_rows(
    rows: torch.Tensor, slots: torch.Tensor, mine: torch.Tensor, first: int, end: int, out: torch.Tensor, carry: torch.Tensor | None
) -> None:
    """`reduce_rows_chunk` of the sums `mine` (N,), a mask."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    earlier = ((slots >= 0) & (slots < first)).any(1)
    total[earlier] = out[earlier] if carry is None else torch.stack((carry, out.view(torch.int16)), -1).view(torch.float32)[..., 0][earlier]
    for column in slots.unbind(1):
        total += gather_rows(rows, torch.where((column >= first) & (column < end), column - first, -1)).float()
    goes_on = (slots >= end).any(1)
    done = mine & ~goes_on
    out[done] = total[done].to(out.dtype)
    if carry is None:
        out[mine & goes_on] = total[mine & goes_on]
    else:
        halves = total[mine & goes_on].view(torch.int16).unflatten(-1, (-1, 2))
        carry[mine & goes_on] = halves[..., 0]
        out.view(torch.int16)[mine & goes_on] = halves[..., 1]

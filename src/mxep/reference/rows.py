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

from mxep.reference.quantize import quantize


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as uint8: indexing knows no fp8 on every device, and bytes must not be touched anyway."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def gather_rows(rows: torch.Tensor, row_map: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    """out[p] = rows[row_map[p]], zeros where row_map[p] is -1.

    Args:
        rows: (R, D) any dtype, row-strided or contiguous.  row_map: (P,) int32, every value in [-1, R).
        live: (1,) int32, how many rows of the output are wanted; the others are not defined.  Without effect here.

    Returns:
        (P, D) of the same dtype, contiguous.
    """
    source = _as_bytes(rows)
    there = row_map >= 0
    out = torch.zeros(row_map.shape[0], *rows.shape[1:], dtype=source.dtype, device=rows.device)
    out[there] = source[row_map[there].long()]
    return out.view(rows.dtype)


def gather_mx_rows(
    qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, live: torch.Tensor | None = None
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
    live = row_map >= 0
    out = torch.zeros(num_rows, *rows.shape[1:], dtype=source.dtype, device=rows.device)
    out[row_map[live].long()] = source[live]
    return out.view(rows.dtype)


def scatter_mx_rows(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scatter_rows` of e4m3 data (P, D) and its scales (P, D/32) in one pass."""
    return scatter_rows(qdata, row_map, num_rows), scatter_rows(scale, row_map, num_rows)

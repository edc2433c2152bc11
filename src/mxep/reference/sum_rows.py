"""The sum of the rows that belong together, in a fixed order: what combine and dispatch's backward do at both ends of their wire.

>>> import torch
>>> rows = torch.tensor([[1.0], [2.0], [4.0]])
>>> sum_rows(rows, torch.tensor([[0, 2], [-1, -1], [1, -1]])).flatten().tolist()
[5.0, 0.0, 2.0]
"""

from __future__ import annotations

import torch

from mxep.reference.rows import gather_rows


def sum_rows(rows: torch.Tensor, slots: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """out[n] = sum over s of rows[slots[n, s]], nothing where slots[n, s] is -1; in float32, s from left to right, rounded once.

    Args:
        rows: (R, D) bf16 or float32, row-strided or contiguous.  slots: (N, S) int32, every value in [-1, R).
        added: (N, D) bf16 or float32, the last term of every sum.

    Returns:
        (N, D) of rows' dtype, contiguous.
    """
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in slots.unbind(1):
        total += gather_rows(rows, slot).float()
    if added is not None:
        total += added.float()
    return total.to(rows.dtype)

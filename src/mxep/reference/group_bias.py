"""A bias for the rows of each group, and what a row's score gets from it."""

from __future__ import annotations

import torch


def _of_rows(bias: torch.Tensor, offs: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, N) float32, each row's bias rounded to rows' dtype, and which rows are in a group (M, 1)."""
    groups = torch.searchsorted(offs.long(), torch.arange(rows.shape[0], device=rows.device), right=True)  # (M,), G behind the last end
    return torch.cat((bias, bias.new_zeros(1, bias.shape[1]))).to(rows.dtype).float()[groups], (groups < offs.shape[0])[:, None]


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
    """rows plus their group's bias, which is rounded to rows' dtype first; in float32, rounded once.

    Args:
        rows: (M, N) bf16 or float32, any strides.  bias: (G, N) bf16 or float32.  offs: (G,) int32 or int64 END rows of the groups.
        scores: (M,) float32, factors of the bias in each row; the product is rounded to float32 before it is added.

    Returns:
        (M, N) of rows' dtype, contiguous; rows behind the last group as they were.
    """
    added, grouped = _of_rows(bias, offs, rows)
    added = added if scores is None else scores[:, None] * added
    return torch.where(grouped, (rows.float() + added).to(rows.dtype), rows).contiguous()


def dot_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Each row's product with its group's bias, which is rounded to rows' dtype first: the gradient of a score that is the bias's factor.

    Args:
        rows, bias, offs: as in `add_group_bias`.

    Returns:
        (M,) float32, sums in an order of their own; 0 behind the last group.
    """
    factors, grouped = _of_rows(bias, offs, rows)
    return torch.where(grouped, rows.float() * factors, 0.0).sum(1)

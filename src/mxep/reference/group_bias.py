"""A bias for the rows of each group."""

from __future__ import annotations

import torch


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """rows plus their group's bias, which is rounded to rows' dtype first; the sum in float32, rounded once.

    Args:
        rows: (M, N) bf16 or float32, any strides.  bias: (G, N) bf16 or float32.  offs: (G,) int32 or int64 END rows of the groups.

    Returns:
        (M, N) of rows' dtype, contiguous; rows behind the last group as they were.
    """
    groups = torch.searchsorted(offs.long(), torch.arange(rows.shape[0], device=rows.device), right=True)  # (M,), G behind the last end
    added = torch.cat((bias, bias.new_zeros(1, bias.shape[1]))).to(rows.dtype).float()[groups]
    live = (groups < offs.shape[0])[:, None]
    return torch.where(live, (rows.float() + added).to(rows.dtype), rows).contiguous()

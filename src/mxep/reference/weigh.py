"""The weighted sum over a token's choices, and its gradients: what stands at the end of a layer on separate blocks."""

from __future__ import annotations

import torch


def weigh(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over c of weights[t, c] * rows[t, c]; in float32, rounded once.

    Args:
        rows: (T, C, D) bf16 or float32.  weights: (T, C) float32.

    Returns:
        (T, D) of rows' dtype, contiguous.
    """
    with torch.autocast(rows.device.type, enabled=False):  # it would round the weights to bf16
        return torch.einsum("tcd,tc->td", rows.float(), weights).to(rows.dtype).contiguous()


def weigh_backward(grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient (T, D) of `weigh`: those of rows (T, C, D) in rows' dtype and of weights (T, C) float32."""
    wide = grad.float()
    d_rows = (weights.unsqueeze(-1) * wide.unsqueeze(1)).to(rows.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        return d_rows, torch.einsum("tcd,td->tc", rows.float(), wide).contiguous()

"""The gradient of the router's logits, when the choice has been made."""

from __future__ import annotations

import torch

SCORE_FUNCTIONS = ("softmax", "sigmoid")
FLOOR = 1e-20  # of what scores are divided by: keeps 0 / 0 out when every one underflowed


def router_backward(
    logits: torch.Tensor,
    experts: torch.Tensor,
    counts: torch.Tensor,
    d_weights: torch.Tensor,
    d_loss: torch.Tensor,
    score_function: str,
    renormalize: bool,
    route_scale: float,
    balance: float,
    z: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the logits, from those of the chosen weights and of balance * balance loss + z * z-loss (mxep.moe.router has both).

    Args:
        logits: (T, E) float32.  experts: (T, C) int64, distinct in each row.  counts: (E,) int64, of choices; for `balance`.
        d_weights: (T, C) float32.  d_loss: () float32.
        score_function, renormalize, route_scale: how weights come from logits.  balance, z: factors of the losses, 0 for none.
        dtype: of the result.

    Returns:
        (T, E) `dtype`.

    Raises:
        ValueError: operands that do not fit.
    """
    check_router_backward(logits, experts, counts, d_weights, score_function)
    (T, E), C = logits.shape, experts.shape[1]
    softmax = logits.softmax(-1)
    scores = softmax if score_function == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, experts)
    d_chosen = d_weights
    if renormalize:
        total = chosen.sum(1, keepdim=True) + FLOOR
        d_chosen = (d_weights - (d_weights * chosen).sum(1, keepdim=True) / total) / total
    d_scores = torch.zeros_like(logits).scatter_(1, experts, d_chosen * route_scale)
    if balance:
        d_share = d_loss * balance * E / max(T, 1) * counts / max(T * C, 1)  # (E,), of a score's share of its token's scores
        total = scores.sum(1, keepdim=True) + FLOOR
        d_scores = d_scores + (d_share - (d_share * scores).sum(1, keepdim=True) / total) / total
    if score_function == "softmax":
        d_logits = scores * (d_scores - (d_scores * scores).sum(1, keepdim=True))
    else:
        d_logits = d_scores * scores * (1 - scores)
    if z:
        d_logits = d_logits + d_loss * z * 2 / max(T, 1) * logits.logsumexp(1, keepdim=True) * softmax
    return d_logits.to(dtype)


def check_router_backward(
    logits: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, d_weights: torch.Tensor, score_function: str
) -> None:
    """Raise ValueError unless these are `router_backward`'s operands."""
    (T, E), shape = logits.shape, experts.shape
    fits = experts.dim() == 2 and shape[0] == T and d_weights.shape == shape and counts.shape == (E,) and shape[1] <= E
    if not fits or logits.dtype != torch.float32 or d_weights.dtype != torch.float32 or experts.dtype != torch.int64:
        told = (logits, experts, counts, d_weights)
        got = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in told)
        raise ValueError(f"router_backward: {got}; want logits (T, E) float32, experts (T, C) int64, counts (E,), d_weights (T, C) float32")
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"router_backward: score_function={score_function!r}, want one of {SCORE_FUNCTIONS}")

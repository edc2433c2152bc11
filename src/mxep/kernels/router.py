"""The gradient of the router's logits in one launch, where autograd through the score function and both losses takes some forty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.reference.router import FLOOR, SCORE_FUNCTIONS, check_router_backward
from mxep.shapes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["T"])
def _router_backward_kernel(
    logits,  # (T, E) float32
    experts,  # (T, C) int64
    counts,  # (E,) int64
    d_weights,  # (T, C) float32
    d_loss,  # () float32
    out,  # (T, E)
    T,
    E: tl.constexpr,
    C: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BALANCE: tl.constexpr,
    Z: tl.constexpr,
    FLOOR: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,  # E as a power of two
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)[None, :]
    row = token.to(tl.int64)
    inside = (token < T)[:, None] & (expert < E)
    logit = tl.load(logits + row[:, None] * E + expert, mask=inside, other=0.0)
    most = tl.max(tl.where(expert < E, logit, float("-inf")), axis=1)[:, None]
    power = tl.where(expert < E, tl.exp(logit - most), 0.0)
    whole = tl.sum(power, axis=1)[:, None]
    softmax = power / whole
    if SOFTMAX:
        score = softmax
    else:
        score = tl.where(expert < E, 1.0 / (1.0 + tl.exp(-logit)), 0.0)

    total = tl.zeros((TOKENS, 1), tl.float32) + FLOOR
    weighted = tl.zeros((TOKENS, 1), tl.float32)
    if RENORMALIZE:
        for choice in range(C):
            mine = tl.load(experts + row * C + choice, mask=token < T, other=-1)[:, None] == expert
            chosen = tl.sum(tl.where(mine, score, 0.0), axis=1)[:, None]
            total += chosen
            weighted += chosen * tl.load(d_weights + row * C + choice, mask=token < T, other=0.0)[:, None]
    d_score = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for choice in range(C):
        mine = tl.load(experts + row * C + choice, mask=token < T, other=-1)[:, None] == expert
        d_chosen = tl.load(d_weights + row * C + choice, mask=token < T, other=0.0)[:, None]
        if RENORMALIZE:
            d_chosen = (d_chosen - weighted / total) / total
        d_score += tl.where(mine, d_chosen * SCALE, 0.0)
    tokens = T.to(tl.float32)
    if BALANCE != 0:
        count = tl.load(counts + expert, mask=expert < E, other=0).to(tl.float32)
        d_share = tl.load(d_loss) * BALANCE * E / tokens * count / (tokens * C)
        all_scores = tl.sum(score, axis=1)[:, None] + FLOOR
        d_score += (d_share - tl.sum(d_share * score, axis=1)[:, None] / all_scores) / all_scores
    if SOFTMAX:
        d_logit = score * (d_score - tl.sum(d_score * score, axis=1)[:, None])
    else:
        d_logit = d_score * score * (1.0 - score)
    if Z != 0:
        d_logit += tl.load(d_loss) * Z * 2 / tokens * (most + tl.log(whole)) * softmax
    tl.store(out + row[:, None] * E + expert, d_logit.to(out.dtype.element_ty), mask=inside)


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
    """Gradient of the logits (T, E), from those of the chosen weights and of the losses. Twin: `reference.router_backward`."""
    check_router_backward(logits, experts, counts, d_weights, score_function)
    (T, E), C = logits.shape, experts.shape[1]
    out = torch.empty((T, E), dtype=dtype, device=logits.device)
    if out.numel():
        columns = next_power_of_2(E)
        tokens = max(1, tiles.ROUTER_SCORES // columns)
        launch(
            _router_backward_kernel,
            cdiv(T, tokens),
            {
                "logits": logits.contiguous(),
                "experts": experts.contiguous(),
                "counts": counts.contiguous(),
                "d_weights": d_weights.contiguous(),
                "d_loss": d_loss,
                "out": out,
                "T": T,
                "E": E,
                "C": C,
                "SOFTMAX": score_function == SCORE_FUNCTIONS[0],
                "RENORMALIZE": renormalize,
                "SCALE": route_scale,
                "BALANCE": balance,
                "Z": z,
                "FLOOR": FLOOR,
                "TOKENS": tokens,
                "EXPERTS": columns,
            },
            num_warps=tiles.ROUTER_WARPS,
        )
    return out

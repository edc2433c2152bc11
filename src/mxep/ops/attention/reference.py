"""Causal attention of sequences, or of the documents in them, with the log-sum-exp that its backward starts from.

q (B, S, H, width), k (B, S, heads, width) and v (B, S, heads, value width); `heads` divides H.  Documents are given by `starts`, int32
(N + 1,): document n has the tokens starts[n] to starts[n + 1] - 1 of the B * S concatenated ones, and lies in one sequence.  Without
`starts` each sequence is one document.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _log_shares(q: Tensor, k: Tensor, scale: float, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores less their log-sum-exp (B, H, S, S), and that (B, H, S, 1), at least float32; a token sees none after it."""
    batch, length, wide = q.shape[0], q.shape[1], torch.promote_types(q.dtype, torch.float32)
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if starts is not None:
        index = torch.arange(batch * length, dtype=starts.dtype, device=q.device)
        document = torch.searchsorted(starts, index, right=True).view(batch, 1, length)
        seen = seen & (document.unsqueeze(3) == document.unsqueeze(2))
    scores = scale * q.to(wide).transpose(1, 2) @ _heads_of(k, q).to(wide).permute(0, 2, 3, 1)
    scores = scores.masked_fill(~seen, -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    return scores - sums, sums


def _heads_of(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None = None, longest: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of every token to itself and the earlier tokens of its document.

    Args:
        q, k, v, starts: see above.
        scale: of the scores.
        longest: tokens in one document, at most; with `starts` alone, and no part of the result.

    Returns:
        The result (B, S, H, value width) in q's dtype, and the scores' log-sum-exp, at least float32: (B, H, S), with `starts`
        (H, B * S).
    """
    shares, sums = _log_shares(q, k, scale, starts)
    out = (shares.exp() @ _heads_of(v, q).to(shares.dtype).transpose(1, 2)).transpose(1, 2).to(q.dtype)
    sums = sums.squeeze(-1)
    return out.contiguous(), sums if starts is None else sums.transpose(0, 1).flatten(1)


def causal_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
    starts: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their shapes and dtypes, from that of `causal_attention`'s result and both of its results."""
    logs, _ = _log_shares(q, k, scale, starts)
    shares = logs.exp()
    grad, result, queries = (x.to(shares.dtype).transpose(1, 2) for x in (grad, out, q))  # (B, H, S, width)
    keys, values = (_heads_of(x, q).to(shares.dtype).transpose(1, 2) for x in (k, v))
    d_scores = scale * shares * (grad @ values.mT - (grad * result).sum(-1, keepdim=True))

    def of_heads(d: Tensor, like: Tensor) -> Tensor:
        return d.transpose(1, 2).unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)

    return (d_scores @ keys).transpose(1, 2).contiguous().to(q.dtype), of_heads(d_scores.mT @ queries, k), of_heads(shares.mT @ grad, v)

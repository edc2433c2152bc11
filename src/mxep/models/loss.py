"""Cross-entropy of an output projection, chunk by chunk of tokens: all logits at once never exist, in forward nor in backward.

131072 tokens x 102400 words would be 50 GiB in float32; a chunk of 2048 tokens is 800 MiB.  Backward computes a chunk's logits again.
V words of the vocabulary, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mxep.mx.in_graph import in_graph

IGNORE = -100  # label that takes no part in the loss
CHUNK_TOKENS = 2048  # each reads and writes the weight's gradient once more in float32


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Sum of the cross-entropy of hidden @ weight^T over the labels that are not IGNORE, in nats.

    The numbers of `F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORE, reduction="sum")` up to the order of sums;
    the weight's gradient is summed over chunks in float32 and rounded once.

    Args:
        hidden: (T, D) bf16, float32 or float64.
        weight: (V, D), same dtype.
        labels: (T,) int64, each 0 to V - 1 or IGNORE.
        chunk_tokens: tokens whose logits exist at a time.

    Returns:
        () float32, float64 where hidden is.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
        raise ValueError(f"linear_cross_entropy: {shapes}, want (T, D), (V, D), (T,)")
    if hidden.dtype != weight.dtype or labels.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy: {hidden.dtype}, {weight.dtype}, labels {labels.dtype}, want two equal ones and int64")
    if chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens={chunk_tokens}, want 1 or more")
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 or wider, left in float32 or float64: partial sums rounded to bf16 would add an error for every chunk."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


@in_graph  # traced by dynamo of torch 2.11, its gradients would be wrong
class _LinearCrossEntropy(torch.autograd.Function):
    """Saves hidden, weight, labels and one logsumexp per token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        lse = loss.new_empty(labels.shape)
        for start in range(0, labels.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = hidden[part] @ weight.t()  # (t, V), rounded as a projection would
            wanted = labels[part].clamp(min=0).unsqueeze(-1)
            log_share = logits.log_softmax(-1, dtype=wide).gather(-1, wanted).squeeze(-1)  # on GPUs no float32 copy of the logits
            lse[part] = logits.gather(-1, wanted).squeeze(-1) - log_share
            loss -= log_share.masked_fill(labels[part] == IGNORE, 0.0).sum()
        ctx.save_for_backward(hidden, weight, labels, lse)
        ctx.chunk_tokens = chunk_tokens
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, labels.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            logits = hidden[part] @ weight.t()
            d_logits = (logits - lse[part].unsqueeze(-1)).exp_()  # softmax (t, V), float32 or float64
            ones = torch.full_like(lse[part], -1.0).unsqueeze(-1)
            d_logits.scatter_add_(-1, labels[part].clamp(min=0).unsqueeze(-1), ones)
            factor = torch.where(labels[part] == IGNORE, torch.zeros_like(grad), grad).unsqueeze(-1)
            rounded = torch.mul(d_logits, factor, out=logits)  # in one pass, without a rounded copy
            del d_logits
            if d_hidden is not None:
                d_hidden[part] = rounded @ weight
            if d_weight is not None:
                d_weight += _wide_product(rounded.t(), hidden[part])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


class OutputProjection(nn.Linear):
    """D -> V without bias; with labels it returns their loss instead of the logits (a module, so that FSDP gathers the weight here too)."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """input (B, S, D) -> logits (B, S, V), or with labels (B, S) their summed cross-entropy, ()."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input.flatten(0, -2), self.weight, labels.flatten())

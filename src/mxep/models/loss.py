"""Cross-entropy of an output projection, in chunks of tokens: the logits of all tokens never exist at once.

131072 tokens x 102400 words would be 25 GiB in bf16; a chunk of 4096 tokens is 800 MiB.  If a gradient is needed, forward computes it from
each chunk's logits, so nothing is computed twice: three products in all.  Backward multiplies by the incoming gradient.  Saved for
backward, in float32: the gradients of hidden (T, D) and weight (V, D).  V words of the vocabulary, T tokens.

    forward, of each chunk (t tokens)
    logits   (t, V) = hidden @ weight^T                rounded as a projection's
    losses   (t,)   = cross_entropy(logits)            float32; if a gradient is needed, softmax - onehot overwrites the logits
    d_hidden (t, D) = logits @ weight                  float32
    d_weight (V, D) += logits^T @ hidden               float32
    backward
    both times the incoming gradient                   rounded once to the operands' dtype
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mxep.operators  # noqa: F401
from mxep.mx.compile import in_graph
from mxep.ops.cross_entropy.reference import IGNORE as IGNORE

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
CHUNK_TOKENS = 4096  # each chunk reads and writes the weight's float32 gradient


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Sum of the cross-entropy of hidden @ weight^T over the labels that are not IGNORE, in nats.

    The result is that of `F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORE, reduction="sum")` up to the order of
    sums; the weight's gradient is summed over chunks in float32 and rounded once.  torch.autocast has no effect.  Forward computes the
    gradients, so use `torch.no_grad` if no backward follows, and no activation checkpointing, which would compute them twice.

    Args:
        hidden: (T, D) bf16, float32 or float64.
        weight: (V, D), same dtype.
        labels: (T,) int64, each 0 to V - 1 or IGNORE.  Any other value raises on a CPU; on a GPU, where a check would need a host sync,
            the loss is NaN.
        chunk_tokens: tokens per chunk.

    Returns:
        () float32; float64 if hidden is float64.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
        raise ValueError(f"linear_cross_entropy: {shapes}, want (T, D), (V, D), (T,)")
    if hidden.dtype not in _DTYPES or hidden.dtype != weight.dtype or labels.dtype != torch.int64:
        got = f"hidden {hidden.dtype}, weight {weight.dtype}, labels {labels.dtype}"
        raise ValueError(f"linear_cross_entropy: {got}, want two equal ones and int64; of bfloat16, float32, float64")
    if not hidden.device == weight.device == labels.device:
        got = f"hidden on {hidden.device}, weight on {weight.device}, labels on {labels.device}"
        raise ValueError(f"linear_cross_entropy: {got}, want one device; move them there")
    if chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens={chunk_tokens}, want 1 or more")
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled())


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 or wider, in float32 or float64: rounding each chunk's partial sum to bf16 would add errors."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * factor, rounded once; the saved gradient is unchanged, for a retained graph."""
    return None if gradient is None else torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


@in_graph  # traced by dynamo of torch 2.11, its gradients would be wrong
class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients of the operands that need one, for an incoming gradient of 1, in float32 or float64."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, grad_mode: bool) -> Tensor:
        """`grad_mode`: of the caller; here it is always off."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        for_hidden, for_weight = (grad_mode and needed for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden, dtype=wide) if for_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if for_weight and not labels.shape[0] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, labels.shape[0], chunk_tokens):
                part = slice(start, start + chunk_tokens)
                logits = hidden[part] @ weight.t()
                if not (for_hidden or for_weight):
                    loss += torch.ops.mxep.cross_entropy(logits, labels[part]).sum()
                else:
                    loss += torch.ops.mxep.cross_entropy_to_gradient(logits, labels[part]).sum()
                if d_hidden is not None:
                    d_hidden[part] = _wide_product(logits, weight)
                if for_weight:
                    product = _wide_product(logits.t(), hidden[part])
                    d_weight = product if d_weight is None else d_weight.add_(product)
                    del product  # before the next one is allocated
                del logits  # before the next chunk's are allocated
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return _scaled(d_hidden, grad, ctx.dtype), _scaled(d_weight, grad, ctx.dtype), None, None, None


class OutputProjection(nn.Linear):
    """D -> V without bias; with labels it returns the loss instead of the logits. As a module, its weight is gathered by FSDP."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """input (B, S, D) -> logits (B, S, V), or with labels (B, S) their summed cross-entropy, ()."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input.flatten(0, -2), self.weight, labels.flatten())

"""The router's product, tokens times gate, and its gradients, in float32 or in the tokens' dtype.

On GPUs the float32 product of bf16 tokens runs on bf16 tensor cores.  A float32 value is exactly the sum of three bf16 values, and the
product of two bf16 values is exact in float32, so three products in bf16 that are summed in float32 lose nothing but what the sums round.
Tensor cores cut their sums after each 16 products, so the error relative to the exact logits grows with the width D: below
1e-6 + D / 16 * 2^-25 (tests/gpu/test_router.py), 1.4e-5 for D = 7168, where a product rounded to bf16 has 2e-3.  They need no float32 copy
of the tokens, and TF32, which a process may have switched on for its float32 GEMMs, does not touch them.  Everywhere else this
is torch's float32 GEMM.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.moe.config import RouterDtype
from mxep.mx.compile import in_graph


def logits_of(tokens: Tensor, weight: Tensor, router_dtype: RouterDtype) -> Tensor:
    """tokens (T, D), weight (E, D) -> logits (T, E), in float32, or with "bf16" in the tokens' dtype or autocast's.

    Differentiable by autograd with "bf16" alone; `RouterProduct` is the float32 product with its gradients.
    """
    if router_dtype == "bf16":
        return F.linear(tokens, weight.to(tokens.dtype))
    with without_autocast(tokens):
        if _in_parts(tokens, tokens.dtype):
            parts = bf16_parts(weight)
            return _mm_float32(tokens, torch.cat(parts).t()).unflatten(1, (len(parts), -1)).sum(1)
        return F.linear(tokens.float(), weight.float())


def logits_backward(
    d_logits: Tensor, tokens: Tensor | None, weight: Tensor, router_dtype: RouterDtype, dtype: torch.dtype, needs_tokens: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `logits_of`: of the tokens (T, D), which are of `dtype`, if they need one; of the weight (E, D) if tokens are given.

    d_logits (T, E) is float32, or with "bf16" of `dtype`; so are both products, each rounded once, to the dtype of its result.
    """
    with without_autocast(d_logits):
        if router_dtype == "fp32" and _in_parts(d_logits, dtype):
            return _backward_in_parts(d_logits, tokens, weight, needs_tokens)
        made_in = dtype if router_dtype == "bf16" else torch.float32
        d_tokens = (d_logits @ weight.to(made_in)).to(dtype) if needs_tokens else None
        d_weight = None if tokens is None else (d_logits.t() @ tokens.to(made_in)).to(weight.dtype)
    return d_tokens, d_weight


def _backward_in_parts(d_logits: Tensor, tokens: Tensor | None, weight: Tensor, needs_tokens: bool) -> tuple[Tensor | None, Tensor | None]:
    """`logits_backward` of bf16 tokens on a GPU."""
    d_parts, parts = bf16_parts(d_logits), bf16_parts(weight)
    d_tokens = d_weight = None
    if needs_tokens:  # rounded to bf16: products of later parts are below 2^-15 of it
        pairs = [(i, j) for i in range(2) for j in range(min(2, len(parts))) if i + j < 2]
        d_tokens = torch.cat([d_parts[i] for i, _ in pairs], 1) @ torch.cat([parts[j] for _, j in pairs])
    if tokens is not None:
        d_weight = _mm_float32(torch.cat(d_parts, 1).t(), tokens).unflatten(0, (len(d_parts), -1)).sum(0).to(weight.dtype)
    return d_tokens, d_weight


def bf16_parts(value: Tensor) -> tuple[Tensor, ...]:
    """Tensors in bf16 whose sum is `value`: three of a float32 one, each the rounding of what those before it leave; a bf16 one itself.

    >>> [part.item() for part in bf16_parts(torch.tensor(1 + 2**-10 + 2**-20))]
    [1.0, 0.0009765625, 9.5367431640625e-07]
    """
    if value.dtype == torch.bfloat16:
        return (value,)
    first = value.bfloat16()
    rest = value - first
    second = rest.bfloat16()
    return first, second, (rest - second).bfloat16()


def _in_parts(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the float32 product of tokens of `dtype` is made of bf16 parts where `tensor` is, if there are any."""
    return tensor.is_cuda and dtype == torch.bfloat16 and tensor.numel() > 0


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """bf16 (M, K) and (K, N) -> (M, N) float32, not rounded in between."""
    return torch.mm(a, b, out_dtype=torch.float32)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Autocast, where it is on, would round the operands of a product to bf16."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@in_graph
class RouterProduct(torch.autograd.Function):
    """`logits_of` in float32; backward keeps the tokens in their own dtype."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        """(T, D), (E, D) -> (T, E) float32."""
        ctx.save_for_backward(tokens, weight)
        return logits_of(tokens, weight, "fp32")

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        """(T, E) float32 -> those of tokens and weight in their dtypes."""
        (tokens, weight), (needs_tokens, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        return logits_backward(d_logits, tokens if needs_weight else None, weight, "fp32", tokens.dtype, needs_tokens)

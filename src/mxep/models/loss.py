"""Cross-entropy of an output projection, in chunks of tokens: the logits of all tokens never exist at once.

131072 tokens x 102400 words would be 25 GiB in bf16; a chunk of 4096 tokens is 800 MiB.  If a gradient is needed, forward computes it from
each chunk's logits, so nothing is computed twice: three products in all.  Backward multiplies by the incoming gradient.  Saved for
backward: the gradients of hidden (T, D) and weight (V, D).  V words of the vocabulary, T tokens.

    forward, of each chunk (t tokens)                  in high precision                   by a recipe with MXFP8 GEMMs
    logits   (t, V) = hidden @ weight^T                rounded as a projection's           hidden and weight 1x32 along D
    losses   (t,)   = cross_entropy(logits)            float32; if a gradient is needed, softmax - onehot overwrites the logits
    d_hidden (t, D) = logits @ weight                  float32                             logits and weight 1x32 along V; hidden's dtype
    d_weight (V, D) += logits^T @ hidden               float32                             as the recipe's wgrad; float32
    backward
    both times the incoming gradient                   rounded once to the operands' dtype

The MXFP8 products are those of the experts (`mxep.grouped_mm`), with one group.  The weight is quantised once for all chunks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxep.operators  # noqa: F401
from mxep.checks import check_count, check_tensors, values_checked
from mxep.grouped_mm.products import GemmOptions, Weights, gemm_options, multiply_rows
from mxep.grouped_mm.wgrad_gemm import add_wgrad
from mxep.mx.compile import in_graph
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.ops.cross_entropy.reference import IGNORE as IGNORE
from mxep.recipe import Recipe, TakesRecipe, resolve_recipe
from mxep.shapes import MX_BLOCK

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_WHERE = "linear_cross_entropy"
CHUNK_TOKENS = 4096  # each chunk reads and writes the weight's float32 gradient


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    recipe: str | Recipe = "hp",
    reduction: Literal["sum", "mean"] = "sum",
    kept: CachedWeight | None = None,
) -> Tensor:
    """The cross-entropy of hidden @ weight^T over the labels that are not IGNORE (-100), in nats, with one chunk of logits at a time.

    The result is that of `F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORE, reduction=reduction)` up to the order
    of sums, and with an MXFP8 recipe up to the rounding of its operands.  The weight's gradient is summed over chunks in float32 and
    rounded once.  torch.autocast has no effect.  Forward computes the gradients, so use `torch.no_grad` if no backward follows, and no
    activation checkpointing, which would compute them twice.

    Args:
        hidden: (T, D) bf16, float32 or float64.
        weight: (V, D), same dtype.
        labels: (T,) int64, each 0 to V - 1 or IGNORE.  Any other value raises on a CPU; on a GPU, where a check would need a host sync,
            the loss is NaN.
        chunk_tokens: tokens per chunk.
        recipe: of the three products: GEMM, wgrad, scaling mode and path are what it reads of it.  MXFP8 takes bf16 or float32, and D is a
            multiple of 32.  A vocabulary that is none is padded with zeros, in a copy of the weight in every call.
        reduction: "sum", or "mean" over the labels that are not IGNORE.
        kept: the weight's entry in a `WeightCache`; None quantises it in every call.  Not for use in a compiled graph.

    Returns:
        () float32; float64 if hidden is float64.  If all labels are IGNORE: 0 as sum, NaN as mean, as F.cross_entropy; gradients are zero.

    Raises:
        ValueError: shapes, dtypes or devices do not match; a dtype or width that MXFP8 does not have.

    Examples:
        >>> hidden, weight = torch.randn(8, 64, requires_grad=True), torch.randn(100, 64, requires_grad=True)
        >>> labels = torch.randint(100, (8,))
        >>> loss = mxep.linear_cross_entropy(hidden, weight, labels, recipe="mxfp8_wgrad_with_mx", reduction="mean")
        >>> loss.backward()
        >>> want = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
        >>> bool((loss - want).abs() < 0.02 * want), weight.grad.shape
        (True, torch.Size([100, 64]))
    """
    check_tensors(_WHERE, hidden=hidden, weight=weight, labels=labels)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
        raise ValueError(f"{_WHERE}: {shapes}, want (T, D), (V, D), (T,)")
    if hidden.dtype not in _DTYPES or hidden.dtype != weight.dtype or labels.dtype != torch.int64:
        got = f"hidden {hidden.dtype}, weight {weight.dtype}, labels {labels.dtype}"
        raise ValueError(f"{_WHERE}: {got}, want two equal ones and int64; of bfloat16, float32, float64")
    if not hidden.device == weight.device == labels.device:
        got = f"hidden on {hidden.device}, weight on {weight.device}, labels on {labels.device}"
        raise ValueError(f"{_WHERE}: {got}, want one device; move them there")
    check_count(_WHERE, "chunk_tokens", chunk_tokens)
    if labels.device.type == "cpu" and values_checked(labels):  # with the words that there are: chunks may pad them
        wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= weight.shape[0]))]
        if wrong.numel():
            raise ValueError(f"{_WHERE}: label {int(wrong[0])}, want 0 to {weight.shape[0] - 1} or {IGNORE}, which takes no part")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"{_WHERE}: reduction={reduction!r}, want 'sum' or 'mean'; the losses of single tokens are never kept")
    if recipe is None:
        raise ValueError(f"{_WHERE}: recipe is None, want a preset's name or a Recipe; 'hp', the default, multiplies in hidden's dtype")
    chosen, gemm = resolve_recipe(recipe), None
    if chosen.gemm == "mxfp8":
        check_mx_projection(_WHERE, chosen, hidden.shape[1])
        if hidden.dtype == torch.float64:
            raise ValueError(f"{_WHERE}: float64 with recipe {chosen.name!r}, want bfloat16 or float32; cast it, or use recipe='hp'")
        mode = chosen.scaling_mode.value
        gemm = gemm_options(hidden.device, hidden.dtype, chosen.gemm_path, chosen.wgrad, mode)
    total = _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled(), gemm, kept)
    if reduction == "sum":
        return total
    count = (labels != IGNORE).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)  # NaN without a NaN in any gradient


def check_mx_projection(where: str, recipe: Recipe, dim: int) -> None:
    """Raise ValueError unless hidden states of width `dim` can be multiplied by the recipe."""
    if recipe.gemm == "mxfp8" and dim % MX_BLOCK:
        raise ValueError(f"{where}: D = {dim} with recipe {recipe.name!r}, want a multiple of {MX_BLOCK} (one MX block); use recipe='hp'")


class _HighPrecision:
    """The products of a chunk as torch computes them, gradients in float32 or float64."""

    def __init__(self, weight: Tensor, for_hidden: bool, for_weight: bool) -> None:
        self.weight, self.for_weight, self.needs_gradient = weight, for_weight, for_hidden or for_weight
        self.gradient_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.d_weight: Tensor | None = None

    def chunk_loss(self, hidden: Tensor, labels: Tensor, d_hidden: Tensor | None) -> Tensor:
        """The chunk's loss (); writes its gradient of hidden into `d_hidden` and adds its part of `d_weight`, where they are needed."""
        logits = hidden @ self.weight.t()
        if not self.needs_gradient:
            return torch.ops.mxep.cross_entropy(logits, labels).sum()
        loss = torch.ops.mxep.cross_entropy_to_gradient(logits, labels).sum()
        if d_hidden is not None:
            d_hidden.copy_(_wide_product(logits, self.weight))
        if self.for_weight:
            self.d_weight = _wide_product(logits.t(), hidden, self.d_weight)
        return loss

    def weight_gradient(self) -> Tensor | None:
        """(V, D) after all chunks; None if it is not needed."""
        if self.for_weight and self.d_weight is None:  # no chunk
            return torch.zeros_like(self.weight, dtype=self.gradient_dtype)
        return self.d_weight


class _MX:
    """The same by a recipe with MXFP8 GEMMs.  The weight is padded with zeros to V' words, whole MX blocks."""

    def __init__(self, weight: Tensor, for_hidden: bool, for_weight: bool, gemm: GemmOptions, kept: CachedWeight | None) -> None:
        self.gemm = gemm if for_weight else gemm._replace(wgrad="none")
        self.words, self.needs_gradient, self.gradient_dtype = weight.shape[0], for_hidden or for_weight, weight.dtype
        extra = -self.words % MX_BLOCK
        padded = F.pad(weight, (0, 0, 0, extra)) if extra else weight
        self.weights = Weights(padded[None], None, self.gemm, None if extra else kept, keep=True)
        if for_hidden:
            self.weights.make_both()
        self.d_weight = padded.new_zeros((1, *padded.shape), dtype=torch.float32) if for_weight else None  # (1, V', D)

    def chunk_loss(self, hidden: Tensor, labels: Tensor, d_hidden: Tensor | None) -> Tensor:
        if self.gemm.wgrad == "mxfp8" and (extra := -hidden.shape[0] % MX_BLOCK):  # 32x1 blocks are whole
            hidden, labels = F.pad(hidden, (0, 0, 0, extra)), F.pad(labels, (0, extra), value=IGNORE)
        ends = torch.full((1,), hidden.shape[0], dtype=torch.int32, device=hidden.device)  # one group
        logits, rows, _ = multiply_rows(hidden, self.weights, "forward", ends, for_wgrad=self.d_weight is not None)  # (t, V')
        assert logits is not None
        if logits.shape[1] > self.words:
            logits[:, self.words :] = -torch.inf  # words that do not exist have no share, and no gradient
            labels = labels.masked_fill(labels >= self.words, logits.shape[1])  # nor are they labels
        if not self.needs_gradient:
            return torch.ops.mxep.cross_entropy(logits, labels).sum()
        loss = torch.ops.mxep.cross_entropy_to_gradient(logits, labels).sum()
        needs = d_hidden is not None, self.d_weight is not None
        made, grad, _ = multiply_rows(logits, self.weights, "dgrad", ends, None, *needs)
        if d_hidden is not None and made is not None:
            d_hidden.copy_(made[: d_hidden.shape[0]])
        if self.d_weight is not None:
            assert grad is not None
            assert rows is not None
            add_wgrad(self.d_weight, grad, rows, ends, self.gemm)
        return loss

    def weight_gradient(self) -> Tensor | None:
        return None if self.d_weight is None else self.d_weight[0, : self.words]


def _wide_product(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """a @ b of bf16 or wider, in float32 or float64: rounding each chunk's partial sum to bf16 would add errors.

    `total` (in that dtype) is added, in place, by the product itself: a pass of its own would read and write as much again.  In graphs
    it has one, since torch 2.11 takes addmm's out_dtype for its beta there.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    if not (a.is_cuda and a.dtype == torch.bfloat16):
        a, b = a.to(wide), b.to(wide)
        return a @ b if total is None else total.addmm_(a, b)
    if total is None or type(total) is not Tensor:
        product = torch.mm(a, b, out_dtype=wide)
        return product if total is None else total.add_(product)
    return torch.addmm(total, a, b, out_dtype=wide, out=total)


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * factor, rounded once; the saved gradient is unchanged, for a retained graph."""
    return None if gradient is None else torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


@in_graph  # traced by dynamo of torch 2.11, its gradients would be wrong
class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients of the operands that need one, for an incoming gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        grad_mode: bool,
        gemm: GemmOptions | None,
        kept: CachedWeight | None,
    ) -> Tensor:
        """`grad_mode`: of the caller; here it is always off.  `gemm`: of MXFP8 products; None: high precision."""
        for_hidden, for_weight = (grad_mode and needed for needed in ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            products = _HighPrecision(weight, for_hidden, for_weight) if gemm is None else _MX(weight, for_hidden, for_weight, gemm, kept)
            d_hidden = torch.empty_like(hidden, dtype=products.gradient_dtype) if for_hidden else None
            for start in range(0, labels.shape[0], chunk_tokens):
                part = slice(start, start + chunk_tokens)
                loss += products.chunk_loss(hidden[part], labels[part], None if d_hidden is None else d_hidden[part])
        ctx.save_for_backward(d_hidden, products.weight_gradient())
        ctx.dtype = hidden.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return _scaled(d_hidden, grad, ctx.dtype), _scaled(d_weight, grad, ctx.dtype), None, None, None, None, None


class OutputProjection(TakesRecipe, nn.Linear):
    """D -> V without bias; with labels it returns the loss instead of the logits. As a module, its weight is gathered by FSDP.

    Attributes:
        recipe: of the loss (`linear_cross_entropy`); logits without labels are in high precision.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.recipe = "hp"
        self._kept: CachedWeight | None = None

    def keep_quantized(self, cache: WeightCache | None) -> None:
        """Quantise the weight once per step of `cache`, None: in every call. See `mxep.parallel.cache_quantized_weights`."""
        self._kept = None if cache is None or self.recipe.gemm != "mxfp8" else CachedWeight(cache, self, "weight")

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """input (B, S, D) -> logits (B, S, V), or with labels (B, S) their summed cross-entropy, ()."""
        if labels is None:
            return super().forward(input)
        kept = None if torch.compiler.is_compiling() else self._kept  # a graph would keep the bytes of its first call for ever
        return linear_cross_entropy(input.flatten(0, -2), self.weight, labels.flatten(), recipe=self.recipe, kept=kept)

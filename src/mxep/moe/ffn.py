"""Stop 3 as one autograd function: gate and up in one GEMM, activation and quantiser in one pass, the activation made again in backward.

before, after  as in moe/experts.py, whose `Experts.fused` switches it on; for recipes with MXFP8 GEMMs and a wgrad of "hp" or "mx"
forward   x 1x32 along D times [w1 | w3] -> gate and up (P, 2H), rounded once to hp; their biases and the activation in float32,
          straight to MX h; times w2 -> y, plus its bias
backward  dh = dy times w2 along D; one pass over dh and [gate | up] makes [dgate | dup] in MX for dx, in hp for "hp" wgrad, and h again,
          in the form that wgrad reads; [dgate | dup] 1x32 along 2H times [w1 | w3] -> dx, one sum, rounded once
wgrad     "hp": hp gradients, hp h and the values of x and dy.  "mx": the MX bytes of all four, on FP8 cores where these are there
saves     x as it came (its MX bytes for "mx") and gate and up (P, 2H): neither h nor what the gate lets through
no gate   "relu2": w1 alone, (P, H) where (P, 2H) stands
host syncs  none on GPUs outside of checking mode

Making h again costs no read, since backward reads gate and up for dgate anyway, and as many bytes written as forward would have to
write beside its MX form: so it is saved nowhere.  wgrad from MX forms puts the error of dW against float64 at 1.03 to 1.16 times that of
the "hp" one (1.14 to 1.32 times where x and dy come in high precision) on the data of the tests: a choice, and not the default.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.checks import check_mode
from mxep.grouped_mm.bias import bias_grad
from mxep.grouped_mm.function import check_operands
from mxep.grouped_mm.products import (
    Forms,
    GemmOptions,
    Weights,
    dgrad_form,
    dgrad_gemm,
    form_names,
    forward_gemm,
    gemm_options,
    mx_gemm,
    saved_tensors,
    shared_form,
    wgrad_form,
    wgrad_gate_up,
    wgrad_gemm,
)
from mxep.moe.config import check_activation
from mxep.mx.compile import in_graph
from mxep.mx.tensor import MXTensor, dequantize_data, reject_border
from mxep.mx.weight_cache import CachedWeight
from mxep.ops.activation.functions import ActivationName, SwiGLU, is_gated
from mxep.ops.activation.reference import LAYOUTS
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_WHERE = "expert_ffn"
_BIASES = (torch.bfloat16, torch.float32)
Kept = tuple[CachedWeight | None, CachedWeight | None]  # of gate and up, of down


class ExpertWeights(NamedTuple):
    """The weights and biases of L experts, gate and up apart, as `Experts` has them, or joined.

    Attributes:
        w1: gate (L, H, D), or gate and up joined (L, 2H, D) where w3 is None; of an activation without a gate (L, H, D), and w3 is None.
        w2: down (L, D, H).
        w3: up (L, H, D) or None.
        b1, b2, b3: biases (L, H) or (L, 2H) like w1, (L, D), (L, H); each may be None, b3 is where w3 is None.
        layout: of a joined w1: "concatenated", the H rows of gate before those of up, or "interleaved", gate in even rows and up in
            odd ones. A model that stores its weights transposed, (L, D, 2H) and (L, H, D), hands over `.transpose(-2, -1)` of them.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None
    layout: str = "concatenated"

    def check(self, gated: bool) -> None:
        """Raise ValueError unless shapes and dtypes belong together, of experts with or without a gate."""
        L, hidden = self.w1.shape[0], self.w2.shape[-1]
        apart = self.w3 is not None
        if hidden % MX_BLOCK:
            raise ValueError(f"{_WHERE}: H = {hidden}, want a multiple of {MX_BLOCK} (one MX block); pad the weights")
        if apart and not gated:
            raise ValueError(f"{_WHERE}: w3 is given, want None beside an activation without a gate")
        rows = hidden if apart or not gated else 2 * hidden
        weights = {"w1": (self.w1, (L, rows, self.w1.shape[-1])), "w2": (self.w2, (L, self.w1.shape[-1], hidden))}
        weights |= {"w3": (self.w3, (L, rows, self.w1.shape[-1]))} if self.w3 is not None else {}
        if any(tuple(w.shape) != shape or w.dtype != self.w1.dtype for w, shape in weights.values()):
            got = ", ".join(f"{name} {tuple(w.shape)} {w.dtype}" for name, (w, _) in weights.items())
            want = "(L, H, D), (L, D, H), (L, H, D)" if apart else f"(L, {'2H' if gated else 'H'}, D), (L, D, H)"
            raise ValueError(f"{_WHERE}: {got}, want {want} of one dtype")
        for name, bias, width in (("b1", self.b1, rows), ("b2", self.b2, self.w1.shape[-1]), ("b3", self.b3, hidden if apart else None)):
            if bias is not None and (width is None or tuple(bias.shape) != (L, width) or bias.dtype not in _BIASES):
                want = "None, as w3 is" if width is None else f"({L}, {width}) bfloat16 or float32"
                raise ValueError(f"{_WHERE}: {name} is {tuple(bias.shape)} {bias.dtype}, want {want}")
        if self.layout not in LAYOUTS or (apart and self.layout != "concatenated"):
            raise ValueError(f"{_WHERE}: layout={self.layout!r}, want 'concatenated', or 'interleaved' for a joined w1 (and w3 None)")


class _FFNOptions(NamedTuple):
    """What the function does beside its operands; hashable, so that a graph can hold it."""

    gemm: GemmOptions
    layout: str
    activation: str
    form: tuple[float, float, float]  # of SwiGLU, as plain numbers

    @property
    def function(self) -> dict[str, Any]:
        """As the operators take it."""
        return {"activation": self.activation, "form": self.form}


def runs_fused(recipe: Recipe) -> bool:
    """Whether `expert_ffn` has this recipe's numbers: MXFP8 GEMMs, wgrad of operands as they come or of their MX forms."""
    return recipe.gemm == "mxfp8" and recipe.wgrad in ("hp", "mx")


def gate_up_bias(w1: Tensor, b1: Tensor | None, b3: Tensor | None, apart: bool) -> Tensor | None:
    """(L, 2H) in the layout of gate and up, or None without one."""
    if not apart or (b1 is None and b3 is None):
        return b1
    none = w1.new_zeros(w1.shape[:2])
    return torch.cat((none if b1 is None else b1, none if b3 is None else b3), 1)


@in_graph
class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor | None,
        b1: Tensor | None,
        b2: Tensor | None,
        b3: Tensor | None,
        offs: Tensor,
        options: _FFNOptions,
        kept: Kept | None = None,
    ) -> Tensor:
        gemm, (kept13, kept2) = options.gemm, kept or (None, None)
        x = shared_form(x, gemm)
        gate_up = forward_gemm(x, Weights(w1, w3, gemm, kept13), offs)  # (P, 2H)
        bias = gate_up_bias(w1, b1, b3, w3 is not None)
        ends = None if bias is None else offs
        h = torch.ops.mxep.activate_quantize(gate_up, options.layout, gemm.mode, False, bias, ends, **options.function)  # MX (P, H)
        y = mx_gemm(h, Weights(w2, None, gemm, kept2).quantized("forward"), offs, gemm)  # (P, D)
        needs_w13 = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
        ctx.save_for_backward(*saved_tensors(x if needs_w13 else None), gate_up, w1, w2, w3, b1, b2, b3, offs)
        ctx.options, ctx.kept, ctx.x_dtype = options, (kept13, kept2), x.dtype
        return y if b2 is None else torch.ops.mxep.add_group_bias(y, b2, offs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        data, scale, gate_up, w1, w2, w3, b1, b2, b3, offs = ctx.saved_tensors
        gemm, (kept13, kept2) = ctx.options.gemm, ctx.kept
        gate_up_weights, down = Weights(w1, w3, gemm, kept13), Weights(w2, None, gemm, kept2)
        needs_x, needs_w1, needs_w2, needs_w3, needs_b1, needs_b2, needs_b3 = ctx.needs_input_grad[:7]
        needs_w13, needs_b13 = needs_w1 or needs_w3, needs_b1 or needs_b3
        grad = grads[0] if isinstance(grads[0], MXTensor) else grads[0].contiguous()

        d_x = d_w1 = d_w2 = d_w3 = d_b1 = d_b2 = d_b3 = None
        if needs_b2:
            d_b2 = bias_grad(dequantize_data(grad), offs, b2.shape, b2.dtype)
        if needs_x or needs_w13 or needs_w2 or needs_b13:
            grad = shared_form(grad, gemm)
            dh = dgrad_gemm(grad, down, offs)  # (P, H)
            bias = gate_up_bias(w1, b1, b3, w3 is not None)
            dx_forms, h_forms = form_names(gemm, needs_x, needs_w13, needs_b13), form_names(gemm, False, needs_w2)
            ends = None if bias is None else offs
            parts = torch.ops.mxep.activate_backward(
                dh, gate_up, ctx.options.layout, gemm.mode, False, dx_forms, h_forms, bias, ends, **ctx.options.function
            )
            del dh
            d_gate_up, h = by_form(parts, dx_forms, h_forms, gate_up.dtype)
        if needs_x:
            d_x = dgrad_gemm(dgrad_form(d_gate_up, gemm), gate_up_weights, offs)  # (P, D)
        if needs_w2:
            d_w2 = wgrad_gemm(grad, wgrad_form(h, gemm), offs, gemm, down.wgrad_dtype, transposed=down.transposed)
        if needs_w13:
            x, d_rows = data if scale is None else MXTensor(data, scale, ctx.x_dtype), wgrad_form(d_gate_up, gemm)
            dtype, transposed = gate_up_weights.wgrad_dtype, gate_up_weights.transposed
            if w3 is None:
                d_w1 = wgrad_gemm(d_rows, x, offs, gemm, dtype, transposed=transposed)  # (L, 2H, D)
            else:
                d_w1, d_w3 = wgrad_gate_up(d_rows, x, offs, gemm, dtype, (needs_w1, needs_w3))
        if needs_b13:
            assert d_gate_up.hp is not None
            both = bias_grad(d_gate_up.hp, offs, torch.Size((w1.shape[0], gate_up.shape[1])), torch.float32)
            first, second = (both, both) if w3 is None else both.chunk(2, 1)
            d_b1, d_b3 = (first.to(b1.dtype) if needs_b1 else None), (second.to(b3.dtype) if needs_b3 else None)
        made = ((d_w1, needs_w1), (d_w2, needs_w2), (d_w3, needs_w3))
        d_w1, d_w2, d_w3 = (d.to(w1.dtype) if need and d is not None else None for d, need in made)
        return d_x, d_w1, d_w2, d_w3, d_b1, d_b2, d_b3, None, None, None


def by_form(parts: list[Tensor], dx_forms: str, h_forms: str, dtype: torch.dtype) -> tuple[Forms, Forms]:
    """What `activate_backward` returned, of dx and of h."""
    left = iter(parts)
    dx, h = (
        Forms(MXTensor(next(left), next(left), dtype) if "mx" in names else None, next(left) if "hp" in names else None)
        for names in (dx_forms, h_forms)
    )
    return dx, h


def expert_ffn(
    x: Tensor,
    weights: ExpertWeights | tuple[Tensor, Tensor, Tensor | None],
    offs: Tensor,
    recipe: Recipe,
    kept: dict[str, CachedWeight] | None = None,
    weight_dtype: torch.dtype | None = None,
    swiglu: SwiGLU = SwiGLU(),  # noqa: B008  immutable
    activation: ActivationName = "swiglu",
) -> Tensor:
    """Each expert's rows through its products, in one differentiable function.

    Args:
        x: (P, D) bf16 or float32, or an MXTensor of them; rows of group g end at offs[g].
        weights: `ExpertWeights`, or just w1 (L, H, D), w2 (L, D, H), w3 (L, H, D), which is None without a gate; of one dtype, D and H
            multiples of 32.
        offs: (L,) int32 or int64 END offsets.
        recipe: one for which `runs_fused` holds.
        kept: places of w1 with w3 ("w13") and of "w2" in a `WeightCache`; none quantises in every call. Not for use in a compiled graph.
        weight_dtype: to which weights are rounded wherever they are read, None: not at all.  Backward keeps them, not rounded copies.
        swiglu: the form of SwiGLU.
        activation: as in `MoEConfig`.

    Returns:
        (P, D) in x's dtype; rows past offs[-1] are zero.

    Raises:
        ValueError: operands, offsets or a recipe that do not fit, or a GEMM path that this device does not run.
    """
    if not runs_fused(recipe):
        raise ValueError(f"{_WHERE}: recipe {recipe.name!r}, want gemm='mxfp8' and wgrad 'hp' or 'mx'; the others run as three GEMMs")
    given = ExpertWeights(*weights)
    check_activation(_WHERE, activation, swiglu)
    given.check(is_gated(activation))
    reject_border(x, _WHERE)
    w1, w2, w3, b1, b2, b3, layout = given
    offs = check_operands(x, w1.transpose(-2, -1), offs, x.dtype)
    mode = check_mode(_WHERE, recipe.scaling_mode, MX_BLOCK)
    gemm = gemm_options(x, x.dtype, recipe.gemm_path, recipe.wgrad, mode, pad_groups=False, weight_dtype=weight_dtype)
    places = None if not kept else (kept.get("w13"), kept.get("w2"))
    options = _FFNOptions(gemm, layout, activation, (swiglu.limit, swiglu.alpha, swiglu.offset))
    return _ExpertFFN.apply(x, w1, w2, w3, b1, b2, b3, offs, options, places)

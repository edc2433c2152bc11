"""The experts' block as one autograd function, for recipes with MXFP8 GEMMs and a wgrad of "hp" or "mx"; see moe/expert_mlp.py.

before, after  as in moe/experts.py, whose `Experts.fused` switches it on
wgrad     "hp": gradients and h in high precision, and the values of x and dy.  "mx": the MX bytes of all four
recomputation  the down GEMM is a function of its own, which saves nothing: a checkpoint around the experts alone runs it once.  In
          `MoE` it runs again, since the gradient of the scores reads its result
saves     x as it came (its MX bytes for "mx"), gate and up (P, 2H), but not h; on FP8 paths what dgrad reads of the weights of gate and up,
          which one pass makes with what forward reads
host syncs  none on GPUs outside of checking mode

wgrad from MX forms has 1.03 to 1.16 times the error of dW against float64 of the "hp" one (1.14 to 1.32 times where x and dy come in high
precision) on the data of the tests.  It is not the default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxep.checks import HIGH_PRECISION
from mxep.grouped_mm.function import check_operands
from mxep.grouped_mm.products import gemm_options, saved_tensors, shared_form
from mxep.moe.config import check_activation
from mxep.moe.expert_mlp import (
    NO_CACHES,
    TENSORS,
    Activation,
    Caches,
    ExpertOptions,
    ExpertRows,
    ExpertWeights,
    GateUp,
    NeedsGrad,
    activation_gradients,
    check_lora,
    down_bias_gradients,
    down_gemm,
    expert_gemms,
    gate_up_gemm,
    rows_gradient,
    weight_gradients,
)
from mxep.mx.compile import in_graph
from mxep.mx.tensor import MXTensor, reject_graph_output
from mxep.ops.activation.functions import ActivationName, SwiGLU, is_gated
from mxep.ops.activation.reference import LAYOUTS
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_WHERE = "expert_ffn"


def _check_weights(weights: ExpertWeights, gated: bool) -> None:
    """Raise ValueError unless shapes and dtypes belong together, of experts with or without a gate."""
    w1, w2, w3, b1, b2, b3, layout, _ = weights
    L, hidden, width = w1.shape[0], w2.shape[-1], w1.shape[-1]
    apart = w3 is not None
    if hidden % MX_BLOCK:
        raise ValueError(f"{_WHERE}: H = {hidden}, want a multiple of {MX_BLOCK} (one MX block); pad the weights")
    if apart and not gated:
        raise ValueError(f"{_WHERE}: w3 is given, want None with an activation without a gate")
    rows = hidden if apart or not gated else 2 * hidden
    shapes = {"w1": (w1, (L, rows, width)), "w2": (w2, (L, width, hidden))} | ({"w3": (w3, (L, rows, width))} if w3 is not None else {})
    if any(tuple(w.shape) != shape or w.dtype != w1.dtype for w, shape in shapes.values()):
        got = ", ".join(f"{name} {tuple(w.shape)} {w.dtype}" for name, (w, _) in shapes.items())
        want = "(L, H, D), (L, D, H), (L, H, D)" if apart else f"(L, {'2H' if gated else 'H'}, D), (L, D, H)"
        raise ValueError(f"{_WHERE}: {got}, want {want} of one dtype")
    for name, bias, columns in (("b1", b1, rows), ("b2", b2, width), ("b3", b3, hidden if apart else None)):
        if bias is not None and (columns is None or tuple(bias.shape) != (L, columns) or bias.dtype not in HIGH_PRECISION):
            want = "None, as w3 is" if columns is None else f"({L}, {columns}) bfloat16 or float32"
            raise ValueError(f"{_WHERE}: {name} is {tuple(bias.shape)} {bias.dtype}, want {want}")
    if layout not in LAYOUTS or (apart and layout != "concatenated"):
        raise ValueError(f"{_WHERE}: layout={layout!r}, want 'concatenated', or 'interleaved' for a w1 with gate and up (and w3 None)")


def runs_fused(recipe: Recipe) -> bool:
    """Whether `expert_ffn` has this recipe's numbers: MXFP8 GEMMs, wgrad of operands as they come or of their MX forms."""
    return recipe.gemm == "mxfp8" and recipe.wgrad in ("hp", "mx")


def _needs_grad(ctx: Any) -> NeedsGrad:
    return NeedsGrad(*ctx.needs_input_grad[: 1 + len(TENSORS)])


@in_graph
class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """(P, D) without values, in place of the output; gate and up (P, 2H), for `_DownGemm`.

        `rest`: the weights' tensors (`TENSORS`), offs, `ExpertOptions`, and the weights' caches.
        """
        weights, (offs, options, caches) = ExpertWeights.of(rest[: len(TENSORS)]), rest[len(TENSORS) :]
        x = shared_form(x, options.gemm)
        gemms, needs = expert_gemms(weights, options, caches), _needs_grad(ctx)
        dgrad = gemms[0].make_both() if needs.saves_gate_up_weight else (None, None)
        gate_up, xa, _ = gate_up_gemm(x, weights, gemms, ExpertRows(offs), options)
        ctx.save_for_backward(*saved_tensors(x if needs.reads_x else None), gate_up, xa, offs, *dgrad, *weights.tensors)
        ctx.mark_non_differentiable(gate_up)
        ctx.options, ctx.caches, ctx.x_dtype = options, caches, x.dtype
        return gate_up.new_empty_strided((gate_up.shape[0], weights.w2.shape[1]), (0, 0)), gate_up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        data, scale, gate_up, xa, offs, dgrad, dgrad_scale, *parts = ctx.saved_tensors
        options, weights, rows, needs = ctx.options, ExpertWeights.of(parts), ExpertRows(offs), _needs_grad(ctx)
        gemms = expert_gemms(weights, options, ctx.caches, dgrad=((dgrad, dgrad_scale), (None, None)))
        grad = grads[0] if isinstance(grads[0], MXTensor) else grads[0].contiguous()
        d_x, made = None, dict[str, Tensor]()
        if needs.b2:
            down_bias_gradients(grad, weights, rows, needs, made)
        if needs.activation:

            def read_x() -> Tensor:
                return data if scale is None else MXTensor(data, scale, ctx.x_dtype)

            grad = shared_form(grad, options.gemm)
            inner = activation_gradients(grad, read_x, GateUp(gate_up, xa), weights, gemms, rows, options, needs)
            if needs.x:
                d_x, inner = rows_gradient(inner, weights, gemms, rows, options)  # (P, D)
            weight_gradients(grad, read_x, inner, weights, gemms, rows, options, needs, made)
        of_weights = (made[name].to(w.dtype) if name in made else None for name, w in zip(TENSORS, parts, strict=True))
        return d_x, *of_weights, None, None, None


@in_graph
class _DownGemm(torch.autograd.Function):
    """Values for the tensor without values that `_ExpertFFN` returns, whose backward has the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, gate_up: Tensor, *rest: Any) -> Tensor:
        """`rest`: all arguments of `_ExpertFFN` but the rows."""
        weights, (offs, options, caches) = ExpertWeights.of(rest[: len(TENSORS)]), rest[len(TENSORS) :]
        return down_gemm(GateUp(gate_up), weights, expert_gemms(weights, options, caches), ExpertRows(offs), options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return grads[0], *[None] * (len(ctx.needs_input_grad) - 1)


def expert_ffn(
    x: Tensor,
    weights: ExpertWeights,
    offs: Tensor,
    recipe: Recipe,
    caches: Caches = NO_CACHES,
    weight_dtype: torch.dtype | None = None,
    swiglu: SwiGLU = SwiGLU(),  # noqa: B008  immutable
    activation: ActivationName = "swiglu",
) -> Tensor:
    """Each expert's rows through its products, in one differentiable function.

    Args:
        x: (P, D) bf16 or float32, or an MXTensor of them; rows of group g end at offs[g].
        weights: of one dtype, D and H multiples of 32.
        offs: (L,) int32 or int64 END offsets.
        recipe: one for which `runs_fused` holds.
        caches: entries of the weights; a weight without one is quantised in every call. Not for use in a compiled graph.
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
    check_activation(_WHERE, activation, swiglu)
    _check_weights(weights, is_gated(activation))
    check_lora(_WHERE, x, weights)
    reject_graph_output(x, _WHERE)
    offs = check_operands(x, weights.w1.transpose(-2, -1), offs, x.dtype)
    gemm = None
    if not recipe.multiplies_in_hp(x.shape[0], weights.w1.shape[0]):
        mode = recipe.scaling_mode.value
        gemm = gemm_options(x.device, x.dtype, recipe.gemm_path, recipe.wgrad, mode, weight_dtype=weight_dtype)
    options = ExpertOptions(gemm, Activation(activation, weights.layout, tuple(swiglu)), weight_dtype)
    rest = *weights.tensors, offs, options, caches
    return _DownGemm.apply(*_ExpertFFN.apply(x, *rest), *rest)

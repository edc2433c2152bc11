"""Stop 4 as one autograd function: gate and up in one GEMM, SwiGLU and quantiser in one pass, the activation made again in backward.

before, after  as in moe/experts.py, whose `Experts.fused` switches it on; for recipes with MXFP8 GEMMs and a wgrad in high precision
forward   x 1x32 along D times [w1 | w3] -> gate and up (P, 2H), rounded once to hp; h from float32 straight to MX; times w2 -> y
backward  dh = dy times w2 along D; SwiGLU again, in hp; [dgate | dup] 1x32 along 2H times [w1 | w3] -> dx, one sum, rounded once;
          dW from the hp gradients, hp h and the values of x and dy
saves     x as it came and gate and up (P, 2H): neither h nor silu(gate).  Host syncs: none on GPUs outside of checking mode.

wgrad takes h and [dgate | dup] in hp, not their MX forms: from these the error of dW against float64 would be 1.08 to 1.10 times that
of the separate GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.ep.checks import check_mode
from mxep.grouped_mm import GemmOptions, check_operands, gemm_options, quantized
from mxep.mx.in_graph import in_graph
from mxep.mx.tensor import MXTensor, dequantize_data, reject_border
from mxep.mx.weight_cache import CachedWeight
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_WHERE = "expert_ffn"
_LAYOUT = "concatenated"
Bytes = tuple[Tensor, Tensor]  # qdata, scale
Kept = tuple[CachedWeight | None, CachedWeight | None, CachedWeight | None]


def runs_fused(recipe: Recipe) -> bool:
    """Whether `expert_ffn` has this recipe's numbers: MXFP8 GEMMs, wgrad of operands as they come."""
    return recipe.gemm == "mxfp8" and recipe.wgrad == "hp"


def _weight(w: Tensor, kept: CachedWeight | None, mode: str, which: str) -> Bytes:
    return quantized(w, mode) if kept is None else kept.quantized(w, mode, which)


def _beside(a: Bytes, b: Bytes, dim: int) -> Bytes:
    """Two MX matrices along `dim`; quantising what lies side by side gives the same bytes, since H is a multiple of a block."""
    joined = (torch.cat((p.view(torch.uint8), q.view(torch.uint8)), dim).view(p.dtype) for p, q in zip(a, b, strict=True))
    qdata, scale = joined
    return qdata, scale


def _gemm(a: Bytes, b: Bytes, offs: Tensor, options: GemmOptions) -> Tensor:
    return torch.ops.mxep.grouped_mm_mx(*a, *b, offs, options.out_dtype, options.path_to(options.out_dtype))


@in_graph
class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor, options: GemmOptions, kept: Kept | None = None
    ) -> Tensor:
        mode, (kept1, kept2, kept3) = options.mode, kept or (None, None, None)
        gate_up_weight = _beside(_weight(w1, kept1, mode, "forward"), _weight(w3, kept3, mode, "forward"), 1)
        gate_up = _gemm(quantized(x, mode), gate_up_weight, offs, options)  # (P, 2H)
        h = torch.ops.mxep.swiglu_quantize(gate_up, _LAYOUT, mode)  # MX (P, H)
        saved = (x.qdata, x.scale) if isinstance(x, MXTensor) else (x, None)
        ctx.save_for_backward(*saved, gate_up, w1, w2, w3, offs)
        ctx.options, ctx.kept, ctx.x_dtype = options, (kept1, kept2, kept3), x.dtype
        return _gemm(h, _weight(w2, kept2, mode, "forward"), offs, options)  # (P, D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        data, scale, gate_up, w1, w2, w3, offs = ctx.saved_tensors
        options, (kept1, kept2, kept3) = ctx.options, ctx.kept
        x = data if scale is None else MXTensor(data, scale, ctx.x_dtype)
        grad, mode = grads[0] if isinstance(grads[0], MXTensor) else grads[0].contiguous(), options.mode
        gate, up = gate_up.chunk(2, -1)
        silu = F.silu(gate)
        d_x = d_w1 = d_w2 = d_w3 = None
        needs_x, needs_w1, needs_w2, needs_w3 = ctx.needs_input_grad[:4]
        if needs_w2:
            d_w2 = torch.ops.mxep.grouped_wgrad_hp(dequantize_data(grad), silu * up, offs, w2.dtype)
        if needs_x or needs_w1 or needs_w3:
            dh = _gemm(quantized(grad, mode), _weight(w2.transpose(-2, -1), kept2, mode, "dgrad"), offs, options)  # (P, H)
            d_gate_up = torch.cat((torch.ops.aten.silu_backward(dh * up, gate), dh * silu), -1)  # (P, 2H)
        if needs_x:
            one, three = (w1.transpose(-2, -1), kept1), (w3.transpose(-2, -1), kept3)
            weight = _beside(_weight(*one, mode, "dgrad"), _weight(*three, mode, "dgrad"), 2)
            d_x = _gemm(quantized(d_gate_up, mode), weight, offs, options)  # (P, D)
        if needs_w1 or needs_w3:
            both = torch.ops.mxep.grouped_wgrad_hp(d_gate_up, dequantize_data(x), offs, w1.dtype)  # (L, 2H, D)
            d_w1, d_w3 = (part.contiguous() for part in both.chunk(2, 1))
        return d_x, d_w1, d_w2, d_w3, None, None, None


def expert_ffn(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], offs: Tensor, recipe: Recipe, kept: dict[str, CachedWeight] | None = None
) -> Tensor:
    """SwiGLU of each expert's rows in one differentiable function.

    Args:
        x: (P, D) bf16 or float32, or an MXTensor of them; rows of group g end at offs[g].
        weights: w1 (L, H, D), w2 (L, D, H), w3 (L, H, D), of one dtype; D and H multiples of 32.
        offs: (L,) int32 or int64 END offsets.
        recipe: one for which `runs_fused` holds.
        kept: places of w1, w2 and w3 in a `WeightCache`; none quantises in every call. Not for use in a compiled graph.

    Returns:
        (P, D) in x's dtype; rows past offs[-1] are zero.

    Raises:
        ValueError: operands, offsets or a recipe that do not fit, or a GEMM path that this device does not run.
    """
    w1, w2, w3 = weights
    if not runs_fused(recipe):
        raise ValueError(f"{_WHERE}: recipe {recipe.name!r}, want gemm='mxfp8' and wgrad='hp'; the other recipes run as three GEMMs")
    if w1.shape != w3.shape or w2.shape != (w1.shape[0], w1.shape[2], w1.shape[1]) or not w1.dtype == w2.dtype == w3.dtype:
        raise ValueError(
            f"{_WHERE}: w1 {tuple(w1.shape)} {w1.dtype}, w2 {tuple(w2.shape)} {w2.dtype}, w3 {tuple(w3.shape)} {w3.dtype}, "
            "want (L, H, D), (L, D, H), (L, H, D) of one dtype"
        )
    reject_border(x, _WHERE)
    offs = check_operands(x, w1.transpose(-2, -1), offs, x.dtype)
    options = gemm_options(x, x.dtype, recipe.gemm_path, recipe.wgrad, check_mode(_WHERE, recipe.scaling_mode, MX_BLOCK), pad_groups=False)
    places = None if not kept else (kept.get("w1"), kept.get("w2"), kept.get("w3"))
    return _ExpertFFN.apply(x, w1, w2, w3, offs, options, places)

"""The GEMMs of a dense linear layer as one autograd function: a grouped GEMM with one group, `mxep.grouped_mm.function.multiply`.

It takes input and weight as the layer has them, so autograd records one node and no views, and it checks them once for every combination of
shapes, dtypes and devices: for narrow layers the host's time is most of a call.

Low-rank adapters are part of the function.  A GEMM of the layer that `adds_lora` adds an adapter's second product to its sums, and without
an adapter it adds the bias in the same way.  Other adapters are added by GEMMs of their own, to the layer's result and to its gradient.
The scaling is part of an adapter's GEMMs.  Gradients of factors are summed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.checks import HIGH_PRECISION, check_tensors
from mxep.device import is_capturing
from mxep.grouped_mm.function import MXInputRequiresHPWgradError, gradients, multiply
from mxep.grouped_mm.products import GemmOptions, adds_lora, gemm_options
from mxep.mx.compile import in_graph
from mxep.mx.rows import unflatten_rows
from mxep.mx.tensor import MXTensor, dequantize_data, reject_graph_output
from mxep.mx.weight import MXWeight
from mxep.mx.weight_cache import CachedWeight
from mxep.ops.runtime.replay import writable
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_WHERE = "MXLinear"
_REAL = (Tensor, torch.nn.Parameter, MXTensor)  # no fake tensors


def _group_end(rows: Tensor) -> Tensor:
    """(1,) int32, the END offset of one group of all rows (M, K).

    Filling it is a launch, so it is kept for other calls with as many rows on the same stream: a graph that is traced or captured has its
    own.
    """
    if torch._C._len_torch_dispatch_stack() or is_capturing() or type(rows) not in _REAL:
        return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    return _kept_group_end(rows.shape[0], rows.device, torch._C._cuda_getCurrentRawStream(rows.device.index) if rows.is_cuda else 0)


@functools.lru_cache(maxsize=1024)
def _kept_group_end(num_rows: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):  # for later calls that save it for backward
        return torch.full((1,), num_rows, dtype=torch.int32, device=device)


class DenseLora(NamedTuple):
    """A low-rank adapter (LoRA) of a dense layer: x @ w.T becomes x @ w.T + scaling * (x @ a.T) @ b.T.

    Attributes:
        a: (R, K), b: (N, R); cast to x's dtype, gradients are in their own.
        scaling: of their product.
        dropped: what `a` multiplies instead of x, (..., K) in x's dtype, as dropout made it; None: x.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    dropped: Tensor | None = None


def _rows(x: Tensor) -> Tensor:
    """(..., K) -> (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _scaled_product(x: Tensor, factor: Tensor, scaling: float) -> Tensor:
    """scaling * x (M, K) @ factor (K, R), rounded once."""
    return x.new_empty(x.shape[0], factor.shape[1]).addmm_(x, factor, beta=0, alpha=scaling)


def _factor_gradient(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`; on a GPU float32 is what the GEMM has summed, unrounded."""
    unrounded = left.is_cuda and dtype == torch.float32 and left.dtype.itemsize == 2
    return torch.mm(left, right, out_dtype=dtype) if unrounded else torch.mm(left, right).to(dtype)


def _multiply_hp(ctx: Any, rows: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Rows (M, K) times w (N, K) -> (M, N) by torch's GEMM in the rows' dtype, and what `_gradients_hp` reads."""
    rows, weight = dequantize_data(rows), dequantize_data(w, rows.dtype)
    saved = rows if ctx.needs_input_grad[1] else None, w if isinstance(w, MXWeight) else weight
    return F.linear(rows, weight, None if bias is None else bias.to(rows.dtype)), saved


def _gradients_hp(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of rows, w and bias from that of the result (M, N)."""
    (rows, w), (needs_x, needs_w, needs_bias, *_) = saved, ctx.needs_input_grad
    d_rows = grad @ dequantize_data(w, grad.dtype) if needs_x else None
    return d_rows, grad.t() @ rows if needs_w else None, grad.sum(0) if needs_bias else None


@in_graph
class _DenseMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        gemm: GemmOptions | None,
        kept: CachedWeight | None,
        a: Tensor | None = None,
        b: Tensor | None = None,
        scaling: float = 1.0,
        dropped: Tensor | None = None,
    ) -> Tensor:
        ctx.gemm, ctx.lead, ctx.scaling, ctx.drops = gemm, x.shape[:-1], scaling, dropped is not None
        rows = _rows(x)
        of_adapter: Sequence[Tensor | None] = (None,) * 4
        lora = None
        if a is not None and b is not None:
            ctx.dtypes = a.dtype, b.dtype
            adapted, a, b = dequantize_data(rows) if dropped is None else _rows(dropped), a.to(x.dtype), b.to(x.dtype)
            lora = _scaled_product(adapted, a.t(), scaling), b.unsqueeze(0)
            of_adapter = a, b, lora[0], adapted if ctx.needs_input_grad[5] else None
        fused, ends = lora is not None and adds_lora(gemm, lora[0].shape[1]), None
        if gemm is None:
            out, saved = _multiply_hp(ctx, rows, w, bias)
        else:
            ends = _group_end(rows)
            out, saved = multiply(ctx, rows, w, ends, bias, gemm, kept=kept, lora=lora if fused else None, bias_in_gemm=True)
        if lora is not None and not fused:
            out = writable(out).addmm_(lora[0], lora[1][0].t())
        ctx.save_for_backward(ends, *of_adapter, *saved)
        return out if x.dim() == 2 else unflatten_rows(out, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        ends, a, b, inner, adapted, *saved = ctx.saved_tensors
        needs_x, needs_w, needs_bias, _, _, *of_adapter = ctx.needs_input_grad
        d_y, d_a, d_b, d_dropped, d_inner, lora = _rows(grads[0]), None, None, None, None, None
        if a is not None:
            d_y = dequantize_data(d_y).contiguous()
            d_inner = _scaled_product(d_y, b, ctx.scaling)
            if not ctx.drops and adds_lora(ctx.gemm, a.shape[0]):
                lora = d_inner, a.t().unsqueeze(0)
        if ctx.gemm is None:
            d_rows, d_w, d_bias = _gradients_hp(ctx, saved, d_y)
        else:
            d_rows, d_w, d_bias = gradients(ctx, saved, ends, d_y, needs_x, needs_w, needs_bias, lora)
        if d_inner is not None:
            needs_a, needs_b, _, needs_dropped = of_adapter
            d_a = _factor_gradient(d_inner.t(), adapted, ctx.dtypes[0]) if needs_a else None
            d_b = _factor_gradient(d_y.t(), inner, ctx.dtypes[1]) if needs_b else None
            if needs_dropped:
                d_dropped = (d_inner @ a).view(*ctx.lead, a.shape[1])
            if d_rows is not None and not ctx.drops and lora is None:
                d_rows.addmm_(d_inner, a)
        d_x = d_rows if d_rows is None or len(ctx.lead) == 1 else d_rows.view(*ctx.lead, d_rows.shape[-1])
        return (d_x, d_w, d_bias, None, None, d_a, d_b, None, d_dropped)[: 5 + len(of_adapter)]


_Like = tuple[torch.Size, torch.dtype, torch.device]  # what is checked of an operand


def _checked_options(x: _Like, in_mx: bool, w: _Like, bias: _Like | None, trains: bool, pad_groups: bool, recipe: Recipe) -> GemmOptions:
    """How to multiply; `x` with its last dimension alone. Raises ValueError for operands that do not belong together."""
    (inner, dtype, device), (shape, w_dtype, w_device) = x, w
    if inner != shape[1:] or device != w_device or dtype not in HIGH_PRECISION or w_dtype not in HIGH_PRECISION:
        given = ", ".join(("...", *map(str, inner)))
        raise ValueError(
            f"{_WHERE}: input ({given}) {dtype} on {device} and weight {tuple(shape)} {w_dtype} on {w_device}, want (..., K) and (N, K), "
            "bfloat16 or float32, on one device; cast or move one of them"
        )
    if shape[0] % MX_BLOCK or shape[1] % MX_BLOCK:
        raise ValueError(
            f"{_WHERE}: a weight {tuple(shape)}, want multiples of {MX_BLOCK} both ways (one MX block); pad it, or use torch.nn.Linear"
        )
    if bias is not None and (bias[0] != shape[:1] or bias[1] not in HIGH_PRECISION or bias[2] != device):
        got = f"{tuple(bias[0])} {bias[1]} on {bias[2]}"
        raise ValueError(f"{_WHERE}: a bias {got}, want ({shape[0]},) bfloat16 or float32 on {device}")
    if in_mx and recipe.wgrad == "mxfp8":
        raise MXInputRequiresHPWgradError(f"{_WHERE}: an input in MX, which wgrad='mxfp8' would quantise again; use wgrad='hp' or 'mx'")
    wgrad = recipe.wgrad if trains else "none"
    return gemm_options(device, dtype, recipe.gemm_path, wgrad, recipe.scaling_mode.value, pad_groups)


_kept_options = functools.lru_cache(maxsize=1024)(_checked_options)  # dynamo would trace into a cache


def dense_mm(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, kept: CachedWeight | None = None, lora: DenseLora | None = None
) -> Tensor:
    """x @ w.T + bias in MXFP8, or in x's dtype by a recipe in high precision and below a recipe's `hp_below_rows`; differentiable.

    Args:
        x: (..., K) bf16 or float32, or an MXTensor where the recipe's wgrad takes one (the values of a transposed MXWeight are read); any
            dtype in high precision.
        w: (N, K) bf16 or float32, both multiples of 32; any in high precision.
        bias: (N,) or None.
        recipe: precision and GEMM path.
        kept: the weight's entry in a `WeightCache`; None quantises it in every call.
        lora: an adapter of the weight.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ValueError: shapes, dtypes or a path that do not fit.
    """
    if not isinstance(x, Tensor):
        check_tensors(_WHERE, input=x)
    if isinstance(x, MXWeight) and x.transposed:
        x = x.dequantize()
    in_mx = isinstance(x, MXTensor)
    if in_mx:
        reject_graph_output(x, _WHERE)
    options = _checked_options if torch.compiler.is_compiling() else _kept_options
    pads = recipe.wgrad == "mxfp8" and x.shape[:-1].numel() % MX_BLOCK != 0  # 32x1 blocks
    of_x, of_w = (x.shape[-1:], x.dtype, x.device), (w.shape, w.dtype, w.device)
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
    trains = torch.is_grad_enabled() and w.requires_grad
    gemm = options(of_x, in_mx, of_w, of_bias, trains, pads, recipe) if recipe.gemm == "mxfp8" else None
    if gemm is None or (recipe.hp_below_rows and recipe.multiplies_in_hp(x.shape[:-1].numel(), 1)):
        if torch.is_autocast_enabled(x.device.type):  # the result is of x's dtype, as in MXFP8
            with torch.autocast(x.device.type, enabled=False):
                return dense_mm(x, w, bias, recipe, kept, lora)
        if lora is None:
            return F.linear(x.dequantize() if isinstance(x, MXTensor) else x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
        gemm = None
    return _DenseMM.apply(x, w, bias, gemm, kept, *(lora or ()))

"""The GEMMs of a dense linear layer as one autograd function: a grouped GEMM with one group, `mxep.grouped_mm.function.multiply`.

It takes input and weight as the layer has them, so autograd records one node and no views, and it checks them once for every combination of
shapes, dtypes and devices: for narrow layers the host's time is most of a call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.checks import check_mode
from mxep.device import is_capturing
from mxep.grouped_mm.function import MXInputRequiresHPWgradError, gradients, multiply
from mxep.grouped_mm.products import GemmOptions, gemm_options
from mxep.mx.compile import in_graph
from mxep.mx.rows import unflatten_rows
from mxep.mx.tensor import MXTensor, reject_border
from mxep.mx.weight_cache import CachedWeight
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_WHERE = "MXLinear"
_DTYPES = (torch.bfloat16, torch.float32)
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


@in_graph
class _DenseMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, gemm: GemmOptions, kept: CachedWeight | None = None) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # (M, K)
        out = multiply(ctx, rows, w.unsqueeze(0), _group_end(rows), bias, gemm, kept=kept)
        ctx.lead = x.shape[:-1]
        return out if x.dim() == 2 else unflatten_rows(out, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        grad = grads[0] if grads[0].dim() == 2 else grads[0].reshape(-1, grads[0].shape[-1])
        d_rows, d_w, d_bias = gradients(ctx, grad, *ctx.needs_input_grad[:3])
        d_x = d_rows if d_rows is None or len(ctx.lead) == 1 else d_rows.view(*ctx.lead, d_rows.shape[-1])
        return d_x, None if d_w is None else d_w.squeeze(0), d_bias, None, None


_Like = tuple[torch.Size, torch.dtype, torch.device]  # what is checked of an operand


def _checked_options(x: _Like, in_mx: bool, w: _Like, bias: _Like | None, trains: bool, pad_groups: bool, recipe: Recipe) -> GemmOptions:
    """How to multiply; `x` with its last dimension alone. Raises ValueError for operands that do not belong together."""
    (inner, dtype, device), (shape, w_dtype, w_device) = x, w
    if inner != shape[1:] or device != w_device or dtype not in _DTYPES or w_dtype not in _DTYPES:
        given = ", ".join(("...", *map(str, inner)))
        raise ValueError(
            f"{_WHERE}: input ({given}) {dtype} on {device} and weight {tuple(shape)} {w_dtype} on {w_device}, want (..., K) and (N, K), "
            "bfloat16 or float32, on one device; cast or move one of them"
        )
    if shape[0] % MX_BLOCK or shape[1] % MX_BLOCK:
        raise ValueError(
            f"{_WHERE}: a weight {tuple(shape)}, want multiples of {MX_BLOCK} both ways (one MX block); pad it, or use torch.nn.Linear"
        )
    if bias is not None and (bias[0] != shape[:1] or bias[1] not in _DTYPES or bias[2] != device):
        got = f"{tuple(bias[0])} {bias[1]} on {bias[2]}"
        raise ValueError(f"{_WHERE}: a bias {got}, want ({shape[0]},) bfloat16 or float32 on {device}")
    if in_mx and recipe.wgrad == "mxfp8":
        raise MXInputRequiresHPWgradError(f"{_WHERE}: an input in MX, which wgrad='mxfp8' would quantise again; use wgrad='hp' or 'mx'")
    mode = check_mode(_WHERE, recipe.scaling_mode, MX_BLOCK)
    return gemm_options(device, dtype, recipe.gemm_path, recipe.wgrad if trains else "none", mode, pad_groups)


_kept_options = functools.lru_cache(maxsize=1024)(_checked_options)  # dynamo would trace into a cache


def dense_mm(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, kept: CachedWeight | None = None) -> Tensor:
    """x @ w.T + bias in MXFP8, or in x's dtype below the recipe's `hp_below_rows`; differentiable.

    Args:
        x: (..., K) bf16 or float32, or an MXTensor where the recipe's wgrad takes one.
        w: (N, K) bf16 or float32, both multiples of 32.
        bias: (N,) or None.
        recipe: precision and GEMM path.
        kept: the weight's entry in a `WeightCache`; None quantises it in every call.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ValueError: shapes, dtypes or a path that do not fit.
    """
    reject_border(x, _WHERE)
    options = _checked_options if torch.compiler.is_compiling() else _kept_options
    pads = recipe.wgrad == "mxfp8" and x.shape[:-1].numel() % MX_BLOCK != 0  # 32x1 blocks
    of_x, of_w = (x.shape[-1:], x.dtype, x.device), (w.shape, w.dtype, w.device)
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
    trains = torch.is_grad_enabled() and w.requires_grad
    gemm = options(of_x, isinstance(x, MXTensor), of_w, of_bias, trains, pads, recipe)
    if recipe.hp_below_rows and recipe.multiplies_in_hp(x.shape[:-1].numel(), 1):
        values = x.dequantize() if isinstance(x, MXTensor) else x
        return F.linear(values, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return _DenseMM.apply(x, w, bias, gemm, kept)

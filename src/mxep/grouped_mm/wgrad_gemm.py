"""wgrad of all grouped GEMMs: gradients of weights, each in the precision that its options name (`mxep.grouped_mm.products`)."""

from __future__ import annotations

import torch
from torch import Tensor

from mxep.grouped_mm.products import GemmOptions, Operand, quantized, quantized_columnwise, row_values
from mxep.mx.tensor import MXTensor
from mxep.operators import direct

WgradOut = torch.dtype | Tensor  # a new gradient's dtype, or a gradient that earlier chunks have partly filled


def empty_wgrad(weight: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Uninitialised memory for a gradient (L, N, K); `transposed`: stored as (L, K, N)."""
    L, N, K = weight.shape
    if transposed:
        return torch.empty((L, K, N), dtype=dtype, device=weight.device).transpose(-2, -1)
    return torch.empty((L, N, K), dtype=dtype, device=weight.device)


def _both_in_mx(grad: Operand, a: Operand, gemm: GemmOptions) -> tuple[Tensor, ...] | None:
    """qdata and scale of both operands of a wgrad that multiplies MX rows; None where it multiplies values."""
    if gemm.wgrad == "mx":
        grad = grad if isinstance(grad, tuple) else quantized(grad, gemm.mode)
        return *grad, *(a if isinstance(a, tuple) else quantized(a, gemm.mode))
    return (*quantized(grad, gemm.mode), *quantized(a, gemm.mode)) if isinstance(grad, MXTensor) and isinstance(a, MXTensor) else None


def wgrad_gemm(
    grad: Operand,
    a: Operand,
    offs: Tensor,
    gemm: GemmOptions | None,
    into: WgradOut,
    g_map: Tensor | None = None,
    a_map: Tensor | None = None,
    transposed: bool = False,
    last: bool = True,
) -> Tensor:
    """dW (L, N, K) from gradients (R, N) and rows (R, K), each read through its map.

    Args:
        into: the dtype of a new gradient, in which experts without rows have zeros; or a gradient, in which only experts with rows are
            written.
        transposed: the gradient is stored as (L, K, N), `into` too.
        last: no chunk follows; earlier ones may have few rows, or none.
    """
    if transposed:
        into = into.transpose(-2, -1) if isinstance(into, Tensor) else into
        return wgrad_gemm(a, grad, offs, gemm, into, a_map, g_map, last=last).transpose(-2, -1)
    dtype = into if isinstance(into, torch.dtype) else into.dtype
    if gemm is not None and gemm.wgrad == "mxfp8":
        qg, qa = (
            x if isinstance(x, tuple) else quantized_columnwise(row_values(x, m, offs), gemm.mode) for x, m in ((grad, g_map), (a, a_map))
        )
        made = direct.grouped_wgrad_mx_columnwise(*qg, *qa, offs, dtype, gemm.wgrad_path(dtype))
        if isinstance(into, torch.dtype):
            return made
        direct.copy_expert_grads(into, made, offs)
        return into
    if gemm is not None and (operands := _both_in_mx(grad, a, gemm)) is not None:
        path = gemm.wgrad_path(dtype)
        if isinstance(into, torch.dtype):
            return direct.grouped_wgrad_mx(*operands, offs, dtype, path, g_map, a_map)
        direct.grouped_wgrad_mx(*operands, offs, dtype, path, g_map, a_map, out=into, mostly_padding=not last)
        return into
    assert isinstance(grad, Tensor)
    assert isinstance(a, Tensor)
    if gemm is None and isinstance(into, torch.dtype) and not isinstance(grad, MXTensor):
        return direct.grouped_wgrad_hp(grad, row_values(a, a_map, offs), offs, into, grad_map=g_map)
    return _wgrad_hp(into, row_values(grad, g_map, offs), row_values(a, a_map, offs), offs)


def _wgrad_hp(into: WgradOut, grad: Tensor, a: Tensor, offs: Tensor) -> Tensor:
    """dW of values."""
    if isinstance(into, torch.dtype):
        return direct.grouped_wgrad_hp(grad, a, offs, into)
    direct.grouped_wgrad_hp(grad, a, offs, into.dtype, out=into)
    return into


def add_wgrad(
    into: Tensor,
    grad: Operand,
    a: Operand,
    offs: Tensor,
    gemm: GemmOptions | None,
    g_map: Tensor | None = None,
    a_map: Tensor | None = None,
) -> None:
    """Add dW to a main gradient `into` (L, N, K) float32, unrounded.

    Uses the path of bf16 results: its accumulation error is below the rounding of a bf16 gradient, which a main gradient avoids.
    """
    if gemm is not None and gemm.wgrad == "mxfp8":
        into.add_(wgrad_gemm(grad, a, offs, gemm, torch.float32))
        return
    if gemm is not None and (operands := _both_in_mx(grad, a, gemm)) is not None:
        direct.grouped_wgrad_mx(*operands, offs, torch.float32, gemm.path, g_map, a_map, out=into, accumulate=True)
    else:
        assert isinstance(grad, Tensor)
        assert isinstance(a, Tensor)
        values = row_values(grad, g_map, offs), row_values(a, a_map, offs)
        direct.grouped_wgrad_hp(*values, offs, torch.float32, out=into, accumulate=True)


def wgrad_gate_up(
    grad: Tensor,
    a: Tensor,
    offs: Tensor,
    gemm: GemmOptions | None,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
    a_map: Tensor | None = None,
    into: list[Tensor | None] | None = None,
    last: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """dW (L, H, D) of gate and of up, which are concatenated in the GEMM, from gradients (P, 2H) in order and rows (R, D) through a map.

    Args:
        dtype: of new gradients.  needs: which of the two are wanted.
        into: gate's and up's gradients, of which earlier chunks have written their experts; None for one that is not wanted, and for both
            if they are new.
        last: as in `wgrad_gemm`.
    """
    into = into or [None, None]
    new = into[0] is None and into[1] is None
    if gemm is not None and gemm.wgrad == "mx":
        operands, path = (*quantized(grad, gemm.mode), *quantized(a, gemm.mode)), gemm.wgrad_path(dtype)
        if new:
            return direct.grouped_wgrad_mx_gate_up(*operands, offs, dtype, path, a_map)
        present = next(half for half in into if half is not None)
        both = [torch.empty_like(present) if half is None else half for half in into]  # one alone would have other bits
        direct.grouped_wgrad_mx_gate_up(*operands, offs, dtype, path, a_map, out_gate=both[0], out_up=both[1], mostly_padding=not last)
        return into[0], into[1]
    if gemm is not None and gemm.wgrad == "mxfp8":
        made = list(wgrad_gemm(grad, a, offs, gemm, dtype, None, a_map).chunk(2, 1))
        if new:
            return made[0] if needs[0] else None, made[1] if needs[1] else None
        for half, full in zip(into, made, strict=True):
            if half is not None:
                direct.copy_expert_grads(half, full, offs)
        return into[0], into[1]
    values, grads = row_values(a, a_map, offs), list[Tensor | None]()
    for part, half, need in zip(row_values(grad, None, offs).chunk(2, -1), into, needs, strict=True):
        out = dtype if new else half
        grads.append(_wgrad_hp(out, part, values, offs) if need and out is not None else None)
    return grads[0], grads[1]

"""The weights' gradients of grouped GEMMs: what they are made of, and how they are stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxep.ep.permute import gather
from mxep.gemm_options import GemmOptions
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.mx.weight_forms import Bytes


def lies_transposed(weight: torch.Tensor) -> bool:
    """Whether a weight (L, N, K) is stored as (L, K, N). Its gradient is made so as well: nobody has to turn it, value by value."""
    return weight.stride(-2) == 1 and weight.stride(-1) > 1


def wgrad_hp(weight: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dW (L, N, K) from plain grad (M, N) and A (M, K), stored as the weight is."""
    if lies_transposed(weight):
        return torch.ops.mxep.grouped_wgrad_hp(a, grad, offs, out_dtype).transpose(-2, -1)
    return torch.ops.mxep.grouped_wgrad_hp(grad, a, offs, out_dtype)


class WgradOperands(NamedTuple):
    """What dW is made of: grad (M, N) and A (M, K), MX or plain, or both 32x1 along M as MX of their transposes."""

    grad: torch.Tensor | Bytes
    a: torch.Tensor | Bytes

    def product(
        self,
        offs: torch.Tensor,
        options: GemmOptions,
        out_dtype: torch.dtype,
        g_map: torch.Tensor | None = None,
        a_map: torch.Tensor | None = None,
        turned: bool = False,
    ) -> torch.Tensor:
        """dW (G, N, K), `turned`: stored as (G, K, N); with maps (M,) token m is row g_map[m] of grad and a_map[m] of A, rows both."""
        grad, a = self
        if turned:
            return WgradOperands(a, grad).product(offs, options, out_dtype, a_map, g_map).transpose(-2, -1)
        if isinstance(grad, tuple) and isinstance(a, tuple):
            return torch.ops.mxep.grouped_wgrad_mx(*grad, *a, offs, out_dtype, options.wgrad_path(out_dtype))
        assert isinstance(grad, torch.Tensor)
        assert isinstance(a, torch.Tensor)
        if isinstance(grad, MXTensor) and isinstance(a, MXTensor):
            operands = grad.qdata, grad.scale, a.qdata, a.scale
            return torch.ops.mxep.grouped_wgrad_mx_rows(*operands, offs, out_dtype, options.wgrad_path(out_dtype), g_map, a_map)
        grad, a = grad if g_map is None else gather(grad, g_map), a if a_map is None else gather(a, a_map)
        return torch.ops.mxep.grouped_wgrad_hp(dequantize_data(grad), dequantize_data(a), offs, out_dtype)

    def add_to(self, into: torch.Tensor, offs: torch.Tensor, options: GemmOptions) -> None:
        """Add dW to `into` (G, N, K) float32.

        On the path of bf16 results: between two promotions the FP8 tensor cores' sums lose less than the rounding of a bf16 gradient,
        which is what a main gradient is there to avoid.
        """
        grad, a = self
        if isinstance(grad, MXTensor) and isinstance(a, MXTensor):
            torch.ops.mxep.grouped_wgrad_mx_rows_add(into, grad.qdata, grad.scale, a.qdata, a.scale, offs, options.path)
        elif isinstance(grad, torch.Tensor) and isinstance(a, torch.Tensor):
            torch.ops.mxep.grouped_wgrad_hp_add(into, dequantize_data(grad), dequantize_data(a), offs)
        else:
            into.add_(self.product(offs, options, torch.float32))

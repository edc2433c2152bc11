"""A bias for the rows of each expert, differentiable: what `Experts` adds where its GEMMs run one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxep.grouped_mm import _bias_grad
from mxep.mx.in_graph import in_graph
from mxep.mx.tensor import dequantize_data


@in_graph
class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(offs)
        ctx.bias_like = bias.shape, bias.dtype
        return torch.ops.mxep.add_group_bias(rows, bias, offs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (offs,) = ctx.saved_tensors
        d_bias = None
        if ctx.needs_input_grad[1]:
            d_bias = _bias_grad(dequantize_data(grads[0]).contiguous(), offs, *ctx.bias_like)
        return grads[0], d_bias, None


def add_bias(rows: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
    """rows (P, N) plus bias (L, N) of the expert whose rows end at offs (L,); rows behind the last end, and without a bias, as they are.

    The gradient of rows is the gradient that came, MX or plain; that of bias is summed in a fixed order.
    """
    return rows if bias is None else _AddBias.apply(rows, bias, offs)

"""A bias for the rows of each group: added in one pass, its gradient summed in a fixed order on every device."""

from __future__ import annotations

from typing import Any

import torch

from mxep.checks import HIGH_PRECISION
from mxep.mx.compile import in_graph
from mxep.mx.tensor import dequantize_data
from mxep.operators import direct


def check_bias(where: str, bias: torch.Tensor, num_groups: int, columns: int) -> None:
    """Raise ValueError unless bias is (N,) or (G, N) in bf16 or float32."""
    shapes = ((columns,), (num_groups, columns))
    if tuple(bias.shape) not in shapes or bias.dtype not in HIGH_PRECISION:
        raise ValueError(f"{where}: bias is {tuple(bias.shape)} {bias.dtype}, want {shapes[0]} or {shapes[1]}, bfloat16 or float32")


def add_bias_rows(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """rows (M, N) plus bias (N,) or that of its group (G, N), in rows' dtype; rows past the last end stay as they are."""
    return direct.add_group_bias(rows, bias.expand(offs.shape[0], rows.shape[1]), offs)


def bias_grad(grad: torch.Tensor, offs: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a bias of that shape, (N,) or (G, N), from grad (M, N): float32 sums of the rows of the groups, rounded once."""
    (sums,) = direct.group_bias_grads(grad, offs)
    return (sums if len(shape) == 2 else sums.sum(0)).to(dtype)


@in_graph
class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(offs)
        ctx.bias_like = bias.shape, bias.dtype
        return add_bias_rows(rows, bias, offs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (offs,) = ctx.saved_tensors
        d_bias = bias_grad(dequantize_data(grads[0]), offs, *ctx.bias_like) if ctx.needs_input_grad[1] else None
        return grads[0], d_bias, None


def add_bias(rows: torch.Tensor, bias: torch.Tensor | None, offs: torch.Tensor) -> torch.Tensor:
    """`add_bias_rows`, differentiable; without a bias the rows as they are. The gradient of rows is the one that came, MX or plain."""
    return rows if bias is None else _AddBias.apply(rows, bias, offs)

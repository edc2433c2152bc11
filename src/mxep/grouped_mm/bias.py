"""A bias for the rows of each group: added in one pass, its gradient summed in a fixed order on every device."""

from __future__ import annotations

import torch

from mxep.checks import HIGH_PRECISION
from mxep.operators import direct


def check_bias(where: str, bias: torch.Tensor, num_groups: int, columns: int) -> None:
    """Raise ValueError unless bias is (N,) or (G, N) in bf16 or float32."""
    shapes = ((columns,), (num_groups, columns))
    if tuple(bias.shape) not in shapes or bias.dtype not in HIGH_PRECISION:
        raise ValueError(f"{where}: bias is {tuple(bias.shape)} {bias.dtype}, want {shapes[0]} or {shapes[1]}, bfloat16 or float32")


def add_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> None:
    """Add bias (N,), or that of its group (G, N), to rows (M, N) in place; rows past the last end stay as they are."""
    direct.add_group_bias(rows, bias.expand(offs.shape[0], rows.shape[1]), offs)


def bias_grad(grad: torch.Tensor, offs: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a bias of that shape, (N,) or (G, N), from grad (M, N): float32 sums of the rows of the groups, rounded once."""
    (sums,) = direct.group_bias_grads(grad, offs)
    return (sums if len(shape) == 2 else sums.sum(0)).to(dtype)

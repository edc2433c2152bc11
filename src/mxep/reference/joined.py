"""Two stacked weights quantised into one: gate and up as a single operand of a grouped GEMM, forward and dgrad."""

from __future__ import annotations

import torch

from mxep.reference.quantize import quantize, quantize_transposed


def quantize_joined(a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[a | b] along the rows of each group, 1x32 along the columns.

    Args:
        a: (G, R, C) bf16 or float32, R and C multiples of 32.  b: (G, S, C), the same dtype.  scaling_mode: "rceil" or "floor".

    Returns:
        qdata (G, R + S, C) float8_e4m3fn and scale (G, R + S, C/32) float8_e8m0fnu, both contiguous.
    """
    qdata, scale = quantize(torch.cat((a, b), 1), scaling_mode)
    return qdata.contiguous(), scale.contiguous()


def quantize_joined_transposed(a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[a | b] along the rows of each group, 32x1 along those rows: the MX form of the joined transposes.

    Args:
        a, b, scaling_mode: as in `quantize_joined`.

    Returns:
        qdata (G, C, R + S) float8_e4m3fn and scale (G, C, (R + S)/32) float8_e8m0fnu, both contiguous.
    """
    qdata, scale = quantize_transposed(torch.cat((a, b), 1), scaling_mode)
    return qdata.contiguous(), scale.contiguous()

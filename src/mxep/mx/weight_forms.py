"""The MX forms in which a grouped GEMM reads a stacked weight, without a copy of the weight before."""

from __future__ import annotations

import torch

import mxep.operators  # noqa: F401  defines torch.ops.mxep
from mxep.device import FP8_ROADS

Bytes = tuple[torch.Tensor, torch.Tensor]  # qdata, scale


def quantize_weight(weight: torch.Tensor, mode: str, dtype: torch.dtype | None = None) -> Bytes:
    """(qdata, scale) of (G, N, K) 1x32 along K; a transposed view is read as it lies in memory.

    Args:
        weight: bf16 or float32, any strides.  mode: "rceil" or "floor".
        dtype: to which the values are rounded before, None: not at all.
    """
    weight = weight if dtype is None else weight.to(dtype)
    if weight.stride(-1) != 1 and weight.stride(-2) == 1:
        return torch.ops.mxep.quantize_transposed(weight.transpose(-2, -1), mode)
    return torch.ops.mxep.quantize(weight.contiguous(), mode)


def quantize_weights(weights: tuple[torch.Tensor, ...], mode: str, which: str, dtype: torch.dtype | None = None) -> Bytes:
    """One weight, or two joined along their rows, as "forward" or "dgrad" reads them.

    Args:
        weights: (G, R, K) and perhaps (G, S, K), bf16 or float32, any strides.  mode: "rceil" or "floor".
        which: "forward", (G, R + S, K) 1x32 along K, or "dgrad", (G, K, R + S) 1x32 along R + S.
        dtype: as in `quantize_weight`.
    """
    if len(weights) == 1:
        return quantize_weight(weights[0] if which == "forward" else weights[0].transpose(-2, -1), mode, dtype)
    a, b = weights if dtype is None else (weight.to(dtype) for weight in weights)
    return torch.ops.mxep.quantize_joined(a, b, mode) if which == "forward" else torch.ops.mxep.quantize_joined_transposed(a, b, mode)


def for_path(form: Bytes, path: str) -> Bytes:
    """The form that a GEMM path reads: on the FP8 roads one exponent per output column (G, N) float32, elsewhere the MX bytes.

    For forms that are kept: a GEMM with MX bytes on an FP8 road does the same in every call.
    """
    return torch.ops.mxep.rebase_weight(*form) if path in FP8_ROADS else form

"""The grouped GEMMs of a device that benchmarks compare: our FP8 kernels on Hopper and their twins on a CPU, and torch's own in bf16."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from mxep import reference
from mxep.device import available_gemm_paths
from mxep.reference.rebase import RebasedRows, RebasedTokens, RebasedWeight

MOST_ERROR = 2.0e-3  # relative Frobenius norm of a bf16 result against the exact product of the MX operands


class FP8Functions(NamedTuple):
    """Signatures as in `mxep.reference.rebase` and `mxep.reference.fp8_grouped_mm`."""

    rebase_rows: Callable[..., RebasedRows]
    rebase_weight: Callable[..., RebasedWeight]
    rebase_tokens: Callable[..., RebasedTokens]
    grouped_mm: Callable[..., torch.Tensor]
    wgrad: Callable[..., torch.Tensor]


def fp8_functions(device: torch.device) -> FP8Functions:
    """Kernels or twins. Raises ValueError for a GPU that does not run them."""
    if device.type == "cuda":
        reason = available_gemm_paths(device)["fp8"]
        if reason is not None:
            raise ValueError(f"the FP8 GEMMs do not run on this GPU: {reason}")
    room = "kernels" if device.type == "cuda" else "reference"
    rebase, products = (importlib.import_module(f"mxep.{room}.{name}") for name in ("rebase", "fp8_grouped_mm"))
    return FP8Functions(rebase.rebase_rows, rebase.rebase_weight, rebase.rebase_tokens, products.fp8_grouped_mm, products.fp8_wgrad)


def torch_bf16(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's own grouped GEMM, 2D x 3D or 2D x 2D; on a CPU one product after the other."""
    if a.is_cuda:
        return torch._grouped_mm(a, b, offs=offs)
    if b.dim() == 3:
        return reference.grouped_mm_hp(a, b.transpose(1, 2), offs, torch.bfloat16)
    return reference.grouped_wgrad_hp(a.t(), b, offs, torch.bfloat16)

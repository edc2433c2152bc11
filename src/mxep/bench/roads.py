"""The FP8 functions of a device: the kernels on Hopper, their twins on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from mxep.device import available_gemm_paths
from mxep.reference.rebase import RebasedRows, RebasedTokens, RebasedWeight


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

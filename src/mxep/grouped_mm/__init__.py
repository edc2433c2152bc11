"""Differentiable grouped GEMM: one group of rows per expert, in MXFP8 or in high precision."""

from mxep.grouped_mm.function import (
    MXInputRequiresHPWgradError,
    _to_mxfp8_then_scaled_grouped_mm,
    expert_mm,
    recipe_grouped_mm,
    to_mxfp8_then_scaled_grouped_mm,
)

__all__ = [
    "MXInputRequiresHPWgradError",
    "_to_mxfp8_then_scaled_grouped_mm",
    "expert_mm",
    "recipe_grouped_mm",
    "to_mxfp8_then_scaled_grouped_mm",
]

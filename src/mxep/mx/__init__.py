"""The MX number format: e4m3 data with one e8m0 scale per 32 values. Knows nothing of MoE."""

from mxep.mx.layout import (
    blocked_shape,
    from_blocked,
    to_blocked,
    to_blocked_3d,
    to_blocked_groups_along_columns,
    to_blocked_groups_along_rows,
)
from mxep.mx.mxfp4 import mxfp4_to_mxfp8
from mxep.mx.tensor import MXTensor, quantize_mx, to_mx
from mxep.mx.weight import MXWeight
from mxep.recipe import KernelPreference, ScaleCalculationMode

__all__ = [
    "KernelPreference",
    "MXTensor",
    "MXWeight",
    "ScaleCalculationMode",
    "blocked_shape",
    "from_blocked",
    "mxfp4_to_mxfp8",
    "quantize_mx",
    "to_blocked",
    "to_blocked_3d",
    "to_blocked_groups_along_columns",
    "to_blocked_groups_along_rows",
    "to_mx",
]

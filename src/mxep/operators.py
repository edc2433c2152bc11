"""Schemas of the package's registered operators (`torch.ops.mxep.*`), one table.

Opaque operators are what torch.compile sees: `reference/` registers the CPU and the fake form of each, `kernels/` the CUDA one,
`comm/` the exchange.  e4m3 data and e8m0 scales travel as two tensors here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_SCHEMAS = (
    # format: x (..., D) -> (qdata (..., D) e4m3, scale (..., D/32) e8m0)
    "quantize(Tensor x, str scaling_mode) -> (Tensor, Tensor)",
    # 32x1: x (..., R, C) -> MX of the transpose: (qdata (..., C, R), scale (..., C, R/32))
    "quantize_transposed(Tensor x, str scaling_mode) -> (Tensor, Tensor)",
    # x (T, D) -> records (T, record_bytes(D)) uint8: D bytes e4m3, D/32 bytes e8m0, zero padding to 16 bytes
    "quantize_packed(Tensor x, str scaling_mode) -> Tensor",
    "dequantize(Tensor qdata, Tensor scale, ScalarType dtype) -> Tensor",
    # movers: out[p] = rows[row_map[p]], zeros where row_map[p] is -1
    "gather_rows(Tensor rows, Tensor row_map) -> Tensor",
    "gather_mx_rows(Tensor qdata, Tensor scale, Tensor row_map) -> (Tensor, Tensor)",
    # out[row_map[p]] = rows[p], (num_rows, ...) with zeros where no p points
    "scatter_rows(Tensor rows, Tensor row_map, SymInt num_rows) -> Tensor",
    "scatter_mx_rows(Tensor qdata, Tensor scale, Tensor row_map, SymInt num_rows) -> (Tensor, Tensor)",
    # counts (W*L,) rank-major -> (row_map (P,), padded counts (L,), END offsets (L,)), int32
    "group_index(Tensor counts, int ep_degree, int num_local_experts, int alignment, SymInt num_padded_rows) -> (Tensor, Tensor, Tensor)",
    # all-to-all of rows (T', ...) -> (sum(output_splits), ...)
    "exchange_rows(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name) -> Tensor",
    # GEMMs over row groups that end at offs (G,) int32; rows past the last end come out as zero
    "grouped_mm_hp(Tensor a, Tensor b, Tensor offs, ScalarType out_dtype) -> Tensor",  # (M, K) x (G, N, K) -> (M, N)
    "grouped_mm_mx(Tensor qa, Tensor sa, Tensor qb, Tensor sb, Tensor offs, ScalarType out_dtype, str path) -> Tensor",
    "grouped_wgrad_hp(Tensor grad, Tensor a, Tensor offs, ScalarType out_dtype) -> Tensor",  # (M, N), (M, K) -> (G, N, K)
    # both operands 32x1 along M: qg (N, M), qa (K, M)
    "grouped_wgrad_mx(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path) -> Tensor",
)

_library = torch.library.Library("mxep", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema)

OPERATORS: tuple[str, ...] = tuple(schema.split("(", 1)[0] for schema in _SCHEMAS)


def register(name: str, dispatch_key: str) -> Callable[[Callable], Callable]:
    """Decorator: make a function the implementation of `torch.ops.mxep.<name>` for a dispatch key ("CPU", "CUDA")."""

    def decorate(function: Callable) -> Callable:
        _library.impl(name, function, dispatch_key)
        return function

    return decorate


def register_fake(name: str) -> Callable[[Callable], Callable]:
    """Decorator: make a function the fake (shape-only) form of `torch.ops.mxep.<name>`."""

    def decorate(function: Callable) -> Callable:
        torch.library.register_fake(f"mxep::{name}", function, lib=_library)
        return function

    return decorate

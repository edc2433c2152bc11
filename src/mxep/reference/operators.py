"""Registers the CPU and fake forms of `torch.ops.mxep.*` (schemas: mxep.operators)."""

from __future__ import annotations

import torch

from mxep import reference
from mxep.operators import OPERATORS, register, register_fake
from mxep.shapes import MX_BLOCK, record_bytes

_ELSEWHERE = ("exchange_rows",)  # comm/ registers it: it needs a process group

for _name in OPERATORS:
    if _name not in _ELSEWHERE:
        register(_name, "CPU")(getattr(reference, _name))


def _mx_like(x: torch.Tensor, shape: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, width = shape
    return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty((*lead, width // MX_BLOCK), dtype=torch.float8_e8m0fnu)


@register_fake("quantize")
def _quantize(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(x, tuple(x.shape))


@register_fake("quantize_transposed")
def _quantize_transposed(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


@register_fake("quantize_packed")
def _quantize_packed(x: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8)


@register_fake("dequantize")
def _dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return qdata.new_empty(qdata.shape, dtype=dtype)


@register_fake("gather_rows")
def _gather_rows(rows: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((row_map.shape[0], *rows.shape[1:]))


@register_fake("gather_mx_rows")
def _gather_mx_rows(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _gather_rows(qdata, row_map), _gather_rows(scale, row_map)


@register_fake("scatter_rows")
def _scatter_rows(rows: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


@register_fake("scatter_mx_rows")
def _scatter_mx_rows(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _scatter_rows(qdata, row_map, num_rows), _scatter_rows(scale, row_map, num_rows)


@register_fake("group_index")
def _group_index(
    counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(counts.new_empty((n,), dtype=torch.int32) for n in (num_padded_rows, num_local_experts, num_local_experts))  # type: ignore[return-value]


@register_fake("grouped_mm_hp")
def _grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@register_fake("grouped_mm_mx")
def _grouped_mm_mx(
    qa: torch.Tensor, sa: torch.Tensor, qb: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    return _grouped_mm_hp(qa, qb, offs, out_dtype)


@register_fake("grouped_wgrad_hp")
def _grouped_wgrad_hp(grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((offs.shape[0], grad.shape[1], a.shape[1]), dtype=out_dtype)


@register_fake("grouped_wgrad_mx")
def _grouped_wgrad_mx(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    return qa.new_empty((offs.shape[0], qg.shape[0], qa.shape[0]), dtype=out_dtype)

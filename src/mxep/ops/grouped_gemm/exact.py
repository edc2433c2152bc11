"""The GEMM path "exact": MX operands are dequantised to bf16, which holds e4m3 times a power of two exactly, and multiplied in bf16."""

from __future__ import annotations

import torch

from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows
from mxep.ops.grouped_gemm.reference import check_padding_rows, check_rows
from mxep.ops.grouped_gemm.triton import grouped_mm_hp
from mxep.ops.grouped_gemm.wgrad import grouped_wgrad_hp
from mxep.ops.quantize.dequantize import dequantize

Bytes = tuple[torch.Tensor, torch.Tensor]  # qdata e4m3, scale e8m0


class ExactPath:
    """A GEMM path: grouped GEMMs of MX operands on one kind of GPU.  Other paths override what they compute differently.

    The operators of paths.py document the arguments; `mxep.device.available_gemm_paths` says which GPUs a path runs on.
    """

    def grouped_mm(
        self,
        qa: torch.Tensor,
        sa: torch.Tensor,
        qb: torch.Tensor,
        sb: torch.Tensor,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        row_map: torch.Tensor | None,
        padding_rows: str,
        block_scale: torch.Tensor | None,
        inner: torch.Tensor | None,
        lora_b: torch.Tensor | None,
    ) -> torch.Tensor:
        """`grouped_mm_mx`, offs int32 and contiguous; rows that their producer has rebased are for paths that have a granularity."""
        check_padding_rows("grouped_mm_mx", padding_rows)
        rows = check_rows(qa, sa, row_map, block_scale)
        if isinstance(rows, RebasedRows):
            raise ValueError("grouped_mm_mx: rebased rows on a path that multiplies MX rows, want a path of FP8_PATHS; pass the MX rows")
        if inner is not None or lora_b is not None:
            raise ValueError("grouped_mm_mx: an adapter on a path that adds none, want a path of FP8_PATHS; add it by add_group_lora")
        return self.gemm(rows, (qb, sb), offs, out_dtype, row_map, padding_rows)

    def gemm(
        self,
        rows: Bytes,
        weight: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        row_map: torch.Tensor | None,
        padding_rows: str,
    ) -> torch.Tensor:
        """`grouped_mm_mx` of MX rows and weights, without an adapter."""
        num_valid_rows = offs[-1:] if padding_rows == "skip" else None
        values, weights = dequantize(*rows, torch.bfloat16, row_map, num_valid_rows), dequantize(*weight, torch.bfloat16)
        return grouped_mm_hp(values, weights, offs, out_dtype, padding_rows)

    def wgrad(
        self,
        grad: Bytes,
        a: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        g_map: torch.Tensor | None = None,
        a_map: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        mostly_padding: bool = False,
    ) -> torch.Tensor:
        """`grouped_wgrad_mx`."""
        values = dequantize(*grad, torch.bfloat16, g_map), dequantize(*a, torch.bfloat16, a_map)
        return grouped_wgrad_hp(*values, offs, out_dtype, out, accumulate)

    def wgrad_gate_up(
        self,
        grad: Bytes,
        a: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        a_map: torch.Tensor | None,
        outs: tuple[torch.Tensor | None, torch.Tensor | None],
        mostly_padding: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`grouped_wgrad_mx_gate_up`."""
        values, d_gate_up = dequantize(*a, torch.bfloat16, a_map), dequantize(*grad, torch.bfloat16).chunk(2, 1)
        gate, up = (grouped_wgrad_hp(part, values, offs, out_dtype, out) for part, out in zip(d_gate_up, outs, strict=True))
        return gate, up

    def wgrad_columnwise(self, grad: Bytes, a: Bytes, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """`grouped_wgrad_mx_columnwise`."""
        return grouped_wgrad_hp(dequantize(*grad, torch.bfloat16).t(), dequantize(*a, torch.bfloat16).t(), offs, out_dtype)

"""The GEMM path "blackwell": torch's scaled grouped GEMM on SM100, with blocked 1x32 e8m0 scales.  It has never run on hardware.

That GEMM writes bf16 alone.  Float32 results take the path "exact", which rounds less.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mxep.device import compute_capability
from mxep.mx.layout import to_blocked_3d, to_blocked_groups_along_columns, to_blocked_groups_along_rows
from mxep.ops.grouped_gemm.exact import Bytes, ExactPath
from mxep.ops.grouped_gemm.triton import zero_padding_rows
from mxep.ops.rows.permute import gather_mx_rows
from mxep.shapes import MX_BLOCK


def _scaled_grouped_mm(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's scaled grouped GEMM, bf16 out.

    On Hopper the same call does not raise, it destroys the CUDA context: hence this check, after the one in mxep.device.
    """
    capability = compute_capability(a.device.index)
    assert capability[0] == 10, f"the blackwell path was let through on SM{capability[0]}{capability[1]}"
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, b, sa, recipe, sb, recipe, swizzle_a=swizzle, swizzle_b=swizzle, offs=offs, output_dtype=torch.bfloat16
    )


class BlackwellPath(ExactPath):
    """Forward, dgrad and columnwise wgrad on scaled tensor cores; wgrad from MX rows is that of "exact"."""

    def gemm(
        self,
        rows: Bytes,
        weight: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        row_map: torch.Tensor | None,
        padding_rows: str,
    ) -> torch.Tensor:
        if row_map is not None:
            rows = gather_mx_rows(*rows, row_map, offs[-1:] if padding_rows == "skip" else None)
        if out_dtype != torch.bfloat16 or not rows[0].shape[0]:
            return super().gemm(rows, weight, offs, out_dtype, None, padding_rows)
        blocked = to_blocked_groups_along_rows(rows[1], offs)[0], to_blocked_3d(weight[1])
        out = _scaled_grouped_mm(rows[0].contiguous(), blocked[0], weight[0].contiguous().transpose(-2, -1), blocked[1], offs)
        if padding_rows != "skip":
            zero_padding_rows(out, offs)
        return out

    def wgrad_columnwise(self, grad: Bytes, a: Bytes, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        if out_dtype != torch.bfloat16 or not grad[0].shape[1]:
            return super().wgrad_columnwise(grad, a, offs, out_dtype)
        offs = offs.to(torch.int32).contiguous()
        blocks = offs // MX_BLOCK  # ends of the groups in scale columns
        sg, sa = (to_blocked_groups_along_columns(scale, blocks)[0] for scale in (grad[1], a[1]))
        out = _scaled_grouped_mm(grad[0].contiguous(), sg, a[0].contiguous().t(), sa, offs)
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        return out.masked_fill_((sizes == 0)[:, None, None], 0)

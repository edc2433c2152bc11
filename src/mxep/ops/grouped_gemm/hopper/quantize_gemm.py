"""Plain rows through an FP8 GEMM: quantised and rebased (`quantize_rows`), then multiplied (`fp8_grouped_mm`), by one call on the host.

The rebased rows live between the two launches alone, so they are one allocation without tensors of its parts.  What depends on shapes,
strides and dtypes is checked and made once for each combination of them: for narrow layers the host's time is most of a call.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.device import multiprocessors
from mxep.ops.grouped_gemm.hopper import gemm, quantize_rows
from mxep.ops.grouped_gemm.hopper.rebase_reference import BLOCK_128, MAX_SPREAD, RebasedRows, RebasedWeight
from mxep.ops.grouped_gemm.reference import check_padding_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel
from mxep.ops.runtime.plans import KEPT_PLANS, Like, like
from mxep.recipe import SCALING_MODES
from mxep.shapes import MX_BLOCK, cdiv, round_up

_PART_BYTES = 256  # parts of the scratch memory start at multiples of it


class _GemmPlan(NamedTuple):
    """A call without its addresses.

    Attributes:
        quantize, blocks: kernel and blocks of quantize_rows.cu.  gemm, programs: of gemm.cu.
        scratch: bytes of the rebased rows: data, from `scale` on their scales, from `block_scale` on those of 128 columns (0: none),
            `block_scale_row` of them in a row.
    """

    quantize: Kernel
    blocks: int
    gemm: Kernel
    programs: int
    scratch: int
    scale: int
    block_scale: int
    block_scale_row: int


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(
    x: Like,
    column_stride: int,
    qb: Like,
    sb: Like,
    offs: Like,
    contiguous: bool,
    factors: tuple[Like, Like] | None,
    out_dtype: torch.dtype,
    scaling_mode: str,
    granularity: str,
    mx: bool,
    padding_rows: str,
    wide: bool,
) -> _GemmPlan | None:
    """None for operands that `_one_after_the_other` takes, or refuses: unusual layouts, and no rows; contiguous: all but x."""
    if len(x[0]) != 2 or len(qb[0]) != 3:
        return None
    ((M, K), dtype, device), (G, N, _) = x, qb[0]
    weight = ((G, N, K), torch.float8_e4m3fn, device), ((G, N), torch.float32, device)
    fits = contiguous and column_stride == 1 and (qb, sb, offs) == (*weight, ((G,), torch.int32, device))
    sizes = M and N and K and G and K % MX_BLOCK == 0 and N % MX_BLOCK == 0 and K <= tiles.QUANTIZE_ROWS_WIDEST
    known = dtype in (torch.bfloat16, torch.float32) and out_dtype in (torch.bfloat16, torch.float32)
    if not (fits and sizes and known and scaling_mode in SCALING_MODES and granularity in MAX_SPREAD):
        return None
    if factors is not None:
        shapes = (M, gemm.FUSED_RANK), (G, N, gemm.FUSED_RANK)
        if out_dtype != torch.bfloat16 or factors != tuple((shape, torch.bfloat16, device) for shape in shapes):
            return None
    block_scales, skip = granularity != "row", check_padding_rows("quantize_grouped_mm", padding_rows)
    scale = round_up(M * K, _PART_BYTES)
    block_scale, row = scale + round_up(4 * M, _PART_BYTES), round_up(M, 8)  # whole sectors
    end = block_scale + 4 * row * cdiv(K, BLOCK_128) * block_scales
    quantize = quantize_rows.kernel_of(K, dtype.itemsize, wide, block_scales, mx, scaling_mode)
    blocks, programs = cdiv(M, quantize.options["ROWS"]), multiprocessors(device.index)
    multiply = gemm.kernel_of(False, block_scales, out_dtype, False, skip, factors is not None)
    return _GemmPlan(quantize, blocks, multiply, programs, end, scale, block_scale * block_scales, row * block_scales)


def _one_after_the_other(
    x: Tensor,
    weight: RebasedWeight,
    offs: Tensor,
    out_dtype: torch.dtype,
    scaling_mode: str,
    granularity: str,
    mx: bool,
    padding_rows: str,
    inner: Tensor | None,
    lora_b: Tensor | None,
) -> list[Tensor]:
    made = quantize_rows.quantize_rows(x, scaling_mode, granularity, mx)
    rows = RebasedRows(*made[2 * mx :])
    return [gemm.fp8_grouped_mm(rows, weight, offs, out_dtype, padding_rows, inner, lora_b), *made[: 2 * mx]]


def quantize_grouped_mm(
    x: Tensor,
    qb: Tensor,
    sb: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    scaling_mode: str,
    granularity: str,
    mx: bool,
    padding_rows: str = "zero",
    inner: Tensor | None = None,
    lora_b: Tensor | None = None,
) -> list[Tensor]:
    """out[rows of g] = x[rows of g] @ b[g].T, x quantised to MXFP8: `quantize_rows` and `fp8_grouped_mm`, to the bit.

    Args:
        x: (M, K) bf16 or float32, K a multiple of 32, any strides.
        qb, sb: (G, N, K) and (G, N) float32, what `quantize_weight` makes.
        offs: (G,) int32 or int64 END offsets on the device, not decreasing, the last at most M.
        out_dtype: bfloat16 or float32.
        scaling_mode: a scaling mode's name.  granularity: of the rows' scales, a key of `MAX_SPREAD`.
        mx: whether the rows are wanted in MX too.
        padding_rows, inner, lora_b: as in `fp8_grouped_mm`.

    Returns:
        out (M, N); with mx then qdata (M, K) float8_e4m3fn and scale (M, K/32) float8_e8m0fnu of x.

    Raises:
        ValueError: operands that do not fit.
    """
    address, (row_stride, column_stride) = x.data_ptr(), x.stride()
    row_bytes, factors = row_stride * x.element_size(), None
    contiguous = qb.is_contiguous() and sb.is_contiguous() and offs.is_contiguous()
    if inner is not None and lora_b is not None:
        factors, contiguous = (like(inner), like(lora_b)), contiguous and inner.is_contiguous() and lora_b.is_contiguous()
    how = out_dtype, scaling_mode, granularity, mx, padding_rows
    wide = not (address | row_bytes) % quantize_rows.LOAD_BYTES
    plan = _plan(like(x), column_stride, like(qb), like(sb), like(offs), contiguous, factors, *how, wide)
    if plan is None:
        return _one_after_the_other(x, RebasedWeight(qb, sb), offs, *how, inner, lora_b)

    (M, K), (G, N, _), device = x.shape, qb.shape, x.device.index
    out = x.new_empty((M, N), dtype=out_dtype)
    rows = x.new_empty(plan.scratch, dtype=torch.uint8)
    data = rows.data_ptr()
    scales = data + plan.scale, data + plan.block_scale if plan.block_scale else 0, plan.block_scale_row
    made, in_mx = [out], (0, 0)
    if mx:
        qdata, scale = x.new_empty((M, K), dtype=torch.float8_e4m3fn), x.new_empty((M, K // MX_BLOCK), dtype=torch.float8_e8m0fnu)
        made, in_mx = [out, qdata, scale], (qdata.data_ptr(), scale.data_ptr())
    plan.quantize.run(
        device, plan.blocks, quantize_rows.arguments_of(address, row_bytes, *in_mx, data, *scales, MAX_SPREAD[granularity], M)
    )
    lora = (0, 0) if factors is None else (inner.data_ptr(), lora_b.data_ptr())  # type: ignore[union-attr]
    others = qb.data_ptr(), sb.data_ptr(), offs.data_ptr(), out.data_ptr(), out_dtype == torch.bfloat16, *lora
    plan.gemm.run(device, plan.programs, gemm.forward_arguments(M, N, K, G, data, K, *scales, *others))
    return made

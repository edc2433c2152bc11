"""Rows through an FP8 GEMM by one call on the host: plain rows, MX rows, and rows that their producer has rebased.

The GEMM reads rebased rows.  Rows that this file rebases exist only between two launches, so they are one allocation, and its parts are
addresses and no tensors.  Every function has a plan (`mxep.ops.runtime.plans`).  Without a plan it calls one launcher after the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mxep.device import multiprocessors
from mxep.ops.grouped_gemm.hopper import gemm, quantize_rows
from mxep.ops.grouped_gemm.hopper.rebase import LOAD_BYTES, rebase_rows, rows_blocks, rows_kernel
from mxep.ops.grouped_gemm.hopper.rebase_reference import BLOCK_128, MAX_SPREAD, RebasedRows, RebasedWeight
from mxep.ops.grouped_gemm.reference import check_padding_rows, check_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel, packed
from mxep.ops.runtime.plans import KEPT_PLANS, Like, like
from mxep.recipe import SCALING_MODES
from mxep.shapes import MX_BLOCK, cdiv, round_up

_PART_BYTES = 256  # parts of the memory start at multiples of it
_DTYPES = (torch.bfloat16, torch.float32)
# of a plan, all but the rows: likes of qb, sb, offs, inner, lora_b, whether all are contiguous, the result's dtype, padding_rows
_Rest = tuple[Like, Like, Like, Like | None, Like | None, bool, torch.dtype, str]


class _RowsPlan(NamedTuple):
    """A call without its addresses.

    Attributes:
        M, N, K, G: rows, columns, summed, groups.
        gemm, programs: kernel and blocks of gemm.cu.
        first, blocks: of the kernel that rebases; None: none does.
        bytes: of the rebased rows' memory: data, from `scale` on scales, from `block_scale` on those of 128 columns (0: none), of which
            `block_scale_row` are in a row, from `spread` on spreads.
    """

    M: int
    N: int
    K: int
    G: int
    gemm: Kernel
    programs: int
    first: Kernel | None
    blocks: int
    bytes: int
    scale: int
    block_scale: int
    block_scale_row: int
    spread: int


def _rest(
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    padding_rows: str,
    inner: torch.Tensor | None,
    lora_b: torch.Tensor | None,
) -> _Rest:
    likes, contiguous = (None, None), qb.is_contiguous() and sb.is_contiguous() and offs.is_contiguous()
    if inner is not None or lora_b is not None:
        if inner is None or lora_b is None:
            raise ValueError("grouped_mm_mx: one of inner and lora_b is None, want both factors of an adapter, or none; pass both")
        likes, contiguous = (like(inner), like(lora_b)), contiguous and inner.is_contiguous() and lora_b.is_contiguous()
    return like(qb), like(sb), like(offs), *likes, contiguous, out_dtype, padding_rows


def _plan(M: int, K: int, device: torch.device, block_scales: bool, rest: _Rest, first: Kernel | None, blocks: int) -> _RowsPlan | None:
    """The plan for M rows of K values; None unless the weight and all other operands fit and are read as they are."""
    qb, sb, offs, inner, lora_b, contiguous, out_dtype, padding_rows = rest
    skip = check_padding_rows("grouped_mm_mx", padding_rows)
    if len(qb[0]) != 3 or not contiguous or out_dtype not in _DTYPES:
        return None
    G, N, _ = qb[0]
    wanted = ((G, N, K), torch.float8_e4m3fn, device), ((G, N), torch.float32, device), ((G,), torch.int32, device)
    if (qb, sb, offs) != wanted or not (M and N and K and G) or N % MX_BLOCK or K % MX_BLOCK:
        return None
    adapter = ((M, gemm.FUSED_RANK), torch.bfloat16, device), ((G, N, gemm.FUSED_RANK), torch.bfloat16, device)
    if inner is not None and ((inner, lora_b) != adapter or out_dtype != torch.bfloat16):
        return None
    multiply = gemm.kernel_of(False, block_scales, out_dtype, False, skip, inner is not None)
    scale = round_up(M * K, _PART_BYTES)
    block_scale, row = scale + round_up(4 * M, _PART_BYTES), round_up(M, 8)  # whole sectors
    spread = block_scale + 4 * row * cdiv(K, BLOCK_128) * block_scales
    memory = spread + M, scale, block_scale * block_scales, row * block_scales, spread
    return _RowsPlan(M, N, K, G, multiply, multiprocessors(device.index), first, blocks, *memory)


def _multiply(
    plan: _RowsPlan,
    data: int,
    row: int,
    scale: int,
    block_scale: int,
    block_scale_row: int,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    inner: torch.Tensor | None,
    lora_b: torch.Tensor | None,
) -> torch.Tensor:
    """The GEMM of rebased rows at these addresses."""
    out = qb.new_empty((plan.M, plan.N), dtype=out_dtype)
    adapter = (0, 0) if inner is None or lora_b is None else (inner.data_ptr(), lora_b.data_ptr())
    others = qb.data_ptr(), sb.data_ptr(), offs.data_ptr(), out.data_ptr(), out_dtype == torch.bfloat16, *adapter
    rows = data, row, scale, block_scale, block_scale_row
    plan.gemm.run(qb.device.index, plan.programs, gemm.forward_arguments(plan.M, plan.N, plan.K, plan.G, *rows, *others))
    return out


# ---------------------------------------------------------------- plain rows


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plain_plan(x: Like, column_stride: int, wide: bool, scaling_mode: str, granularity: str, mx: bool, rest: _Rest) -> _RowsPlan | None:
    if len(x[0]) != 2 or column_stride != 1 or scaling_mode not in SCALING_MODES or granularity not in MAX_SPREAD:
        return None
    (M, K), dtype, device = x
    if dtype not in _DTYPES or not K or K % MX_BLOCK or K > tiles.QUANTIZE_ROWS_WIDEST:
        return None
    first = quantize_rows.kernel_of(K, dtype.itemsize, wide, granularity != "row", mx, scaling_mode)
    return _plan(M, K, device, granularity != "row", rest, first, cdiv(M, first.options["ROWS"]))


def quantize_grouped_mm(
    x: torch.Tensor,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    scaling_mode: str,
    granularity: str,
    mx: bool,
    padding_rows: str = "zero",
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> list[torch.Tensor]:
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
    address, column_stride = x.data_ptr(), x.stride(-1)
    row_bytes = x.stride(0) * x.element_size()
    wide, rest = not (address | row_bytes) % quantize_rows.LOAD_BYTES, _rest(qb, sb, offs, out_dtype, padding_rows, inner, lora_b)
    plan = _plain_plan(like(x), column_stride, wide, scaling_mode, granularity, mx, rest)
    if plan is None:
        made = quantize_rows.quantize_rows(x, scaling_mode, granularity, mx)
        rows, weight = RebasedRows(*made[2 * mx :]), RebasedWeight(qb, sb)
        return [gemm.fp8_grouped_mm(rows, weight, offs, out_dtype, padding_rows, inner, lora_b), *made[: 2 * mx]]
    assert plan.first is not None
    of_mx, in_mx = [], (0, 0)
    if mx:
        of_mx = [x.new_empty((plan.M, plan.K), dtype=torch.float8_e4m3fn)]
        of_mx.append(x.new_empty((plan.M, plan.K // MX_BLOCK), dtype=torch.float8_e8m0fnu))
        in_mx = of_mx[0].data_ptr(), of_mx[1].data_ptr()
    memory = x.new_empty(plan.bytes, dtype=torch.uint8)
    data = memory.data_ptr()
    scales = data + plan.scale, plan.block_scale and data + plan.block_scale, plan.block_scale_row
    arguments = packed(address, row_bytes, *in_mx, data, *scales, MAX_SPREAD[granularity], plan.M)
    plan.first.run(x.device.index, plan.blocks, arguments)
    return [_multiply(plan, data, plan.K, *scales, qb, sb, offs, out_dtype, inner, lora_b), *of_mx]


# ---------------------------------------------------------------- MX rows


@functools.lru_cache(maxsize=KEPT_PLANS)
def _mx_plan(qa: Like, sa: Like, row_map: Like | None, max_spread: int, rest: _Rest) -> _RowsPlan | None:
    if len(qa[0]) != 2 or qa[1] != torch.float8_e4m3fn or sa[1] not in (torch.float8_e8m0fnu, torch.uint8):
        return None
    (R, K), _, device = qa
    if not K or sa[0] != (R, K // MX_BLOCK) or sa[2] != device:
        return None
    if row_map is not None and (len(row_map[0]) != 1 or row_map[1:] != (torch.int32, device)):
        return None
    M, skip, block_scales = R if row_map is None else row_map[0][0], rest[-1] == "skip", max_spread < MAX_SPREAD["row"]
    first = rows_kernel(K, block_scales, row_map is not None, skip)
    return _plan(M, K, device, block_scales, rest, first, rows_blocks(M, first, skip))


def rebase_grouped_mm(
    qa: torch.Tensor,
    sa: torch.Tensor,
    row_map: torch.Tensor | None,
    max_spread: int,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    padding_rows: str = "zero",
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The GEMM of MX rows qa (R, K), sa (R, K/32), read through a row_map (M,): `rebase_rows` and `fp8_grouped_mm`, to the bit.

    Args: row_map, max_spread: as in `rebase_rows`.  The others as in `quantize_grouped_mm`.
    """
    plan, rest = None, _rest(qb, sb, offs, out_dtype, padding_rows, inner, lora_b)
    of_map = None if row_map is None else like(row_map)
    if qa.stride(-1) == sa.stride(-1) == 1 and not (qa.data_ptr() | qa.stride(0)) % LOAD_BYTES:
        plan = _mx_plan(like(qa), like(sa), of_map, max_spread, rest) if row_map is None or row_map.is_contiguous() else None
    if plan is None:
        rows = rebase_rows(qa, sa, max_spread, row_map, offs[-1:] if padding_rows == "skip" else None)
        return gemm.fp8_grouped_mm(rows, RebasedWeight(qb, sb), offs, out_dtype, padding_rows, inner, lora_b)
    assert plan.first is not None
    memory = qa.new_empty(plan.bytes, dtype=torch.uint8)
    data = memory.data_ptr()
    scales = data + plan.scale, plan.block_scale and data + plan.block_scale, plan.block_scale_row
    rows_at = qa.data_ptr(), qa.stride(0), sa.data_ptr(), sa.stride(0), 0 if row_map is None else row_map.data_ptr(), plan.M, max_spread
    num_valid = offs.data_ptr() + 4 * (plan.G - 1) if padding_rows == "skip" else 0
    plan.first.run(qa.device.index, plan.blocks, packed(*rows_at, data, *scales, data + plan.spread, num_valid))
    return _multiply(plan, data, plan.K, *scales, qb, sb, offs, out_dtype, inner, lora_b)


# ---------------------------------------------------------------- rebased rows


@functools.lru_cache(maxsize=KEPT_PLANS)
def _rebased_plan(data: Like, scale: Like, block_scale: Like | None, rest: _Rest) -> _RowsPlan | None:
    if len(data[0]) != 2 or data[1] != torch.float8_e4m3fn:
        return None
    (M, K), _, device = data
    scales = ((M,), torch.float32, device), ((cdiv(K, BLOCK_128), M), torch.float32, device)
    if scale != scales[0] or block_scale not in (None, scales[1]):
        return None
    return _plan(M, K, device, block_scale is not None, rest, None, 0)


def rebased_grouped_mm(
    data: torch.Tensor,
    scale: torch.Tensor,
    block_scale: torch.Tensor | None,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    padding_rows: str = "zero",
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The GEMM of `RebasedRows`: `fp8_grouped_mm`, to the bit."""
    plan, rest = None, _rest(qb, sb, offs, out_dtype, padding_rows, inner, lora_b)
    of_blocks, block_scales = None, (0, 0)
    if block_scale is not None:
        of_blocks, block_scales = like(block_scale), (block_scale.data_ptr(), block_scale.stride(0))
    if data.stride(-1) == scale.stride(-1) == 1 and (block_scale is None or block_scale.stride(-1) == 1):
        plan = _rebased_plan(like(data), like(scale), of_blocks, rest)
    if plan is None:
        rows = check_rows(data, scale, None, block_scale)
        assert isinstance(rows, RebasedRows)
        return gemm.fp8_grouped_mm(rows, RebasedWeight(qb, sb), offs, out_dtype, padding_rows, inner, lora_b)
    rows_at = data.data_ptr(), data.stride(0), scale.data_ptr(), *block_scales
    return _multiply(plan, *rows_at, qb, sb, offs, out_dtype, inner, lora_b)

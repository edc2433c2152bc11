"""Grouped GEMMs on the GPU without a host sync; group g owns the rows from offs[g-1] to offs[g], and offs stays on the device.

Which code runs:
- bf16 operands, bf16 out, on SM90 or SM100: torch's CUTLASS grouped GEMM (it has no other form that needs no sync), then one small
  launch that zeroes the rows past the last end, and only those;
- everything else (float32 out, float32 operands, other GPUs, odd widths): the Triton kernels here, which sum in float32;
- MX operands: dequantised to bf16 and then as above (path "exact"), or torch's scaled grouped GEMM (path "blackwell").

The sums over tokens (wgrad) stand in grouped_wgrad.py.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mxep.device import FP8_ROADS, ROUGH_ROADS, compute_capability, resolve_gemm_path
from mxep.kernels import tiles
from mxep.kernels.dequantize import dequantize
from mxep.kernels.fp8_grouped_mm import fp8_grouped_mm
from mxep.kernels.launch import launch
from mxep.kernels.rebase import rebase_rows, rebase_weight
from mxep.kernels.rows import gather_mx_rows
from mxep.mx.layout import to_blocked_3d, to_blocked_groups_along_rows
from mxep.reference.grouped_mm import check_tail
from mxep.reference.rebase import WIDE_ABOVE, RebasedWeight
from mxep.shapes import cdiv, next_power_of_2

_TORCH_MOST_GROUPS = 1024  # torch prepares its grouped GEMM with one thread per group
_TORCH_ALIGNMENT = 8  # bf16 values in the 16 bytes that TMA wants strides to be multiples of


@functools.cache
def promoted_every(path: str) -> int:
    """Products that an FP8 path adds up between two promotions to float32; 0: it never promotes."""
    return ROUGH_ROADS.get(path, 128)


def gemm_path(name: str, device: torch.device) -> str:
    """`resolve_gemm_path`, asked once: the answer does not change, and asking costs more than a launch."""
    return resolve_gemm_path(name, device)


@functools.cache
def _generation(index: int) -> int:
    """Major compute capability of a CUDA device."""
    return compute_capability(index)[0]


@triton.jit(do_not_specialize=["M", "G"])
def _grouped_mm_kernel(
    a,  # (M, K)
    a_row,
    a_column,
    b,  # (G, N, K)
    b_group,
    b_row,
    b_column,
    out,  # (M, N) contiguous
    offs,  # (G,) int32
    M,
    N,
    K,
    G,
    GROUPS: tl.constexpr,  # power of two above G
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FLOAT32: tl.constexpr,  # multiply in float32 instead of on bf16 tensor cores
    SKIP: tl.constexpr,  # rows past the last end are nobody's
):
    column_tiles = tl.cdiv(N, COLUMNS)
    row_tile = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    # Which group owns this row tile: group G stands for the rows past the last end, which come out as zero.
    group = tl.arange(0, GROUPS)
    starts = tl.load(offs + group - 1, mask=(group > 0) & (group <= G), other=0)
    ends = tl.load(offs + group, mask=group < G, other=0)
    ends = tl.minimum(tl.where(group == G, M, ends), M)
    group_tiles = tl.cdiv(tl.maximum(ends - starts, 0), ROWS)
    tiles_before = tl.cumsum(group_tiles, axis=0)
    owner = tl.sum((tiles_before <= row_tile).to(tl.int32), axis=0)
    if owner <= G - SKIP:
        mine = group == owner
        start = tl.sum(tl.where(mine, starts, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
        first_tile = tl.sum(tl.where(mine, tiles_before - group_tiles, 0), axis=0)
        row = start + (row_tile - first_tile) * ROWS + tl.arange(0, ROWS)
        depth = tl.arange(0, DEPTH)
        a_tile = a + row.to(tl.int64)[:, None] * a_row + depth.to(tl.int64)[None, :] * a_column
        b_tile = b + owner.to(tl.int64) * b_group + column.to(tl.int64)[None, :] * b_row + depth.to(tl.int64)[:, None] * b_column
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, tl.where(owner < G, K, 0), DEPTH):
            inside = depth < K - k
            left = tl.load(a_tile, mask=(row < end)[:, None] & inside[None, :], other=0)  # (ROWS, DEPTH)
            right = tl.load(b_tile, mask=inside[:, None] & (column < N)[None, :], other=0)  # (DEPTH, COLUMNS)
            if FLOAT32:
                acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(left, right, acc)
            a_tile += DEPTH * a_column
            b_tile += DEPTH * b_column
        target = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["G", "M"])
def _zero_tail_kernel(
    out,  # (M, N) contiguous
    offs,  # (G,) int32
    G,
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(offs + G - 1)
    for first in range(end + tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        target = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(target, tl.zeros((ROWS, COLUMNS), out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


def _zero_tail(out: torch.Tensor, offs: torch.Tensor) -> None:
    """Zeroes the rows of out (M, N) from offs[-1] on, and writes nothing else."""
    num_rows, width = out.shape
    tile_rows, tile_columns = tiles.ZERO.fit(width)
    grid = (min(cdiv(num_rows, tile_rows), tiles.ZERO_PROGRAMS), cdiv(width, tile_columns))
    launch(
        _zero_tail_kernel,
        grid,
        {
            "out": out,
            "offs": offs,
            "G": offs.shape[0],
            "M": num_rows,
            "N": width,
            "ROWS": tile_rows,
            "COLUMNS": tile_columns,
        },
        num_warps=tiles.ZERO.warps,
    )


def for_torch(matrix: torch.Tensor) -> torch.Tensor:
    """Row-major with 16-byte aligned rows: `matrix` itself, or a copy."""
    fits = matrix.stride(-1) == 1 and all(stride % _TORCH_ALIGNMENT == 0 for stride in matrix.stride()[:-1]) and matrix.data_ptr() % 16 == 0
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)


def torch_takes(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch's grouped GEMM runs these operands on this GPU without a host sync."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == out_dtype == torch.bfloat16
        and a.shape[-1] % _TORCH_ALIGNMENT == 0
        and b.shape[-1] % _TORCH_ALIGNMENT == 0
        and b.shape[-2] % _TORCH_ALIGNMENT == 0
        and offs.shape[0] < _TORCH_MOST_GROUPS
        and _generation(a.device.index) in (9, 10)
    )


def gemm_tile(a: torch.Tensor, b: torch.Tensor) -> tuple[tiles.GemmTile, bool]:
    """(tile, whether to multiply in float32) for these operand dtypes; a mixed pair is promoted."""
    float32 = not a.dtype == b.dtype == torch.bfloat16
    return (tiles.GEMM_FLOAT32 if float32 else tiles.GEMM_BF16), float32


def check_operands(where: str, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, groups: int) -> torch.Tensor:
    """The offsets as int32, contiguous."""
    for operand in (a, b):
        if operand.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{where}: an operand is {operand.dtype}, want bfloat16 or float32; convert it first")
    if offs.dim() != 1 or offs.shape[0] != groups or groups == 0:
        raise ValueError(f"{where}: offs is {tuple(offs.shape)}, want ({groups},), one END offset per group and at least one group")
    return offs.to(torch.int32).contiguous()


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, tail: str = "zero") -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g].T, summed in float32, rounded once. Twin: `reference.grouped_mm_hp`.

    Args:
        a: (M, K) bf16 or float32.  b: (G, N, K), the same or the other of the two, any strides.  offs: (G,) int32 or int64 END offsets on
            the device, not decreasing, the last at most M.
        tail: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    offs, skip = check_operands("grouped_mm_hp", a, b, offs, b.shape[0]), check_tail("grouped_mm_hp", tail)
    (M, K), (G, N, _) = a.shape, b.shape
    if b.shape[2] != K:
        raise ValueError(f"grouped_mm_hp: a {tuple(a.shape)} with b {tuple(b.shape)}, want (M, K) with (G, N, K)")

    if M and N and torch_takes(a, b, offs, out_dtype):
        weight = b.transpose(-2, -1)
        weight = for_torch(weight) if weight.stride(-1) == 1 else for_torch(b).transpose(-2, -1)
        out = F.grouped_mm(for_torch(a), weight, offs=offs)
        if not skip:
            _zero_tail(out, offs)
        return out

    out = torch.empty((M, N), dtype=out_dtype, device=a.device)

    tile, float32 = gemm_tile(a, b)
    most_row_tiles = M // tile.rows + G + 1  # groups end in the middle of a tile
    programs = most_row_tiles * cdiv(N, tile.columns)
    if M and N:
        launch(
            _grouped_mm_kernel,
            programs,
            {
                "a": a,
                "a_row": a.stride(0),
                "a_column": a.stride(1),
                "b": b,
                "b_group": b.stride(0),
                "b_row": b.stride(1),
                "b_column": b.stride(2),
                "out": out,
                "offs": offs,
                "M": M,
                "N": N,
                "K": K,
                "G": G,
                "GROUPS": next_power_of_2(G + 1),
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
                "DEPTH": tile.depth,
                "FLOAT32": float32,
                "SKIP": skip,
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def blackwell(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's scaled grouped GEMM, blocked 1x32 e8m0 scales, bf16 out. Has never run on hardware.

    On Hopper the same call does not raise, it destroys the CUDA context: hence the check, after the one in mxep.device.
    """
    capability = compute_capability(a.device.index)
    assert capability[0] == 10, f"the blackwell path was let through on SM{capability[0]}{capability[1]}"
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, b, sa, recipe, sb, recipe, swizzle_a=swizzle, swizzle_b=swizzle, offs=offs, output_dtype=torch.bfloat16
    )


def grouped_mm_mx(
    qa: torch.Tensor,
    sa: torch.Tensor,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    row_map: torch.Tensor | None = None,
    tail: str = "zero",
) -> torch.Tensor:
    """`grouped_mm_hp` of MX operands, both 1x32 along K. Twin: `reference.grouped_mm_mx`.

    Args:
        qa, sa: (M, K) and (M, K/32).  offs: (G,) int32 or int64.
        qb, sb: (G, N, K) and (G, N, K/32) e8m0; on the FP8 roads also what `rebase_weight` made of them, sb (G, N) float32.
        path: "exact" (dequantise to bf16, which holds e4m3 times a power of two exactly, then multiply), "fp8" (Hopper's FP8 tensor cores
            on rebased exponents, the road by every row's spread; "fp8_row", "fp8_span": that road for all; "fp8_row_256", "fp8_row_bare":
            promoted to float32 every 256 products, or never) or "blackwell" (SM100 only, bf16 out only, never run on hardware; float32
            out takes "exact", which rounds less).
        row_map: (M,) int32 on the device, the row of qa that is row m, -1 for zeros; qa's rows are then any number.  The FP8 roads gather
            and rebase in one pass, the others gather first.
        tail: as in `grouped_mm_hp`.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    path, skip = gemm_path(path, qa.device), check_tail("grouped_mm_mx", tail)
    offs = offs.to(torch.int32).contiguous()
    live = offs[-1:] if skip else None
    if row_map is not None and path not in FP8_ROADS:
        qa, sa = gather_mx_rows(qa, sa, row_map, live)

    if path == "blackwell" and out_dtype == torch.bfloat16 and qa.shape[0]:
        out = blackwell(
            qa.contiguous(),
            to_blocked_groups_along_rows(sa, offs)[0],
            qb.contiguous().transpose(-2, -1),
            to_blocked_3d(sb),
            offs,
        )
        if not skip:
            _zero_tail(out, offs)
        return out
    if path in FP8_ROADS:
        weight = RebasedWeight(qb, sb) if sb.dtype == torch.float32 else rebase_weight(qb, sb)
        rows = rebase_rows(qa, sa, WIDE_ABOVE[FP8_ROADS[path]], row_map, live)
        return fp8_grouped_mm(rows, weight, offs, out_dtype, promoted_every(path), tail)
    return grouped_mm_hp(dequantize(qa, sa, torch.bfloat16, live), dequantize(qb, sb, torch.bfloat16), offs, out_dtype, tail)

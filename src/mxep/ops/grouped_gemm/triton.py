"""High-precision grouped GEMMs on the GPU without a host sync: group g owns the rows from offs[g-1] to offs[g]; offs stays on the device.

- bf16 operands and results on SM90 or SM100 run on torch's CUTLASS grouped GEMM, its only form without a sync.  One small launch then
  zeroes the rows past the last end.
- Everything else (float32 operands or results, other GPUs, odd widths) runs on the Triton kernel here, which sums in float32.

wgrad.py has the sums over tokens.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mxep.device import compute_capability
from mxep.ops.grouped_gemm.reference import check_padding_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2

_TORCH_MOST_GROUPS = 1024  # torch prepares its grouped GEMM with one thread per group
_TORCH_ALIGNMENT = 8  # bf16 values in the 16 bytes that TMA wants strides to be multiples of


@functools.cache
def _generation(index: int) -> int:
    """Major compute capability of a CUDA device."""
    return compute_capability(index)[0]


@triton.jit
def rows_of_tile(
    row_tile,
    offs,  # (G,) int32
    M,
    G,
    GROUPS: tl.constexpr,  # power of two above G
    ROWS: tl.constexpr,
):
    """The group that owns a tile of ROWS rows, the tile's first row and the group's end; group G has the rows past the last end, and a tile
    of none has a group above G."""
    group = tl.arange(0, GROUPS)
    starts = tl.load(offs + group - 1, mask=(group > 0) & (group <= G), other=0)
    ends = tl.load(offs + group, mask=group < G, other=0)
    ends = tl.minimum(tl.where(group == G, M, ends), M)
    group_tiles = tl.cdiv(tl.maximum(ends - starts, 0), ROWS)
    tiles_before = tl.cumsum(group_tiles, axis=0)
    owner = tl.sum((tiles_before <= row_tile).to(tl.int32), axis=0)
    mine = group == owner
    start = tl.sum(tl.where(mine, starts, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    first_tile = tl.sum(tl.where(mine, tiles_before - group_tiles, 0), axis=0)
    return owner, start + (row_tile - first_tile) * ROWS, end


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
    SKIP: tl.constexpr,  # leave the rows past the last end undefined
):
    column_tiles = tl.cdiv(N, COLUMNS)
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    owner, first, end = rows_of_tile(tl.program_id(0) // column_tiles, offs, M, G, GROUPS, ROWS)
    if owner <= G - SKIP:
        row = first + tl.arange(0, ROWS)
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
def _zero_padding_rows_kernel(
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


def zero_padding_rows(out: torch.Tensor, offs: torch.Tensor) -> None:
    """Zeroes the rows of out (M, N) from offs[-1] on, and writes nothing else."""
    num_rows, width = out.shape
    tile_rows, tile_columns = tiles.ZERO.fit(width)
    grid = (min(cdiv(num_rows, tile_rows), tiles.ZERO_PROGRAMS), cdiv(width, tile_columns))
    launch(
        _zero_padding_rows_kernel,
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
    *strides, last = matrix.stride()
    apart = strides[-1] >= matrix.shape[-1]  # neither expanded nor overlapping
    fits = last == 1 and apart and all(stride % _TORCH_ALIGNMENT == 0 for stride in strides) and matrix.data_ptr() % 16 == 0
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


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, padding_rows: str = "zero") -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g].T, summed in float32, rounded once.

    Args:
        a: (M, K) bf16 or float32.  b: (G, N, K), the same or the other of the two, any strides.  offs: (G,) int32 or int64 END offsets on
            the device, not decreasing, the last at most M.
        padding_rows: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    offs, skip = check_operands("grouped_mm_hp", a, b, offs, b.shape[0]), check_padding_rows("grouped_mm_hp", padding_rows)
    (M, K), (G, N, _) = a.shape, b.shape
    if b.shape[2] != K:
        raise ValueError(f"grouped_mm_hp: a {tuple(a.shape)} with b {tuple(b.shape)}, want (M, K) with (G, N, K)")

    if M and N and torch_takes(a, b, offs, out_dtype):
        weight = b.transpose(-2, -1)
        weight = for_torch(weight) if weight.stride(-1) == 1 else for_torch(b).transpose(-2, -1)
        out = F.grouped_mm(for_torch(a), weight, offs=offs)
        if not skip:
            zero_padding_rows(out, offs)
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

"""Grouped GEMMs on the GPU without a host sync; group g owns the rows from offs[g-1] to offs[g], and offs stays on the device.

Which code runs:
- bf16 operands, bf16 out, on SM90 or SM100: torch's CUTLASS grouped GEMM (it has no other form that needs no sync), then one small
  launch that zeroes the rows past the last end, and only those;
- everything else (float32 out, float32 operands, other GPUs, odd widths): the Triton kernels here, which sum in float32;
- MX operands: dequantised to bf16 and then as above (path "exact"), or torch's scaled grouped GEMM (path "blackwell").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mxep.device import FP8_ROADS, compute_capability, resolve_gemm_path
from mxep.kernels import tiles
from mxep.kernels.dequantize import dequantize
from mxep.kernels.fp8_grouped_mm import fp8_grouped_mm, fp8_wgrad
from mxep.kernels.rebase import rebase_rows, rebase_tokens, rebase_weight
from mxep.mx.layout import to_blocked_3d, to_blocked_groups_along_columns, to_blocked_groups_along_rows
from mxep.reference.rebase import WIDE_ABOVE, RebasedWeight

_TORCH_MOST_GROUPS = 1024  # torch prepares its grouped GEMM with one thread per group
_TORCH_ALIGNMENT = 8  # bf16 values in the 16 bytes that TMA wants strides to be multiples of


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
    if owner <= G:
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


@triton.jit(do_not_specialize=["M"])
def _grouped_wgrad_kernel(
    grad,  # (M, N)
    grad_row,
    grad_column,
    a,  # (M, K)
    a_row,
    a_column,
    out,  # (G, N, K) contiguous
    offs,  # (G,) int32
    M,
    N,
    K,
    ROWS: tl.constexpr,  # tile along N
    COLUMNS: tl.constexpr,  # tile along K
    DEPTH: tl.constexpr,  # rows of a group per step
    FLOAT32: tl.constexpr,
):
    column_tiles = tl.cdiv(K, COLUMNS)
    n = (tl.program_id(0) // column_tiles) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(offs + group), M)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for m in range(start, end, DEPTH):
        row = m + tl.arange(0, DEPTH)
        inside = row < end  # a neighbouring group's row may hold NaN: neither operand reads it
        at = row.to(tl.int64)
        left = tl.load(
            grad + n.to(tl.int64)[:, None] * grad_column + at[None, :] * grad_row, mask=(n < N)[:, None] & inside[None, :], other=0
        )  # (ROWS, DEPTH)
        right = tl.load(
            a + at[:, None] * a_row + k.to(tl.int64)[None, :] * a_column, mask=inside[:, None] & (k < K)[None, :], other=0
        )  # (DEPTH, COLUMNS)
        if FLOAT32:
            acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(left, right, acc)
    target = out + (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


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
    grid = (min(triton.cdiv(num_rows, tile_rows), tiles.ZERO_PROGRAMS), triton.cdiv(width, tile_columns))
    _zero_tail_kernel[grid](
        out=out,
        offs=offs,
        G=offs.shape[0],
        M=num_rows,
        N=width,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
        num_warps=tiles.ZERO.warps,
    )


def _for_torch(matrix: torch.Tensor) -> torch.Tensor:
    """Row-major with 16-byte aligned rows: `matrix` itself, or a copy."""
    fits = matrix.stride(-1) == 1 and all(stride % _TORCH_ALIGNMENT == 0 for stride in matrix.stride()[:-1]) and matrix.data_ptr() % 16 == 0
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)


def _torch_takes(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch's grouped GEMM runs these operands on this GPU without a host sync."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == out_dtype == torch.bfloat16
        and a.shape[-1] % _TORCH_ALIGNMENT == 0
        and b.shape[-1] % _TORCH_ALIGNMENT == 0
        and b.shape[-2] % _TORCH_ALIGNMENT == 0
        and offs.shape[0] < _TORCH_MOST_GROUPS
        and compute_capability(a.device.index)[0] in (9, 10)
    )


def _gemm_tile(a: torch.Tensor, b: torch.Tensor) -> tuple[tiles.GemmTile, bool]:
    """(tile, whether to multiply in float32) for these operand dtypes; a mixed pair is promoted."""
    float32 = not a.dtype == b.dtype == torch.bfloat16
    return (tiles.GEMM_FLOAT32 if float32 else tiles.GEMM_BF16), float32


def _check(where: str, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, groups: int) -> torch.Tensor:
    """The offsets as int32, contiguous."""
    for operand in (a, b):
        if operand.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{where}: an operand is {operand.dtype}, want bfloat16 or float32; convert it first")
    if offs.dim() != 1 or offs.shape[0] != groups or groups == 0:
        raise ValueError(f"{where}: offs is {tuple(offs.shape)}, want ({groups},), one END offset per group and at least one group")
    return offs.to(torch.int32).contiguous()


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g].T, summed in float32, rounded once. Twin: `reference.grouped_mm_hp`.

    Args:
        a: (M, K) bf16 or float32.  b: (G, N, K), the same or the other of the two, any strides.  offs: (G,) int32 or int64 END offsets on
            the device, not decreasing, the last at most M.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero.
    """
    offs = _check("grouped_mm_hp", a, b, offs, b.shape[0])
    (M, K), (G, N, _) = a.shape, b.shape
    if b.shape[2] != K:
        raise ValueError(f"grouped_mm_hp: a {tuple(a.shape)} with b {tuple(b.shape)}, want (M, K) with (G, N, K)")

    if M and N and _torch_takes(a, b, offs, out_dtype):
        weight = b.transpose(-2, -1)
        weight = _for_torch(weight) if weight.stride(-1) == 1 else _for_torch(b).transpose(-2, -1)
        out = F.grouped_mm(_for_torch(a), weight, offs=offs)
        _zero_tail(out, offs)
        return out

    out = torch.empty((M, N), dtype=out_dtype, device=a.device)

    tile, float32 = _gemm_tile(a, b)
    most_row_tiles = M // tile.rows + G + 1  # groups end in the middle of a tile
    grid = (most_row_tiles * triton.cdiv(N, tile.columns),)
    if M and N:
        _grouped_mm_kernel[grid](
            a=a,
            a_row=a.stride(0),
            a_column=a.stride(1),
            b=b,
            b_group=b.stride(0),
            b_row=b.stride(1),
            b_column=b.stride(2),
            out=out,
            offs=offs,
            M=M,
            N=N,
            K=K,
            G=G,
            GROUPS=triton.next_power_of_2(G + 1),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            FLOAT32=float32,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def grouped_wgrad_hp(grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """out[g] = grad[rows of g].T @ a[rows of g], summed in float32. Twin: `reference.grouped_wgrad_hp`.

    Args:
        grad: (M, N) bf16 or float32.  a: (M, K), the same or the other of the two.  offs: (G,) int32 or int64 END offsets on the device.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    offs = _check("grouped_wgrad_hp", grad, a, offs, offs.shape[0])
    (M, N), K, G = grad.shape, a.shape[1], offs.shape[0]
    if a.shape[0] != M:
        raise ValueError(f"grouped_wgrad_hp: grad {tuple(grad.shape)} with a {tuple(a.shape)}, want (M, N) with (M, K)")

    if M == 0:
        return torch.zeros((G, N, K), dtype=out_dtype, device=a.device)
    if N and K and _torch_takes(grad, a, offs, out_dtype):
        # This pair of layouts alone takes empty groups and groups of any size: torch's other layouts stop the device at them.
        return F.grouped_mm(_for_torch(grad).t(), _for_torch(a), offs=offs)

    out = torch.empty((G, N, K), dtype=out_dtype, device=a.device)

    tile, float32 = _gemm_tile(grad, a)
    grid = (triton.cdiv(N, tile.rows) * triton.cdiv(K, tile.columns), G)
    if out.numel():
        _grouped_wgrad_kernel[grid](
            grad=grad,
            grad_row=grad.stride(0),
            grad_column=grad.stride(1),
            a=a,
            a_row=a.stride(0),
            a_column=a.stride(1),
            out=out,
            offs=offs,
            M=M,
            N=N,
            K=K,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            FLOAT32=float32,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _blackwell(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
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
    qa: torch.Tensor, sa: torch.Tensor, qb: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_mm_hp` of MX operands, both 1x32 along K. Twin: `reference.grouped_mm_mx`.

    Args:
        qa, sa: (M, K) and (M, K/32).  offs: (G,) int32 or int64.
        qb, sb: (G, N, K) and (G, N, K/32) e8m0; on the FP8 roads also what `rebase_weight` made of them, sb (G, N) float32.
        path: "exact" (dequantise to bf16, which holds e4m3 times a power of two exactly, then multiply), "fp8" (Hopper's FP8 tensor cores
            on rebased exponents, the road by every row's spread; "fp8_row", "fp8_span": that road for all) or "blackwell" (SM100 only,
            bf16 out only, never run on hardware; float32 out takes "exact", which rounds less).

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero.
    """
    path = resolve_gemm_path(path, qa.device)

    if path == "blackwell" and out_dtype == torch.bfloat16 and qa.shape[0]:
        offs = offs.to(torch.int32).contiguous()
        out = _blackwell(
            qa.contiguous(),
            to_blocked_groups_along_rows(sa, offs)[0],
            qb.contiguous().transpose(-2, -1),
            to_blocked_3d(sb),
            offs,
        )
        _zero_tail(out, offs)
        return out
    if path in FP8_ROADS:
        weight = RebasedWeight(qb, sb) if sb.dtype == torch.float32 else rebase_weight(qb, sb)
        return fp8_grouped_mm(rebase_rows(qa, sa, WIDE_ABOVE[FP8_ROADS[path]]), weight, offs, out_dtype)
    return grouped_mm_hp(dequantize(qa, sa, torch.bfloat16), dequantize(qb, sb, torch.bfloat16), offs, out_dtype)


def grouped_wgrad_mx(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_wgrad_hp` of MX operands, both 32x1 along M, given as the MX form of their transposes. Twin: `reference.grouped_wgrad_mx`.

    Args:
        qg, sg: (N, M) and (N, M/32).  qa, sa: (K, M) and (K, M/32).  offs: (G,) int32 or int64, multiples of 32.
        path: "exact" or "blackwell", as in `grouped_mm_mx`; "fp8" takes "exact" here.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    path = resolve_gemm_path(path, qg.device)

    if path == "blackwell" and out_dtype == torch.bfloat16 and qg.shape[1]:
        offs = offs.to(torch.int32).contiguous()
        blocks = offs // 32  # ends of the groups in scale columns
        out = _blackwell(
            qg.contiguous(),
            to_blocked_groups_along_columns(sg, blocks)[0],
            qa.contiguous().t(),
            to_blocked_groups_along_columns(sa, blocks)[0],
            offs,
        )
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        return out.masked_fill_((sizes == 0)[:, None, None], 0)
    grad, a = dequantize(qg, sg, torch.bfloat16).t(), dequantize(qa, sa, torch.bfloat16).t()
    return grouped_wgrad_hp(grad, a, offs, out_dtype)


def grouped_wgrad_mx_rows(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_wgrad_hp` of the dequantised values of MX rows ("wgrad_with_hp"). Twin: `reference.grouped_wgrad_mx_rows`.

    Args:
        qg, sg: (M, N) and (M, N/32).  qa, sa: (M, K) and (M, K/32), all row-strided or contiguous.  offs: (G,) int32 or int64.
        path: "fp8" and its roads transpose and rebase the bytes and multiply on FP8 tensor cores; every other path dequantises to bf16.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    path = resolve_gemm_path(path, qg.device)

    if path in FP8_ROADS:
        return fp8_wgrad(rebase_tokens(qg, sg, qa, sa, offs), out_dtype)
    return grouped_wgrad_hp(dequantize(qg, sg, torch.bfloat16), dequantize(qa, sa, torch.bfloat16), offs, out_dtype)

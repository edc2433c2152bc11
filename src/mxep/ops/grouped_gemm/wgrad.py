"""High-precision weight gradients of grouped GEMMs on the GPU, sums over the tokens of each group, without a host sync.

- bf16 operands on SM90 run on hopper/bf16_wgrad.cu, which writes bf16 or float32, a new gradient or one that exists.
- bf16 operands and a new bf16 gradient on SM100 run on torch's CUTLASS grouped GEMM, in its only pair of layouts that takes groups of any
  size; so they do on SM90 where CUDA C++ cannot be compiled.
- Everything else (float32 operands, other GPUs, odd widths) runs on the Triton kernel here, which sums in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mxep.ops.grouped_gemm.hopper.bf16_wgrad import bf16_wgrad, bf16_wgrad_takes
from mxep.ops.grouped_gemm.reference import check_copy_expert_grads, check_out
from mxep.ops.grouped_gemm.triton import check_operands, for_torch, gemm_tile, torch_takes
from mxep.ops.rows.permute import gather_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv


@triton.jit(do_not_specialize=["M"])
def _grouped_wgrad_kernel(
    grad,  # (M, N), or as many rows as grad_map knows
    grad_row,
    grad_column,
    grad_map,  # (M,) int32, or None
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
    ADD: tl.constexpr,  # to what out holds
    SKIP: tl.constexpr,  # leave groups without rows as they are
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
        source, read = at, inside
        if grad_map is not None:
            source = tl.load(grad_map + at, mask=inside, other=-1).to(tl.int64)
            read = source >= 0
        left = tl.load(
            grad + n.to(tl.int64)[:, None] * grad_column + source[None, :] * grad_row, mask=(n < N)[:, None] & read[None, :], other=0
        )  # (ROWS, DEPTH)
        right = tl.load(
            a + at[:, None] * a_row + k.to(tl.int64)[None, :] * a_column, mask=inside[:, None] & (k < K)[None, :], other=0
        )  # (DEPTH, COLUMNS)
        if FLOAT32:
            acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(left, right, acc)
    target = out + (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    rows = tl.where(start < end, N, 0) if SKIP else N
    mask = (n < rows)[:, None] & (k < K)[None, :]
    if ADD:
        acc += tl.load(target, mask=mask, other=0)
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


def _launch(
    out: torch.Tensor,
    grad: torch.Tensor,
    a: torch.Tensor,
    offs: torch.Tensor,
    *,
    add: bool = False,
    skip: bool = False,
    grad_map: torch.Tensor | None = None,
) -> None:
    """out (G, N, K) = or += grad (M, N).T @ a (M, K) of every group, or of every one with rows; offs int32."""
    (G, N, K), M = out.shape, a.shape[0]
    tile, float32 = gemm_tile(grad, a)
    if K <= tiles.NARROW_COLUMNS:
        tile = tiles.WGRAD_NARROW["float32" if float32 else "bf16"]
    if not out.numel():
        return
    launch(
        _grouped_wgrad_kernel,
        (cdiv(N, tile.rows) * cdiv(K, tile.columns), G),
        {
            "grad": grad,
            "grad_row": grad.stride(0),
            "grad_column": grad.stride(1),
            "grad_map": None if grad_map is None else grad_map.contiguous(),
            "a": a,
            "a_row": a.stride(0),
            "a_column": a.stride(1),
            "out": out,
            "offs": offs,
            "M": M,
            "N": N,
            "K": K,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "FLOAT32": float32,
            "ADD": add,
            "SKIP": skip,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def grouped_wgrad_hp(
    grad: torch.Tensor,
    a: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    grad_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """grad[rows of g].T @ a[rows of g] for every group g, summed in float32.

    With `out` torch's GEMM never runs: it would write zeros to groups without rows.

    Args:
        grad: (M, N) bf16 or float32.  a: (M, K), the same or the other of the two.  offs: (G,) int32 or int64 END offsets on the device.
        out, accumulate, grad_map: as in the reference.  The gradient of an `a` of few columns is read through its map, others are
            gathered first.

    Returns:
        (G, N, K) `out_dtype`, zero for an empty group; `out` if given.
    """
    offs = check_operands("grouped_wgrad_hp", grad, a, offs, offs.shape[0])
    reads_map = grad_map is not None and out is None and grad_map.shape == a.shape[:1] and a.shape[1] <= tiles.NARROW_COLUMNS
    if reads_map and a.numel() and grad.shape[1]:
        made = torch.empty((offs.shape[0], grad.shape[1], a.shape[1]), dtype=out_dtype, device=a.device)
        _launch(made, grad, a, offs, grad_map=grad_map)
        return made
    grad = grad if grad_map is None else gather_rows(grad, grad_map, offs[-1:])
    (M, N), K, G = grad.shape, a.shape[1], offs.shape[0]
    if a.shape[0] != M:
        raise ValueError(f"grouped_wgrad_hp: grad {tuple(grad.shape)} with a {tuple(a.shape)}, want (M, N) with (M, K)")
    check_out("grouped_wgrad_hp", out, (G, N, K), out_dtype, accumulate)

    if not (M and N and K):
        return torch.zeros((G, N, K), dtype=out_dtype, device=a.device) if out is None else out
    if bf16_wgrad_takes(grad, a, G, out_dtype, out):
        made = torch.empty((G, N, K), dtype=out_dtype, device=a.device) if out is None else out
        bf16_wgrad(for_torch(grad), for_torch(a), offs, made, accumulate, "zero" if out is None else "skip")
        return made
    if out is not None:
        _launch(out, grad, a, offs, add=accumulate, skip=not accumulate)
        return out
    if torch_takes(grad, a, offs, out_dtype):
        # torch's other pairs of layouts stop the device at empty groups and at groups of some sizes.
        return F.grouped_mm(for_torch(grad).t(), for_torch(a), offs=offs)

    out = torch.empty((G, N, K), dtype=out_dtype, device=a.device)
    _launch(out, grad, a, offs)
    return out


# ---------------------------------------------------------------- copies of groups


@triton.jit(do_not_specialize=["size"])
def _copy_expert_grads_kernel(
    into,  # (G, N, K), each group contiguous
    into_group,
    made,  # the same
    made_group,
    offs,  # (G,) int32
    size,  # N * K
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    end = tl.load(offs + group)
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    if end != start:
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(made + group.to(tl.int64) * made_group + at, mask=at < size)
            tl.store(into + group.to(tl.int64) * into_group + at, values, mask=at < size)


def copy_expert_grads(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor) -> None:
    """into[g] = made[g] for every group that has rows.

    Args:
        into, made: (G, N, K) of one dtype, every group contiguous.  offs: (G,) int32 END offsets on the device.
    """
    check_copy_expert_grads(into, made, offs)
    size = into.shape[1] * into.shape[2]

    if into.numel():
        launch(
            _copy_expert_grads_kernel,
            (min(cdiv(size, tiles.GROUP_BLOCK), tiles.GROUP_PROGRAMS), into.shape[0]),
            {
                "into": into,
                "into_group": into.stride(0),
                "made": made,
                "made_group": made.stride(0),
                "offs": offs.contiguous(),
                "size": size,
                "BLOCK": tiles.GROUP_BLOCK,
            },
            num_warps=4,
        )

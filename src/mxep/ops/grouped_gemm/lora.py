"""Low-rank adapters (LoRA) of row groups on the GPU: both products and the addition in one launch, without a host sync.

A program has the rows of one group in a tile: it reads them once, through the row map, for the product with the first factor, which it
keeps, and then reads and writes their results once.  Passes of their own would gather the rows, write a product as large as the results,
and read it again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.grouped_gemm.reference import check_group_lora
from mxep.ops.grouped_gemm.triton import rows_of_tile
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import next_power_of_2

_LEAST_RANK = 16  # of a product on tensor cores


@triton.jit(do_not_specialize=["M", "G"])
def _add_group_lora_kernel(
    out,  # (M, N)
    out_row,
    x,  # (M, K), or as many rows as row_map knows
    x_row,
    row_map,  # (M,) int32, or None
    a,  # (G, R, K)
    a_group,
    a_row,
    a_column,
    b,  # (G, N, R)
    b_group,
    b_row,
    b_column,
    inner,  # (M, R) contiguous
    offs,  # (G,) int32
    M,
    N,
    K,
    R,
    G,
    GROUPS: tl.constexpr,  # power of two above G
    RANK: tl.constexpr,  # power of two, at least R
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FLOAT32: tl.constexpr,  # multiply in float32 instead of on bf16 tensor cores
):
    owner, first, end = rows_of_tile(tl.program_id(0), offs, M, G, GROUPS, ROWS)
    if owner <= G:  # group G, the rows past the last end, has zeros in inner
        row = first + tl.arange(0, ROWS)
        inside, at, group = row < end, row.to(tl.int64), owner.to(tl.int64)
        source, read = at, inside
        if row_map is not None:
            source = tl.load(row_map + at, mask=inside, other=-1).to(tl.int64)
            read = source >= 0
        rank, depth = tl.arange(0, RANK), tl.arange(0, DEPTH)
        x_tile = x + source[:, None] * x_row + depth[None, :]
        a_tile = a + group * a_group + rank.to(tl.int64)[None, :] * a_row + depth.to(tl.int64)[:, None] * a_column
        acc = tl.zeros((ROWS, RANK), tl.float32)
        for k in range(0, tl.where(owner < G, K, 0), DEPTH):
            deep = depth < K - k
            left = tl.load(x_tile, mask=read[:, None] & deep[None, :], other=0)  # (ROWS, DEPTH)
            right = tl.load(a_tile, mask=deep[:, None] & (rank < R)[None, :], other=0)  # (DEPTH, RANK)
            if FLOAT32:
                acc = tl.dot(left, right, acc, input_precision="ieee")
            else:
                acc = tl.dot(left, right, acc)
            x_tile += DEPTH
            a_tile += DEPTH * a_column
        middle = acc.to(inner.dtype.element_ty)
        tl.store(inner + at[:, None] * R + rank[None, :], middle, mask=inside[:, None] & (rank < R)[None, :])
        for n in range(0, tl.where(owner < G, N, 0), COLUMNS):
            column = n + tl.arange(0, COLUMNS)
            b_tile = b + group * b_group + column.to(tl.int64)[None, :] * b_row + rank.to(tl.int64)[:, None] * b_column
            right = tl.load(b_tile, mask=(rank < R)[:, None] & (column < N)[None, :], other=0)  # (RANK, COLUMNS)
            target, mask = out + at[:, None] * out_row + column[None, :], inside[:, None] & (column < N)[None, :]
            total = tl.load(target, mask=mask, other=0).to(tl.float32)  # (ROWS, COLUMNS)
            if FLOAT32:
                total = tl.dot(middle, right, total, input_precision="ieee")
            else:
                total = tl.dot(middle, right, total)
            tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def add_group_lora(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None = None
) -> torch.Tensor:
    """out[rows of g] += (x[rows of g] @ a[g].T) @ b[g].T. The reference sums in another order.

    Args:
        out: (M, N) bf16 or float32, rows of stride 1, changed in place.  x: (M, K), copied first unless its last stride is 1.
        a: (G, r, K), b: (G, N, r), any strides.  offs: (G,) int32 or int64 END offsets on the device.
        row_map: (M,) int32 rows of x, -1 for zeros.

    Returns:
        (M, r), the first product; rows past offs[-1] are zero.
    """
    check_group_lora(out, x, a, b, offs, row_map)
    return _products(out, x, a, b, offs, row_map)


def group_lora_inner(x: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None = None) -> torch.Tensor:
    """The first product of `add_group_lora` alone, (M, r)."""
    out, b = x.new_empty(x.shape[0] if row_map is None else row_map.shape[0], 0), a[:, :, :0].transpose(1, 2)
    check_group_lora(out, x, a, b, offs, row_map)
    return _products(out, x, a, b, offs, row_map)


def _products(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None
) -> torch.Tensor:
    (M, N), (G, R, K) = out.shape, a.shape
    inner = torch.empty((M, R), dtype=x.dtype, device=x.device)

    values = x if x.stride(1) == 1 else x.contiguous()
    float32 = x.dtype == torch.float32
    tile = tiles.LORA["float32" if float32 else "bf16"]
    programs = M // tile.rows + G + 1  # groups end in the middle of a tile
    if M and R:
        launch(
            _add_group_lora_kernel,
            programs,
            {
                "out": out,
                "out_row": out.stride(0),
                "x": values,
                "x_row": values.stride(0),
                "row_map": None if row_map is None else row_map.contiguous(),
                "a": a,
                "a_group": a.stride(0),
                "a_row": a.stride(1),
                "a_column": a.stride(2),
                "b": b,
                "b_group": b.stride(0),
                "b_row": b.stride(1),
                "b_column": b.stride(2),
                "inner": inner,
                "offs": offs.to(torch.int32).contiguous(),
                "M": M,
                "N": N,
                "K": K,
                "R": R,
                "G": G,
                "GROUPS": next_power_of_2(G + 1),
                "RANK": max(next_power_of_2(R), _LEAST_RANK),
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
                "DEPTH": tile.depth,
                "FLOAT32": float32,
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return inner

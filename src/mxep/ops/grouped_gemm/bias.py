"""A bias for the rows of each group, times the row's score: added in one pass, or by a GEMM as an adapter; and both its gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.grouped_gemm.reference import FUSED_RANK, check_add_group_bias, check_group_bias_factors, check_group_bias_grads
from mxep.ops.grouped_gemm.triton import rows_of_tile
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["M", "G", "column_tiles"])
def _add_group_bias_kernel(
    rows,  # (M, N) bf16 or float32, changed in place
    rows_row,
    bias,  # (G, N) bf16 or float32, contiguous
    offs,  # (G,) int32
    scores,  # (M,) float32, or None
    M,
    N,
    G,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least G
):
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, GROUPS)
    ends = tl.load(offs + index, mask=index < G, other=0x7FFFFFFF)
    group = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)[:, None]  # (ROWS, 1), G after the last end
    owned = (row < M)[:, None] & (column < N)[None, :] & (group < G)

    at = rows + row[:, None] * rows_row + column[None, :]
    value = tl.load(at, mask=owned, other=0)  # (ROWS, COLUMNS)
    added = tl.load(bias + group.to(tl.int64) * N + column[None, :], mask=owned, other=0).to(value.dtype)
    added = added.to(tl.float32)
    if scores is not None:
        added = tl.load(scores + row, mask=row < M, other=0)[:, None] * added
    tl.store(at, (value.to(tl.float32) + added).to(value.dtype), mask=owned)


@triton.jit(do_not_specialize=["M", "G"])
def _group_bias_grads_kernel(
    rows,  # (M, N) bf16 or float32, or as many rows as row_map knows
    rows_row,
    row_map,  # (M,) int32, or None
    bias,  # (G, N) bf16 or float32, contiguous, or None
    offs,  # (G,) int32
    scores,  # (M,) float32, or None
    parts,  # (programs, N) float32: the sums of each program's rows; or None
    dots,  # (M,) float32; or None, and no bias then
    M,
    N,
    G,
    span,  # columns of a program
    GROUPS: tl.constexpr,  # power of two above G
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    owner, first, end = rows_of_tile(tl.program_id(0), offs, M, G, GROUPS, ROWS)
    if owner <= G:  # group G has the rows past the last end
        row = first + tl.arange(0, ROWS)
        inside, at = row < end, row.to(tl.int64)
        source, read = at, inside
        if row_map is not None:
            source = tl.load(row_map + at, mask=inside, other=-1).to(tl.int64)
            read = source >= 0
        if scores is not None:
            score = tl.load(scores + at, mask=inside, other=0)[:, None]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        start = tl.program_id(1) * span
        for n in range(start, tl.where(owner < G, tl.minimum(start + span, N), start), COLUMNS):
            column = n + tl.arange(0, COLUMNS)
            mine = column < N
            value = tl.load(
                rows + source[:, None] * rows_row + column[None, :], mask=read[:, None] & mine[None, :], other=0
            )  # (ROWS, COLUMNS)
            if dots is not None:
                factor = tl.load(bias + owner.to(tl.int64) * N + column, mask=mine, other=0).to(value.dtype).to(tl.float32)
                acc += value.to(tl.float32) * factor[None, :]
            if parts is not None:
                added = value.to(tl.float32)
                if scores is not None:
                    added *= score
                tl.store(parts + tl.program_id(0).to(tl.int64) * N + column, tl.sum(added, axis=0), mask=mine)
        if dots is not None:
            tl.store(dots + at, tl.sum(acc, axis=1), mask=inside)


@triton.jit(do_not_specialize=["M", "G"])
def _sum_parts_kernel(
    parts,  # as above
    offs,  # (G,) int32
    out,  # (G, N) float32, contiguous
    M,
    N,
    G,
    GROUPS: tl.constexpr,  # power of two above G
    ROWS: tl.constexpr,  # of a part
    PARTS: tl.constexpr,  # that are added at a time
    COLUMNS: tl.constexpr,
):
    group, index = tl.program_id(1), tl.arange(0, GROUPS)
    starts = tl.load(offs + index - 1, mask=(index > 0) & (index < G), other=0)
    ends = tl.minimum(tl.load(offs + index, mask=index < G, other=0), M)
    counts = tl.cdiv(tl.maximum(ends - starts, 0), ROWS)
    first, count = tl.sum(tl.where(index < group, counts, 0), axis=0), tl.sum(tl.where(index == group, counts, 0), axis=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((PARTS, COLUMNS), tl.float32)
    for part in range(0, count, PARTS):
        at = part + tl.arange(0, PARTS)
        mine = (at < count)[:, None] & (column < N)[None, :]
        acc += tl.load(parts + (first + at).to(tl.int64)[:, None] * N + column[None, :], mask=mine, other=0)
    tl.store(out + group.to(tl.int64) * N + column, tl.sum(acc, axis=0), mask=column < N)


@triton.jit(do_not_specialize=["M", "size", "row_programs"])
def _group_bias_factors_kernel(
    bias,  # (G, N) bf16 or float32, contiguous
    scores,  # (M,) float32, or None
    inner,  # (M, RANK) bf16
    lora_b,  # (G, N, RANK) bf16
    M,
    size,  # G * N
    row_programs,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rank = tl.arange(0, RANK)[None, :]
    if tl.program_id(0) < row_programs:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        if scores is None:
            term = tl.where(rank == 0, 1.0, tl.zeros((ROWS, RANK), tl.float32)).to(tl.bfloat16)
        else:
            score = tl.load(scores + row, mask=row < M, other=0)[:, None]
            high = score.to(tl.bfloat16)
            rest = tl.where(tl.abs(high.to(tl.float32)) < float("inf"), score - high.to(tl.float32), 0.0)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            nothing = tl.zeros((ROWS, RANK), tl.bfloat16)
            term = tl.where(rank == 0, high, tl.where(rank == 1, middle, tl.where(rank == 2, low, nothing)))
        tl.store(inner + row.to(tl.int64)[:, None] * RANK + rank, term, mask=(row < M)[:, None])
    else:
        row = (tl.program_id(0) - row_programs) * ROWS + tl.arange(0, ROWS)
        value = tl.load(bias + row, mask=row < size, other=0)[:, None].to(tl.bfloat16)
        kept = rank == 0
        if scores is not None:  # zeros beside an infinite bias, which a term of zero would turn into NaN
            kept |= (rank < 3) & (tl.abs(value.to(tl.float32)) < float("inf"))
        term = tl.where(kept, value, tl.zeros((ROWS, RANK), tl.bfloat16))
        tl.store(lora_b + row.to(tl.int64)[:, None] * RANK + rank, term, mask=(row < size)[:, None])


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, scores: torch.Tensor | None = None) -> None:
    """Add to rows, in place, their group's bias, which is rounded to rows' dtype first.

    Args:
        rows: (M, N) bf16 or float32, each row contiguous; those after the last group stay as they are.  bias: (G, N) bf16 or float32.
        offs: (G,) int32 or int64 END rows of the groups on the device.
        scores: (M,) float32, contiguous, factors of the bias in each row.
    """
    check_add_group_bias(rows, bias, offs, scores)
    (num_rows, width), groups = rows.shape, offs.shape[0]

    if rows.numel():
        programs, tile = tiles.QUANTIZE.grid(num_rows, width)
        launch(
            _add_group_bias_kernel,
            programs,
            {
                "rows": rows,
                "rows_row": rows.stride(0),
                "bias": bias.contiguous(),
                "offs": offs.to(torch.int32).contiguous(),
                "scores": scores,
                "M": num_rows,
                "N": width,
                "G": groups,
                "GROUPS": next_power_of_2(max(groups, 1)),
                **tile,
            },
            num_warps=tiles.QUANTIZE.warps,
            enable_fp_fusion=False,
        )


def sum_parts(parts: torch.Tensor, ends: torch.Tensor, num_rows: int, tile_rows: int) -> torch.Tensor:
    """The sums (G, N) float32 of rows in groups that end at `ends` (G,) int32, in a fixed order.

    parts: (programs, N) float32, those of each tile of `tile_rows` of the `num_rows` rows, in the order of `rows_of_tile`.
    """
    (groups, width), tile = (ends.shape[0], parts.shape[1]), tiles.BIAS_PARTS
    total = torch.empty((groups, width), dtype=torch.float32, device=parts.device)
    if total.numel():
        of_groups = {"offs": ends, "M": num_rows, "N": width, "G": groups, "GROUPS": next_power_of_2(groups + 1), "ROWS": tile_rows}
        arguments = {"parts": parts, "out": total, **of_groups, "PARTS": tile.rows, "COLUMNS": tile.columns}
        launch(_sum_parts_kernel, (cdiv(width, tile.columns), groups), arguments, num_warps=tile.warps)
    return total


def group_bias_grads(
    rows: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    row_map: torch.Tensor | None = None,
    sums: bool = True,
) -> list[torch.Tensor]:
    """Both gradients of `add_group_bias` from one read of the result's, in a fixed order. The reference sums in another order.

    Args:
        rows: (M, N) bf16 or float32, the gradient of the result, any strides (copied first unless the last one is 1).
        offs, scores: as in `add_group_bias`.  bias: the same, or None: no gradient of scores is wanted.
        row_map: (M,) int32, the row of `rows` that is row m, -1 for one of zeros; None: row m.  sums: whether that of the bias is wanted.

    Returns:
        sums (G, N) float32 of each group's rows, times their scores; with a bias then the product of each row with its bias, (M,) float32,
        0 after the last group.
    """
    check_group_bias_grads(rows, offs, bias, scores, row_map)
    (num_rows, width), groups = (rows.shape[0] if row_map is None else row_map.shape[0], rows.shape[1]), offs.shape[0]
    device, ends = rows.device, offs.to(torch.int32).contiguous()
    dots = None if bias is None else torch.empty(num_rows, dtype=torch.float32, device=device)
    tile = tiles.BIAS_GRADS
    # Groups end in the middle of a tile.  A program that makes dots has whole rows.
    programs, span = num_rows // tile.rows + groups + 1, tiles.BIAS_GRADS_SPAN if bias is None else max(width, 1)
    of_groups = {"offs": ends, "M": num_rows, "N": width, "G": groups, "GROUPS": next_power_of_2(groups + 1), "ROWS": tile.rows}
    parts = torch.empty((programs, width), dtype=torch.float32, device=device) if sums else None
    if num_rows and (sums or bias is not None):
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        arguments = {
            "rows": values,
            "rows_row": values.stride(0),
            "row_map": None if row_map is None else row_map.contiguous(),
            "bias": None if bias is None else bias.contiguous(),
            "scores": scores if sums else None,
            "parts": parts,
            "dots": dots,
            "span": span,
            "COLUMNS": tile.columns,
        }
        launch(_group_bias_grads_kernel, (programs, max(cdiv(width, span), 1)), {**of_groups, **arguments}, num_warps=tile.warps)
    total = None if parts is None else sum_parts(parts, ends, num_rows, tile.rows)
    return [result for result in (total, dots) if result is not None]


def group_bias_factors(bias: torch.Tensor, scores: torch.Tensor | None, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bias of groups, times scores, as the adapter that a GEMM adds to its sums.

    Args:
        bias: (G, N) bf16 or float32, any strides.  scores: (num_rows,) float32, contiguous, or None for ones.

    Returns:
        inner (num_rows, 16) and lora_b (G, N, 16), both bf16, as in the reference.
    """
    check_group_bias_factors(bias, scores, num_rows)
    inner = torch.empty((num_rows, FUSED_RANK), dtype=torch.bfloat16, device=bias.device)
    lora_b = torch.empty((*bias.shape, FUSED_RANK), dtype=torch.bfloat16, device=bias.device)
    row_programs = cdiv(num_rows, tiles.BIAS_FACTOR_ROWS)
    if programs := row_programs + cdiv(bias.numel(), tiles.BIAS_FACTOR_ROWS):
        sizes = {"M": num_rows, "size": bias.numel(), "row_programs": row_programs, "RANK": FUSED_RANK, "ROWS": tiles.BIAS_FACTOR_ROWS}
        arguments = {"bias": bias.contiguous(), "scores": scores, "inner": inner, "lora_b": lora_b, **sizes}
        launch(_group_bias_factors_kernel, programs, arguments, num_warps=4)
    return inner, lora_b

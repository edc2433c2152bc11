"""Index arithmetic of the fused layer, one launch per operator: between exchanges the host has no time for dozens of launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.routing.index_reference import INVALID_TOPK, MODES, check_pack_topk, check_send_index, check_sort_topk
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2

_NO_ROW = tl.constexpr(2**31 - 1)  # past every row
_INVALID_TOPK = tl.constexpr(INVALID_TOPK)


@triton.jit(do_not_specialize=["T", "E"])
def _sort_topk_kernel(
    experts,  # (T, C) int64
    scores,  # (T, C), any float
    sorted_experts,  # (T, C) int64
    sorted_scores,  # (T, C) float32
    columns,  # (T, C) int16
    T,
    E,
    C: tl.constexpr,
    LOWEST: tl.constexpr,  # the lowest valid expert
    DUPLICATES: tl.constexpr,  # a row may have an expert twice
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,  # C as a power of two
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, TOPK)[None, :]
    there = (token < T)[:, None] & (column < C)
    at = token[:, None] * C + column
    expert = tl.load(experts + at, mask=there, other=0)
    valid = (expert >= LOWEST) & (expert < E)
    before = tl.zeros((TOKENS, TOPK), tl.int32)  # choices of the token in front of this one
    for k in range(C):
        other = tl.load(experts + token * C + k, mask=token < T, other=0)[:, None]
        before += ((other < expert) | ((other == expert) & (k < column))).to(tl.int32)
        if not DUPLICATES:
            valid = valid & ((other != expert) | (k == column) | (expert < 0))
    tl.device_assert(valid, _INVALID_TOPK, mask=there)
    to = token[:, None] * C + before
    tl.store(sorted_experts + to, expert, mask=there)
    tl.store(sorted_scores + to, tl.load(scores + at, mask=there, other=0.0).to(tl.float32), mask=there)
    tl.store(columns + to, column.to(tl.int16) + tl.zeros((TOKENS, TOPK), tl.int16), mask=there)


def sort_topk(
    experts: torch.Tensor, scores: torch.Tensor, num_experts: int, minus_one: bool, duplicates: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token's choices in rising order of their experts, asserted to be valid."""
    check_sort_topk(experts, scores)
    T, C = experts.shape
    sorted_experts = torch.empty((T, C), dtype=torch.int64, device=experts.device)
    sorted_scores = torch.empty((T, C), dtype=torch.float32, device=experts.device)
    columns = torch.empty((T, C), dtype=torch.int16, device=experts.device)
    if T and C:
        padded = next_power_of_2(C)
        tokens = max(1, tiles.PLAN_CHOICES // padded)
        launch(
            _sort_topk_kernel,
            cdiv(T, tokens),
            {
                "experts": experts.contiguous(),
                "scores": scores.contiguous(),
                "sorted_experts": sorted_experts,
                "sorted_scores": sorted_scores,
                "columns": columns,
                "T": T,
                "E": num_experts,
                "C": C,
                "LOWEST": -1 if minus_one else 0,
                "DUPLICATES": duplicates,
                "TOKENS": tokens,
                "TOPK": padded,
            },
            num_warps=tiles.PLAN_WARPS,
            debug=True,  # else the compiler drops the assertion
            sanitize_overflow=False,  # else `debug` asserts that no int32 sum overflows
        )
    return sorted_experts, sorted_scores, columns


@triton.jit(do_not_specialize=["T", "most"])
def _pack_topk_kernel(
    experts,  # (T, C) int64
    scores,  # (T, C) int32, the bits
    table,  # (S, 2C) int32
    T,
    C: tl.constexpr,
    most,  # S
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,  # C as a power of two
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    k = tl.arange(0, TOPK)[None, :]
    there = (token < T) & (k < C)
    expert = tl.load(experts + token * C + k, mask=there, other=-1)
    score = tl.load(scores + token * C + k, mask=there, other=-1)
    line = table + token * (2 * C) + k
    tl.store(line, expert.to(tl.int32), mask=(token < most) & (k < C))
    tl.store(line + C, score, mask=(token < most) & (k < C))


def pack_topk(experts: torch.Tensor, scores: torch.Tensor, most: int) -> torch.Tensor:
    """This rank's table of top-k ids and scores."""
    check_pack_topk(experts, scores, most)
    T, C = experts.shape
    table = torch.empty((most, 2 * C), dtype=torch.int32, device=experts.device)
    if table.numel():
        launch(
            _pack_topk_kernel,
            cdiv(most, tiles.PLAN_TOKENS),
            {
                "experts": experts.contiguous(),
                "scores": scores.contiguous().view(torch.int32),
                "table": table,
                "T": T,
                "C": C,
                "most": most,
                "TOKENS": tiles.PLAN_TOKENS,
                "TOPK": next_power_of_2(C),
            },
            num_warps=tiles.PLAN_WARPS,
        )
    return table


@triton.jit(do_not_specialize=["T", "L", "W", "most", "kept"])
def _send_index_kernel(
    experts,  # (T, C) int64
    slots,  # (T, columns) int32
    home,  # (T, columns) int32
    ranks,  # (T, C) int32, or nothing
    T,
    C: tl.constexpr,
    L,
    W,
    most,  # S
    kept,  # the most ids of a token on one rank
    EVERY: tl.constexpr,  # a row for each top-k id
    ALL: tl.constexpr,  # ranks get every token
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the results, as a power of two
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)[None, :]
    row = token.to(tl.int64)
    if EVERY:
        there = (token < T)[:, None] & (column < C)
        rank = (tl.load(experts + row[:, None] * C + column, mask=there, other=0) // L).to(tl.int32)
        number = tl.zeros((TOKENS, COLUMNS), tl.int32)
        for k in range(C):
            other = (tl.load(experts + row * C + k, mask=token < T, other=0) // L).to(tl.int32)[:, None]
            number += ((other == rank) & (k < column)).to(tl.int32)
        slot = token[:, None] * kept + number
        at = row[:, None] * C + column
        tl.store(slots + at, slot, mask=there)
        tl.store(ranks + at, rank, mask=there)
        tl.store(home + at, rank * (most * kept) + slot, mask=there)
    else:
        there = (token < T)[:, None] & (column < W)
        chosen = tl.zeros((TOKENS, COLUMNS), tl.int1)
        for k in range(C):
            rank = (tl.load(experts + row * C + k, mask=token < T, other=0) // L).to(tl.int32)
            chosen = chosen | (rank[:, None] == column)
        at = row[:, None] * W + column
        sent = chosen | (column >= 0) if ALL else chosen
        tl.store(slots + at, tl.where(sent, token[:, None], -1), mask=there)
        tl.store(home + at, tl.where(chosen, column * most + token[:, None], -1), mask=there)


def send_index(
    experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The receive slots of this rank's rows on other ranks, and their rows on return."""
    check_send_index(experts, mode, num_local_experts, world, most)
    (T, C), every = experts.shape, mode == MODES[1]

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    columns = C if every else world
    slots, home, ranks = ints(T, columns), ints(T, columns), ints(T if every else 0, C)
    if slots.numel():
        launch(
            _send_index_kernel,
            cdiv(T, tiles.PLAN_TOKENS),
            {
                "experts": experts.contiguous(),
                "slots": slots,
                "home": home,
                "ranks": ranks,
                "T": T,
                "C": C,
                "L": num_local_experts,
                "W": world,
                "most": most,
                "kept": min(C, num_local_experts),
                "EVERY": every,
                "ALL": mode == MODES[2],
                "TOKENS": tiles.PLAN_TOKENS,
                "COLUMNS": next_power_of_2(columns),
            },
            num_warps=tiles.PLAN_WARPS,
        )
    return slots, home, ranks


@triton.jit(do_not_specialize=["L", "capacity", "count"])
def _chunk_bounds_kernel(
    ends,  # (L,) int32
    bounds,  # (count + 1,) int32
    L,
    capacity,
    count,
    EXPERTS: tl.constexpr,  # a power of two beyond L
):
    expert = tl.arange(0, EXPERTS)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert <= L), other=0)  # where each expert begins; after the last one the end
    begin = tl.where(expert <= L, begin, _NO_ROW)
    at = tl.max(tl.where(expert <= L, begin, 0), axis=0)
    tl.store(bounds + count, at)
    for number in range(count):
        first = tl.sum((begin < at - capacity).to(tl.int32), axis=0)  # the first expert of a chunk that ends here
        at = tl.sum(tl.where(expert == first, begin, 0), axis=0)
        tl.store(bounds + count - 1 - number, at)


def chunk_bounds(ends: torch.Tensor, capacity: int, count: int) -> torch.Tensor:
    """Bounds of the chunks of expert rows."""
    bounds = torch.empty(count + 1, dtype=torch.int32, device=ends.device)
    launch(
        _chunk_bounds_kernel,
        1,
        {
            "ends": ends.contiguous(),
            "bounds": bounds,
            "L": ends.shape[0],
            "capacity": capacity,
            "count": count,
            "EXPERTS": next_power_of_2(ends.shape[0] + 1),
        },
        num_warps=4,
    )
    return bounds


@triton.jit(do_not_specialize=["L", "capacity"], do_not_specialize_on_alignment=["chunk"])
def _chunk_rows_kernel(
    offs,  # (L,) int32
    scores,  # (P,) float32
    token_map,  # (P,) int32
    grad_map,  # (P,) int32
    chunk,  # (2,) int32
    own_offs,  # (L,) int32
    own_scores,  # (capacity,)
    own_token_map,  # (capacity,)
    own_grad_map,  # (capacity,), or nothing
    L,
    capacity,
    APART: tl.constexpr,  # two maps
    EXPERTS: tl.constexpr,  # L as a power of two
    ROWS: tl.constexpr,
):
    first, end = tl.load(chunk), tl.load(chunk + 1)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        own = tl.minimum(tl.load(offs + expert, mask=expert < L, other=0), end) - first
        tl.store(own_offs + expert, tl.maximum(own, 0), mask=expert < L)
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = here < tl.minimum(end - first, capacity)
    source = first.to(tl.int64) + here
    tl.store(own_scores + here, tl.load(scores + source, mask=inside, other=0.0), mask=here < capacity)
    tl.store(own_token_map + here, tl.load(token_map + source, mask=inside, other=-1), mask=here < capacity)
    if APART:
        tl.store(own_grad_map + here, tl.load(grad_map + source, mask=inside, other=-1), mask=here < capacity)


def chunk_rows(
    offs: torch.Tensor, scores: torch.Tensor, token_map: torch.Tensor, grad_map: torch.Tensor | None, chunk: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets, scores and maps of one chunk, counted from its start."""
    own_offs, own_scores = torch.empty_like(offs), scores.new_empty(capacity)
    own_token_map, own_grad_map = (token_map.new_empty(0 if row_map is None else capacity) for row_map in (token_map, grad_map))
    launch(
        _chunk_rows_kernel,
        max(cdiv(capacity, tiles.PLAN_ROWS), 1),
        {
            "offs": offs.contiguous(),
            "scores": scores.contiguous(),
            "token_map": token_map.contiguous(),
            "grad_map": token_map if grad_map is None else grad_map.contiguous(),
            "chunk": chunk.contiguous(),
            "own_offs": own_offs,
            "own_scores": own_scores,
            "own_token_map": own_token_map,
            "own_grad_map": own_grad_map,
            "L": offs.shape[0],
            "capacity": capacity,
            "APART": grad_map is not None,
            "EXPERTS": next_power_of_2(offs.shape[0]),
            "ROWS": tiles.PLAN_ROWS,
        },
        num_warps=tiles.PLAN_WARPS,
    )
    return own_offs, own_scores, own_token_map, own_grad_map


@triton.jit(do_not_specialize=["size"])
def _gather_or_zero_kernel(
    index,  # (size,) int32 or int64
    values,  # (N,)
    columns,  # (size,) integers: the column of out for each of index, or None
    out,  # (size,)
    size,
    C: tl.constexpr,  # columns of index and of out
    ROWS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    picked = tl.load(index + at, mask=at < size, other=-1)
    value = tl.load(values + picked, mask=picked >= 0, other=0)
    to = at
    if columns is not None:
        to = at // C * C + tl.load(columns + at, mask=at < size, other=0)
        value += 0.0  # -0.0 becomes 0.0
    tl.store(out + to, value.to(out.dtype.element_ty), mask=at < size)


def gather_or_zero(
    index: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """values[index], 0 where index is -1; with columns (T, C) in column columns[t, c] of the result, in `dtype`."""
    out = torch.empty(index.shape, dtype=dtype or values.dtype, device=values.device)
    if size := out.numel():
        launch(
            _gather_or_zero_kernel,
            cdiv(size, tiles.PLAN_ROWS),
            {
                "index": index.contiguous(),
                "values": values.contiguous(),
                "columns": None if columns is None else columns.contiguous(),
                "out": out,
                "size": size,
                "C": 1 if columns is None else columns.shape[1],
                "ROWS": tiles.PLAN_ROWS,
            },
            num_warps=tiles.PLAN_WARPS,
        )
    return out


# ---------------------------------------------------------------- padded groups of received rows


_MOST_COUNTS = 1 << 16  # of the table that one program holds


@triton.jit(do_not_specialize=["W", "L", "alignment"])
def _segments_kernel(
    counts,  # (W*L,) int32 or int64, rank-major
    segments,  # (3, L*W) int32, expert-major: first padded row, first received row, size
    padded_out,  # (L,) int32
    ends_out,  # (L,) int32
    W,
    L,
    alignment,
    RANKS: tl.constexpr,  # W and L as powers of two
    EXPERTS: tl.constexpr,
):
    rank, expert = tl.arange(0, RANKS), tl.arange(0, EXPERTS)
    there = (rank < W)[:, None] & (expert < L)[None, :]
    count = tl.load(counts + rank[:, None] * L + expert[None, :], mask=there, other=0).to(tl.int32)  # (RANKS, EXPERTS)

    size = tl.sum(count, axis=0)
    padded = (tl.maximum(size, alignment) + alignment - 1) // alignment * alignment
    padded = tl.where(expert < L, padded, 0)
    ends = tl.cumsum(padded, axis=0)
    of_rank = tl.sum(count, axis=1)
    received = (tl.cumsum(of_rank, axis=0) - of_rank)[:, None] + tl.cumsum(count, axis=1) - count
    first = (ends - padded)[None, :] + tl.cumsum(count, axis=0) - count

    tl.store(padded_out + expert, padded, mask=expert < L)
    tl.store(ends_out + expert, ends, mask=expert < L)
    segment = segments + expert[None, :] * W + rank[:, None]
    tl.store(segment, first, mask=there)
    tl.store(segment + W * L, received, mask=there)
    tl.store(segment + 2 * W * L, count, mask=there)


@triton.jit(do_not_specialize=["S"])
def _row_map_kernel(
    segments,  # (3, S) int32 with S = W*L, see _segments_kernel
    row_map,  # (P,) int32
    S,
    P,
    STEPS: tl.constexpr,  # halvings that a search over S segments needs
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros((ROWS,), tl.int32)  # the segment is in [low, high): the last one that starts at or before the row
    high = tl.zeros((ROWS,), tl.int32) + S
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(segments + middle, mask=middle < S, other=0) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    offset = row - tl.load(segments + low)
    source = tl.load(segments + S + low) + offset
    owned = offset < tl.load(segments + 2 * S + low)
    tl.store(row_map + row, tl.where(owned, source, -1), mask=row < P)


def permute_indices(
    counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row map, padded group sizes and group ends. The reference has a worked example.

    Args:
        counts: (W*L,) int32 or int64, rank-major.  ep_degree: W.  num_local_experts: L.
        alignment: rows, every group is padded to ceil(max(n, alignment) / alignment) * alignment.
        num_padded_rows: P, at least the last end.

    Returns:
        row_map (P,) int32, the source row of each padded row or -1; padded counts (L,) int32; END offsets (L,) int32.
    """
    num_segments = ep_degree * num_local_experts
    ranks, experts = next_power_of_2(ep_degree), next_power_of_2(num_local_experts)
    if counts.shape != (num_segments,) or num_segments == 0:
        raise ValueError(f"permute_indices: counts {tuple(counts.shape)}, want ({ep_degree} * {num_local_experts},), rank-major")
    if ranks * experts > _MOST_COUNTS:
        raise ValueError(f"permute_indices: {ep_degree} ranks x {num_local_experts} experts, want at most {_MOST_COUNTS} counts")

    def ints(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=torch.int32, device=counts.device)

    segments, row_map, padded, ends = ints(3 * num_segments), ints(num_padded_rows), ints(num_local_experts), ints(num_local_experts)

    launch(
        _segments_kernel,
        1,
        {
            "counts": counts.contiguous(),
            "segments": segments,
            "padded_out": padded,
            "ends_out": ends,
            "W": ep_degree,
            "L": num_local_experts,
            "alignment": alignment,
            "RANKS": ranks,
            "EXPERTS": experts,
        },
        num_warps=4 if ranks * experts <= 2048 else 16,
    )
    if num_padded_rows:
        launch(
            _row_map_kernel,
            cdiv(num_padded_rows, tiles.INDEX_ROWS),
            {
                "segments": segments,
                "row_map": row_map,
                "S": num_segments,
                "P": num_padded_rows,
                "STEPS": num_segments.bit_length(),
                "ROWS": tiles.INDEX_ROWS,
            },
            num_warps=tiles.INDEX_WARPS,
        )
    return row_map, padded, ends

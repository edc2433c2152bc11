"""Where every received row goes, worked out on the device: counts -> padded groups, their ends, and the row map.

Two launches and no host sync.  The first, one program, turns the (W, L) table of counts into the segments of the padded order, sorted by
their first padded row: segment e*W + r holds the rows from rank r for expert e.  In the second every padded row finds its segment by
binary search, so the padding is written in the same pass and a skewed expert costs no more than a balanced one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.shapes import cdiv, next_power_of_2

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
    place = row - tl.load(segments + low)
    source = tl.load(segments + S + low) + place
    owned = place < tl.load(segments + 2 * S + low)
    tl.store(row_map + row, tl.where(owned, source, -1), mask=row < P)


def group_index(
    counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row map, padded group sizes and group ends. Twin: `reference.group_index`, with a worked example.

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
        raise ValueError(f"group_index: counts {tuple(counts.shape)}, want ({ep_degree} * {num_local_experts},), rank-major")
    if ranks * experts > _MOST_COUNTS:
        raise ValueError(f"group_index: {ep_degree} ranks x {num_local_experts} experts, want at most {_MOST_COUNTS} counts")

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

"""The row of every top-k id in the experts' buffer: three small launches of CUDA C++ instead of a sort."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mxep.device import chip_of, multiprocessors
from mxep.ops.routing.index_reference import check_index_expert_rows, check_index_topk
from mxep.ops.runtime.nvrtc import Kernel
from mxep.shapes import cdiv

FILES = ("runtime/hopper.cuh", "routing/expert_rows.cu")
_THREADS = 512
_ITEMS, _FEW_ITEMS = 8, 2  # top-k ids of a thread; so few where more would leave multiprocessors idle
_MOST_EXPERTS = 2048  # whose counts, one for each warp of a block, fit into shared memory
_INT_BYTES = 4


def options_of(items: int, long: bool, scored: bool) -> dict[str, bool | int]:
    """The constants in front of expert_rows.cu; long: int64 experts, else int32; scored: for `index_topk`."""
    return {"ITEMS": items, "THREADS": _THREADS, "LONG": long, "SCORES": scored}


@functools.cache
def _kernel(device: int, entry: str, items: int, long: bool, scored: bool, num_local_experts: int) -> Kernel:
    shared = 0 if entry == "expert_rows_scan" else _THREADS // 32 * num_local_experts * _INT_BYTES
    return Kernel(entry, FILES, options_of(items, long, scored), _THREADS, shared, chip=chip_of(device))


class _Scored(NamedTuple):
    """Arguments of `index_topk`: scores, columns, values from row to row of experts and scores, this rank's first expert; its results."""

    scores: torch.Tensor | None = None
    columns: int = 0
    experts_row: int = 0
    scores_row: int = 0
    lowest: int = 0
    rows: torch.Tensor | None = None
    row_scores: torch.Tensor | None = None


def _index(
    experts: torch.Tensor, num_local_experts: int, alignment: int, topk_ids: torch.Tensor, scored: _Scored
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert rows of top-k ids (R, C), and the ends of the groups; fills `topk_ids` (P,) and the results in `scored`."""
    if num_local_experts > _MOST_EXPERTS:
        raise ValueError(f"index_expert_rows: {num_local_experts} experts on one GPU, want at most {_MOST_EXPERTS}; use more ranks")
    device, count, num_expert_rows = experts.device.index, experts.numel(), topk_ids.shape[0]
    items = _ITEMS if count > _THREADS * _ITEMS * multiprocessors(device) else _FEW_ITEMS
    kind = items, experts.dtype == torch.int64, scored.scores is not None
    tiles = max(1, cdiv(count, _THREADS * items))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    counts, expert_rows, ends = ints(num_local_experts * (tiles + 1)), ints(*experts.shape), ints(num_local_experts)
    totals = counts[num_local_experts * tiles :]

    def launch(entry: str, blocks: int, *arguments: object) -> None:
        _kernel(device, entry, *kind, num_local_experts).launch(device, blocks, *arguments)

    launch("expert_rows_count", tiles, experts, count, num_local_experts, counts, topk_ids, num_expert_rows, *scored)
    launch("expert_rows_scan", num_local_experts, counts, totals, tiles)
    launch(
        "expert_rows_write",
        tiles,
        experts,
        count,
        num_local_experts,
        counts,
        totals,
        alignment,
        expert_rows,
        ends,
        topk_ids,
        num_expert_rows,
        *scored,
    )
    return expert_rows, ends


def index_expert_rows(
    experts: torch.Tensor, num_local_experts: int, alignment: int, num_expert_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row of every top-k id in the order of the experts, the ends of the groups, and the id in each row.

    Args:
        experts: (R, C) int32 or int64, from 0 to L - 1; other values belong to other ranks.  num_local_experts: L.
        alignment: rows that a group is padded to, 0 for none.  num_expert_rows: P, at least the last end.

    Returns:
        expert rows (R, C) int32, -1 for ids of other ranks; END offsets (L,) int32; the id in each row (P,) int32, -1 in padding.

    Raises:
        ValueError: arguments that do not fit, or more experts than fit into a multiprocessor's memory.
    """
    check_index_expert_rows(experts, num_local_experts, alignment, num_expert_rows)
    topk_ids = torch.empty(num_expert_rows, dtype=torch.int32, device=experts.device)
    return *_index(experts.contiguous(), num_local_experts, alignment, topk_ids, _Scored()), topk_ids


def index_topk(
    experts: torch.Tensor, scores: torch.Tensor, rank: int, num_local_experts: int, alignment: int, num_expert_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`index_expert_rows` of top-k ids among the experts of all ranks, and the contents of each expert row.

    Args:
        experts: (R, C) int32 or int64.  scores: (R, C) float32.  Both any strides (copied first unless the last one is 1).
        rank: whose experts, from rank * L on, are here.
        num_local_experts, alignment, num_expert_rows: as in `index_expert_rows`.

    Returns:
        expert rows (R, C), END offsets (L,), top-k ids (P,); the row of each id (P,) int32, -1 in padding; its score (P,) float32, 0 in
        padding.

    Raises:
        ValueError: scores that do not fit, or as `index_expert_rows`.
    """
    check_index_topk(experts, scores, num_local_experts, alignment, num_expert_rows)
    experts = experts if experts.stride(1) == 1 else experts.contiguous()
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    topk_ids = torch.empty(num_expert_rows, dtype=torch.int32, device=experts.device)
    rows = torch.empty_like(topk_ids)
    row_scores = torch.empty(num_expert_rows, dtype=torch.float32, device=experts.device)
    shape = max(experts.shape[1], 1), experts.stride(0), scores.stride(0)
    scored = _Scored(scores, *shape, rank * num_local_experts, rows, row_scores)
    return *_index(experts, num_local_experts, alignment, topk_ids, scored), topk_ids, rows, row_scores

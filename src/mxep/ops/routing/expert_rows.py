"""The row of every top-k id in the experts' buffer: three small launches of CUDA C++ instead of a sort."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mxep.device import compute_capability
from mxep.ops.routing.index_reference import check_index_expert_rows, check_index_topk_table
from mxep.ops.runtime.nvrtc import Kernel

FILES = ("runtime/hopper.cuh", "routing/expert_rows.cu")
_THREADS, _ITEMS = 512, 8  # top-k ids of a thread
_MOST_EXPERTS = 2048  # whose counts, one for each warp of a block, fit into shared memory
_INT_BYTES = 4


def options_of(kind: str) -> dict[str, bool | int]:
    """The constants in front of expert_rows.cu; kind: "int32" or "int64" experts, or the "table" of all ranks' ids."""
    return {"ITEMS": _ITEMS, "THREADS": _THREADS, "LONG": kind == "int64", "TABLE": kind == "table"}


@functools.cache
def _kernel(device: int, entry: str, kind: str, num_local_experts: int) -> Kernel:
    major, minor = compute_capability(device)
    shared = 0 if entry == "expert_rows_scan" else _THREADS // 32 * num_local_experts * _INT_BYTES
    return Kernel(entry, FILES, options_of(kind), _THREADS, shared, chip=f"sm_{major}{minor}")


class _Table(NamedTuple):
    """A table of top-k ids: its columns, the first expert of this rank; the table row and the score of each expert row."""

    columns: int = 0
    lowest: int = 0
    table_rows: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def _index(
    experts: torch.Tensor,
    shape: tuple[int, int],
    num_local_experts: int,
    alignment: int,
    topk_ids: torch.Tensor,
    kind: str,
    table: _Table,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert rows of top-k ids of that shape, and the ends of the groups; fills `topk_ids` (P,) and the outputs in `table`."""
    if num_local_experts > _MOST_EXPERTS:
        raise ValueError(f"index_expert_rows: {num_local_experts} experts on one GPU, want at most {_MOST_EXPERTS}; use more ranks")
    device, count, num_expert_rows = experts.device.index, shape[0] * shape[1], topk_ids.shape[0]
    tiles = max(1, -(-count // (_THREADS * _ITEMS)))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    counts, expert_rows, ends = ints(num_local_experts * (tiles + 1)), ints(*shape), ints(num_local_experts)
    totals = counts[num_local_experts * tiles :]

    def launch(entry: str, blocks: int, *arguments: object) -> None:
        _kernel(device, entry, kind, num_local_experts).launch(device, blocks, *arguments)

    launch("expert_rows_count", tiles, experts, count, num_local_experts, counts, topk_ids, num_expert_rows, *table)
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
        *table,
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
    kind = "int64" if experts.dtype == torch.int64 else "int32"
    R, C = experts.shape
    return *_index(experts.contiguous(), (R, C), num_local_experts, alignment, topk_ids, kind, _Table()), topk_ids


def index_topk_table(
    table: torch.Tensor, rank: int, num_local_experts: int, alignment: int, num_expert_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`index_expert_rows` of all ranks' tables, and the contents of each expert row.

    Args:
        table: (R, 2C) int32, experts and the bits of their scores.  rank: whose experts, from rank * L on, are here.
        num_local_experts, alignment, num_expert_rows: as in `index_expert_rows`.

    Returns:
        expert rows (R, C), END offsets (L,), top-k ids (P,); the table row of each (P,) int32, -1 in padding; its score (P,)
        float32, 0 in padding.

    Raises:
        ValueError: as `index_expert_rows`.
    """
    check_index_topk_table(table, num_local_experts, alignment, num_expert_rows)
    R, C = table.shape[0], table.shape[1] // 2
    topk_ids, table_rows = (torch.empty(num_expert_rows, dtype=torch.int32, device=table.device) for _ in range(2))
    scores = torch.empty(num_expert_rows, dtype=torch.float32, device=table.device)
    source = _Table(max(C, 1), rank * num_local_experts, table_rows, scores)
    return *_index(table.contiguous(), (R, C), num_local_experts, alignment, topk_ids, "table", source), topk_ids, table_rows, scores

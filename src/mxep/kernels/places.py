"""Where every choice stands among the experts' rows: three small launches of CUDA C++ in place of a sort.

Twins: `reference.place_choices`, `reference.place_table`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mxep.device import compute_capability
from mxep.kernels.nvrtc import Kernel
from mxep.reference.places import check_place_choices, check_place_table

FILES = ("hopper.cuh", "places.cu")
_THREADS, _ITEMS = 512, 8  # choices of a thread
_MOST_EXPERTS = 2048  # whose counts, one for each warp of a block, fit into shared memory
_INT_BYTES = 4


def options_of(kind: str) -> dict[str, bool | int]:
    """The constants in front of places.cu; kind: "int32" or "int64" experts, or the "table" of all ranks' choices."""
    return {"ITEMS": _ITEMS, "THREADS": _THREADS, "LONG": kind == "int64", "TABLE": kind == "table"}


@functools.cache
def _kernel(device: int, entry: str, kind: str, num_local_experts: int) -> Kernel:
    major, minor = compute_capability(device)
    shared = 0 if entry == "place_scan" else _THREADS // 32 * num_local_experts * _INT_BYTES
    return Kernel(entry, FILES, options_of(kind), _THREADS, shared, chip=f"sm_{major}{minor}")


class _Described(NamedTuple):
    """What stands in each place: `columns` choices in a line, this rank's experts from `lowest` on, line and score of each place."""

    columns: int = 0
    lowest: int = 0
    lines: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def _place(
    experts: torch.Tensor,
    shape: tuple[int, int],
    num_local_experts: int,
    alignment: int,
    choices: torch.Tensor,
    kind: str,
    told: _Described,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of choices of that shape, where groups end; fills `choices` (P,) and what is told of them."""
    if num_local_experts > _MOST_EXPERTS:
        raise ValueError(f"place_choices: {num_local_experts} experts on one GPU, want at most {_MOST_EXPERTS}; use more ranks")
    device, count, num_places = experts.device.index, shape[0] * shape[1], choices.shape[0]
    tiles = max(1, -(-count // (_THREADS * _ITEMS)))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    counts, places, ends = ints(num_local_experts * (tiles + 1)), ints(*shape), ints(num_local_experts)
    totals = counts[num_local_experts * tiles :]

    def launch(entry: str, blocks: int, *arguments: object) -> None:
        _kernel(device, entry, kind, num_local_experts).launch(device, blocks, *arguments)

    launch("place_count", tiles, experts, count, num_local_experts, counts, choices, num_places, *told)
    launch("place_scan", num_local_experts, counts, totals, tiles)
    launch("place_write", tiles, experts, count, num_local_experts, counts, totals, alignment, places, ends, choices, num_places, *told)
    return places, ends


def place_choices(
    experts: torch.Tensor, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places in the order of the experts, where the groups end, and which choice is in each place. Twin: `reference.place_choices`.

    Args:
        experts: (R, C) int32 or int64, from 0 to L - 1; anything else is a choice that is not here.  num_local_experts: L.
        alignment: rows that a group is padded to, 0 for none.  num_places: P, at least the last end.

    Returns:
        places (R, C) int32, -1 for a choice that is not here; END offsets (L,) int32; the choice in each place (P,) int32, -1 in padding.

    Raises:
        ValueError: arguments that do not fit, or more experts than fit into a multiprocessor's memory.
    """
    check_place_choices(experts, num_local_experts, alignment, num_places)
    choices = torch.empty(num_places, dtype=torch.int32, device=experts.device)
    kind = "int64" if experts.dtype == torch.int64 else "int32"
    R, C = experts.shape
    return *_place(experts.contiguous(), (R, C), num_local_experts, alignment, choices, kind, _Described()), choices


def place_table(
    table: torch.Tensor, rank: int, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`place_choices` of the choices in all ranks' tables, and what stands in each place. Twin: `reference.place_table`.

    Args:
        table: (R, 2C) int32, experts and the bits of their scores.  rank: whose experts, from rank * L on, are here.
        num_local_experts, alignment, num_places: as in `place_choices`.

    Returns:
        places (R, C), END offsets (L,), choices (P,); the row of each place (P,) int32, -1 in padding; its score (P,) float32, else 0.

    Raises:
        ValueError: as `place_choices`.
    """
    check_place_table(table, num_local_experts, alignment, num_places)
    R, C = table.shape[0], table.shape[1] // 2
    choices, lines = (torch.empty(num_places, dtype=torch.int32, device=table.device) for _ in range(2))
    scores = torch.empty(num_places, dtype=torch.float32, device=table.device)
    told = _Described(max(C, 1), rank * num_local_experts, lines, scores)
    return *_place(table.contiguous(), (R, C), num_local_experts, alignment, choices, "table", told), choices, lines, scores

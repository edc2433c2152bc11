"""Where every choice stands among the experts' rows: three small launches of CUDA C++ in place of a sort.

Twin: `reference.place_choices`.
"""

from __future__ import annotations

import functools

import torch

from mxep.device import compute_capability
from mxep.kernels.nvrtc import Kernel
from mxep.reference.places import check_place_choices

FILES = ("hopper.cuh", "places.cu")
_THREADS, _ITEMS = 512, 8  # choices of a thread
_MOST_EXPERTS = 2048  # whose counts, one for each warp of a block, fit into shared memory
_INT_BYTES = 4


def options_of(long: bool) -> dict[str, bool | int]:
    """The constants in front of places.cu; `long`: experts are int64."""
    return {"ITEMS": _ITEMS, "THREADS": _THREADS, "LONG": long}


@functools.cache
def _kernel(device: int, entry: str, long: bool, num_local_experts: int) -> Kernel:
    major, minor = compute_capability(device)
    shared = 0 if entry == "place_scan" else _THREADS // 32 * num_local_experts * _INT_BYTES
    return Kernel(entry, FILES, options_of(long), _THREADS, shared, chip=f"sm_{major}{minor}")


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
    if num_local_experts > _MOST_EXPERTS:
        raise ValueError(f"place_choices: {num_local_experts} experts on one GPU, want at most {_MOST_EXPERTS}; use more ranks")
    experts, device, count = experts.contiguous(), experts.device.index, experts.numel()
    tiles = max(1, -(-count // (_THREADS * _ITEMS)))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    counts, places, ends, choices = ints(num_local_experts * (tiles + 1)), ints(*experts.shape), ints(num_local_experts), ints(num_places)
    totals = counts[num_local_experts * tiles :]

    def launch(entry: str, blocks: int, *arguments: object) -> None:
        _kernel(device, entry, experts.dtype == torch.int64, num_local_experts).launch(device, blocks, *arguments)

    launch("place_count", tiles, experts, count, num_local_experts, counts, choices, num_places)
    launch("place_scan", num_local_experts, counts, totals, tiles)
    launch("place_write", tiles, experts, count, num_local_experts, counts, totals, alignment, places, ends, choices, num_places)
    return places, ends, choices

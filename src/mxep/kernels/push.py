"""Rows, and sums of rows, straight into the memory of other ranks on the GPU: CUDA C++, one launch, every row read and quantised once.

Addresses are those of peers' memory as this GPU sees it (symmetric memory), or of its own.  Twins, byte for byte: `reference.push_rows`
and `reference.push_sums`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from mxep.device import compute_capability
from mxep.kernels import tiles
from mxep.kernels.nvrtc import Kernel
from mxep.reference.push import check_push_rows, check_push_sums

FILES = ("hopper.cuh", "mx_bytes.cuh", "portions.cuh", "push.cu")
MOST_RANKS = 32  # addresses that a launch takes
_WIDEST = 16  # bytes of a load or store
_RECORD_PORTION = 16  # values of a record that a lane takes at a time
_WARP, _LEAST_RECORD_LANES = 32, 8


def portions_options(sums: bool, mode: str, item_bytes: int, word_bytes: int, portions: int) -> dict[str, bool | int]:
    """The constants of portions.cuh for rows of so many portions: words of a plain row, 16 values each of a record."""
    lanes = min(1 << max(portions - 1, 0).bit_length(), _WARP)
    if mode:
        lanes = max(lanes, _LEAST_RECORD_LANES)
    parts = tiles.PUSH_PARTS[sums, bool(mode), item_bytes == 4] if portions > _WARP else 1
    shape = {"ITEM": item_bytes, "WORD": word_bytes, "LANES": lanes, "PARTS": parts, "THREADS": tiles.PUSH_THREADS}
    return {**shape, "QUANTISED": bool(mode), "RCEIL": mode == "rceil"}


def options_of(sums: bool, mode: str, item_bytes: int, word_bytes: int, portions: int, within: bool = False) -> dict[str, bool | int]:
    """The constants in front of push.cu, which has some more."""
    return {**portions_options(sums, mode, item_bytes, word_bytes, portions), "SUMS": sums, "WITHIN": within}


@functools.cache
def _kernel(device: int, sums: bool, mode: str, item_bytes: int, word_bytes: int, most_portions: int, within: bool) -> Kernel:
    """One variant; `most_portions`: of a row, a power of two up to twice a warp's lanes, which stands for all above."""
    major, minor = compute_capability(device)
    options = options_of(sums, mode, item_bytes, word_bytes, most_portions, within)
    return Kernel("push", FILES, options, options["THREADS"], chip=f"sm_{major}{minor}")


def _word_bytes(*multiples: int) -> int:
    """The widest load or store for places and sizes that are multiples of these."""
    common = _WIDEST
    for multiple in multiples:
        common |= multiple
    return common & -common


def _launch(
    where: str,
    rows: torch.Tensor,
    slots: torch.Tensor,
    ranks: torch.Tensor | None,
    region: int | None,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    earlier: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> None:
    """`region`: of sums, None for rows.  `earlier`: window, begun and carry of sums."""
    if len(addresses) > MOST_RANKS:
        raise ValueError(f"{where}: {len(addresses)} addresses, want at most {MOST_RANKS}; take a smaller group, or another transport")
    sums, device, item = region is not None, rows.device.index, rows.element_size()
    values = rows if rows.stride(1) == 1 else rows.contiguous()
    size = values.shape[1] * item
    begun = [part.data_ptr() for part in earlier[1:] if part is not None]
    if mode and _word_bytes(*begun) < _WIDEST:
        raise ValueError(f"{where}: begun or carry start off {_WIDEST} bytes, want multiples of it, as the allocator's; clone them")
    word = _word_bytes(size, values.stride(0) * item, values.data_ptr(), *begun, *([] if mode else [pitch, *addresses]))
    if mode and word < _WIDEST:
        values, word = values.clone(memory_format=torch.contiguous_format), _WIDEST
    elif sums and word < item:
        raise ValueError(f"{where}: pitch={pitch} or an address is no multiple of {item}, the bytes of a value; align them")

    portions = values.shape[1] // _RECORD_PORTION if mode else size // word
    most = min(1 << (portions - 1).bit_length(), 2 * _WARP)
    kernel = _kernel(device, sums, mode, item if mode or sums else 1, word, most, bool(begun))
    lanes, parts = kernel.options["LANES"], kernel.options["PARTS"]
    pieces = -(-portions // (lanes * parts))
    blocks = -(-slots.shape[0] * pieces * lanes // kernel.threads)
    memory = (ctypes.c_uint64 * MOST_RANKS)(*addresses)
    of_ranks = None if ranks is None else ranks.contiguous()
    index = (slots.contiguous(), of_ranks, slots.shape[1], slots.shape[0], pieces, values.shape[0], region or 0, *earlier)
    kernel.launch(device, blocks, values, values.stride(0) * item, size, *index, memory, len(addresses), pitch)


def push_rows(rows: torch.Tensor, slots: torch.Tensor, ranks: torch.Tensor | None, addresses: Sequence[int], pitch: int, mode: str) -> None:
    """Each row to its slots on other ranks: to addresses[ranks[t, j]] + slots[t, j] * pitch. Twin: `reference.push_rows`.

    Args:
        rows: (T, D), of any dtype where they travel as they are.  slots: (T, J) int32, -1 for none.
        ranks: (T, J) int32, or None: column j's are rank j's; to a rank that has no address nothing is sent here, the twin raises.
        addresses: of at most 32 ranks.  pitch: bytes.  mode: "", "rceil" or "floor"; records want multiples of 16 for the last three.
    """
    size = check_push_rows(rows, slots, ranks, addresses, pitch, mode)

    if slots.numel() and size:
        _launch("push_rows", rows, slots, ranks, None, addresses, pitch, mode)


def push_sums(
    placed: torch.Tensor,
    slots: torch.Tensor,
    region: int,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    window: torch.Tensor | None = None,
    begun: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
) -> None:
    """Sums of rows to other ranks: sum r to addresses[r // region] + (r % region) * pitch. Twin: `reference.push_sums`.

    Args:
        placed: (P, D) bf16 or float32.  slots: (W * region, J) int32, every value in [-1, P); one past that adds nothing here, the twin
            raises.  region: sums of each rank.  addresses, pitch, mode: as in `push_rows`.
        window, begun, carry: placed are the rows of the last window alone, from place window[0] on, and these are `sum_rows_within`'s
            window, out and carry behind the windows before.  None: placed are the rows of all places.
    """
    size = check_push_sums(placed, slots, region, addresses, pitch, mode, window, begun, carry)

    if slots.numel() and size:
        _launch("push_sums", placed, slots, None, region, addresses, pitch, mode, (window, begun, carry))

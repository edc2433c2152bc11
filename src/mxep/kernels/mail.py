"""One round of rows through mailboxes on the GPU: CUDA C++, one launch for all ranks. Twins, byte for byte: `mxep.reference.mail`."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from mxep.device import compute_capability
from mxep.kernels import push, tiles
from mxep.kernels.nvrtc import Kernel, PackedStructure
from mxep.reference.mail import Pair, check_round
from mxep.reference.push import sent_bytes

FILES = ("hopper.cuh", "mx_bytes.cuh", "portions.cuh", "mail.cu")
_ALIGNMENT = 16  # bytes: what a lane loads or stores at a time
_PORTION, _WARP = 16, 32  # values that a lane takes at a time; lanes
_CALL, _PAIR = "Q2I3Q6I", "Q4I"  # struct Call of mail.cu, struct Pair


def _room(world: int) -> int:
    """Pairs that a variant has room for."""
    return 1 << (world - 1).bit_length()


def mail_options(mode: str, item_bytes: int, portions: int, world: int) -> dict[str, bool | int]:
    """The constants in front of mail.cu for `mail_rows`: rows of so many portions of 16 values."""
    return {**push.portions_options(False, mode, item_bytes, _ALIGNMENT, portions), "PAIRS": _room(world)}


def take_options(item_bytes: int, portions: int, world: int) -> dict[str, bool | int]:
    """The same for `take_rows`: a portion is what a lane stores at a time, 16 bytes."""
    return {**mail_options("rceil", item_bytes, portions, world), "PARTS": tiles.TAKE_PARTS if portions > _WARP else 1}


def _most(portions: int) -> int:
    """The power of two that stands for rows of so many portions: one variant for all above a warp's lanes."""
    return min(1 << max(portions - 1, 0).bit_length(), 2 * _WARP)


@functools.cache
def _kernel(entry: str, device: int, mode: str, item_bytes: int, most_portions: int, room: int) -> Kernel:
    take = entry == "take_rows"
    options = take_options(item_bytes, most_portions, room) if take else mail_options(mode, item_bytes, most_portions, room)
    major, minor = compute_capability(device)
    return Kernel(entry, FILES, options, options["THREADS"], chip=f"sm_{major}{minor}")


class _Variant(NamedTuple):
    """A kernel for rows of one width between so many ranks: pieces of a row, how many a block takes at a time, the form of its argument."""

    kernel: Kernel
    pieces: int
    teams: int
    layout: struct.Struct

    def launch(self, rows: torch.Tensor, blocks: int, numbers: tuple[int, ...], pairs: Sequence[Pair], stream: int | None) -> None:
        """`numbers`: those of the structure behind the address of the rows."""
        content = self.layout.pack(rows.data_ptr(), *numbers, len(pairs), 0, *chain.from_iterable(pairs))
        self.kernel.run(rows.device.index, max(1, blocks), PackedStructure(content), stream)


@functools.lru_cache(maxsize=1024)
def _variant(entry: str, device: int, mode: str, item_bytes: int, width: int, world: int) -> _Variant:
    portions = width * item_bytes // _ALIGNMENT if entry == "take_rows" else width // _PORTION
    kernel = _kernel(entry, device, mode, item_bytes, _most(portions), _room(world))
    lanes, room = kernel.options["LANES"], kernel.options["PAIRS"]
    layout = struct.Struct(f"<{_CALL}{_PAIR * world}{struct.calcsize(f'<{_PAIR}') * (room - world)}x")
    return _Variant(kernel, max(1, -(-portions // (lanes * kernel.options["PARTS"]))), kernel.threads // lanes, layout)


def mail_rows(
    rows: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, number: int, mode: str, stream: int | None = None
) -> None:
    """Round `step` of every message that has one: a header, then the records of its rows. Twin: `reference.mail.mail_rows`.

    Args:
        rows: (T, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  pairs, slot_bytes, number, mode: as in the twin.
        stream: of this GPU, None for torch's current one.
    """
    counts, record, variant = _check("mail_rows", rows, pairs, step, slot_bytes, mode)
    units = variant.pieces * max(counts) * len(pairs)
    width = rows.shape[1]
    numbers = number, step, width * rows.element_size(), slot_bytes, 0, width, variant.pieces, units, record
    variant.launch(rows, min(-(-units // variant.teams), tiles.MAIL_BLOCKS), numbers, pairs, stream)


def take_rows(
    values: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, number: int, trouble: torch.Tensor, stream: int | None = None
) -> None:
    """Round `step` of every message: its values, NaN where the header is not the awaited one. Twin: `reference.mail.take_rows`.

    Args:
        values: (R, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  trouble: pinned memory of the host.
        others: as in `mail_rows`.
    """
    counts, record, variant = _check("take_rows", values, pairs, step, slot_bytes, "rceil")
    units = variant.pieces * sum(counts)
    width = values.shape[1]
    numbers = number, step, width * values.element_size(), slot_bytes, trouble.data_ptr(), width, variant.pieces, units, record
    variant.launch(values, -(-units // variant.teams), numbers, pairs, stream)


def _check(where: str, rows: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, mode: str) -> tuple[list[int], int, _Variant]:
    """Rows of the round for each rank, bytes of a record, and the kernel; raises ValueError for what the kernels cannot do."""
    record = sent_bytes(where, rows, mode)
    counts = check_round(where, pairs, step, record, slot_bytes)
    if rows.data_ptr() % _ALIGNMENT or not rows.is_contiguous():
        got = f"rows at {rows.data_ptr():#x} with strides {rows.stride()}"
        raise ValueError(f"{where}: {got}, want them contiguous and at a multiple of {_ALIGNMENT} bytes; pass a copy")
    return counts, record, _variant(where, rows.device.index, mode, rows.element_size(), rows.shape[1], len(pairs))

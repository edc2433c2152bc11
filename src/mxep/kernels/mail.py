"""One round of rows through mailboxes on the GPU: CUDA C++, one launch for all ranks. Twins, byte for byte: `mxep.reference.mail`."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
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
_FRONT, _BEHIND = struct.Struct("<QI"), struct.Struct("<I3Q6I")  # struct Call of mail.cu: what differs from call to call, what follows
_PAIR = struct.Struct("<Q4I")  # struct Pair
_KEPT = 4096  # rounds whose launches are kept for other calls


def _room(world: int) -> int:
    """Pairs that a variant has room for."""
    return 1 << (world - 1).bit_length()


def mail_options(mode: str, item_bytes: int, portions: int, world: int) -> dict[str, bool | int]:
    """The constants in front of mail.cu for `mail_rows`: rows of so many portions of 16 values."""
    options = {**push.options_of(False, mode, item_bytes, _ALIGNMENT, portions), "PAIRS": _room(world)}
    return {name: value for name, value in options.items() if name != "SUMS"}


def take_options(item_bytes: int, portions: int, world: int) -> dict[str, bool | int]:
    """The same for `take_rows`: a portion is what a lane stores at a time, 16 bytes."""
    return {**mail_options("rceil", item_bytes, portions, world), "PARTS": tiles.TAKE_PARTS if portions > _WARP else 1}


@functools.cache
def _mail_kernel(device: int, mode: str, item_bytes: int, most_portions: int, room: int) -> Kernel:
    return _kernel("mail_rows", device, mail_options(mode, item_bytes, most_portions, room))


@functools.cache
def _take_kernel(device: int, item_bytes: int, most_portions: int, room: int) -> Kernel:
    return _kernel("take_rows", device, take_options(item_bytes, most_portions, room))


def _kernel(entry: str, device: int, options: dict[str, bool | int]) -> Kernel:
    major, minor = compute_capability(device)
    return Kernel(entry, FILES, options, options["THREADS"], chip=f"sm_{major}{minor}")


def _most(portions: int) -> int:
    """The power of two that stands for rows of so many portions: one variant for all above a warp's lanes."""
    return min(1 << max(portions - 1, 0).bit_length(), 2 * _WARP)


class _Launch(NamedTuple):
    """A round that is ready but for the rows and the number of the call."""

    kernel: Kernel
    blocks: int
    behind: bytes  # of the structure, behind these two

    def run(self, rows: torch.Tensor, number: int, stream: int | None) -> None:
        content = _FRONT.pack(rows.data_ptr(), number) + self.behind
        self.kernel.run(rows.device.index, self.blocks, PackedStructure(content), stream)


def _launch(kernel: Kernel, blocks: int, numbers: tuple[int, ...], pairs: tuple[Pair, ...]) -> _Launch:
    """`numbers`: those of the structure that stand between the number of the call and the pairs."""
    empty = bytes(_PAIR.size * (kernel.options["PAIRS"] - len(pairs)))
    return _Launch(kernel, max(1, blocks), _BEHIND.pack(*numbers, 0) + b"".join(_PAIR.pack(*pair) for pair in pairs) + empty)


def mail_rows(
    rows: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, number: int, mode: str, stream: int | None = None
) -> None:
    """Round `step` of every message that has one: a header, then the records of its rows. Twin: `reference.mail.mail_rows`.

    Args:
        rows: (T, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  pairs, slot_bytes, number, mode: as in the twin.
        stream: of this GPU, None for torch's current one.
    """
    record = _check("mail_rows", rows, mode)
    _mail(rows.device.index, mode, rows.element_size(), rows.shape[1], record, tuple(pairs), step, slot_bytes).run(rows, number, stream)


@functools.lru_cache(maxsize=_KEPT)
def _mail(device: int, mode: str, item: int, width: int, record: int, pairs: tuple[Pair, ...], step: int, slot_bytes: int) -> _Launch:
    most, world = max(check_round("mail_rows", pairs, step, record, slot_bytes)), len(pairs)
    portions = width // _PORTION
    kernel = _mail_kernel(device, mode, item, _most(portions), _room(world))
    pieces, teams = _cut(kernel, portions)
    units = pieces * most * world
    numbers = step, width * item, slot_bytes, 0, width, pieces, units, record, world
    return _launch(kernel, min(-(-units // teams), tiles.MAIL_BLOCKS), numbers, pairs)


def take_rows(
    values: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, number: int, trouble: torch.Tensor, stream: int | None = None
) -> None:
    """Round `step` of every message: its values, NaN where the header is not the awaited one. Twin: `reference.mail.take_rows`.

    Args:
        values: (R, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  trouble: pinned memory of the host.
        others: as in `mail_rows`.
    """
    record, told = _check("take_rows", values, "rceil"), trouble.data_ptr()
    launch = _take(values.device.index, values.element_size(), values.shape[1], record, tuple(pairs), step, slot_bytes, told)
    launch.run(values, number, stream)


@functools.lru_cache(maxsize=_KEPT)
def _take(device: int, item: int, width: int, record: int, pairs: tuple[Pair, ...], step: int, slot_bytes: int, told: int) -> _Launch:
    rows = sum(check_round("take_rows", pairs, step, record, slot_bytes))
    portions = width * item // _ALIGNMENT
    kernel = _take_kernel(device, item, _most(portions), _room(len(pairs)))
    pieces, teams = _cut(kernel, portions)
    units = pieces * rows
    numbers = step, width * item, slot_bytes, told, width, pieces, units, record, len(pairs)
    return _launch(kernel, -(-units // teams), numbers, pairs)


def _cut(kernel: Kernel, portions: int) -> tuple[int, int]:
    """Pieces of a row of so many portions, and how many a block takes at a time."""
    lanes = kernel.options["LANES"]
    return max(1, -(-portions // (lanes * kernel.options["PARTS"]))), kernel.threads // lanes


def _check(where: str, rows: torch.Tensor, mode: str) -> int:
    """Bytes of a record; raises ValueError for rows that the kernels cannot read or write."""
    if rows.data_ptr() % _ALIGNMENT or not rows.is_contiguous():
        got = f"rows at {rows.data_ptr():#x} with strides {rows.stride()}"
        raise ValueError(f"{where}: {got}, want them contiguous and at a multiple of {_ALIGNMENT} bytes; pass a copy")
    return sent_bytes(where, rows, mode)

"""One round of rows through mailboxes on the GPU: CUDA C++, one launch for all ranks. Twins, byte for byte: `mxep.reference.mail`."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import chain

import torch

from mxep.device import compute_capability
from mxep.kernels import push, tiles
from mxep.kernels.nvrtc import Kernel, PackedStructure
from mxep.reference.mail import Pair, check_mail
from mxep.reference.quantize import check_scaling_mode

FILES = ("hopper.cuh", "mx_bytes.cuh", "portions.cuh", "mail.cu")
_ALIGNMENT = 16  # bytes: what a lane loads or stores at a time
_PORTION, _WARP = 16, 32  # values that a lane takes at a time; lanes
_CALL, _PAIR = "4Q8I", "Q4I"  # struct Call of mail.cu, struct Pair


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


@functools.cache
def _layout(pairs: int, room: int) -> struct.Struct:
    return struct.Struct(f"<{_CALL}{_PAIR * pairs}{struct.calcsize(f'<{_PAIR}') * (room - pairs)}x")


def _launch(
    kernel: Kernel, rows: torch.Tensor, places: tuple[int, int], numbers: tuple[int, ...], pairs: Sequence[Pair], stream: int | None
) -> None:
    """`places`: bytes of a slot, address of the trouble; `numbers`: blocks, pieces, units and what follows in the structure."""
    width, world, (blocks, *others) = rows.shape[1], len(pairs), numbers
    words = rows.data_ptr(), width * rows.element_size(), *places, width, *others, world, 0, *chain.from_iterable(pairs)
    content = _layout(world, kernel.options["PAIRS"]).pack(*words)
    kernel.run(rows.device.index, max(1, blocks), PackedStructure(content), stream)


def mail_rows(
    rows: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, number: int, mode: str, stream: int | None = None
) -> None:
    """Round `step` of every message that has one: a header, then the records of its rows. Twin: `reference.mail.mail_rows`.

    Args:
        rows: (T, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  pairs, slot_bytes, number, mode: as in the twin.
        stream: of this GPU, None for torch's current one.
    """
    counts = [pair.rows_in(step) for pair in pairs]
    record = _check("mail_rows", rows, counts, slot_bytes)
    check_scaling_mode("mail_rows", mode)

    portions, world = rows.shape[1] // _PORTION, len(pairs)
    kernel = _mail_kernel(rows.device.index, mode, rows.element_size(), _most(portions), _room(world))
    pieces, teams = _cut(kernel, portions)
    units = pieces * max(counts) * world
    numbers = min(-(-units // teams), tiles.MAIL_BLOCKS), pieces, units, step, number, record
    _launch(kernel, rows, (slot_bytes, 0), numbers, pairs, stream)


def take_rows(
    values: torch.Tensor, pairs: Sequence[Pair], step: int, slot_bytes: int, number: int, trouble: torch.Tensor, stream: int | None = None
) -> None:
    """Round `step` of every message: its values, NaN where the header is not the awaited one. Twin: `reference.mail.take_rows`.

    Args:
        values: (R, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  trouble: pinned memory of the host.
        others: as in `mail_rows`.
    """
    counts = [pair.rows_in(step) for pair in pairs]
    record = _check("take_rows", values, counts, slot_bytes)

    item = values.element_size()
    portions = values.shape[1] * item // _ALIGNMENT
    kernel = _take_kernel(values.device.index, item, _most(portions), _room(len(pairs)))
    pieces, teams = _cut(kernel, portions)
    units = pieces * sum(counts)
    numbers = -(-units // teams), pieces, units, step, number, record
    _launch(kernel, values, (slot_bytes, trouble.data_ptr()), numbers, pairs, stream)


def _cut(kernel: Kernel, portions: int) -> tuple[int, int]:
    """Pieces of a row of so many portions, and how many a block takes at a time."""
    lanes = kernel.options["LANES"]
    return max(1, -(-portions // (lanes * kernel.options["PARTS"]))), kernel.threads // lanes


def _check(where: str, rows: torch.Tensor, counts: Sequence[int], slot_bytes: int) -> int:
    """Bytes of a record; raises ValueError for what the kernels cannot do."""
    size = check_mail(where, rows, counts, slot_bytes)
    if rows.data_ptr() % _ALIGNMENT or not rows.is_contiguous():
        got = f"rows at {rows.data_ptr():#x} with strides {rows.stride()}"
        raise ValueError(f"{where}: {got}, want them contiguous and at a multiple of {_ALIGNMENT} bytes; pass a copy")
    return size

"""One round of the slotted all-to-all on the GPU: CUDA C++, one launch for all ranks. Reference: slots_reference.py."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from mxep.device import chip_of
from mxep.ops.peer_write import p2p
from mxep.ops.peer_write.reference import sent_bytes
from mxep.ops.peer_write.slots_reference import PeerMessage, check_round
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel, PackedStructure

FILES = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "peer_write/chunks.cuh", "peer_write/slots.cu")
_ALIGNMENT = 16  # bytes: what a lane loads or stores at a time
_CHUNK, _WARP = 16, 32  # values that a lane takes at a time; lanes
_CALL, _MESSAGE = "Q2I3Q6I", "Q4I"  # struct Call of slots.cu, struct PeerMessage


def _room(world: int) -> int:
    """The most messages that the variant for a world size takes, a power of two."""
    return 1 << (world - 1).bit_length()


def send_options(mode: str, item_bytes: int, row_chunks: int, world: int) -> dict[str, bool | int]:
    """The constants in front of slots.cu for `send_slots`: rows of so many chunks of 16 values."""
    return {**p2p.chunk_options(False, mode, item_bytes, _ALIGNMENT, row_chunks), "MESSAGES": _room(world)}


def recv_options(item_bytes: int, row_chunks: int, world: int) -> dict[str, bool | int]:
    """The constants in front of slots.cu for `recv_slots`, whose chunks are the 16 bytes that a lane stores at a time."""
    return {**send_options("rceil", item_bytes, row_chunks, world), "PARTS": tiles.RECV_PARTS if row_chunks > _WARP else 1}


@functools.cache
def _kernel(entry: str, device: int, mode: str, item_bytes: int, most_chunks: int, room: int) -> Kernel:
    take = entry == "recv_slots"
    options = recv_options(item_bytes, most_chunks, room) if take else send_options(mode, item_bytes, most_chunks, room)
    return Kernel(entry, FILES, options, options["THREADS"], chip=chip_of(device))


class _Variant(NamedTuple):
    """A kernel for rows of one width between so many ranks: pieces of a row, how many a block takes at a time, the form of its argument."""

    kernel: Kernel
    pieces: int
    teams: int
    layout: struct.Struct

    def launch(
        self, rows: torch.Tensor, blocks: int, numbers: tuple[int, ...], messages: Sequence[PeerMessage], stream: int | None
    ) -> None:
        """`numbers`: those that follow the address of the rows in the structure."""
        content = self.layout.pack(rows.data_ptr(), *numbers, len(messages), 0, *chain.from_iterable(messages))
        self.kernel.run(rows.device.index, max(1, blocks), PackedStructure(content), stream)


@functools.lru_cache(maxsize=1024)
def _variant(entry: str, device: int, mode: str, item_bytes: int, width: int, world: int) -> _Variant:
    row_chunks = width * item_bytes // _ALIGNMENT if entry == "recv_slots" else width // _CHUNK
    kernel = _kernel(entry, device, mode, item_bytes, p2p.most_chunks_of(row_chunks), _room(world))
    lanes, room = kernel.options["LANES"], kernel.options["MESSAGES"]
    layout = struct.Struct(f"<{_CALL}{_MESSAGE * world}{struct.calcsize(f'<{_MESSAGE}') * (room - world)}x")
    return _Variant(kernel, max(1, -(-row_chunks // (lanes * kernel.options["PARTS"]))), kernel.threads // lanes, layout)


def send_slots(
    rows: torch.Tensor, messages: Sequence[PeerMessage], step: int, slot_bytes: int, number: int, mode: str, stream: int | None = None
) -> None:
    """Round `step` of every message that has one: a header, then the records of its rows.

    Args:
        rows: (T, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  messages, slot_bytes, number, mode: as in the reference.
        stream: of this GPU, None for torch's current one.
    """
    counts, record, variant = _check("send_slots", rows, messages, step, slot_bytes, mode)
    units = variant.pieces * max(counts) * len(messages)
    width = rows.shape[1]
    numbers = number, step, width * rows.element_size(), slot_bytes, 0, width, variant.pieces, units, record
    variant.launch(rows, min(-(-units // variant.teams), tiles.SLOT_BLOCKS), numbers, messages, stream)


def recv_slots(
    values: torch.Tensor,
    messages: Sequence[PeerMessage],
    step: int,
    slot_bytes: int,
    number: int,
    error: torch.Tensor,
    stream: int | None = None,
) -> None:
    """Round `step` of every message: its values, NaN where the header is not the awaited one.

    Args:
        values: (R, D) bf16 or float32, contiguous, at a multiple of 16 bytes.  error: pinned memory of the host.
        others: as in `send_slots`.
    """
    counts, record, variant = _check("recv_slots", values, messages, step, slot_bytes, "rceil")
    units = variant.pieces * sum(counts)
    width = values.shape[1]
    numbers = number, step, width * values.element_size(), slot_bytes, error.data_ptr(), width, variant.pieces, units, record
    variant.launch(values, -(-units // variant.teams), numbers, messages, stream)


def _check(
    where: str, rows: torch.Tensor, messages: Sequence[PeerMessage], step: int, slot_bytes: int, mode: str
) -> tuple[list[int], int, _Variant]:
    """Rows of the round for each rank, bytes of a record, and the kernel; raises ValueError for what the kernels cannot do."""
    record = sent_bytes(where, rows, mode)
    counts = check_round(where, messages, step, record, slot_bytes)
    if rows.data_ptr() % _ALIGNMENT or not rows.is_contiguous():
        got = f"rows at {rows.data_ptr():#x} with strides {rows.stride()}"
        raise ValueError(f"{where}: {got}, want them contiguous and at a multiple of {_ALIGNMENT} bytes; pass a copy")
    return counts, record, _variant(where, rows.device.index, mode, rows.element_size(), rows.shape[1], len(messages))

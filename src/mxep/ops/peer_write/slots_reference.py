"""One round of the slotted all-to-all: rows as packed records into the slots of all ranks, and the values of this rank's own slots.

Every rank has two slots for each sender; the rounds of a sender's messages alternate between them.  A slot is a header of
`HEADER_BYTES`, of which four 32-bit words are used, then records: number of the call, rows of the whole message, bytes of a
record, number of the round in the message.  Here a rank that sends itself three rows, two in a round, the third one in round 1:

>>> import torch
>>> rows, slots = torch.eye(3, 32), torch.zeros(2 * 512, dtype=torch.uint8)
>>> message = PeerMessage(slots.data_ptr(), first=0, rows=3, per=2, before=0)
>>> send_slots(rows, [message], 1, 512, 7, "rceil")
>>> slots.view(torch.int32).view(2, -1)[:, :4].tolist()
[[0, 0, 0, 0], [7, 3, 48, 1]]
>>> values, error = torch.zeros(3, 32), torch.zeros(2, 8, dtype=torch.int32)
>>> recv_slots(values, [message], 1, 512, 7, error)
>>> torch.equal(values[2], rows[2]), bool(values[:2].any()), bool(error.any())
(True, False, False)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mxep.ops.peer_write.reference import check_on_host, sent_bytes
from mxep.ops.quantize.reference import dequantize_packed_into, quantize_packed
from mxep.shapes import RECORD_ALIGNMENT

HEADER_BYTES = 128
MAX_RANKS = 64  # ranks of a group


class PeerMessage(NamedTuple):
    """One rank's message to another one.

    Attributes:
        slots: address of the two slots, as this process sees it.
        first, rows: the first row and the number of rows, of what is sent or of the output.  per: rows of a round, at least 1.
        before: number of rounds between these two ranks before this message, or that number modulo 2; it determines the next slot.
    """

    slots: int
    first: int
    rows: int
    per: int
    before: int

    @property
    def rounds(self) -> int:
        """The number of rounds, at least one, so that every message has a header with its length."""
        return max(1, -(-self.rows // self.per))

    def rows_in(self, step: int) -> int:
        """Rows of round `step`."""
        left = self.rows - step * self.per
        return self.per if left > self.per else left if left > 0 else 0

    def slot(self, step: int, slot_bytes: int) -> int:
        """Address of the slot of round `step`."""
        return self.slots + (self.before + step) % 2 * slot_bytes


def check_round(where: str, messages: Sequence[PeerMessage], step: int, size: int, slot_bytes: int) -> list[int]:
    """Rows of round `step` for each rank, records of `size` bytes. Raises ValueError unless they fit their slots."""
    counts = [message.rows_in(step) for message in messages]
    if not 0 < len(counts) <= MAX_RANKS:
        raise ValueError(f"{where}: {len(counts)} ranks, want 1 to {MAX_RANKS}; take the collective transport")
    if slot_bytes % RECORD_ALIGNMENT or max(counts) * size > slot_bytes - HEADER_BYTES:
        raise ValueError(f"{where}: rounds of {counts} rows, {size} bytes each, want them to fit slots of {slot_bytes} bytes; cut smaller")
    return counts


def _memory(address: int, size: int) -> torch.Tensor:
    """(size,) uint8 on memory of the host."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _header(address: int) -> torch.Tensor:
    return _memory(address, 16).view(torch.int32)


def send_slots(
    rows: torch.Tensor, messages: Sequence[PeerMessage], step: int, slot_bytes: int, number: int, mode: str, stream: int | None = None
) -> None:
    """Round `step` of every message that has one: a header, then the records of its rows, as of `quantize_packed`.

    Args:
        rows: (T, D) bf16 or float32, D a multiple of 32.  messages: with every rank.
        slot_bytes: of a slot, a multiple of 16.  number: of the call, from 0 to 2^31 - 1.  mode: a scaling mode's name.
        stream: of the GPU, on which this runs; without effect here.

    Raises:
        ValueError: rows that cannot be sent as records, rounds that are larger than a slot.
    """
    size = sent_bytes("send_slots", rows, mode)
    counts = check_round("send_slots", messages, step, size, slot_bytes)
    check_on_host("send_slots", rows, "mxep.ops.peer_write.slots.send_slots")
    for message, count in zip(messages, counts, strict=True):
        if step < message.rounds:
            slot, first = message.slot(step, slot_bytes), message.first + step * message.per
            _header(slot).copy_(torch.tensor([number, message.rows, size, step]))
            if count and size:
                records = quantize_packed(rows[first : first + count], mode)
                _memory(slot + HEADER_BYTES, records.numel()).copy_(records.flatten())


def recv_slots(
    values: torch.Tensor,
    messages: Sequence[PeerMessage],
    step: int,
    slot_bytes: int,
    number: int,
    error: torch.Tensor,
    stream: int | None = None,
) -> None:
    """Round `step` of every message that has one: the values of its rows, NaN where the header is not the one that belongs there.

    Args:
        values: (R, D) bf16 or float32, contiguous: the output.  messages: with every rank.  slot_bytes, number, stream: as in `send_slots`.
        error: (1 + ranks, 8) int32 on the host; where a header is another one, line 1 + rank becomes that header and the awaited one,
            and error[0, 0] becomes 1.

    Raises:
        ValueError: as `send_slots`.
    """
    size = sent_bytes("recv_slots", values, "rceil")
    counts = check_round("recv_slots", messages, step, size, slot_bytes)
    check_on_host("recv_slots", values, "mxep.ops.peer_write.slots.recv_slots")
    for rank, (message, count) in enumerate(zip(messages, counts, strict=True)):
        if step < message.rounds:
            slot, first = message.slot(step, slot_bytes), message.first + step * message.per
            awaited, out = torch.tensor([number, message.rows, size, step], dtype=torch.int32), values[first : first + count]
            if not torch.equal(_header(slot), awaited):
                error[1 + rank] = torch.cat((_header(slot), awaited))
                error[0, 0] = 1
                out.fill_(torch.nan)
            elif count and size:
                dequantize_packed_into(_memory(slot + HEADER_BYTES, count * size).view(count, size), out)

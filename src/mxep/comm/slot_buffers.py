"""Slotted all-to-all: rows are sent as packed records into slots and received as values, without any host waiting for another.

Every rank has two slots for each rank, including itself.  A message is sent in rounds of one slot, which alternate; both ends know its
rows, and so its rounds.  Two flags for each pair of ranks count rounds over the life of the transport: rounds sent and rounds received.
Round i of all messages is one kernel that quantises rows and writes them into the peers' slots, after a wait until these slots are free;
at the receiver it is one kernel that writes values, after a wait until all have arrived.  Calls run in order on a rank's GPU, and each
sends a message to every rank.  So when the message of a call has arrived, its sender has received everything of the earlier calls.
Therefore a call of one round after a call of one round does not wait for its slots, which are free, and stays on the current stream.

If ranks disagree, the header of a slot differs from the one that the receiver expects: the rows are NaN, and its next exchange raises.
Host syncs: none, and no host waits for another except in the first exchange.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple

import torch

from mxep.comm.copy_streams import SLOTTED, WAIT, WRITE, Operation
from mxep.comm.exchange import Endpoint
from mxep.comm.symmetric_memory import SymmBuffer
from mxep.ops.peer_write import slots, slots_reference
from mxep.ops.peer_write.slots_reference import HEADER_BYTES, MAX_RANKS, PeerMessage

SLOT_MEMORY_BYTES = 256 << 20  # of all slots of a rank: what a round sends, whatever the number of ranks
_NUMBERS = 2**31  # of calls, before they start again
_ERROR_WORDS = 8  # per rank: the header in the slot, and the expected one


def slot_bytes(memory: int, world: int) -> int:
    """Bytes of one slot if all slots of a rank have `memory` bytes, in steps of 128.

    >>> slot_bytes(SLOT_MEMORY_BYTES, 2) >> 20, slot_bytes(SLOT_MEMORY_BYTES, 8) >> 20
    (64, 16)
    """
    return memory // (2 * world) // 128 * 128


def rows_of_round(rows: int, record: int, slot: int) -> int:
    """Rows of each round of a message but the last, the same at both ends: as few rounds as possible, because each costs the hosts.

    Args:
        rows: of the message.  record, slot: bytes.

    >>> rows_of_round(10, 48, 4096), rows_of_round(80, 48, 4096), rows_of_round(800, 48, 4096)
    (10, 80, 80)
    """
    rounds = max(-(-rows // ((slot - HEADER_BYTES) // max(record, 1))), 1)
    return max(-(-rows // rounds), 1)


class SlotRounds(NamedTuple):
    """The rounds of the messages of one rank to all others, or from all others.

    Attributes:
        messages: one for each rank.  peers: of each round, the ranks that take part.
    """

    messages: tuple[PeerMessage, ...]
    peers: list[list[int]]


@functools.lru_cache(maxsize=1024)
def plan_rounds(addresses: tuple[int, ...], odd: tuple[int, ...], splits: tuple[int, ...], record: int, slot: int) -> SlotRounds:
    """The rounds of so many rows for each rank; cached for later calls with the same splits.

    Args:
        addresses: of each rank's slots.  odd: of each rank, 1 if the second slot is next.  record, slot: bytes.

    >>> plan_rounds((0, 512), (0, 1), (3, 0), 48, 128 + 2 * 48).peers
    [[0, 1], [0]]
    """
    pers = [rows_of_round(rows, record, slot) for rows in splits]
    messages = tuple(map(PeerMessage, addresses, accumulate(splits, initial=0), splits, pers, odd))
    rounds = [message.rounds for message in messages]
    return SlotRounds(messages, [[rank for rank, mine in enumerate(rounds) if step < mine] for step in range(max(rounds))])


class SlotBuffers:
    """One rank's end of the slots of its group.

    Args:
        transport: its streams are used, and its flags of set `flag_set` count the rounds.
        buffer: as large as all slots; the same on every rank.
    """

    def __init__(self, transport: Endpoint, buffer: SymmBuffer, slot: int, flag_set: int) -> None:
        rank, world = transport.rank, transport.world
        self._transport, self.buffer, self._slot = transport, buffer, slot
        self._there = tuple(address + 2 * slot * rank for address in buffer.addresses)
        self._here = tuple(buffer.addresses[rank] + 2 * slot * peer for peer in range(world))
        flags = transport.flag_addresses(flag_set)
        self._sent_there, self._sent_here = flags.sent_there, flags.sent_here
        self._taken_there, self._taken_here = flags.ready_here, flags.ready_there
        self.sent, self.taken = [0] * world, [0] * world  # rounds to each rank, and from each
        self._calls, self._sends, self._current = 0, 1, transport.copy_streams.handle(None)  # so far; of the last call
        on_gpu = transport.device.type == "cuda"
        # Kernels report here what they found: word 0 is set if there is an error, then a line for each rank.
        self._errors = torch.zeros(1 + world, _ERROR_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._found = self._errors.numpy()
        # Stream operations write here the number of the last call that has begun on the GPU, and of the last one that has ended.
        self._progress = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._begun, self._ended = self._progress.data_ptr(), self._progress.data_ptr() + self._progress.itemsize
        launchers = slots if on_gpu else slots_reference
        self._send_slots, self._recv_slots = launchers.send_slots, launchers.recv_slots

    def exchange(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int], record: int, mode: str) -> torch.Tensor:
        """(R, D) in rows' dtype: the values of their packed records. Rows (T', D) bf16 or float32; splits and record (bytes) that fit."""
        if not rows.is_contiguous() or rows.data_ptr() % 16:
            rows = rows.clone(memory_format=torch.contiguous_format)
        values = rows.new_empty((sum(output_splits), rows.shape[1]))
        outgoing = plan_rounds(self._there, _odd(self.sent), tuple(input_splits), record, self._slot)
        incoming = plan_rounds(self._here, _odd(self.taken), tuple(output_splits), record, self._slot)
        sends, takes, streams = len(outgoing.peers), len(incoming.peers), self._transport.copy_streams
        current = streams.handle(None)
        if current != self._current:
            streams.batch(None, [(WAIT, self._ended, self._calls)])
        self._current, self._calls = current, self._calls + 1
        number = self._calls % _NUMBERS
        stream, self._sends = SLOTTED if max(sends, self._sends) > 1 else None, sends
        if stream is not None:
            streams.fork(stream)
        flags: list[Operation] = [(WRITE, self._begun, self._calls)]  # for the next batch of the current stream
        try:
            for step in range(max(sends, takes + 1)):  # a send before the receive, on the host too: streams may run each operation at once
                if 0 < step <= takes:
                    peers = incoming.peers[step - 1]
                    streams.batch(None, flags + [(WAIT, self._sent_here[peer], self.taken[peer] + 1) for peer in peers])
                    self._recv_slots(values, incoming.messages, step - 1, self._slot, number, self._errors, current)
                    flags = _one_more(self.taken, self._taken_here, peers)
                if step < sends:
                    peers = outgoing.peers[step]
                    if stream is not None:
                        streams.batch(stream, [(WAIT, self._taken_there[peer], self.sent[peer] - 1) for peer in peers])
                    self._send_slots(rows, outgoing.messages, step, self._slot, number, mode, streams.handle(stream))
                    sent = _one_more(self.sent, self._sent_there, peers)
                    if stream is None:
                        flags = sent + flags  # first the flags that other ranks wait for
                    else:
                        streams.batch(stream, sent)
        finally:  # after a failure too: operations that are queued read the rows, and may wait for a rank that does not respond
            if stream is not None:
                streams.join(stream)
            streams.batch(None, [*flags, (WRITE, self._ended, self._calls)])
        return values

    def progress(self) -> tuple[int, int]:
        """How many calls the GPU has begun, how many of them ended."""
        begun, ended = self._progress.tolist()
        return begun, ended

    def error(self) -> str | None:
        """What was wrong with the rows received so far, None if nothing was; reads the host's memory only."""
        if not self._found[0, 0]:
            return None
        me = self._transport.rank
        for peer, (call, rows, size, _, want_call, want_rows, want_size, _) in enumerate(self._found[1:].tolist()):
            if call == want_call and rows != want_rows:
                return f"rank {peer} sends {rows} rows to rank {me}, whose output_splits await {want_rows} from it"
            if call == want_call and size != want_size:
                return f"rank {peer} sends rank {me} records of {size} bytes, which awaits {want_size}"
        calls = {peer: (line[0], line[4]) for peer, line in enumerate(self._found[1:].tolist()) if line[0] != line[4]}
        return f"the ranks make different calls: of rank (its call, that of rank {me}): {calls}"


def _odd(rounds: list[int]) -> tuple[int, ...]:
    return tuple(count & 1 for count in rounds)


def _one_more(rounds: list[int], flags: list[int], peers: list[int]) -> list[Operation]:
    """Count a round with these ranks; returns the operations that set their flags."""
    for peer in peers:
        rounds[peer] += 1
    return [(WRITE, flags[peer], rounds[peer]) for peer in peers]


def check_size(where: str, record: int, slot: int, world: int) -> None:
    """Raise ValueError unless a record fits into a slot, and the ranks into a launch."""
    if world > MAX_RANKS or record > slot - HEADER_BYTES:
        got = f"{world} ranks and records of {record} bytes"
        want = f"at most {MAX_RANKS} and {slot - HEADER_BYTES}"
        raise ValueError(f"{where}: {got}, want {want}, the bytes of a slot; take the collective transport")

"""Exchanges through mailboxes: values that travel as packed records, and hosts that do not meet.

Every rank has a mailbox with two slots for each rank, itself too.  A message goes in rounds of one slot each, which take turns; both ends
know its rows, and so its rounds.  Two words for each pair of ranks count rounds over the life of the transport: how many have been sent,
and how many have been taken.  Round i of all messages is one kernel that quantises rows and writes them into the peers' slots, behind a
wait until what was in these slots has been taken; and, at the receiver, one kernel that writes values, behind a wait until all have come.
Calls follow each other on a rank's GPU, and every one has a message for every rank.  So who has got the message of one call knows that
its sender has taken all that was sent to it in the calls before.  A call of one round behind a call of one round finds its slots free by
that, waits for none, and needs no lane: it stays on the current stream.

Where ranks disagree the header of a slot is another one than the receiver awaits: the rows are NaN, and its next exchange raises.
Host syncs: none, and no host waits for another one but in the first exchange.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from mxep.comm.lanes import MAIL, WAIT, WRITE, Operation
from mxep.kernels import mail as kernels
from mxep.reference import mail as twins
from mxep.reference.mail import HEADER_BYTES, MOST_PAIRS, Pair

if TYPE_CHECKING:
    from mxep.comm.pool import Slab
    from mxep.comm.symmetric import SymmetricTransport

MAILBOX_BYTES = 256 << 20  # of a rank, all slots: what a round moves, whatever the number of ranks
_NUMBERS = 2**31  # of calls, before they start again
_TROUBLE_WORDS = 8  # of a line: the header that lies there, and the one that is awaited


def slot_bytes(mailbox: int, world: int) -> int:
    """Bytes of a slot of a mailbox of so many bytes, in steps of 128.

    >>> slot_bytes(MAILBOX_BYTES, 2) >> 20, slot_bytes(MAILBOX_BYTES, 8) >> 20
    (64, 16)
    """
    return mailbox // (2 * world) // 128 * 128


def rows_of_round(rows: int, record: int, slot: int) -> int:
    """Rows of each round but the last of a message, the same at both ends: as few rounds as there can be, each costs the hosts.

    Args:
        rows: of the message.  record, slot: bytes.

    >>> rows_of_round(10, 48, 4096), rows_of_round(80, 48, 4096), rows_of_round(800, 48, 4096)
    (10, 80, 80)
    """
    rounds = max(-(-rows // ((slot - HEADER_BYTES) // max(record, 1))), 1)
    return max(-(-rows // rounds), 1)


class Plan(NamedTuple):
    """How the messages of one rank to all others, or from all others, go in rounds.

    Attributes:
        pairs: one for each rank.  peers: of each round, the ranks that have it.
    """

    pairs: tuple[Pair, ...]
    peers: list[list[int]]


@functools.lru_cache(maxsize=1024)
def plan(slots: tuple[int, ...], odd: tuple[int, ...], splits: tuple[int, ...], record: int, slot: int) -> Plan:
    """The plan of so many rows for each rank; kept, so that a call of the same splits finds it.

    Args:
        slots: addresses.  odd: of each rank, 1 where it is the turn of the second slot.  record, slot: bytes.

    >>> plan((0, 512), (0, 1), (3, 0), 48, 128 + 2 * 48).peers
    [[0, 1], [0]]
    """
    pers = [rows_of_round(rows, record, slot) for rows in splits]
    pairs = tuple(map(Pair, slots, accumulate(splits, initial=0), splits, pers, odd))
    rounds = [pair.rounds for pair in pairs]
    return Plan(pairs, [[rank for rank, mine in enumerate(rounds) if step < mine] for step in range(max(rounds))])


class Mailbox:
    """One rank's end of all mailboxes of its group.

    Args:
        transport: whose lanes, and whose words of slot `words`, count the rounds.
        slab: as large as all slots; the same on every rank.
    """

    def __init__(self, transport: SymmetricTransport, slab: Slab, slot: int, words: int) -> None:
        rank, world = transport.rank, transport.world
        self._transport, self.slab, self._slot = transport, slab, slot
        self._there = tuple(address + 2 * slot * rank for address in slab.addresses)
        self._here = tuple(slab.addresses[rank] + 2 * slot * peer for peer in range(world))
        at = transport.words(words)
        self._sent_there, self._sent_here = at.sent_there, at.sent_here
        self._taken_there, self._taken_here = at.ready_here, at.ready_there
        self.sent, self.taken = [0] * world, [0] * world  # rounds to each rank, and from each
        self._calls, self._sends, self._stream = 0, 1, transport.lanes.stream(None)  # so far; of the last one
        on_gpu = transport.device.type == "cuda"
        # Here kernels tell the host what they found: word 0 that there is something, and a line for each rank.
        self._trouble = torch.zeros(1 + world, _TROUBLE_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._found = self._trouble.numpy()
        # And stream operations which calls the GPU is at: the number of the last one that has begun, of the last one that has ended.
        self._progress = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._begun, self._ended = self._progress.data_ptr(), self._progress.data_ptr() + self._progress.itemsize
        self._mail_rows, self._take_rows = (kernels.mail_rows, kernels.take_rows) if on_gpu else (twins.mail_rows, twins.take_rows)

    def exchange(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int], record: int, mode: str) -> torch.Tensor:
        """(R, D) in rows' dtype: the values of their packed records. Rows (T', D) bf16 or float32; splits and record (bytes) that fit."""
        if not rows.is_contiguous() or rows.data_ptr() % 16:
            rows = rows.clone(memory_format=torch.contiguous_format)
        values = rows.new_empty((sum(output_splits), rows.shape[1]))
        away = plan(self._there, _odd(self.sent), tuple(input_splits), record, self._slot)
        home = plan(self._here, _odd(self.taken), tuple(output_splits), record, self._slot)
        sends, takes, lanes = len(away.peers), len(home.peers), self._transport.lanes
        stream = lanes.stream(None)
        if stream != self._stream:
            lanes.batch(None, [(WAIT, self._ended, self._calls)])
        self._stream, self._calls = stream, self._calls + 1
        number = self._calls % _NUMBERS
        lane, self._sends = MAIL if max(sends, self._sends) > 1 else None, sends
        if lane is not None:
            lanes.fork(lane)
        news: list[Operation] = [(WRITE, self._begun, self._calls)]  # for the next batch of the current stream
        try:
            for step in range(max(sends, takes + 1)):  # a send ahead of what is taken, on the host too: lanes may do each thing at once
                if 0 < step <= takes:
                    peers = home.peers[step - 1]
                    lanes.batch(None, news + [(WAIT, self._sent_here[peer], self.taken[peer] + 1) for peer in peers])
                    self._take_rows(values, home.pairs, step - 1, self._slot, number, self._trouble, stream)
                    news = _one_more(self.taken, self._taken_here, peers)
                if step < sends:
                    peers = away.peers[step]
                    if lane is not None:
                        lanes.batch(lane, [(WAIT, self._taken_there[peer], self.sent[peer] - 1) for peer in peers])
                    self._mail_rows(rows, away.pairs, step, self._slot, number, mode, lanes.stream(lane))
                    sent = _one_more(self.sent, self._sent_there, peers)
                    if lane is None:
                        news = sent + news  # first what others wait for
                    else:
                        lanes.batch(lane, sent)
        finally:  # after a failure too: what is still under way holds the rows, and may wait for a rank that does not come
            if lane is not None:
                lanes.join(lane)
            lanes.batch(None, [*news, (WRITE, self._ended, self._calls)])
        return values

    def progress(self) -> tuple[int, int]:
        """How many calls the GPU has begun, how many of them ended."""
        begun, ended = self._progress.tolist()
        return begun, ended

    def trouble(self) -> str | None:
        """What was wrong with what has been taken so far, None where nothing was; a look at the host's memory."""
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


def _one_more(rounds: list[int], words: list[int], peers: list[int]) -> list[Operation]:
    """Count a round with these ranks, and what tells them."""
    for peer in peers:
        rounds[peer] += 1
    return [(WRITE, words[peer], rounds[peer]) for peer in peers]


def check_size(where: str, record: int, slot: int, world: int) -> None:
    """Raise ValueError unless records of so many bytes fit into slots of so many, and so many ranks into a launch."""
    if world > MOST_PAIRS or record > slot - HEADER_BYTES:
        got = f"{world} ranks and records of {record} bytes"
        want = f"at most {MOST_PAIRS} and {slot - HEADER_BYTES}"
        raise ValueError(f"{where}: {got}, want {want}, the bytes of a slot; take the collective transport")

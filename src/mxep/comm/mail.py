"""Exchanges through mailboxes: values that travel as packed records, and hosts that do not meet.

Every rank has a mailbox with two slots for each rank, itself too.  A message goes in rounds of one slot each, which take turns; both ends
know its rows, and so its rounds.  Two words for each pair of ranks count rounds over the life of the transport: how many have been sent,
and how many have been taken.  Round i of all messages is one kernel that quantises rows and writes them into the peers' slots, on a lane
beside the current stream, behind a wait until what was in these slots has been taken; and, at the receiver, one kernel that writes values,
behind a wait until all have come.

Where ranks disagree the header of a slot is another one than the receiver awaits: the rows are NaN, and its next exchange raises.
Host syncs: none, and no host waits for another one but in the first exchange.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from mxep.comm.lanes import MAIL
from mxep.kernels import mail as kernels
from mxep.reference import mail as twins
from mxep.reference.mail import HEADER_BYTES, MOST_PAIRS, Pair
from mxep.shapes import record_bytes

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
        messages: (first row, rows, rows of a round) by rank.  peers: of each round, the ranks that have it.
    """

    messages: list[tuple[int, int, int]]
    peers: list[list[int]]


@functools.lru_cache(maxsize=1024)
def plan(splits: tuple[int, ...], record: int, slot: int) -> Plan:
    """The plan of so many rows for each rank; record, slot: bytes. Backward finds that of forward.

    >>> plan((3, 0), 48, 128 + 2 * 48)
    Plan(messages=[(0, 3, 2), (3, 0, 1)], peers=[[0, 1], [0]])
    """
    starts, pers = accumulate(splits, initial=0), [rows_of_round(rows, record, slot) for rows in splits]
    rounds = [max(1, -(-rows // per)) for rows, per in zip(splits, pers, strict=True)]
    peers = [[rank for rank, mine in enumerate(rounds) if step < mine] for step in range(max(rounds))]
    return Plan(list(zip(starts, splits, pers, strict=False)), peers)


class Mailbox:
    """One rank's end of all mailboxes of its group.

    Args:
        transport: whose lanes, and whose words of slot `words`, count the rounds.
        slab: as large as all slots; the same on every rank.
    """

    def __init__(self, transport: SymmetricTransport, slab: Slab, slot: int, words: int) -> None:
        rank, world = transport.rank, transport.world
        self._transport, self.slab, self._slot = transport, slab, slot
        self._there = [address + 2 * slot * rank for address in slab.addresses]
        self._here = [slab.addresses[rank] + 2 * slot * peer for peer in range(world)]
        self._sent_there = [transport.flag(peer, ready=False, slot=words) for peer in range(world)]
        self._sent_here = [transport.flag_of(peer, ready=False, slot=words) for peer in range(world)]
        self._taken_there = [transport.flag_of(peer, ready=True, slot=words) for peer in range(world)]
        self._taken_here = [transport.flag(peer, ready=True, slot=words) for peer in range(world)]
        self.sent, self.taken = [0] * world, [0] * world  # rounds to each rank, and from each
        self._calls = 0
        on_gpu = transport.device.type == "cuda"
        # Here kernels tell the host what they found: word 0 that there is something, and a line for each rank.
        self._trouble = torch.zeros(1 + world, _TROUBLE_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._found = self._trouble.numpy()
        self._mail_rows, self._take_rows = (kernels.mail_rows, kernels.take_rows) if on_gpu else (twins.mail_rows, twins.take_rows)

    def exchange(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int], mode: str) -> torch.Tensor:
        """(R, D) in rows' dtype: the values of their packed records. Rows (T', D) bf16 or float32; splits that fit them."""
        if not rows.is_contiguous() or rows.data_ptr() % 16:
            rows = rows.clone(memory_format=torch.contiguous_format)
        values, record = rows.new_empty((sum(output_splits), rows.shape[1])), record_bytes(rows.shape[1])
        away, home = plan(tuple(input_splits), record, self._slot), plan(tuple(output_splits), record, self._slot)
        there, here = _pairs(self._there, away, self.sent), _pairs(self._here, home, self.taken)
        self._calls = (self._calls + 1) % _NUMBERS
        lanes, begin = self._transport.lanes, self._transport.began(0)
        lanes.fork(MAIL)
        sends, takes = len(away.peers), len(home.peers)
        for step in range(max(sends, takes + 1)):  # a send ahead of what is taken, on the host too: lanes may do each thing at once
            if step < sends:
                peers = away.peers[step]
                lanes.wait_all(MAIL, [self._taken_there[peer] for peer in peers], [self.sent[peer] - 1 for peer in peers])
                self._mail_rows(rows, there, step, self._slot, self._calls, mode, lanes.stream(MAIL))
                self._tell(MAIL, self._sent_there, self.sent, peers)
            if 0 < step <= takes:
                peers = home.peers[step - 1]
                lanes.wait_all(None, [self._sent_here[peer] for peer in peers], [self.taken[peer] + 1 for peer in peers])
                self._take_rows(values, here, step - 1, self._slot, self._calls, self._trouble, lanes.stream(None))
                self._tell(None, self._taken_here, self.taken, peers)
        lanes.join(MAIL)  # the rows are somebody else's then
        self._transport.ended(begin, 0)
        return values

    def _tell(self, lane: int | None, words: list[int], rounds: list[int], peers: list[int]) -> None:
        """One more round with these ranks."""
        for peer in peers:
            rounds[peer] = (rounds[peer] + 1) % 2**32
        self._transport.lanes.write_all(lane, [words[peer] for peer in peers], [rounds[peer] for peer in peers])

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


def _pairs(slots: list[int], plan: Plan, before: list[int]) -> list[Pair]:
    return [Pair(at, first, rows, per, b) for at, (first, rows, per), b in zip(slots, plan.messages, before, strict=True)]


def check_size(where: str, rows: torch.Tensor, slot: int, world: int) -> None:
    """Raise ValueError unless records of these rows fit into slots of so many bytes, and so many ranks into a launch."""
    record = record_bytes(rows.shape[1])
    if world > MOST_PAIRS or record > slot - HEADER_BYTES:
        got = f"{world} ranks and records of {record} bytes"
        want = f"at most {MOST_PAIRS} and {slot - HEADER_BYTES}"
        raise ValueError(f"{where}: {got}, want {want}, the bytes of a slot; take the collective transport")

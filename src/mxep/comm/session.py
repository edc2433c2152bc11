"""One exchange over symmetric memory (mxep.comm.symmetric): messages to other ranks, each a few pieces of memory and a flag behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from mxep.comm.collective import disagreement
from mxep.comm.lanes import AWAY, HERE, WAIT, WRITE

if TYPE_CHECKING:
    from mxep.comm.symmetric import SymmetricTransport


class Copy(NamedTuple):
    """One piece of memory to one rank, in bytes."""

    source: int  # address
    at: int  # where in the receiver's slab
    size: int


class Words(NamedTuple):
    """Addresses of a slot's words, by rank: those that this rank sets, `there`, and those that the others set for it, `here`.

    Attributes:
        ready: to receive.  sent: how many messages have been.
    """

    ready_there: list[int]
    ready_here: list[int]
    sent_there: list[int]
    sent_here: list[int]


class Session:
    """One exchange from its opening to its end; a context manager.

    Attributes:
        buffers: (size,) uint8 each, where this rank receives.  shown: what every rank showed.
    """

    def __init__(
        self,
        transport: SymmetricTransport,
        buffers: list[torch.Tensor],
        slabs: list[list[int]],
        shown: list[list[int]],
        slot: int,
        number: int,
    ) -> None:
        """slot: whose flags, 0 those of all eager sessions, which only grow; else a captured one's own, which go from 0 to 1 and back.

        number: of the eager session.
        """
        self.buffers, self.shown = buffers, shown
        self._transport, self._slabs, self._slot = transport, slabs, slot
        self._words = transport.words(slot) if slot else transport.eager_words
        self._posted = [0] * transport.world if slot else transport.posted
        self._before, self._number = list(self._posted), 1 if slot else number
        self._pushed: list[torch.cuda.Event | None] = []
        self._held: list[torch.Tensor] = []
        self._greeted: set[int] = set()

    def take_turns(self) -> None:
        """Work of both turns comes after what is on the current stream now."""
        self._transport.lanes.take_turns()

    def turn(self, index: int) -> AbstractContextManager[object]:
        """Inside of it the current stream is one of two that take turns."""
        return self._transport.lanes.turn(index)

    def order(self) -> list[int]:
        """The ranks in the order in which this one sends: the next one first, itself last. So every rank receives from one at a time."""
        return self._transport.order

    def fork(self, *peers: int) -> None:
        """What is sent to these ranks from now on was made by what is on the current stream now; without any, to all."""
        self._transport.lanes.fork(*({self._lane(peer) for peer in peers} or (AWAY, HERE)))

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keep what is being sent until the end, and after a failure until the transport is closed."""
        self._held += tensors

    def put(self, peer: int, buffer: int, copies: Sequence[Copy]) -> None:
        """Pieces of memory into a buffer of `peer`, in any order, as a part of the next message to it."""
        lane, there = self._lane(peer), self._slabs[peer]
        self._greet(lane, [peer])
        self._transport.lanes.copy_each(lane, [(there[buffer] + copy.at, copy.source, copy.size) for copy in copies if copy.size])

    def post(self, peer: int) -> None:
        """The end of a message to `peer`."""
        self.put(peer, 0, [])
        self._tell(self._lane(peer), [peer])

    def send(self, peer: int, buffer: int, copies: Sequence[Copy]) -> None:
        """A whole message to `peer`."""
        self.put(peer, buffer, copies)
        self.post(peer)

    def send_each(self, buffer: int, copies: Sequence[tuple[int, Copy]]) -> None:
        """A whole message to every rank, this one too: each piece of memory to the rank before it, none of them waits for another."""
        lanes, order = self._transport.lanes, self._transport.order
        pieces: dict[int, list[tuple[int, int, int]]] = {AWAY: [], HERE: []}
        for peer, copy in copies:
            if copy.size:
                pieces[self._lane(peer)].append((self._slabs[peer][buffer] + copy.at, copy.source, copy.size))
        for lane, peers in ((AWAY, order[:-1]), (HERE, order[-1:])):
            self._greet(lane, peers)
            lanes.copy_each(lane, pieces[lane])
            self._tell(lane, peers)

    def push(self, buffer: int, at: int, write: Callable[[list[int]], None]) -> None:
        """A message to every rank, this one too, beside the current stream, after what is on that now and what was pushed before.

        A session that pushes sends nothing else.  It may end before one that was opened earlier, and others may push before it ends.

        Args:
            write: puts the work on the current stream, or on lane `AWAY`; it gets the addresses `at` bytes into that buffer, by rank.
        """
        transport = self._transport
        if not self._pushed:
            self._before = list(self._posted)  # those opened with this one may have sent since then
        transport.lanes.fork(AWAY)
        self._await(AWAY, [(self._words.ready_here[peer], self._number) for peer in transport.order])
        with transport.lanes.on(AWAY):
            write([slabs[buffer] + at for slabs in self._slabs])
        self._tell(AWAY, transport.order)
        self._pushed.append(transport.lanes.mark(AWAY))

    def spread(self, buffer: int, at: int, pieces: Sequence[torch.Tensor]) -> None:
        """`push` of contiguous tensors, one for each rank, by copy engines."""

        def write(addresses: list[int]) -> None:
            for peer in self.order():
                piece = pieces[peer]
                if piece.numel():
                    self._transport.lanes.copy(AWAY, addresses[peer], piece.data_ptr(), piece.numel() * piece.element_size())

        self.hold(*pieces)
        self.push(buffer, at, write)

    def _greet(self, lane: int, peers: Sequence[int]) -> None:
        """What follows on the lane finds these ranks ready to receive."""
        new = [peer for peer in peers if peer not in self._greeted]
        if new:
            self._greeted.update(new)
            self._await(lane, [(self._words.ready_here[peer], self._number) for peer in new])

    def _lane(self, peer: int) -> int:
        return HERE if peer == self._transport.rank else AWAY

    def arrive(self, messages: int, *peers: int) -> None:
        """What follows on the current stream finds the first so many messages of this session from these ranks, without any from all."""
        here, before = self._words.sent_here, self._before
        self._await(None, [(here[peer], before[peer] + messages) for peer in peers or self._transport.order])

    def _tell(self, lane: int | None, peers: Sequence[int]) -> None:
        """These ranks that a message to them ends here."""
        lanes, there, posted = self._transport.lanes, self._words.sent_there, self._posted
        for peer in peers:
            posted[peer] += 1
        if self._slot or len(peers) == 1:
            for peer in peers:
                lanes.write(lane, there[peer], posted[peer])
        elif peers:
            lanes.batch(lane, [(WRITE, there[peer], posted[peer]) for peer in peers])

    def _await(self, lane: int | None, words: list[tuple[int, int]]) -> None:
        """Hold the lane until each of these words, which others set, has reached its value.

        In a graph a word is put back for the next replay.  No rank sets it again too early: a peer is ready again after it has had what
        this one sends behind this wait, and sends again after this one, which has put the word back before, is ready again.
        """
        lanes = self._transport.lanes
        if self._slot:  # one by one: what a batch does inside of a capture nobody has tried
            for word, value in words:
                lanes.wait(lane, word, value)
                lanes.write(lane, word, 0)
        elif len(words) == 1:
            lanes.wait(lane, *words[0])
        else:
            lanes.batch(lane, [(WAIT, word, value) for word, value in words])

    def __enter__(self) -> Session:
        self._begin = self._transport.began(self._slot)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                self._end()
            except BaseException as late:
                self._transport.abort(late, self._held)
                raise
        elif not isinstance(error, SplitsDisagreeError):  # which every rank raises, before anything was sent
            self._transport.abort(error, self._held)

    def _end(self) -> None:
        transport = self._transport
        for mark in self._pushed:
            transport.lanes.follow(mark)
            transport.lanes.forget(mark)
        if not self._pushed:
            transport.lanes.join()
        transport.ended(self._begin, self._number)
        self._held.clear()


class SplitsDisagreeError(ValueError):
    """The ranks' splits do not fit each other: the same error on all of them."""


def check_facts(tables: list[list[int]], same: list[int]) -> None:
    """Raise the same ValueError on every rank unless every table begins as this rank's: how many facts and sizes, then the facts."""
    if not all(table[: len(same)] == same for table in tables):
        told = [(*table[:2], *table[2 : 2 + table[0]]) for table in tables]
        raise ValueError(f"exchange: the ranks make different calls {told}, want one and the same on all; kind, row bytes and shapes")


def check_splits(shown: list[list[int]], world: int) -> None:
    """Raise the same ValueError on every rank unless the splits fit: per rank its rows, then W splits to send, then W to receive."""
    problem = disagreement([[table[0], 0, *table[1:]] for table in shown], world)
    if problem is not None:
        raise SplitsDisagreeError(f"all-to-all: {problem}")

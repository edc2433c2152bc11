"""One exchange over symmetric memory: messages to other ranks, each a few pieces of memory and then a flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

from mxep.comm.collective import disagreement
from mxep.comm.copy_streams import LOCAL, REMOTE, WAIT, WRITE, CudaCopyStreams


class Copy(NamedTuple):
    """One piece of memory to one rank, in bytes."""

    source: int  # address
    at: int  # offset in the receiver's buffer
    size: int


class FlagAddresses(NamedTuple):
    """Addresses of a set of flags, by rank: `there` are those that this rank sets, `here` those that the others set for it.

    Attributes:
        ready: to receive.  sent: the number of messages.
    """

    ready_there: list[int]
    ready_here: list[int]
    sent_there: list[int]
    sent_here: list[int]


class Endpoint(Protocol):
    """What an exchange needs of its transport: one rank's end of a group whose ranks write into each other's memory.

    Attributes:
        order: the ranks in the order in which this one sends: the next one first, itself last.
        posted: messages sent to each rank by eager exchanges.
        eager_flags: `flag_addresses(0)`.
    """

    rank: int
    world: int
    device: torch.device
    copy_streams: CudaCopyStreams
    order: list[int]
    posted: list[int]
    eager_flags: FlagAddresses

    def flag_addresses(self, flag_set: int) -> FlagAddresses:
        """The flags of a set, on all ranks."""

    def began(self, flag_set: int) -> torch.cuda.Event | None:
        """An exchange begins on the current stream; returns an argument of `ended`."""

    def ended(self, begin: torch.cuda.Event | None, number: int) -> None:
        """An exchange ends on the current stream; number: of an eager one."""

    def abort(self, error: BaseException, sent: Sequence[torch.Tensor] = ()) -> None:
        """No more exchanges in this group; keeps what is being sent until the transport is closed."""


class Exchange:
    """One exchange from its opening to its end; a context manager.

    Args:
        transport: this rank's end of the group.  addresses: [rank][buffer], where the ranks receive.
        flag_set: 0 for the flags of all eager exchanges, which only grow; else a captured exchange's own, which go from 0 to 1 and back.
        number: of the eager exchange.

    Attributes:
        buffers: (size,) uint8 each, where this rank receives.  peer_metadata: what every rank passed to `open`, by rank.
    """

    def __init__(
        self,
        transport: Endpoint,
        buffers: list[torch.Tensor],
        addresses: list[list[int]],
        peer_metadata: list[list[int]],
        flag_set: int,
        number: int,
    ) -> None:
        self.buffers, self.peer_metadata = buffers, peer_metadata
        self._transport, self._streams, self._addresses, self._flag_set = transport, transport.copy_streams, addresses, flag_set
        self._flags = transport.flag_addresses(flag_set) if flag_set else transport.eager_flags
        self._posted = [0] * transport.world if flag_set else transport.posted
        self._before, self._number = list(self._posted), 1 if flag_set else number
        self._puts: list[torch.cuda.Event] = []
        self._held: list[torch.Tensor] = []
        self._ready_peers: set[int] = set()

    def fork(self, *peers: int) -> None:
        """What is sent to these ranks from now on waits for the current stream; without arguments, to all ranks."""
        self._streams.fork(*({self._stream_to(peer) for peer in peers} or (REMOTE, LOCAL)))

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keep what is being sent until the end, and after a failure until the transport is closed."""
        self._held += tensors

    def copy_to(self, peer: int, buffer: int, copies: Sequence[Copy]) -> None:
        """Copy pieces of memory into a buffer of `peer`, in any order, as a part of the next message to it."""
        stream, there = self._stream_to(peer), self._addresses[peer]
        self._wait_ready(stream, [peer])
        self._streams.copy_each(stream, [(there[buffer] + copy.at, copy.source, copy.size) for copy in copies if copy.size])

    def send(self, peer: int, buffer: int, copies: Sequence[Copy]) -> None:
        """Send a whole message to `peer`."""
        self.copy_to(peer, buffer, copies)
        self._signal(self._stream_to(peer), [peer])

    def send_each(self, buffer: int, copies: Sequence[tuple[int, Copy]]) -> None:
        """Send a whole message to every rank, including this one: `copies` names the rank of each piece; no piece waits for another."""
        order = self._transport.order
        pieces: dict[int, list[tuple[int, int, int]]] = {REMOTE: [], LOCAL: []}
        for peer, copy in copies:
            if copy.size:
                pieces[self._stream_to(peer)].append((self._addresses[peer][buffer] + copy.at, copy.source, copy.size))
        for stream, peers in ((REMOTE, order[:-1]), (LOCAL, order[-1:])):
            self._wait_ready(stream, peers)
            self._streams.copy_each(stream, pieces[stream])
            self._signal(stream, peers)

    def put(self, buffer: int, at: int, write: Callable[[list[int]], None]) -> None:
        """Send a message to every rank, including this one, on the stream `REMOTE`, after what is on the current stream now.

        Puts of one or of several exchanges are sent in the order of the calls.  An exchange with a put sends in no other way.  It may end
        before one that was opened earlier.

        Args:
            write: launches the work on the current stream, which is `REMOTE`; its argument is the address `at` bytes into that buffer of
                each rank.
        """
        transport = self._transport
        if not self._puts:
            self._before = list(self._posted)  # exchanges that were opened with this one may have sent since
        self._streams.fork(REMOTE)
        self._wait_flags(REMOTE, [(self._flags.ready_here[peer], self._number) for peer in transport.order])
        with self._streams.on(REMOTE):
            write([buffers[buffer] + at for buffers in self._addresses])
        self._signal(REMOTE, transport.order)
        self._puts.append(self._streams.record(REMOTE))

    def scatter_copy(self, buffer: int, at: int, pieces: Sequence[torch.Tensor]) -> None:
        """`put` of contiguous tensors, one for each rank, by copy engines."""

        def write(addresses: list[int]) -> None:
            for peer in self._transport.order:
                piece = pieces[peer]
                if piece.numel():
                    self._streams.copy(REMOTE, addresses[peer], piece.data_ptr(), piece.numel() * piece.element_size())

        self.hold(*pieces)
        self.put(buffer, at, write)

    def wait(self, messages: int, *peers: int) -> None:
        """The current stream waits for the first so many messages of this exchange from these ranks; without ranks, from all."""
        here, before = self._flags.sent_here, self._before
        self._wait_flags(None, [(here[peer], before[peer] + messages) for peer in peers or self._transport.order])

    def _stream_to(self, peer: int) -> int:
        return LOCAL if peer == self._transport.rank else REMOTE

    def _wait_ready(self, stream: int, peers: Sequence[int]) -> None:
        """The stream waits until these ranks are ready to receive."""
        new = [peer for peer in peers if peer not in self._ready_peers]
        if new:
            self._ready_peers.update(new)
            self._wait_flags(stream, [(self._flags.ready_here[peer], self._number) for peer in new])

    def _signal(self, stream: int | None, peers: Sequence[int]) -> None:
        """Set the flags of these ranks: a message to them ends here."""
        there, posted = self._flags.sent_there, self._posted
        for peer in peers:
            posted[peer] += 1
        if self._flag_set or len(peers) == 1:
            for peer in peers:
                self._streams.write(stream, there[peer], posted[peer])
        elif peers:
            self._streams.batch(stream, [(WRITE, there[peer], posted[peer]) for peer in peers])

    def _wait_flags(self, stream: int | None, flags: list[tuple[int, int]]) -> None:
        """The stream waits until each of these flags, which other ranks set, has reached its value.

        In a graph a flag is set back to 0 for the next replay.  No rank sets it again too early: a peer is ready again only after it has
        received what this rank sends after this wait, and sends again only after this rank, which has set the flag back, is ready again.
        """
        if self._flag_set:  # one by one: batches inside a capture are untested
            for flag, value in flags:
                self._streams.wait(stream, flag, value)
                self._streams.write(stream, flag, 0)
        elif len(flags) == 1:
            self._streams.wait(stream, *flags[0])
        else:
            self._streams.batch(stream, [(WAIT, flag, value) for flag, value in flags])

    def __enter__(self) -> Exchange:
        self._begin = self._transport.began(self._flag_set)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                self._end()
            except BaseException as late:
                self._transport.abort(late, self._held)
                raise
        elif not isinstance(error, SplitsDisagreeError):  # which every rank raises before anything is sent
            self._transport.abort(error, self._held)

    def _end(self) -> None:
        for event in self._puts:
            self._streams.wait_event(event)
            self._streams.recycle(event)
        if not self._puts:
            self._streams.join()
        self._transport.ended(self._begin, self._number)
        self._held.clear()


class SplitsDisagreeError(ValueError):
    """The ranks' splits do not fit each other: the same error on all of them."""


def check_same_call(tables: list[list[int]], same: list[int]) -> None:
    """Raise the same ValueError on every rank unless all tables begin alike: the numbers of facts and sizes, then the facts."""
    if not all(table[: len(same)] == same for table in tables):
        calls = [(*table[:2], *table[2 : 2 + table[0]]) for table in tables]
        raise ValueError(f"exchange: the ranks make different calls {calls}, want one and the same on all; kind, row bytes and shapes")


def check_splits(metadata: list[list[int]], world: int) -> None:
    """Raise the same ValueError on every rank unless the splits agree: per rank its rows, then W splits to send, then W to receive."""
    problem = disagreement([[table[0], 0, *table[1:]] for table in metadata], world)
    if problem is not None:
        raise SplitsDisagreeError(f"all-to-all: {problem}")

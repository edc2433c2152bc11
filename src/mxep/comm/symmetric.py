"""The symmetric transport: ranks of one machine write into each other's memory, by copy engines, and tell each other by flags.

An exchange is a session (mxep.comm.session).  It opens with a round on the host's board: the ranks show each other what they are about
to do, so that a disagreement is an error on every rank, and which of their slabs they will receive in.  On the device the receiver says
by a flag that its slab is free of older work, what the sender writes waits for that, and a flag behind it says that it has come.

What is received stays where it landed: a tensor on a slab, which nobody gets again before that tensor, its views and what autograd saved
of it are gone (`mxep.comm.pool`).  An exchange on another stream than the last one, or than the last one that received in its slab,
follows what is on that stream now.  Who reads on a third stream makes the exchange's stream wait for that before he lets go
(`record_stream` knows nothing of it).  All of them are streams of the group's GPU, which is the current device of whoever exchanges.
An exchange that fails is the last one of its group: later ones raise the first failure, no slab is handed out again, and what copies may
still read is kept until `close`.  Errors that every rank raises before anything is sent (splits, shapes, memory) leave the group usable.
Where rows are wanted as values at the other end they go through mailboxes (`mxep.comm.mail`), and hosts do not meet.
Host syncs: none in what memory is there for; but in a session the host waits for the other ranks' hosts, and when memory grows it may wait
for the device (`mxep.comm.growth`).
CUDA graphs: sessions that only push can be captured, all ranks the same.  The hosts meet at the capture, not in a replay; what was
captured owns its slabs and flags from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mxep.comm.board import Board, ExchangeError
from mxep.comm.collective import check_locally
from mxep.comm.graphs import MOST_CAPTURED, Progress, allow_queries_during_captures, capture_number, captured_error, check_captured
from mxep.comm.growth import Growth
from mxep.comm.lanes import WRITE, CudaLanes, Lanes
from mxep.comm.mail import MAILBOX_BYTES, Mailbox, check_size, slot_bytes
from mxep.comm.pool import Lease, Memory, Pool, Slab, tensor_on
from mxep.comm.session import Copy, Session, Words, check_facts, check_splits
from mxep.comm.torch_memory import FLAG_BYTES
from mxep.comm.watchdog import Watchdog
from mxep.device import checking
from mxep.kernels.nvrtc import DriverFunction
from mxep.reference.push import sent_bytes
from mxep.shapes import record_bytes

_PIECE_BYTES, _MOST_PIECES = 48 << 20, 4  # of what goes to one rank, behind the quantiser; shorter copies are slower
_fill_bytes = DriverFunction("cuMemsetD8Async", ctypes.c_uint64, ctypes.c_uint8, ctypes.c_size_t, ctypes.c_void_p)
_fill_words = DriverFunction("cuMemsetD32Async", ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p)
_Revise = Callable[[list[list[int]]], Sequence[int] | None]  # what every rank showed -> the true sizes here, None: those that were given
_Fill = Callable[[int, torch.Tensor], None]  # number of a row, and the place of it and of those behind it
_log = logging.getLogger("mxep")
_ROWS, _MAIL, _MAILBOX = 1, 11, 12  # what the ranks do, the first fact on the board: `exchange`, `exchange_dequantized`, and its memory
_MAIL_WORDS = MOST_CAPTURED + 1  # whose words those of mailboxes are
_FAR_AHEAD = 2**30  # a flag that lets go of every wait
_POISON = 0xFF  # NaN in every float format, and as a scale


class SymmetricTransport:
    """Exchanges of one rank with the others of its group. See the top of this file.

    Args:
        memory, board, lanes: where slabs come from, the host's board, and what moves bytes.  device: of the rows.
        timeout_s: how long an exchange waits for a rank before it is an error; the board and host lanes have their own.
        mailbox_bytes: of the memory for `exchange_dequantized`, which its first call takes; the same on every rank.
    """

    name = "symmetric"

    def __init__(
        self,
        memory: Memory,
        board: Board,
        lanes: Lanes,
        device: torch.device,
        timeout_s: float,
        mailbox_bytes: int = MAILBOX_BYTES,
    ) -> None:
        self.rank, self.world, self.device, self._timeout_s = board.rank, board.world, device, timeout_s
        self.lanes, self.board, self._pool = lanes, board, Pool()
        self._growth = Growth(self._pool, memory, board)
        # Of every rank: it is ready to receive; it has sent.  Two for all eager sessions, two for each captured one, two for mailboxes.
        self._flags = memory.flags(2 * self.world * (_MAIL_WORDS + 1))
        self.eager_words = self.words(0)
        self.order = [(self.rank + i) % self.world for i in range(1, self.world + 1)]  # the next rank first, this one last
        self.posted = [0] * self.world  # messages sent to each rank; each has sent as many here by the end of a session
        self.sessions, self._stream = 0, lanes.stream(None)  # so far, and where the last one was
        self._mailbox: Mailbox | None = None
        self._slot_bytes = slot_bytes(mailbox_bytes, self.world)
        self._broken: str | None = None
        self._abandoned: list[torch.Tensor] = []  # what copies of failed exchanges may still read
        self._lock = threading.RLock()  # the garbage collector may end an exchange on the thread that holds it
        self._captured = 0  # sessions in CUDA graphs
        self._nothing = torch.zeros((), device=device)  # NaN from the moment on at which a replay waited in vain
        self._watchdog: Watchdog | None = None
        if isinstance(lanes, CudaLanes):
            self._progress, self._rescue = Progress(device), torch.cuda.Stream(device, priority=-1)
            self._watchdog = Watchdog(timeout_s, self._stuck, partial(allow_queries_during_captures, device), lanes.forget)
            self._watchdog.watch_count("an exchange in the replay of a CUDA graph", self._progress.read)

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        """All-to-all of rows, the bits of `collective.exchange_rows`; errors too, on every rank."""
        return self._exchange(rows.contiguous(), output_splits, input_splits)

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        """`exchange` of rows as packed records (R, record_bytes(D)): quantised piece by piece, copy engines behind."""
        records = torch.empty((rows.shape[0], record_bytes(rows.shape[1])), dtype=torch.uint8, device=rows.device)
        return self._exchange(records, output_splits, input_splits, partial(_quantize, rows, mode))

    def exchange_dequantized(
        self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str
    ) -> torch.Tensor:
        """The values of `exchange_quantized` (R, D), through mailboxes (`mxep.comm.mail`): the hosts meet in the first one alone."""
        self.check_device(rows)
        self._check_open()
        if self.captures():
            raise captured_error()
        record = sent_bytes("exchange", rows, mode)
        out_splits, in_splits = list(output_splits), list(input_splits)
        if checking(self.device):
            valid = len(out_splits) == len(in_splits) == self.world
            own = [*in_splits, *out_splits] if valid else [-1] * 2 * self.world
            check_splits(self.meet((_MAIL, record), [rows.shape[0], *own]), self.world)
        check_locally(rows, out_splits, in_splits, self.world)
        check_size("exchange", record, self._slot_bytes, self.world)
        if self._mailbox is None:  # all ranks take this step together
            self.meet((_MAILBOX, self._slot_bytes), [])
            try:
                self._mailbox = Mailbox(self, self._growth.allocate(2 * self._slot_bytes * self.world), self._slot_bytes, _MAIL_WORDS)
            except BaseException as error:
                self._left_meeting(error)
                raise
            if self._watchdog is not None:
                self._watchdog.watch_count("exchange {} through mailboxes", self._mailbox.progress)
        try:
            return self._mailbox.exchange(rows, out_splits, in_splits, record, mode)
        except BaseException as error:
            self.abort(error, [rows])
            raise

    def _exchange(
        self,
        rows: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        fill: _Fill | None = None,
    ) -> torch.Tensor:
        """All-to-all of contiguous rows; `fill` makes them first, what stays on this rank in its place."""
        self.check_device(rows)
        out_splits, in_splits = list(output_splits), list(input_splits)
        row_bytes = rows.shape[1] * rows.element_size()
        valid = len(out_splits) == len(in_splits) == self.world
        own = [*in_splits, *out_splits] if valid else [-1] * 2 * self.world
        pieces = [1] * self.world
        if valid and fill is not None:  # both ways the same number, so that each rank knows which message of the other's a piece is
            pieces = [_pieces(max(ways) * row_bytes) for ways in zip(in_splits, out_splits, strict=True)]
        if fill is not None and rows.numel() < _PIECE_BYTES:
            fill(0, rows)  # at once: pieces would cost the host more than they save
            fill = None
        with self.open((_ROWS, row_bytes), (sum(out_splits) * row_bytes,), [rows.shape[0], *own]) as session:
            check_splits(session.shown, self.world)
            received = session.buffers[0][: sum(out_splits) * row_bytes].view(rows.dtype).view(sum(out_splits), rows.shape[1])
            session.hold(rows)
            session.fork()
            for peer in session.order():
                before = sum(session.shown[s][1 + peer] for s in range(self.rank))  # rows there of the ranks before this one
                first = sum(in_splits[:peer])
                for start, end in _cut(in_splits[peer], pieces[peer]):
                    here = rows[first + start : first + end]
                    if fill is not None:
                        stays = peer == self.rank
                        fill(first + start, received[before + start : before + end] if stays else here)
                        session.fork(peer)
                        here = here[:0] if stays else here
                    session.send(peer, 0, [Copy(here.data_ptr(), (before + start) * row_bytes, here.numel() * here.element_size())])
            for peer in session.order():
                session.arrive(pieces[peer], peer)
        return received

    def check_device(self, rows: torch.Tensor) -> None:
        """Raise ValueError unless `rows` are on the device that this transport was made for."""
        if rows.device != self.device:
            raise ValueError(f"exchange: rows on {rows.device}, want {self.device}, whose memory this group shares; move them there")

    def open(
        self,
        facts: Sequence[int],
        sizes: Sequence[int],
        shown: Sequence[int],
        in_graphs: bool = False,
        revise: _Revise | None = None,
    ) -> Session:
        """Begin an exchange; every rank of the group does, in the same order.

        Args:
            facts: what must be the same on every rank, as integers.  sizes: bytes of each buffer that this rank receives in.
            shown: what the other ranks get to see.
            in_graphs: whether it may be captured in a CUDA graph: it only pushes, and nothing but its sizes hangs on `shown`.  So those
                hang on shapes alone, and its slabs are hardly larger (`slab_bytes`, steady).
            revise: for sizes that hang on what the others show, where `sizes` is a guess.  It gets what every rank showed, by rank, and
                returns None to go on, or this rank's true sizes; then the slabs go back, and the ranks meet once more for others.  What
                all ranks showed decides between the two, so that all of them go on or none.  What it raises it raises on every rank.

        Raises:
            ValueError: the ranks' facts differ, on every rank; inside a CUDA graph capture unless it may be there and what an eager call
                left free is enough; another GPU than the group's is the current device.
            ExchangeError: a rank failed or did not come in time, now or in an earlier exchange.
        """
        (session,) = self._open(False, facts, sizes, shown, in_graphs, revise)
        return session

    def open_each(
        self, facts: Sequence[int], sizes: Sequence[int], shown: Sequence[int], in_graphs: bool = False, revise: _Revise | None = None
    ) -> list[Session]:
        """An exchange for each of these sizes, all begun in one meeting, with one buffer each; arguments and errors as of `open`.

        They push in this order, each before any other exchange of the group does.
        """
        return self._open(True, facts, sizes, shown, in_graphs, revise)

    def _open(
        self,
        apart: bool,
        facts: Sequence[int],
        sizes: Sequence[int],
        shown: Sequence[int],
        in_graphs: bool,
        revise: _Revise | None,
    ) -> list[Session]:
        """A session with all buffers, or one for each."""
        self._check_open()
        capture = self._capture()
        if capture and not in_graphs:
            raise captured_error()
        wanted = range(1, 1 + (len(sizes) if apart else 1))
        slots = [self._captured + i if capture else 0 for i in wanted]
        taken: list[int] = []
        try:
            for attempt in range(2):
                count, same = len(sizes), [len(facts) + 3, len(sizes), *facts, apart, slots[0], attempt]
                taken = self._pool.take_each(sizes, capture)
                tables = self.board.show([*same, *taken, *sizes, *shown])
                check_facts(tables, same)
                places = [table[len(same) :] for table in tables]
                true_sizes = None if revise is None or attempt else revise([place[2 * count :] for place in places])
                if true_sizes is None:
                    break
                self._pool.put_back(taken)
                taken, sizes = [], true_sizes
            self._growth.refuse(taken, places)
            if capture:
                check_captured([place[:count] for place in places], slots[-1])
            else:
                self._growth.grow(taken, places, steady=in_graphs)
        except BaseException as error:
            self._left_meeting(error)
            self._pool.put_back(taken)
            raise
        numbers = [self.sessions + i for i in wanted]
        if capture:
            self._captured = slots[-1]
        else:
            self.sessions = numbers[-1]
        self._pool.now = self.sessions
        there = [[self._pool.slabs[index].addresses[rank] for index in place[:count]] for rank, place in enumerate(places)]
        told = [place[2 * count :] for place in places]
        parts = [slice(i, i + 1) for i in range(count)] if apart else [slice(count)]
        try:
            self._say_ready([self._pool.slabs[index] for index in taken], capture, slots)
            here = [tensor_on(Lease(self._pool, index, capture)) for index in taken]
            return [
                Session(self, here[part], [slabs[part] for slabs in there], told, slot, number)
                for part, slot, number in zip(parts, slots, numbers, strict=True)
            ]
        except BaseException as error:
            self.abort(error)  # the others go on from the meeting
            raise

    def _say_ready(self, slabs: list[Slab], capture: int, slots: list[int]) -> None:
        """Tell all ranks that these slabs, in which sessions of the current stream receive, are free of older work.

        Flags only grow if eager sessions come in order, and the stream that a slab was last received in on may still read it.  A capture
        cannot wait for work outside of it, which is done before it begins; what was queued inside of it, it can.
        """
        stream = self.lanes.stream(None)
        earlier = [slab.last_use[1] for slab in slabs if slab.last_use is not None and slab.last_use[0] == capture]
        for other in dict.fromkeys(earlier if capture else [self._stream, *earlier]):
            if other != stream:
                self.lanes.after(other)
        for slab in slabs:
            slab.last_use = capture, stream
        if capture:
            for word in [word for slot in slots for word in self.words(slot).ready_there]:
                self.lanes.write(None, word, 1)
        else:  # ready for the last one is ready for all
            self._stream = stream
            self.lanes.batch(None, [(WRITE, word, self.sessions) for word in self.eager_words.ready_there])

    def meet(self, facts: Sequence[int], shown: Sequence[int]) -> list[list[int]]:
        """What every rank shows, by rank, without an exchange; arguments and errors as of `open`."""
        self._check_open()
        same = [len(facts), 0, *facts]
        try:
            tables = self.board.show([*same, *shown])
        except BaseException as error:
            self._left_meeting(error)
            raise
        check_facts(tables, same)
        return [table[len(same) :] for table in tables]

    def or_nan(self, values: torch.Tensor) -> torch.Tensor:
        """float32 values as they are; in a CUDA graph NaN in every replay since one that waited for a rank in vain."""
        return values + self._nothing if self.captures() else values

    def captures(self) -> bool:
        """Whether a CUDA graph is being captured here."""
        return self._capture() != 0

    def _check_open(self) -> None:
        if self._mailbox is not None and self._broken is None and (trouble := self._mailbox.trouble()) is not None:
            self.fail(f"exchange: {trouble}; what rank {self.rank} got there is NaN; want a's input_splits[b] = b's output_splits[a]")
        if self._broken is not None:
            raise ExchangeError(self._broken)
        if self.device.type == "cuda" and (current := torch.cuda.current_device()) != self.device.index:
            want = self.device.index  # flags and events go to streams of the current device where those have no number of their own
            raise ValueError(
                f"exchange: the current CUDA device is {current}, want {want}, where the rows are and this group's memory; call "
                f"torch.cuda.set_device({want}) first, or exchange inside of `with torch.cuda.device({want}):`"
            )

    def _capture(self) -> int:
        return capture_number(self.device)

    def began(self, slot: int) -> torch.cuda.Event | None:
        """A session begins on the current stream: what `ended` wants to know."""
        if self._watchdog is None:
            return None
        if not slot:
            return self.lanes.mark(None)
        self._progress.count(ended=False)
        return None

    def ended(self, begin: torch.cuda.Event | None, number: int) -> None:
        """A session ends on the current stream; number: of an eager one."""
        if self._watchdog is None:
            return
        if begin is None:
            self._progress.count(ended=True)
        else:
            end = self.lanes.mark(None)
            assert end is not None
            self._watchdog.watch(begin, end, f"exchange {number}")

    def words(self, slot: int) -> Words:
        """In which ranks tell each other that they are ready to receive, and how much they have sent."""
        addresses, rank, world = self._flags.addresses, self.rank, self.world
        ready, sent = FLAG_BYTES * world * 2 * slot, FLAG_BYTES * world * (2 * slot + 1)
        there = [address + FLAG_BYTES * rank for address in addresses]
        here = [addresses[rank] + FLAG_BYTES * peer for peer in range(world)]
        return Words(*([word + kind for word in words] for kind in (ready, sent) for words in (there, here)))

    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds for exchanges."""
        return self._pool.nbytes() + (0 if self._mailbox is None else self._mailbox.slab.memory.numel())

    def fail(self, text: str) -> None:
        """No more exchanges: this rank's next one raises, and so does every rank that waits for it."""
        with self._lock:
            if self._broken is None:
                self._broken = text
                self.board.fail(text)

    def abort(self, error: BaseException, sent: Sequence[torch.Tensor] = ()) -> None:
        """`fail` for an error in an exchange that may be under way, before anything of it is let go of.

        Args:
            sent: what lanes may still read; kept until `close`.
        """
        self._abandoned += sent
        left = isinstance(error, GeneratorExit)  # sent and never waited for
        how = " beside an exchange, look at its log" if left else f": {type(error).__name__}: {error}"
        self.fail(str(error) if isinstance(error, ExchangeError) else f"exchange: rank {self.rank} failed{how}")
        with contextlib.suppress(RuntimeError):  # of a device that does nothing any more
            if self._watchdog is not None and not self.captures():
                self._watchdog.watch_lanes(self.lanes)  # what they have sent may wait for a rank that does not come

    def _left_meeting(self, error: BaseException) -> None:
        """The others may have gone on from a meeting that this rank leaves, unless the error is one that every rank raises there."""
        if not isinstance(error, (ValueError, torch.OutOfMemoryError)):
            self.abort(error)

    def _stuck(self, what: str) -> None:
        """On the watchdog's thread: end what waits for a rank, with NaN wherever something may not have come."""
        text = f"{what} (rank {self.rank} of {self.world}): a peer's part did not come for {self._timeout_s:g} s; it died or hangs"
        self.fail(text)
        _log.critical("%s; everything in symmetric memory is NaN from now on, and the next exchange raises", text)
        stream = self._rescue.cuda_stream

        def poison(slab: Slab) -> None:
            _fill_bytes(self.device, slab.memory.data_ptr(), _POISON, slab.memory.numel(), stream)

        self._pool.each(poison)
        words, flags = 2 * self.world, self._flags.memory.data_ptr()
        _fill_words(self.device, flags, _ahead(self.sessions, *self.posted), words, stream)
        if self._mailbox is not None:
            poison(self._mailbox.slab)
            there = flags + words * FLAG_BYTES * _MAIL_WORDS
            _fill_words(self.device, there, _ahead(*self._mailbox.sent, *self._mailbox.taken), words, stream)
        if self._captured:
            _fill_bytes(self.device, self._nothing.data_ptr(), _POISON, self._nothing.nbytes, stream)
            _fill_words(self.device, flags + words * FLAG_BYTES, 1, words * self._captured, stream)

    def close(self) -> None:
        """Let go of the memory: first the peers' views, then the handles, then the buffers; before the process group ends."""
        self._broken = self._broken or "exchange: this transport is closed"
        self.board.leave()
        try:
            if self._watchdog is not None:
                self._watchdog.watch_lanes(self.lanes)
                torch.cuda.synchronize(self.device)
        finally:  # after an error of the device as well, which reads and writes nothing any more
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None
            for slab in (self._flags, *self._pool.slabs.values(), *([] if self._mailbox is None else [self._mailbox.slab])):
                slab.addresses.clear()
                slab.owner = None
            self._pool.slabs.clear()
            self._abandoned.clear()
            self._mailbox = None


def _ahead(*counts: int) -> int:
    return (max(counts) + _FAR_AHEAD) % 2**32


def _quantize(rows: torch.Tensor, mode: str, first: int, records: torch.Tensor) -> None:
    if records.numel():
        torch.ops.mxep.quantize_packed_into(rows[first : first + records.shape[0]], records, mode)


def _pieces(size: int) -> int:
    """Into how many pieces so many bytes for one rank go, which follow each other from quantiser to copy engine."""
    return max(1, min(_MOST_PIECES, size // _PIECE_BYTES))


def _cut(rows: int, pieces: int) -> list[tuple[int, int]]:
    """[start, end) of each piece."""
    return list(itertools.pairwise(i * rows // pieces for i in range(pieces + 1)))

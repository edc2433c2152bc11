"""The symmetric transport: ranks of one machine write into each other's memory by copy engines, and signal each other by flags.

An exchange (`mxep.comm.exchange`) opens with an all-gather on the hosts.  The ranks compare their calls, so that a disagreement is an
error on every rank, and name the buffers in which they will receive.  On the device the receiver signals by a flag that its buffer is free
of older work.  The sender waits for that flag, and sets another flag after its rows, which signals that they have arrived.

Received rows stay where they arrived: in a tensor on a buffer, which is used again only when that tensor, its views and what autograd
saved of it are gone (`mxep.comm.symmetric_memory`).  An exchange on another stream than the last exchange, or than the last one that
received in its buffer, waits for the work on that stream.  A program that reads received rows on a third stream makes the exchange's
stream wait for that before it deletes them; `record_stream` has no effect.  All streams are those of the group's GPU, which must be the
current device.
An exchange that fails is the last one of its group: later ones raise the first failure, no buffer is used again, and memory that copies may
still read is kept until `close`.  After errors that every rank raises before anything is sent (splits, shapes, memory) the group is usable.
`exchange_dequantized` sends through slots (`mxep.comm.slot_buffers`), and no host waits for another.
Host syncs: none while memory suffices; but an exchange waits for the other ranks' hosts, and when memory grows it may wait for the device.
CUDA graphs: exchanges that only put can be captured, on all ranks alike.  The hosts synchronise at the capture, not in a replay; a
captured exchange keeps its buffers and flags for good.
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

from mxep.comm.collective import check_locally, splits_or_invalid
from mxep.comm.copy_streams import WRITE, CudaCopyStreams
from mxep.comm.cuda_graphs import MOST_CAPTURED, Progress, allow_queries_during_captures, captured_error, check_captured
from mxep.comm.exchange import Copy, Exchange, FlagAddresses, check_same_call, check_splits
from mxep.comm.host_allgather import ExchangeError, HostAllGather
from mxep.comm.slot_buffers import SLOT_MEMORY_BYTES, SlotBuffers, check_size, slot_bytes
from mxep.comm.symmetric_memory import FLAG_BYTES, BufferGrowth, BufferPool, BufferRef, SymmBuffer, TorchMemory, tensor_on
from mxep.comm.watchdog import Watchdog
from mxep.device import capture_number, checking
from mxep.ops.peer_write.reference import sent_bytes
from mxep.ops.runtime.nvrtc import DriverFunction, fill_bytes
from mxep.shapes import record_bytes

_PIECE_BYTES, _MOST_PIECES = 48 << 20, 4  # of the rows for one rank, which are copied while the next piece is quantised
_fill_words = DriverFunction("cuMemsetD32Async", ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p)
_Revise = Callable[[list[list[int]]], Sequence[int] | None]  # every rank's metadata -> the true sizes here, None: the sizes given
_Fill = Callable[[int, torch.Tensor], None]  # number of a row, and the memory of that row and the next ones
_log = logging.getLogger("mxep")
_ROWS, _SLOTTED, _SLOT_MEMORY, _PLAIN_COPIES = 1, 11, 12, 100  # kinds of calls, which every rank compares
_SLOT_FLAGS = MOST_CAPTURED + 1  # the set of flags of the slotted all-to-all
_FAR_AHEAD = 2**30  # added to a flag so that every wait passes
_POISON = 0xFF  # NaN in every float format, and as a scale


class SymmetricTransport:
    """One rank's end of a group that exchanges over symmetric memory. See the top of this file.

    Args:
        memory: allocates buffers.  rendezvous: all-gather of the hosts.  streams: copy bytes.  device: of the rows.
        timeout_s: how long an exchange waits for a rank before it is an error; the rendezvous has its own limit.
        slot_memory_bytes: memory for `exchange_dequantized`, allocated in its first call; the same on every rank.
    """

    name = "symmetric"

    def __init__(
        self,
        memory: TorchMemory,
        rendezvous: HostAllGather,
        streams: CudaCopyStreams,
        device: torch.device,
        timeout_s: float,
        slot_memory_bytes: int = SLOT_MEMORY_BYTES,
    ) -> None:
        self.rank, self.world, self.device, self._timeout_s = rendezvous.rank, rendezvous.world, device, timeout_s
        self.copy_streams, self.rendezvous, self._pool = streams, rendezvous, BufferPool()
        self._growth = BufferGrowth(self._pool, memory, rendezvous)
        # Of every rank: it is ready to receive; it has sent.  A set for all eager exchanges, one for each captured one, one for slots.
        self._flags = memory.flags(2 * self.world * (_SLOT_FLAGS + 1))
        self.eager_flags = self.flag_addresses(0)
        self.order = [(self.rank + i) % self.world for i in range(1, self.world + 1)]  # the next rank first, this one last
        self.posted = [0] * self.world  # messages sent to each rank; each has sent as many here at the end of an exchange
        self.num_exchanges, self._stream = 0, streams.handle(None)  # so far; the stream of the last one
        self._slot_buffers: SlotBuffers | None = None
        self._slot_bytes = slot_bytes(slot_memory_bytes, self.world)
        self._broken: str | None = None
        self._abandoned: list[torch.Tensor] = []  # tensors that copies of failed exchanges may still read
        self._lock = threading.RLock()  # the garbage collector may end an exchange on the thread that holds it
        self._captured = 0  # exchanges in CUDA graphs
        self._nothing = torch.zeros((), device=device)  # NaN after a replay whose wait was not answered
        self._watchdog: Watchdog | None = None
        if isinstance(streams, CudaCopyStreams):
            self._progress, self._rescue = Progress(device), torch.cuda.Stream(device, priority=-1)
            self._watchdog = Watchdog(timeout_s, self._stuck, partial(allow_queries_during_captures, device), streams.recycle)
            self._watchdog.watch_count("an exchange in the replay of a CUDA graph", self._progress.read)

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        """All-to-all of rows with the bits of the collective transport; errors are raised on every rank."""
        return self._exchange(rows.contiguous(), output_splits, input_splits)

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        """`exchange` of rows as packed records (R, record_bytes(D)): a piece is copied while the next one is quantised."""
        records = torch.empty((rows.shape[0], record_bytes(rows.shape[1])), dtype=torch.uint8, device=rows.device)
        return self._exchange(records, output_splits, input_splits, partial(_quantize, rows, mode))

    def exchange_dequantized(
        self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str
    ) -> torch.Tensor:
        """The values of `exchange_quantized` (R, D), through slots (`mxep.comm.slot_buffers`): hosts wait in the first call only."""
        self.check_device(rows)
        self._check_open()
        if self.captures():
            raise captured_error()
        record = sent_bytes("exchange", rows, mode)
        out_splits, in_splits = list(output_splits), list(input_splits)
        if checking(self.device):
            own = splits_or_invalid(in_splits, out_splits, self.world)
            check_splits(self.all_gather((_SLOTTED, record), [rows.shape[0], *own]), self.world)
        check_locally(rows, out_splits, in_splits, self.world)
        check_size("exchange", record, self._slot_bytes, self.world)
        if self._slot_buffers is None:  # all ranks take this step together
            self.all_gather((_SLOT_MEMORY, self._slot_bytes), [])
            try:
                self._slot_buffers = SlotBuffers(
                    self, self._growth.allocate(2 * self._slot_bytes * self.world), self._slot_bytes, _SLOT_FLAGS
                )
            except BaseException as error:
                self._leave_rendezvous(error)
                raise
            if self._watchdog is not None:
                self._watchdog.watch_count("exchange {} through slots", self._slot_buffers.progress)
        try:
            return self._slot_buffers.exchange(rows, out_splits, in_splits, record, mode)
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
        """All-to-all of contiguous rows; `fill` writes them first, rows for this rank where they are received."""
        self.check_device(rows)
        out_splits, in_splits = list(output_splits), list(input_splits)
        row_bytes = rows.shape[1] * rows.element_size()
        own, pieces = splits_or_invalid(in_splits, out_splits, self.world), [1] * self.world
        if fill is not None and min(own) >= 0:  # the same number both ways: each rank computes that of a peer's messages
            pieces = [max(1, min(_MOST_PIECES, max(ways) * row_bytes // _PIECE_BYTES)) for ways in zip(in_splits, out_splits, strict=True)]
        if fill is not None and rows.numel() < _PIECE_BYTES:
            fill(0, rows)  # in one piece: several would cost the host more than they save
            fill = None
        with self.open((_ROWS, row_bytes), (sum(out_splits) * row_bytes,), [rows.shape[0], *own]) as exchange:
            check_splits(exchange.peer_metadata, self.world)
            received = exchange.buffers[0][: sum(out_splits) * row_bytes].view(rows.dtype).view(sum(out_splits), rows.shape[1])
            exchange.hold(rows)
            exchange.fork()
            for peer in self.order:
                before = sum(exchange.peer_metadata[s][1 + peer] for s in range(self.rank))  # rows from the ranks before this one
                first = sum(in_splits[:peer])
                for start, end in _divide(in_splits[peer], pieces[peer]):
                    here = rows[first + start : first + end]
                    if fill is not None:
                        stays = peer == self.rank
                        fill(first + start, received[before + start : before + end] if stays else here)
                        exchange.fork(peer)
                        here = here[:0] if stays else here
                    exchange.send(peer, 0, [Copy(here.data_ptr(), (before + start) * row_bytes, here.numel() * here.element_size())])
            for peer in self.order:
                exchange.wait(pieces[peer], peer)
        return received

    def plain_copies(self, pieces: Sequence[torch.Tensor], region: int) -> Callable[[], None]:
        """See `Transport.plain_copies`; the current stream waits for the copies, and what they write must not be read."""
        exchange = self.open((_PLAIN_COPIES, region), (self.world * region,), [])

        def copy() -> None:
            exchange.fork()
            for peer in self.order[:-1]:
                piece = pieces[peer]
                exchange.copy_to(peer, 0, [Copy(piece.data_ptr(), self.rank * region, piece.numel() * piece.element_size())])
            self.copy_streams.join()

        return copy

    def check_device(self, rows: torch.Tensor) -> None:
        """Raise ValueError unless `rows` are on the device of this transport."""
        if rows.device != self.device:
            raise ValueError(f"exchange: rows on {rows.device}, want {self.device}, whose memory this group shares; move them there")

    def open(
        self,
        facts: Sequence[int],
        sizes: Sequence[int],
        metadata: Sequence[int],
        in_graphs: bool = False,
        revise: _Revise | None = None,
    ) -> Exchange:
        """Open an exchange; every rank of the group does, in the same order.

        Args:
            facts: integers that must be the same on every rank.  sizes: bytes of each buffer in which this rank receives.
            metadata: integers for the other ranks.
            in_graphs: the exchange may be captured in a CUDA graph: it only puts, and its sizes depend on nothing but `metadata`.  So they
                depend on shapes only, and its buffers have hardly any margin (`buffer_bytes`, shape_static).
            revise: for sizes that depend on the others' metadata, where `sizes` is a guess.  It takes every rank's metadata, by rank, and
                returns None if the guess is right, or this rank's true sizes; then the buffers return to the pool, and the ranks
                synchronise once more.  Its result and its errors must follow from all ranks' metadata, so that they are the same on
                every rank.

        Raises:
            ValueError: the ranks' facts differ, on every rank; inside a CUDA graph capture unless `in_graphs` and the buffers of an eager
                call suffice; another GPU than the group's is the current device.
            ExchangeError: a rank failed or did not respond in time, now or in an earlier exchange.
        """
        return self._open(False, facts, sizes, metadata, in_graphs, revise)[0]

    def open_each(
        self, facts: Sequence[int], sizes: Sequence[int], metadata: Sequence[int], revise: _Revise | None = None
    ) -> list[Exchange]:
        """Open an exchange of one buffer for each of these sizes, with one host rendezvous; arguments and errors as of `open` `in_graphs`.

        They put in this order, each before any other exchange of the group.
        """
        return self._open(True, facts, sizes, metadata, True, revise)

    def _open(
        self, each: bool, facts: Sequence[int], sizes: Sequence[int], metadata: Sequence[int], in_graphs: bool, revise: _Revise | None
    ) -> list[Exchange]:
        """An exchange with all buffers, or one for `each`."""
        self._check_open()
        capture = self._capture()
        if capture and not in_graphs:
            raise captured_error()
        exchanges = len(sizes) if each else 1
        first_flag_set = self._captured + 1 if capture else 0
        taken: list[int] = []
        try:
            for attempt in range(2):
                count = len(sizes)
                same = [len(facts) + 3, count, *facts, each, first_flag_set, attempt]
                taken = self._pool.take_each(sizes, capture)
                tables = self.rendezvous.all_gather([*same, *taken, *sizes, *metadata])
                check_same_call(tables, same)
                indices = [table[len(same) :] for table in tables]
                true_sizes = None if revise is None or attempt else revise([index[2 * count :] for index in indices])
                if true_sizes is None:
                    break
                self._pool.put_back(taken)
                taken, sizes = [], true_sizes
            self._growth.refuse(taken, indices)
            if capture:
                check_captured([index[:count] for index in indices], self._captured + exchanges)
                self._captured += exchanges
            else:
                self._growth.grow(taken, indices, shape_static=in_graphs)
        except BaseException as error:
            self._leave_rendezvous(error)
            self._pool.put_back(taken)
            raise
        numbers = range(self.num_exchanges + 1, self.num_exchanges + 1 + exchanges)
        flag_sets = [first_flag_set + i if capture else 0 for i in range(exchanges)]
        self.num_exchanges += 0 if capture else exchanges
        self._pool.now = self.num_exchanges
        addresses = [[self._pool.buffers[i].addresses[rank] for i in index[:count]] for rank, index in enumerate(indices)]
        peer_metadata = [index[2 * count :] for index in indices]
        parts = [slice(i, i + 1) for i in range(count)] if each else [slice(count)]
        try:
            self._signal_ready([self._pool.buffers[index] for index in taken], capture, flag_sets)
            buffers = [tensor_on(BufferRef(self._pool, index, capture)) for index in taken]
            return [
                Exchange(self, buffers[part], [of_rank[part] for of_rank in addresses], peer_metadata, flag_set, number)
                for part, flag_set, number in zip(parts, flag_sets, numbers, strict=True)
            ]
        except BaseException as error:
            self.abort(error)  # the other ranks have opened it
            raise

    def _signal_ready(self, buffers: list[SymmBuffer], capture: int, flag_sets: list[int]) -> None:
        """Signal to all ranks that these buffers, in which exchanges of the current stream receive, are free of older work.

        Eager exchanges must be in order, so that flags only grow, and the stream on which a buffer last received may still read it.  A
        capture cannot wait for work outside of it, which is done before it begins; it can wait for work that was queued inside of it.
        """
        current = self.copy_streams.handle(None)
        earlier = [buffer.last_use[1] for buffer in buffers if buffer.last_use is not None and buffer.last_use[0] == capture]
        for other in dict.fromkeys(earlier if capture else [self._stream, *earlier]):
            if other != current:
                self.copy_streams.wait_stream(other)
        for buffer in buffers:
            buffer.last_use = capture, current
        if capture:
            for flag in [flag for flag_set in flag_sets for flag in self.flag_addresses(flag_set).ready_there]:
                self.copy_streams.write(None, flag, 1)
        else:  # ready for the last one is ready for all
            self._stream = current
            self.copy_streams.batch(None, [(WRITE, flag, self.num_exchanges) for flag in self.eager_flags.ready_there])

    def all_gather(self, facts: Sequence[int], metadata: Sequence[int]) -> list[list[int]]:
        """Every rank's metadata, by rank, without an exchange; arguments and errors as of `open`."""
        self._check_open()
        same = [len(facts), 0, *facts]
        try:
            tables = self.rendezvous.all_gather([*same, *metadata])
        except BaseException as error:
            self._leave_rendezvous(error)
            raise
        check_same_call(tables, same)
        return [table[len(same) :] for table in tables]

    def or_nan(self, values: torch.Tensor) -> torch.Tensor:
        """float32 values as they are; in a CUDA graph NaN in every replay after one in which a rank did not respond."""
        return values + self._nothing if self.captures() else values

    def captures(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        return self._capture() != 0

    def _check_open(self) -> None:
        if self._slot_buffers is not None and self._broken is None and (problem := self._slot_buffers.error()) is not None:
            self.fail(f"exchange: {problem}; what rank {self.rank} got there is NaN; want a's input_splits[b] = b's output_splits[a]")
        if self._broken is not None:
            raise ExchangeError(self._broken)
        if self.device.type == "cuda" and (current := torch.cuda.current_device()) != self.device.index:
            want = self.device.index  # a stream that is named by 0 is the current device's
            raise ValueError(
                f"exchange: the current CUDA device is {current}, want {want}, where the rows are and this group's memory; call "
                f"torch.cuda.set_device({want}) first, or exchange inside of `with torch.cuda.device({want}):`"
            )

    def _capture(self) -> int:
        return capture_number(self.device)

    def began(self, flag_set: int) -> torch.cuda.Event | None:
        """An exchange begins on the current stream; returns an argument of `ended`."""
        if self._watchdog is None:
            return None
        if not flag_set:
            return self.copy_streams.record(None)
        self._progress.count(ended=False)
        return None

    def ended(self, begin: torch.cuda.Event | None, number: int) -> None:
        """An exchange ends on the current stream; number: of an eager one."""
        if self._watchdog is None:
            return
        if begin is None:
            self._progress.count(ended=True)
        else:
            self._watchdog.watch(begin, self.copy_streams.record(None), f"exchange {number}")

    def flag_addresses(self, flag_set: int) -> FlagAddresses:
        """The flags of a set: ranks signal by them that they are ready to receive, and how much they have sent."""
        addresses, rank, world = self._flags.addresses, self.rank, self.world
        ready, sent = FLAG_BYTES * world * 2 * flag_set, FLAG_BYTES * world * (2 * flag_set + 1)
        there = [address + FLAG_BYTES * rank for address in addresses]
        here = [addresses[rank] + FLAG_BYTES * peer for peer in range(world)]
        return FlagAddresses(*([flag + kind for flag in flags] for kind in (ready, sent) for flags in (there, here)))

    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds for exchanges."""
        return self._pool.nbytes() + (0 if self._slot_buffers is None else self._slot_buffers.buffer.memory.numel())

    def fail(self, text: str) -> None:
        """No more exchanges: this rank's next one raises, and so does every rank that waits for it."""
        with self._lock:
            if self._broken is None:
                self._broken = text
                self.rendezvous.fail(text)

    def abort(self, error: BaseException, sent: Sequence[torch.Tensor] = ()) -> None:
        """`fail` for an error in an exchange that may have begun, before its tensors are deleted.

        Args:
            sent: tensors that streams may still read; kept until `close`.
        """
        self._abandoned += sent
        left = isinstance(error, GeneratorExit)  # an exchange that was sent and never waited for
        how = " outside of an exchange, look at its log" if left else f": {type(error).__name__}: {error}"
        self.fail(str(error) if isinstance(error, ExchangeError) else f"exchange: rank {self.rank} failed{how}")
        with contextlib.suppress(RuntimeError):  # of a broken device
            if self._watchdog is not None and not self.captures():
                self._watchdog.watch_streams(self.copy_streams)  # what was sent may wait for a rank that does not respond

    def _leave_rendezvous(self, error: BaseException) -> None:
        """An error after which the other ranks may have gone on: abort, unless every rank raises this error."""
        if not isinstance(error, (ValueError, torch.OutOfMemoryError)):
            self.abort(error)

    def _stuck(self, what: str) -> None:
        """On the watchdog's thread: end every wait for a rank, with NaN in all memory in which something may not have arrived."""
        text = f"{what} (rank {self.rank} of {self.world}): a peer's part did not come for {self._timeout_s:g} s; it died or hangs"
        self.fail(text)
        stream = self._rescue.cuda_stream

        def poison(buffer: SymmBuffer) -> None:
            fill_bytes(self.device, buffer.memory.data_ptr(), _POISON, buffer.memory.numel(), stream)

        self._pool.each(poison)
        words, flags = 2 * self.world, self._flags.memory.data_ptr()
        _fill_words(self.device, flags, _ahead(self.num_exchanges, *self.posted), words, stream)
        if self._slot_buffers is not None:
            poison(self._slot_buffers.buffer)
            there = flags + words * FLAG_BYTES * _SLOT_FLAGS
            _fill_words(self.device, there, _ahead(*self._slot_buffers.sent, *self._slot_buffers.taken), words, stream)
        if self._captured:
            fill_bytes(self.device, self._nothing.data_ptr(), _POISON, self._nothing.nbytes, stream)
            _fill_words(self.device, flags + words * FLAG_BYTES, 1, words * self._captured, stream)
        # Last: a thread that prints a tensor holds the lock of logging while it waits for the GPU.
        _log.critical("%s; everything in symmetric memory is NaN from now on, and the next exchange raises", text)

    def close(self) -> None:
        """Release the memory: first the peers' views, then the handles, then the buffers; before the process group ends."""
        self._broken = self._broken or "exchange: this transport is closed"
        self.rendezvous.close()
        try:
            if self._watchdog is not None:
                self._watchdog.watch_streams(self.copy_streams)
                torch.cuda.synchronize(self.device)
        finally:  # after an error of the device too, which then reads and writes nothing any more
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None
            for buffer in (self._flags, *self._pool.buffers.values(), *([] if self._slot_buffers is None else [self._slot_buffers.buffer])):
                buffer.addresses.clear()
                buffer.owner = None
            self._pool.buffers.clear()
            self._abandoned.clear()
            self._slot_buffers = None


def _ahead(*counts: int) -> int:
    return (max(counts) + _FAR_AHEAD) % 2**32


def _quantize(rows: torch.Tensor, mode: str, first: int, records: torch.Tensor) -> None:
    if records.numel():
        torch.ops.mxep.quantize_packed_into(rows[first : first + records.shape[0]], records, mode)


def _divide(rows: int, pieces: int) -> list[tuple[int, int]]:
    """[start, end) of each piece."""
    return list(itertools.pairwise(i * rows // pieces for i in range(pieces + 1)))

"""Lanes: what moves bytes and flags between ranks beside the work on the multiprocessors.

`CudaLanes` of a GPU: copy engines and stream operations (source: CUDA driver API, cuMemcpyDtoDAsync, cuMemcpyBatchAsync,
cuStreamWriteValue32, cuStreamWaitValue32, cuStreamBatchMemOp).  A stream operation takes no multiprocessor, so a wait beside a GEMM that
fills the chip costs nothing.
`HostLanes` do each thing at once and wait on the host: for virtual ranks, all in one process.

A flag is a 32-bit word that only grows (it may wrap around): it says how much has come so far, and nobody clears it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Protocol

import torch

from mxep.comm.board import ExchangeError
from mxep.kernels.nvrtc import DriverFunction

AWAY, HERE, MAIL = 0, 1, 2  # lanes: to other ranks, inside this rank, and kernels that fill mailboxes; each keeps its order
_WORD = 2**32
_WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int)(word - value) >= 0
_PAUSE_S = 50e-6
_MOST_SPARE = 4096  # events; the watchdog hands back those of the exchanges of half a second at a time

_STREAM, _ADDRESS, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
_copy_bytes = DriverFunction("cuMemcpyDtoDAsync_v2", _ADDRESS, _ADDRESS, ctypes.c_size_t, _STREAM)
_copy_each = DriverFunction(
    "cuMemcpyBatchAsync_v2",  # of CUDA 13
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    _STREAM,
)
_write_value = DriverFunction("cuStreamWriteValue32_v2", _STREAM, _ADDRESS, _INT, _INT)
_wait_value = DriverFunction("cuStreamWaitValue32_v2", _STREAM, _ADDRESS, _INT, _INT)
_batch = DriverFunction("cuStreamBatchMemOp_v2", _STREAM, _INT, ctypes.c_void_p, _INT)
_record_event = DriverFunction("cuEventRecord", ctypes.c_void_p, _STREAM)
_wait_event = DriverFunction("cuStreamWaitEvent", _STREAM, ctypes.c_void_p, _INT)
_synchronize = DriverFunction("cuStreamSynchronize", _STREAM)
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 (flags 0: _WAIT_GREATER_OR_EQUAL), CU_STREAM_MEM_OP_WRITE_VALUE_32
# One CUmemcpyAttributes, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM without hints or flags, and from which copy on it holds.
_AFTER_THE_STREAM, _FROM_THE_FIRST = struct.pack("<6i", 1, 0, 0, 0, 0, 0), struct.pack("<Q", 0)

Operation = tuple[int, int, int]  # `WAIT` or `WRITE`, the address of a word, the value to reach or to set


@functools.cache
def _words(count: int) -> struct.Struct:
    """So many CUstreamBatchMemOpParams: operation, address, value (its lower half is taken), and flags and others, which are zero."""
    return struct.Struct("<" + count * "2Qq24x")


@functools.cache
def _sizes(count: int) -> struct.Struct:
    """So many addresses or sizes."""
    return struct.Struct(f"<{count}Q")


class Lanes(Protocol):
    """Lanes beside the current stream, for copies, flags and what fills mailboxes, and a second stream for GEMMs."""

    def fork(self, *lanes: int) -> None:
        """What follows on these lanes comes after what is on the current stream now."""

    def join(self, *lanes: int) -> None:
        """What follows on the current stream comes after what is on these lanes now; without any, on `AWAY`, `HERE`, the second stream."""

    def after(self, stream: int | None) -> None:
        """What follows on the current stream comes after what is on `stream` now, which `stream(None)` gave when it was the current one."""

    def copy(self, lane: int, to: int, source: int, size: int) -> None:
        """`size` bytes between two addresses, also of two GPUs."""

    def copy_each(self, lane: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """`copy` of each (to, source, size), in any order, in one go."""

    def write(self, lane: int | None, flag: int, value: int) -> None:
        """Set the word at `flag` when everything before it on the lane (None: on the current stream) is done and visible."""

    def wait(self, lane: int | None, flag: int, value: int) -> None:
        """Hold the lane (None: the current stream) until the word at `flag` has reached `value`."""

    def batch(self, lane: int | None, operations: Sequence[Operation]) -> None:
        """One `wait` or `write` after the other, in one go."""

    def stream(self, lane: int | None) -> int | None:
        """The driver's stream of a lane (None: the current stream) for kernels that are launched past torch; None where there is none."""

    def on(self, lane: int) -> AbstractContextManager[object]:
        """Inside of it the current stream is that lane: for kernels that write to other ranks."""

    def mark(self, lane: int | None) -> torch.cuda.Event | None:
        """Where the lane (None: the current stream) is now, for `follow`."""

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """What follows on the current stream comes after that mark, and need not come after what the lane does behind it."""

    def forget(self, mark: torch.cuda.Event | None) -> None:
        """Nobody asks for that mark any more, from any thread: it may become another one."""

    def take_turns(self) -> None:
        """What follows on the second stream comes after what is on the current stream now."""

    def turn(self, index: int) -> AbstractContextManager[object]:
        """Work inside of it goes to the current stream (even `index`) or to the second one: one's last tiles beside the other's first."""


class CudaLanes:
    """Lanes of GPU `device`: a stream each.  All copies to peers share one, in order: a stream per peer is slower (FACTS: they meet)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Kernels that take rows out of mailboxes fill the GPU: those of the next round must not queue behind them.
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
        self._handles = [stream.cuda_stream for stream in self._streams]
        self._second = torch.cuda.Stream(device)
        self._known: dict[int, torch.cuda.Stream] = {}  # current streams so far: asking torch for one costs the host microseconds
        self._spare: deque[torch.cuda.Event] = deque(maxlen=_MOST_SPARE)  # a new event costs the host more than to record one
        self._now = torch.cuda.Event()
        self._now.record(self._second)  # there is none before
        self._now_handle = self._now.cuda_event

    def stream(self, lane: int | None) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index) if lane is None else self._handles[lane]

    def fork(self, *lanes: int) -> None:
        _record_event(self.device, self._now_handle, self.stream(None))
        for lane in lanes:
            _wait_event(self.device, self._handles[lane], self._now_handle, 0)

    def join(self, *lanes: int) -> None:
        for handle in [self._handles[lane] for lane in lanes] or [*self._handles[:MAIL], self._second.cuda_stream]:
            self.after(handle)

    def after(self, stream: int | None) -> None:
        assert stream is not None
        _record_event(self.device, self._now_handle, stream)
        _wait_event(self.device, self.stream(None), self._now_handle, 0)

    def copy(self, lane: int, to: int, source: int, size: int) -> None:
        _copy_bytes(self.device, to, source, size, self._handles[lane])

    def copy_each(self, lane: int, copies: Sequence[tuple[int, int, int]]) -> None:
        count = len(copies)
        if count < 2 or not _copy_each.exists():  # an older driver copies them one by one
            for copy in copies:
                self.copy(lane, *copy)
            return
        to, sources, sizes = (_sizes(count).pack(*column) for column in zip(*copies, strict=True))
        _copy_each(self.device, to, sources, sizes, count, _AFTER_THE_STREAM, _FROM_THE_FIRST, 1, self._handles[lane])

    def write(self, lane: int | None, flag: int, value: int) -> None:
        _write_value(self.device, self.stream(lane), flag, value % _WORD, 0)

    def wait(self, lane: int | None, flag: int, value: int) -> None:
        _wait_value(self.device, self.stream(lane), flag, value % _WORD, _WAIT_GREATER_OR_EQUAL)

    def batch(self, lane: int | None, operations: Sequence[Operation]) -> None:
        if count := len(operations):
            _batch(self.device, self.stream(lane), count, _words(count).pack(*chain.from_iterable(operations)), 0)

    def on(self, lane: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[lane])

    def mark(self, lane: int | None) -> torch.cuda.Event | None:
        try:
            mark = self._spare.pop()
        except IndexError:
            mark = torch.cuda.Event()
        if lane is not None:
            return self._streams[lane].record_event(mark)
        handle = self.stream(None)
        if handle not in self._known:
            self._known[handle] = torch.cuda.current_stream(self.device)
        return self._known[handle].record_event(mark)

    def follow(self, mark: torch.cuda.Event | None) -> None:
        assert mark is not None
        _wait_event(self.device, self.stream(None), mark.cuda_event, 0)

    def forget(self, mark: torch.cuda.Event | None) -> None:
        assert mark is not None
        self._spare.append(mark)

    def take_turns(self) -> None:
        self._second.wait_stream(torch.cuda.current_stream(self.device))

    def turn(self, index: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._second) if index % 2 else contextlib.nullcontext()


class HostLanes:
    """Lanes that do each thing at once; the flags are words of the host's memory.

    On a GPU they wait for the current stream all the time, past torch, so that its sync debug mode sees the syncs of others alone.

    Args:
        device: where the bytes are, the CPU or a GPU.
        timeout_s: how long a wait waits.
        failure: what another rank said when it failed, asked while waiting.
    """

    def __init__(self, device: torch.device, timeout_s: float, failure: Callable[[], str | None]) -> None:
        self.device, self.timeout_s, self._failure = device, timeout_s, failure

    def fork(self, *lanes: int) -> None:
        if self.device.type == "cuda":
            _synchronize(self.device, torch.cuda.current_stream(self.device).cuda_stream)  # host sync: these lanes are the host

    def join(self, *lanes: int) -> None:
        pass

    def after(self, stream: int | None) -> None:
        if stream is not None:
            _synchronize(self.device, stream)  # host sync: these lanes are the host

    def copy(self, lane: int, to: int, source: int, size: int) -> None:
        if self.device.type == "cpu":
            ctypes.memmove(to, source, size)
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        _copy_bytes(self.device, to, source, size, stream)
        _synchronize(self.device, stream)  # host sync: these lanes are the host

    def copy_each(self, lane: int, copies: Sequence[tuple[int, int, int]]) -> None:
        for copy in copies:
            self.copy(lane, *copy)

    def write(self, lane: int | None, flag: int, value: int) -> None:
        self.fork()
        ctypes.c_uint32.from_address(flag).value = value % _WORD

    def wait(self, lane: int | None, flag: int, value: int) -> None:
        word, deadline = ctypes.c_uint32.from_address(flag), time.monotonic() + self.timeout_s
        while (word.value - value) % _WORD >= _WORD // 2:
            time.sleep(_PAUSE_S)
            if (failure := self._failure()) is not None:
                raise ExchangeError(f"exchange: {failure}")
            if time.monotonic() > deadline:
                raise ExchangeError(f"exchange: a peer's part did not come for {self.timeout_s:g} s; it died or hangs, look at its log")

    def batch(self, lane: int | None, operations: Sequence[Operation]) -> None:
        for kind, flag, value in operations:
            (self.wait if kind == WAIT else self.write)(lane, flag, value)

    def stream(self, lane: int | None) -> int | None:
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.device.type == "cuda" else None

    def on(self, lane: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self, lane: int | None) -> torch.cuda.Event | None:
        return None

    def follow(self, mark: torch.cuda.Event | None) -> None:
        pass

    def forget(self, mark: torch.cuda.Event | None) -> None:
        pass

    def take_turns(self) -> None:
        pass

    def turn(self, index: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

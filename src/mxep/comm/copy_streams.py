"""Streams that copy bytes and set flags between ranks while the multiprocessors compute.

`CudaCopyStreams` uses a GPU's copy engines and stream operations (source: CUDA driver API, cuMemcpyDtoDAsync, cuMemcpyBatchAsync,
cuStreamWriteValue32, cuStreamWaitValue32, cuStreamBatchMemOp).  A stream operation takes no multiprocessor, so a wait costs nothing while
a GEMM fills the GPU.

A flag is a 32-bit word that only grows (it may wrap around): it counts the messages so far, and is never cleared.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch

from mxep.ops.runtime.nvrtc import DriverFunction

REMOTE, LOCAL, SLOTTED = 0, 1, 2  # copies to other ranks, copies on this rank, and kernels of the slotted all-to-all; each keeps its order
_WORD = 2**32
_WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int)(word - value) >= 0
_MOST_SPARE = 4096  # events; the watchdog recycles those of half a second of exchanges at a time

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


class CudaCopyStreams:
    """Streams of GPU `device` for copies, flags and the slotted all-to-all, and an alternate stream for GEMMs.

    A stream is `REMOTE`, `LOCAL` or `SLOTTED`, or None for the current stream.  All copies to peers share one, in order: a stream per peer
    is slower, because their copies collide.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Kernels that receive from slots fill the GPU: the next round's sends must not queue after them.
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
        self._handles = [stream.cuda_stream for stream in self._streams]
        self._alternate = torch.cuda.Stream(device)
        self._known: dict[int, torch.cuda.Stream] = {}  # current streams so far: torch takes microseconds to make one
        self._spare: deque[torch.cuda.Event] = deque(maxlen=_MOST_SPARE)  # creating an event takes longer than recording one
        self._now = torch.cuda.Event()
        self._now.record(self._alternate)  # creates it
        self._now_handle = self._now.cuda_event

    def handle(self, stream: int | None) -> int:
        """The driver's handle, for kernels that torch does not launch."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) if stream is None else self._handles[stream]

    def fork(self, *streams: int) -> None:
        """What follows on these streams comes after what is on the current stream now."""
        _record_event(self.device, self._now_handle, self.handle(None))
        for stream in streams:
            _wait_event(self.device, self._handles[stream], self._now_handle, 0)

    def join(self, *streams: int) -> None:
        """What follows on the current stream comes after what is on these streams now; without any: REMOTE, LOCAL, the alternate one."""
        for handle in [self._handles[stream] for stream in streams] or [*self._handles[:SLOTTED], self._alternate.cuda_stream]:
            self.wait_stream(handle)

    def wait_stream(self, handle: int) -> None:
        """What follows on the current stream comes after what is on the stream of that `handle` now."""
        _record_event(self.device, self._now_handle, handle)
        _wait_event(self.device, self.handle(None), self._now_handle, 0)

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        """Copy `size` bytes between two addresses, also of two GPUs."""
        _copy_bytes(self.device, to, source, size, self._handles[stream])

    def copy_each(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """`copy` of each (to, source, size), in any order, in one call."""
        count = len(copies)
        if count < 2 or not _copy_each.exists():  # an older driver copies them one by one
            for copy in copies:
                self.copy(stream, *copy)
            return
        to, sources, sizes = (_sizes(count).pack(*column) for column in zip(*copies, strict=True))
        _copy_each(self.device, to, sources, sizes, count, _AFTER_THE_STREAM, _FROM_THE_FIRST, 1, self._handles[stream])

    def write(self, stream: int | None, flag: int, value: int) -> None:
        """Set a flag when everything before on the stream is done and visible."""
        _write_value(self.device, self.handle(stream), flag, value % _WORD, 0)

    def wait(self, stream: int | None, flag: int, value: int) -> None:
        """Make the stream wait until a flag has reached `value`."""
        _wait_value(self.device, self.handle(stream), flag, value % _WORD, _WAIT_GREATER_OR_EQUAL)

    def batch(self, stream: int | None, operations: Sequence[Operation]) -> None:
        """One `wait` or `write` after the other, in one call."""
        if count := len(operations):
            _batch(self.device, self.handle(stream), count, _words(count).pack(*chain.from_iterable(operations)), 0)

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Makes it the current stream: for kernels that write to other ranks."""
        return torch.cuda.stream(self._streams[stream])

    def record(self, stream: int | None) -> torch.cuda.Event:
        """Record an event on the stream."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event()
        if stream is not None:
            return self._streams[stream].record_event(event)
        handle = self.handle(None)
        if handle not in self._known:
            self._known[handle] = torch.cuda.current_stream(self.device)
        return self._known[handle].record_event(event)

    def wait_event(self, event: torch.cuda.Event) -> None:
        """The current stream waits for that event, and for nothing after it."""
        _wait_event(self.device, self.handle(None), event.cuda_event, 0)

    def recycle(self, event: torch.cuda.Event) -> None:
        """Return the event to the pool. No thread may use it any more."""
        self._spare.append(event)

    def fork_alternate(self) -> None:
        """What follows on the alternate stream comes after what is on the current stream now."""
        self._alternate.wait_stream(torch.cuda.current_stream(self.device))

    def alternate(self, index: int) -> AbstractContextManager[object]:
        """Makes the current (even `index`) or the alternate stream current: the last tiles of a GEMM overlap with the first of the next."""
        return torch.cuda.stream(self._alternate) if index % 2 else contextlib.nullcontext()

"""A stubbed device: virtual ranks whose streams are threads, asynchronous like a GPU's. Hosts run ahead, and a watchdog runs.

Only stream operations are asynchronous: torch's own work on the CPU is done at once, so tests keep the tensors that they send.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.virtual import HostCopyStreams, SharedMemory

from mxep.comm import symmetric
from mxep.comm.copy_streams import LOCAL, REMOTE, SLOTTED
from mxep.comm.host_allgather import HostAllGather
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.watchdog import Watchdog

_CURRENT = None  # the key of the current stream
_here = threading.local()  # the streams of this thread's rank


class Mark:
    """A stub for a CUDA event."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class ThreadCopyStreams(HostCopyStreams):
    """`CudaCopyStreams`, each with a thread that runs its operations in order. Callers do not wait, and a stream waits without a limit."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, math.inf, lambda: None)
        self._queues = {stream: SimpleQueue[Callable[[], Any]]() for stream in (_CURRENT, REMOTE, LOCAL, SLOTTED)}
        for queue in self._queues.values():
            threading.Thread(target=self._work, args=(queue,), daemon=True).start()

    @staticmethod
    def _work(queue: SimpleQueue) -> None:
        while True:
            queue.get()()

    def enqueue(self, stream: int | None, act: Callable[[], Any]) -> None:
        self._queues[stream].put(act)

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        self.enqueue(stream, partial(ctypes.memmove, to, source, size))

    def write(self, stream: int | None, flag: int, value: int) -> None:
        self.enqueue(stream, partial(super().write, stream, flag, value))

    def wait(self, stream: int | None, flag: int, value: int) -> None:
        self.enqueue(stream, partial(super().wait, stream, flag, value))

    def record(self, stream: int | None) -> Any:
        mark = Mark()
        self.enqueue(stream, mark.reached.set)
        return mark

    def wait_event(self, mark: Any) -> None:
        self.enqueue(_CURRENT, mark.reached.wait)

    def fork(self, *streams: int) -> None:
        mark = self.record(_CURRENT)
        for stream in streams:
            self.enqueue(stream, mark.reached.wait)

    def join(self, *streams: int) -> None:
        for stream in streams or (REMOTE, LOCAL):
            self.wait_event(self.record(stream))

    def done(self, timeout_s: float) -> bool:
        """Whether all streams finish in time: a host sync that does not hang."""
        deadline = time.monotonic() + timeout_s
        return all([self.record(stream).reached.wait(max(deadline - time.monotonic(), 0)) for stream in self._queues])


class OverStreams(SymmetricTransport):
    """The transport as on a GPU, with a watchdog and its rescue."""

    def __init__(
        self, memory: SharedMemory, rendezvous: HostAllGather, device: torch.device, timeout_s: float, slot_memory_bytes: int
    ) -> None:
        _here.copy_streams = ThreadCopyStreams(device)
        super().__init__(memory, rendezvous, _here.copy_streams, device, timeout_s, slot_memory_bytes)
        self._rescue = SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
        self._watchdog = Watchdog(timeout_s, self._stuck)


def _fill_words(device: torch.device, to: int, value: int, count: int, stream: int) -> None:
    ctypes.memmove(to, (ctypes.c_uint32 * count)(*[value] * count), 4 * count)


def done(timeout_s: float) -> bool:
    """Whether the streams of this thread's rank finish in that time."""
    return _here.copy_streams.done(timeout_s)


def stub_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the driver calls of the watchdog and of close() by writes to the host's memory; a sync that hangs is an error."""

    def synchronize(device: torch.device) -> None:
        assert done(10), "the process would hang at its end"

    monkeypatch.setattr(symmetric, "fill_bytes", lambda device, to, value, size, stream: ctypes.memset(to, value, size))
    monkeypatch.setattr(symmetric, "_fill_words", _fill_words)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

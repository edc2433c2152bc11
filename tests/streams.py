"""A stubbed device: virtual ranks whose streams are threads, as a GPU's streams are. Hosts run ahead, the watchdog watches.

Only what goes through the streams is behind time: torch's own work on the CPU is done at once, so tests keep what they send.
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

_CURRENT = None  # the stream that stands for the current stream
_here = threading.local()  # the streams of this thread's rank


class Mark:
    """What is asked of a CUDA event."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class ThreadCopyStreams(HostCopyStreams):
    """`CudaCopyStreams` that do one thing after the other on a thread each; who asks does not wait, and a wait has no end of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, math.inf, lambda: None)
        self._asked = {stream: SimpleQueue[Callable[[], Any]]() for stream in (_CURRENT, REMOTE, LOCAL, SLOTTED)}
        for asked in self._asked.values():
            threading.Thread(target=self._work, args=(asked,), daemon=True).start()

    @staticmethod
    def _work(asked: SimpleQueue) -> None:
        while True:
            asked.get()()

    def ask(self, stream: int | None, act: Callable[[], Any]) -> None:
        self._asked[stream].put(act)

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        self.ask(stream, partial(ctypes.memmove, to, source, size))

    def write(self, stream: int | None, flag: int, value: int) -> None:
        self.ask(stream, partial(super().write, stream, flag, value))

    def wait(self, stream: int | None, flag: int, value: int) -> None:
        self.ask(stream, partial(super().wait, stream, flag, value))

    def record(self, stream: int | None) -> Any:
        mark = Mark()
        self.ask(stream, mark.reached.set)
        return mark

    def wait_event(self, mark: Any) -> None:
        self.ask(_CURRENT, mark.reached.wait)

    def fork(self, *streams: int) -> None:
        mark = self.record(_CURRENT)
        for stream in streams:
            self.ask(stream, mark.reached.wait)

    def join(self, *streams: int) -> None:
        for stream in streams or (REMOTE, LOCAL):
            self.wait_event(self.record(stream))

    def done(self, timeout_s: float) -> bool:
        """Whether all streams have come to their end in time: a host sync that does not hang."""
        deadline = time.monotonic() + timeout_s
        return all([self.record(stream).reached.wait(max(deadline - time.monotonic(), 0)) for stream in self._asked])


class OverStreams(SymmetricTransport):
    """The transport as it is on a GPU: with a watchdog, and with what that does."""

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
    """Whether the streams of this thread's rank are through in that time."""
    return _here.copy_streams.done(timeout_s)


def stub_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the watchdog and the end of a transport ask of the driver, on the host's memory; a sync that hangs is an error here."""

    def synchronize(device: torch.device) -> None:
        assert done(10), "the process would hang at its end"

    monkeypatch.setattr(symmetric, "fill_bytes", lambda device, to, value, size, stream: ctypes.memset(to, value, size))
    monkeypatch.setattr(symmetric, "_fill_words", _fill_words)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

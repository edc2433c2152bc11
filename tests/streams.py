"""A stubbed device: virtual ranks whose lanes are threads, as a GPU's streams are. Hosts run ahead, the watchdog watches.

Only what goes through the lanes is behind time: torch's own work on the CPU is done at once, so tests keep what they send.
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
from tests.virtual import SharedMemory

from mxep.comm import symmetric
from mxep.comm.board import Board
from mxep.comm.lanes import AWAY, HERE, MAIL, HostLanes
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.watchdog import Watchdog

_CURRENT = None  # the lane that stands for the current stream
_here = threading.local()  # the lanes of this thread's rank


class Mark:
    """What is asked of a CUDA event."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class ThreadLanes(HostLanes):
    """Lanes that do one thing after the other on a thread each; who asks does not wait, and a wait has no end of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, math.inf, lambda: None)
        self._asked = {lane: SimpleQueue[Callable[[], Any]]() for lane in (_CURRENT, AWAY, HERE, MAIL)}
        for asked in self._asked.values():
            threading.Thread(target=self._work, args=(asked,), daemon=True).start()

    @staticmethod
    def _work(asked: SimpleQueue) -> None:
        while True:
            asked.get()()

    def ask(self, lane: int | None, act: Callable[[], Any]) -> None:
        self._asked[lane].put(act)

    def copy(self, lane: int, to: int, source: int, size: int) -> None:
        self.ask(lane, partial(ctypes.memmove, to, source, size))

    def write(self, lane: int | None, flag: int, value: int) -> None:
        self.ask(lane, partial(super().write, lane, flag, value))

    def wait(self, lane: int | None, flag: int, value: int) -> None:
        self.ask(lane, partial(super().wait, lane, flag, value))

    def mark(self, lane: int | None) -> Any:
        mark = Mark()
        self.ask(lane, mark.reached.set)
        return mark

    def follow(self, mark: Any) -> None:
        self.ask(_CURRENT, mark.reached.wait)

    def fork(self, *lanes: int) -> None:
        mark = self.mark(_CURRENT)
        for lane in lanes:
            self.ask(lane, mark.reached.wait)

    def join(self, *lanes: int) -> None:
        for lane in lanes or (AWAY, HERE):
            self.follow(self.mark(lane))

    def done(self, timeout_s: float) -> bool:
        """Whether all lanes have come to their end in time: a host sync that does not hang."""
        deadline = time.monotonic() + timeout_s
        return all([self.mark(lane).reached.wait(max(deadline - time.monotonic(), 0)) for lane in self._asked])


class OverStreams(SymmetricTransport):
    """The transport as it is on a GPU: with a watchdog, and with what that does."""

    def __init__(self, memory: SharedMemory, board: Board, device: torch.device, timeout_s: float, mailbox_bytes: int) -> None:
        _here.lanes = ThreadLanes(device)
        super().__init__(memory, board, _here.lanes, device, timeout_s, mailbox_bytes)
        self._rescue = SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
        self._watchdog = Watchdog(timeout_s, self._stuck)


def _fill_words(device: torch.device, to: int, value: int, count: int, stream: int) -> None:
    ctypes.memmove(to, (ctypes.c_uint32 * count)(*[value] * count), 4 * count)


def done(timeout_s: float) -> bool:
    """Whether the lanes of this thread's rank are through in that time."""
    return _here.lanes.done(timeout_s)


def stub_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the watchdog and the end of a transport ask of the driver, on the host's memory; a sync that hangs is an error here."""

    def synchronize(device: torch.device) -> None:
        assert done(10), "the process would hang at its end"

    monkeypatch.setattr(symmetric, "_fill_bytes", lambda device, to, value, size, stream: ctypes.memset(to, value, size))
    monkeypatch.setattr(symmetric, "_fill_words", _fill_words)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

"""Detects that a GPU waits for a peer that does not respond."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mxep.comm.copy_streams import LOCAL, REMOTE, SLOTTED, CudaCopyStreams

_CHECKS = 10  # per time limit at least
_PAUSE_S = 0.5  # at most, so that events are recycled soon
_RESCUE_S = 10.0  # for `stuck`, which starts a few small operations of the device


@dataclass
class _Count:
    """Exchanges that the GPU counts: the last result of `read`, and since when."""

    what: str
    read: Callable[[], tuple[int, int]]
    seen: tuple[int, int] = (0, 0)
    since: float = 0.0


class Watchdog:
    """Watches exchanges on a thread of its own, by two events each or by a count of them.

    The clock of an exchange starts when the GPU begins it and everything before it on the stream, other exchanges included, is done.

    The process ends with SIGABRT and the stacks of its threads if `stuck` raises or does not return, or a check does not return for the
    time limit.  The CUDA driver may hold the context's lock in a thread that loads a module or frees memory until the GPU is idle.  That
    GPU waits for the peer, and `stuck`, which would end the wait, waits for the lock.  A second thread sees to that.  It calls no driver,
    logs nothing, and starts with the object, since Python 3.12 starts no thread while it shuts down.

    Args:
        timeout_s: how long one exchange may take.
        stuck: called on the watchdog's thread with the name of an exchange that has not ended in time, repeatedly until it ends.
        prepare: called on that thread first.
        recycle: called on that thread with the events of exchanges that have ended.
    """

    def __init__(
        self,
        timeout_s: float,
        stuck: Callable[[str], None],
        prepare: Callable[[], None] | None = None,
        recycle: Callable[[torch.cuda.Event], None] | None = None,
    ) -> None:
        self._timeout_s, self._stuck, self._prepare, self._recycle = timeout_s, stuck, prepare, recycle
        self._pause_s = min(timeout_s / _CHECKS, _PAUSE_S)
        self._watched: deque[tuple[torch.cuda.Event, torch.cuda.Event, str]] = deque()
        self._counts: list[_Count] = []
        self._begun: float | None = None
        self._heartbeat: tuple[str, float] | None = None  # what the thread does that may not return, and for how many seconds it may
        self._ended = threading.Event()
        for target in (self._watch, self._monitor_heartbeat):
            threading.Thread(target=target, name="mxep-watchdog", daemon=True).start()

    def watch(self, begin: torch.cuda.Event, end: torch.cuda.Event, what: str) -> None:
        """An exchange between two recorded events."""
        # Does not wake the thread, which polls: it would take Python's lock from the caller in the middle of an exchange.
        self._watched.append((begin, end, what))

    def watch_streams(self, streams: CudaCopyStreams) -> None:
        """What is on the streams now: after an error an exchange has no end event, and what it sent may wait for a dead rank."""
        for stream in (REMOTE, LOCAL, SLOTTED):
            begin, end = streams.record(None), streams.record(stream)
            self.watch(begin, end, "an exchange that was left")

    def watch_count(self, what: str, read: Callable[[], tuple[int, int]]) -> None:
        """Exchanges of which `read` returns how many have begun, and ended; "{}" in `what` is replaced by the number of one."""
        self._counts.append(_Count(what, read))

    def close(self) -> None:
        """Ends the threads and releases the exchanges."""
        self._ended.set()
        self._counts.clear()

    def _watch(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while not self._ended.wait(self._pause_s):
            try:
                self._check()
            except torch.AcceleratorError:  # of a broken device, on which nothing waits any more
                self._heartbeat = None
                return

    def _check(self) -> None:
        self._heartbeat = "an exchange", self._timeout_s + _RESCUE_S
        self._check_exchanges()
        for count in self._counts:
            self._check_count(count)
        self._heartbeat = None

    def _check_exchanges(self) -> None:
        """Drop those that have ended; the clock of the first other one runs from the first check that finds it begun."""
        while self._watched:
            begin, end, what = self._watched[0]
            if not end.query():
                break
            self._watched.popleft()
            self._begun = None
            if self._recycle is not None:
                self._recycle(begin)
                self._recycle(end)
        else:
            return
        if begin.query():
            self._begun = self._begun or time.monotonic()
            if time.monotonic() - self._begun > self._timeout_s:
                self._end_wait(what)

    def _check_count(self, count: _Count) -> None:
        begun, ended = now = count.read()
        if begun == ended or now != count.seen:
            count.seen, count.since = now, time.monotonic()
        elif time.monotonic() - count.since > self._timeout_s:
            self._end_wait(count.what.format(begun))

    def _end_wait(self, what: str) -> None:
        """`stuck`, or the end of the process."""
        self._heartbeat = what, _RESCUE_S
        self._stuck(what)
        self._heartbeat = what, self._timeout_s + _RESCUE_S

    def _monitor_heartbeat(self) -> None:
        """Ends the process if the other thread does not come back. Counted in pauses: the process may have been stopped for hours."""
        seen, pauses = None, 0
        while not self._ended.wait(_PAUSE_S):
            heartbeat = self._heartbeat
            pauses = pauses + 1 if heartbeat is seen else 0
            seen = heartbeat
            if heartbeat is not None and pauses * _PAUSE_S > heartbeat[1]:
                _abort(*heartbeat)


def _abort(what: str, seconds: float) -> None:
    text = (
        f"mxep: {what}: a peer's part did not come, and the CUDA driver has not let the wait end for {seconds:g} s, since another thread "
        "of this process holds its lock; this process ends now (SIGABRT), as no call of it to the GPU would return\n"
    )
    os.write(2, text.encode())  # logging has a lock too, which the thread that waits for the GPU may hold
    faulthandler.dump_traceback(2)
    os.abort()

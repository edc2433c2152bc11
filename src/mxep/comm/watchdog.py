"""Notices that a GPU waits for a peer that does not come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mxep.comm.lanes import AWAY, HERE, MAIL, Lanes

_LOOKS = 10  # per time limit at least
_PAUSE_S = 0.5  # at most: what is done is not kept for long


@dataclass
class _Count:
    """Exchanges that count themselves: what `read` said last, and since when."""

    what: str
    read: Callable[[], tuple[int, int]]
    seen: tuple[int, int] = (0, 0)
    since: float = 0.0


class Watchdog:
    """Watches exchanges by two events each, or all of a kind by a count of them, on a thread of its own.

    The clock of an exchange starts when the GPU begins it and everything before it, other exchanges too, is done; it does not run while
    work of the same stream is still before it.

    Args:
        timeout_s: how long one exchange may take.
        stuck: called on the watchdog's thread with what has not ended in time, again and again until it ends.
        prepare: called on that thread first.
        forget: gets the events of exchanges that have ended, on that thread.
    """

    def __init__(
        self,
        timeout_s: float,
        stuck: Callable[[str], None],
        prepare: Callable[[], None] | None = None,
        forget: Callable[[torch.cuda.Event], None] | None = None,
    ) -> None:
        self._timeout_s, self._stuck, self._prepare, self._forget = timeout_s, stuck, prepare, forget
        self._pause_s = min(timeout_s / _LOOKS, _PAUSE_S)
        self._watched: deque[tuple[torch.cuda.Event, torch.cuda.Event, str]] = deque()
        self._counts: list[_Count] = []
        self._begun: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="mxep-watchdog", daemon=True).start()

    def watch(self, begin: torch.cuda.Event, end: torch.cuda.Event, what: str) -> None:
        """An exchange between two recorded events."""
        # Does not wake the thread, which looks by itself: it would take the interpreter from the caller in the middle of an exchange.
        self._watched.append((begin, end, what))

    def watch_lanes(self, lanes: Lanes) -> None:
        """What is on the lanes now: after an error exchanges stay without an end, and what they have sent may wait for a dead rank."""
        for lane in (AWAY, HERE, MAIL):
            begin, end = lanes.mark(None), lanes.mark(lane)
            assert begin is not None
            assert end is not None
            self.watch(begin, end, "an exchange that was left")

    def watch_count(self, what: str, read: Callable[[], tuple[int, int]]) -> None:
        """From now on those as well of which `read` tells how many have begun, and ended; "{}" in `what` is the number of one."""
        self._counts.append(_Count(what, read))

    def close(self) -> None:
        """Ends the thread, and lets go of what it looked at."""
        self._ended.set()
        self._counts.clear()

    def _watch(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while not self._ended.wait(self._pause_s):
            self._look_at_exchanges()
            for count in self._counts:
                self._look_at(count)

    def _look_at_exchanges(self) -> None:
        """Forget those that have ended; the clock of the first other one runs from when it is seen to have begun."""
        while self._watched:
            begin, end, what = self._watched[0]
            if not end.query():
                break
            self._watched.popleft()
            self._begun = None
            if self._forget is not None:
                self._forget(begin)
                self._forget(end)
        else:
            return
        if begin.query():
            self._begun = self._begun or time.monotonic()
            if time.monotonic() - self._begun > self._timeout_s:
                self._stuck(what)

    def _look_at(self, count: _Count) -> None:
        begun, ended = now = count.read()
        if begun == ended or now != count.seen:
            count.seen, count.since = now, time.monotonic()
        elif time.monotonic() - count.since > self._timeout_s:
            self._stuck(count.what.format(begun))

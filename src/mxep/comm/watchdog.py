"""Notices that a GPU waits for a peer that does not come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

_LOOKS = 10  # per time limit at least
_PAUSE_S = 1.0  # at most: what is done is not kept for long


class Watchdog:
    """Watches exchanges by two events each, on a thread of its own.

    The clock of an exchange starts when the GPU begins it and everything before it, other exchanges too, is done; it does not run while
    work of the same stream is still before it.

    Args:
        timeout_s: how long one exchange may take.
        stuck: called on the watchdog's thread with what has not ended in time, again and again until it ends.
    """

    def __init__(self, timeout_s: float, stuck: Callable[[str], None]) -> None:
        self._timeout_s, self._stuck = timeout_s, stuck
        self._watched: deque[tuple[torch.cuda.Event, torch.cuda.Event, str]] = deque()
        self._wake = threading.Condition()
        self._ended = False
        threading.Thread(target=self._watch, name="mxep-watchdog", daemon=True).start()

    def watch(self, begin: torch.cuda.Event, end: torch.cuda.Event, what: str) -> None:
        """An exchange between two recorded events."""
        with self._wake:
            self._watched.append((begin, end, what))
            self._wake.notify()

    def close(self) -> None:
        """Ends the thread."""
        with self._wake:
            self._ended = True
            self._wake.notify()

    def _watch(self) -> None:
        begun: float | None = None
        while True:
            with self._wake:
                while not self._watched and not self._ended:
                    self._wake.wait()
                if self._ended:
                    return
                begin, end, what = self._watched[0]
            if end.query():
                self._watched.popleft()
                begun = None
                continue
            if begin.query():
                begun = begun or time.monotonic()
                if time.monotonic() - begun > self._timeout_s:
                    self._stuck(what)
            time.sleep(min(self._timeout_s / _LOOKS, _PAUSE_S))

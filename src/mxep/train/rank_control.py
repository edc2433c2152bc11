"""How `mxep train` controls the ranks that it starts: environment variables, and signals that end a run. Imports no torch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FAILURES_VARIABLE = "MXEP_FAILURES"  # folder for the error reports of the ranks
STORE_VARIABLE = "MXEP_STORE"  # file of the ranks' store
GUARD_VARIABLE = "MXEP_GUARD"  # descriptor of a pipe that closes when the starter ends
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a closed terminal
ECHO_S = 3.0


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle STOP_SIGNALS with `handler` inside, on the main thread. An ignored SIGHUP stays ignored (nohup)."""
    wanted = [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def is_second_request(number: int, since_s: float) -> bool:
    """True if a signal this long after the first one asks to end at once.

    A scheduler signals every process of a job, and an ending session sends SIGHUP and SIGTERM: signals within ECHO_S are one request.
    SIGHUP means a closed terminal and is never a second request.
    """
    return number != signal.SIGHUP and since_s >= ECHO_S

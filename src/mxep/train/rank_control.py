"""How a starter controls its ranks: environment variables, and the signals that end a run after its step (no torch here)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FAILURES_VARIABLE = "MXEP_FAILURES"  # folder in which the ranks that we started leave what went wrong
STORE_VARIABLE = "MXEP_STORE"  # file through which they find each other
GUARD_VARIABLE = "MXEP_GUARD"  # descriptor of a pipe that closes when this process is gone
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a terminal that is gone
ECHO_S = 3.0


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Hand these signals to `handler` meanwhile, on the main thread. SIGHUP stays ignored where it is, as nohup wants it."""
    wanted = [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def is_second_request(number: int, since_s: float) -> bool:
    """Whether a signal that comes this long after the first one asks to break off.

    A scheduler signals every process of a job, and a session that ends sends SIGHUP and SIGTERM, so what comes within ECHO_S is the same
    request. SIGHUP says that a terminal is gone, and never that someone lost patience.
    """
    return number != signal.SIGHUP and since_s >= ECHO_S

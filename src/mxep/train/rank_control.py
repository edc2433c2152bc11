"""How `mxep train` controls the ranks that it starts: environment variables, and signals that end a run. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
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


def starter_pid() -> int | None:
    """Pid of the `mxep train` process or the like that started this process; None under torchrun and from a shell."""
    return os.getppid() if GUARD_VARIABLE in os.environ else None


def watch_starter() -> None:
    """Send SIGTERM to this process when the one that started it is gone: a thread waits for the end of that process' pipe."""
    descriptor = os.environ.get(GUARD_VARIABLE)
    if descriptor is None:
        return

    def wait() -> None:
        while os.read(int(descriptor), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="mxep-starter-guard").start()

"""How `mxep train` controls the ranks that it starts: environment variables, and signals that end a run. Imports no torch."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FAILURES_VARIABLE = "MXEP_FAILURES"  # folder for the error reports of the ranks
STORE_VARIABLE = "MXEP_STORE"  # file of the ranks' store
GUARD_VARIABLE = "MXEP_GUARD"  # what `describe_guard` says of a pipe that closes when the starter ends
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a closed terminal
ECHO_S = 3.0
_signalled_by_guard = False  # from then until the next question whether a signal is a second request


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
    SIGHUP means a closed terminal and is never a second request, nor is the signal of `watch_starter`.
    """
    global _signalled_by_guard
    by_guard, _signalled_by_guard = _signalled_by_guard, False
    return not by_guard and number != signal.SIGHUP and since_s >= ECHO_S


def describe_guard(descriptor: int) -> str:
    """A pipe's descriptor and inode: a process that inherits the variable alone may have another file under this number."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def _guard() -> int | None:
    """The descriptor of the starter's pipe; None if this process has not inherited one."""
    descriptor, _, inode = os.environ.get(GUARD_VARIABLE, "").partition(":")
    try:
        found = os.fstat(int(descriptor))
    except (OSError, ValueError):
        return None
    return int(descriptor) if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode else None


def starter_pid() -> int | None:
    """Pid of the `mxep train` process or the like that started this process; None under torchrun and from a shell."""
    return None if _guard() is None else os.getppid()


def watch_starter() -> None:
    """Send SIGTERM to this process when the one that started it is gone: a thread waits for the end of that process' pipe."""
    descriptor = _guard()
    if descriptor is None:
        return

    def wait() -> None:
        global _signalled_by_guard
        while os.read(descriptor, 1):
            pass
        _signalled_by_guard = True
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="mxep-starter-guard").start()

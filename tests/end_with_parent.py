"""A process that imports this is killed by the kernel when the thread that started it ends, also if it is stopped or waits for a GPU.

Otherwise a rank of a killed test would keep its GPU, and slow down later tests there.
"""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """A forked process calls this itself: it does not inherit the request."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


end_with_parent()

"""A disk that is full, for tests: files that may not grow beyond a size."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """Files end at `size` bytes: a write that crosses it is cut there, the next one raises an OSError, as on a full disk.

    No bytecode is written meanwhile: Python 3.11 would keep a file that was cut, and fail at the next import.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

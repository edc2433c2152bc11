"""Writes files that survive a kill and a full disk: a file is replaced as a whole, and appended to in whole records."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class NotWrittenError(OSError):
    """A file that a run needs could not be written. The message says what, where and why; `errno` is not set."""


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. After a kill or on a full disk the old file is intact.

    Raises:
        OSError: it could not be written. The old file is untouched, and the partial one is removed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise the rename may reach the disk before the content
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def append(path: Path, content: bytes) -> None:
    """Append all of `content` or nothing. Raises OSError if it cannot be written."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]  # a full disk takes a part, then raises
        except OSError:
            file.truncate(size)
            raise

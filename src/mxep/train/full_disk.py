"""A run's files where the disk is full for a while: replaced whole or not at all, appended in whole lines, tried again later."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotWrittenError(OSError):
    """Something that a run cannot do without found no place; the text says what, where and why. It has no `errno`."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its place first, so that a kill or a full disk leaves the one that was there.

    Raises:
        OSError: it could not be written; the old one is untouched, what was written is removed.
    """
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else the new name may reach the disk before the content
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


class LineFile:
    """Appends the lines in `waiting`; those that the file does not take go on waiting there, so that each is written once and whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[str] = []  # without their ends
        self._cut_at: int | None = None  # bytes of whole lines, where more may follow that was cut

    def flush(self) -> None:
        """Write the lines that wait. Raises OSError where they go on waiting."""
        if not self.waiting:
            return
        try:
            with self.path.open("ab") as file:
                if self._cut_at is not None:
                    file.truncate(self._cut_at)
                self._cut_at = file.seek(0, os.SEEK_END)
                file.write("".join(line + "\n" for line in self.waiting).encode())
        except OSError:
            if self._cut_at is not None:
                with suppress(OSError):  # else the next flush does it
                    os.truncate(self.path, self._cut_at)
                    self._cut_at = None
            raise
        self._cut_at = None
        self.waiting.clear()


class Outage:
    """Lets a run go on where something cannot be written, and says so once when that begins and once when it ends."""

    def __init__(self, what: str, meanwhile: str, say: Callable[[str], None]) -> None:
        self.what, self.meanwhile, self._say, self._told = what, meanwhile, say, False

    @contextmanager
    def survived(self) -> Iterator[None]:
        """An OSError of what is done inside is told and not raised."""
        try:
            yield
        except OSError as error:
            if not self._told:
                self._say(f"{self.what} cannot be written: {error}; {self.meanwhile}")
            self._told = True
        else:
            if self._told:
                self._say(f"{self.what} can be written again, nothing is missing")
            self._told = False

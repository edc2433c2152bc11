"""What a run prints where nobody may read it any more: a closed terminal, a pipe whose reader is gone, a full disk under stdout.

Printing is worth less than the work, so what such a stream does not take is dropped, and `metrics.jsonl` says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console


class Output:
    """A text stream over another one, whose failures are dropped and remembered and never raised.

    Args:
        stream: what is written to; None, as Python has it for a descriptor that was closed, takes nothing.
        name: of the stream, for `news`.
    """

    def __init__(self, stream: TextIO | None, name: str = "stdout") -> None:
        self._stream, self._name = stream, name
        self._failing, self._accepted, self._news = False, False, list[str]()

    @staticmethod
    def of(stream: TextIO | None) -> Output:
        """The stream itself where it is one of these already."""
        return stream if isinstance(stream, Output) else Output(stream)

    def write(self, text: str) -> int:
        """Write what the stream takes, with escapes for characters that its encoding does not have; returns the length of `text`."""
        self._accepted = self._attempt(lambda stream: _write(stream, text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream. It takes text again when it took some and flushed it: a buffer takes some anyway, and flushes nothing too."""
        if self._attempt(lambda stream: stream.flush()) and self._accepted:
            self._failing = False

    def news(self) -> list[str]:
        """Why text was dropped, once for every time that this began; empties the list."""
        news, self._news = self._news, []
        return news

    def end(self) -> None:
        """Flush; a stream that fails is pointed at nothing, since Python flushes it once more at its end and would fail."""
        self.flush()
        if self._failing and self._stream is not None:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _attempt(self, act: Callable[[TextIO], Any]) -> bool:
        try:
            if self._stream is None:
                raise OSError("it is closed")
            act(self._stream)
        except (OSError, ValueError) as error:  # ValueError: a closed file
            if not self._failing:
                self._news.append(f"{self._name} cannot be written: {error}; what it does not take is dropped, the run goes on")
            self._failing = True
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


def console(enabled: bool = True) -> Console:
    """A console on stdout that no failing stdout ends; rich's own ends the process where a pipe has no reader. Not enabled: silent."""
    return Console(file=cast(TextIO, Output.of(sys.stdout)), soft_wrap=True, highlight=False, quiet=not enabled)


@contextmanager
def surviving_output() -> Iterator[None]:
    """Let this process print through `Output` meanwhile, with something behind each of the standard descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would get its number and what others print
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # read-only, so that writing fails and is told
    before = sys.stdout, sys.stderr
    outputs = Output(sys.stdout), Output(sys.stderr, "stderr")
    sys.stdout, sys.stderr = (cast(TextIO, output) for output in outputs)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in outputs:
            output.end()

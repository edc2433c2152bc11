"""Output streams that never raise: a closed terminal, a pipe without a reader or a full disk does not end a run.

Text that such a stream refuses is dropped, and `metrics.jsonl` says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console


class Output:
    """A text stream that wraps another one. It drops text that the other one refuses, and remembers the error.

    Args:
        stream: the wrapped stream; None (Python's value for a closed descriptor) refuses everything.
        name: of the stream, for the messages of `failures`.
    """

    def __init__(self, stream: TextIO | None, name: str = "stdout") -> None:
        self._stream, self._name = stream, name
        self._failing, self._accepted, self._failures = False, False, list[str]()

    @staticmethod
    def of(stream: TextIO | None) -> Output:
        """`stream` wrapped, unless it is an `Output` already."""
        return stream if isinstance(stream, Output) else Output(stream)

    def write(self, text: str) -> int:
        """Write to the stream, with escapes for characters that its encoding lacks; returns the length of `text`."""
        self._accepted = self._attempt(lambda stream: _write(stream, text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream. It works again once a write and a flush succeed: a buffer accepts text, and an empty one can be flushed."""
        if self._attempt(lambda stream: stream.flush()) and self._accepted:
            self._failing = False

    def failures(self) -> list[str]:
        """Why text was dropped since the last call: one message each time that the stream begins to fail."""
        failures, self._failures = self._failures, []
        return failures

    def end(self) -> None:
        """Flush. A failing stream is redirected to /dev/null, since Python flushes it again at exit."""
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
                self._failures.append(f"{self._name} cannot be written: {error}; its text is dropped, the run continues")
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
    """A rich console on stdout through `Output`; rich's default console ends the process on a broken pipe. Not enabled: silent."""
    return Console(file=cast(TextIO, Output.of(sys.stdout)), soft_wrap=True, highlight=False, quiet=not enabled)


@contextmanager
def surviving_output() -> Iterator[None]:
    """Replace stdout and stderr by `Output` streams inside, and open each standard descriptor that is closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next opened file would get its number and the output
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # read-only, so that a write fails and is reported
    before = sys.stdout, sys.stderr
    outputs = Output(sys.stdout), Output(sys.stderr, "stderr")
    sys.stdout, sys.stderr = (cast(TextIO, output) for output in outputs)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in outputs:
            output.end()

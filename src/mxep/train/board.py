"""TensorBoard's event files of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any


class Board:
    """Figures for TensorBoard; those that the disk does not take are kept for the next `flush`.

    Its own writer never recovers from a failed write, so another one with another file takes over. A figure that had reached the first
    file may stand in both, at the same step with the same value.

    Args:
        folder: of the event files.
        start_step: figures after it that an earlier run left are hidden.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard needs TensorBoard; install it with: pip install 'mxep[tensorboard]'") from error
        self._open, self._folder = SummaryWriter, folder
        self._writer: Any = None
        self._purge_step: int | None = start_step + 1 if start_step else 0  # 0: of a run that was killed before its first checkpoint
        self.waiting: list[tuple[str, float, int]] = []

    def add(self, name: str, value: float, step: int) -> None:
        """Keep one figure for the next `flush`."""
        self.waiting.append((name, value, step))

    def flush(self) -> None:
        """Write the figures that wait. Raises OSError where they go on waiting."""
        try:
            if self._writer is None:
                self._writer = self._open(str(self._folder), purge_step=self._purge_step)
            for figure in self.waiting:
                self._writer.add_scalar(*figure)
            self._writer.flush()
        except OSError:
            self.close()
            raise
        self._purge_step = None
        self.waiting.clear()

    def close(self) -> None:
        """End the writer's thread; `flush` has written everything, or its caller was told."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.file_writer is not None:
            with suppress(OSError):
                writer.file_writer.close()  # SummaryWriter.close would flush first and leave the thread where that fails

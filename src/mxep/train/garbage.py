"""Python's garbage collection at the same steps on all ranks (source: torchtitan's `GarbageCollection`, Megatron's `--manual-gc`)."""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageCollection:
    """Collects every so many steps inside its `with` block, in which Python does not by itself.

    Python collects when a rank has made enough objects, which takes a rank of a compiled model tenths of a second.  Ranks that exchange
    wait for each other, so collections at moments of their own add up.  What dies by reference counting, as nearly everything in a step
    does, needs no collection.

    Args:
        every: steps; 0 leaves it to Python.

    Examples:
        >>> import gc
        >>> from mxep.train.garbage import GarbageCollection
        >>> with GarbageCollection(every=50) as garbage:
        ...     for step in range(1, 101):
        ...         garbage.after(step)
        >>> gc.isenabled()
        True
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled, self._compiled = False, False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        if self._every:
            gc.disable()
        return self

    def after(self, step: int) -> None:
        """What is due after this step: of the objects since the last collection, or of all after the first step, which compiles."""
        if not self._compiled:
            self._compiled = True
            self.collect()
        elif self._every and step % self._every == 0:
            gc.collect(1)

    def collect(self) -> None:
        """All objects, where ranks wait anyway: at evaluations and checkpoints."""
        if self._every:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._was_enabled:
            gc.enable()

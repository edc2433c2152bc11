"""Steps of a `Trainer`, one at a time."""

from __future__ import annotations

from mxep.train.loop import Trainer
from mxep.train.metrics import StepRecord


def done(run: Trainer) -> StepRecord:
    """A step and what it came to."""
    return run.finish(run.step())

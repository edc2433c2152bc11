"""Steps that are read after they were launched, so that a GPU finds its next work while the host reads what the last step came to.

A host that waits for every step begins each with an empty queue, and a forward of many small launches does not fill it again: on four
H200s 4 of 12 ms of a layer's forward.  So the trainer launches a step, and then reads the figures of the one before.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

_Moment = torch.cuda.Event | float


class Lap(NamedTuple):
    """From one moment to another, of the host or of a GPU's stream."""

    begin: _Moment
    end: _Moment

    def seconds(self) -> float:
        """How long it took; the host waits for its end."""
        if isinstance(self.begin, float) or isinstance(self.end, float):
            return float(self.end) - float(self.begin)  # type: ignore[arg-type]
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3

    def ended(self) -> bool:
        """Whether its end has come; nobody waits."""
        return isinstance(self.end, float) or self.end.query()


class StepClock:
    """Times steps where they run: from the end of the one before, so that nothing between two steps is in no step's time.

    Args:
        device: a GPU, whose current stream is timed, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last: _Moment | None = None

    def begin(self) -> None:
        """To be called before a step: it begins now, if `interrupt` came after the last one."""
        if self._last is None:
            self._last = self._now()

    def end(self) -> Lap:
        """To be called when all of the step has been launched."""
        assert self._last is not None
        lap = Lap(self._last, self._now())
        self._last = lap.end
        return lap

    def interrupt(self) -> None:
        """What follows is no step: an evaluation, a checkpoint."""
        self._last = None

    def _now(self) -> _Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Launched(NamedTuple):
    """A step on its way.

    Attributes:
        step: its number, counted from 1.  lr: of the step.  valid: targets of all ranks.
        attended: tokens that the attention of one spans, the mean, as if it were not causal.
        figures: (4,) float64 in the host's memory, there when `lap` has ended: loss summed over all ranks, gradient norm before clipping,
            largest expert load over the mean, experts that no token chose.
    """

    step: int
    lr: float
    valid: float
    attended: float
    figures: Tensor
    lap: Lap


class SkippedStep(NamedTuple):
    """A step of which the optimizer took nothing: why, how many in a row up to this one, and how many in the whole run."""

    step: int
    reason: str
    in_a_row: int
    total: int


class SkippedSteps:
    """Counts the steps whose gradient norm was not finite.

    Such a step leaves weights, moments, AdamW's own count of steps and the experts' bias as they are; data and schedule go on.

    Args:
        allowed: how many in a row do not end the run.

    Attributes:
        total, in_a_row: skipped so far, and since the last step that was taken.
        stop: why the run has to end; None until there were more than `allowed` in a row.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed, self.total, self.in_a_row = allowed, 0, 0
        self.stop: str | None = None

    def state_dict(self) -> dict[str, int]:
        """{"total": ..., "in_a_row": ...}."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.total, self.in_a_row = int(state["total"]), int(state["in_a_row"])

    def count(self, step: int, grad_norm: float, loss: float) -> SkippedStep | None:
        """Take a step's figures, in order; returns what is to be said of it when it was skipped."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return None
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        skipped = SkippedStep(step, f"gradient norm {grad_norm}, loss {loss}", self.in_a_row, self.total)
        if self.in_a_row > self.allowed:
            self.stop = (
                f"train: step {step}: {skipped.reason}; skipped {self.in_a_row} in a row, more than --max-skipped={self.allowed}; "
                f"the weights are those of step {step - self.in_a_row}: go on with --resume and a lower --lr, or a higher --max-skipped"
            )
        return skipped


def on_the_host(figures: Tensor) -> Tensor:
    """Figures of a step in the host's memory, once the current stream has come so far; nobody waits."""
    if figures.device.type == "cpu":
        return figures
    there = torch.empty(figures.shape, dtype=figures.dtype, device="cpu", pin_memory=True)
    return there.copy_(figures, non_blocking=True)

"""A window of steps under torch's profiler, one trace for each rank: <out>/profile/rank_00000.json, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

PROFILE_FOLDER = "profile"


class StepProfiler:
    """Records `steps` steps from step `first` on.

    Args:
        out: folder of the run.
        first: number of the first step that is recorded, counted from 1; None for none.
        steps: how many.
        device: whose kernels are recorded.
        host: record the host's work, too, which then takes longer; on a CPU there is nothing else.
    """

    def __init__(self, out: Path, first: int | None, steps: int, rank: int, device: torch.device, host: bool = True) -> None:
        self.path = out / PROFILE_FOLDER / f"rank_{rank:05d}.json"
        self.first, self.steps = first, steps
        on_gpu = device.type == "cuda"
        self._activities = [ProfilerActivity.CPU] * (host or not on_gpu) + [ProfilerActivity.CUDA] * on_gpu
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """To be called before the step of this number."""
        if step == self.first:
            self._profile = profile(activities=self._activities)
            self._profile.start()

    def waits(self, step: int) -> bool:
        """Whether the step of this number is to be done before the host goes on: the last one, or the one before the first."""
        return self.first is not None and step in (self.first - 1, self.first + self.steps - 1)

    def after(self, step: int, last: bool) -> str | None:
        """To be called after it; once a trace has been written, of how many steps and where. `last`: there is no step after this one."""
        if self._profile is None or self.first is None or (step < self.first + self.steps - 1 and not last):
            return None
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        self._profile = None
        recorded = step - self.first + 1  # fewer than asked for where the run ends first
        return f"profile of {recorded} step{'s' * (recorded > 1)}: {self.path.parent}"

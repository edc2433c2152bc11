"""Several runs of `mxep train` as processes side by side on one device, stopped in good order when their time is over (no torch here)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mxep.train.folder import CHECKPOINTS, list_checkpoints, step_of

LOG_FILE = "log.txt"
_POLL_S = 0.2
_SAY_EVERY_S = 20.0
_BROKEN_OFF = (130, -signal.SIGTERM)  # of a run that was stopped before it could listen
_KILL_AFTER_S = 180.0  # after the request to stop: a checkpoint must be written by then


@dataclass(frozen=True)
class Run:
    """One run: its recipe, its seed, its folder."""

    recipe: str
    seed: int
    folder: Path

    @property
    def step(self) -> int:
        """Steps in its newest checkpoint, 0 when there is none."""
        found = list_checkpoints(self.folder / CHECKPOINTS)
        return step_of(found[-1]) if found else 0

    @property
    def name(self) -> str:
        return self.folder.name


class _Process:
    """A run under way."""

    def __init__(self, run: Run, options: Sequence[str], environment: dict[str, str]) -> None:
        self.run = run
        run.folder.mkdir(parents=True, exist_ok=True)
        own = ["--recipe", run.recipe, "--seed", str(run.seed), "--out", str(run.folder), "--nproc", "1", "--resume", "auto"]
        with (run.folder / LOG_FILE).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mxep.cli", "train", *options, *own],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C reaches it through us alone, once
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


class SideBySide:
    """Runs that share a device until all are done, one fails, their time is over or a signal comes; the last three end every run after
    its step, with a checkpoint.

    Args:
        runs: those with all steps are left alone, those with a checkpoint go on from it.
        steps: of each run.
        options: of `mxep train`, for all of them.
        at_once: how many are under way together.
        deadline: by time.monotonic(), when all are asked to stop; None for never.
        say: takes a line about how far they are, now and then.
    """

    def __init__(
        self, runs: Sequence[Run], steps: int, options: Sequence[str], at_once: int, deadline: float | None, say: Callable[[str], None]
    ) -> None:
        self.waiting = [run for run in runs if run.step < steps]
        self.options, self.at_once, self.say = list(options), at_once, say
        self.deadline = deadline
        self.running: list[_Process] = []
        self.stopping_since: float | None = None
        self.failed: list[tuple[Run, int]] = []
        self.environment = dict(os.environ)
        self.environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // max(min(at_once, len(runs)), 1), 1)))

    def run(self, progress: Callable[[], str]) -> list[tuple[Run, int]]:
        """Until none is under way; returns the runs that failed, with their exit status. `progress` describes how far all are."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        said = time.monotonic()
        try:
            while self.running or (self.waiting and self.stopping_since is None):
                self._start_some()
                self._look()
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    self.say(progress())
                time.sleep(_POLL_S)
        finally:
            for process in self.running:
                process.stop(signal.SIGKILL)
                process.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.failed

    def _start_some(self) -> None:
        while self.waiting and len(self.running) < self.at_once and self.stopping_since is None:
            self.running.append(_Process(self.waiting.pop(0), self.options, self.environment))

    def _look(self) -> None:
        """Take note of what has ended and of the time."""
        for process in list(self.running):
            status = process.process.poll()
            if status is None:
                continue
            self.running.remove(process)
            if status and not (self.stopping_since is not None and status in _BROKEN_OFF):
                self.failed.append((process.run, status))
                self._stop(f"{process.run.name} failed")
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline and self.running:
            self._stop("time is over")
        if self.stopping_since is not None and now - self.stopping_since > _KILL_AFTER_S:
            for process in self.running:
                self.say(f"{process.run.name} did not end within {_KILL_AFTER_S:.0f} s and is killed")
                process.stop(signal.SIGKILL)

    def _stop(self, why: str) -> None:
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()
            self.say(f"{why}: every run ends after its step, with a checkpoint")
            for process in self.running:
                process.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(signal.Signals(number).name)


def log_tail(run: Run, lines: int = 15) -> str:
    """The last lines of what a run printed."""
    path = run.folder / LOG_FILE
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

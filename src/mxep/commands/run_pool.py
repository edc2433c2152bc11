"""Training runs of a comparison, each in a process of its own: `mxep convergence` and `mxep lora-convergence`."""

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

from mxep.train.rank_control import GUARD_VARIABLE, describe_guard, stop_signals
from mxep.train.run_folder import CHECKPOINTS, list_checkpoints, step_of

LOG_FILE = "log.txt"
_POLL_S, _PROGRESS_S = 0.2, 20.0
_STOPPED = (130, -signal.SIGTERM)  # exit status of a run that was stopped before it handled signals
_KILL_AFTER_S = 180.0  # from the request to stop: time to write a checkpoint


@dataclass(frozen=True)
class SeedRun:
    """One run: its recipe or the name of its arm, its seed and folder, and the options of `mxep train` that its arm adds."""

    recipe: str
    seed: int
    folder: Path
    options: tuple[str, ...]

    @property
    def step(self) -> int:
        """Step of its newest checkpoint, 0 without one."""
        found = list_checkpoints(self.folder / CHECKPOINTS)
        return step_of(found[-1]) if found else 0

    @property
    def name(self) -> str:
        return self.folder.name


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


class RunPool:
    """Runs on one device, each in a process, until all are done, one fails, the deadline passes or a signal arrives.

    A failure, the deadline, a signal and the end of this process stop every run after its current step, with a checkpoint.

    Args:
        runs: what to run, in this order.
        command: the words after `python -m mxep` for a run, which ends with status 0 when SIGTERM has stopped it with a checkpoint, and
            calls `watch_starter`.
        at_once: how many run at the same time.
        deadline: on time.monotonic()'s clock, None for none.
        say: receives progress lines.
    """

    def __init__(
        self,
        runs: Sequence[SeedRun],
        command: Callable[[SeedRun], list[str]],
        at_once: int,
        deadline: float | None,
        say: Callable[[str], None],
    ) -> None:
        self.waiting = [*runs]
        self.command, self.at_once, self.deadline, self.say = command, at_once, deadline, say
        self.running: dict[SeedRun, subprocess.Popen[bytes]] = {}
        self.stopping_since: float | None = None
        self.failed: list[tuple[SeedRun, int]] = []
        self.environment = dict(os.environ)
        self.environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // max(min(at_once, len(runs)), 1), 1)))

    def run(self, progress: Callable[[], str]) -> list[tuple[SeedRun, int]]:
        """Waits for all processes; returns the runs that failed, with their exit status. `progress` describes all runs in a line."""
        said = time.monotonic()
        guard, kept_open = os.pipe()
        self.environment[GUARD_VARIABLE] = describe_guard(guard)
        with stop_signals(self._on_signal):
            try:
                while self.running or (self.waiting and self.stopping_since is None):
                    while self.waiting and len(self.running) < self.at_once and self.stopping_since is None:
                        self._start(self.waiting.pop(0), guard)
                    self._collect()
                    if time.monotonic() - said > _PROGRESS_S:
                        said = time.monotonic()
                        self.say(progress())
                    time.sleep(_POLL_S)
            finally:
                for process in self.running.values():
                    process.kill()
                    process.wait()
                os.close(guard)
                os.close(kept_open)
        return self.failed

    def print_failures(self, program: str) -> None:
        """The end of each failed run's output, on stderr."""
        for run, status in self.failed:
            print(f"{program}: {run.name} ended with status {status}:\n{log_tail(run)}", file=sys.stderr)

    def _start(self, run: SeedRun, guard: int) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        with (run.folder / LOG_FILE).open("ab") as log:
            process = self.running[run] = subprocess.Popen(
                [sys.executable, "-m", "mxep", *self.command(run)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(guard,),
                process_group=0,  # Ctrl-C reaches it once, through this process
            )
        if self.stopping_since is not None:  # by a signal between the check and here
            process.terminate()

    def _collect(self) -> None:
        """Removes processes that ended, and stops the others if one failed or the deadline passed."""
        for run, process in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[run]
            if status and not (self.stopping_since is not None and status in _STOPPED):
                self.failed.append((run, status))
                self._stop(f"{run.name} failed")
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline and self.running:
            self._stop("--seconds have passed")
        if self.stopping_since is not None and now - self.stopping_since > _KILL_AFTER_S:
            for run, process in self.running.items():
                self.say(f"{run.name} did not end within {_KILL_AFTER_S:.0f} s and is killed")
                process.kill()

    def _stop(self, why: str) -> None:
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()
            self.say(f"{why}: every run ends after its step, with a checkpoint")
            for process in self.running.values():
                process.terminate()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(signal.Signals(number).name)


def log_tail(run: SeedRun) -> str:
    """The last 15 lines of a run's output."""
    path = run.folder / LOG_FILE
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

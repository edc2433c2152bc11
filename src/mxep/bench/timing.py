"""Times of several arms of one measurement, taken in turns: device events, warm-up, a barrier before each timed run, medians.

The chip is limited by power and its clock falls over the first 100 ms of work, so every arm is warmed up in every round, for 150 ms where
a benchmark does not say otherwise: after 30 ms a GEMM still runs on the clock that a memory-bound neighbour has left it, up to 10% too
fast.  Arms of one kind beside each other leave each other their clock and want less.  Over several ranks a run lasts as long as its
slowest rank.

Two things make a reading worthless that its percentiles hide, so both are kept with it: rounds whose medians differ (`round_spread`), and
runs that the device had reached before the host had launched them (`host_behind`), in which the clock ran while the device waited.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

Stage = Callable[[], object]
Arm = Mapping[str, Stage]  # stage name -> work, one after the other; "" for the only stage of an arm
Mark = torch.cuda.Event | float
LEAST_RUNS = 20
MOST_SPREAD = 1.08  # of the rounds' medians: single readings on a quiet machine differ by 3 to 6%
MOST_BEHIND = 0.2  # of the runs: beyond that p80 is the host's
_MOST_WARM_RUNS = 2000
_CYCLES_PER_MS = 2_000_000  # of a GPU at its highest clock; at a lower one it waits longer


@dataclass(frozen=True)
class Rounds:
    """How often: `count` rounds, in each of them every arm runs warm for a while and then `timed` times under the clock."""

    count: int = 2
    timed: int = 10
    warm_ms: float = 150.0  # of the arm itself, before its timed runs of every round
    hold_ms: float = 0.0  # for which a GPU waits before them: the host gets ahead of kernels that are as short as their launches

    def __post_init__(self) -> None:
        if self.count * self.timed < LEAST_RUNS:
            raise ValueError(f"rounds: {self.count} x {self.timed} runs, want at least {LEAST_RUNS} for a median")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one arm or stage, over `runs` runs."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int
    round_spread: float = 1.0  # largest over smallest median of a round
    host_behind: float = 0.0  # share of the runs that the device had reached before the host had launched all of them

    @staticmethod
    def of(samples_ms: list[float], rounds: int = 1, host_behind: float = 0.0) -> Timing:
        """Median and percentiles of all runs, one round's after the other's, equally many in each.

        >>> Timing.of([3.0, 1.0, 2.0, 5.0, 4.0])
        Timing(median_ms=3.0, p20_ms=1.8, p80_ms=4.2, runs=5, round_spread=1.0, host_behind=0.0)
        >>> Timing.of([2.0, 2.0, 2.5, 2.5], rounds=2).round_spread
        1.25
        """
        ordered = torch.tensor(samples_ms, dtype=torch.float64)
        low, high = torch.quantile(ordered, torch.tensor([0.2, 0.8], dtype=torch.float64)).tolist()
        middles = ordered.view(rounds, -1).quantile(0.5, dim=1)
        spread = (middles.max() / middles.min()).item()
        median = statistics.median(samples_ms)
        return Timing(round(median, 5), round(low, 5), round(high, 5), len(samples_ms), round(spread, 4), round(host_behind, 4))

    @property
    def unsteady(self) -> bool:
        """Rounds that differ by more than a reading may."""
        return self.round_spread > MOST_SPREAD

    @property
    def host_bound(self) -> bool:
        """So many runs in which the device waited for the host that the percentiles tell of the host."""
        return self.host_behind > MOST_BEHIND

    def record(self) -> dict[str, float]:
        """The fields of a JSON record."""
        return asdict(self)


def mark(device: torch.device) -> Mark:
    """Now, on the device's own time line."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Mark, end: Mark) -> float:
    """Milliseconds between two marks; the device has passed both."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end)
    assert not isinstance(end, torch.cuda.Event)
    return 1e3 * (end - start)


def passed(point: Mark) -> bool:
    """Whether the device has gone past a mark already; False where the host itself does the work."""
    return isinstance(point, torch.cuda.Event) and point.query()


def hold(device: torch.device, ms: float) -> None:
    """Let a GPU wait for about `ms` in stream order while the host goes on; a CPU, which has nothing to queue, goes on at once."""
    if device.type == "cuda" and ms > 0:
        torch.cuda._sleep(round(ms * _CYCLES_PER_MS))


def finish(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # host sync: the end of a measurement


def barrier(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """All ranks start together, in stream order: the host does not wait, so its launches stay ahead."""
    if group is not None:
        dist.all_reduce(torch.zeros((), device=device), group=group)


def largest(values: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Each value's maximum over the ranks."""
    if group is None or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def run_arm(arm: Arm) -> None:
    """Every stage once."""
    for stage in arm.values():
        stage()


def _warm_runs(arm: Arm, warm_ms: float, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """How many runs take `warm_ms`, the same number on every rank; the arm has compiled what it needs afterwards."""
    run_arm(arm)
    finish(device)
    start = time.perf_counter()
    run_arm(arm)
    finish(device)
    runs = warm_ms / max(1e3 * (time.perf_counter() - start), 1e-3)
    return min(math.ceil(largest([runs], device, group)[0]), _MOST_WARM_RUNS)


def _timed_run(arm: Arm, device: torch.device) -> tuple[list[Mark], list[float]]:
    """One run: marks before, between and behind the stages, and for every stage and the total 1.0 where the host fell behind, else 0.0.

    A device that has work queued reaches a stage long after the host has launched it.  One that is past the stage's start when the
    launches are done may have waited for them, with the clock running.
    """
    marks, behind = [mark(device)], []
    for stage in arm.values():
        stage()
        behind.append(float(passed(marks[-1])))
        marks.append(mark(device))
    return marks, [*behind, max(behind)]


def _share(flags: list[float]) -> float:
    return sum(flags) / len(flags)


def time_arms(
    arms: Mapping[str, Arm], device: torch.device, rounds: Rounds | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Timing]:
    """Every arm in turns.

    Args:
        arms: name -> stages.  group: the ranks that run this together, None for one.

    Returns:
        a `Timing` under the arm's name, and for an arm of several stages under `<arm>_<stage>` and `<arm>_total`; ms, largest over ranks.
    """
    rounds = rounds or Rounds()
    warm = {name: _warm_runs(arm, rounds.warm_ms, device, group) for name, arm in arms.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in arms}
    behind: dict[str, list[list[float]]] = {name: [] for name in arms}
    for _ in range(rounds.count):
        for name, arm in arms.items():
            for _ in range(max(1, warm[name])):
                run_arm(arm)
            hold(device, rounds.hold_ms)
            runs = []
            for _ in range(rounds.timed):
                barrier(device, group)
                marks, late = _timed_run(arm, device)
                runs.append(marks)
                behind[name].append(late)
            finish(device)
            samples[name] += [[between_ms(a, b) for a, b in zip(run, [*run[1:], run[-1]], strict=True)] for run in runs]
            for run, times in zip(runs, samples[name][-len(runs) :], strict=True):
                times[-1] = between_ms(run[0], run[-1])  # the total
    found: dict[str, Timing] = {}
    for name, arm in arms.items():
        columns = [largest(list(column), device, group) for column in zip(*samples[name], strict=True)]
        shares = largest([_share(list(column)) for column in zip(*behind[name], strict=True)], device, group)
        timings = [Timing.of(column, rounds.count, share) for column, share in zip(columns, shares, strict=True)]
        names = [name] if len(arm) == 1 else [f"{name}_{stage}" for stage in (*arm, "total")]
        found |= dict(zip(names, timings[-len(names) :], strict=True))
    return found

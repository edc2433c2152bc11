"""Times of several arms of one measurement, interleaved: device events, warm-up, a barrier before each timed run, medians.

The GPU is limited by power, and its clock falls over the first 100 ms of work.  Every arm is therefore warmed up in every round, for 150 ms
unless a benchmark sets another time: after 30 ms a GEMM still runs on the clock that a preceding memory-bound arm has left, up to 10% too
fast.  Successive arms of one kind do not change the clock for each other and need less.  Over several ranks a run lasts as long as its
slowest rank.

Two things make a reading worthless without showing in its percentiles, so both are recorded with it: rounds whose medians differ
(`round_spread`), and runs that the device reached before the host had launched them (`host_behind`), in which the device waited while the
clock ran.

A GPU that another process uses as well takes turns with it, and the slowest rank's time is recorded.  `check_equal_speed` finds such a
GPU before several ranks are measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap
from typing import Any

import torch
import torch.distributed as dist

from mxep.comm.collective import gather_objects

Stage = Callable[[], object]
Arm = Mapping[str, Stage]  # stage name -> work, in sequence; "" for the only stage of an arm
Mark = torch.cuda.Event | float
MIN_RUNS = 20
MAX_SPREAD = 1.08  # of the rounds' medians: single readings on an idle machine differ by 3 to 6%
MAX_HOST_LATE = 0.2  # of the runs: above it p80 is the host's
MAX_SLOWER = 1.25  # a rank's GPU than the fastest: GPUs of one model differ by some 5%
_MAX_WARM_RUNS = 2000
_CYCLES_PER_MS = 2_000_000  # of a GPU at its highest clock; at a lower one it waits longer


@dataclass(frozen=True)
class Rounds:
    """How often arms run: `count` rounds, in each of which every arm is warmed up and then timed `timed` times."""

    count: int = 2
    timed: int = 10
    warm_ms: float = 150.0  # of the arm itself, before its timed runs of every round
    hold_ms: float = 0.0  # a GPU waits so long before them, and the host gets ahead of kernels that are as short as their launches

    def __post_init__(self) -> None:
        if self.count * self.timed < MIN_RUNS:
            raise ValueError(f"rounds: {self.count} x {self.timed} runs, want at least {MIN_RUNS} for a median")


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
        """Median and percentiles of all runs; `samples_ms` has the rounds in sequence, with equally many runs each.

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
        """The rounds differ by more than readings on an idle machine do."""
        return self.round_spread > MAX_SPREAD

    @property
    def host_bound(self) -> bool:
        """The device waited for the host in so many runs that the percentiles measure the host."""
        return self.host_behind > MAX_HOST_LATE


def mark(device: torch.device) -> Mark:
    """This point of the device's stream, or of time on a CPU."""
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
    """True if the device has passed a mark already; False on a CPU, where the host itself does the work."""
    return isinstance(point, torch.cuda.Event) and point.query()


def hold(device: torch.device, ms: float) -> None:
    """A GPU waits for about `ms` in stream order while the host continues; a CPU does not wait."""
    if device.type == "cuda" and ms > 0:
        torch.cuda._sleep(round(ms * _CYCLES_PER_MS))


def synchronize(device: torch.device) -> None:
    """Waits until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # host sync: the end of a measurement


def barrier(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """All ranks start together, in stream order: the host does not wait, so it stays ahead."""
    if group is not None:
        dist.all_reduce(torch.zeros((), device=device), group=group)


def max_over_ranks(values: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Each value's maximum over the ranks."""
    if group is None or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def run_arm(arm: Arm) -> None:
    """Runs every stage once."""
    for stage in arm.values():
        stage()


def _warm_runs(arm: Arm, warm_ms: float, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """How many runs take `warm_ms`, the same number on every rank; also compiles what the arm needs."""
    run_arm(arm)
    synchronize(device)
    start = time.perf_counter()
    run_arm(arm)
    synchronize(device)
    runs = warm_ms / max(1e3 * (time.perf_counter() - start), 1e-3)
    return min(math.ceil(max_over_ranks([runs], device, group)[0]), _MAX_WARM_RUNS)


def _timed_run(arm: Arm, device: torch.device) -> tuple[list[Mark], list[float]]:
    """One run: marks before, between and after the stages; for every stage and the total 1.0 if the host was late, else 0.0.

    A device that has work queued reaches a stage long after the host has launched it.  A device that has passed the start of a stage when
    its launches are done may have waited for them while the clock ran.
    """
    marks, late = [mark(device)], []
    for stage in arm.values():
        stage()
        late.append(float(passed(marks[-1])))
        marks.append(mark(device))
    return marks, [*late, max(late)]


def time_arms(arms: Mapping[str, Arm], device: torch.device, rounds: Rounds, group: dist.ProcessGroup | None = None) -> dict[str, Timing]:
    """Times all arms, interleaved.

    Args:
        arms: name -> stages.  group: the ranks that run this together, None for one.

    Returns:
        a `Timing` by the arm's name, for an arm of several stages by `<arm>_<stage>` and `<arm>_total`; ms, the maximum over ranks.
    """
    warm = {name: _warm_runs(arm, rounds.warm_ms, device, group) for name, arm in arms.items()}
    runs: dict[str, list[tuple[list[Mark], list[float]]]] = {name: [] for name in arms}
    for _ in range(rounds.count):
        for name, arm in arms.items():
            for _ in range(max(1, warm[name])):
                run_arm(arm)
            hold(device, rounds.hold_ms)
            for _ in range(rounds.timed):
                barrier(device, group)
                runs[name].append(_timed_run(arm, device))
            synchronize(device)
    found: dict[str, Timing] = {}
    for name, arm in arms.items():
        times = [[*starmap(between_ms, pairwise(marks)), between_ms(marks[0], marks[-1])] for marks, _ in runs[name]]
        columns = [max_over_ranks(list(column), device, group) for column in zip(*times, strict=True)]
        late = max_over_ranks([statistics.fmean(flags) for flags in zip(*(late for _, late in runs[name]), strict=True)], device, group)
        timings = [Timing.of(column, rounds.count, share) for column, share in zip(columns, late, strict=True)]
        names = [name] if len(arm) == 1 else [f"{name}_{stage}" for stage in (*arm, "total")]
        found |= dict(zip(names, timings[-len(names) :], strict=True))
    return found


def use_expandable_segments() -> None:
    """The GPU's memory serves arms of all sizes in turn, as in `mxep train`."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # torch has no public name for it


def product_ms(device: torch.device, side: int = 4096, products: int = 100) -> float:
    """Milliseconds of that many square bf16 products, after as many for warming up; about 20 on an H100, several turns of its processes."""
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    for _ in range(2):
        start = mark(device)
        for _ in range(products):
            torch.mm(a, a, out=out)
        end = mark(device)
        synchronize(device)
    return between_ms(start, end)


def check_equal_speed(device: torch.device, group: dist.ProcessGroup | None, measure: Callable[[torch.device], float] = product_ms) -> None:
    """Compares the speed of all ranks' devices at the same work, `measure` in milliseconds.

    Raises:
        ValueError: on every rank: some are slower than the fastest one by more than `MAX_SLOWER`.
    """
    if group is None:
        return
    barrier(device, group)
    times = gather_objects(measure(device), group)
    slow = [f"rank {rank} in {ms:.1f} ms" for rank, ms in enumerate(times) if ms > MAX_SLOWER * min(times)]
    if slow:
        raise ValueError(
            f"the same products take {', '.join(slow)}, and {min(times):.1f} ms on the fastest rank, want equal GPUs: end what else runs "
            "on them (`nvidia-smi` lists it), or look there whether their clocks are limited"
        )


CALLS = 10  # of an arm
MAX_HOST_SPREAD = 1.25  # median over lowest batch
_BATCH, _BATCHES = 50, 7  # calls between two waits for the device

Call = Callable[[], object]


def captured(call: Call, device: torch.device, calls: int = CALLS) -> Arm:
    """That many calls in sequence, on a GPU as one CUDA graph."""
    if device.type != "cuda":
        return {"": lambda: [call() for _ in range(calls)]}
    call()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return {"": graph.replay}


def host_facts(calls: Mapping[str, Call], device: torch.device, batch: int = _BATCH) -> dict[str, Any]:
    """For a record: `host_us`, what each call costs the host, and `host_unsteady`, the calls during which the host had other work.

    A call's microseconds are the median over batches of `batch` calls; on a host that does nothing else the lowest batch is close to it.
    """
    batches = {name: host_batches_us(call, device, batch) for name, call in calls.items()}
    median = {name: statistics.median(found) for name, found in batches.items()}
    return {
        "host_us": {name: round(us, 1) for name, us in median.items()},
        "host_unsteady": [name for name, us in median.items() if us > MAX_HOST_SPREAD * min(batches[name])],
    }


def host_facts_of(arms: Mapping[str, Arm], device: torch.device, batch: int) -> dict[str, Any]:
    """`host_facts` of all stages of each arm, and `host_us_calling_thread`: the same with backward in the calling thread.

    By default torch runs backward of a GPU's tensors in a thread of its own, which costs the host more.
    """
    calls = {name: partial(run_arm, arm) for name, arm in arms.items()}
    found = host_facts(calls, device, batch)
    with torch.autograd.set_multithreading_enabled(False):
        own = host_facts(calls, device, batch)
    unsteady = [name for name in calls if name in (*found["host_unsteady"], *own["host_unsteady"])]
    return found | {"host_us_calling_thread": own["host_us"], "host_unsteady": unsteady}


def host_batches_us(call: Call, device: torch.device, batch: int) -> list[float]:
    """Host microseconds of a call, by batch; a batch fits into the device's queue, so that the host never waits within it.

    On a CPU, which has no queue, each batch is one call.
    """
    found = []
    batch = batch if device.type == "cuda" else 1
    for _ in range(_BATCHES):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(batch):
            call()
        found.append(1e6 * (time.perf_counter() - start) / batch)
    synchronize(device)
    return found[1:]  # the first one warms up

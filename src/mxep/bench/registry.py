"""The benchmarks by name, what each of them hands over, and how one is run: check first, then the clock, then table and record."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import mxep.operators  # noqa: F401, binds torch.ops.mxep
from mxep.bench.records import device_name, origin
from mxep.bench.timing import MOST_BEHIND, MOST_SPREAD, Arm, Rounds, Timing, time_arms

# Kernels bound by memory leave each other their clock, GEMMs nearly so; many short rounds, since it is rounds that differ.
_EXCHANGES = Rounds(count=3, timed=10, warm_ms=40.0, hold_ms=10.0)
_PIPELINES = Rounds(hold_ms=25.0)  # at narrow rows a call of the host takes longer than the GPU's work
_SYNC_FREE = Rounds(count=3, timed=7, warm_ms=100.0, hold_ms=15.0)  # in a model the host is ahead of a layer that it does not wait for
_LAYERS = Rounds(count=3, timed=7, warm_ms=100.0)
_MOVERS = Rounds(count=5, timed=6, warm_ms=60.0, hold_ms=5.0)
_GEMMS = Rounds(count=5, timed=6, warm_ms=100.0)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the module with `cases(setting)`, what it measures, whether it runs on several ranks, and how often each arm runs."""

    module: str
    what: str
    several: bool = False
    rounds: Rounds = field(default_factory=Rounds)


BENCHMARKS: dict[str, Benchmark] = {  # by the name on the command line
    "quantize": Benchmark("mxep.bench.quantize", "quantise and dequantise, against a device copy of as many bytes", rounds=_MOVERS),
    "rows": Benchmark("mxep.bench.rows", "gather, scatter and rebase rows, against a device copy of as many bytes", rounds=_MOVERS),
    "swiglu": Benchmark(
        "mxep.bench.swiglu",
        "activations and their gradients with the quantiser, against a device copy of as many bytes",
        rounds=_MOVERS,
    ),
    "grouped-mm": Benchmark(
        "mxep.bench.grouped_mm", "grouped GEMM forward, dgrad and wgrad, against torch in bf16 and dense FP8", rounds=_GEMMS
    ),
    "experts": Benchmark("mxep.bench.experts", "the experts' SwiGLU, forward and backward, against torch in bf16", rounds=_GEMMS),
    "transformers": Benchmark(
        "mxep.bench.transformers_experts", "experts of transformers' models by the adapter, against its own in bf16", rounds=_GEMMS
    ),
    "transformers-ep": Benchmark(
        "mxep.bench.transformers_exchange", "the same spread over ranks, tokens exchanged, against its own exchange", True, _SYNC_FREE
    ),
    "a2a": Benchmark("mxep.bench.a2a", "rows to their ranks as MXFP8, against bf16 over the same transport", True, _EXCHANGES),
    "layer": Benchmark("mxep.bench.layer", "the whole MoE layer, router to output, against bf16 over the same transport", True, _LAYERS),
    "pipeline": Benchmark(
        "mxep.bench.pipeline", "dispatch to combine, forward and backward, against bf16 over the same transport", True, _PIPELINES
    ),
}


@dataclass(frozen=True)
class Setting:
    """Where, how large, how often: quick is one small set of shapes; on a CPU the shapes are tiny and only exercise the code.

    `rounds` None takes what the case or else the benchmark says.  `size`: (T_global, D, H, E, C) of the only layer to run.
    """

    device: torch.device
    quick: bool = False
    group: dist.ProcessGroup | None = None
    rounds: Rounds | None = None
    size: tuple[int, int, int, int, int] | None = None

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


@dataclass(frozen=True)
class Figure:
    """A ratio between arms of one run, and what it is asked to be (None: nothing).

    `limit` is the same ratio of a reference arm: as many bytes or operations as plain copies or dense GEMMs do them, one GPU that exchanges
    nothing.  It is measured, so a value may come out above it, and an arm that hides what the reference does in turn may go far beyond.
    """

    value: float
    limit: float
    target: float | None = None


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        title: what the progress line calls it.  shape: the record's shape; cases of one shape and `facts` share a record.
        arms: what is timed.  check: what is wrong with the results, None when nothing is; called first, the same answer on every rank.
        judge: figures from the timings.  facts: further fields of the record.
        after: called when the arms have been timed; returns further fields of the record.
        rounds: how often each arm runs, None: as the benchmark says.
    """

    title: str
    shape: dict[str, int]
    arms: Mapping[str, Arm]
    check: Callable[[], str | None]
    judge: Callable[[Mapping[str, Timing]], dict[str, Figure]]
    facts: dict[str, Any] = field(default_factory=dict)
    after: Callable[[], dict[str, Any]] | None = None
    rounds: Rounds | None = None


class CheckFailedError(RuntimeError):
    """A benchmark's results are wrong, so it has no times."""


def cases_of(name: str, setting: Setting) -> Iterator[Case]:
    """The cases of a benchmark, built one by one, so that only one holds memory.

    Raises:
        ValueError: no benchmark of that name, or one that this machine does not run.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark {name!r}, want one of {', '.join(BENCHMARKS)}")
    cases: Iterator[Case] = importlib.import_module(BENCHMARKS[name].module).cases(setting)
    return cases


def run(
    name: str,
    setting: Setting,
    command: str,
    say: Callable[[str], None] = print,
    keep: Callable[[list[dict[str, Any]]], object] | None = None,
) -> list[dict[str, Any]]:
    """Run every case of a benchmark; returns its records, and says which arms' times are worth little.

    `keep` gets the records so far after every case, so that a run which is broken off leaves what it has measured.

    Raises:
        CheckFailedError: results that are wrong; nothing of this case was timed.
        ValueError: see `cases_of`.
    """
    records: list[dict[str, Any]] = []
    for case in cases_of(name, setting):
        problem = case.check()
        if problem is not None:
            raise CheckFailedError(f"{name}, {case.title}: {problem}; no times")
        rounds = setting.rounds or case.rounds or BENCHMARKS[name].rounds
        timings = time_arms(case.arms, setting.device, rounds, setting.group)
        figures = case.judge(timings)
        further = case.after() if case.after is not None else {}
        say(f"{name}: {case.title}: checked, " + ", ".join(f"{key} {figure.value:.2f}" for key, figure in figures.items()))
        for doubt in doubts(timings, further.get("host_unsteady", [])):
            say(f"{name}: {case.title}: {doubt}")
        _add(records, name, case, timings, figures, further, setting, command)
        if keep is not None:
            keep(records)
        del case, timings, figures  # and with them the case's tensors, before the next one is made
    return records


def doubts(timings: Mapping[str, Timing], host_unsteady: Sequence[str] = ()) -> list[str]:
    """What speaks against the times of a run, a sentence each; `host_unsteady`: calls whose time on the host differs."""
    unsteady = [f"{arm} by {timing.round_spread - 1:.0%}" for arm, timing in timings.items() if timing.unsteady]
    waited = [f"{arm} in {timing.host_behind:.0%}" for arm, timing in timings.items() if timing.host_bound]
    found = []
    if unsteady:
        found.append(f"WARNING, unsteady: medians of rounds differ by more than {MOST_SPREAD - 1:.0%}: {', '.join(unsteady)}")
    if waited:
        found.append(f"WARNING, host-bound: the device may have waited for the host in more than {MOST_BEHIND:.0%}: {', '.join(waited)}")
    if host_unsteady:
        found.append(f"WARNING, the host was busy elsewhere: microseconds of the host differ between batches: {', '.join(host_unsteady)}")
    return found


def _add(
    records: list[dict[str, Any]],
    name: str,
    case: Case,
    timings: Mapping[str, Timing],
    figures: Mapping[str, Figure],
    further: Mapping[str, Any],
    setting: Setting,
    command: str,
) -> None:
    """Put a case into the record of its shape and facts, a new one where there is none yet."""
    same = [record for record in records if record["shape"] == case.shape and case.facts.items() <= record.items()]
    if not same:
        records.append(
            {
                "benchmark": name.replace("-", "_"),
                "device": device_name(setting.device),
                "world_size": setting.world,
                "shape": case.shape,
                **case.facts,
                "arms": {},
                "ratios": {},
                "limit": {},
                "target": {},
                "unsteady": [],
                "host_bound": [],
                **origin(command),
            }
        )
    record = same[0] if same else records[-1]
    record["arms"] |= {arm: timing.record() for arm, timing in timings.items()}
    record["unsteady"] += [arm for arm, timing in timings.items() if timing.unsteady]
    record["host_bound"] += [arm for arm, timing in timings.items() if timing.host_bound]
    record["ratios"] |= {key: round(figure.value, 4) for key, figure in figures.items()}
    record["limit"] |= {key: round(figure.limit, 4) for key, figure in figures.items()}
    record["target"] |= {key: figure.target for key, figure in figures.items() if figure.target is not None and not setting.tiny}
    record.update(further)

"""The benchmarks by name, what each of them provides, and how one runs: it checks the results, times the arms, makes the record."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch.distributed as dist

import mxep.operators  # noqa: F401, binds torch.ops.mxep
from mxep.bench.records import Record, device_name, origin
from mxep.bench.timing import MAX_HOST_LATE, MAX_SPREAD, Arm, Rounds, Timing, check_equal_speed, time_arms

# Arms that are all memory-bound do not change the GPU's clock for each other, GEMMs nearly so: they need many short rounds, since the
# differences are between rounds.
_EXCHANGES = Rounds(count=3, timed=10, warm_ms=40.0, hold_ms=10.0)
_PIPELINES = Rounds(hold_ms=25.0)  # at narrow rows a call of the host takes longer than the GPU's work
_SYNC_FREE = Rounds(count=3, timed=7, warm_ms=100.0, hold_ms=15.0)  # in a model the host is ahead of a layer without a host sync
_LAYERS = Rounds(count=3, timed=7, warm_ms=100.0)
_MEMORY_BOUND = Rounds(count=5, timed=6, warm_ms=60.0, hold_ms=5.0)
_GEMMS = Rounds(count=5, timed=6, warm_ms=100.0)
# Of a compiled function.  By default torch.compile compiles 8 and calls the function uncompiled for others, after a warning in a log.
_MOST_SHAPES = 64


_T = TypeVar("_T")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        cases: "module:function" below `mxep.bench`; the function takes a `Setting` and yields `Case`s.
        rounds: how often each arm runs, unless the case has its own.
        what: one line for `mxep bench --help`.
        distributed: it runs on several ranks.
    """

    cases: str
    rounds: Rounds
    what: str
    distributed: bool = False


BENCHMARKS = {  # by the name on the command line
    "quantize": Benchmark("memory_bound:quantize_cases", _MEMORY_BOUND, "quantise and dequantise, against a device copy of as many bytes"),
    "rows": Benchmark("memory_bound:rows_cases", _MEMORY_BOUND, "gather, scatter and rebase rows, against a device copy of as many bytes"),
    "swiglu": Benchmark("memory_bound:swiglu_cases", _MEMORY_BOUND,
        "activation + quantise, forward and backward, against a device copy of as many bytes"),
    "optimizer": Benchmark("optimizer_step:cases", _MEMORY_BOUND,
        "AdamW's step and torchao's low-memory ones, against a device copy of as many bytes"),
    "grouped-mm": Benchmark("grouped_mm:cases", _GEMMS, "grouped GEMM: forward, dgrad and wgrad, against torch in bf16 and dense FP8"),
    "experts": Benchmark("experts:cases", _GEMMS, "the experts' FFN, forward and backward, against torch in bf16"),
    "peers": Benchmark("peers:cases", _GEMMS,
        "experts of one GPU from given choices, against torch eager and compiled and other packages"),
    "linears": Benchmark("dense_linears:cases", _GEMMS, "dense linear layers, forward and backward, against torch.nn.Linear in bf16"),
    "attention": Benchmark("attention:cases", _GEMMS, "attention of whole sequences and within documents, by each --attn-implementation"),
    "transformers": Benchmark("transformers:cases", _GEMMS,
        "experts of Hugging Face models through the adapter, against transformers in bf16"),
    "transformers-step": Benchmark("transformers_step:cases", _GEMMS,
        "a training step of a Hugging Face model after `transformers_5.accelerate`, against bf16"),
    "finetune": Benchmark("finetune:cases", _GEMMS,
        "fine-tuning of a whole Hugging Face model on one GPU: LoRA on a base in MXFP8 and in bf16, and all parameters"),
    "transformers-ep": Benchmark("transformers:ep_cases", _SYNC_FREE,
        "experts of Hugging Face models under expert parallelism, against transformers' own exchange in bf16", distributed=True),
    "accuracy": Benchmark("accuracy:cases", _EXCHANGES,
        "dB of the five blocks in MXFP8, against the same in bf16; nothing is timed", distributed=True),
    "a2a": Benchmark("a2a:cases", _EXCHANGES, "all-to-all with rows as MXFP8, against bf16 over NCCL", distributed=True),
    "layer": Benchmark("layer:cases", _LAYERS, "the whole MoE layer, router to output, against bf16 over NCCL", distributed=True),
    "pipeline": Benchmark("pipeline:cases", _PIPELINES,
        "dispatch to combine, forward and backward, against bf16 over NCCL", distributed=True),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Device, ranks and sizes of a run: quick is one small set of shapes; on a CPU the shapes are tiny and only exercise the code.

    `rounds` takes precedence over the case's and the benchmark's.  `size`: (T_global, D, H, E, C) of the only layer to run.  Of `peers`:
    `peers`, the only ones of `peer_arms.PEERS` to run; `only`, which the titles of all cases to run contain.

    Of `finetune`: `arms`, the only ones to run; `model` and its `layers`; `sequences` of a step; `memory_gib`, within which activations
    are kept; `cuda_graph`, whether steps are replayed.
    """

    device: torch.device
    quick: bool = False
    group: dist.ProcessGroup | None = None
    rounds: Rounds | None = None
    size: tuple[int, int, int, int, int] | None = None
    peers: tuple[str, ...] = ()
    only: str = ""
    arms: tuple[str, ...] = ()
    model: str | None = None
    layers: int | None = None
    sequences: int | None = None
    memory_gib: float | None = None
    cuda_graph: bool = False

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    def choose(self, every: Sequence[_T], tiny: Sequence[_T], quick: Sequence[_T] | None = None) -> Sequence[_T]:
        """Which cases to run: `tiny` on a CPU; if it is to be quick `quick`, by default the first of `every`; else all."""
        if self.tiny:
            return tiny
        if self.quick:
            return every[:1] if quick is None else quick
        return every

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


@dataclass(frozen=True)
class Figure:
    """A ratio between arms of one run, its limit and its target (None: it has none).

    `limit` is the same ratio of a reference arm: plain copies or dense GEMMs of as many bytes or operations, or one GPU that exchanges
    nothing.  It is measured, so a value may exceed it; an arm that overlaps what the reference does in sequence may exceed it by far.
    """

    value: float
    limit: float | None
    target: float | None = None


def speed_ups(ms: Mapping[str, float], arm: str, baseline: str, limit: str | None, name: str) -> dict[str, Figure]:
    """Speed of an arm's forward, backward and both against the baseline's.

    Args:
        ms: milliseconds by arm and stage, "ARM_STAGE".
        limit: the arm that is the reference: a simpler program that does the unavoidable work.  None: this run has none.
        name: of the figures, with "{stage}" in it.
    """
    figures = {}
    for stage in ("forward", "backward", "total"):
        base = ms[f"{baseline}_{stage}"]
        figures[name.format(stage=stage)] = Figure(base / ms[f"{arm}_{stage}"], base / ms[f"{limit}_{stage}"] if limit else None)
    return figures


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        title: its name in progress lines.  shape: the record's shape; cases of one shape and `facts` share a record.
        arms: what is timed here; none of a case whose check has measured it.
        check: describes what is wrong with the results, None if nothing is; called first, and returns the same on every rank.
        compute_figures: ratios from the median milliseconds of the arms.  facts: further fields of the record.
        after: called when the arms have been timed; returns further fields of the record; dicts add to those of earlier cases.
        rounds: how often each arm runs, None: the benchmark's.
    """

    title: str
    shape: dict[str, int]
    arms: Mapping[str, Arm]
    check: Callable[[], str | None]
    compute_figures: Callable[[Mapping[str, float]], dict[str, Figure]]
    facts: dict[str, Any] = field(default_factory=dict)
    after: Callable[[], dict[str, Any]] = dict
    rounds: Rounds | None = None


class CheckFailedError(RuntimeError):
    """A benchmark's results are wrong, so it is not timed."""


def cases_of(name: str, setting: Setting) -> Iterator[Case]:
    """The cases of a benchmark, built one by one, so that only one occupies memory.

    Raises:
        ValueError: unknown benchmark, or one that this machine cannot run.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark {name!r}, want one of {', '.join(BENCHMARKS)}")
    cases: Iterator[Case] = pkgutil.resolve_name(f"mxep.bench.{BENCHMARKS[name].cases}")(setting)
    return cases


def run(
    name: str,
    setting: Setting,
    command: str,
    say: Callable[[str], None] = print,
    keep: Callable[[list[Record]], object] = lambda records: None,
) -> list[Record]:
    """Run every case of a benchmark; returns its records, and warns of arms whose times are not reliable.

    `keep` gets the records so far after every case, so that an interrupted run leaves what it has measured.

    Raises:
        CheckFailedError: wrong results; nothing of this case was timed.
        ValueError: see `cases_of`; ranks' GPUs differ in speed.
    """
    if setting.device.type == "cuda":
        check_equal_speed(setting.device, setting.group)
    records: list[Record] = []
    for case in cases_of(name, setting):
        with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES, fail_on_recompile_limit_hit=True):
            problem = case.check()
            if problem is not None:
                raise CheckFailedError(f"{name}, {case.title}: {problem}; no times")
            timings = time_arms(case.arms, setting.device, setting.rounds or case.rounds or BENCHMARKS[name].rounds, setting.group)
        figures, further = case.compute_figures({arm: timing.median_ms for arm, timing in timings.items()}), case.after()
        say(f"{name}: {case.title}: " + ", ".join(["checked", *(f"{key} {figure.value:.2f}" for key, figure in figures.items())]))
        for doubt in doubts(timings, further.get("host_unsteady", [])):
            say(f"{name}: {case.title}: {doubt}")
        for arm, why in further.get("left_out", {}).items():
            say(f"{name}: {case.title}: left out {arm}: {why}")
        record = _record_of(records, name, case, setting, command)
        record["arms"] |= {arm: asdict(timing) for arm, timing in timings.items()}
        record["unsteady"] += [arm for arm, timing in timings.items() if timing.unsteady]
        record["host_bound"] += [arm for arm, timing in timings.items() if timing.host_bound]
        record["ratios"] |= {key: round(figure.value, 4) for key, figure in figures.items()}
        record["limit"] |= {key: round(figure.limit, 4) for key, figure in figures.items() if figure.limit is not None}
        record["target"] |= {key: figure.target for key, figure in figures.items() if figure.target is not None and not setting.tiny}
        record |= {key: record.get(key, {}) | value if isinstance(value, dict) else value for key, value in further.items()}
        keep(records)
        del case, timings, figures  # and with them the case's tensors, before the next one is built
    return records


def doubts(timings: Mapping[str, Timing], host_unsteady: Sequence[str] = ()) -> list[str]:
    """Reasons not to rely on the times of a run, a sentence each; `host_unsteady`: calls whose time on the host differs."""
    unsteady = [f"{arm} by {timing.round_spread - 1:.0%}" for arm, timing in timings.items() if timing.unsteady]
    waited = [f"{arm} in {timing.host_behind:.0%}" for arm, timing in timings.items() if timing.host_bound]
    found = {
        f"unsteady: medians of rounds differ by more than {MAX_SPREAD - 1:.0%}": unsteady,
        f"host-bound: the device may have waited for the host in more than {MAX_HOST_LATE:.0%}": waited,
        "the host was busy elsewhere: microseconds of the host differ between batches": host_unsteady,
    }
    return [f"WARNING, {what}: {', '.join(names)}" for what, names in found.items() if names]


def _record_of(records: list[Record], name: str, case: Case, setting: Setting, command: str) -> Record:
    """The record of a case's shape and facts; added to `records` if it is a new one."""
    for record in records:
        if record["shape"] == case.shape and case.facts.items() <= record.items():
            return record
    place = {"benchmark": name.replace("-", "_"), "device": device_name(setting.device), "world_size": setting.world}
    results: Record = {"arms": {}, "ratios": {}, "limit": {}, "target": {}, "unsteady": [], "host_bound": []}
    records.append({**place, "shape": case.shape, **case.facts, **results, **origin(command)})
    return records[-1]

"""`mxep bench train`: the same training in MXFP8 and in bf16, one after the other, and the times of their steps.

    mxep bench train --record -- --model dsv3_16b --force-balance --seq-len 4096

The options after `--` go to `mxep train`, which all arms run with the same seed and data; `--recipes A,B` names the MXFP8 recipes.  Arms
in bf16 have their linear layers, their output projection and what they keep of gate and up in bf16 too.  The baseline is bf16 with
separate MoE blocks over torch.distributed; without `--no-fused-layer` there is one more arm, bf16 with each MoE layer as one function,
over torch.distributed too.  With `--cuda-graph` steps of MXFP8 are CUDA graphs, and those of bf16 are not where they wait for
torch.distributed's exchanges: in separate blocks, and as one function over several ranks.  A step's time is that of the slowest rank, from
the end of the step before to its own, on the GPU.  The first steps, in which kernels are compiled, do not count, nor do the last ones,
which run under torch's profiler: their trace shows what takes the time, as a mean of several steps, of which only the first finds the GPU
without work.
Nothing is evaluated and no checkpoint is written.  Losses and tokens per second of all steps are drawn as by `mxep train --compare`, and
kept in the record.

A speed-up is printed with an estimate, for comparison and not as a bound: the speed-up if the experts' GEMMs and the exposed exchange of
the baseline's traced step took half of their time and all else the same.  One function also saves passes over memory, so it may exceed it.
A record keeps the estimate under "limit", where records of other benchmarks have their references.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from mxep.bench.ranks import run_child
from mxep.bench.records import device_name, device_title, origin, write_beside, write_records
from mxep.bench.tables import table_of
from mxep.bench.timing import MIN_RUNS, Timing, hold
from mxep.device import peak_bf16_flops_of
from mxep.models.flops import TokenFlops, flops_per_token
from mxep.models.presets import MODELS, preset_of, resolve_model, train_defaults
from mxep.private_folders import scratch_folder
from mxep.recipe import resolve_recipe
from mxep.train.compare import Runs, plot_comparison
from mxep.train.config import TrainConfig, flag_of
from mxep.train.metrics import read_metrics
from mxep.train.option_parser import field_of, read_options, read_toml
from mxep.train.run_folder import METRICS_FILE

UTILIZATIONS = {"mfu": "MFU", "mfu_causal": "MFU, causal attention halved", "hfu": "HFU"}  # of a step, and what a table calls them
BASELINE, ONE_FUNCTION = "bf16", "bf16, one function"
WARM_UP, PROFILED = 5, 3  # steps, the first and the last
LEAST_STEPS = WARM_UP + MIN_RUNS + PROFILED
COUNTED = slice(WARM_UP, -PROFILED)
LAST_LOSSES = 9  # steps over which losses are compared: later ones of so short a run
_TARGET, _FULL_SIZE = 1.3, "dsv3_16b"  # tokens per second against bf16, of this preset on 4 ranks or more
# Options that it sets or cannot use.
_OURS = ("recipe", "out", "compare", "resume", "resume_step", "stop_after", "profile_step", "profile_steps")
# Options of all arms that a record contains; a batch or length of None is the preset's.
_RECORDED = ("seq_len", "batch", "accumulate", "activation_checkpoint", "compile", "converters", "cache_weights", "fused_experts")
# Options that a record contains where they are not the default; older records have none of them.
DEGREES = ("tp", "pp", "dp_replicate", "pp_schedule", "microbatch")
LAYERS = ("keep_first_product", "router_dtype", "mx_fqns", "linear_skip", "balance_loss", "z_loss", "transport")
_RECORDED_IF_SET = (
    "mask_documents",
    "attn_implementation",
    "cuda_graph",
    "optimizer",
    "dtype",
    "optimizer_in_backward",
    "linear_recipe",
    "output_recipe",
    *DEGREES,
    *LAYERS,
)


class RunFailedError(RuntimeError):
    """A run of `mxep train` failed."""


def options_of(given: Sequence[str]) -> TrainConfig:
    """What options of `mxep train` and the TOML file among them ask for, with the least number of steps for a record if they name none.

    >>> [options_of(words).steps for words in (["--ep", "2"], ["--training.steps=50"])]
    [28, 50]

    Raises:
        ValueError: an option that this benchmark sets, or too few steps; or what `read_options` raises.
    """
    config = read_options(given)
    taken = [f"{option.partition('=')[0]} after --" for option in given if field_of(option) in _OURS]
    if config.config is not None:
        taken += [f"{name} in {config.config}" for name in read_toml(config.config) if name in _OURS]
    if taken:
        ours = ", ".join(flag_of(name) for name in _OURS)
        raise ValueError(f"train: {', '.join(taken)}, want options of `mxep train` without {ours}; leave it out")
    steps = LEAST_STEPS if config.steps is None else config.steps
    if steps < LEAST_STEPS:
        counted = f"{WARM_UP} to warm up, {MIN_RUNS} that count and {PROFILED} for the profiler"
        raise ValueError(f"train: --steps {steps} after --, want at least {LEAST_STEPS}: {counted}")
    return replace(config, steps=steps)


def train_arms(given: Sequence[str], recipes: Sequence[str], folder: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Runs `mxep train` in every recipe and in bf16, each in its own folder; yields after each arm the records of the metrics so far.

    The baseline is the last one.

    Raises:
        ValueError: as `options_of`.
        RunFailedError: a run failed; its output is on the terminal.
    """
    config = options_of(given)
    found: dict[str, list[dict[str, Any]]] = {}

    def run(arm: str, recipe: str, *own: str) -> dict[str, list[dict[str, Any]]]:
        found[arm] = _train([*given, *own], config, recipe, folder / arm)
        return found

    for recipe in recipes:
        yield run(recipe, recipe)
    first, over = found[recipes[0]][0], ("--transport", "collective")
    if first["settings"]["fused_layer"]:
        eager = [] if first["transport"] is None else ["--no-cuda-graph"]
        yield run(ONE_FUNCTION, BASELINE, *over, *eager)
    yield run(BASELINE, BASELINE, *over, "--no-fused-layer", "--no-cuda-graph")


def _train(given: Sequence[str], config: TrainConfig, recipe: str, out: Path) -> list[dict[str, Any]]:
    """Runs one arm; returns the records of its metrics, the first of which has the run's settings."""
    last = config.steps
    assert last is not None
    own = ["--recipe", recipe, "--out", str(out), "--steps", str(last)]
    if recipe == BASELINE:
        own += [word for name, value in config.without_mxfp8().items() for word in (flag_of(name), value)]
    own += ["--profile-step", str(last - PROFILED + 1), "--profile-steps", str(PROFILED)]
    rare = ["--no-profile-host", "--no-evaluate", "--no-checkpoint"]
    status = run_child([sys.executable, "-m", "mxep", "train", *given, *own, *rare])
    if status:
        raise RunFailedError(f"train: `mxep train` in {recipe} ended with status {status}")
    return read_metrics(out / METRICS_FILE)


def arm_of(records: Sequence[dict[str, Any]], trace: Path) -> dict[str, Any]:
    """Times of one run's steps, its speed, memory and losses; `trace`: of its last `PROFILED` steps."""
    start = next(record for record in records if record["kind"] == "run")
    steps = [record for record in records if record["kind"] == "step"][COUNTED]
    if len(steps) < MIN_RUNS:
        counted = f"after the first {WARM_UP} and before the last {PROFILED}"
        raise ValueError(f"train: {len(steps)} steps {counted}, want {MIN_RUNS}: a run was stopped")
    last = steps[-1]
    timing = Timing.of([1e3 * record["step_s"] for record in steps], rounds=2 - len(steps) % 2)
    middle = sorted(steps, key=lambda record: record["step_s"])[len(steps) // 2]
    traced = step_parts(json.loads(trace.read_text())["traceEvents"]) if trace.exists() else {}
    return {
        "timing": timing,
        "transport": start["transport"],
        "one_function": start["settings"]["fused_layer"],
        "cuda_graph": start["settings"]["cuda_graph"],
        "recompute": start["recompute"],
        "linears": start["settings"]["linear_fqns"] if resolve_recipe(start["settings"]["recipe"]).gemm == "mxfp8" else "",
        "tokens_per_s": round(middle["tokens_per_s"], 1),
        "tflops": middle["tflops"],
        **{name: middle[name] for name in UTILIZATIONS},
        "memory_gib": round(last["memory_gib"], 3),
        "loss": round(last["loss"], 5),
        "load_max_over_mean": last["load_max_over_mean"],
        "parts_ms": {part: round(ms / PROFILED, 4) for part, ms in traced.items()},
    }


def recomputation_of(record: dict[str, Any], *arms: str) -> str:
    """The activation checkpointing of these arms, or of all; "none" where every layer of them kept everything under "auto".

    >>> record = {"options": {"activation_checkpoint": "auto"}, "steps": {"mx": {"recompute": ["none"]}, "bf16": {"recompute": ["full"]}}}
    >>> recomputation_of(record), recomputation_of(record, "mx")
    ('auto', 'none')
    """
    mode: str = record["options"]["activation_checkpoint"]
    chosen = [record["steps"][arm].get("recompute") for arm in arms or record["steps"]]  # None of older records
    return "none" if mode == "auto" and all(modes is not None and {*modes} == {"none"} for modes in chosen) else mode


def flops_of(record: dict[str, Any]) -> TokenFlops | None:
    """FLOPs per token of what a record's arms trained; None for a model that is no preset, with attention within documents, or where each
    layer has a recomputation of its own.
    """
    options, name = record["options"], record["model"]["name"]
    if preset_of(name) not in MODELS or "mask_documents" in options or options["activation_checkpoint"] == "auto":
        return None
    shape = resolve_model(name)
    seq_len = options["seq_len"] or train_defaults(name, shape)[1].seq_len
    return flops_per_token(shape, seq_len, options["activation_checkpoint"])


def utilizations(record: dict[str, Any], arm: str) -> dict[str, float | None]:
    """`UTILIZATIONS` of an arm. Records from before all three were recorded get them from the tokens per second, where that is possible."""
    step, flops, peak = record["steps"][arm], flops_of(record), peak_bf16_flops_of(device_title(record["device"]))
    if "hfu" in step or flops is None or peak is None:
        return {name: step.get(name) for name in UTILIZATIONS}
    of_token = flops.model, flops.model_causal, flops.hardware
    tps = step["tokens_per_s"] / record["world_size"]
    return {name: tps * count / peak for name, count in zip(UTILIZATIONS, of_token, strict=True)}


def share_text(share: float | None) -> str:
    """
    >>> share_text(0.2951), share_text(None)
    ('29.5%', 'n/a')
    """
    return "n/a" if share is None else f"{share:.1%}"


def loss_gaps_text(record: dict[str, Any], arm: str, baseline: str) -> str:
    """
    >>> curves = {"mx": {"loss": [3.0, 2.5]}, "bf16": {"loss": [3.0, 2.25]}}
    >>> loss_gaps_text({"curves": curves}, "mx", "bf16"), loss_gaps_text({}, "mx", "bf16")
    ('+0.125 (+0.000 to +0.250)', '')
    """
    gaps = loss_gaps(record, arm, baseline)
    return f"{statistics.fmean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})" if gaps else ""


def curves_of(records: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Every step's number, loss and tokens per second, in lists of one length.

    >>> curves_of([{"kind": "run"}, {"kind": "step", "step": 1, "loss": 2.0000004, "tokens_per_s": 98.76, "lr": 0.1}])
    {'step': [1], 'loss': [2.0], 'tokens_per_s': [98.8]}
    """
    steps = [record for record in records if record["kind"] == "step"]
    digits = {"step": None, "loss": 5, "tokens_per_s": 1}
    return {name: [round(record[name], places) for record in steps] for name, places in digits.items()}


def mean_ms(record: dict[str, Any], arm: str) -> float | None:
    """Mean time of the steps whose median the record has; None for an older record without curves."""
    speeds = record.get("curves", {}).get(arm, {}).get("tokens_per_s", [])[WARM_UP : -record.get("traced_steps", 1)]
    return 1e3 * record["shape"]["T"] * statistics.fmean(1 / speed for speed in speeds) if speeds else None


def loss_gaps(record: dict[str, Any], arm: str, baseline: str) -> list[float]:
    """How far an arm's losses lie above the baseline's in the last steps; [] for an older record without curves.

    >>> curves = {"mx": {"loss": [3.0, 2.5]}, "bf16": {"loss": [3.0, 2.25]}}
    >>> loss_gaps({"curves": curves}, "mx", "bf16"), loss_gaps({}, "mx", "bf16")
    ([0.0, 0.25], [])
    """
    ours, theirs = (record.get("curves", {}).get(name, {}).get("loss", [])[-LAST_LOSSES:] for name in (arm, baseline))
    return [round(a - b, 5) for a, b in zip(ours, theirs, strict=True)]


def runs_of(record: dict[str, Any]) -> Runs:
    """The steps of a record's arms, from its curves, in the form of metrics.jsonl; {} for an older record without curves.

    >>> runs_of({"curves": {"bf16": {"step": [1], "loss": [2.0], "tokens_per_s": [98.8]}}})
    {'bf16': [{'kind': 'step', 'step': 1, 'loss': 2.0, 'tokens_per_s': 98.8}]}
    """

    def steps(curves: dict[str, list[float]]) -> list[dict[str, Any]]:
        return [{"kind": "step", **dict(zip(curves, values, strict=True))} for values in zip(*curves.values(), strict=True)]

    return {arm: steps(curves) for arm, curves in record.get("curves", {}).items()}


def record_of(runs: dict[str, list[dict[str, Any]]], folder: Path, command: str, device: str) -> dict[str, Any]:
    """The record of these arms; the last one is the baseline."""
    start = next(record for record in next(iter(runs.values())) if record["kind"] == "run")
    settings = start["settings"]
    arms = {arm: arm_of(records, folder / arm / "profile" / "rank_00000.json") for arm, records in runs.items()}
    *_, baseline = arms
    base = arms[baseline]["timing"].median_ms
    ratios = {f"{arm}_tokens_per_s_vs_{baseline}": base / found["timing"].median_ms for arm, found in arms.items() if arm != baseline}
    unsteady = [arm for arm, found in arms.items() if found["timing"].unsteady]
    balanced = bool(settings["force_balance"])
    full = start["model"]["name"] == _FULL_SIZE and start["world"] >= 4 and balanced
    step = next(record for record in next(iter(runs.values())) if record["kind"] == "step")
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    return {
        "benchmark": "train",
        "device": device,
        "world_size": start["world"],
        "shape": {"T": round(step["tokens_per_s"] * step["step_s"])},
        "routing": "forced balance" if balanced else "the router's",
        "model": start["model"],
        "options": {name: settings[name] for name in _RECORDED}
        | {name: settings[name] for name in _RECORDED_IF_SET if settings[name] != defaults[name]}
        | ({} if settings["ep"] in (None, start["world"]) else {"ep": settings["ep"]}),  # older records: as many as ranks
        "gemm_path": start["gemm_path"],
        "peak_bf16_flops": start["peak_bf16_flops"],
        "arms": {arm: asdict(found.pop("timing")) for arm, found in arms.items()},
        "steps": arms,
        "traced_steps": PROFILED,
        "curves": {arm: curves_of(records) for arm, records in runs.items()},
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "unsteady": unsteady,
        "limit": {f"{arm}_tokens_per_s_vs_{baseline}": estimate(found, arms[baseline]) for arm, found in arms.items() if arm != baseline},
        "target": dict.fromkeys([*ratios][:1], _TARGET) if full else {},
        **origin(command),
    }


def estimate(arm: Mapping[str, Any], baseline: Mapping[str, Any]) -> float | None:
    """The speed-up if the baseline's exposed exchanges, and its GEMMs that the arm runs in MXFP8, took half of their time.

    Args:
        arm, baseline: of a record's `steps`: `parts_ms` (a part of a traced step -> ms); `linears`, which linear layers are in MXFP8.

    Returns:
        The ratio; None without a trace.

    >>> ms = {"grouped GEMMs": 40.0, "dense GEMMs": 40.0, "other": 20.0}
    >>> estimate({}, {"parts_ms": ms}), round(estimate({"linears": "*"}, {"parts_ms": ms}), 3), estimate({}, {"parts_ms": {}})
    (1.25, 1.667, None)
    """
    parts = baseline["parts_ms"]
    halved = ["grouped GEMMs", "exchange"] + ["dense GEMMs"] * bool(arm.get("linears"))
    whole = sum(parts.values())
    return round(whole / (whole - sum(parts.get(part, 0.0) for part in halved) / 2), 4) if whole else None


def steps_table(record: dict[str, Any]) -> Table:
    """A row for each arm."""
    rows = []
    for arm, found in record["steps"].items():
        shares = map(share_text, utilizations(record, arm).values())
        speed = found["tokens_per_s"]
        cells = [f"{record['arms'][arm]['median_ms']:.1f}", f"{speed:,.0f}", f"{speed / record['world_size']:,.0f}"]
        cells += [f"{found['tflops']:.1f}", *shares]
        rows.append([arm, *cells, f"{found['memory_gib']:.1f}", *(f"{ms:.1f}" for ms in found["parts_ms"].values())])
    parts = next(iter(record["steps"].values()))["parts_ms"]
    numbers = ("ms a step", "tokens/s", "tokens/s a rank", "TFLOP/s a rank", *UTILIZATIONS.values(), "GiB", *parts)
    return table_of(f"{record['model']['name']}, {record['world_size']} x {record['device']}, {record['routing']}", [""], numbers, rows)


def measure(given: Sequence[str], *, recipes: Sequence[str], quick: bool, device: str, record: bool, out: Path, text: str) -> None:
    """Runs all arms, prints the table, draws their curves, writes the record.

    Args:
        given: options of `mxep train`.  recipes: of MXFP8, one arm each; the first one's speed-up has a target.
        quick: the smallest model, for CI.  device: "cuda" or "cpu".
        record: write one, and after each arm what is known so far, NAME.json.part.  out: folder of the record and of the curves' PNG.
        text: the command, for the record.

    Raises:
        ValueError: invalid options.  RunFailedError: a run failed.
    """
    for recipe in recipes:
        if resolve_recipe(recipe).gemm != "mxfp8":
            raise ValueError(f"train: --recipes {recipe}, want recipes with MXFP8 GEMMs; bf16 is an arm of its own")
    small = ["--model", "dsv3_debug_cpu", "--seq-len", "32", "--batch", "2", "--eval-tokens", "64"] if quick else []
    options = ["--device", device, *small, *given]
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    with scratch_folder("bench-train") as folder:
        for runs in train_arms(options, recipes, folder):
            found = record_of(runs, folder, text, device_name(torch.device(device)))
            if record:  # what an interrupted run leaves
                write_records("train", found["device"], found["world_size"], [found], out, complete=False)
    console.print(steps_table(found))
    for name, ratio in found["ratios"].items():
        halved = found["limit"][name]
        expected = f" ({halved:.2f}x if GEMMs that run in MXFP8 and the exposed exchange took half of their time)" if halved else ""
        console.print(f"{name}: {ratio:.2f}x{expected}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    plot = out / f"train-{found['device']}-{found['world_size']}.png"
    plot_comparison(runs_of(found), plot, COUNTED)
    print("wrote", plot)
    if record:
        print("wrote", write_beside(found, compared, out))


def compared(record: dict[str, Any]) -> list[Any]:
    """Records of other models, routings, options or arms stay in the file of a new one."""
    return [record["model"], record["routing"], record["options"], [*record["arms"]]]


GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
PARTS: dict[str, re.Pattern[str]] = {  # the first match is a kernel's part; of parts that run at once the first counts
    "grouped GEMMs": re.compile(r"fp8_grouped_mm|fp8_wgrad|grouped_mm|grouped_wgrad|GroupProblemShape|gemm_grouped", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|sdpa|attention|cudnn", re.IGNORECASE),
    "dense GEMMs": re.compile(r"nvjet|gemm|cutlass|cublas|splitK|xmma", re.IGNORECASE),
    "quantise and move rows": re.compile(  # activations too
        r"quantize|rebase|token_(?:maxima|plan)|activat|place_|expert_rows|_zero_tail|_zero_padding_rows|row_map|segments", re.IGNORECASE
    ),
    "optimizer": re.compile(r"multi_tensor|adam|lerp|foreach", re.IGNORECASE),
    "exchange": re.compile(r"nccl|^p2p$|^(?:send|recv)_slots$|Memcpy PtoP|all_?gather|reduce_?scatter|SendRecv", re.IGNORECASE),
    "other": re.compile(""),
}
IDLE = "idle"
_AHEAD_MS = 30.0  # longer than the host takes to launch the traced work


def trace_of(work: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """`traceEvents` of the work on GPU `device`; run it once before, so that nothing is compiled.

    The GPU waits first, so that the host, which the profiler slows down, is ahead of it.
    """
    found = profile(activities=[ProfilerActivity.CUDA])
    found.start()
    hold(device, _AHEAD_MS)
    work()
    torch.cuda.synchronize(device)
    found.stop()
    with scratch_folder("trace") as folder:
        path = folder / "trace.json"
        found.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if "spin_kernel" not in event.get("name", "")]


def exposed_ms(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Milliseconds in which only exchanges ran or were waited for: before the first grouped GEMM, and after its start.

    These are dispatch and combine of a forward, and combine's and dispatch's backward.  They include gaps that the host leaves.

    >>> event = {"ph": "X", "cat": "kernel"}
    >>> sent, back = ({**event, "name": "ncclDevKernel_SendRecv", "ts": ts, "dur": 30.0} for ts in (10.0, 100.0))
    >>> passed, gemm = {**event, "name": "quantize", "ts": 0.0, "dur": 15.0}, {**event, "name": "fp8_grouped_mm", "ts": 45.0, "dur": 75.0}
    >>> exposed_ms([passed, sent, gemm, back])
    (0.03, 0.01)
    """
    spans = sorted((event["ts"], event["ts"] + event["dur"], part_of(event["name"])) for event in events if event.get("cat") in GPU_WORK)
    first = next((start for start, _, part in spans if part == "grouped GEMMs"), None)
    if first is None:
        return 0.0, 0.0
    before = after = 0.0
    covered = spans[0][0]
    for start, end, _ in [*(span for span in spans if span[2] != "exchange"), (max(end for _, end, _ in spans),) * 2 + ("",)]:
        if start > covered:
            before += max(min(start, first) - covered, 0)
            after += max(start - max(covered, first), 0)
        covered = max(covered, end)
    return round(before / 1e3, 4), round(after / 1e3, 4)


def part_of(name: str) -> str:
    """The part of a step to which a kernel of this name belongs; exchange kernels first, whatever else their names contain."""
    if PARTS["exchange"].search(name):
        return "exchange"
    return next(part for part, pattern in PARTS.items() if pattern.search(name))


def step_parts(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds by part, from the first kernel's start to the last one's end; empty without a traced GPU.

    Args:
        events: `traceEvents` of a chrome trace; times are in microseconds.
    """
    spans = [(event["ts"], event["ts"] + event["dur"], part_of(event["name"])) for event in events if event.get("cat") in GPU_WORK]
    if not spans:
        return {}
    names = [*PARTS, IDLE]
    edges = sorted([(start, 1, part) for start, _, part in spans] + [(end, -1, part) for _, end, part in spans])
    running = dict.fromkeys(PARTS, 0)
    found = dict.fromkeys(names, 0.0)
    before = edges[0][0]
    for at, change, part in edges:
        busy = next((name for name, count in running.items() if count), IDLE)
        found[busy] += at - before
        running[part] += change
        before = at
    return {name: round(us / 1e3, 4) for name, us in found.items()}

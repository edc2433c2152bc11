"""Plots of benchmark records as PNG: roofline, speed-up by size, the pipeline's stages, loss curves. Drawn only from existing records."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxep.bench.records import Record, of_most_ranks, of_one_device, record_place, routing_of
from mxep.bench.training import COUNTED, IDLE, PARTS, recomputation_of, runs_of
from mxep.train.compare import draw_comparison

PLOTS = Path("docs") / "plots"
_DPI = 130
PIPELINE_BASELINES = {"bf16": "full bf16", "bf16_exchange": "bf16 exchange, MXFP8 GEMMs"}  # both over NCCL
_ARMS_OF_STAGES = {**PIPELINE_BASELINES, "mxfp8_nccl": "MXFP8 over NCCL", "mxfp8_blocks": "MXFP8, symmetric memory"}
_STAGE_COLOURS = {"dispatch": "#33608c", "permute": "#9db7d5", "experts": "#d9773c", "unpermute": "#c9c9c9", "combine": "#4f9d69"}
_KINDS = {"forward": "o", "dgrad": "s", "wgrad": "^"}
_ARMS = {"torch_bf16": ("torch bf16", "#7f7f7f"), "plain": ("ours, from MX bytes", "#d9773c"), "rebased": ("ours, rebased", "#33608c")}


def _axes(width: float, height: float, rows: int = 1, ratios: Sequence[int] | None = None, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, height_ratios=ratios)
    for part in figure.axes:
        part.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    return path


def _gemm_work(record: Record) -> float:
    shape = record["shape"]
    return 2.0 * shape["M"] * shape["K"] * shape["N"]


def _gemm_bytes(record: Record, kind: str, element_bytes: float) -> float:
    """Every operand read once, a bf16 result written once."""
    M, K, N, G = (record["shape"][key] for key in "MKNG")
    operands = {"forward": (M * K + G * K * N, M * N), "dgrad": (M * N + G * K * N, M * K), "wgrad": (M * (K + N), G * K * N)}
    read, written = operands[kind]
    return element_bytes * read + 2.0 * written


def roofline(gemms: Sequence[Record], movers: Sequence[Record], folder: Path) -> Path:
    """Operations per second by operations per byte, with the limits measured in the same records: dense FP8 and a device copy."""
    figure, axes = _axes(7.5, 4.8)
    dense = max(_gemm_work(r) / timing["median_ms"] / 1e9 for r in gemms for arm, timing in r["arms"].items() if arm.endswith("_dense_fp8"))
    copy = max(r["bytes"]["copy"] / r["arms"]["copy"]["median_ms"] / 1e9 for r in movers)  # TB/s
    ridge = dense / copy
    axes.plot([ridge / 8, ridge, 16 * ridge], [dense / 8, dense, dense], color="black", linewidth=1)
    axes.annotate(f"dense FP8 {dense:.0f} TFLOP/s", (16 * ridge, dense), ha="right", va="bottom")
    axes.annotate(f"copy {copy:.2f} TB/s", (ridge / 7, dense / 7), ha="left", va="top")
    for arm, (label, colour) in _ARMS.items():
        for kind, marker in _KINDS.items():
            points = [
                (
                    _gemm_work(r) / _gemm_bytes(r, kind, 2.0 if arm == "torch_bf16" else 33 / 32),
                    _gemm_work(r) / r["arms"][f"{kind}_{arm}"]["median_ms"] / 1e9,
                )
                for r in gemms
                if f"{kind}_{arm}" in r["arms"]
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, s=26, label=f"{label}, {kind}")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of memory traffic", ylabel="TFLOP/s")
    axes.set_yticks([200, 400, 800, 1200], ["200", "400", "800", "1200"], minor=False)
    axes.tick_params(axis="y", which="minor", labelleft=False)
    axes.set_title(f"Grouped GEMMs and the measured limits of the GPU, {record_place(gemms[0])}", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return _save(figure, "roofline", folder)


def speed_up(gemms: Sequence[Record], folder: Path) -> Path:
    """Ratios to torch's bf16 and their limits, for every balanced shape of 8 groups, in order of their work."""
    chosen = sorted((r for r in gemms if r["routing"] == "balanced" and r["shape"]["G"] == 8), key=_gemm_work)
    figure, axes = _axes(7.5, 4.2)
    x = list(range(len(chosen)))
    series = [
        ("forward_rebased", "forward, rebased", "#33608c"),
        ("forward", "forward, from MX bytes", "#9db7d5"),
        ("dgrad", "dgrad, from MX bytes", "#d9773c"),
        ("wgrad", "wgrad, from MX bytes", "#4f9d69"),
    ]
    width = 0.8 / len(series)
    for index, (name, label, colour) in enumerate(series):
        at = [position + (index - (len(series) - 1) / 2) * width for position in x]
        ratios = [(r["ratios"].get(f"{name}_vs_torch_bf16", 0.0), r["limit"].get(f"{name}_vs_torch_bf16", 0.0)) for r in chosen]
        axes.bar(at, [ratio for ratio, _ in ratios], width * 0.92, color=colour, label=label)
        axes.scatter(at, [limit for _, limit in ratios], marker="_", color="black", s=70, label=None if index else "reference in the run")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(x, [f"K {r['shape']['K']}\nN {r['shape']['N']}" for r in chosen])
    axes.set_ylabel("speed-up over torch._grouped_mm in bf16")
    axes.set_title(f"MXFP8 grouped GEMM, {chosen[0]['shape']['M']} rows, 8 groups, {record_place(chosen[0])}", loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.32))
    return _save(figure, "speed_up", folder)


def _stacked_bars(axes: Any, bars: Sequence[tuple[str, Mapping[str, float]]], style: Callable[[str], dict[str, Any]], first: bool) -> None:
    """A horizontal bar for each label, of its parts in ms, the first one on top.

    Args:
        style: how a part is drawn, with its label.
        first: the figure's first bars, which name the parts in its legend, each label once.
    """
    named: set[str] = set()
    for at, (_, parts) in enumerate(bars):
        left = 0.0
        for part, ms in parts.items():
            drawn = style(part)
            label = drawn.pop("label")
            axes.barh(at, ms, left=left, linewidth=0.4, label=label if first and label not in named else None, **drawn)
            named.add(label)
            left += ms
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()


def pipeline_parts(records: Sequence[Record], folder: Path) -> Path:
    """Stacked milliseconds of the stages, forward and backward; one bar for each arm and balanced shape."""
    chosen = of_most_ranks([r for r in records if r["routing"] == "balanced"])
    figure, axes = _axes(8.5, 1.2 + 1.1 * len(chosen))
    bars = [
        (f"{record['shape']['D']}, {record['shape']['N']}: {_ARMS_OF_STAGES[arm]}", parts)
        for record in chosen
        for arm, parts in record["parts_ms"].items()
    ]

    def style(part: str) -> dict[str, Any]:
        stage, direction = part.split("_")
        return {"label": stage, "color": _STAGE_COLOURS[stage], "hatch": "//" if direction == "backward" else None, "edgecolor": "white"}

    _stacked_bars(axes, bars, style, first=True)
    axes.set_xlabel("ms (median, slowest rank); hatched: backward")
    axes.set_title(f"Time of the pipeline by stage, for each (D, N), {record_place(chosen[0])}", loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.18))
    return _save(figure, "pipeline_parts", folder)


def convergence(records: Sequence[Record], folder: Path) -> Path:
    """Held-out loss of every seed by step; each seed's difference from the baseline, with the spread of the baseline's seeds."""
    record = max(records, key=lambda found: found["tokens"])
    figure, axes = _axes(7.5, 6.5, 2)
    *ours, baseline = record["arms"]
    base = [curves["held_out"] for curves in record["arms"][baseline]["curves"]]
    steps = record["arms"][baseline]["curves"][0]["step"]
    for index, (name, arm) in enumerate(record["arms"].items()):
        for seed, curves in enumerate(arm["curves"]):
            style = {
                "color": "black" if name == baseline else f"C{index}",
                "linestyle": "--" if name == baseline else "-",
                "linewidth": 0.9,
            }
            label = f"{name}, {len(arm['curves'])} seeds: {arm['held_out_mean']:.4f}" if not seed else None
            axes[0].plot(curves["step"], curves["held_out"], label=label, **style)
            if name in ours:
                difference = [100 * (a / b - 1) for a, b in zip(curves["held_out"], base[seed], strict=True)]
                axes[1].plot(steps, difference, color=f"C{index}", linewidth=0.9, label=f"{name}, each seed" if not seed else None)
    means = [sum(losses) / len(losses) for losses in zip(*base, strict=True)]
    least, most = ([100 * (end(at) / mean - 1) for at, mean in zip(zip(*base, strict=True), means, strict=True)] for end in (min, max))
    axes[1].fill_between(steps, least, most, color="black", alpha=0.12, linewidth=0, label=f"{baseline}, range of its seeds")
    tail = [loss for curves in record["arms"][baseline]["curves"] for loss in curves["held_out"][len(steps) // 10 :]]
    axes[0].set(ylabel=f"held-out loss, nats per {record['data']['unit']}", ylim=(0.97 * min(tail), 1.05 * max(tail)))
    shown = [value for line in axes[1].get_lines() for value in line.get_ydata()[len(steps) // 2 :]]
    reach = 1.15 * max(abs(value) for value in (*most[len(steps) // 2 :], *least[len(steps) // 2 :], *shown))
    axes[1].axhline(0, color="black", linewidth=0.8, linestyle=":")
    axes[1].set(xlabel="step", ylabel=f"difference from {baseline}, %", ylim=(-reach, reach))
    size = f"{record['model']['parameters'] / 1e6:.0f} million parameters, {record['tokens'] / 1e6:,.0f} million {record['data']['unit']}s"
    axes[0].set_title(f"{size}, {record_place(record)}", loc="left")
    for part in axes:
        part.legend(frameon=False, fontsize=8)
    axes[0].tick_params(labelbottom=False)
    return _save(figure, "convergence", folder)


def _training_title(record: Record) -> str:
    """Title of a training's panel: model, recomputation, routing and machine."""
    options = record["options"]
    recomputed = "no" if (mode := recomputation_of(record)) == "none" else mode
    words = [record["model"]["name"], f"{recomputed} recomputation", routing_of(record), record_place(record)]
    words += ["MXFP8 linears and logits"] if options.get("output_recipe") else []
    words += ["MXFP8 as a CUDA graph"] if "cuda_graph" in options else []
    return ", ".join(words)


def train_step(chosen: Sequence[Record], name: str, folder: Path, one_scale: bool = False) -> Path:
    """A training step's time by its parts: a panel for each run, a bar for each arm, the longest first.  `one_scale`: for all panels."""
    arms = [len(record["arms"]) for record in chosen]
    figure, _ = _axes(8.5, 1.0 + sum(0.85 + 0.32 * count for count in arms), len(chosen), arms)
    colours = {part: f"C{index}" for index, part in enumerate(PARTS)} | {IDLE: "white"}

    def style(part: str) -> dict[str, Any]:
        return {"label": part, "color": colours[part], "edgecolor": "grey"}

    for axes, record in zip(figure.axes, chosen, strict=True):
        bars = [(arm, {part: record["steps"][arm]["parts_ms"][part] for part in colours}) for arm in record["arms"]]
        _stacked_bars(axes, sorted(bars, key=lambda bar: -sum(bar[1].values())), style, first=axes is figure.axes[0])
        axes.set_title(_training_title(record), loc="left", fontsize=9)
    if one_scale:
        right = max(axes.get_xlim()[1] for axes in figure.axes)
        for axes in figure.axes:
            axes.set_xlim(0, right)
    scales = "one scale" if one_scale else "each panel has its own scale"
    figure.axes[-1].set_xlabel(f"ms of a traced step on rank 0 ({scales}); exchange: only the exposed time")
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return _save(figure, name, folder)


def train_curves(records: Sequence[Record], folder: Path) -> Path:
    """Loss and tokens per second of every arm by step, on the most ranks: a pair of panels for each run, two side by side."""
    chosen = of_most_ranks(records)
    columns = min(len(chosen), 2)
    rows = math.ceil(len(chosen) / columns)
    figure, axes = _axes(5 * columns, 5.5 * rows, 2 * rows, (3, 2) * rows, columns)
    panels = axes.reshape(rows, 2, columns).swapaxes(1, 2).reshape(-1, 2)
    for (loss, speed), record in zip(panels, chosen, strict=False):
        draw_comparison(loss, speed, runs_of(record), slice(COUNTED.start, -record.get("traced_steps", 1)))  # older records: one
        loss.set_title(textwrap.fill(_training_title(record), 55), loc="left", fontsize=9)
        speed.sharex(loss)
    for unused in panels[len(chosen) :].flat:
        unused.remove()
    return _save(figure, "train_curves", folder)


def draw(records: dict[str, list[Record]], folder: Path = PLOTS) -> list[Path]:
    """Draws every plot for which `records` (benchmark name -> records) has data; returns the files."""
    gemms, movers, pipelines = (records.get(name, []) for name in ("grouped_mm", "quantize", "pipeline"))
    gemms = of_one_device([record for record in gemms if "calls" not in record])  # few rows are bound by launches
    movers = [record for record in movers if any(record["device"] == gemm["device"] for gemm in gemms)]
    drawn = []
    if gemms and movers:
        drawn.append(roofline(gemms, movers, folder))
    if any(r["routing"] == "balanced" and r["shape"]["G"] == 8 for r in gemms):
        drawn.append(speed_up(gemms, folder))
    if any("parts_ms" in r and r["routing"] == "balanced" for r in pipelines):
        drawn.append(pipeline_parts(pipelines, folder))
    if runs := [record for record in records.get("convergence", []) if record["device"] != "cpu"]:
        drawn.append(convergence(runs, folder))
    if runs := [record for record in records.get("train", []) if all(step["parts_ms"] for step in record["steps"].values())]:
        drawn.append(train_step(of_most_ranks(runs), "train_step", folder))
        if alone := [run for run in runs if run["world_size"] == 1 and run["device"] != "cpu"]:
            most = max(run["shape"]["T"] for run in alone)
            # With one scale for all runs: models before and after a change stand one above the other.
            chosen = sorted((run for run in alone if run["shape"]["T"] == most), key=lambda run: run["model"]["name"])
            drawn.append(train_step(chosen, "train_step_one_gpu", folder, one_scale=True))
    if runs := [record for record in records.get("train", []) if runs_of(record)]:
        drawn.append(train_curves(runs, folder))
    return drawn

"""`mxep train --compare bf16`: trains the same run in two recipes and compares losses and speed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mxep.train.run_folder import METRICS_FILE

COMPARISON_FILE = "compare.json"
COMPARISON_PLOT = "compare.png"
_WARM_UP = 2  # steps that are not timed
_COUNTED = slice(_WARM_UP, None)
Runs = dict[str, list[dict[str, Any]]]  # records of metrics.jsonl by name of the arm


def train_both(recipes: tuple[str, str], folder: Path, train: Callable[[str, Path], tuple[int, bool]], steps: int) -> int:
    """Train each recipe in <folder>/<recipe>, then write the comparison; returns the first status that is not 0.

    Args:
        recipes: of the two arms; the second is the baseline.
        train: (recipe, folder) -> exit status, and whether a signal asked to end; seed and data are the same for both.
        steps: of an arm. After a signal the other one is not trained.

    Raises:
        ValueError: the two arms read different text.
    """
    from mxep.train.metrics import last_step, read_metrics

    runs: Runs = {}
    for recipe in recipes:
        status, stopped = train(recipe, folder / recipe)
        if status:
            return status
        runs[recipe] = read_metrics(folder / recipe / METRICS_FILE)
        done = last_step(runs[recipe])
        if done < steps or (stopped and recipe == recipes[0]):
            Console().print(f"compare: {recipe} was stopped after step {done} of {steps}, nothing to compare", soft_wrap=True)
            return 0
    if len({record["data"]["fingerprint"] for records in runs.values() for record in records if record["kind"] == "run"}) > 1:
        raise ValueError(f"--compare: the text has changed between the runs in {folder}, want the same; start again in another --out")
    taken = len(steps_of_all(runs))
    if taken <= _WARM_UP:
        Console().print(f"compare: {taken} steps say nothing, want more than {_WARM_UP}", soft_wrap=True)
        return 0
    summary = summarize(runs)
    (folder / COMPARISON_FILE).write_text(json.dumps(summary, indent=1) + "\n")
    plot_comparison(runs, folder / COMPARISON_PLOT)
    _show(summary, folder)
    return 0


def steps_of_all(runs: Runs) -> list[int]:
    """The steps that every arm took, in order; an arm may have skipped others."""
    taken = ({record["step"] for record in records if record["kind"] == "step"} for records in runs.values())
    return sorted(set.intersection(*taken))


def summarize(runs: Runs) -> dict[str, Any]:
    """For each arm, the final losses and the median of tokens per second; and the ratios of the first arm to the second.

    The loss is that of the last tenth of the steps that all arms took.

    >>> step = {"kind": "step", "step": 1, "loss": 2.0, "tokens_per_s": 10.0}
    >>> fast = {**step, "tokens_per_s": 15.0}
    >>> summarize({"mxfp8": [fast] * 3, "bf16": [step] * 3})["ratios"]
    {'tokens_per_s': 1.5, 'loss': 1.0}
    """
    arms, common = {}, steps_of_all(runs)
    compared = {*common[-max(len(common) // 10, 1) :]}
    for name, records in runs.items():
        steps = [record for record in records if record["kind"] == "step"]
        held_out = [record["loss"] for record in records if record["kind"] == "held_out"]
        last = [record["loss"] for record in steps if record["step"] in compared]
        arms[name] = {
            "steps": len(steps),
            "tokens_per_s": statistics.median(record["tokens_per_s"] for record in steps[_WARM_UP:]),
            "loss": statistics.fmean(last),
            "held_out_loss": held_out[-1] if held_out else None,
        }
    first, second = arms.values()
    return {"arms": arms, "ratios": {key: first[key] / second[key] for key in ("tokens_per_s", "loss")}}


def plot_comparison(runs: Runs, target: Path, counted: slice = _COUNTED) -> None:
    """Plot loss and tokens per second of all arms against the step; writes a PNG. `counted`: the steps that are timed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    loss, speed = figure.subplots(2, height_ratios=(3, 2), sharex=True)
    draw_comparison(loss, speed, runs, counted)
    figure.savefig(target, dpi=120)


def draw_comparison(loss: Any, speed: Any, runs: Runs, counted: slice = _COUNTED) -> None:
    """Draw the two panels of `plot_comparison` on two axes of matplotlib."""
    from mxep.train.metrics import draw_losses, smooth

    draw_losses(loss, runs)
    for index, (name, records) in enumerate(runs.items()):
        steps = [record for record in records if record["kind"] == "step"][counted]
        numbers, values = [record["step"] for record in steps], [record["tokens_per_s"] for record in steps]
        median = statistics.median(values)
        speed.plot(numbers, values, color=f"C{index}", alpha=0.25, linewidth=0.8)
        speed.plot(numbers, smooth(values, max(len(values) // 20, 1)), color=f"C{index}", label=f"{name}: median {median:,.0f}")
    speed.set_ylim(bottom=0)
    speed.ticklabel_format(axis="y", style="plain")
    speed.set_xlabel("step")
    speed.set_ylabel("tokens per second")
    speed.grid(alpha=0.3)
    speed.legend(frameon=False)
    loss.set_xlabel("")


def _show(summary: dict[str, Any], folder: Path) -> None:
    table = Table(box=SIMPLE)
    for column in ("arm", "tokens/s", "loss, last tenth", "held out"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in summary["arms"].items():
        held_out = "" if arm["held_out_loss"] is None else f"{arm['held_out_loss']:.4f}"
        table.add_row(name, f"{arm['tokens_per_s']:,.0f}", f"{arm['loss']:.4f}", held_out)
    ratios = summary["ratios"]
    table.add_row("ratio", f"{ratios['tokens_per_s']:.3f}x", f"{ratios['loss']:.4f}", "")
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(f"comparison {folder / COMPARISON_FILE}, plot {folder / COMPARISON_PLOT}", markup=False)

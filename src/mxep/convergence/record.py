"""What came of the runs: held-out losses of the last tenth by seed, their means, the range of the bf16 seeds, and the judgement."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mxep.models.presets import DecoderConfig
from mxep.train.config import Settings

TAIL = 0.1  # share of the steps at the end over which losses are averaged
MOST_APART = 0.002  # of the means' ratio from 1
Metrics = Sequence[Mapping[str, Any]]  # records of one run's metrics.jsonl


def tail_mean(records: Metrics, kind: str, steps: int) -> float:
    """Mean loss of the records of that kind ("step" or "held_out") over the last tenth of `steps`, nats per token.

    >>> tail_mean([{"kind": "step", "step": step, "loss": float(step)} for step in range(1, 21)], "step", 20)
    19.5
    """
    losses = [record["loss"] for record in records if record["kind"] == kind and record["step"] > steps * (1 - TAIL)]
    return statistics.fmean(losses)


def curve(records: Metrics) -> dict[str, list[float]]:
    """{"step": [...], "held_out": [...]}, and the mean training loss since the evaluation before as "training"."""
    found: dict[str, list[float]] = {"step": [], "held_out": [], "training": []}
    since: list[float] = []
    for record in records:
        if record["kind"] == "step":
            since.append(record["loss"])
        elif record["kind"] == "held_out":
            found["step"].append(record["step"])
            found["held_out"].append(round(record["loss"], 5))
            found["training"].append(round(statistics.fmean(since), 5) if since else record["loss"])
            since = []
    return found


def arm_of(runs: Sequence[Metrics], steps: int) -> dict[str, Any]:
    """What the seeds of one recipe came to."""
    held_out = [round(tail_mean(records, "held_out", steps), 6) for records in runs]
    starts = [[record for record in records if record["kind"] == "run"] for records in runs]
    return {
        "held_out": held_out,
        "held_out_mean": round(statistics.fmean(held_out), 6),
        "held_out_range": [min(held_out), max(held_out)],
        "training": [round(tail_mean(records, "step", steps), 6) for records in runs],
        "gemm_path": starts[0][-1]["gemm_path"],
        "pieces": [len(found) for found in starts],
        "curves": [curve(records) for records in runs],
    }


def summarize(runs: Mapping[str, Sequence[Metrics]], steps: int) -> dict[str, Any]:
    """The fields of a record that hold results; the last recipe is what the others are measured against.

    Args:
        runs: by recipe, the metrics of each seed; the same seeds in the same order for all.
        steps: of each run.

    Returns:
        arms (see `arm_of`); ratios of held-out means to the last recipe's, their limit (1) and target; whether each mean lies within the
        range of that recipe's seeds; ratios seed by seed.
    """
    arms = {recipe: arm_of(metrics, steps) for recipe, metrics in runs.items()}
    *ours, baseline = arms
    base = arms[baseline]
    ratios = {f"{name}_held_out_vs_{baseline}": arms[name]["held_out_mean"] / base["held_out_mean"] for name in ours}
    least, most = base["held_out_range"]
    return {
        "arms": arms,
        "ratios": {name: round(ratio, 6) for name, ratio in ratios.items()},
        "limit": dict.fromkeys(ratios, 1.0),
        "target": dict.fromkeys(ratios, 1 + MOST_APART),
        "within_target": {name: abs(ratio - 1) <= MOST_APART for name, ratio in ratios.items()},
        "within_range": {name: least <= arms[name]["held_out_mean"] <= most for name in ours},
        "by_seed": {
            name: [round(a / b, 6) for a, b in zip(arms[name]["held_out"], base["held_out"], strict=True)] for name in ours
        },
    }  # fmt: skip


def setting_of(start: Mapping[str, Any], settings: Settings, shape: DecoderConfig) -> dict[str, Any]:
    """The fields that say what was trained: shape, model, data, schedule; `start` is a run's first record."""
    options = start["settings"]
    tokens = settings.batch * settings.seq_len * options["accumulate"]
    return {
        "world_size": start["world"],
        "shape": {"T": tokens, "D": shape.dim, "H": shape.expert_hidden, "E": shape.num_experts, "C": shape.top_k},
        "model": start["model"],
        "data": start["data"],
        "steps": settings.steps,
        "tokens": settings.steps * tokens,
        "seq_len": settings.seq_len,
        "lr": settings.lr,
        "warmup": settings.warmup,
        "evaluation": {"every": settings.eval_every, "tokens": options["eval_tokens"], "averaged_over": TAIL},
        "options": {name: options[name] for name in ("cache_weights", "fused_experts", "fused_layer", "lr_floor")},
    }


def table_of(record: Mapping[str, Any]) -> Table:
    """Losses by recipe, beside the judgement."""
    table = Table(title="held-out loss, mean over the last tenth of the steps", title_justify="left")
    for name in ("recipe", "mean", "seeds", "against the last", "asked", "within its range"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for name, arm in record["arms"].items():
        seeds = ", ".join(f"{loss:.4f}" for loss in arm["held_out"])
        ratio = next((value for key, value in record["ratios"].items() if key.startswith(f"{name}_held_out_vs_")), None)
        judged = ("", "", "")
        if ratio is not None:
            judged = (f"{ratio - 1:+.3%}", f"{MOST_APART:.1%} at most", "yes" if record["within_range"][name] else "no")
        table.add_row(name, f"{arm['held_out_mean']:.4f}", seeds, *judged)
    return table

"""Tables of benchmark records for the pages, in Markdown."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mxep.bench import transformers_exchange, transformers_experts
from mxep.bench.layer import BASELINES
from mxep.bench.layer_tables import COSTS, TITLE, WAYS, costs, exposed_rows, layer_title
from mxep.bench.records import record_place
from mxep.bench.tables import BASELINES as PIPELINE_BASELINES
from mxep.bench.tables import TUTORIAL_COLUMNS, device_us, pipelines_of, tutorial_rows
from mxep.bench.training import BASELINE

Record = dict[str, Any]
_ROWS_COLUMNS = {
    "": "from MX bytes",
    "rebased_": "rebased",
    "rebased_span_": "rebased, robust rebase by name",
    "far_": "far channels, from MX bytes",
    "rebased_far_": "far channels, rebased",
}
_WGRAD_COLUMNS = {"": "from MX bytes", "float32_": "float32 result", "operator_add_": "added to float32", "rebased_": "rebased"}
_A2A_RATIOS = ("total_vs_bf16", "dispatch_vs_nccl_bf16", "dispatch_placed_vs_nccl_bf16", "home_vs_peer_copy")
_A2A_PARTS = ("quantize", "exchange", "dequantize")
_EXPERT_ARMS = {
    "separate_": "three GEMMs",
    "": "fused",
    "fused_mx_": "fused, wgrad from MX",
    "fused_uncached_": "fused, weights quantised in every call",
}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def limit_of(record: Record, name: str) -> float | None:
    """The reference of a ratio; None where the one GPU that stands for it was itself unsteady: short of memory, as a rule."""
    if any(arm.startswith("one_gpu") for arm in record.get("unsteady", [])):
        return None
    return record["limit"].get(name)


def _beside_limit(record: Record, name: str) -> str:
    """ "1.93x of 2.01x", or nothing where it was not measured."""
    if name not in record["ratios"]:
        return ""
    limit = limit_of(record, name)
    return f"{record['ratios'][name]:.2f}x" + ("" if limit is None else f" of {limit:.2f}x")


def _gemm_title(record: Record) -> str:
    shape = record["shape"]
    title = f"{record_place(record)}, {shape['M']} x {shape['K']} x {shape['N']}, {shape['G']} groups"
    return title if record["routing"] == "balanced" else f"{title}, {record['routing']}"


def grouped_mm_tables(records: Sequence[Record]) -> str:
    """Speed against `torch._grouped_mm` in bf16 beside what the chip allows: rows times weights, wgrad, few rows, host."""
    many = [record for record in records if "calls" not in record]
    few = [record for record in records if "calls" in record]
    parts = []
    for kind in ("forward", "dgrad"):
        header = [f"{kind} against torch in bf16, M x K x N of the forward weight", *_ROWS_COLUMNS.values()]
        parts.append(_speeds(header, kind, _ROWS_COLUMNS, [r for r in many if f"{kind}_vs_torch_bf16" in r["ratios"]]))
    header = ["wgrad against torch in bf16, M x K x N of the forward weight", *_WGRAD_COLUMNS.values(), "bf16 operands"]
    columns = {**_WGRAD_COLUMNS, "hp_": ""}
    parts.append(_speeds(header, "wgrad", columns, [r for r in many if "wgrad_vs_torch_bf16" in r["ratios"]]))
    if few:
        rows = []
        for record in few:
            speeds = [f"{record['ratios'][f'{kind}_vs_torch_bf16']:.2f}x" for kind in ("forward", "dgrad", "wgrad")]
            rows.append([_gemm_title(record), *speeds])
        parts.append(markdown(["few rows from MX bytes against torch in bf16, on the device", "forward", "dgrad", "wgrad"], rows))
        rows = [
            [_gemm_title(record), f"`{name}`", f"{us:.0f} us"]
            for record in few
            if "host_us" in record
            for name, us in record["host_us"].items()
        ]
        parts.append(markdown(["host time of a call, few rows", "call", "microseconds"], rows))
    return "\n\n".join(parts)


def _speeds(header: Sequence[str], kind: str, columns: Iterable[str], records: Sequence[Record]) -> str:
    rows = [[_gemm_title(record), *(_beside_limit(record, f"{kind}_{column}vs_torch_bf16") for column in columns)] for record in records]
    return markdown(header, rows)


def memory_table(records: Sequence[Record]) -> str:
    """Every kernel's share of a device copy's bytes per second at each width, most rows, and what is asked; then few rows."""
    most = max(record["shape"]["T"] for record in records)
    chosen = [record for record in records if record["shape"]["T"] == most]
    letter = "D" if "D" in chosen[0]["shape"] else "H"
    widths = sorted({record["shape"][letter] for record in chosen})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    asked: dict[tuple[str, str], set[str]] = {}
    for record in chosen:
        for name, value in record["ratios"].items():
            kernel = name.removesuffix("_fraction_of_copy")
            if kernel != name:
                row = (record_place(record), kernel)
                cells.setdefault(row, {})[record["shape"][letter]] = f"{value:.0%}"
                asked.setdefault(row, set()).update([f"{record['target'][name]:.0%}"] if name in record["target"] else [])
    rows = []
    for (where, kernel), shares in cells.items():
        least = ", ".join(sorted(asked[where, kernel]))
        rows.append([where, f"`{kernel}`", *(shares.get(width, "") for width in widths), least])
    header = ["device", f"share of a copy's speed, {most} rows", *(f"{letter} {width}" for width in widths), "asked"]
    few = [record for record in records if "host_us" in record]
    return "\n\n".join([markdown(header, rows), *([_few_rows_table(few, letter)] if few else [])])


def _few_rows_table(records: Sequence[Record], letter: str) -> str:
    """Microseconds of a call at each width, on the device and on the host."""
    widths = sorted({record["shape"][letter] for record in records})
    cells: dict[tuple[str, str, int], dict[int, str]] = {}
    for record in records:
        for call, us in record["host_us"].items():
            row = (record_place(record), call, record["shape"]["T"])
            cells.setdefault(row, {})[record["shape"][letter]] = f"{device_us(record, call):.1f} / {us:.0f}"
    order = list(dict.fromkeys(call for _, call, _ in cells))
    rows = [
        [where, f"`{call}`", str(T), *(cells[where, call, T].get(width, "") for width in widths)]
        for where, call, T in sorted(cells, key=lambda row: (row[0], order.index(row[1]), row[2]))
    ]
    return markdown(["device", "few rows: microseconds of a call, device / host", "T", *(f"{letter} {width}" for width in widths)], rows)


def experts_table(records: Sequence[Record]) -> str:
    """The expert FFN, both ways, against three of torch's grouped GEMMs in bf16, what forward saves, what calls cost the host."""
    header = ["experts, forward + backward, against torch in bf16", *_EXPERT_ARMS.values(), "saved by bf16 / fused, MiB"]
    rows = []
    for record in records:
        shape, saved = record["shape"], record["saved_bytes"]
        title = f"{record_place(record)}, {shape['T']} rows, D {shape['D']}, H {shape['H']}, {shape['L']} experts, {record['routing']}"
        kept = " / ".join(f"{saved[arm] / 2**20:.0f}" for arm in ("bf16", "fused"))
        rows.append([title, *(_beside_limit(record, f"{arm}total_vs_torch_bf16") for arm in _EXPERT_ARMS), kept])
    few = [record for record in records if "host_us" in record]
    if not few:
        return markdown(header, rows)
    arms = list(dict.fromkeys(arm for record in few for arm in record["host_us"]))
    calls = []
    for record in few:
        shape, us = record["shape"], record["host_us"]
        cells = [f"{device_us(record, arm):.0f} / {us[arm]:.0f}" if arm in us else "" for arm in arms]
        calls.append([f"{record_place(record)}, {shape['T']} rows, D {shape['D']}, H {shape['H']}, {shape['L']} experts", *cells])
    title = "few rows, forward + backward: microseconds under the clock / of the host"
    return "\n\n".join([markdown(header, rows), markdown([title, *(f"`{arm}`" for arm in arms)], calls)])


def transformers_table(records: Sequence[Record]) -> str:
    """Experts of transformers' models by the adapter, both ways, against transformers' own in bf16."""
    return _transformers(
        records, transformers_experts.BASELINE, "experts of transformers, forward + backward, against `grouped_mm` in bf16"
    )


def transformers_ep_table(records: Sequence[Record]) -> str:
    """The same under expert parallelism."""
    title = "under expert parallelism, forward + backward, against `all_to_all` around `grouped_mm` in bf16"
    return _transformers(records, transformers_exchange.BASELINE, title)


def _transformers(records: Sequence[Record], baseline: str, title: str) -> str:
    ours = transformers_experts.OURS
    arms = " / ".join(f"`{arm}`" for arm in (baseline, *ours))
    told = any("kept_mib" in record for record in records)
    header = [title, *(f"`{arm}`: `{ours[arm]}`" for arm in ours), *([f"kept for backward, MiB: {arms}"] if told else [])]
    rows = []
    for record in records:
        shape = record["shape"]
        sizes = ", ".join(f"{key} {shape[key]}" for key in "DHE")
        tokens = f"{shape['T']} tokens{' a GPU' if record['world_size'] > 1 else ''}"
        what = f"{record_place(record)}, {record['model']}, {tokens}, {sizes}, top {shape['C']}"
        kept = " / ".join(f"{record['kept_mib'][arm]:,.0f}" for arm in (baseline, *ours)) if "kept_mib" in record else ""
        rows.append([what, *(_beside_limit(record, f"{arm}_total_vs_{baseline}") for arm in ours), *([kept] if told else [])])
    return markdown(header, rows)


def a2a_table(records: Sequence[Record]) -> str:
    """Exchanges against bf16 in ms, by size, with what they are made of."""
    header = [
        "rows a rank, forward + backward",
        "bf16",
        "MXFP8",
        "faster",
        "dispatch against bf16",
        "into the experts' places",
        "home against copies",
        *(f"{name} alone" for name in _A2A_PARTS),
    ]
    rows = []
    for record in records:
        ms = {arm: timing["median_ms"] for arm, timing in record["arms"].items()}
        rows.append(
            [
                f"{record_place(record)}, {record['shape']['T']} x {record['shape']['D']}",
                *(f"{ms[f'{arm}_total']:.2f} ms" for arm in ("bf16", "mxfp8")),
                *(_beside_limit(record, name) for name in _A2A_RATIOS),
                *(f"{ms[name]:.2f} ms" for name in _A2A_PARTS),
            ]
        )
    return markdown(header, rows)


def layer_tables(records: Sequence[Record]) -> str:
    """Whole layers: times and speed against bf16, then what the exchanges cost, what is kept, and TFLOP/s."""
    speeds, network = [], []
    efficiencies = [f"scaling_efficiency_{stage}" for stage in ("forward", "backward")]
    for record in records:
        ms = {arm: timing["median_ms"] for arm, timing in record["arms"].items()}
        title, ratios = layer_title(record), record["ratios"]
        base = min(BASELINES, key=lambda arm: ms[f"{arm}_total"])
        cells = [f"{ms[f'{base}_{stage}']:.2f} / {ms[f'mxfp8_{stage}']:.2f} ms" for stage in ("forward", "backward")]
        names = ("total", "nccl_total", "blocks_total", "bf16_total", "inference")
        faster = [_beside_limit(record, f"{name}_vs_nccl_bf16") if f"{name}_vs_nccl_bf16" in ratios else "" for name in names]
        speeds.append([title, *cells, record["mxfp8_over"], *faster])
        steady = [f"{ratios[name]:.0%}" if limit_of(record, name) else "" for name in efficiencies]
        network.append([title, *steady, *costs(record)])
    against = ["forward, bf16 / MXFP8", "backward", "MXFP8 over", "faster", "over NCCL", "separate blocks", "bf16, tokens sent once"]
    against.append("inference")
    made = [markdown([TITLE, *against], speeds), markdown([TITLE, "efficiency forward", "backward", *COSTS], network)]
    if exposed := exposed_rows(records):
        made.append(markdown([TITLE, "arm", *(f"{name}, alone in the trace" for name in WAYS)], exposed))
    return "\n\n".join(made)


def pipeline_tables(records: Sequence[Record]) -> str:
    """The tutorial's two tables of every arm of ours, for every device and world size."""
    runs: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        runs.setdefault((record["device"], record["world_size"]), []).append(record)
    parts = []
    for group in runs.values():
        for (ours, what), (baseline, against) in itertools.product(pipelines_of(group).items(), PIPELINE_BASELINES.items()):
            shared = ours == "mxfp8_blocks" or (ours == "mxfp8" and group[0].get("mxfp8_over") == "symmetric")
            place = f"{record_place(group[0])} over {'symmetric memory' if shared else 'NCCL'}"
            parts.append(f"{what}, {place}, against {against} over NCCL (experts are those of a rank):\n")
            parts.append(markdown(TUTORIAL_COLUMNS, list(tutorial_rows(group, baseline, ours))) + "\n")
    return "\n".join(parts).rstrip("\n")


def standard_error(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """Of the ratio of two means, as a share, from the spread of either's seeds; NaN for one seed.

    >>> standard_error([0.875, 1.125], [1.0, 1.0])
    0.125
    """
    if min(len(ours), len(baseline)) < 2:
        return math.nan
    shares = (statistics.stdev(losses) / statistics.fmean(losses) / math.sqrt(len(losses)) for losses in (ours, baseline))
    return math.hypot(*shares)


def convergence_table(records: Sequence[Record]) -> str:
    """Held-out losses by recipe and seed, beside what is asked for and what so many seeds can tell."""
    rows = []
    for record in records:
        unit = record["data"]["unit"]
        what = f"{record['model']['parameters'] / 1e6:.0f} million parameters, {record['steps']} steps of {record['shape']['T']} {unit}s"
        *_, baseline = record["arms"]
        for name, arm in record["arms"].items():
            ratio = f"{name}_held_out_vs_{baseline}"
            seeds = ", ".join(f"{loss:.4f}" for loss in arm["held_out"])
            cells = ["", "", ""]
            if ratio in record["ratios"]:
                error = standard_error(arm["held_out"], record["arms"][baseline]["held_out"])
                asked = f"asked: {record['target'][ratio] - 1:.1%} at most"
                cells = [f"{record['ratios'][ratio] - 1:+.3%} ({asked})", f"{error:.1%}", "yes" if record["within_range"][name] else "no"]
            rows.append([f"{record_place(record)}, {what}", name, f"{arm['held_out_mean']:.4f}", seeds, *cells])
    header = [
        "held-out loss over the last tenth",
        "recipe",
        "mean",
        "seeds",
        "mean against bf16",
        "its standard error",
        "within bf16's seeds",
    ]
    return markdown(header, rows)


def train_table(records: Sequence[Record]) -> str:
    """Whole training steps: speed, memory and share of the peak of every arm beside the baseline."""
    rows = []
    for record in records:
        *ours, baseline = record["arms"]
        for arm in ours:
            ratio = f"{arm}_tokens_per_s_vs_{baseline}"
            ms = [f"{record['arms'][name]['median_ms']:.0f}" for name in (baseline, arm)]
            steps = [record["steps"][name] for name in (baseline, arm)]
            mfu = ["n/a" if step["mfu"] is None else f"{step['mfu']:.1%}" for step in steps]
            rows.append(
                [
                    f"{record_place(record)}, {trained(record)}",
                    " / ".join(f"{name.split(',')[0]}, {_moe_layers(record['steps'][name])}" for name in (baseline, arm)),
                    f"{' / '.join(ms)} ms",
                    " / ".join(f"{step['tokens_per_s']:,.0f}" for step in steps),
                    f"{record['ratios'][ratio]:.2f}x",
                    f"{record['limit'][ratio]:.2f}x" if record["limit"][ratio] and not arm.startswith(BASELINE) else "",
                    " / ".join(f"{step['memory_gib']:.1f}" for step in steps),
                    " / ".join(mfu),
                ]
            )
    halved = "estimate: GEMMs and exchange halved"
    return markdown(["training", "bf16 / other", "a step", "tokens per second", "faster", halved, "GiB", "MFU"], rows)


def routing_of(record: Record) -> str:
    """How a training run's tokens were spread over the experts, in words."""
    return "unforced balance" if record["routing"] == "the router's" else record["routing"]


def trained(record: Record) -> str:
    """What all arms trained, options where they are not the default."""
    options = record["options"]
    told = {
        f"{options['activation_checkpoint']} recomputation": options["activation_checkpoint"] != "none",
        "compiled": options["compile"],
        "quantised weights kept": options["cache_weights"],
        "attention within documents": "mask_documents" in options,
    }
    what = [record["model"]["name"], routing_of(record), f"{record['shape']['T']} tokens a step"]
    return ", ".join([*what, *(text for text, there in told.items() if there)])


def torchtitan_table(records: Sequence[Record]) -> str:
    """torchtitan's own trainer (benchmarks/torchtitan_0_2.py), in bf16 and with the adapter."""
    rows = []
    for record in records:
        baseline, *ours = record["arms"]
        ms = {arm: timing["median_ms"] for arm, timing in record["arms"].items()}
        what = f"{record['model']}, attention by {record['attention']}, MoE in {record['layers']}, {record['shape']['T']} tokens a step"
        for arm in ours:
            gib = f"{record['memory_gib'][baseline]:.0f} / {record['memory_gib'][arm]:.0f} GiB"
            speed = f"**{record['ratios'][f'{arm}_vs_{baseline}']:.2f}x**"
            rows.append([f"{record_place(record)}, {what}", f"`{arm}`", f"{ms[baseline]:.0f} ms", f"{ms[arm]:.0f} ms", speed, gib])
    return markdown(["a step of torchtitan's trainer", "recipe", "its own, bf16", "with mxep", "faster", "memory"], rows)


def _moe_layers(step: dict[str, Any]) -> str:
    """How one arm runs its MoE layers."""
    over = "" if step["transport"] is None else f" over {step['transport']} transport"
    return ("one function" if step["one_function"] else "blocks") + over


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "pipeline": pipeline_tables,
    "a2a": a2a_table,
    "layer": layer_tables,
    "grouped_mm": grouped_mm_tables,
    "experts": experts_table,
    "torchtitan": torchtitan_table,
    "transformers": transformers_table,
    "transformers_ep": transformers_ep_table,
    "quantize": memory_table,
    "rows": memory_table,
    "swiglu": memory_table,
    "convergence": convergence_table,
    "train": train_table,
}

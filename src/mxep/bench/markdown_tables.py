"""Markdown tables of benchmark records: one function for each benchmark, which `TABLES` lists by name."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from mxep.bench import attention, dense_linears, finetune, peers, published, transformers, transformers_step
from mxep.bench.layer_tables import layer_tables
from mxep.bench.markdown_cells import Records, markdown, ratio_of_limit
from mxep.bench.plots import PIPELINE_BASELINES
from mxep.bench.records import (
    RESULTS,
    Record,
    device_title,
    median_ms,
    range_verdict,
    record_place,
    routing_of,
)
from mxep.bench.tables import device_us, shape_text
from mxep.bench.training import (
    BASELINE,
    DEGREES,
    LAST_LOSSES,
    LAYERS,
    UTILIZATIONS,
    loss_gaps_text,
    mean_ms,
    recomputation_of,
    share_text,
    utilizations,
)
from mxep.train.metrics import read_metrics

_HOST_FIELDS = "host_us", "host_us_calling_thread"
_ROWS_COLUMNS = {
    "": "from MX bytes",
    "rebased_": "rebased",
    "rebased_span_": "rebased, 128-column scales",
    "far_": "far channels, from MX bytes",
    "rebased_far_": "far channels, rebased",
}
_WGRAD_COLUMNS = {
    "": "from MX bytes",
    "float32_": "float32 result",
    "operator_add_": "added to float32",
    "rebased_": "rebased",
    "hp_": "bf16 operands",
}
_A2A_COLUMNS = {
    "total_vs_bf16": "faster",
    "dispatch_vs_nccl_bf16": "dispatch against bf16",
    "home_vs_peer_copy": "dispatch's backward against copies",
}
_A2A_PARTS = ("quantize", "exchange", "dequantize")
_EXPERT_ARMS = {
    "separate_": "three GEMMs",
    "": "fused",
    "fused_mx_": "fused, wgrad from MX",
    "fused_uncached_": "fused, weights quantised in every call",
}
_PIPELINES = {"mxfp8_nccl": "Pipeline of the five blocks", "mxfp8": "Pipeline in one call"}  # arm -> what it is
_TUTORIAL_COLUMNS = (
    "tokens", "dim", "hidden_dim", "num_experts", "fwd_bf16_ms", "fwd_mxfp8_ms", "fwd_speedup",
    "bwd_bf16_ms", "bwd_mxfp8_ms", "bwd_speedup", "total_speedup",
)  # fmt: skip


def _gemm_title(record: Record) -> str:
    shape = record["shape"]
    title = f"{record_place(record)}, {shape['M']} x {shape['K']} x {shape['N']}, {shape['G']} groups"
    return title if record["routing"] == "balanced" else f"{title}, {record['routing']}"


def grouped_mm_tables(records: Records) -> str:
    """Speed against `torch._grouped_mm` in bf16 with its limit: forward, dgrad, wgrad, few rows, host."""
    many = [record for record in records if "calls" not in record]
    few = [record for record in records if "calls" in record]
    parts = []
    for kind, columns in (("forward", _ROWS_COLUMNS), ("dgrad", _ROWS_COLUMNS), ("wgrad", _WGRAD_COLUMNS)):
        rows = [
            [_gemm_title(record), *(ratio_of_limit(record, f"{kind}_{column}vs_torch_bf16") for column in columns)]
            for record in many
            if f"{kind}_vs_torch_bf16" in record["ratios"]
        ]
        parts.append(markdown([f"{kind} against torch in bf16, M x K x N of the forward weight", *columns.values()], rows))
    if few:
        kinds = ("forward", "dgrad", "wgrad")
        rows = [[_gemm_title(record), *(f"{record['ratios'][f'{kind}_vs_torch_bf16']:.2f}x" for kind in kinds)] for record in few]
        parts.append(markdown(["few rows from MX bytes against torch in bf16, on the device", *kinds], rows))
    if hosts := [record for record in few if "host_us" in record]:
        rows = [[_gemm_title(record), *(f"{us:.0f}" for us in record["host_us"].values())] for record in hosts]
        parts.append(markdown(["few rows: host microseconds of a call", *(f"`{call}`" for call in hosts[0]["host_us"])], rows))
    return "\n\n".join(parts)


def memory_table(records: Records) -> str:
    """Every kernel's share of a device copy's speed at each width, and its target, a table for each number of many rows; then few rows."""
    letter = "D" if "D" in records[0]["shape"] else "H"
    many = sorted({record["shape"]["T"] for record in records if "calls" not in record}, reverse=True)
    parts = [_shares_table([record for record in records if record["shape"]["T"] == T], letter) for T in many]
    costs = {
        (record_place(record), call, record["shape"]["T"], record["shape"][letter]): f"{device_us(record, call):.1f} / {us:.0f}"
        for record in records
        for call, us in record.get("host_us", {}).items()
    }
    if costs:
        order, widths = list(dict.fromkeys(call for _, call, _, _ in costs)), sorted({width for *_, width in costs})
        lines = sorted({line[:3] for line in costs}, key=lambda line: (line[0], order.index(line[1]), line[2]))
        rows = [[line[0], f"`{line[1]}`", str(line[2]), *(costs.get((*line, width), "") for width in widths)] for line in lines]
        columns = "device", "few rows: microseconds of a call, device / host", "T", *(f"{letter} {width}" for width in widths)
        parts.append(markdown(columns, rows))
    return "\n\n".join(parts)


def _shares_table(records: Records, letter: str) -> str:
    """Shares of a copy's speed and targets, of records with as many rows; a cell has those of all devices."""
    suffix, places = "_fraction_of_copy", list(dict.fromkeys(map(record_place, records)))
    widths = sorted({record["shape"][letter] for record in records})
    shares = {
        (name, record["shape"][letter], record_place(record)): f"{value:.0%}"
        for record in records
        for name, value in record["ratios"].items()
    }
    rows = []
    for name in dict.fromkeys(name for name, _, _ in shares if name.endswith(suffix)):
        cells = (" / ".join(shares.get((name, width, place), "-") for place in places) for width in widths)
        asked = sorted({f"{record['target'][name]:.0%}" for record in records if name in record["target"]})
        rows.append([f"`{name.removesuffix(suffix)}`", *cells, ", ".join(asked)])
    what = f"share of a copy's speed, {records[0]['shape']['T']} rows, {' / '.join(places)}"
    return markdown([what, *(f"{letter} {width}" for width in widths), "asked"], rows)


def experts_table(records: Records) -> str:
    """The expert FFN, forward + backward, against three of torch's grouped GEMMs in bf16; what forward saves."""
    rows = []
    for record in records:
        shape = record["shape"]
        title = f"{record_place(record)}, {shape['T']} rows, D {shape['D']}, H {shape['H']}, {shape['L']} experts, {record['routing']}"
        kept = " / ".join(f"{record['saved_bytes'][arm] / 2**20:.0f}" for arm in ("bf16", "fused"))
        ms = median_ms(record)
        base = min(ms["bf16_total"], ms["bf16_compiled_total"]) / ms["bf16_total"]
        speeds = (ratio_of_limit(record, f"{arm}total_vs_torch_bf16", base) for arm in _EXPERT_ARMS)
        rows.append([title, *speeds, kept])
    what = "experts, forward + backward, against torch in bf16, the faster of eager and compiled"
    return markdown([what, *_EXPERT_ARMS.values(), "saved by bf16 / fused, MiB"], rows)


def transformers_table(records: Records) -> str:
    """Experts of transformers' models by the adapter, forward + backward, against transformers' own in bf16, eager and compiled."""
    return _transformers(records, "experts of transformers, forward + backward", (transformers.BASELINE, transformers.COMPILED))


def transformers_ep_table(records: Records) -> str:
    """The same under expert parallelism."""
    return _transformers(records, "experts under expert parallelism, forward + backward", (transformers.EP_BASELINE,))


def _transformers(records: Records, title: str, theirs: Sequence[str]) -> str:
    pairs = [(arm, their) for their in theirs for arm in transformers.OURS]
    with_memory = [arm for arm in (*theirs, *transformers.OURS) if any(arm in record.get("kept_mib", ()) for record in records)]
    rows = []
    for record in records:
        shape, kept = record["shape"], record.get("kept_mib", {})
        sizes = ", ".join(f"{key} {shape[key]}" for key in "DHE")
        tokens = f"{shape['T']} tokens{' a GPU' if record['world_size'] > 1 else ''}"
        row = [f"{record_place(record)}, {record['model']}, {tokens}, {sizes}, top {shape['C']}"]
        row += [ratio_of_limit(record, f"{arm}_total_vs_{their}") for arm, their in pairs]
        rows.append([*row, *([" / ".join(f"{kept[arm]:,.0f}" if arm in kept else "-" for arm in with_memory)] if with_memory else [])])
    columns = [title, *(f"`{arm}` (`{transformers.OURS[arm]}`) against `{their}`" for arm, their in pairs)]
    memory = [f"kept for backward, MiB: {' / '.join(f'`{arm}`' for arm in with_memory)}"] if with_memory else []
    return markdown([*columns, *memory], rows)


def peers_tables(records: Records) -> str:
    """Speeds and details."""
    return "\n\n".join(filter(None, [peers_speeds(records), peers_details(records)]))


def peers_speeds(records: Records) -> str:
    """Every arm against the compiled one, by shape and routing; the same of few tokens as CUDA graphs."""
    arms = list(dict.fromkeys(arm for record in records for arm in record["errors"] if arm != peers.COMPILED))
    rows = [_peers_speeds(record, arms, "total", f"{record['shape']['T']} tokens, {record['routing']}") for record in records]
    parts = [markdown(["forward + backward", f"`{peers.COMPILED}`", *(f"`{arm}`" for arm in arms)], rows)]
    if graphed := [record for record in records if f"{peers.COMPILED}_graph" in record["arms"]]:
        arms = [arm for arm in arms if any(f"{arm}_graph" in record["arms"] for record in graphed)]
        rows = []
        for record in graphed:
            rows.append(_peers_speeds(record, arms, "graph", f"{record['microbatches']} x {record['shape']['T']} tokens"))
        parts.append(markdown(["forward + backward as a CUDA graph", f"`{peers.COMPILED}`", *(f"`{arm}`" for arm in arms)], rows))
    return "\n\n".join(parts)


def peers_details(records: Records) -> str:
    """For each shape of many tokens every arm's time, errors against float64, bytes kept for backward and time on the host."""
    return "\n\n".join(_peers_table(record) for record in records if record["shape"]["T"] > max(peers.FEW_TOKENS))


def _peers_speeds(record: Record, arms: Sequence[str], timed: str, tokens: str) -> list[str]:
    """The compiled arm's time, and every other arm's speed against it; `timed`: "total" or "graph"."""
    ms = median_ms(record)
    base = ms[f"{peers.COMPILED}_{timed}"]
    speeds = (f"{base / ms[f'{arm}_{timed}']:.2f}x" if f"{arm}_{timed}" in ms else "-" for arm in arms)
    return [f"{record_place(record)}, {record['model'].partition(',')[0]}, {tokens}", f"{base:.2f} ms", *speeds]


def _peers_table(record: Record) -> str:
    ms, rows = median_ms(record), []
    for arm, errors in record["errors"].items():
        total = ms[f"{arm}_total"]
        times = (f"{ms[f'{arm}_{stage}']:.2f}" for stage in ("forward", "backward", "total"))
        off = (f"{error['all']:.2%} / {error['row']:.1%}" if "row" in error else f"{error['all']:.2%}" for error in errors.values())
        kept = f"{record['saved_bytes'][arm] / 2**20:.0f}"
        host = (f"{record[field][arm]:.0f}" if field in record else "-" for field in _HOST_FIELDS)
        rows.append([f"`{arm}`", *times, f"{ms[f'{peers.COMPILED}_total'] / total:.2f}x", *off, kept, *host])
    off_columns = (f"error of {name}, all / worst row" for name in peers.RESULTS)
    times_columns = "forward, ms", "backward", "both", f"against `{peers.COMPILED}`"
    columns = *times_columns, *off_columns, "kept, MiB", "host, us", "the same, backward in the calling thread"
    return markdown([f"{record_place(record)}, {record['model']}, {shape_text(record)}", *columns], rows)


def linears_table(records: Records) -> str:
    """Dense linear layers: speed against torch.nn.Linear with its limit, and time on the host; a cell has those of all devices."""
    base, ours = dense_linears.LINEAR, dense_linears.OURS
    places = list(dict.fromkeys(map(record_place, records)))
    host_columns = *(f"host, us: `{arm}`" for arm in (base, "mx")), "`mx`, backward in the calling thread"
    columns = f"`{base}`, ms", *(f"`{arm}`" for arm in ours), *host_columns
    found: dict[str, dict[str, list[str]]] = {}
    for record in records:
        shape = record["shape"]
        cells = [f"{median_ms(record)[f'{base}_total']:.2f}", *(ratio_of_limit(record, f"{arm}_vs_{base}") for arm in ours)]
        hosts = record["host_us"][base], record["host_us"]["mx"], record.get("host_us_calling_thread", {}).get("mx")
        cells += ["-" if us is None else f"{us:.0f}" for us in hosts]
        found.setdefault(f"{shape['T']} tokens, {shape['K']} -> {shape['N']}", {})[record_place(record)] = cells
    missing = ["-"] * len(columns)
    rows = [[what, *map(" / ".join, zip(*(of.get(place, missing) for place in places), strict=True))] for what, of in found.items()]
    return markdown([f"a dense linear layer, forward + backward, {' / '.join(places)}", *columns], rows)


def attention_table(records: Records) -> str:
    """Attention by each implementation: milliseconds and TFLOP/s of forward and backward, and the faster one's speed with its limit."""
    base, other, rows = attention.BASELINE, attention.FASTER, []
    for record in records:
        ms, flops, cells = median_ms(record), sum(record["tflop"].values()), []
        for arm in (base, other):
            total = ms.get(f"{arm}_total")
            cells += ["-", "-"] if total is None else [f"{total:.2f}", f"{1e3 * flops / total:.0f}"]
        rows.append(
            [record_place(record), record["model"], record["documents"], *cells, ratio_of_limit(record, f"{other}_total_vs_{base}")]
        )
    columns = (f"`{arm}`, {unit}" for arm in (base, other) for unit in ("ms", "TFLOP/s"))
    return markdown(["on", "attention of", "documents", *columns, "faster"], rows)


def transformers_step_table(records: Records) -> str:
    """A training step of a model of transformers: each arm's time, tokens per second, speed, agreement with the first arm, and memory."""
    rows = []
    for record in records:
        shape, ms = record["shape"], median_ms(record)
        what = f"{record_place(record)}, {record['model']} of {shape['layers']} layers, {shape['T']} tokens"
        bases = ms[transformers_step.BASELINE], min(ms[arm] for arm in transformers_step.BF16 if arm in record["agreement"])
        for arm, agreement in record["agreement"].items():
            speed = " / ".join(f"{base / ms[arm]:.2f}x" for base in bases)
            peak = f"{record['peak_gib'][arm]:.1f}" if "peak_gib" in record else "-"
            known = f"{agreement['loss']:.4f}", f"{agreement['worst_db']:.1f}"
            rows.append([what, f"`{arm}`", f"{ms[arm]:.1f}", f"{1e3 * shape['T'] / ms[arm]:,.0f}", speed, *known, peak])
        rows += [[what, f"`{arm}`", f"left out: {why.replace('|', '/')}", *[""] * 5] for arm, why in record["left_out"].items()]
    against = f"against `{transformers_step.BASELINE}` / the fastest in bf16"
    return markdown(["a step", "arm", "ms", "tokens/s", against, "first loss", "worst gradient, dB", "peak, GiB"], rows)


def finetune_table(records: Records) -> str:
    """Fine-tuning of a whole model on one GPU: each arm's speed, memory and losses, and which arms were left out."""
    rows = []
    for record in records:
        what = f"{record_place(record)}, {record['model']} of {record['shape']['layers']} layers, {record['shape']['seq_len']} tokens each"
        for arm, found in record["results"].items():
            how = f"`{arm}`, CUDA graph" if found.get("cuda_graph") else f"`{arm}`"
            measured = (record["ratios"].get(name) for name in finetune.RATIOS if name.startswith(f"{arm}_vs_"))
            speeds = ("-" if ratio is None else f"{ratio:.2f}x" for ratio in measured)
            times = str(found["tokens"]), f"{found['step_s']:.3f}", f"{found['tokens_per_s']:,.0f}"
            most = record["target"].get(f"{arm}_base_gib")
            base = f"{found['base_weights_gib']:.1f}" + ("" if most is None else f" (asked: {most:.0f} at most)")
            peak = f"{found['peak_gib']['allocated']:.1f} / {found['peak_gib']['reserved']:.1f}" if "peak_gib" in found else "-"
            peak += f" ({found['kept_layers']} layers kept within {found['memory_gib']:g})" if "kept_layers" in found else ""
            losses = f"{found['loss_first']:.3f}", f"{found['loss_last']:.3f}"
            rows.append([what, how, *times, " / ".join(speeds), base, f"{found['adapters_gib']:.1f}", peak, *losses])
        rows += [[what, f"`{arm}`", f"left out: {why.replace('|', '/')}", *[""] * 8] for arm, why in record["left_out"].items()]
    memory = "base, GiB", "adapters, GiB", "peak, GiB: allocated / reserved"
    faster = f"against {' / '.join(f'`{base}`' for base, _ in finetune.RATIOS.values())}"
    return markdown(["fine-tuning", "arm", "tokens a step", "s", "tokens/s", faster, *memory, "first loss", "last loss"], rows)


def a2a_table(records: Records) -> str:
    """Times of exchanges and of their parts, and speed against bf16, by size."""
    rows = []
    for record in records:
        ms, shape = median_ms(record), record["shape"]
        times = (f"{ms[arm]:.2f} ms" for arm in ("bf16_total", "mxfp8_total"))
        speeds = (ratio_of_limit(record, name) for name in _A2A_COLUMNS)
        parts = (f"{ms[part]:.2f} ms" for part in _A2A_PARTS)
        rows.append([f"{record_place(record)}, {shape['T']} x {shape['D']}", *times, *speeds, *parts])
    columns = (*_A2A_COLUMNS.values(), *(f"{name} alone" for name in _A2A_PARTS))
    return markdown(["rows a rank, forward + backward", "bf16", "MXFP8", *columns], rows)


def pipeline_tables(records: Records) -> str:
    """torchao's tutorial table of every arm of ours against both baselines, of the records of one run."""
    parts = []
    timed = {arm: what for arm, what in _PIPELINES.items() if all(f"{arm}_total" in record["arms"] for record in records)}
    in_order = sorted(records, key=lambda record: record["routing"] != "balanced")
    for (ours, what), (baseline, against) in itertools.product(timed.items(), PIPELINE_BASELINES.items()):
        shared = ours == "mxfp8" and records[0].get("mxfp8_over") == "symmetric"
        place = f"{record_place(records[0])} over {'symmetric memory' if shared else 'NCCL'}"
        parts.append(f"{what}, {place}, against {against} over NCCL (experts are those of a rank):")
        parts.append(markdown(_TUTORIAL_COLUMNS, [_tutorial_row(record, baseline, ours) for record in in_order]))
    return "\n\n".join(parts)


def _tutorial_row(record: Record, baseline: str, ours: str) -> list[str]:
    """Shape, times and speed-ups in the columns of torchao's tutorial; experts are those of a rank."""
    ms = median_ms(record)
    cells = [str(record["shape"][key]) for key in ("T", "D", "N", "L")]
    cells[0] += "" if record["routing"] == "balanced" else f", {record['routing']}"
    for stage in ("forward", "backward"):
        a, b = ms[f"{baseline}_{stage}"], ms[f"{ours}_{stage}"]
        cells += [f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}x"]
    return [*cells, f"{ms[f'{baseline}_total'] / ms[f'{ours}_total']:.2f}x"]


def standard_error(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """Standard error of the ratio of two means, as a share, from the spread of the seeds of both; NaN for one seed.

    >>> standard_error([0.875, 1.125], [1.0, 1.0])
    0.125
    """
    if min(len(ours), len(baseline)) < 2:
        return math.nan
    shares = (statistics.stdev(losses) / statistics.fmean(losses) / math.sqrt(len(losses)) for losses in (ours, baseline))
    return math.hypot(*shares)


def convergence_table(records: Records) -> str:
    """Held-out losses by recipe and seed, with the target and the resolution of so many seeds."""
    rows, baselines = [], set[str]()
    for record in records:
        unit = record["data"]["unit"]
        size = f"{record['model']['name']}, {record['model']['parameters'] / 1e6:.0f} million parameters"
        what = f"{size}, {record['steps']} steps of {record['shape']['T']} {unit}s"
        *_, baseline = record["arms"]
        baselines.add(baseline)
        for name, arm in record["arms"].items():
            ratio = f"{name}_held_out_vs_{baseline}"
            seeds = ", ".join(f"{loss:.4f}" for loss in arm["held_out"])
            cells = ["", "", ""]
            if ratio in record["ratios"]:
                error = standard_error(arm["held_out"], record["arms"][baseline]["held_out"])
                spread = "" if math.isnan(error) else f"{error:.1%}"
                asked = f"asked: {record['target'][ratio] - 1:.1%} at most"
                cells = [f"{record['ratios'][ratio] - 1:+.3%} ({asked})", spread, range_verdict(record, name)]
            rate = f"lr {arm.get('lr', record['lr']):g}"  # an arm may have its own
            rows.append([f"{record_place(record)}, {what}, {rate}", name, f"{arm['held_out_mean']:.4f}", seeds, *cells])
    base = baselines.pop() if len(baselines) == 1 else "the baseline"
    against = f"mean against {base}", "its standard error", f"within {base}'s seeds"
    return markdown(["held-out loss over the last tenth", "recipe", "mean", "seeds", *against], rows)


def lora_convergence_table(records: Records) -> str:
    """Held-out losses of LoRA on a base in MXFP8 and in bf16: by arm the mean, the seeds and their standard deviation."""
    rows = []
    for record in records:
        *_, baseline = record["arms"]
        what = f"{record_place(record)}, rank {record['rank']}, {record['steps']} steps of {record['batch'] * record['seq_len']} bytes"
        verdict = "no verdict" if record["no_verdict"] else "yes" if record["within_spread"] else "no"
        for name, arm in record["arms"].items():
            spread = "" if arm["held_out_std"] is None else f"{arm['held_out_std']:.4f}"
            compared = ["", ""] if name == baseline else [f"{record['difference']:+.4f}", verdict]
            seeds = ", ".join(f"{loss:.4f}" for loss in arm["held_out"])
            rows.append([what, name, f"{arm['held_out_mean']:.4f}", seeds, spread, *compared])
    columns = "arm", "mean", "seeds", "standard deviation", "mean against bf16", "within bf16's standard deviation"
    return markdown(["held-out loss over the last tenth", *columns], rows)


def train_table(records: Records) -> str:
    """Whole training steps: a row for each arm, the baseline first, with speed, memory, share of the peak and loss."""
    rows = []
    for record in records:
        *ours, baseline = record["arms"]
        ms, what = median_ms(record), f"{record_place(record)}, {trained(record)}"
        for arm in (baseline, *ours):
            step, name = record["steps"][arm], f"{arm}_tokens_per_s_vs_{baseline}"
            mean, limit = mean_ms(record, arm), record["limit"].get(name)
            rows.append([
                what if arm == baseline else "",
                f"{arm.split(',')[0]}, {_moe_layers(step)}",
                f"{ms[arm]:.0f}" if mean is None else f"{ms[arm]:.0f} / {mean:.0f}",
                f"{step['tokens_per_s'] / record['world_size']:,.0f}",
                f"{record['ratios'][name]:.2f}x" if name in record["ratios"] else "",
                f"{limit:.2f}x" if limit and not arm.startswith(BASELINE) else "",
                f"{step['memory_gib']:.1f}",
                *map(share_text, utilizations(record, arm).values()),
                "" if arm == baseline else loss_gaps_text(record, arm, baseline),
            ])  # fmt: skip
    columns = "arm", "ms a step, median / mean", "tokens/s a GPU", "faster", "estimate", "GiB", *UTILIZATIONS.values()
    return markdown(["trained", *columns, f"loss above bf16's, last {LAST_LOSSES} steps: mean (least to most)"], rows)


def published_table(records: Records) -> str:
    """The published models of these records, compared with figures of other projects."""
    return markdown(published.COLUMNS, published.rows(records))


def trained(record: Record) -> str:
    """What all arms trained, with options that are not the default."""
    options = record["options"]
    named = {
        f"{recomputation_of(record)} recomputation": recomputation_of(record) != "none",
        "compiled": options["compile"],
        "quantised weights kept": options["cache_weights"] and "cuda_graph" not in options,
        "attention within documents": "mask_documents" in options,
        "attention by FlashAttention-4": options.get("attn_implementation") == "flash_attention_4",
        "MXFP8 as a CUDA graph": "cuda_graph" in options,
        "linear layers in MXFP8": any(step.get("linears") for step in record["steps"].values()),
        f"output projection in {options.get('output_recipe')}": "output_recipe" in options,
        f"{options.get('dtype')} weights": "dtype" in options,
        f"{options.get('optimizer', '').removeprefix('adamw').removesuffix('bit')}-bit states": "optimizer" in options,
        "stepped during backward": "optimizer_in_backward" in options,
    }
    what = [record["model"]["name"], routing_of(record), f"{record['shape']['T']} tokens a step"]
    others = (f"{name.replace('_', '-')} {options[name]}" for name in ("ep", *DEGREES, *LAYERS) if name in options)
    return ", ".join([*what, *(text for text, present in named.items() if present), *others])


def torchtitan_table(records: Records) -> str:
    """torchtitan's own trainer (benchmarks/torchtitan_0_2.py), in bf16 and with the adapter."""
    rows = []
    for record in records:
        baseline, *ours = record["arms"]
        ms = median_ms(record)
        what = f"{record['model']}, attention by {record['attention']}, MoE in {record['layers']}, {record['shape']['T']} tokens a step"
        for arm in ours:
            gib = f"{record['memory_gib'][baseline]:.0f} / {record['memory_gib'][arm]:.0f} GiB"
            speed = f"**{record['ratios'][f'{arm}_vs_{baseline}']:.2f}x**"
            rows.append([f"{record_place(record)}, {what}", f"`{arm}`", f"{ms[baseline]:.0f} ms", f"{ms[arm]:.0f} ms", speed, gib])
    return markdown(["a step of torchtitan's trainer", "recipe", "its own, bf16", "with mxep", "faster", "memory"], rows)


def _moe_layers(step: Record) -> str:
    """How one arm runs its MoE layers, and whether its steps are CUDA graphs."""
    over = "" if step["transport"] is None else f" over {step['transport']} transport"
    graph = ", a CUDA graph" if step.get("cuda_graph") else ""  # older records do not have it
    return ("one function" if step["one_function"] else "blocks") + over + graph


def accuracy_table(records: Records) -> str:
    """The worst routing of every device and world size, against the same pipeline in bf16."""

    def place(record: Record) -> tuple[str, int]:
        return record["device"], record["world_size"]

    rows = []
    for (device, world), group in itertools.groupby(sorted(records, key=place), place):
        found = list(group)
        shape = found[0]["shape"]
        where = "CPU, gloo" if device == "cpu" else f"{device_title(device)}, NCCL"
        where += f", {world} ranks, ({shape['T']}, {shape['D']}) x ({shape['L']}, {shape['N']})"
        rows.append([where, *(f"{min(record['sqnr_db'][name] for record in found):.1f} dB" for name in ("out", "dx", "dw"))])
    return markdown(["five blocks against bf16, worst of balanced, random, starved routing", "out", "dx", "dW"], rows)


def run_table(name: str, folder: Path = RESULTS) -> str:
    """Some steps of every run whose metrics (`metrics.jsonl` of `mxep train`) the folder has as NAME-*.jsonl."""
    parts = []
    for path in sorted(folder.glob(f"{name}-*.jsonl")):
        run, *records = read_metrics(path)
        steps = [record for record in records if record["kind"] == "step"]
        options = run["settings"]
        device = path.stem.partition("-")[2].rpartition("-")[0]
        parts.append(
            f"{run['world']} x {device_title(device)}, {run['model']['name']}, EP {options['ep']}, {options['batch']} sequences of "
            f"{options['seq_len']} tokens a GPU,\n{options['activation_checkpoint']} recomputation"
            f"{', compiled' * options['compile']}, {options['recipe']}"
            f"{'' if run['transport'] is None else ', ' + run['transport'] + ' transport'}:"
        )
        more = [name for name in ("mfu_causal", "hfu") if name in steps[-1]]
        form = "{step}|{loss:.4f}|{grad_norm:.2f}|{memory_gib:.2f} GiB ({memory_share:.1%})|{tps:,.0f}|{tflops:.1f}|{mfu:.1%}"
        form += "".join(f"|{{{name}:.1%}}" for name in more)
        every = max(5, len(steps) // 10)
        rows = [form.format(**step).split("|") for step in steps if step["step"] <= 2 or step["step"] % every == 0]
        parts.append(markdown(["step", "loss", "grad_norm", "memory", "tps", "tflops", "mfu", *more], rows))
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[Records], str]] = {
    "accuracy": accuracy_table,
    "pipeline": pipeline_tables,
    "a2a": a2a_table,
    "layer": layer_tables,
    "grouped_mm": grouped_mm_tables,
    "experts": experts_table,
    "peers": peers_tables,
    "linears": linears_table,
    "attention": attention_table,
    "torchtitan": torchtitan_table,
    "transformers": transformers_table,
    "transformers_step": transformers_step_table,
    "finetune": finetune_table,
    "transformers_ep": transformers_ep_table,
    "quantize": memory_table,
    "rows": memory_table,
    "swiglu": memory_table,
    "optimizer": memory_table,
    "convergence": convergence_table,
    "lora_convergence": lora_convergence_table,
    "train": train_table,
}

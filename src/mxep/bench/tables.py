"""Tables of benchmark records for the terminal: every figure with its reference and its target beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from mxep.bench.layer_tables import COSTS, DIFFERENCES, TITLE, WAYS, costs, difference_rows, exposed_rows, layer_title

TUTORIAL = ("tokens", "dim", "hidden_dim", "num_experts", "fwd_bf16_ms", "fwd_mxfp8_ms", "fwd_speedup", "bwd_bf16_ms", "bwd_mxfp8_ms")
TUTORIAL_COLUMNS = (*TUTORIAL, "bwd_speedup", "total_speedup")
PIPELINES = {"mxfp8_nccl": "Pipeline of the five blocks", "mxfp8": "Pipeline in one call"}  # arm -> what it is
BASELINES = {"bf16": "full bf16", "bf16_exchange": "bf16 exchange, MXFP8 GEMMs"}  # both over NCCL
Record = dict[str, Any]


def shape_text(record: Record) -> str:
    """The shape in one line, and the routing where there is one.

    >>> shape_text({"shape": {"M": 8, "K": 64}, "routing": "zipf"})
    'M 8, K 64, zipf'
    """
    words = [f"{key} {value}" for key, value in record["shape"].items()]
    return ", ".join([*words, *([record["routing"]] if "routing" in record else [])])


def arms_table(records: Sequence[Record]) -> Table:
    """Milliseconds of every arm, how far its runs and its rounds differ, and in how many runs the host was behind."""
    table = Table(title=f"{records[0]['benchmark']}: milliseconds", title_justify="left")
    for name in ("shape", "arm", "median", "p20", "p80", "spread", "rounds", "host late", "runs"):
        table.add_column(name, justify="left" if name in ("shape", "arm") else "right")
    for record in records:
        for arm, timing in record["arms"].items():
            values = (f"{timing[key]:.3f}" for key in ("median_ms", "p20_ms", "p80_ms"))
            differ = f"{timing['p80_ms'] / timing['p20_ms'] - 1:.0%}", f"{timing['round_spread'] - 1:.0%}"
            table.add_row(shape_text(record), arm, *values, *differ, f"{timing['host_behind']:.0%}", str(timing["runs"]))
    return table


def figures_table(records: Sequence[Record]) -> Table:
    """Ratios beside their references."""
    table = Table(title=f"{records[0]['benchmark']}: ratios between arms of this run", title_justify="left")
    for name in ("shape", "ratio", "measured", "reference here", "of it", "asked", ""):
        table.add_column(name, justify="left" if name in ("shape", "ratio", "") else "right")
    for record in records:
        for name, value in record["ratios"].items():
            limit, target = record["limit"][name], record["target"].get(name)
            verdict = "" if target is None else "reached" if value >= target else "short"
            asked = "" if target is None else f"{target:.2f}"
            table.add_row(shape_text(record), name, f"{value:.3f}", f"{limit:.3f}", f"{value / limit:.0%}", asked, verdict)
    return table


def device_us(record: Record, call: str) -> float | None:
    """Microseconds of the device for one call, None where no arm times that call."""
    timing = record["arms"].get(call) or record["arms"].get(f"{call}_total")
    return None if timing is None else 1e3 * timing["median_ms"] / record.get("calls", 1)


def host_table(records: Sequence[Record]) -> Table:
    """What a call costs the host, beside what it costs the device where an arm times it."""
    table = Table(title=f"{records[0]['benchmark']}: microseconds of a call", title_justify="left")
    for name in ("shape", "call", "device", "host", "asked of the host"):
        table.add_column(name, justify="left" if name in ("shape", "call") else "right")
    for record in records:
        asked = record.get("host_us_asked", {})
        for call, us in record["host_us"].items():
            on_device = device_us(record, call)
            cells = ("" if on_device is None else f"{on_device:.1f}", f"{us:.1f}", f"{asked[call]:.0f}" if call in asked else "")
            table.add_row(shape_text(record), call, *cells)
    return table


def pipelines_of(records: Sequence[Record]) -> dict[str, str]:
    """Those of `PIPELINES` that every one of the records has timed."""
    return {arm: title for arm, title in PIPELINES.items() if all(f"{arm}_total" in record["arms"] for record in records)}


def tutorial_rows(records: Sequence[Record], baseline: str, ours: str) -> Iterator[tuple[str, ...]]:
    """One row for every balanced record, in the columns of torchao's tutorial; experts are those of a rank."""
    for record in records:
        if record["routing"] != "balanced":
            continue
        ms = {name: timing["median_ms"] for name, timing in record["arms"].items()}
        shape = record["shape"]
        cells = [str(shape[key]) for key in ("T", "D", "N", "L")]
        for stage in ("forward", "backward"):
            a, b = ms[f"{baseline}_{stage}"], ms[f"{ours}_{stage}"]
            cells += [f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}x"]
        yield (*cells, f"{ms[f'{baseline}_total'] / ms[f'{ours}_total']:.2f}x")


def tutorial_table(records: Sequence[Record], baseline: str, ours: str) -> Table:
    """The tutorial's table of one arm against one of its two baselines."""
    title = f"{PIPELINES[ours]} on {records[0]['world_size']} ranks, against {BASELINES[baseline]}"
    table = Table(title=title, title_justify="left")
    for name in TUTORIAL_COLUMNS:
        table.add_column(name, justify="right")
    for row in tutorial_rows(records, baseline, ours):
        table.add_row(*row)
    return table


def _plain(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def layer_tables(records: Sequence[Record]) -> list[Table]:
    """Of whole layers: what the exchanges cost and forward keeps, exposed exchanges where they were traced, differences of all results."""
    made = [_plain("layer: network, speed, memory", (TITLE, *COSTS), ([layer_title(record), *costs(record)] for record in records))]
    if exposed := exposed_rows(records):
        made.append(_plain("layer: exchanges beside which nothing ran", (TITLE, "arm", *WAYS), exposed))
    return [*made, _plain("layer: differences from the blocks in bf16", (TITLE, *DIFFERENCES), difference_rows(records))]


def tables(records: Sequence[Record]) -> list[Table]:
    """Everything to show of one run."""
    pipelines = pipelines_of(records) if records[0]["benchmark"] == "pipeline" else {}
    extra = [tutorial_table(records, baseline, ours) for ours in pipelines for baseline in BASELINES]
    extra += layer_tables(records) if records[0]["benchmark"] == "layer" else []
    with_host = [record for record in records if "host_us" in record]
    return [arms_table(records), *([host_table(with_host)] if with_host else []), figures_table(records), *extra]

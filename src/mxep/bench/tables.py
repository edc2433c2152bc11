"""Tables of benchmark records for the terminal: every figure with its reference and its target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from mxep.bench.layer import EXCHANGES
from mxep.bench.records import Record, median_ms, record_place

TUTORIAL = ("tokens", "dim", "hidden_dim", "num_experts", "fwd_bf16_ms", "fwd_mxfp8_ms", "fwd_speedup", "bwd_bf16_ms", "bwd_mxfp8_ms")
TUTORIAL_COLUMNS = (*TUTORIAL, "bwd_speedup", "total_speedup")
PIPELINES = {"mxfp8_nccl": "Pipeline of the five blocks", "mxfp8": "Pipeline in one call"}  # arm -> what it is
BASELINES = {"bf16": "full bf16", "bf16_exchange": "bf16 exchange, MXFP8 GEMMs"}  # both over NCCL


def shape_text(record: Record) -> str:
    """The shape, and the routing if there is one, in one line.

    >>> shape_text({"shape": {"M": 8, "K": 64}, "routing": "zipf"})
    'M 8, K 64, zipf'
    """
    words = [f"{key} {value}" for key, value in record["shape"].items()]
    return ", ".join([*words, *([record["routing"]] if "routing" in record else [])])


def _table(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with columns of words, then columns of numbers."""
    table = Table(title=title, title_justify="left")
    for name in (*words, *numbers):
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def arms_table(records: Sequence[Record]) -> Table:
    """Milliseconds of every arm, the spread of its runs and rounds, and the share of runs in which the host was late."""
    rows = []
    for record in records:
        for arm, timing in record["arms"].items():
            values = (f"{timing[key]:.3f}" for key in ("median_ms", "p20_ms", "p80_ms"))
            spreads = f"{timing['p80_ms'] / timing['p20_ms'] - 1:.0%}", f"{timing['round_spread'] - 1:.0%}"
            rows.append([shape_text(record), arm, *values, *spreads, f"{timing['host_behind']:.0%}", str(timing["runs"])])
    numbers = ("median", "p20", "p80", "spread", "rounds", "host late", "runs")
    return _table(f"{records[0]['benchmark']}: milliseconds", ("shape", "arm"), numbers, rows)


def figures_table(records: Sequence[Record]) -> Table:
    """Ratios with their references and targets."""
    rows = []
    for record in records:
        for name, value in record["ratios"].items():
            limit, target = record["limit"][name], record["target"].get(name)
            verdict = ("", "") if target is None else (f"{target:.2f}", "reached" if value >= target else "short")
            rows.append([shape_text(record), name, f"{value:.3f}", f"{limit:.3f}", f"{value / limit:.0%}", *verdict])
    numbers = ("measured", "reference here", "of it", "target", "")
    return _table(f"{records[0]['benchmark']}: ratios between arms of this run", ("shape", "ratio"), numbers, rows)


def device_us(record: Record, call: str) -> float | None:
    """Microseconds of the device for one call, None if no arm times that call."""
    timing = record["arms"].get(call) or record["arms"].get(f"{call}_total")
    return None if timing is None else 1e3 * timing["median_ms"] / record.get("calls", 1)


def host_table(records: Sequence[Record]) -> Table:
    """Microseconds of a call on the host, and on the device if an arm times it."""
    rows = []
    for record in records:
        targets = record.get("host_us_asked", {})
        for call, us in record["host_us"].items():
            on_device = device_us(record, call)
            target = f"{targets[call]:.0f}" if call in targets else ""
            rows.append([shape_text(record), call, "" if on_device is None else f"{on_device:.1f}", f"{us:.1f}", target])
    return _table(f"{records[0]['benchmark']}: microseconds of a call", ("shape", "call"), ("device", "host", "host's target"), rows)


def pipelines_of(records: Sequence[Record]) -> dict[str, str]:
    """The items of `PIPELINES` that all of the records have timed."""
    return {arm: title for arm, title in PIPELINES.items() if all(f"{arm}_total" in record["arms"] for record in records)}


def tutorial_rows(records: Sequence[Record], baseline: str, ours: str) -> Iterator[tuple[str, ...]]:
    """One row for every balanced record, in the columns of torchao's tutorial; experts are those of a rank."""
    for record in records:
        if record["routing"] != "balanced":
            continue
        ms = median_ms(record)
        shape = record["shape"]
        cells = [str(shape[key]) for key in ("T", "D", "N", "L")]
        for stage in ("forward", "backward"):
            a, b = ms[f"{baseline}_{stage}"], ms[f"{ours}_{stage}"]
            cells += [f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}x"]
        yield (*cells, f"{ms[f'{baseline}_total'] / ms[f'{ours}_total']:.2f}x")


def tutorial_table(records: Sequence[Record], baseline: str, ours: str) -> Table:
    """The tutorial's table of one arm against one of its two baselines."""
    title = f"{PIPELINES[ours]} on {records[0]['world_size']} ranks, against {BASELINES[baseline]}"
    return _table(title, (), TUTORIAL_COLUMNS, tutorial_rows(records, baseline, ours))


def layer_tables(records: Sequence[Record]) -> list[Table]:
    """Of whole layers: costs of the exchanges and memory kept, exposed exchanges if they were traced, differences of all results."""
    made = [_table("layer: network, speed, memory", (TITLE, *COSTS), (), ([layer_title(record), *costs(record)] for record in records))]
    if exposed := exposed_rows(records):
        made.append(_table("layer: exposed exchanges", (TITLE, "arm", *EXCHANGES), (), exposed))
    return [*made, _table("layer: differences from the blocks in bf16", (TITLE, *DIFFERENCES), (), difference_rows(records))]


def tables(records: Sequence[Record]) -> list[Table]:
    """All tables of one run."""
    pipelines = pipelines_of(records) if records[0]["benchmark"] == "pipeline" else {}
    extra = [tutorial_table(records, baseline, ours) for ours in pipelines for baseline in BASELINES]
    extra += layer_tables(records) if records[0]["benchmark"] == "layer" else []
    with_host = [record for record in records if "host_us" in record]
    return [arms_table(records), *([host_table(with_host)] if with_host else []), figures_table(records), *extra]


TITLE = "T of all ranks / D / H / E / C"
_AUDITS = ("mxfp8", "mxfp8_first_product_in_mx")


def layer_title(record: Record) -> str:
    """Machine, size and routing in one line."""
    size = " / ".join(str(record["shape"][key]) for key in ("T_global", "D", "H", "E", "C"))
    return f"{record_place(record)}, {size}, {record['routing']}"


def kept_gib(audit: dict[str, int]) -> float:
    """GiB that a forward keeps, without its input, which is in memory anyway."""
    return sum(size for part, size in audit.items() if part != "input") / 2**30


def costs(record: Record) -> list[str]:
    """Time beyond that of one GPU without exchanges, forward and backward; TFLOP/s of a rank and of all ranks; memory kept."""
    ms = median_ms(record)
    shape = record["shape"]
    products = 6 * shape["T"] * shape["C"] * shape["D"] * shape["H"] / 1e9  # of this rank's tokens, forward, in GFLOP per ms = TFLOP/s
    exposed = [(ms[f"mxfp8_{stage}"] - ms[f"local_{stage}"], ms[f"mxfp8_{stage}"]) for stage in ("forward", "backward")]
    kept = " / ".join(f"{kept_gib(record['saved_bytes'][audit]):.2f}" for audit in _AUDITS if audit in record["saved_bytes"])
    return [
        *(f"{part:.2f} ms, {part / whole:.0%}" for part, whole in exposed),
        f"{products / ms['mxfp8_forward']:.0f} / {2 * products / ms['mxfp8_backward']:.0f}",
        f"{record['world_size'] * 3 * products / ms['mxfp8_total']:.0f}",
        f"{kept} GiB",
    ]


COSTS = (
    "exposed network: longer than one GPU alone, forward",
    "backward",
    "TFLOP/s a rank, forward / backward",
    "net",
    "kept / with the first product in MX",
)


def exposed_rows(records: Sequence[Record]) -> list[list[str]]:
    """The exposed time of each exchange, of every arm that was traced."""
    return [
        [layer_title(record), arm, *(f"{found[name]:.2f} ms" for name in EXCHANGES)]
        for record in records
        for arm, found in record.get("exposed_ms", {}).items()
    ]


def difference_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """The size of every result, and its difference from the blocks in bf16, for every arm."""
    for record in records:
        for arm, found in record["differences"].items():
            for name, of in found.items():
                sizes = f"{record['mean_abs'][name]:.3g}", f"{record['max_abs'][name]:.3g}"
                yield [layer_title(record), arm, name, *sizes, f"{of['mean_relative']:.2%}", f"{of['max_abs']:.3g}", f"{of['db']:.1f}"]


DIFFERENCES = ("arm", "result", "mean |ref|", "max |ref|", "mean difference", "max difference", "dB")

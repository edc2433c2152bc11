"""Tables of benchmark records for the terminal: every figure with its reference and its target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from mxep.bench.records import Record


def shape_text(record: Record) -> str:
    """The shape, and the routing if there is one, in one line.

    >>> shape_text({"shape": {"M": 8, "K": 64}, "routing": "zipf"})
    'M 8, K 64, zipf'
    """
    words = [f"{key} {value}" for key, value in record["shape"].items()]
    return ", ".join([*words, *([record["routing"]] if "routing" in record else [])])


def table_of(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
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
    return table_of(f"{records[0]['benchmark']}: milliseconds", ("shape", "arm"), numbers, rows)


def figures_table(records: Sequence[Record]) -> Table:
    """Ratios with their references and targets."""
    rows = []
    for record in records:
        for name, value in record["ratios"].items():
            limit, target = record["limit"].get(name), record["target"].get(name)
            verdict = ("", "") if target is None else (f"{target:.2f}", "reached" if value >= target else "short")
            reference = ("", "") if limit is None else (f"{limit:.3f}", f"{value / limit:.0%}")
            rows.append([shape_text(record), name, f"{value:.3f}", *reference, *verdict])
    numbers = ("measured", "reference here", "of it", "target", "")
    return table_of(f"{records[0]['benchmark']}: ratios between arms of this run", ("shape", "ratio"), numbers, rows)


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
    return table_of(f"{records[0]['benchmark']}: microseconds of a call", ("shape", "call"), ("device", "host", "host's target"), rows)


def tables(records: Sequence[Record]) -> list[Table]:
    """All tables of one run, each of the records that have something to show in it."""
    makers = {"arms": arms_table, "host_us": host_table, "ratios": figures_table}
    return [make(found) for field, make in makers.items() if (found := [record for record in records if record.get(field)])]

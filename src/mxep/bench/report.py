"""Puts the records into the README and docs/performance.md, between their markers, and draws docs/plots: `mxep bench report`.

A test holds both pages to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxep.bench.plots import draw
from mxep.bench.readme_tables import TABLES
from mxep.bench.records import read_records
from mxep.shapes import record_bytes

START, END = "<!-- measured: written by `python -m mxep.bench.report` from benchmarks/results -->", "<!-- end measured -->"
_NAMES = {"cpu": "CPU, gloo"}


def accuracy_table(records: list[dict[str, Any]]) -> str:
    """Markdown table: the worst routing of every device and world size, against the same pipeline in bf16."""
    lines = [
        "| five blocks against bf16, worst of balanced, random, starved routing | out | dx | dW | bytes of a sent row, against bf16 |",
        "|---|---|---|---|---|",
    ]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        runs.setdefault((record["device"], record["world_size"]), []).append(record)
    for (device, world), group in sorted(runs.items()):
        shape = group[0]["shape"]
        worst = [min(record["sqnr_db"][name] for record in group) for name in ("out", "dx", "dw")]
        size = f"{record_bytes(shape['D'])} B, {2 * shape['D'] / record_bytes(shape['D']):.2f}x fewer"
        where = (
            f"{_NAMES.get(device, f'{device.upper()}, NCCL')}, {world} ranks, ({shape['T']}, {shape['D']}) x ({shape['L']}, {shape['N']})"
        )
        lines.append(f"| {where} | " + " | ".join(f"{value:.1f} dB" for value in worst) + f" | {size} |")
    return "\n".join(lines)


def gpu_tests_line(records: list[dict[str, Any]]) -> str:
    """One sentence: what passed on which GPUs, at which commit."""
    runs = [
        f"{record['counts']['passed']} passed, {record['counts']['failed'] + record['counts']['error']} failed on {record['world_size']} "
        f"{record['device'].upper()} (commit {record['commit']})"
        for record in records
    ]
    return f"GPU tests: {'; '.join(runs)}."


# Which records each page shows, in order; only what has records appears.
PAGES: dict[str, dict[str, Callable[[list[dict[str, Any]]], str]]] = {
    "README.md": {
        "accuracy": accuracy_table,
        "pipeline": TABLES["pipeline"],
        "grouped_mm": TABLES["grouped_mm"],
        "gpu_tests": gpu_tests_line,
    },
    "docs/performance.md": {"quantize": TABLES["quantize"], "rows": TABLES["rows"]},
}


def measured_block(page: str) -> str:
    """Everything on a page that has records."""
    blocks = []
    for name, write in PAGES[page].items():
        records = read_records(name)
        if records:
            blocks.append(write(records))
    return "\n\n".join(blocks)


def render(text: str, page: str) -> str:
    """A page's text with the measured block written anew. Raises ValueError when the markers are not there."""
    if START not in text or END not in text:
        raise ValueError(f"report: {page} without the markers {START!r} and {END!r}; put them back")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{START}\n{measured_block(page)}\n{END}{after}"


def main() -> int:
    for page in PAGES:
        path = Path(page)
        path.write_text(render(path.read_text(), page))
        print("wrote", path)
    for plot in draw({name: read_records(name) for name in TABLES}):
        print("wrote", plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

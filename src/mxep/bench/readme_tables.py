"""Tables of benchmark records for the pages, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mxep.bench.tables import TUTORIAL_COLUMNS, tutorial_rows

Record = dict[str, Any]
_BASELINES = {"bf16": "full bf16", "bf16_exchange": "bf16 exchange, MXFP8 GEMMs"}
_GEMM_COLUMNS = (("forward", ""), ("dgrad", ""), ("wgrad", ""), ("forward", "rebased_"), ("dgrad", "rebased_"))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _beside_limit(record: Record, name: str) -> str:
    """ "1.93x of 2.01x", or nothing where it was not measured."""
    if name not in record["ratios"]:
        return ""
    return f"{record['ratios'][name]:.2f}x of {record['limit'][name]:.2f}x"


def record_place(record: Record) -> str:
    """Device, and the number of ranks where there are several."""
    ranks = "" if record["world_size"] == 1 else f"{record['world_size']} x "
    return ranks + record["device"].upper()


def grouped_mm_table(records: Sequence[Record]) -> str:
    """Speed against `torch._grouped_mm` in bf16 beside what the chip allows."""
    header = ["MXFP8 grouped GEMM against torch in bf16, M x K x N, groups, balanced unless said", "forward", "dgrad", "wgrad"]
    header += ["forward, rebased rows", "dgrad, rebased rows"]
    rows = []
    for record in records:
        shape = record["shape"]
        title = f"{record_place(record)}, {shape['M']} x {shape['K']} x {shape['N']}, {shape['G']}"
        title += "" if record["routing"] == "balanced" else f", {record['routing']}"
        rows.append([title, *(_beside_limit(record, f"{kind}_{prefix}vs_torch_bf16") for kind, prefix in _GEMM_COLUMNS)])
    return markdown(header, rows)


def memory_table(records: Sequence[Record]) -> str:
    """Every kernel's lowest and highest share of a device copy's bytes per second."""
    shares: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for name, value in record["ratios"].items():
            kernel = name.removesuffix("_fraction_of_copy")
            if kernel != name:
                shares.setdefault((record_place(record), kernel), []).append(value)
    widths = sorted({record["shape"]["D"] for record in records})
    rows = [[where, f"`{kernel}`", f"{min(values):.0%} - {max(values):.0%}"] for (where, kernel), values in shares.items()]
    return markdown(["device", "kernel", f"share of a device copy's speed, D {widths[0]} to {widths[-1]}"], rows)


def pipeline_tables(records: Sequence[Record]) -> str:
    """The tutorial's two tables, for every device and world size."""
    runs: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        runs.setdefault((record["device"], record["world_size"]), []).append(record)
    parts = []
    for group in runs.values():
        for baseline, title in _BASELINES.items():
            parts.append(
                f"Pipeline of the five blocks, {record_place(group[0])} over NCCL, against {title} (experts are those of a rank):\n"
            )
            parts.append(markdown(TUTORIAL_COLUMNS, list(tutorial_rows(group, baseline))) + "\n")
    return "\n".join(parts).rstrip("\n")


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "pipeline": pipeline_tables,
    "grouped_mm": grouped_mm_table,
    "quantize": memory_table,
    "rows": memory_table,
}

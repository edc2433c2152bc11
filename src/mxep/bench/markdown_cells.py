"""What tables of benchmark records in Markdown have in common: rows, and ratios with their references."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mxep.bench.records import Record

Records = Sequence[Record]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with these names of columns."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *rows])


def limit_of(record: Record, name: str) -> float | None:
    """The reference of a ratio; None if the one GPU that it comes from was unsteady, usually for lack of memory."""
    if any(arm.startswith(("one_gpu", "local")) for arm in record.get("unsteady", [])):
        return None
    return record["limit"].get(name)


def ratio_of_limit(record: Record, name: str, base: float = 1.0) -> str:
    """ "1.93x of 2.01x", or nothing if it was not measured; `base`: time of the baseline in units of that of the record's ratio."""
    if name not in record["ratios"]:
        return ""
    limit = limit_of(record, name)
    return f"{base * record['ratios'][name]:.2f}x" + ("" if limit is None else f" of {base * limit:.2f}x")

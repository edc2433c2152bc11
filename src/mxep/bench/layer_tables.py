"""What `mxep bench layer` has to say beside times and ratios, as rows of text for the terminal and for the pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mxep.bench.records import record_place

Record = dict[str, Any]
WAYS = ("dispatch", "combine", "combine's backward", "dispatch's backward")
TITLE = "T of all ranks / D / H / E / C"
_AUDITS = ("mxfp8", "mxfp8_first_product_in_mx")


def layer_title(record: Record) -> str:
    """Machine, size and routing in one line."""
    size = " / ".join(str(record["shape"][key]) for key in ("T_global", "D", "H", "E", "C"))
    return f"{record_place(record)}, {size}, {record['routing']}"


def kept_gib(audit: dict[str, int]) -> float:
    """GiB that a forward keeps beside its input, which is in memory anyway."""
    return sum(size for part, size in audit.items() if part != "input") / 2**30


def costs(record: Record) -> list[str]:
    """Time beyond that of one GPU that exchanges nothing, forward and backward; TFLOP/s of a rank and of all; what is kept."""
    ms = {arm: timing["median_ms"] for arm, timing in record["arms"].items()}
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
    """Each exchange's time beside which nothing ran, of every arm that was traced."""
    return [
        [layer_title(record), arm, *(f"{found[name]:.2f} ms" for name in WAYS)]
        for record in records
        for arm, found in record.get("exposed_ms", {}).items()
    ]


def difference_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """How far every result of every arm is from the blocks in bf16, beside the size of that result."""
    for record in records:
        for arm, found in record["differences"].items():
            for name, of in found.items():
                sizes = f"{record['mean_abs'][name]:.3g}", f"{record['max_abs'][name]:.3g}"
                yield [layer_title(record), arm, name, *sizes, f"{of['mean_relative']:.2%}", f"{of['max_abs']:.3g}", f"{of['db']:.1f}"]


DIFFERENCES = ("arm", "result", "mean |ref|", "max |ref|", "mean difference", "max difference", "dB")

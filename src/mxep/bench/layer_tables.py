"""Markdown tables of whole layers on several ranks: speed, one GPU as the reference, exchanges in the trace, uneven load."""

from __future__ import annotations

from mxep.bench import imbalance
from mxep.bench.layer import BASELINES, EXCHANGES
from mxep.bench.markdown_cells import Records, limit_of, markdown, ratio_of_limit
from mxep.bench.records import Record, median_ms, record_place

_TITLE = "GPUs, T of all ranks / D / H / E / C, routing"
_LAYER_COLUMNS = {
    "total": "faster",
    "nccl_total": "over NCCL",
    "blocks_total": "separate blocks",
    "bf16_total": "bf16, tokens sent once",
    "inference": "inference, against separate blocks",
}
_NETWORK_COLUMNS = (
    "efficiency forward",
    "backward",
    "exposed network: longer than one GPU alone, forward",
    "backward",
    "TFLOP/s a rank, forward / backward",
    "net",
    "kept / with gate and up in MX",
)
_KEPT_ARMS = ("mxfp8", "mxfp8_first_product_in_mx")


def speeds(records: Records) -> str:
    """Times, and speed against bf16 over NCCL."""
    rows = []
    for record in records:
        ms = median_ms(record)
        base = min(BASELINES, key=lambda arm: ms[f"{arm}_total"])
        times = [f"{ms[f'{base}_{stage}']:.2f} / {ms[f'mxfp8_{stage}']:.2f} ms" for stage in ("forward", "backward")]
        faster = (ratio_of_limit(record, f"{name}_vs_nccl_bf16") for name in _LAYER_COLUMNS)
        rows.append([_title(record), *times, record["mxfp8_over"], *faster])
    return markdown([_TITLE, "forward, bf16 / MXFP8", "backward", "MXFP8 over", *_LAYER_COLUMNS.values()], rows)


def against_one_gpu(records: Records) -> str:
    """Efficiency and exposed network against one GPU without exchanges, TFLOP/s, and the memory kept for backward."""
    rows = []
    for record in records:
        ms, shape = median_ms(record), record["shape"]
        efficiencies = (f"scaling_efficiency_{stage}" for stage in ("forward", "backward"))
        beyond = ["", ""]  # without memory for all experts on one GPU
        if "local_total" in ms and not any(arm.startswith("local") for arm in record.get("unsteady", [])):
            pairs = [(ms[f"mxfp8_{stage}"] - ms[f"local_{stage}"], ms[f"mxfp8_{stage}"]) for stage in ("forward", "backward")]
            beyond = [f"{part:.2f} ms, {part / whole:.0%}" for part, whole in pairs]
        products = 6 * shape["T"] * shape["C"] * shape["D"] * shape["H"] / 1e9  # a rank's forward, in GFLOP; GFLOP per ms = TFLOP/s
        rows.append(
            [
                _title(record),
                *(f"{record['ratios'][name]:.0%}" if limit_of(record, name) else "" for name in efficiencies),
                *beyond,
                f"{products / ms['mxfp8_forward']:.0f} / {2 * products / ms['mxfp8_backward']:.0f}",
                f"{record['world_size'] * 3 * products / ms['mxfp8_total']:.0f}",
                " / ".join(f"{_kept_gib(record['saved_bytes'][arm]):.2f}" for arm in _KEPT_ARMS if arm in record["saved_bytes"]) + " GiB",
            ]
        )
    return markdown([_TITLE, *_NETWORK_COLUMNS], rows)


def exchanges_alone(records: Records) -> str:
    """For each arm the time in which the GPU ran only one of the exchanges; "" without traced records."""
    rows = [
        [_title(record), f"`{arm}`", *(f"{of[name]:.2f} ms" for name in EXCHANGES)]
        for record in records
        for arm, of in record.get("exposed_ms", {}).items()
    ]
    return markdown([_TITLE, "arm", *(f"{name}, alone in the trace" for name in EXCHANGES)], rows) if rows else ""


def uneven_loads(records: Records) -> str:
    """What the busiest rank costs, and what other placements of the experts would save; "" without records of uneven routing."""
    uneven = [record for record in records if record["routing"] == "zipf" and "busy_ms" in record and record["world_size"] > 1]
    if not uneven:
        return ""
    loads = [list(row) for row in dict.fromkeys(map(tuple, imbalance.load_rows(uneven)))]  # records of one size have the same loads
    return "\n\n".join([markdown(imbalance.COSTS, imbalance.cost_rows(uneven)), markdown(imbalance.LOADS, loads)])


def layer_tables(records: Records) -> str:
    """All of them."""
    return "\n\n".join(filter(None, (write(records) for write in (speeds, against_one_gpu, exchanges_alone, uneven_loads))))


def _title(record: Record) -> str:
    size = " / ".join(str(record["shape"][key]) for key in ("T_global", "D", "H", "E", "C"))
    return f"{record_place(record)}, {size}, {record['routing']}"


def _kept_gib(audit: dict[str, int]) -> float:
    """GiB that a forward keeps, without what is in memory anyway: its input, and forms of weights, which the benchmark's cache holds."""
    return sum(size for part, size in audit.items() if part not in ("input", "weights for dgrad")) / 2**30

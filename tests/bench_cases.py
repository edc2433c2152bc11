"""Shared by the tests of benchmarks: a fast clock on a CPU, and the schema of a record."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from mxep.bench import registry
from mxep.bench.timing import Rounds

CPU = torch.device("cpu")
FAST = Rounds(count=3, timed=7, warm_ms=0.0)
FIELDS = {"benchmark", "device", "world_size", "shape", "arms", "ratios", "limit", "commit", "command", "torch", "triton", "date"}
TIMING_FIELDS = {"median_ms", "p20_ms", "p80_ms", "runs", "round_spread", "host_behind"}
SHAPE_KEYS = {
    "a2a": ["T", "D"],
    "layer": ["T", "T_global", "D", "H", "E", "L", "C"],
    "quantize": ["T", "D"],
    "rows": ["T", "D"],
    "swiglu": ["T", "H"],
    "experts": ["T", "D", "H", "L"],
    "optimizer": ["T", "D"],
    "grouped-mm": ["M", "K", "N", "G"],
    "linears": ["T", "K", "N"],
    "attention": ["B", "S", "heads", "kv_heads", "width", "value_width"],
    "peers": ["T", "D", "H", "E", "C"],
    "pipeline": ["T", "D", "N", "L"],
    "transformers": ["T", "D", "H", "E", "C"],
    "transformers-step": ["T", "D", "H", "E", "C", "layers"],
    "finetune": ["seq_len", "D", "H", "E", "C", "layers"],
    "transformers-ep": ["T", "D", "H", "E", "C"],
}


def measured(name: str, **changes: Any) -> list[dict]:
    """The records of a benchmark's quick run, in short rounds."""
    return registry.run(name, registry.Setting(CPU, **{"quick": True, "rounds": FAST, **changes}), "some command", lambda text: None)


def measured_on_ranks(rank: int, world: int, name: str) -> list[dict]:
    return measured(name, group=dist.group.WORLD)


def check_tables(text: str) -> None:
    """Every row of a Markdown table has as many cells as its header."""
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def check_schema(name: str, records: list[dict]) -> None:
    assert records
    for record in records:
        assert set(record) >= FIELDS
        assert record["benchmark"] == name.replace("-", "_")
        assert set(record["shape"]) == set(SHAPE_KEYS[name])
        assert set(record["limit"]) == (set() if name == "finetune" else set(record["ratios"]))
        assert all(set(timing) == TIMING_FIELDS for timing in record["arms"].values())
        assert set(record["unsteady"]) | set(record["host_bound"]) <= set(record["arms"])
        assert all(timing["runs"] >= 20 and timing["median_ms"] > 0 for timing in record["arms"].values())
        json.dumps(record)

"""`mxep bench linears` on a CPU: the record, its table, and a check that notices what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.bench_cases import CPU, check_schema, check_tables, measured

from mxep.bench import dense_linears, markdown_tables, registry, report
from mxep.bench.records import RESULTS, read_records
from mxep.parallel.linear_gains import LinearTimes

ROOT = Path(__file__).parent.parent.parent


def test_record_and_table() -> None:
    records = measured("linears")
    check_schema("linears", records)
    (record,) = records
    arms = {"linear", "linear_compiled", *dense_linears.OURS}
    assert {name.rsplit("_", 1)[0] for name in record["arms"]} == arms | {"dense_fp8", "dense_hp_wgrad"}
    assert set(record["ratios"]) == {f"{arm}_vs_linear" for arm in dense_linears.OURS}
    assert set(record["errors"]) == set(record["host_us"]) == set(record["host_us_calling_thread"]) == arms
    assert all(us > 0 for us in record["host_us"].values())
    assert set(record["host_us_asked"]) == set(dense_linears.OURS)
    assert record["errors"]["mx_kept"] == record["errors"]["mx"]
    assert all(record["errors"]["linear"][name]["all"] < record["errors"]["mx"][name]["all"] / 8 for name in dense_linears.RESULTS)
    table = markdown_tables.linears_table(records)
    assert len(table.splitlines()) == 3
    check_tables(table)
    both = markdown_tables.linears_table([record, {**record, "device": "h100", "host_us_calling_thread": {}}])
    assert "forward + backward, CPU / H100 |" in both
    assert len(both.splitlines()) == 3
    assert both.endswith(" / - |")
    (row,) = (LinearTimes(**row) for row in json.loads(dense_linears.gains_table(records)))
    assert (row.device, row.T, row.K, row.N) == ("cpu", *(record["shape"][name] for name in "TKN"))
    ms = {name: timing["median_ms"] for name, timing in record["arms"].items()}
    bf16 = min(ms["linear_total"], ms["linear_compiled_total"])
    assert (row.bf16, row.hp, row.mx) == pytest.approx((bf16, ms["hp_total"], ms["mx_total"]), abs=1e-3)


def test_the_packaged_table_is_that_of_the_records() -> None:
    records = read_records("linears", ROOT / RESULTS)
    if not records:
        pytest.skip("no record of `mxep bench linears` yet")
    assert (ROOT / report.GAINS).read_text() == dense_linears.gains_table(records), "run mxep bench report"


def test_a_wrong_arm_fails_the_check() -> None:
    problem = dense_linears.LinearProblem(registry.Setting(CPU), 64, 128, 96)
    layer = problem.layers["mx"]

    def call(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return y * torch.where(torch.arange(y.shape[0]) == 3, 1.6, 1.0).unsqueeze(1)

    with mock.patch.dict(problem.layers, mx=call):
        assert (problem.check() or "").startswith("mx: y is off by")
    assert problem.check() is None

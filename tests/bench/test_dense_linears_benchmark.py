"""`mxep bench linears` on a CPU: the record, its table, and a check that notices what is wrong."""

from __future__ import annotations

from unittest import mock

import torch
from tests.bench_cases import CPU, FAST, check_schema

from mxep.bench import dense_linears, registry, report

SETTING = registry.Setting(CPU, quick=True, rounds=FAST)


def test_record_and_table() -> None:
    records = registry.run("linears", SETTING, "", lambda text: None)
    check_schema("linears", records)
    (record,) = records
    arms = {"linear", "linear_compiled", *dense_linears.OURS}
    assert {name.rsplit("_", 1)[0] for name in record["arms"]} == arms | {"dense_fp8", "dense_hp_wgrad"}
    assert set(record["ratios"]) == {f"{arm}_vs_linear" for arm in dense_linears.OURS}
    assert set(record["errors"]) == set(record["host_us"]) == arms
    assert all(us > 0 for us in record["host_us"].values())
    assert set(record["host_us_asked"]) == set(dense_linears.OURS)
    assert record["errors"]["mx_kept"] == record["errors"]["mx"]
    assert all(record["errors"]["linear"][name]["all"] < record["errors"]["mx"][name]["all"] / 8 for name in dense_linears.RESULTS)
    table = report.linears_table(records).splitlines()
    assert len(table) == 3
    assert len({line.count("|") for line in table}) == 1


def test_a_wrong_arm_fails_the_check() -> None:
    problem = dense_linears.LinearProblem(SETTING, 64, 128, 96)
    layer = problem.layers["mx"]

    def call(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return y * torch.where(torch.arange(y.shape[0]) == 3, 1.6, 1.0).unsqueeze(1)

    with mock.patch.dict(problem.layers, mx=call):
        assert (problem.check() or "").startswith("mx: y is off by")
    assert problem.check() is None

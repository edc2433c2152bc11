"""`mxep bench peers` on a CPU: records, tables, the float64 reference, and checks that notice what is wrong."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.bench_cases import CPU, FAST, check_schema

from mxep.bench import peers, registry, report

SETTING = registry.Setting(CPU, quick=True, rounds=FAST)


def test_records_and_tables() -> None:
    records = registry.run("peers", SETTING, "", lambda text: None)
    check_schema("peers", records)
    assert [record["routing"] for record in records] == ["random", "zipf"]
    arms = {"torch", "torch_compiled", *peers.OURS}
    for record in records:
        assert {name.rsplit("_", 1)[0] for name in record["arms"]} == arms | {"dense_bf16", "dense_fp8", "dense_hp_wgrad"}
        assert set(record["ratios"]) == {f"{arm}_vs_compiled" for arm in peers.OURS}
        assert set(record["errors"]) == set(record["saved_bytes"]) == set(record["host_us"]) == arms
        for arm, errors in record["errors"].items():
            assert list(errors) == list(peers.RESULTS)
            assert all(0 < error["all"] <= min(error["row"], error["column"]) for error in errors.values()), arm
        assert all(record["errors"]["bf16"][name]["all"] < record["errors"]["mx"][name]["all"] / 8 for name in peers.RESULTS)
        assert record["errors"]["mx_kept"] == record["errors"]["mx"]
        assert record["saved_bytes"]["mx"] == record["saved_bytes"]["hp"] < record["saved_bytes"]["bf16"] < record["saved_bytes"]["torch"]
    for table in report.peers_tables(records).split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1
        assert len(table.splitlines()) == 2 + len(arms)


def test_reference_is_what_autograd_gives() -> None:
    problem = peers.PeersProblem(SETTING, "tiny", peers.Shape(33, 32, 32, 5, 3), "zipf")
    given = problem.x, problem.scores, problem.w1, problem.w2
    x, scores, w1, w2 = (value.detach().double().requires_grad_() for value in given)
    first = torch.einsum("td,tcnd->tcn", x, w1[problem.choices])
    gate, up = first.chunk(2, dim=-1)
    y = (torch.einsum("tch,tcdh->tcd", torch.nn.functional.silu(gate) * up, w2[problem.choices]) * scores.unsqueeze(-1)).sum(1)
    y.backward(problem.dy.double())
    want = dict(zip(peers.RESULTS, (y, x.grad, scores.grad, w1.grad, w2.grad), strict=True))
    found = peers.true_experts(problem.x, problem.choices, problem.scores, problem.w1.detach(), problem.w2.detach(), problem.dy)
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], msg=name)


def test_worst_row_and_column() -> None:
    want = torch.ones(4, 3, 5)
    got = want.clone()
    got[2, 1] = 2
    assert peers.relative_errors(want, got) == {"all": 0.2887, "row": 1.0, "column": 0.5774}
    got[0, 0, 0] = torch.nan
    assert all(error != error for error in peers.relative_errors(want, got).values())
    assert peers.relative_errors(torch.zeros(2, 2), torch.eye(2)) == dict.fromkeys(("all", "row", "column"), torch.inf)


@pytest.mark.parametrize("wrong", ["a row", "all", "nan"])
def test_a_wrong_arm_fails_the_check(wrong: str) -> None:
    problem = peers.PeersProblem(SETTING, "tiny", peers.Shape(64, 32, 32, 4, 2), "random")
    original = problem.experts["mx"]

    def call(*given: torch.Tensor) -> torch.Tensor:
        y = original(*given)
        row = torch.arange(y.shape[0]).unsqueeze(1) == 3
        return y * {"a row": torch.where(row, 1.6, 1.0), "all": 1.2, "nan": torch.where(row, torch.nan, 1.0)}[wrong]

    with mock.patch.dict(problem.experts, mx=call):
        assert (problem.check() or "").startswith("mx: y is off by")
    assert problem.check() is None


def test_weights_are_kept_once_and_no_others() -> None:
    problem = peers.PeersProblem(SETTING, "tiny", peers.Shape(64, 32, 32, 4, 2), "random")
    for _ in range(2):
        for arm in problem.experts:
            problem.results(arm)
    assert {arm: kept.cache.fills for arm, kept in problem.kept.items()} == {"hp_kept": 4, "mx_kept": 4}
    kept, new = (problem.results(arm) for arm in ("mx_kept", "mx"))
    assert all(torch.equal(kept[name], new[name]) for name in peers.RESULTS)

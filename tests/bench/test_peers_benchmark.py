"""`mxep bench peers` on a CPU: records, tables, the float64 reference, and checks that notice what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.bench_cases import CPU, check_schema, check_tables, measured

from mxep.bench import markdown_tables, peers, registry
from mxep.bench.peer_arms import PEERS
from mxep.bench.records import merged
from mxep.cli import main

SETTING = registry.Setting(CPU, quick=True)


def test_records_and_tables() -> None:
    records = measured("peers")
    check_schema("peers", records)
    assert [record["routing"] for record in records] == ["random", "zipf"]
    arms = {"torch", "torch_compiled", *peers.OURS}
    for record in records:
        assert {name.rsplit("_", 1)[0] for name in record["arms"]} == arms | {"dense_bf16", "dense_fp8", "dense_hp_wgrad"}
        assert {name.removesuffix("_graph") for name in record["arms"] if name.endswith("_graph")} == arms
        graphs = {f"{arm}_graph_vs_compiled_graph" for arm in peers.OURS}
        assert set(record["ratios"]) == {f"{arm}_vs_compiled" for arm in peers.OURS} | graphs | {"hp_vs_eager", "mx_vs_eager"}
        assert record["left_out"] == dict.fromkeys(PEERS, "it needs a GPU")
        assert all(set(record[field]) == arms for field in ("errors", "saved_bytes", "host_us", "host_us_calling_thread"))
        for arm, errors in record["errors"].items():
            assert list(errors) == list(peers.RESULTS)
            assert all(error["all"] > 0 for error in errors.values()), arm
            assert all(error["all"] <= min(error["row"], error["column"]) for name, error in errors.items() if "dw" not in name), arm
        assert all(record["errors"]["bf16"][name]["all"] < record["errors"]["mx"][name]["all"] / 8 for name in peers.RESULTS)
        assert record["errors"]["mx_kept"] == record["errors"]["mx"]
        assert record["saved_bytes"]["mx"] == record["saved_bytes"]["hp"] < record["saved_bytes"]["bf16"] < record["saved_bytes"]["torch"]
    summary, graphs = markdown_tables.peers_tables(records).split("\n\n")  # and none of many tokens
    assert len(summary.splitlines()) == len(graphs.splitlines()) == 2 + len(records)
    assert graphs.startswith("| forward + backward as a CUDA graph | `torch_compiled` | `torch` | `bf16` |")
    many = [{**record, "shape": {**record["shape"], "T": 16384}} for record in records]
    for record in many:
        record["arms"] = {name: times for name, times in record["arms"].items() if not name.endswith("_graph")}
    summary, *others = markdown_tables.peers_tables(many).split("\n\n")
    assert [len(table.splitlines()) for table in others] == [2 + len(arms)] * len(records)
    check_tables(markdown_tables.peers_tables(many))


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


def test_rows_of_weights_are_those_of_experts_with_enough_tokens() -> None:
    problem = peers.PeersProblem(SETTING, "tiny", peers.Shape(64, 32, 32, 3, 1), "random")
    want = torch.ones(3, 64, 32)
    for tokens, rows in (([32, 31, 1], [1.25, 9.0, 9.0]), ([22, 22, 20], [9.0, 9.0, 9.0])):
        problem.choices = torch.arange(3).repeat_interleave(torch.tensor(tokens)).unsqueeze(1)
        got = want.clone()
        got[:, 5] = torch.tensor(rows).unsqueeze(1)
        errors = problem._errors("dw1", want, got)
        assert errors.pop("all") > 0.25
        assert errors == ({"row": 0.25, "column": pytest.approx(0.03125)} if max(tokens) >= 32 else {})
        assert peers.error_problem("mx", {"dw1": errors | {"all": 0.08}}) is None
        assert peers.error_problem("mx", {"dw1": problem._errors("dx", want, got)}) is not None


def test_errors_of_a_constant_factor_and_of_one_sign_are_found() -> None:
    want = torch.randn(256, 8)
    rounded = want * (1 + 0.068 * torch.randn(256, 8).clamp(-2, 2))
    negated = rounded.clone()
    negated[7] *= -1
    for name in ("dx", "dscores"):
        for got, right in ((rounded, True), (1.08 * rounded, False), (negated, False)):
            assert (peers.error_problem("mx", {name: peers.relative_errors(want, got)}) is None) == right


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


def test_a_wrong_graph_fails_the_check() -> None:
    problem = peers.PeersProblem(SETTING, "tiny", peers.Shape(64, 32, 32, 4, 2), "random")
    nothing_runs = mock.patch.object(peers, "captured", lambda call, device, calls: call() or {"": lambda: None})
    with nothing_runs:
        assert (problem.check() or "").startswith("as a CUDA graph, torch: y is off by")


@pytest.mark.parametrize("peer", ["right", "wrong", "raises"])
def test_a_peer_that_fails_is_left_out(peer: str) -> None:
    def call(*given: torch.Tensor) -> torch.Tensor:
        if peer == "raises":
            raise RuntimeError("no kernel for this GPU\nand so on")
        return peers.torch_experts(*given) * (1.2 if peer == "wrong" else 1)

    with mock.patch.object(peers, "load_peers", side_effect=lambda *given: ({"liger": call}, {"sonicmoe": "ImportError: none"})):
        case = peers.PeersProblem(SETTING, "tiny", peers.Shape(64, 32, 32, 4, 2), "random").case()
    assert case.check() is None
    ms = {f"{arm}_total": 2.0 if arm == "liger" else 1.0 for arm in case.arms}
    left_out, figures = case.after()["left_out"], case.compute_figures(ms)
    assert left_out.pop("sonicmoe") == "ImportError: none"
    if peer == "right":
        assert not left_out
        assert figures["mx_vs_best_peer"].value == 2
    else:
        assert "liger" not in case.arms
        assert "mx_vs_best_peer" not in figures
        want = {"wrong": "liger: y is off by", "raises": "RuntimeError: no kernel for this GPU"}[peer]
        assert left_out["liger"].startswith(want)
        assert "\n" not in left_out["liger"]


def test_weights_are_kept_once_and_no_others() -> None:
    problem = peers.PeersProblem(SETTING, "tiny", peers.Shape(64, 32, 32, 4, 2), "random")
    for _ in range(2):
        for arm in problem.experts:
            problem.results(arm)
    assert {arm: kept.cache.fills for arm, kept in problem.kept.items()} == {"hp_kept": 4, "mx_kept": 4}
    kept, new = (problem.results(arm) for arm in ("mx_kept", "mx"))
    assert all(torch.equal(kept[name], new[name]) for name in peers.RESULTS)


def test_only_some_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their records take the places of older ones, and the other cases' stay."""
    (case,) = peers.cases(dataclasses.replace(SETTING, only="zipf"))
    assert case.title == "tiny, 64 tokens, zipf"

    def record(routing: str, T: int, commit: str) -> dict[str, Any]:
        return {"shape": {"T": T}, "model": "tiny", "routing": routing, "commit": commit}

    first, second = record("zipf", 64, "a"), record("random", 64, "a")
    assert merged([first], []) == [first]
    again, other = record("zipf", 64, "b"), record("zipf", 128, "b")
    assert merged([other, again], [first, second]) == [again, second, other]
    (tmp_path / "peers-cpu-1.json").write_text("[")
    assert main(["bench", "peers", "--device", "cpu", "--quick", "--only", "zipf", "--record", "--out", str(tmp_path)]) == 2
    assert "peers-cpu-1.json is damaged" in capsys.readouterr().err
    run = ["bench", "--device", "cpu", "--quick", "--only", "Zipf"]
    assert main([*run, "peers"]) == 2
    assert "--only 'Zipf', want a part of one of these titles: tiny, 64 tokens, random; tiny" in capsys.readouterr().err
    assert main([*run, "rows"]) == 2

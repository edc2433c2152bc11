"""`mxep bench transformers` and `transformers-ep` on a CPU: records, tables, and checks that notice what is wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from tests.bench_cases import check_schema, check_tables, measured
from tests.ranks import run_ranks

from mxep.bench import markdown_tables, registry

transformers_5 = pytest.importorskip("mxep.integrations.transformers_5", reason="the library that is adapted", exc_type=ImportError)


def _wrong(original: Any) -> Any:
    """One column of y is three times what it should be."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        y: torch.Tensor = original(*args, **options)
        return y * torch.where(torch.arange(y.shape[-1]) == 3, 3.0, 1.0)

    return call


def _of_ranks(rank: int, world: int) -> tuple[list[dict], str]:
    records = measured("transformers-ep", group=torch.distributed.group.WORLD)
    with mock.patch.object(transformers_5, "fused_experts", _wrong(transformers_5.fused_experts)), pytest.raises(Exception) as caught:
        measured("transformers-ep", group=torch.distributed.group.WORLD)
    return records, f"{type(caught.value).__name__}: {caught.value}"


def check(name: str, theirs: list[str], records: list[dict], table: str) -> None:
    check_schema(name, records)
    (record,) = records
    assert {"model", "transformers", "check"} <= set(record)
    assert record["shape"]["E"] == 4
    stages = ("forward", "backward", "total")
    assert set(record["ratios"]) == {f"{arm}_{stage}_vs_{their}" for arm in ("mxep", "mxep_mx") for stage in stages for their in theirs}
    assert f"Qwen3-30B-A3B, 64 tokens{' a GPU' if record['world_size'] > 1 else ''}, D 64" in table
    check_tables(table)


def test_one_rank() -> None:
    records = measured("transformers")
    check("transformers", ["grouped_mm", "grouped_mm_compiled"], records, markdown_tables.transformers_table(records))
    with (
        mock.patch.object(transformers_5, "fused_experts", _wrong(transformers_5.fused_experts)),
        pytest.raises(registry.CheckFailedError, match=r"mxep: y at 1.* dB from grouped_mm, want at least 20 dB; no times"),
    ):
        measured("transformers")


def test_an_arm_without_gradients_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_benchmark = pytest.importorskip("mxep.bench.transformers")
    original = transformers_benchmark.AdapterProblem.output

    def without(problem: Any, arm: str) -> Any:
        for parameter in problem.experts.parameters():
            parameter.requires_grad_(arm in problem.theirs)
        return original(problem, arm)

    monkeypatch.setattr(transformers_benchmark.AdapterProblem, "output", without)
    with pytest.raises(registry.CheckFailedError, match=r"mxep: .* at -inf dB from grouped_mm"):
        measured("transformers")


def test_two_ranks() -> None:
    for records, problem in run_ranks(_of_ranks, 2):
        check("transformers-ep", ["all_to_all"], records, markdown_tables.transformers_ep_table(records))
        assert records[0]["transport"] == "collective"
        assert problem.startswith("CheckFailedError: transformers-ep, Qwen3-30B-A3B, 64 tokens: mxep: y at ")
        assert problem.endswith("dB from all_to_all, want at least 20 dB; no times")

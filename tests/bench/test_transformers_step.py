"""`mxep bench transformers-step` on a CPU: arms share parameters, agree, and what is not installed is named."""

from __future__ import annotations

import pytest
import torch
from tests.bench_cases import CPU, FAST, check_schema

from mxep.bench import registry, report, transformers_step

pytest.importorskip("transformers")


def test_transformers_step() -> None:
    records = registry.run("transformers-step", registry.Setting(CPU, rounds=FAST), "", lambda text: None)
    check_schema("transformers-step", records)
    (record,) = records
    assert {"grouped_mm", *transformers_step.OURS} <= set(record["agreement"])
    assert record["agreement"]["mxep_mx"]["loss"] != record["agreement"]["grouped_mm"]["loss"]
    assert set(record["left_out"]) <= {arm for arm in transformers_step.BF16 if "liger" in arm}
    assert {name.rsplit("_vs_")[1] for name in record["ratios"]} == {"grouped_mm", "best_bf16"}


def test_a_wrong_arm_prints_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers_step.StepProblem._forward

    def doubled(problem: transformers_step.StepProblem, arm: str) -> object:
        forward = plain(problem, arm)
        return (lambda: 2 * forward()) if arm == "mxep_hp" and forward is not None else forward

    monkeypatch.setattr(transformers_step.StepProblem, "_forward", doubled)
    with pytest.raises(registry.CheckFailedError, match="mxep_hp: loss"):
        registry.run("transformers-step", registry.Setting(CPU, rounds=FAST), "", lambda text: None)


def test_copies_share_parameters() -> None:
    problem = transformers_step.StepProblem(registry.Setting(CPU))
    problem.forwards["mxep_mx"]().backward()
    grads = {name: parameter.grad for name, parameter in problem.model.named_parameters()}
    assert all(grad is not None and bool(torch.isfinite(grad).all()) for grad in grads.values())


def test_table() -> None:
    records = registry.run("transformers-step", registry.Setting(CPU, rounds=FAST), "", lambda text: None)
    lines = report.transformers_step_table(records).splitlines()
    assert len(lines) == 2 + len(records[0]["agreement"])
    assert "`mxep_mx`" in "".join(lines)

"""`mxep bench transformers-step` on a CPU: arms share parameters, agree, and what is not installed is named."""

from __future__ import annotations

import pytest
import torch
from tests.bench_cases import CPU, check_schema, measured

from mxep.bench import markdown_tables, registry, transformers_step

pytest.importorskip("transformers")


def test_transformers_step() -> None:
    records = measured("transformers-step")
    check_schema("transformers-step", records)
    (record,) = records
    assert {"grouped_mm", *transformers_step.OURS} <= set(record["agreement"])
    assert record["agreement"]["mxep_mx"]["loss"] != record["agreement"]["grouped_mm"]["loss"]
    assert set(record["left_out"]) <= {arm for arm in transformers_step.BF16 if "liger" in arm}
    assert {name.rsplit("_vs_")[1] for name in record["ratios"]} == {"grouped_mm", "best_bf16"}
    lines = markdown_tables.transformers_step_table(records).splitlines()
    assert len(lines) == 2 + len(record["agreement"]) + len(record["left_out"])
    assert "`mxep_mx`" in "".join(lines)


def test_a_wrong_arm_prints_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers_step.StepProblem._forward

    def doubled(problem: transformers_step.StepProblem, arm: str) -> object:
        forward = plain(problem, arm)
        return (lambda: 2 * forward()) if arm == "mxep_hp" and forward is not None else forward

    monkeypatch.setattr(transformers_step.StepProblem, "_forward", doubled)
    with pytest.raises(registry.CheckFailedError, match="mxep_hp: loss"):
        measured("transformers-step")


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"])
def test_an_arm_without_a_gradient_fails_the_check(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    plain = transformers_step.StepProblem._results

    def without(problem: transformers_step.StepProblem, arm: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in plain(problem, arm).items() if (arm, name) != ("mxep_mx", missing)}

    monkeypatch.setattr(transformers_step.StepProblem, "_results", without)
    problem = transformers_step.StepProblem(registry.Setting(CPU))
    problem.case()
    assert f"mxep_mx: no gradient of {missing}, 1 in all" in str(problem.check())


def test_a_wrong_gradient_of_the_head_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers_step.StepProblem._results

    def halved(problem: transformers_step.StepProblem, arm: str) -> dict[str, torch.Tensor]:
        found = plain(problem, arm)
        return found | {"lm_head.weight": 0.5 * found["lm_head.weight"]} if arm == "mxep_mx" else found

    monkeypatch.setattr(transformers_step.StepProblem, "_results", halved)
    problem = transformers_step.StepProblem(registry.Setting(CPU))
    problem.case()
    assert "worst gradient lm_head.weight: 6.0 dB" in str(problem.check())


def test_an_arm_that_changes_parameters_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers_step.StepProblem._forward

    def changing(problem: transformers_step.StepProblem, arm: str) -> object:
        forward = plain(problem, arm)

        def changed() -> torch.Tensor:
            assert forward is not None
            loss = forward()
            loss.register_hook(lambda grad: change())
            return loss

        def change() -> None:
            with torch.no_grad():
                problem.model.lm_head.weight.data[3, 5] += 1  # type: ignore[index, union-attr, operator]

        return changed if arm == "grouped_mm_compiled" else forward

    monkeypatch.setattr(transformers_step.StepProblem, "_forward", changing)
    problem = transformers_step.StepProblem(registry.Setting(CPU))
    before = problem.model.lm_head.weight.detach().clone()  # type: ignore[union-attr, operator]
    problem.case()
    assert problem.check() is None
    assert problem.left_out["grouped_mm_compiled"] == "grouped_mm_compiled changes parameters without the optimizer"
    assert "grouped_mm_compiled" not in problem.agreement
    assert {"mxep_mx", "mxep_mx_compiled"} <= set(problem.agreement)  # of the parameters as they were
    assert torch.equal(problem.model.lm_head.weight, before)  # type: ignore[arg-type]


def test_copies_share_parameters() -> None:
    problem = transformers_step.StepProblem(registry.Setting(CPU))
    problem.forwards["mxep_mx"]().backward()
    grads = {name: parameter.grad for name, parameter in problem.model.named_parameters()}
    assert all(grad is not None and bool(torch.isfinite(grad).all()) for grad in grads.values())

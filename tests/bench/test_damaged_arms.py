"""A benchmark's check fails for an arm that computes something else than it is timed for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mxep.bench import dense_linears, grouped_mm, optimizer_step
from mxep.bench.registry import Setting

SETTING = Setting(torch.device("cpu"), quick=True)


def optimizers_that_agree() -> dict[str, bool]:
    """By arm, whether its check passes."""
    arms = optimizer_step._ARMS.items()
    return {arm: optimizer_step._mover(SETTING, 256, 256, arm, precision).agrees() for arm, precision in arms}


def test_optimizers_as_they_are() -> None:
    assert all(optimizers_that_agree().values())


@pytest.mark.parametrize("damage", ["clipping", "betas", "moments"])
def test_a_damaged_optimizer(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = optimizer_step.build_optimizer

    def damaged(*arguments: Any, **options: Any) -> Any:
        optimizer = original(*arguments, **options)
        step = optimizer.step

        def other() -> None:
            if damage == "clipping":
                optimizer.grad_scale = torch.ones(())
            step()
            for name, value in [pair for state in optimizer.state.values() for pair in state.items()]:
                if damage == "moments" and name != "step":
                    value.zero_()

        for group in optimizer.param_groups:
            group["betas"] = (0.1, 0.5) if damage == "betas" else group["betas"]
        optimizer.step = other
        return optimizer

    monkeypatch.setattr(optimizer_step, "build_optimizer", damaged)
    assert [arm for arm, agrees in optimizers_that_agree().items() if agrees] == ["torch_fused"], "torch's own arm is not damaged"


def test_a_linear_layer_whose_wgrad_is_of_another_recipe() -> None:
    problem = dense_linears.LinearProblem(SETTING, 64, 128, 96)
    assert problem.check() is None
    problem = dense_linears.LinearProblem(SETTING, 64, 128, 96)
    problem.layers["hp"] = problem.layers["mx"]
    assert "hp: dw is off by" in (problem.check() or "")


def test_a_wgrad_in_high_precision_that_returns_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem() -> str | None:
        return next(case for case in grouped_mm.cases(SETTING) if "wgrad_hp" in case.arms).check()

    assert problem() is None
    original = torch.ops.mxep.grouped_wgrad_hp

    def constant(*arguments: Any, **options: Any) -> torch.Tensor:
        return torch.full_like(original(*arguments, **options), 7)

    monkeypatch.setattr(torch.ops.mxep, "grouped_wgrad_hp", constant)
    assert "wgrad_hp" in (problem() or "")

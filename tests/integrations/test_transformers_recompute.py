"""`RecomputeBudget`: the number of layers that it keeps by the peaks of steps, errors, and equal training under a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import build
from transformers import Trainer, TrainingArguments

from mxep.integrations.transformers_recompute import RecomputeBudget

GIB = 2**30
LAYERS = 12


def model_of(layers: int = LAYERS, recomputes: bool = True) -> Any:
    model = build("Qwen3Moe", num_hidden_layers=layers).train()
    if recomputes:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def recomputed(model: nn.Module) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.model.layers]


def memory(
    model: nn.Module, always: float, of_a_layer: float, elsewhere: float = 0.0, size: Callable[[], float] = lambda: 1.0
) -> Callable[[], tuple[int, int]]:
    """Peak memory of a step: a constant part with the activations of one or more layers, or another peak."""

    def measure() -> tuple[int, int]:
        kept = recomputed(model).count(False)
        return int(GIB * always), int(GIB * (always + max(size() * of_a_layer * max(kept, 1), elsewhere)))

    return measure


@pytest.mark.parametrize(
    ("gib", "elsewhere", "kept"),
    [(20.0, 0.0, 5), (16.5, 0.0, 3), (100.0, 0.0, 12), (13.0, 0.0, 1), (11.5, 0.0, 0), (20.0, 5.0, 5), (20.0, 9.9, 3)],
    ids=[
        "some",
        "no more than measured",
        "all",
        "the last one",
        "none",
        "a peak of something else",
        "a higher one, that leaves no room to try",
    ],
)
def test_as_many_layers_as_fit(gib: float, elsewhere: float, kept: int) -> None:
    model = model_of()
    budget = RecomputeBudget(model, gib, memory(model, 10.0, 1.9, elsewhere))
    peaks = []
    for _ in range(9):
        peaks.append(budget._measure()[1] / GIB)
        budget.after_step()
    assert (budget.kept, budget.settled) == (kept, True)
    assert max(peaks) <= max(gib, 10.0 + 1.9 * 3), "no step exceeds the limit, except those that measure"
    assert recomputed(model) == [True] * (LAYERS - kept) + [False] * kept
    assert str(budget) == f"{LAYERS - kept} of 12 layers are recomputed"


def test_a_larger_batch_lets_more_layers_be_recomputed() -> None:
    model, size = model_of(), 1.0
    budget = RecomputeBudget(model, 20.0, memory(model, 10.0, 1.0, size=lambda: size))
    for _ in range(5):
        budget.after_step()
    assert budget.kept == 10
    size = 2.0
    for _ in range(4):
        budget.after_step()
    assert 0 <= budget.kept <= 5
    found = budget.kept
    size = 1.0
    budget.after_step()
    assert budget.kept == found, "a batch that was too large once may come again"


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a model on cpu, want it on a GPU"):
        RecomputeBudget(model_of(2))
    with pytest.raises(ValueError, match="Linear has no layers that transformers can recompute"):
        RecomputeBudget(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="gib=0"):
        RecomputeBudget(model_of(2), 0, lambda: (1, 2))
    with pytest.raises(ValueError, match="no layer is recomputed; call model"):
        RecomputeBudget(model_of(2, recomputes=False), 1.0, lambda: (1, 2)).after_step()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="2 processes, want one"):
        RecomputeBudget(model_of(2), 1.0, lambda: (1, 2))


def test_under_a_trainer(tmp_path: Path) -> None:
    """The losses are those with all layers recomputed, to the bit."""
    rows = torch.randint(3, 256, (6, 24), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    losses = []
    for budgeted in (False, True):
        model = model_of(4, recomputes=False)
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=1, max_steps=6, logging_steps=1, activation_checkpointing=True, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        budget = RecomputeBudget(model, 13.5, memory(model, 10.0, 1.0))
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[budget] if budgeted else [])
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert recomputed(model) == [True] * (1 if budgeted else 4) + [False] * (3 if budgeted else 0)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6

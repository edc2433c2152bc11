"""`GraphedStep` on a CPU, where a replay is a call: it trains as eager steps do, waits for a budget, refuses what no graph holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import build
from tests.steps import Recorder
from transformers import masking_utils

from mxep.integrations import transformers_5
from mxep.integrations.transformers_graph import GraphedStep
from mxep.integrations.transformers_recompute import RecomputeBudget
from mxep.step_graph import EAGER_STEPS

RECOMPUTED = {"use_reentrant": False, "preserve_rng_state": False}


class Run:
    """A model whose step is that of a user's loop; `calls` counts what Python ran of it."""

    def __init__(self, **checkpointing: Any) -> None:
        torch.manual_seed(0)
        self.model = build("Qwen3Moe", num_hidden_layers=4).train()
        transformers_5.accelerate(self.model, "hp")
        self.model.activation_checkpointing_enable(checkpointing or RECOMPUTED)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.calls = 0

    def step(self, tokens: Tensor, **more: Tensor) -> Tensor:
        self.calls += 1
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False, **more).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().double()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (2, 24), generator=generator) for _ in range(count)]


def test_steps_are_those_without_a_graph() -> None:
    eager, graphed, recorder = Run(), Run(), Recorder(())
    call = GraphedStep(graphed.model, graphed.step, capture=recorder)
    want = [eager.step(tokens).item() for tokens in batches(6)]
    got = [call(tokens).item() for tokens in batches(6)]
    assert got == want
    assert (recorder.recorded, recorder.replays) == (1, 6 - EAGER_STEPS)
    assert all(torch.equal(a, b) for a, b in zip(eager.model.parameters(), graphed.model.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"an input of \(2, 12\) torch.int64, want \(2, 24\) torch.int64 as in the first call"):
        call(torch.ones(2, 12, dtype=torch.int64))


def test_a_budget_settles_first() -> None:
    run, recorder, measured = Run(), Recorder(()), []

    def measure() -> tuple[int, int]:
        assert recorder.recorded == 0
        measured.append(sum(not layer.gradient_checkpointing for layer in run.model.model.layers))
        return 0, 2**30 * measured[-1]

    budget = RecomputeBudget(run.model, 2.5, measure)
    call = GraphedStep(run.model, run.step, budget, capture=recorder)
    for tokens in batches(12):
        call(tokens)
    assert (budget.settled, budget.kept) == (True, 2)
    assert len(measured) == 12 - EAGER_STEPS - recorder.replays
    assert recorder.replays > 0


def test_recording_looks_for_no_packed_sequences() -> None:
    """The search reads a value; without it transformers would build a mask of all scores."""
    run, search, found = Run(), masking_utils.find_packed_sequence_indices, []

    def capture(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        found.append(masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])))
        return lambda: None, work()

    call = GraphedStep(run.model, run.step, capture=capture)
    for tokens in batches(EAGER_STEPS + 1):
        call(tokens)
    assert found == [None]
    assert masking_utils.find_packed_sequence_indices is search


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": False, "preserve_rng_state": True}], ids=str)
def test_layers_that_set_random_numbers_back_are_refused(checkpointing: dict[str, Any]) -> None:
    run = Run(**checkpointing)
    call = GraphedStep(run.model, run.step, capture=Recorder(()))
    with pytest.raises(ValueError, match=r'Qwen3MoeDecoderLayer .* call model\.activation_checkpointing_enable\(\{"use_reentrant": '):
        call(batches(1)[0])
    assert run.calls == 0
    run.model.activation_checkpointing_enable(RECOMPUTED)
    call(batches(1)[0])
    assert run.calls == 1


def test_refused() -> None:
    run = Run()
    with pytest.raises(ValueError, match=r"GraphedStep: a model on cpu, want it on a GPU, .*; call the step itself"):
        GraphedStep(run.model, run.step)
    step = functools.partial(run.step, position_ids=torch.arange(24).remainder(12).expand(2, 24))
    with pytest.raises(ValueError, match="position_ids of packed sequences, want whole ones; leave position_ids out"):
        GraphedStep(run.model, step, capture=Recorder(()))(batches(1)[0])

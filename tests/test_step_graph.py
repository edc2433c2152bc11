"""`StepGraph` on a CPU, where a replay is a call: inputs go through the graph's memory."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from tests.steps import Recorder
from torch import Tensor

from mxep.step_graph import EAGER_STEPS, StepGraph, capture_on_gpu
from mxep.train.data.loader import Batch


def test_inputs_are_copied_into_the_memory_of_the_first_call() -> None:
    recorder, seen = Recorder(()), []

    def total(batches: list[Batch], factor: Tensor) -> Tensor:
        seen.append((*(batch.inputs.data_ptr() for batch in batches), factor.data_ptr()))
        assert all(batch.documents is None for batch in batches)
        return (sum(batch.inputs.sum() + batch.labels.sum() for batch in batches) * factor).double()

    graph, found = StepGraph(torch.device("cpu"), recorder), []
    for step in range(6):
        batches = [Batch(torch.tensor([step, index]), torch.tensor([1, 2]), None) for index in range(2)]
        found.append(float(graph(total, batches, torch.tensor(2.0))))
    assert found == [2 * (2 * step + 7) for step in range(6)]
    assert len(set(seen)) == 1
    assert (recorder.recorded, recorder.replays) == (1, 6 - EAGER_STEPS)
    with pytest.raises(ValueError, match=r"an input of \(3,\) torch.int64, want \(2,\) torch.int64 as in the first call"):
        graph(total, [Batch(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2]), None)] * 2, torch.tensor(2.0))


def test_inputs_that_a_replay_cannot_serve() -> None:
    ones = torch.ones(2)
    for first, then, problem in (
        (ones, ones.clone().requires_grad_(), "requires a gradient"),
        (None, ones, "is a Tensor, want a NoneType as in the first call"),
        (3, torch.tensor(3), "is a Tensor, want a int"),
        (ones, 3, "is a int, want a Tensor"),
    ):
        graph = StepGraph(torch.device("cpu"), Recorder(()))
        graph(lambda given: torch.zeros(()), first)
        with pytest.raises(ValueError, match=problem):
            graph(lambda given: torch.zeros(()), then)


def test_inputs_are_not_cast() -> None:
    """A learning rate of another dtype would be rounded in every later step."""
    graph = StepGraph(torch.device("cpu"), Recorder(()))
    assert graph(lambda lr: lr * 10.0, torch.tensor(1)).item() == 10.0
    with pytest.raises(ValueError, match=r"an input of \(\) torch.float32, want \(\) torch.int64 as in the first call"):
        graph(lambda lr: lr * 10.0, torch.tensor(0.5))


def test_inputs_of_a_dict_are_matched_by_key() -> None:
    graph = StepGraph(torch.device("cpu"), Recorder(()))
    tokens, labels = torch.full((4,), 3.0), torch.full((4,), 1.0)

    def difference(batch: dict[str, Tensor]) -> Tensor:
        return batch["tokens"].sum() - batch["labels"].sum()

    given = [{"tokens": tokens, "labels": labels}, {"labels": labels, "tokens": tokens}]
    assert [graph(difference, given[call % 2]).item() for call in range(2 * EAGER_STEPS + 2)] == [8.0] * (2 * EAGER_STEPS + 2)


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_a_capture_lacks_is_no_fault_of_the_step(raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAGraph", "current_stream", "current_device", "default_generators"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())

    def work() -> Tensor:
        raise raised("no more")

    with pytest.raises(raised, match="^no more$" if raised is torch.OutOfMemoryError else "cannot hold this step, .*no more"):
        capture_on_gpu(work)

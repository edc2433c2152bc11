"""A run's steps as a graph on a CPU, where a replay is a call. Options that cannot be recorded are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.steps import Recorder, done, same, state_of, trainer
from torch import Tensor

from mxep.step_graph import StepGraph
from mxep.train.config import TrainConfig
from mxep.train.resolved_config import resolve
from mxep.train.step import check_capturable
from mxep.train.trainer import Trainer


def spoil(run: Trainer, bad: Tensor) -> None:
    """Multiply the loss by a tensor, which a graph reads in every replay."""
    loss = run.microbatches.loss
    run.microbatches.loss = lambda batch: loss(batch) * bad  # type: ignore[method-assign]


IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
LOW_MEMORY: dict[str, Any] = {**IN_BACKWARD, "optimizer": "adamw8bit", "dtype": "bfloat16", "activation_checkpoint": "full"}


@pytest.mark.parametrize("more", [{"accumulate": 2}, {**IN_BACKWARD, "cache_weights": True}, LOW_MEMORY], ids=str)
def test_steps_are_those_without_a_graph(tmp_path: Path, one_rank: None, more: dict[str, Any]) -> None:
    """To the bit: warmup of the rate, a step that is skipped, expert biases, an evaluation in between."""
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text())
    found, ends = [], []
    for graph in (None, StepGraph(torch.device("cpu"), Recorder((4,)))):
        run = trainer(0, 1, str(tmp_path), data=(str(text),), steps=7, warmup=6, bias_update_rate=1e-3, **more)
        run.graph, bad = graph, torch.ones(())
        spoil(run, bad)
        figures = []
        for step in range(7):
            bad.fill_(math.nan if step == 5 else 1.0)
            record = done(run)
            figures.append((record.lr, record.loss, record.grad_norm, record.load_max_over_mean))
            if step == 4:
                figures.append(run.evaluate())
        found.append(figures)
        ends.append(state_of(run))
    assert repr(found[0]) == repr(found[1])  # with NaN
    assert math.isnan(found[0][6][1])
    assert len({figure[0] for figure in found[0] if len(figure) == 4}) == 6, "the rate has no warmup"
    assert len(same(*ends)) == len(ends[0])
    assert any(bool(value.any()) for name, value in ends[1].items() if name.endswith(".expert_bias"))


def test_a_run_warns_where_graphs_are_not_tested(tmp_path: Path, one_rank: None) -> None:
    run = trainer(0, 1, str(tmp_path))
    assert "CUDA graph" not in run.describe()[0]
    run.config = dataclasses.replace(run.config, cuda_graph=True)
    assert run.describe()[0].endswith(", steps as a CUDA graph")
    run.ranks = dataclasses.replace(run.ranks, world=2)
    assert run.describe()[0].endswith(", steps as a CUDA graph")


GRAPH: dict[str, Any] = {"cuda_graph": True}


@pytest.mark.parametrize(
    ("options", "device", "match"),
    [
        ({}, "cpu", "device cpu: want a GPU, or give --no-cuda-graph"),
        ({"fused_layer": False}, "cuda", "--no-fused-layer: .* leave that out, or give --no-cuda-graph"),
        ({"pp": 2, "batch": 2}, "cuda", "--pp=2: the host runs the schedule .* give --pp 1, or"),
        ({"mask_documents": True}, "cuda", "--mask-documents: the number and the length of documents"),
        ({"numerics_every": 5}, "cuda", "--numerics-every=5: only some of the steps count"),
    ],
)
def test_options_that_cannot_be_recorded_are_refused(options: dict[str, Any], device: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"--cuda-graph with {match}"):
        resolve(TrainConfig(**{**GRAPH, **options}), device, 2)
    assert resolve(TrainConfig(**GRAPH), "cuda", 2)


def test_steps_that_wait_for_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXEP_CHECK", raising=False)
    device = torch.device("cuda", 0)
    for transport in (None, "symmetric"):
        check_capturable(device, transport)
    with pytest.raises(ValueError, match=r"by collective transport, .* want symmetric; give --ep 1 .* or give --no-cuda-graph"):
        check_capturable(device, "collective")
    monkeypatch.setenv("MXEP_CHECK", "1")
    with pytest.raises(ValueError, match="MXEP_CHECK=1, whose checks read values on the host; unset it, or"):
        check_capturable(device, None)

"""A small `Trainer`, its steps one at a time, its state, its metrics, and a recorder of steps that needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.train.checkpoint import MANIFEST
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.metrics import MetricsLog, StepRecord, read_metrics
from mxep.train.trainer import Trainer


class Recorder:
    """Records a function by keeping it: it runs in every replay, and writes its result where the first one is."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.result, self.recorded, self.replays = torch.empty(shape, dtype=torch.float64), 0, 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            self.result.copy_(work())

        return replay, self.result


class TrainerWithoutPlot(Trainer):
    """Its runs draw no curve, which takes as long as many of their steps."""

    def train(self) -> bool:
        with mock.patch.object(MetricsLog, "plot", return_value=None):
            return super().train()


def trainer(rank: int, world: int, out: str | Path, from_state: int = 0, **options: object) -> Trainer:
    torch.manual_seed(rank + from_state)
    small = {"device": "cpu", "batch": 2, "seq_len": 32, "eval_tokens": 256, "warmup": 2}
    config = TrainConfig(**{**small, **options})  # type: ignore[arg-type]
    return TrainerWithoutPlot(config, Ranks(rank, world, torch.device("cpu")), Path(out))


def done(run: Trainer) -> StepRecord:
    """A step and its results."""
    return run.finish(run.step())


def records_of(out: str | Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics."""
    return [record for record in read_metrics(Path(out) / "metrics.jsonl") if record["kind"] == kind]


def steps_of(out: str | Path) -> list[int]:
    return [record["step"] for record in records_of(out, "step")]


def losses_of(out: str | Path) -> list[float]:
    return [record["loss"] for record in records_of(out, "step")]


def state_of(run: Trainer) -> dict[str, torch.Tensor]:
    """This rank's weights, experts' biases, moments and AdamW's counts of steps, copied."""
    state = dict(run.model.state_dict())
    for name, parameter in run.model.named_parameters():
        state |= {f"{name}.{key}": value for key, value in run.optimizer.state[parameter].items()}
    return {name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}


def written_before(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Make a checkpoint one of an older mxep: `edit` takes away from its facts what there was not, and its manifest had no checksum."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    edit(content["facts"])
    del content["sha256"]
    path.write_text(json.dumps({**content, "format": 1}))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if torch.equal(one[name], other[name])]

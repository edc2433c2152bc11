"""A small `Trainer`, its steps one at a time, and what its metrics say of them."""

from __future__ import annotations

from pathlib import Path

import torch

from mxep.train.config import TrainConfig
from mxep.train.loop import Trainer
from mxep.train.metrics import StepRecord, read_metrics
from mxep.train.ranks import Ranks


def trainer(rank: int, world: int, out: str, from_state: int = 0, **options: object) -> Trainer:
    torch.manual_seed(rank + from_state)
    small = {"device": "cpu", "batch": 2, "seq_len": 32, "eval_tokens": 256, "warmup": 2}
    config = TrainConfig(**{**small, **options})  # type: ignore[arg-type]
    return Trainer(config, Ranks(rank, world, torch.device("cpu")), Path(out))


def done(run: Trainer) -> StepRecord:
    """A step and what it came to."""
    return run.finish(run.step())


def steps_of(out: Path) -> list[int]:
    return [record["step"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "step"]

"""Steps as a CUDA graph on two GPUs against eager ones, to the bit: FSDP2, expert parallelism over symmetric memory, tensor parallelism."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_symmetric_ranks import BACKEND
from tests.ranks import run_ranks
from tests.steps import done, state_of

from mxep.comm import close_transports
from mxep.step_graph import EAGER_STEPS
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.trainer import Trainer

pytestmark = pytest.mark.multi_gpu
STEPS = 8


def _steps(rank: int, world: int, out: Path, options: dict[str, Any]) -> tuple[list[tuple[float, ...]], dict[str, str]]:
    """Figures of the steps and evaluations, and hashes of this rank's state."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward
    run = Trainer(TrainConfig(**options), Ranks(rank, world, torch.device("cuda", rank)), out)
    figures: list[tuple[float, ...]] = []
    for step in range(1, STEPS + 1):
        record = done(run)
        figures.append((record.loss, record.grad_norm, record.load_max_over_mean, record.dead_experts))
        if step in (EAGER_STEPS, STEPS - 1, STEPS):
            figures.append(run.evaluate())
    state = {name: value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in state_of(run).items()}
    close_transports()
    return figures, {name: hashlib.sha256(content).hexdigest() for name, content in state.items()}


@pytest.mark.parametrize("degrees", [{"ep": 1}, {"ep": 2}, {"ep": 2, "accumulate": 2, "compile": True}, {"ep": 2, "tp": 2}], ids=str)
def test_steps_are_those_without_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, Any]) -> None:
    monkeypatch.setenv("MXEP_CHECK", "0")  # checks read values on the host
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text())
    options: dict[str, Any] = {"device": "cuda", "recipe": "mxfp8_wgrad_with_mx", "fused_layer": True, **degrees}
    options |= {"transport": "symmetric"} if degrees["ep"] > 1 else {}
    options |= {"batch": 2, "seq_len": 256, "data": (str(text),), "steps": STEPS, "eval_tokens": 1024, "bias_update_rate": 1e-3}
    eager, graph = (
        run_ranks(_steps, 2, tmp_path / str(on), {**options, "cuda_graph": on}, backend=BACKEND, timeout=200) for on in (False, True)
    )
    assert eager == graph

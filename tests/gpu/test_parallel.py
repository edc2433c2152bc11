"""Every kind of parallelism, recomputation and torch.compile on two GPUs: the losses of plain FSDP with EP on the same sequences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.steps import losses_of

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

WAYS = {
    "TP": ["--tp", "2", "--ep", "2", "--batch", "4"],
    "PP": ["--pp", "2", "--batch", "4", "--microbatch", "1"],
    "interleaved PP": ["--pp", "2", "--batch", "4", "--microbatch", "1", "--pp-schedule", "Interleaved1F1B"],
    "HSDP": ["--dp-replicate", "2", "--ep", "1", "--batch", "2"],
    "recomputed": ["--batch", "2", "--activation-checkpoint", "full"],
    "MoE layers kept": ["--batch", "2", "--activation-checkpoint", "keep_moe", "--compile"],
    "nothing recomputed": ["--batch", "2", "--activation-checkpoint", "none"],
    "blocks": ["--batch", "2", "--no-fused-layer"],
    "blocks, compiled": ["--batch", "2", "--no-fused-layer", "--activation-checkpoint", "selective", "--compile"],
}


def train(folder: Path, name: str, options: list[str], device: str = "cuda") -> subprocess.Popen[str]:
    """Six steps of four sequences, started."""
    common = ["--device", device, "--nproc", "2", "--steps", "6", "--seq-len", "256", "--warmup", "2", "--data", str(folder / "text.py")]
    command = [sys.executable, "-m", "mxep", "train", *common, "--numerics-every", "3", "--out", str(folder / name), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "bf16"])
def test_losses_do_not_depend_on_the_way(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "text.py").write_text(Path(json.__file__).read_text() + Path(subprocess.__file__).read_text())
    ways = {"plain": ["--batch", "2"], **WAYS}
    # Side by side: they are small, and most of their time is start-up.
    started = {name: train(tmp_path, name, [*options, "--recipe", recipe]) for name, options in ways.items()}
    losses = {}
    for name, process in started.items():
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0, f"{name}: {said}"
        losses[name] = losses_of(tmp_path / name)
    assert len(losses["plain"]) == 6
    for name in WAYS:
        assert losses[name] == pytest.approx(losses["plain"], rel=0.02), name

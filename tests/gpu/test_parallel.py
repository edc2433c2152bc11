"""Every kind of parallelism, recomputation and torch.compile on two GPUs: the losses of plain FSDP with EP on the same sequences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mxep.train.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

WAYS = {
    "TP": ["--tp", "2", "--ep", "2", "--batch", "4"],
    "PP": ["--pp", "2", "--batch", "4", "--microbatch", "1"],
    "interleaved PP": ["--pp", "2", "--batch", "4", "--microbatch", "1", "--pp-schedule", "Interleaved1F1B"],
    "HSDP": ["--dp-replicate", "2", "--ep", "1", "--batch", "2"],
    "recomputed": ["--batch", "2", "--activation-checkpoint", "full"],
    "compiled": ["--batch", "2", "--activation-checkpoint", "selective", "--compile"],
}


def losses(folder: Path, name: str, options: list[str], device: str = "cuda") -> list[float]:
    """Training losses of six steps of four sequences."""
    data = folder / "text.py"
    data.write_text(Path(json.__file__).read_text() + Path(subprocess.__file__).read_text())
    common = ["--device", device, "--nproc", "2", "--steps", "6", "--seq-len", "256", "--warmup", "2", "--data", str(data)]
    command = [sys.executable, "-m", "mxep.cli", "train", *common, "--numerics-every", "3", "--out", str(folder / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{name}: {done.stderr}"
    return [record["loss"] for record in read_metrics(folder / name / "metrics.jsonl") if record["kind"] == "step"]


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "bf16"])
def test_losses_do_not_depend_on_the_way(tmp_path: Path, recipe: str) -> None:
    plain = losses(tmp_path, "plain", ["--batch", "2", "--recipe", recipe])
    assert len(plain) == 6
    for name, options in WAYS.items():
        assert losses(tmp_path, name, [*options, "--recipe", recipe]) == pytest.approx(plain, rel=0.02), name

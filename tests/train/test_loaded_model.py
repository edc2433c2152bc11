"""From a run's checkpoint to its model in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.steps import trainer
from torch import Tensor

import mxep
from mxep.parallel import MXLinear
from mxep.train import load_model
from mxep.train.checkpoint import DamagedCheckpointError
from mxep.train.data.tokenizer import ByteTokenizer
from mxep.train.trainer import Trainer

TOKENS = torch.arange(32).view(1, 32) * 7 % 256


def run_of(out: Path, rank: int = 0, world: int = 1, **options: object) -> Trainer:
    return trainer(rank, world, out, **{"model": "qwen3_debug_cpu", "steps": 4, "data": (json.__file__,), **options})


@torch.no_grad()
def logits(run: Trainer) -> Tensor:
    return run.model.eval()(TOKENS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused_layer": True, "router_dtype": "bf16", "balance_loss": 0.5},
        {
            "model": "dsv3_debug_cpu",
            "converters": "quantize.grouped_mm.mx,quantize.linear.mx",
            "linear_skip": "wkv_a",
            "recipe": "mxfp8",
            "output_recipe": "mxfp8",
            "compile": True,
        },
        {"model": "dsv3_debug", "layers": 2, "yarn": "on", "recipe": "bf16", "activation_checkpoint": "full"},
    ],
)
def test_the_loaded_model_computes_what_the_run_did(options: dict, tmp_path: Path, one_rank: None) -> None:
    run = run_of(tmp_path, compile_backend="aot_eager", **options)
    run.step()
    first = run.model.state_dict()["norm.weight"].clone()
    run.save()
    run.step()
    checkpoint = run.save()
    loaded = load_model(tmp_path)
    assert (loaded.step, loaded.checkpoint, loaded.model.training) == (2, checkpoint, False)
    assert loaded.config == run.config
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    with torch.no_grad():
        assert torch.equal(loaded.model(TOKENS), logits(run))
        assert load_model(tmp_path, recipe="bf16").model(TOKENS).isfinite().all()
    older = load_model(str(tmp_path), step=1)
    assert torch.equal(older.model.state_dict()["norm.weight"], first)
    assert load_model(older.checkpoint, step=1).step == 1
    names = [module for module in load_model(tmp_path, recipe="bf16").model.modules() if isinstance(module, MXLinear)]
    assert not names


def test_in_bf16(tmp_path: Path, one_rank: None) -> None:
    run = run_of(tmp_path, model="dsv3_debug_cpu")
    run.step()
    run.save()
    model = load_model(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu")).model
    kept = {name for name, value in model.state_dict().items() if value.dtype == torch.float32}
    assert {name.rpartition("moe.")[2] for name in kept} == {"expert_bias", "router.gate.weight"}
    for name, value in model.state_dict().items():
        whole = run.model.state_dict()[name]
        assert torch.equal(value, (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).to(value.dtype)), name
    model.train()(TOKENS, labels=TOKENS).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def write_run(rank: int, world: int, out: Path, degrees: dict) -> Tensor:
    run = run_of(out, rank, world, **degrees)
    run.step()
    run.save()
    return logits(run) if "pp" not in degrees else torch.zeros(0)


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2}, {"pp": 2}])
def test_from_the_checkpoint_of_several_ranks(degrees: dict, tmp_path: Path) -> None:
    out = tmp_path / "run"
    want = run_ranks(write_run, 2, out, degrees)
    with torch.no_grad():
        found = load_model(out).model(TOKENS)
    assert found.isfinite().all()
    if "pp" not in degrees:
        whole = torch.cat(want, dim=1) if "tp" in degrees else want[0]  # TP ranks have a part of the sequence each
        torch.testing.assert_close(found, whole, rtol=0.05, atol=0.05)


def test_runs_that_cannot_be_loaded(tmp_path: Path, one_rank: None) -> None:
    with pytest.raises(ValueError, match="is neither a checkpoint nor a run with one"):
        load_model(tmp_path)
    run = run_of(tmp_path)
    checkpoint = run.save()
    with pytest.raises(ValueError, match="has no checkpoint of step 7, want one of 0"):
        load_model(tmp_path, step=7)
    with pytest.raises(ValueError, match="'mxfp9' is unknown"):
        load_model(tmp_path, recipe="mxfp9")
    (path,) = (checkpoint / "tensors").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: tensors/.* does not match its checksum"):
        load_model(tmp_path)


def test_importing_the_trainers_options_loads_no_torch() -> None:
    code = "import sys, mxep.train, mxep.train.option_parser; assert 'torch' not in sys.modules; assert callable(mxep.train.load_model)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert mxep.train.load_model is load_model

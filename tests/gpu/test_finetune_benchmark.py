"""`mxep bench finetune` on a GPU: one layer of the published widths through every arm, in this process and in one of its own."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from mxep.bench.finetune import in_own_process
from mxep.bench.finetune_arms import ARMS, MODELS, FinetuneSizes, measure_arm
from mxep.bench.random_models import load_mxfp4, random_model, write_mxfp4
from mxep.bench.transformers_step import model_config

pytestmark = pytest.mark.gpu
SIZES = FinetuneSizes(layers=1, seq_len=512, warm_up=1, timed=1, sequences=1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arm", ARMS)
def test_an_arm(arm: str, model: str) -> None:
    needed = "peft" if ARMS[arm].lora else "torchao"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    found = measure_arm(arm, SIZES._replace(model=model), torch.device("cuda", 0))
    assert all(math.isfinite(found[name]) for name in ("loss_first", "loss_last"))
    assert 0 < found["peak_gib"]["allocated"] <= found["peak_gib"]["reserved"]
    assert found["base_weights_gib"] < found["peak_gib"]["allocated"]
    assert found["kernels_ms"]["all"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_base_in_mx_is_made_within_its_own_memory(name: str, tmp_path: Path) -> None:
    device, config = torch.device("cuda", 0), model_config(4, tiny=False, name=name)
    if MODELS[name].in_mxfp4:
        write_mxfp4(config, tmp_path, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model = load_mxfp4(tmp_path, device, in_mx=True) if MODELS[name].in_mxfp4 else random_model(config, device, in_mx=True)
    stored = torch.cuda.memory_allocated(device) - before
    largest = max(parameter.numel() for parameter in model.parameters())
    assert torch.cuda.max_memory_allocated(device) - before < stored + (12 if MODELS[name].in_mxfp4 else 8) * largest
    in_bf16 = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert stored < 0.72 * in_bf16, "embeddings and the projection to logits stay in bf16"


def test_an_arm_in_a_process_of_its_own() -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    found = in_own_process(measure_arm, "full_accelerate", SIZES, torch.device("cuda", 0))
    assert math.isfinite(found["loss_last"])

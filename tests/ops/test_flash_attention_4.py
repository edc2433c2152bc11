"""Where FlashAttention-4 cannot run, an error says what to do; its numbers are tested in tests/gpu/test_document_mask.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mxep.ops.attention import flash_attention_4
from mxep.ops.attention.flash_attention_4 import check_flash_attention_4
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.trainer import Trainer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.device:
    monkeypatch.setattr(flash_attention_4, "compute_capability", lambda index: request.param)
    monkeypatch.setattr(flash_attention_4, "chip_of", lambda index: "sm_{}{}".format(*request.param))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("gpu", [(8, 9)], indirect=True)
def test_of_an_older_gpu(gpu: torch.device) -> None:
    with pytest.raises(ValueError, match=r"here: FlashAttention-4 on a GPU of sm_89, want a GPU of sm_90 \(Hopper\) or newer; take 'sdpa'"):
        check_flash_attention_4("here", gpu)


@pytest.mark.parametrize("gpu", [(9, 0), (10, 0)], indirect=True)
def test_without_the_package(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    flash_attention_4._package.cache_clear()
    with pytest.raises(ValueError, match=r'here: FlashAttention-4 needs the package flash-attn-4; pip install "\.\[flash_attn\]" in the'):
        check_flash_attention_4("here", gpu)


def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    config = TrainConfig(model="dsv3_debug_cpu", device="cpu", attn_implementation="flash_attention_4")
    with pytest.raises(ValueError, match="--attn-implementation: FlashAttention-4 on device cpu, want a GPU"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), tmp_path)

"""`tests/programs/finetune_unsloth.py`: the folder that it writes for unsloth is the model of `mxep bench finetune`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
from mxep.bench.random_models import random_model  # noqa: E402
from mxep.bench.transformers_step import model_config  # noqa: E402

PROGRAM = Path(__file__).parents[1] / "programs" / "finetune_unsloth.py"


def test_the_folder_holds_the_same_weights(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROGRAM), str(tmp_path / "model"), "--write", "--tiny", "--layers", "2"], check=True)
    want = random_model(model_config(2, True, "Qwen3-30B-A3B"), torch.device("cpu"), in_mx=False).state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    assert want.keys() == found.keys()
    assert all(torch.equal(found[name], values) for name, values in want.items())
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("the quick brown fox")["input_ids"]) == 4

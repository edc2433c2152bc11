"""`RecomputeBudget` on a GPU: it keeps some layers, and steps stay below the limit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import build

from mxep.integrations import transformers_5
from mxep.integrations.transformers_recompute import RecomputeBudget

pytestmark = pytest.mark.gpu


def test_some_layers_are_kept() -> None:
    model = build("Qwen3Moe", num_hidden_layers=8).to(torch.bfloat16).cuda().train()
    transformers_5.accelerate(model, "mxfp8_wgrad_with_hp", linears=None)
    tokens = torch.randint(3, 256, (16, 512), device="cuda")

    def peak_of_step() -> int:
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return torch.cuda.max_memory_allocated()

    peak_of_step()  # kernels are compiled, gradients exist
    most = peak_of_step()
    model.activation_checkpointing_enable({"use_reentrant": False})
    least = peak_of_step()
    limit = (least + most) // 2
    budget = RecomputeBudget(model, limit / 2**30)
    for _ in range(8):
        peak = peak_of_step()
        budget.after_step()
    assert budget.settled
    assert 0 < budget.kept < 8
    assert peak <= limit

"""Published shapes: what the dataclasses count is what the modules hold, and what the papers say."""

from __future__ import annotations

import pytest
import torch

from mxep.models.families import build_model
from mxep.models.presets import MODELS, TRAIN_DEFAULTS
from mxep.recipe import resolve_recipe


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_flops_of_presets(name: str) -> None:
    config = MODELS[name]
    with torch.device("meta"):
        model = build_model(config, resolve_recipe(None))
    total, active = config.parameters()
    assert sum(p.numel() for p in model.parameters()) == total
    unused = (config.num_experts - config.top_k) * sum(p[0].numel() for moe in model.moe_layers() for p in moe.experts.parameters())
    assert active == total - unused
    assert name in TRAIN_DEFAULTS
    products = active - model.tok_embeddings.weight.numel()
    assert config.flops_per_token(1024) == 6 * products + 6 * config.num_layers * config.scores_width * 1024


def test_published_sizes() -> None:
    billions = {name: [round(count / 1e9, 1) for count in MODELS[name].parameters()] for name in MODELS}
    assert round(billions["dsv3_671b"][0]) == 671
    assert billions["dsv3_671b"][1] == pytest.approx(37.6, abs=0.2)
    assert billions["dsv3_16b"][0] == 15.7
    assert billions["qwen3_30b_a3b"] == [30.5, 3.4]  # 3.4 with the embedding, which Qwen leaves out of its 3.3


def test_attention_work_by_hand() -> None:
    """12 heads' worth of products: queries with keys over their width, weights with values over theirs, 6 FLOP for each."""
    qwen, latent = MODELS["qwen3_debug_cpu"], MODELS["dsv3_debug_cpu"]
    assert qwen.scores_width == 4 * (32 + 32)
    assert latent.scores_width == 4 * (16 + 16 + 32)


def test_published_initialisation() -> None:
    assert (MODELS["dsv3_16b"].init_std, MODELS["dsv3_671b"].init_std, MODELS["qwen3_30b_a3b"].init_std) == (0.006, 0.006, 0.02)
    assert not any(MODELS[name].init_by_depth for name in ("dsv3_16b", "dsv3_671b", "qwen3_30b_a3b"))

"""Published shapes: what the dataclasses count is what the modules hold, and what the papers say."""

from __future__ import annotations

import dataclasses
import doctest

import pytest
import torch

from mxep.models import presets
from mxep.models.families import build_model
from mxep.models.presets import MODELS, TRAIN_DEFAULTS, preset_of, resolve_model, with_layers
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


# As published: DeepSeek-V2-Lite's and DeepSeek-V3's config.json, Qwen3-30B-A3B's.
_SHAPES: dict[str, dict[str, object]] = {
    "dsv3_16b": {
        "vocab_size": 102400, "dim": 2048, "num_layers": 27, "num_dense_layers": 1, "dense_hidden": 10944, "expert_hidden": 1408,
        "num_experts": 64, "top_k": 6, "num_shared_experts": 2, "num_heads": 16, "q_lora_rank": 0, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "dsv3_671b": {
        "vocab_size": 129280, "dim": 7168, "num_layers": 61, "num_dense_layers": 3, "dense_hidden": 18432, "expert_hidden": 2048,
        "num_experts": 256, "top_k": 8, "num_shared_experts": 1, "num_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_groups": 8, "top_groups": 4, "route_scale": 2.5,
        "score_function": "sigmoid", "renormalize": True,
    },
    "qwen3_30b_a3b": {
        "vocab_size": 151936, "dim": 2048, "num_layers": 48, "expert_hidden": 768, "num_experts": 128, "top_k": 8, "num_heads": 32,
        "num_kv_heads": 4, "head_dim": 128,
    },
    "dsv3_debug": {
        "vocab_size": 2048, "dim": 256, "num_layers": 6, "num_dense_layers": 1, "dense_hidden": 1024, "expert_hidden": 256,
        "num_experts": 8, "top_k": 3, "num_shared_experts": 2, "num_heads": 16,
    },
}  # fmt: skip
_ROPE = {"theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_seq_len": 4096}


@pytest.mark.parametrize("name", _SHAPES)
def test_shapes_are_those_published(name: str) -> None:
    model = MODELS[name]
    assert {field: getattr(model, field) for field in _SHAPES[name]} == _SHAPES[name]
    if name.startswith("dsv3"):
        assert {field: getattr(model.rope, field) for field in _ROPE} == _ROPE


def test_attention_work_by_hand() -> None:
    """12 heads' worth of products: queries with keys over their width, weights with values over theirs, 6 FLOP for each."""
    qwen, latent = MODELS["qwen3_debug_cpu"], MODELS["dsv3_debug_cpu"]
    assert qwen.scores_width == 4 * (32 + 32)
    assert latent.scores_width == 4 * (16 + 16 + 32)


def test_published_initialisation() -> None:
    assert (MODELS["dsv3_16b"].init_std, MODELS["dsv3_671b"].init_std, MODELS["qwen3_30b_a3b"].init_std) == (0.006, 0.006, 0.02)
    assert not any(MODELS[name].init_by_depth for name in ("dsv3_16b", "dsv3_671b", "qwen3_30b_a3b"))


def test_the_first_layers_of_a_preset() -> None:
    """Everything but their number and the sum that their balance losses make is the preset's, and the name says how many; all of them
    are the preset."""
    assert doctest.testmod(presets).failed == 0
    assert with_layers("dsv3_16b", None) == with_layers("dsv3_16b", 27) == preset_of("dsv3_16b_of_8_layers") == "dsv3_16b"
    cut = resolve_model(with_layers("qwen3_30b_a3b", 1))
    assert cut.balance_loss == 0.006 / 48
    assert dataclasses.replace(cut, num_layers=48, balance_loss=0.006) == MODELS["qwen3_30b_a3b"]
    for name, layers in (("dsv3_16b", 1), ("dsv3_16b", 28), ("qwen3_debug", 0), ("dsv3_671b", 3)):
        with pytest.raises(ValueError, match=rf"{layers} layers of {name}, want \d \(the first with experts\) to \d+; change --layers"):
            with_layers(name, layers)
    for name in ("dsv3_16b_of_27_layers", "dsv3_16b_of_8_layers_of_4_layers", "gpt_of_8_layers"):
        with pytest.raises(ValueError, match="model: "):
            resolve_model(name)
    with pytest.raises(ValueError, match="'dsv3_16b_of_8_layers' is unknown"):
        with_layers("dsv3_16b_of_8_layers", 4)

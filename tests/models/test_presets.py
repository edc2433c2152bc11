"""Published shapes: counts of the dataclasses are those of the modules and of the papers."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from mxep.models.families import build_model
from mxep.models.presets import (
    LEGACY_MODELS,
    MODELS,
    TRAIN_DEFAULTS,
    Yarn,
    at_length,
    first_layers,
    preset_of,
    resolve_model,
    shape_from_json,
    shape_to_json,
    train_defaults,
)
from mxep.recipe import resolve_recipe


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_presets(name: str) -> None:
    config = MODELS[name]
    with torch.device("meta"):
        model = build_model(config, resolve_recipe(None))
    total, active = config.parameters()
    assert sum(p.numel() for p in model.parameters()) == total
    unused = (config.num_experts - config.top_k) * sum(p[0].numel() for moe in model.moe_layers() for p in moe.experts.parameters())
    assert active == total - unused
    assert name in TRAIN_DEFAULTS


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
_MSCALE = {"dsv3_16b": 0.707, "dsv3_671b": 1.0, "dsv3_debug": 0.7}  # of DeepSeek-V2-Lite, of DeepSeek-V3, of torchtitan


@pytest.mark.parametrize("name", _SHAPES)
def test_shapes_are_those_published(name: str) -> None:
    model = MODELS[name]
    assert {field: getattr(model, field) for field in _SHAPES[name]} == _SHAPES[name]
    if name.startswith("dsv3"):
        assert (model.rope_theta, model.yarn) == (1e4, Yarn(40.0, 32.0, 1.0, 4096, _MSCALE[name]))


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
    whole = MODELS["dsv3_16b"]
    assert first_layers("dsv3_16b", whole, None) == first_layers("dsv3_16b", whole, 27) == ("dsv3_16b", whole)
    assert preset_of("dsv3_16b_of_8_layers") == "dsv3_16b"
    name, cut = first_layers("qwen3_30b_a3b", MODELS["qwen3_30b_a3b"], 1)
    assert (name, resolve_model(name)) == ("qwen3_30b_a3b_of_1_layers", cut)
    assert cut.balance_loss == 0.006 / 48
    assert dataclasses.replace(cut, num_layers=48, balance_loss=0.006) == MODELS["qwen3_30b_a3b"]
    for name, layers in (("dsv3_16b", 1), ("dsv3_16b", 28), ("qwen3_debug", 0), ("dsv3_671b", 3)):
        with pytest.raises(ValueError, match=rf"{layers} layers of {name}, want \d \(the first with experts\) to \d+; change --layers"):
            first_layers(name, MODELS[name], layers)
    for name in ("dsv3_16b_of_27_layers", "dsv3_16b_of_8_layers_of_4_layers", "gpt_of_8_layers"):
        with pytest.raises(ValueError, match="model: "):
            resolve_model(name)


def test_the_16b_is_balanced_as_deepseek_v2_lite() -> None:
    """By aux_loss_alpha; runs from before shapes were kept go on with torchtitan's expert bias and mscale."""
    model, before = MODELS["dsv3_16b"], LEGACY_MODELS["dsv3_16b"]
    assert (model.bias_update_rate, model.layer_balance_loss) == (0.0, pytest.approx(1e-3))
    assert (before.bias_update_rate, before.balance_loss, before.yarn) == (1e-3, 0.0, Yarn(mscale=0.7))
    assert dataclasses.replace(before, bias_update_rate=0.0, balance_loss=model.balance_loss, yarn=model.yarn) == model


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_is_kept_as_json(name: str) -> None:
    values = json.loads(json.dumps(shape_to_json(MODELS[name])))
    assert shape_from_json(values) == MODELS[name]
    for change in ({"class": "Llama"}, {"class": None}, {"heads": 3}, {"dim": "wide"}, {"dim": None}, {"num_layers": []}):
        with pytest.raises(ValueError, match="saved shape"):
            shape_from_json({**values, **change})


def test_a_shape_without_yarn_knows_the_context_before_it() -> None:
    whole, qwen = MODELS["dsv3_16b"], MODELS["qwen3_debug"]
    assert at_length(whole, 4096, yarn=True) == whole
    assert at_length(whole, 1024, yarn=False) == dataclasses.replace(whole, yarn=None, max_seq_len=4096)
    assert at_length(whole, 8192, yarn=False).max_seq_len == 8192
    assert at_length(qwen, 8192, yarn=False) == qwen


def test_defaults_of_other_shapes_are_those_of_the_nearest_preset() -> None:
    assert train_defaults("dsv3_16b_of_8_layers", MODELS["dsv3_debug"]) == ("dsv3_16b", TRAIN_DEFAULTS["dsv3_16b"])
    larger = dataclasses.replace(MODELS["dsv3_16b"], num_layers=30)
    assert train_defaults("mine", larger)[0] == "dsv3_16b"
    assert train_defaults("mine", dataclasses.replace(MODELS["qwen3_debug"], num_layers=5))[0] == "qwen3_debug"

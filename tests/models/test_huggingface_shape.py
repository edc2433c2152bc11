"""config.json files become shapes: those of the hub give the presets, and what our models lack is refused by its name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mxep.models.huggingface import published_config
from mxep.models.huggingface_shape import find_model, read_shape
from mxep.models.presets import MODELS, ModelConfig

# As the hub has them, but for what stands in published_config too.
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "bos_token_id": 100000, "eos_token_id": 100001,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V3: dict[str, Any] = {
    **V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_key_value_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "vocab_size": 129280, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
HUB = {"dsv3_16b": V2_LITE, "dsv3_671b": V3, "qwen3_30b_a3b": QWEN3}


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", HUB)
def test_the_hubs_files_describe_the_presets(name: str, tmp_path: Path) -> None:
    """Context, deviation and Qwen3's balance loss aside, which are not those that the presets train with."""
    folder = write(tmp_path / "hub", HUB[name])
    shape, notes = read_shape(folder)
    preset = MODELS[name]
    balance = preset.balance_loss if name == "qwen3_30b_a3b" else shape.balance_loss
    assert dataclasses.replace(shape, max_seq_len=preset.max_seq_len, init_std=preset.init_std, balance_loss=balance) == preset
    assert published_config(shape).get("router_aux_loss_coef", published_config(shape).get("aux_loss_alpha", 0.001)) == 0.001
    assert (shape.max_seq_len, shape.init_std) == (HUB[name]["max_position_embeddings"], 0.02)
    assert [note.split("config.json: ")[1] for note in notes] == (
        ["num_nextn_predict_layers is 1: multi-token prediction is left out"] if name == "dsv3_671b" else []
    )
    assert read_shape(folder / "config.json") == (shape, notes)
    assert find_model(str(folder)) == ("hub", shape, notes) == find_model(str(folder / "config.json"))
    cut = find_model(str(folder), 4)
    assert (cut[0], cut[1]) == ("hub_of_4_layers", dataclasses.replace(shape, num_layers=4, balance_loss=cut[1].balance_loss))
    assert cut[1].layer_balance_loss == pytest.approx(shape.layer_balance_loss)


@pytest.mark.parametrize("name", MODELS)
def test_written_configurations_are_read(name: str, tmp_path: Path) -> None:
    shape: ModelConfig = MODELS[name]
    described = json.loads(json.dumps(published_config(shape)))
    assert published_config(read_shape(write(tmp_path / "hf", described))[0]) == described


def test_a_model_of_its_own(tmp_path: Path) -> None:
    """Another norm and base, no YaRN, one group; first layers that are dense; transformers' names of today."""
    changes = {"rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": None, "n_group": 1, "topk_group": 1, "q_lora_rank": None}
    shape, _ = read_shape(write(tmp_path / "ungrouped", V3 | changes))
    assert (shape.norm_eps, shape.rope_theta, shape.yarn, shape.num_groups, shape.q_lora_rank) == (1e-5, 5e4, None, 1, 0)
    today = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling", "num_experts", "head_dim")}
    today |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "num_local_experts": 16, "mlp_only_layers": [0, 1]}
    shape, _ = read_shape(write(tmp_path / "qwen", today | {"router_aux_loss_coef": 0}))
    assert (shape.rope_theta, shape.num_experts, shape.num_dense_layers, shape.dense_hidden) == (5e5, 16, 2, 6144)
    assert (shape.head_dim, shape.balance_loss) == (64, 0.0)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sliding window": (QWEN3, {"use_sliding_window": True}, "use_sliding_window is True"),
    "tied": (QWEN3, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "attention bias": (V3, {"attention_bias": True}, "attention_bias is True"),
    "activation": (V2_LITE, {"hidden_act": "gelu"}, "hidden_act is 'gelu' (want 'silu')"),
    "linear rope": (QWEN3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear' (want 'default' or 'yarn')"),
    "yarn of qwen": (QWEN3, {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "rope_scaling is yarn (want none"),
    "two scales": (V3, {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}, "mscale_all_dim is 0.7 (want 1.0)"),
    "one scale": (V3, {"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale_all_dim is missing"),
    "amplitude": (V3, {"rope_scaling": {**V3["rope_scaling"], "attention_factor": 0.9}}, "attention_factor is 0.9 (want 1)"),
    "routing in groups": (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 8}, "topk_method is 'group_limited_greedy'"),
    "renormalised": (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True"),
    "sigmoid of V2": (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid' (want 'softmax')"),
    "every other layer": (QWEN3, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    "a dense layer inside": (QWEN3, {"mlp_only_layers": [3]}, "mlp_only_layers is [3] (want [0])"),
    "fewer key heads": (V3, {"num_key_value_heads": 8}, "num_key_value_heads is 8 (want 128)"),
    "something new": (V3, {"index_topk": 2048}, "index_topk is 2048 (unknown here)"),
    "two at once": (QWEN3, {"attention_bias": True, "use_qk_clip": True}, "attention_bias is True (want False); use_qk_clip is True (unk"),
    "another architecture": (QWEN3, {"model_type": "llama"}, "model_type is 'llama', want one of deepseek_v2, deepseek_v3, qwen3_moe"),
    "no architecture": (QWEN3, {"model_type": ["qwen3_moe"]}, "model_type is ['qwen3_moe'], want one of"),
    "no width": (V3, {"hidden_size": None}, "hidden_size is None, want a whole number of at least 1"),
    "no number": (V3, {"n_routed_experts": "256"}, "n_routed_experts is '256', want a whole number"),
    "no flag": (QWEN3, {"norm_topk_prob": 1}, "norm_topk_prob is 1, want true or false"),
    "below zero": (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, want a whole number of at least 0"),
    "no base": (QWEN3, {"rope_theta": 0}, "rope_theta is 0, want a number above 0"),
    "a width MX cannot have": (V3, {"hidden_size": 7169}, "dim=7169, expert_hidden=2048, want multiples of 32"),
    "no list": (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers is 3 (want [])"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_features_that_our_models_lack_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    values, change, message = REFUSED[kind]
    with pytest.raises(ValueError) as error:
        read_shape(write(tmp_path / "hf", values | change))
    assert message in str(error.value)
    assert str(tmp_path / "hf" / "config.json") in str(error.value)


@pytest.mark.parametrize("key", ["n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "q_lora_rank"])
def test_routing_that_a_file_does_not_specify(key: str, tmp_path: Path) -> None:
    """transformers takes the numbers of DeepSeek-V3 for them."""
    with pytest.raises(ValueError, match=f"{key} is missing, want the number that the model was trained with"):
        read_shape(write(tmp_path / "hf", {name: value for name, value in V3.items() if name != key}))
    if key in ("n_shared_experts", "q_lora_rank"):
        shape, _ = read_shape(write(tmp_path / "none", {**V3, key: None}))
        assert getattr(shape, {"n_shared_experts": "num_shared_experts"}.get(key, key)) == 0


def test_names_before_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset is a preset whatever lies in the current folder; a path says that it is one."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "dsv3_16b", QWEN3)
    assert find_model("dsv3_16b") == ("dsv3_16b", MODELS["dsv3_16b"], [])
    assert find_model("./dsv3_16b")[1].num_experts == 128
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config\.json"):
        find_model("empty")
    with pytest.raises(ValueError, match=r"'gone' is unknown, want one of dsv3_debug_cpu, .*, or a folder with a config\.json"):
        find_model("gone")
    with pytest.raises(ValueError, match=r"'dsv3_16' is unknown.*; the nearest is dsv3_16b$"):
        find_model("dsv3_16")

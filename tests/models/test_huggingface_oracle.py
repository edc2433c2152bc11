"""Files of the transformers library load here and give its logits, and ours load there: names, layouts, rotations, routing, norms."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mxep.models.decoder import Decoder
from mxep.models.families import build_model
from mxep.models.huggingface_files import INDEX, load_published
from mxep.models.huggingface_shape import read_shape
from mxep.models.huggingface_writer import save_published
from mxep.models.presets import TRAINING_FIELDS, DeepSeekV3Config, ModelConfig, Qwen3MoEConfig, Yarn, shape_to_json
from mxep.recipe import resolve_recipe

transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")

COMMON: dict[str, Any] = {"vocab_size": 96, "dim": 64, "expert_hidden": 32, "top_k": 2, "num_heads": 4}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_dense_layers": 1, "dense_hidden": 96}
SHAPES: dict[str, ModelConfig] = {
    "qwen3": Qwen3MoEConfig(**COMMON, num_layers=2, num_experts=4, num_kv_heads=2, head_dim=16, max_seq_len=128),
    "v3": DeepSeekV3Config(
        **COMMON, **LATENT, num_layers=2, num_experts=8, num_shared_experts=1, q_lora_rank=24, score_function="sigmoid", renormalize=True,
        route_scale=2.5, num_groups=4, top_groups=2, yarn=Yarn(),
    ),
    "v2_lite": DeepSeekV3Config(**COMMON, **LATENT, num_layers=2, num_experts=8, yarn=Yarn(mscale=0.707)),
    "no_shared": DeepSeekV3Config(**COMMON, **LATENT, num_layers=2, num_experts=8, num_shared_experts=0),
    "short": DeepSeekV3Config(**COMMON, **LATENT, num_layers=2, num_experts=8, max_seq_len=64, norm_eps=1e-2),
}  # fmt: skip
TOKENS = torch.arange(48).view(2, 24) * 37 % 96


def build(name: str, seed: int = 1) -> Decoder:
    model = build_model(dataclasses.replace(SHAPES[name], init_std=0.2), resolve_recipe("hp"))
    model.init_weights(seed)
    with torch.no_grad():
        for moe in model.moe_layers():
            if SHAPES[name].score_function == "sigmoid":
                moe.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)  # norms that are not one
    return model.eval()


def write(model: Decoder, folder: Path, file_bytes: int = 50_000) -> None:
    assert isinstance(model.config, ModelConfig)
    save_published(model.config, model.state_dict().items(), folder, torch.float32, file_bytes)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("name", SHAPES)
def test_both_ways(name: str, tmp_path: Path) -> None:
    ours = build(name)
    write(ours, tmp_path / "ours")
    assert (tmp_path / "ours" / INDEX).exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=2e-4, atol=2e-4)
    assert float(logits(ours).std()) > 0.5
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    fresh = build(name, seed=2)
    notes = load_published(fresh, tmp_path / "theirs")
    assert not notes or all("max_position" in note or "initializer" in note for note in notes)
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key


def test_a_bias_that_softmax_models_have_no_place_for(tmp_path: Path) -> None:
    """DeepSeek-V2 as torchtitan trains it: what the library computes is ours without the bias, and only a folder without it is written."""
    ours = build("v2_lite")
    for moe in ours.moe_layers():
        moe.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    with pytest.raises(ValueError, match="chooses experts without a bias"):
        write(ours, tmp_path / "hf")
    with_bias = logits(ours)
    assert isinstance(ours.config, ModelConfig)
    save_published(ours.config, ours.state_dict().items(), tmp_path / "hf", torch.float32, drop_expert_bias=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager").eval()
    assert float((logits(theirs) - with_bias).abs().max()) > 0.1
    for moe in ours.moe_layers():
        moe.expert_bias.zero_()
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=2e-4, atol=2e-4)


def test_a_shape_from_the_library(tmp_path: Path) -> None:
    """What it writes of a model describes the model: `read_shape` gives ours back, whatever of it is a default there."""
    for name, shape in SHAPES.items():
        write(build(name), tmp_path / name)
        transformers.AutoConfig.from_pretrained(tmp_path / name).save_pretrained(tmp_path / f"{name}_again")
        for folder in (tmp_path / name, tmp_path / f"{name}_again"):
            read = read_shape(folder)[0]
            assert shape_to_json(read) | training_fields(shape) == shape_to_json(shape), folder


def training_fields(shape: ModelConfig) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in TRAINING_FIELDS}


def test_deepseek_v2_rotates_pairs_for_any_rope_interleave(tmp_path: Path) -> None:
    write(build("v2_lite"), tmp_path / "v2")
    want = build("v2_lite", seed=2)
    load_published(want, tmp_path / "v2")
    described = json.loads((tmp_path / "v2" / "config.json").read_text())
    (tmp_path / "v2" / "config.json").write_text(json.dumps({**described, "rope_interleave": False}))
    ours = build("v2_lite", seed=3)
    load_published(ours, tmp_path / "v2")
    assert torch.equal(logits(ours), logits(want))


@pytest.mark.parametrize("interleave", [False, None])
def test_rotated_rows_in_halves(tmp_path: Path, interleave: bool | None) -> None:
    """The library's deepseek_v3 with rope_interleave off holds halves; read in our order it has the library's logits."""
    write(build("v3"), tmp_path / "pairs")
    described = json.loads((tmp_path / "pairs" / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.DeepseekV3Config(**{**described, "rope_interleave": interleave}), attn_implementation="eager"
    ).eval()
    theirs.save_pretrained(tmp_path / "halves")
    ours = build("v3", seed=2)
    load_published(ours, tmp_path / "halves")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=2e-4, atol=2e-4)
    queries = "layers.0.attention.wq_b.weight"
    assert not torch.equal(ours.state_dict()[queries], dict(theirs.named_parameters())["model.layers.0.self_attn.q_b_proj.weight"])

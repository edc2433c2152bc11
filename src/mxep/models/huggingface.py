"""Tensor names and config.json of the published checkpoints of both families. Imports no torch.

Names and layouts are those of DeepSeek-V3, DeepSeek-V2-Lite and Qwen3-MoE on the Hugging Face hub. They have one matrix (out, in) per
expert; here a layer's experts are stacked.

Quantised folders store a matrix as values and scales under two names: `stored_format`.

Rotary positions: DeepSeek rotates neighbouring pairs of rows, Qwen3 rotates halves, and so do the models here, so nothing is reordered. The
exception is a deepseek_v3 file whose config.json says "rope_interleave": false: its rows are read in the order of `halves_to_pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mxep.json_files import read_json_object, typed
from mxep.models.presets import DeepSeekV3Config, ModelConfig, Qwen3MoEConfig, RouterDtype
from mxep.shapes import MX_BLOCK

CONFIG_JSON = "config.json"
GENERATION_JSON = "generation_config.json"
MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # beside chat_template.jinja, as transformers saves them
_MAX_BYTES = 1 << 24  # of config.json
_SWIGLU = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LATENT = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}


class PublishedField(NamedTuple):
    """A field of a shape in config.json.

    Attributes:
        key: its name there.
        least: of a whole number; None is any number above 0.
        default: where the key is missing or null; None is an error.
    """

    key: str
    least: int | None = 1
    default: float | None = None


COMMON_FIELDS = {
    "vocab_size": PublishedField("vocab_size"),
    "dim": PublishedField("hidden_size"),
    "num_layers": PublishedField("num_hidden_layers"),
    "num_heads": PublishedField("num_attention_heads"),
    "expert_hidden": PublishedField("moe_intermediate_size"),
    "top_k": PublishedField("num_experts_per_tok"),
    "max_seq_len": PublishedField("max_position_embeddings"),
    "norm_eps": PublishedField("rms_norm_eps", None),
    "init_std": PublishedField("initializer_range", None, 0.02),
}
DEEPSEEK_FIELDS = {
    "dense_hidden": PublishedField("intermediate_size"),
    "num_dense_layers": PublishedField("first_k_dense_replace", 0),
    "num_experts": PublishedField("n_routed_experts"),
    "num_shared_experts": PublishedField("n_shared_experts", 0, 0),
    "route_scale": PublishedField("routed_scaling_factor", None, 1.0),
    "num_groups": PublishedField("n_group", 1, 1),
    "top_groups": PublishedField("topk_group", 1, 1),
    "kv_lora_rank": PublishedField("kv_lora_rank"),
    "q_lora_rank": PublishedField("q_lora_rank", 0, 0),
    "qk_nope_head_dim": PublishedField("qk_nope_head_dim"),
    "qk_rope_head_dim": PublishedField("qk_rope_head_dim"),
    "v_head_dim": PublishedField("v_head_dim"),
}
_GROUPED_QUERY = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "q_norm": "q_norm", "k_norm": "k_norm", "wo": "o_proj"}


class StoredFormat(NamedTuple):
    """How a folder stores its quantised tensors: values and scales, each under a name of its own. Other tensors are stored plainly.

    Attributes:
        name: "plain" if nothing is quantised.
        values: suffix of the values' name, after the name of the tensor.
        scales: suffix of the scales' name.
        block: rows and columns that share one scale.
    """

    name: str
    values: str = ""
    scales: str = ""
    block: tuple[int, int] = (1, MX_BLOCK)


PLAIN = StoredFormat("plain")
FP8 = StoredFormat("fp8", "", "_scale_inv", (128, 128))  # the block is what config.json says
MXFP4 = StoredFormat("mxfp4", "_blocks", "_scales")
MXFP8 = StoredFormat("mxfp8", "", "_scale")
MXFP8_QUANTIZED = "mxfp8-quantized"  # the format's name in compressed-tensors


def stored_format(config: Mapping[str, Any], where: Path) -> StoredFormat:
    """How the folder of a config.json stores its tensors, by its quantization_config.

    | quant_method | format | tensors |
    |---|---|---|
    | none | plain | float32, bf16 |
    | fp8 (DeepSeek-V3, Qwen3-FP8) | fp8 | e4m3 `weight` and `weight_scale_inv`, one for each weight_block_size |
    | mxfp4 (gpt-oss) | mxfp4 | e2m1 `_blocks` and e8m0 `_scales`, one for 1x32 |
    | compressed-tensors with mxfp8-quantized, modelopt with MXFP8 | mxfp8 | e4m3 `weight` and e8m0 `weight_scale`, one for 1x32 |

    Args:
        config: the content of config.json.
        where: its path, which begins an error.

    Raises:
        ValueError: another quant_method, or a kind of it that is not supported.

    >>> stored_format({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, Path("config.json"))
    StoredFormat(name='fp8', values='', scales='_scale_inv', block=(128, 128))
    """
    if config.get("quantization_config") is None:
        return PLAIN
    within = f"{where}: quantization_config"
    found = typed(config["quantization_config"], dict, within)
    method = found.get("quant_method")
    if method == "fp8":
        block = typed(found.get("weight_block_size"), list, f"{within}: weight_block_size")
        if len(block) != 2 or not all(type(length) is int and length > 0 for length in block):
            raise ValueError(f"{within}: weight_block_size is {block!r}, want two lengths such as [128, 128]")
        return FP8._replace(block=(block[0], block[1]))
    if method == "mxfp4":
        return MXFP4
    for name, key, wanted in (("compressed-tensors", "format", MXFP8_QUANTIZED), ("modelopt", "quant_algo", "MXFP8")):
        if method == name:
            if found.get(key) != wanted:
                raise ValueError(f"{within}: {key} of {name} is {found.get(key)!r}, want {wanted!r}; take the bf16 files of this model")
            return MXFP8
    raise ValueError(
        f"{within}: quant_method is {method!r}, want fp8, mxfp4, compressed-tensors or modelopt; take the bf16 files of this model"
    )


def published_names(config: ModelConfig) -> dict[str, list[str]]:
    """Our name of each tensor -> its published name; for stacked experts, the published names of all E experts.

    >>> from mxep.models.presets import MODELS
    >>> published_names(MODELS["qwen3_debug"])["layers.5.moe.experts.w2"][15]
    'model.layers.5.mlp.experts.15.down_proj.weight'
    """
    names = {"tok_embeddings.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    names["output.weight"] = ["lm_head.weight"]
    attention = dict(_LATENT) if isinstance(config, DeepSeekV3Config) else _GROUPED_QUERY
    if isinstance(config, DeepSeekV3Config):
        for absent in ("wq",) if config.q_lora_rank else ("wq_a", "q_norm", "wq_b"):
            del attention[absent]
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        names[f"{ours}.attention_norm.weight"] = [f"{theirs}.input_layernorm.weight"]
        names[f"{ours}.ffn_norm.weight"] = [f"{theirs}.post_attention_layernorm.weight"]
        names |= {f"{ours}.attention.{name}.weight": [f"{theirs}.self_attn.{other}.weight"] for name, other in attention.items()}
        if index < config.num_dense_layers:
            names |= {f"{ours}.feed_forward.{name}.weight": [f"{theirs}.mlp.{other}.weight"] for name, other in _SWIGLU.items()}
            continue
        names[f"{ours}.moe.router.gate.weight"] = [f"{theirs}.mlp.gate.weight"]
        names[f"{ours}.moe.expert_bias"] = [f"{theirs}.mlp.gate.e_score_correction_bias"]
        for name, other in _SWIGLU.items():
            names[f"{ours}.moe.experts.{name}"] = [f"{theirs}.mlp.experts.{e}.{other}.weight" for e in range(config.num_experts)]
            if config.num_shared_experts:
                names[f"{ours}.moe.shared_experts.{name}.weight"] = [f"{theirs}.mlp.shared_experts.{other}.weight"]
    return names


def published_router_dtype(config: ModelConfig) -> RouterDtype:
    """Dtype of the family's router GEMM in the transformers library: float32 for deepseek_v2 and v3, the model's for qwen3_moe."""
    return "fp32" if isinstance(config, DeepSeekV3Config) else "bf16"


def is_optional(name: str, config: ModelConfig) -> bool:
    """True if the family's files may lack our tensor of that name: the expert bias, except in DeepSeek-V3."""
    return name.endswith("expert_bias") and config.score_function != "sigmoid"


def is_stacked(name: str) -> bool:
    """True if our tensor of that name is several published ones, one for each expert.

    >>> is_stacked("layers.1.moe.experts.w1"), is_stacked("layers.1.moe.shared_experts.w1.weight")
    (True, False)
    """
    return ".experts." in name


def rotated_rows(name: str, config: ModelConfig) -> tuple[int, int, int] | None:
    """(heads, width of a head, number of its last values that are rotated) of a matrix whose rows are rotated in pairs; else None."""
    if not isinstance(config, DeepSeekV3Config):
        return None
    if name.endswith((".attention.wq.weight", ".attention.wq_b.weight")):
        return config.num_heads, config.qk_head_dim, config.qk_rope_head_dim
    if name.endswith(".attention.wkv_a.weight"):
        return 1, config.kv_lora_rank + config.qk_rope_head_dim, config.qk_rope_head_dim
    return None


def halves_to_pairs(heads: int, width: int, rotated: int) -> list[int]:
    """For each of our rows, which are in neighbouring pairs, the index of the row in a file in halves.

    >>> halves_to_pairs(heads=2, width=5, rotated=4)
    [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    """
    order: list[int] = []
    for head in range(heads):
        start = head * width + width - rotated
        order += range(head * width, start)
        order += [start + pair + half * rotated // 2 for pair in range(rotated // 2) for half in (0, 1)]
    return order


def published_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model of this shape.

    Raises:
        ValueError: no published family has this routing.
    """
    common: dict[str, Any] = {
        **{field.key: getattr(config, name) for name, field in COMMON_FIELDS.items()},
        "norm_topk_prob": config.renormalize,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if isinstance(config, Qwen3MoEConfig):
        if config.score_function != "softmax" or config.num_shared_experts or config.num_groups > 1 or config.route_scale != 1:
            raise ValueError(
                "published config: Qwen3-MoE routes by softmax, ungrouped and unscaled, without shared experts; this shape does not"
            )
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.dense_hidden or 3 * config.dim,  # required even without dense layers
            "num_experts": config.num_experts,
            "mlp_only_layers": list(range(config.num_dense_layers)),
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
            "router_aux_loss_coef": config.balance_loss,
            "rope_theta": config.rope_theta,
            "rope_scaling": None,
        }
    third = config.score_function == "sigmoid"
    if not third and (config.num_groups > 1 or config.renormalize):
        raise ValueError("published config: DeepSeek-V2 routes by softmax ungrouped and does not renormalise; this shape does")
    described = {
        **common,
        **{field.key: getattr(config, name) for name, field in DEEPSEEK_FIELDS.items()},
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": config.num_heads,
        "moe_layer_freq": 1,
        "scoring_func": config.score_function,
        "topk_method": "noaux_tc" if third else "greedy",
        "q_lora_rank": config.q_lora_rank or None,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
    }
    if config.yarn is not None:
        described["rope_scaling"] = {
            "type": "yarn",
            "factor": config.yarn.factor,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "mscale": config.yarn.mscale,
            "mscale_all_dim": config.yarn.mscale,
            "original_max_position_embeddings": config.yarn.original_seq_len,
        }
    return described | ({"num_nextn_predict_layers": 0} if third else {"aux_loss_alpha": float(f"{config.layer_balance_loss:.12g}")})


def read_published_config(folder: Path) -> dict[str, Any]:
    """The config.json in a folder, or such a file itself. Raises ValueError if there is none or it is damaged."""
    path = folder if folder.is_file() else folder / CONFIG_JSON
    if not path.exists():
        raise ValueError(f"{folder} has no {CONFIG_JSON}, want a folder with a model from the Hugging Face hub")
    found = read_json_object(path, "model", _MAX_BYTES)
    for name in ("rope_scaling", "rope_parameters"):
        if found.get(name) is not None:
            typed(found[name], dict, f"{path}: {name}")
    return found


def published_ends(folder: Path) -> set[int]:
    """The tokens that end a text, by a folder's generation_config.json, else by its config.json, as in transformers.

    Raises:
        ValueError: a damaged file, or an eos_token_id that is neither a token nor a list of tokens.
    """
    path = next((folder / name for name in (GENERATION_JSON, CONFIG_JSON) if (folder / name).is_file()), None)
    found = None if path is None else read_json_object(path, "model", _MAX_BYTES).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return {typed(token, int, f"{path}: eos_token_id") for token in ids}

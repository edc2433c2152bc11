"""Reads the model shape in a Hugging Face config.json, and refuses features that our models lack, by name. Imports no torch.

An unknown key is an error, unless its value switches nothing on (null, false, 0, empty).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mxep.models.huggingface import (
    COMMON_FIELDS,
    CONFIG_JSON,
    DEEPSEEK_FIELDS,
    PublishedField,
    published_config,
    read_published_config,
    stored_format,
)
from mxep.models.presets import MODELS, ModelConfig, Yarn, first_layers, preset_of, resolve_model

# The preset that gives each architecture's training values (router losses, bias update rate) if config.json has none.
_PRESETS = {"deepseek_v2": "dsv3_16b", "deepseek_v3": "dsv3_671b", "qwen3_moe": "qwen3_30b_a3b"}
# Features of which our models support one value only.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1,
}
_FIXED_OF: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_moe": {},
}
# Keys that do not affect the shape: names and formats, generation, widths that follow from others, windows that _FIXED switches off.
_NO_SHAPE = frozenset([
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "ep_size",
    "head_dim", "id2label", "label2id", "max_window_layers", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
    "qk_head_dim", "quantization_config", "return_dict", "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta",
    "seq_aux", "sliding_window", "torch_dtype", "transformers_version", "use_cache",
])  # fmt: skip
_MTP = ("num_nextn_predict_layers", "num_mtp_layers")
# Differences in these training choices are reported, not refused.
_REPORTED = ("max_position_embeddings", "initializer_range", "router_aux_loss_coef", "aux_loss_alpha")


class _Values:
    """The values of a config.json, and which keys have been read."""

    def __init__(self, values: dict[str, Any], where: Path) -> None:
        self.values, self.where, self.read = values, where, set[str]()
        self.refused: list[str] = []

    def number(self, key: str, least: int | None = 1, default: Any = None) -> Any:
        """A whole number of at least `least`; with None any number above 0. A null or missing key gives the default, if there is one."""
        self.read.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        fits = isinstance(value, int) and value >= least if least is not None else isinstance(value, int | float) and value > 0
        if isinstance(value, bool) or not fits:
            want = "a number above 0" if least is None else f"a whole number of at least {least}"
            raise ValueError(f"{self.where}: {key} is {value!r}, want {want}")
        return value

    def fields(self, fields: dict[str, PublishedField]) -> dict[str, Any]:
        """The numbers of these fields of a shape, by our name."""
        return {name: self.number(*field) for name, field in fields.items()}

    def flag(self, key: str) -> bool:
        """true or false."""
        self.read.add(key)
        if not isinstance(value := self.values.get(key), bool):
            raise ValueError(f"{self.where}: {key} is {value!r}, want true or false")
        return value

    def fixed(self, key: str, *wanted: Any) -> None:
        """Refuse any other value than these; a missing key is accepted."""
        self.read.add(key)
        value = self.values.get(key)
        if value is not None and value not in wanted:
            self.refused.append(f"{key} is {value!r} (want {' or '.join(map(repr, wanted))})")

    def unread(self) -> None:
        """Refuse keys that have not been read and whose value switches something on."""
        unknown = {key: value for key, value in self.values.items() if key not in self.read and key not in _NO_SHAPE and value}
        self.refused += [f"{key} is {value!r} (unknown here)" for key, value in unknown.items()]


def read_shape(path: Path) -> tuple[ModelConfig, list[str]]:
    """The shape in a config.json, and lines about keys that are ignored.

    Args:
        path: a folder with a config.json, or such a file, of the architectures deepseek_v2, deepseek_v3 or qwen3_moe.

    Raises:
        ValueError: no such file or a damaged one, another architecture, or features that our models lack (all are named).
    """
    content = read_published_config(path)
    v = _Values(content, path / CONFIG_JSON if path.is_dir() else path)
    family = content.get("model_type")
    if not isinstance(family, str) or family not in _PRESETS:
        raise ValueError(f"{v.where}: model_type is {family!r}, want one of {', '.join(_PRESETS)}")
    v.read.add("model_type")
    for key, wanted in (_FIXED | _FIXED_OF[family]).items():
        v.fixed(key, wanted)
    theta, yarn = _rope(v)
    shape = {**v.fields(COMMON_FIELDS), "rope_theta": theta}
    shape |= _qwen(v, shape) if family == "qwen3_moe" else {"yarn": yarn, **_deepseek(v, shape)}
    if yarn is not None and family == "qwen3_moe":
        v.refused.append("rope_scaling is yarn (want none for qwen3_moe)")
    notes = [f"{v.where}: {key} is {content[key]}: multi-token prediction is left out" for key in _MTP if content.get(key)]
    v.read.update(_MTP)
    v.unread()
    if v.refused:
        raise ValueError(f"{v.where} asks for what mxep's models do not have: {'; '.join(v.refused)}")
    try:
        return replace(MODELS[_PRESETS[family]], **shape), notes
    except ValueError as error:
        raise ValueError(f"{v.where}: {error}") from error


def _deepseek(v: _Values, common: dict[str, Any]) -> dict[str, Any]:
    """The fields of DeepSeek's architectures."""
    v.fixed("num_key_value_heads", common["num_heads"])
    shape = v.fields(DEEPSEEK_FIELDS)
    for key in ("n_shared_experts", "q_lora_rank"):  # transformers' defaults are those of a published model, and null means none
        if key not in v.values:
            raise ValueError(f"{v.where}: {key} is missing, want the number that the model was trained with, or null for none")
    if v.values["model_type"] == "deepseek_v3":
        for key in ("n_group", "topk_group", "routed_scaling_factor"):  # transformers' defaults are those of DeepSeek-V3, others' are 1
            if key not in v.values:
                raise ValueError(f"{v.where}: {key} is missing, want the number that the model was trained with; 1 switches it off")
        # balanced by the expert bias; aux_loss_alpha is ignored
        v.read.add("aux_loss_alpha")
        return shape | {"renormalize": v.flag("norm_topk_prob")}
    del shape["num_groups"], shape["top_groups"]  # "greedy" knows none
    if v.values.get("aux_loss_alpha") is None:
        return shape
    layers = common["num_layers"] - shape["num_dense_layers"]  # each layer's loss has that factor
    return shape | {"balance_loss": _factor(v, "aux_loss_alpha") * layers / common["top_k"]}


def _qwen(v: _Values, common: dict[str, Any]) -> dict[str, Any]:
    """The fields of Qwen3-MoE."""
    named = v.values.get("mlp_only_layers")
    dense = list(range(len(named))) if isinstance(named, list) else []
    v.fixed("mlp_only_layers", dense)  # only the first layers
    v.fixed("layer_types", ["full_attention"] * common["num_layers"])
    head = v.values.get("head_dim")
    experts = "num_experts" if "num_experts" in v.values else "num_local_experts"  # as later versions of transformers write it
    hidden = v.number("intermediate_size")
    shape = {
        "num_kv_heads": v.number("num_key_value_heads"),
        "head_dim": common["dim"] // common["num_heads"] if head is None else v.number("head_dim"),
        "num_experts": v.number(experts),
        "renormalize": v.flag("norm_topk_prob"),
        "num_dense_layers": len(dense),
        "dense_hidden": hidden if dense else 0,
    }
    alpha = v.values.get("router_aux_loss_coef")
    return shape | ({} if alpha is None else {"balance_loss": _factor(v, "router_aux_loss_coef")})


def _factor(v: _Values, key: str) -> float:
    """The factor of a loss, 0 for none."""
    return 0.0 if v.values[key] == 0 else float(v.number(key, None))


def _rope(v: _Values) -> tuple[float, Yarn | None]:
    """Base of the frequencies, and YaRN, from rope_scaling or from rope_parameters of later versions of transformers."""
    rope = v.values.get("rope_scaling") or v.values.get("rope_parameters") or {}
    inside = _Values({"rope_theta": v.values.get("rope_theta")} | rope, v.where)
    theta = float(inside.number("rope_theta", None))
    kind = rope.get("rope_type", rope.get("type", "default"))
    inside.read |= {"type", "rope_type", "truncate"}
    inside.fixed("partial_rotary_factor", 1)
    yarn = None
    if kind == "yarn":
        for key in ("attention_factor", "truncate"):  # both 1, which true is too
            inside.fixed(key, 1)
        scale = inside.number("mscale", None)
        inside.fixed("mscale_all_dim", scale)
        if rope.get("mscale_all_dim") is None:
            inside.refused.append(f"mscale_all_dim is missing (want mscale's {scale})")
        betas = float(inside.number("beta_fast", None, 32)), float(inside.number("beta_slow", None, 1))
        yarn = Yarn(float(inside.number("factor", None)), *betas, inside.number("original_max_position_embeddings"), float(scale))
    elif kind != "default":
        inside.refused.append(f"rope_type is {kind!r} (want 'default' or 'yarn')")
        inside.read |= set(rope)
    inside.unread()
    v.refused += [f"rope_scaling: {line}" for line in inside.refused]
    return theta, yarn


def find_model(name: str, layers: int | None = None) -> tuple[str, ModelConfig, list[str]]:
    """(name, shape, lines about keys of its config.json that are ignored) of a model.

    Args:
        name: a preset, or the path of a folder with a config.json or of such a file; the model is then named after the folder.
        layers: only the first layers, see `first_layers`.

    Raises:
        ValueError: neither preset nor path; what `read_shape` and `first_layers` raise.
    """
    path = Path(name)
    if preset_of(name) in MODELS or not path.exists():
        return *first_layers(name, resolve_model(name), layers), []
    shape, notes = read_shape(path)
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return *first_layers(folder.name, shape, layers), notes


def check_published_config(config: ModelConfig, folder: Path, any_yarn: bool = False) -> list[str]:
    """Compare a folder's config.json with our shape; returns lines about harmless differences.

    Args:
        config: our shape.
        folder: with a config.json.
        any_yarn: allow a different rope_scaling.

    Raises:
        ValueError: another family, shape, routing or rotation; what `read_shape` and `stored_format` raise.
    """
    shape, notes = read_shape(folder)
    stored_format(read_published_config(folder), folder / CONFIG_JSON)
    found, wanted = (_flat_rope(published_config(each), any_yarn) for each in (shape, config))
    keys = ["model_type"] if found["model_type"] != wanted["model_type"] else [key for key in found | wanted if key != "architectures"]
    lines = {key: f"{key} is {found.get(key)}, here {wanted.get(key)}" for key in keys if found.get(key) != wanted.get(key)}
    if different := [line for key, line in lines.items() if key not in _REPORTED]:
        raise ValueError(f"{folder / CONFIG_JSON} describes another model: {'; '.join(different)}; choose the --model that it is")
    return [*notes, *(f"{folder / CONFIG_JSON}: {line}" for line in lines.values())]


def _flat_rope(values: dict[str, Any], any_yarn: bool) -> dict[str, Any]:
    """The values with those of rope_scaling as keys of their own; with `any_yarn` without them."""
    rope = values.get("rope_scaling") or {"type": "default"}
    kept = {key: value for key, value in values.items() if key != "rope_scaling"}
    return kept if any_yarn else kept | {"rope" if key == "type" else key: value for key, value in rope.items()}

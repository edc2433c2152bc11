"""Model shapes as plain dataclasses, and the presets. Imports no torch.

Names with dsv3 are of DeepSeek-V3's family, names with qwen3 of Qwen3-MoE's. Two CPU cores train the models named _cpu on real text within
two minutes. `mxep convergence` trains dsv3_small: bytes as tokens, DeepSeek-V3's router. qwen3_small is as large, as a base for
`mxep lora-convergence`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from mxep.field_types import check_field_types

RouterDtype = Literal["fp32", "bf16"]
BalanceLossType = Literal["aux_loss", "global_aux_loss"]
AttnImplementation = Literal["sdpa", "flash_attention_4"]  # transformers' names


@dataclass(frozen=True)
class Yarn:
    """YaRN's extension of a context (source: arXiv 2309.00071).

    Attributes:
        factor: by which the context is longer than `original_seq_len`.
        beta_fast, beta_slow: rotations within the original context above / below which a frequency is kept / divided by `factor`.
        original_seq_len: tokens of the context before the extension.
        mscale: strength of the attention scale's correction, 0.1 * mscale * ln(factor) + 1, squared.
    """

    factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_seq_len: int = 4096
    mscale: float = 1.0

    def __post_init__(self) -> None:
        check_field_types(self)
        if not self.factor > 1 or self.original_seq_len < 1:
            raise ValueError(f"Yarn: factor={self.factor}, original_seq_len={self.original_seq_len}, want more than 1 and more than 0")


@dataclass(frozen=True)
class TrainDefaults:
    """Default options of `mxep train` for a preset (batch: sequences per rank and microbatch)."""

    steps: int
    batch: int
    seq_len: int
    lr: float
    warmup: int

    def __post_init__(self) -> None:
        check_field_types(self)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Shape of a decoder whose first `num_dense_layers` layers have a dense FFN and whose other layers have a MoE.

    Units: every *_dim, *_rank and *_hidden in values, `max_seq_len` in tokens.  `dim` and `expert_hidden` enter MXFP8 GEMMs and exchanges,
    so they are multiples of 32.

    Attributes:
        router_dtype: of the router GEMM, see `mxep.MoEConfig`.
        balance_loss: factor of the load-balancing loss in transformers' meaning (`router_aux_loss_coef`): of the mean over the MoE layers
            of E * sum f_e P_e, where the f_e of a layer sum to `top_k`.
        balance_loss_type: the tokens that the expert frequencies f_e count (Megatron's names): "aux_loss", those of a rank's microbatch;
            "global_aux_loss", those of all ranks and of the step's microbatches so far (arXiv 2501.11873).
        z_loss: factor of the routers' z-losses, summed over the layers.
        rope_theta: base of the rotary frequencies.
        init_std: initial standard deviation of each matrix.
        init_by_depth: divide it by sqrt(2 * num_layers) for output projections to the residual stream, outside of the experts.
        output_init_std: of the output projection; None: `init_std`.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_dense_layers: int = 0
    dense_hidden: int = 0
    expert_hidden: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    num_heads: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    route_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    bias_update_rate: float = 0.0
    router_dtype: RouterDtype = "fp32"
    balance_loss: float = 0.0
    balance_loss_type: BalanceLossType = "aux_loss"
    z_loss: float = 0.0
    max_seq_len: int
    rope_theta: float
    norm_eps: float = 1e-6
    init_std: float = 0.02
    init_by_depth: bool = False
    output_init_std: float | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        where = type(self).__name__
        if self.dim % 32 or self.expert_hidden % 32:
            raise ValueError(f"{where}: dim={self.dim}, expert_hidden={self.expert_hidden}, want multiples of 32 (one MX block)")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"{where}: num_dense_layers={self.num_dense_layers}, want 0 to num_layers={self.num_layers}")
        if self.rope_width % 2:
            raise ValueError(f"{where}: {self.rope_width} values of a head are rotated, want an even number (pairs are rotated)")

    @property
    def num_moe_layers(self) -> int:
        """Layers whose FFN is a MoE."""
        return self.num_layers - self.num_dense_layers

    @property
    def layer_balance_loss(self) -> float:
        """The factor of one layer's loss, `MoEConfig.balance_loss`."""
        return self.balance_loss * self.top_k / max(self.num_moe_layers, 1)

    @property
    def yarn(self) -> Yarn | None:
        """YaRN, a field of the families that have it."""
        return None

    @property
    @abstractmethod
    def rope_width(self) -> int:
        """Values of a head that are rotated."""

    @property
    @abstractmethod
    def scores_width(self) -> int:
        """Values per token in the two GEMMs of attention: of all query heads plus of all value heads."""

    @property
    @abstractmethod
    def attention_kept(self) -> int:
        """Values per token that one layer's attention keeps for backward, without its input and the softmax statistics."""

    @property
    def attention_latents(self) -> int:
        """Those of `attention_kept` that belong to no head: tensor parallelism, which divides the heads, computes them on every rank."""
        return 0

    @property
    def attention_width(self) -> int:
        """Values of a token that one layer's attention hands to its output projection, where value heads are as wide as query heads."""
        return self.scores_width // 2

    @abstractmethod
    def attention_matrices(self) -> int:
        """Values of the matrices of one layer's attention."""

    @abstractmethod
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: its matrices and norms."""

    def parameters(self) -> tuple[int, int]:
        """(all parameters, those that one token uses), embeddings and output projection included."""
        expert = 3 * self.dim * self.expert_hidden
        shared = self.num_layers * (self.attention_parameters() + 2 * self.dim) + self.num_dense_layers * 3 * self.dim * self.dense_hidden
        shared += self.num_moe_layers * (self.num_experts * self.dim + self.num_shared_experts * expert)
        shared += 2 * self.vocab_size * self.dim + self.dim
        return shared + self.num_moe_layers * self.num_experts * expert, shared + self.num_moe_layers * self.top_k * expert


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(DecoderConfig):
    """Shape of a DeepSeek-V3 model (also V2-Lite): multi-head latent attention.

    Attributes:
        yarn: applied at every length; None: plain rotary positions.
    """

    num_shared_experts: int = 2
    bias_update_rate: float = 1e-3
    max_seq_len: int = 16384
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int = 0
    rope_theta: float = 1e4
    yarn: Yarn | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, its position-free and its rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_width(self) -> int:
        """Values of a head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def scores_width(self) -> int:
        """Values per token in the two GEMMs of attention: of all query heads plus of all value heads."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def attention_kept(self) -> int:
        """Values per token that one layer's attention keeps for backward, without its input and the softmax statistics."""
        attended = 2 * self.qk_head_dim + self.qk_nope_head_dim + 2 * self.v_head_dim  # q, k, what k and v came out of, the result
        return self.attention_latents + self.num_heads * attended

    @property
    def attention_latents(self) -> int:
        """Those of `attention_kept` that belong to no head: queries and keys and values before they are projected to heads."""
        return 2 * self.q_lora_rank + 2 * self.kv_lora_rank + self.qk_rope_head_dim  # before and after their norms

    @property
    def attention_width(self) -> int:
        """Values of a token that one layer's attention hands to its output projection."""
        return self.num_heads * self.v_head_dim

    def attention_matrices(self) -> int:
        """Values of the matrices of one layer's attention."""
        queries = self.num_heads * self.qk_head_dim
        count = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        count += self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        count += self.num_heads * self.v_head_dim * self.dim
        return count + ((self.dim + queries) * self.q_lora_rank if self.q_lora_rank else self.dim * queries)

    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: its matrices and norms."""
        return self.attention_matrices() + self.kv_lora_rank + self.q_lora_rank


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(DecoderConfig):
    """Shape of a Qwen3-MoE model (arXiv 2505.09388): grouped-query attention with normed query and key heads, no shared expert.

    Attributes:
        num_kv_heads: heads of keys and values; `num_heads` is a multiple of it.
        head_dim: width of every head.
    """

    num_kv_heads: int
    head_dim: int = 128
    rope_theta: float = 1e6
    renormalize: bool = True
    balance_loss: float = 1e-3
    max_seq_len: int = 40960

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"Qwen3MoEConfig: num_heads={self.num_heads}, want a multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def rope_width(self) -> int:
        """Values of a head that are rotated."""
        return self.head_dim

    @property
    def scores_width(self) -> int:
        """Values per token in the two GEMMs of attention: of all query heads plus of all value heads."""
        return 2 * self.num_heads * self.head_dim

    @property
    def attention_kept(self) -> int:
        """Values per token that one layer's attention keeps for backward, without its input and the softmax statistics."""
        return 3 * self.head_dim * (self.num_heads + self.num_kv_heads)  # q and k before their norms and rotated, v, the result

    def attention_matrices(self) -> int:
        """Values of the matrices of one layer's attention."""
        return 2 * self.dim * self.head_dim * (self.num_heads + self.num_kv_heads)

    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: its matrices and norms."""
        return self.attention_matrices() + 2 * self.head_dim


ModelConfig = DeepSeekV3Config | Qwen3MoEConfig
SHAPES = {shape.__name__: shape for shape in (DeepSeekV3Config, Qwen3MoEConfig)}  # by the name that a run's checkpoints keep

# Fields that are choices of the training: they may change when a run resumes.
TRAINING_FIELDS = frozenset(
    ["router_dtype", "bias_update_rate", "balance_loss", "balance_loss_type", "z_loss", "init_std", "init_by_depth", "output_init_std"]
)

_PUBLISHED_STD = 0.006  # of every parameter of DeepSeek-V2 and V3 (arXiv 2405.04434, 3.1.2; arXiv 2412.19437, 4.2)

MODELS: dict[str, ModelConfig] = {
    "dsv3_debug_cpu": DeepSeekV3Config(
        vocab_size=256, dim=128, num_layers=4, num_dense_layers=1, dense_hidden=384, expert_hidden=128, num_experts=8, top_k=2,
        num_shared_experts=1, num_heads=4, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, max_seq_len=4096,
        init_by_depth=True, output_init_std=128**-0.5,
        bias_update_rate=0.02,  # 0.001 is too slow for a run of a hundred steps
    ),
    "dsv3_debug": DeepSeekV3Config(
        vocab_size=2048, dim=256, num_layers=6, num_dense_layers=1, dense_hidden=1024, expert_hidden=256, num_experts=8, top_k=3,
        num_shared_experts=2, num_heads=16, yarn=Yarn(mscale=0.7), init_by_depth=True, output_init_std=256**-0.5,
    ),
    "dsv3_small": DeepSeekV3Config(
        vocab_size=256, dim=768, num_layers=4, num_dense_layers=1, dense_hidden=2304, expert_hidden=512, num_experts=32, top_k=4,
        num_shared_experts=1, num_heads=8, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, max_seq_len=4096,
        score_function="sigmoid", renormalize=True, route_scale=2.5, num_groups=4, top_groups=2, init_by_depth=True,
        output_init_std=768**-0.5,
    ),
    "dsv3_16b": DeepSeekV3Config(
        vocab_size=102400, dim=2048, num_layers=27, num_dense_layers=1, dense_hidden=10944, expert_hidden=1408, num_experts=64, top_k=6,
        num_shared_experts=2, num_heads=16, yarn=Yarn(mscale=0.707), init_std=_PUBLISHED_STD,
        bias_update_rate=0.0, balance_loss=1e-3 * 26 / 6,  # aux_loss_alpha of DeepSeek-V2-Lite, a factor of each layer's loss
    ),
    "dsv3_671b": DeepSeekV3Config(
        vocab_size=129280, dim=7168, num_layers=61, num_dense_layers=3, dense_hidden=18432, expert_hidden=2048, num_experts=256, top_k=8,
        num_shared_experts=1, num_heads=128, q_lora_rank=1536, score_function="sigmoid", renormalize=True, route_scale=2.5, num_groups=8,
        top_groups=4, yarn=Yarn(), init_std=_PUBLISHED_STD,
    ),
    "qwen3_debug_cpu": Qwen3MoEConfig(
        vocab_size=256, dim=128, num_layers=4, expert_hidden=128, num_experts=8, top_k=2, num_heads=4, num_kv_heads=2, head_dim=32,
        max_seq_len=4096, init_by_depth=True, output_init_std=128**-0.5,
        balance_loss=0.1,  # less is too slow for a run of a hundred steps: one expert would take all tokens
    ),
    "qwen3_debug": Qwen3MoEConfig(
        vocab_size=2048, dim=256, num_layers=6, expert_hidden=256, num_experts=16, top_k=4, num_heads=16, num_kv_heads=4, head_dim=64,
        init_by_depth=True, output_init_std=256**-0.5, balance_loss=1.5e-3,
    ),
    "qwen3_small": Qwen3MoEConfig(
        vocab_size=256, dim=768, num_layers=4, expert_hidden=512, num_experts=32, top_k=4, num_heads=12, num_kv_heads=4, head_dim=64,
        init_by_depth=True, output_init_std=768**-0.5, balance_loss=1e-3,
    ),
    "qwen3_30b_a3b": Qwen3MoEConfig(
        vocab_size=151936, dim=2048, num_layers=48, expert_hidden=768, num_experts=128, top_k=8, num_heads=32, num_kv_heads=4,
        balance_loss=6e-3,
    ),
}  # fmt: skip

TRAIN_DEFAULTS: dict[str, TrainDefaults] = {
    "dsv3_debug_cpu": TrainDefaults(steps=120, batch=8, seq_len=128, lr=4e-3, warmup=20),
    "dsv3_debug": TrainDefaults(steps=1000, batch=16, seq_len=1024, lr=8e-4, warmup=50),
    "dsv3_small": TrainDefaults(steps=2000, batch=24, seq_len=512, lr=6e-4, warmup=100),
    "dsv3_16b": TrainDefaults(steps=1000, batch=1, seq_len=4096, lr=2.2e-4, warmup=200),
    "dsv3_671b": TrainDefaults(steps=1000, batch=1, seq_len=4096, lr=2.2e-4, warmup=2000),
    "qwen3_debug_cpu": TrainDefaults(steps=120, batch=8, seq_len=128, lr=4e-3, warmup=20),
    "qwen3_debug": TrainDefaults(steps=1000, batch=16, seq_len=1024, lr=8e-4, warmup=50),
    "qwen3_small": TrainDefaults(steps=2000, batch=24, seq_len=512, lr=6e-4, warmup=100),
    "qwen3_30b_a3b": TrainDefaults(steps=1000, batch=1, seq_len=4096, lr=2.2e-4, warmup=200),
}


# torchtitan's names of the presets: (model.name, model.flavor).
FLAVORS: dict[tuple[str, str], str] = {
    ("deepseek_v3", "debugmodel"): "dsv3_debug",
    ("deepseek_v3", "16B"): "dsv3_16b",
    ("deepseek_v3", "671B"): "dsv3_671b",
    ("qwen3", "debugmodel_moe"): "qwen3_debug",
    ("qwen3", "30B-A3B"): "qwen3_30b_a3b",
}


def default_model(device_type: str) -> str:
    """The default preset of `mxep train`: the debug model in the size for the machine."""
    return "dsv3_debug" if device_type == "cuda" else "dsv3_debug_cpu"


# The presets of older runs, which did not save their shape: torchtitan's 16B is balanced by its expert bias.
_16B = MODELS["dsv3_16b"]
assert isinstance(_16B, DeepSeekV3Config)
LEGACY_MODELS = MODELS | {"dsv3_16b": replace(_16B, yarn=Yarn(mscale=0.7), bias_update_rate=1e-3, balance_loss=0.0)}

_CUT = re.compile(r"(?P<preset>.+)_of_(?P<layers>\d+)_layers")  # the name of a preset's first layers


def first_layers(name: str, shape: ModelConfig, layers: int | None) -> tuple[str, ModelConfig]:
    """Name and shape of the first `layers` layers of a model, with its embedding and output; None: all layers.

    The sizes of a layer and the weight of its balance loss are unchanged, so its layers train as in the whole model.

    >>> name, shape = first_layers("dsv3_16b", MODELS["dsv3_16b"], 8)
    >>> name, shape.num_layers
    ('dsv3_16b_of_8_layers', 8)

    Raises:
        ValueError: more layers than the model has, or so few that none of them is an MoE.
    """
    if layers is None or layers == shape.num_layers:
        return name, shape
    least = shape.num_dense_layers + 1
    if not least <= layers < shape.num_layers:
        want = f"want {least} (the first with experts) to {shape.num_layers}"
        raise ValueError(f"model: {layers} layers of {name}, {want}; change --layers")
    balance_loss = shape.balance_loss * (layers - shape.num_dense_layers) / shape.num_moe_layers  # each layer keeps its weight
    return f"{name}_of_{layers}_layers", replace(shape, num_layers=layers, balance_loss=balance_loss)


def _split_name(name: str) -> tuple[str, int | None]:
    """Preset and number of layers in a name of `first_layers`; of another name it is the name itself, and all layers."""
    found = _CUT.fullmatch(name)
    return (found["preset"], int(found["layers"])) if found else (name, None)


def preset_of(name: str) -> str:
    """The preset in a name of `first_layers`, or the name itself."""
    return _split_name(name)[0]


def resolve_model(name: str, models: dict[str, ModelConfig] = MODELS) -> ModelConfig:
    """The preset of that name, or its first layers (`first_layers`). Raises ValueError, with the presets, if there is none."""
    preset, layers = _split_name(name)
    if preset not in models:
        near = get_close_matches(preset, models, n=1)
        do = f"; the nearest is {near[0]}" if near else ""
        raise ValueError(
            f"model: {preset!r} is unknown, want one of {', '.join(models)}, or a folder with a config.json, or such a file{do}"
        )
    named, shape = first_layers(preset, models[preset], layers)
    if named != name:
        raise ValueError(f"model: {name!r} is all of {preset}, want that name")
    return shape


def train_defaults(name: str, shape: ModelConfig) -> tuple[str, TrainDefaults]:
    """(preset, its defaults) for a model: the preset itself, else the one of its family that is nearest in size."""
    preset = preset_of(name)
    if preset not in TRAIN_DEFAULTS:
        size = math.log(shape.parameters()[0])
        family = [other for other, preset_shape in MODELS.items() if type(preset_shape) is type(shape)]
        preset = min(family, key=lambda other: abs(math.log(MODELS[other].parameters()[0]) - size))
    return preset, TRAIN_DEFAULTS[preset]


def at_length(shape: ModelConfig, seq_len: int, yarn: bool) -> ModelConfig:
    """The shape that a run with `seq_len` tokens per sequence trains, with the shape's YaRN or without it.

    Without it, the longest sequence is the context before the extension, or the run's sequence length if that is longer.
    """
    if yarn or not isinstance(shape, DeepSeekV3Config) or shape.yarn is None:
        return shape
    return replace(shape, yarn=None, max_seq_len=max(shape.yarn.original_seq_len, seq_len))


def shape_to_json(shape: ModelConfig) -> dict[str, Any]:
    """A shape as plain values, for `shape_from_json`."""
    return {"class": type(shape).__name__, **asdict(shape)}


def shape_from_json(values: dict[str, Any]) -> ModelConfig:
    """The inverse of `shape_to_json`.  Raises ValueError for values that are no shape."""
    family = SHAPES.get(str(values.get("class")))
    if family is None:
        raise ValueError(f"saved shape: class is {values.get('class')!r}, want one of {', '.join(SHAPES)}")
    given = {name: value for name, value in values.items() if name != "class"}
    if unknown := sorted(set(given) - {field.name for field in fields(family)}):
        raise ValueError(f"saved shape: unknown {', '.join(unknown)}; written by another version of mxep?")
    try:
        if given.get("yarn") is not None:
            given["yarn"] = Yarn(**given["yarn"])
        return family(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"saved shape: a value is missing or of another kind ({error})") from error

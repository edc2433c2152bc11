"""All options of `mxep train`: one dataclass, parsed by tyro and saved in every checkpoint. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Fixed, Suppress

from mxep.field_types import listed, type_test
from mxep.json_files import read_json_object
from mxep.models.presets import AttnImplementation, BalanceLossType, RouterDtype
from mxep.train.durable_files import replace_file

CONFIG_FILE = "config.json"


def flag_of(name: str) -> str:
    """An option as the command line spells it.

    >>> flag_of("seq_len"), flag_of("training.seq_len")
    ('--seq-len', '--training.seq-len')
    """
    return f"--{name.replace('_', '-')}"


def _also(*names: str) -> Any:
    """Other names of an option: those of torchtitan's command line and TOML files, spelled with - or _."""
    return tyro.conf.arg(aliases=[flag_of(name) for name in names])


# Options with a single possible value: name -> reason.
_SINGLE_VALUED = {
    "cp": "there is no context parallelism here, torchtitan has it",
    "expert_tp": "routed experts are never split by tensor parallelism, their GEMMs would become too small",
}
_PATHS = ("config", "init_from", "out", "tokenizer", "data_cache")
LISTS = ("data", "validation_data")
COMMA_LISTS = (
    "mx_fqns",
    "converters",
    "linear_fqns",
    "linear_skip",
    "change",
    "compile_components",
)  # strings, names with commas between
EXPERTS, LINEARS = _CONVERTERS = ("quantize.grouped_mm.mx", "quantize.linear.mx")
AUTO = "auto"  # of linear_fqns
_CAST_KERNELS = ("triton", "cuda", "torch")
CHANGEABLE = ("data", "seq-len", "batch")
# Options of one start: a resumed run does not inherit them.
PER_START = ("config", "resume", "resume_step", "change", "stop_after", "compare", "profile_step")
_IN_FILES = {  # names of Python types in error messages about TOML and JSON files
    "True": "true",
    "False": "false",
    "a tuple": "a list of strings",
    "a dict": "an object",
    "a Path": "a path",
    "a whole number": "a whole number of 64 bits",
    "a finite number": "a finite number of 64 bits",
}
# Options that change a run's numbers and are newer than the first runs: name -> what runs did before the option existed.
# A run whose saved options lack the name resumes with this value instead of today's default.
LEGACY_VALUES: dict[str, Any] = {
    "router_dtype": "bf16",
    "converters": "quantize.grouped_mm.mx",
    "linear_fqns": None,
    "fused_layer": False,
    "shape": {},  # the preset's shape at that time, with its YaRN at every length
}
ROUTER_OPTIONS = ("router_dtype", "balance_loss", "balance_loss_type", "z_loss", "bias_update_rate")  # also fields of a model's shape


@dataclass(frozen=True)
class TrainConfig:
    """Train a MoE model. Without options: a DeepSeek-V3-shaped model that suits the machine, on the Python standard library's source.

    Options without a default depend on the model and the machine; the run prints them. Names in brackets are other
    names of the same option: torchtitan's (with a dot), Megatron's and transformers'.
    """

    # job
    config: Annotated[Path | None, _also("job.config_file")] = None
    """TOML file with options under any of their names; the command line overrides it."""
    out: Annotated[Path | None, _also("job.dump_folder")] = None
    """Folder of the run; default: runs/<model>-<recipe>, numbered if taken."""
    resume: bool | Literal["auto"] = False
    """Resume the run in --out (default: the newest in runs/) with its options. auto: start a new run if --out has no checkpoint, for jobs
    that torchrun or a scheduler restarts."""
    resume_step: int | None = None
    """With --resume: the checkpoint to resume from, not the newest. Newer ones move to checkpoints/set_aside."""
    change: str = ""
    """What may differ on --resume, separated by commas: data, seq-len, batch (sequences of a step over all ranks). Weights, moments and the
    step stay; new data or a new length start their order at its beginning."""
    compare: str | None = None
    """Train once more in this recipe on the same data, and plot losses and tokens/s of both."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto uses GPUs if there are any."""
    nproc: int | None = None
    """Ranks to start; default: all GPUs, or 2 on a CPU; with --dp-shard as many as the degrees need. torchrun's are used under torchrun."""
    seed: Annotated[int, _also("debug.seed")] = 0
    """Seed of the initialization and of the data order."""
    # model
    model: str | None = None
    """Preset, folder with a Hugging Face config.json, or such a file; the last two start from random weights. Presets: {presets}. Model
    types: deepseek_v2, deepseek_v3, qwen3_moe."""
    model_name: Annotated[str | None, _also("model.name")] = None
    """deepseek_v3 or qwen3: with --model-flavor another way to name a preset."""
    model_flavor: Annotated[str | None, _also("model.flavor")] = None
    """debugmodel, 16B or 671B of deepseek_v3; debugmodel_moe or 30B-A3B of qwen3."""
    layers: Annotated[int | None, _also("num_layers")] = None
    """Train only the first layers of the model. Its name says so: dsv3_16b_of_8_layers."""
    init_from: Annotated[Path | None, _also("checkpoint.initial_load_path")] = None
    """Hugging Face folder (config.json, safetensors) to start from; without --model it also defines the model. `mxep convert` writes such
    folders."""
    tokenizer: Annotated[Path | None, _also("model.hf_assets_path", "model.tokenizer_path")] = None
    """Hugging Face tokenizer.json or its folder; default: tokens are bytes."""
    yarn: Literal["auto", "on", "off"] = "auto"
    """YaRN's context extension, for models with rope_scaling in config.json and DeepSeek's presets. auto: on for random weights if
    --seq-len exceeds the original context, and as config.json says for --init-from. A resumed run keeps its choice."""
    print_model: Annotated[bool, _also("model.print_after_conversion")] = False
    """Print the model's modules with the recipe of its experts."""
    # router
    router_dtype: Annotated[RouterDtype | None, _also("moe_router_dtype")] = None
    """Precision of the router GEMM; default: fp32, and with --init-from what transformers uses: fp32 for deepseek_v2 and deepseek_v3, bf16
    for qwen3_moe. bf16 is the tokens' dtype (float32 on a CPU)."""
    balance_loss: Annotated[float | None, _also("router_aux_loss_coef")] = None
    """Coefficient of the load-balancing loss, as in transformers: of the mean over MoE layers (Megatron's coefficient is this times top-k /
    MoE layers). Default: the preset's; 0 is off."""
    balance_loss_type: Annotated[BalanceLossType | None, _also("moe_router_load_balancing_type")] = None
    """Tokens whose load that loss counts: each rank's microbatch (aux_loss), or all ranks and the step's microbatches so far
    (global_aux_loss). Default: the preset's."""
    z_loss: Annotated[float | None, _also("moe_z_loss_coeff")] = None
    """Coefficient of the router's z-loss, summed over the layers; default: the preset's; 0 is off."""
    bias_update_rate: Annotated[float | None, _also("moe_router_bias_update_rate")] = None
    """Update rate of the expert bias that balances the load without a loss; default: the preset's; 0 is off."""
    force_balance: Annotated[bool, _also("debug.moe_force_load_balance")] = False
    """Give every expert the same number of tokens (for speed measurements)."""
    # data
    data: Annotated[tuple[str, ...], _also("training.dataset_path")] = ()
    """Text, .jsonl, .parquet or .arrow files, folders or patterns of them, folders of Hugging Face datasets, or
    hf://datasets/OWNER/NAME/FILES in its cache; default: the Python standard library's source."""
    data_field: str = "text"
    """Field of .jsonl, column of .parquet and .arrow, that holds the text; with --chat, the messages (default: messages)."""
    chat: bool = False
    """Rows are conversations, written by the chat template in the folder of --tokenizer: messages, or prompt and completion."""
    assistant_only_loss: bool = True
    """With --chat, train on the assistant's tokens only; off, on all tokens."""
    data_cache: Path | None = None
    """Folder for token files of large corpora; default: $MXEP_CACHE/tokens, else $XDG_CACHE_HOME/mxep/tokens (~/.cache/mxep/tokens)."""
    mask_documents: bool = False
    """Restrict attention to the token's own document, and restart positions at each document."""
    attn_implementation: AttnImplementation = "sdpa"
    """Attention by torch (sdpa), or by the package flash-attn-4 on GPUs of SM90 and newer (flash_attention_4)."""
    # validation
    validation_data: Annotated[tuple[str, ...], _also("validation.dataset_path")] = ()
    """Held-out text, named as in --data, instead of a share of it; documents in both are not trained on."""
    held_out_share: float = 0.02
    """Share of the documents held out for evaluation without --validation-data, chosen by a hash of their content."""
    evaluate: Annotated[bool, _also("validation.enable")] = True
    """Evaluate on held-out text; off, not even at the end (for speed measurements)."""
    eval_every: Annotated[int | None, _also("validation.freq")] = None
    """Steps between evaluations; default: a third of the run. The last step is always evaluated."""
    eval_tokens: int = 32768
    """Maximum number of tokens per evaluation, which has at least one sequence."""
    # training
    steps: Annotated[int | None, _also("training.steps")] = None
    """Optimizer steps of the whole run."""
    stop_after: int | None = None
    """Stop after this step with a checkpoint; the schedule stays that of --steps."""
    batch: Annotated[int | None, _also("training.local_batch_size")] = None
    """Sequences per rank and microbatch."""
    accumulate: int = 1
    """Microbatches per step (gradient accumulation)."""
    seq_len: Annotated[int | None, _also("training.seq_len")] = None
    """Tokens per sequence."""
    max_grad_norm: Annotated[float, _also("training.max_norm")] = 1.0
    """Gradients are scaled down to this norm; 0 disables clipping."""
    max_skipped: int = 3
    """Steps in a row that may be skipped for a non-finite gradient; one more ends the run with a checkpoint."""
    # optimizer and learning rate
    optimizer: Literal["adamw", "adamw8bit", "adamw4bit"] = "adamw"
    """AdamW with moments in the parameters' dtype, or torchao's 8-bit or 4-bit moments."""
    dtype: Annotated[Literal["float32", "bfloat16"], _also("training.dtype")] = "float32"
    """Dtype of parameters and gradients; bfloat16 keeps no float32 copy, and rounds each update stochastically."""
    optimizer_in_backward: Annotated[bool, _also("optimizer.early_step_in_backward")] = False
    """Step each parameter during backward and free its gradient. Needs --max-grad-norm 0, --accumulate 1 and --pp 1."""
    lr: Annotated[float | None, _also("optimizer.lr")] = None
    """Peak learning rate."""
    warmup: Annotated[int | None, _also("lr_scheduler.warmup_steps")] = None
    """Steps of linear warmup."""
    lr_floor: Annotated[float, _also("lr_scheduler.min_lr_factor")] = 0.1
    """Learning rate after the last step, as a share of the peak."""
    decay_ratio: Annotated[float | None, _also("lr_scheduler.decay_ratio")] = None
    """Share of the steps, at the end, in which the rate decays; it is constant between warmup and decay (WSD). Default: decay from the
    warmup on; 0: never."""
    decay_type: Annotated[Literal["cosine", "linear", "sqrt"], _also("lr_scheduler.decay_type")] = "cosine"
    """Shape of the decay; sqrt is 1 - sqrt, steep at first."""
    weight_decay: Annotated[float, _also("optimizer.weight_decay")] = 0.1
    """AdamW's weight decay, for matrices only."""
    # precision
    recipe: Annotated[str, _also("quantize.grouped_mm.mx.recipe_name")] = "mxfp8_wgrad_with_hp"
    """Precision of the MoE exchanges and GEMMs; bf16 is the baseline (float32 on a CPU)."""
    mx_fqns: Annotated[str, _also("quantize.grouped_mm.mx.fqns")] = "experts"
    """Experts that use the recipe, by parts of their names with wildcards, separated by commas."""
    converters: Annotated[str, _also("model.converters")] = "quantize.grouped_mm.mx,quantize.linear.mx"
    """What is converted, separated by commas: quantize.grouped_mm.mx (routed experts), quantize.linear.mx (attention, dense FFN)."""
    linear_recipe: Annotated[str | None, _also("quantize.linear.mx.recipe_name")] = None
    """Precision of the converted linear layers; default: that of --recipe."""
    linear_fqns: str | None = AUTO
    """Linear layers to convert, in the form of --mx-fqns, whether they gain or not ("*": all but routers and the output). auto: those that
    are faster in MXFP8 by their shape and the tokens of a microbatch, on a Hopper GPU; elsewhere none. A resumed run keeps its choice."""
    linear_skip: Annotated[str, _also("quantize.linear.mx.filter_fqns")] = ""
    """Linear layers that stay in high precision, by parts of their names."""
    output_recipe: str = "bf16"
    """Precision of the output projection's products in the loss, forward and backward; any recipe."""
    rows_cast_kernel: Annotated[str | None, _also("quantize.linear.mx.mxfp8_dim0_cast_kernel_choice")] = None
    """triton, cuda or torch: accepted and reported; one kernel quantizes 1x32."""
    columns_cast_kernel: Annotated[str | None, _also("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice")] = None
    """triton, cuda or torch: accepted and reported; one kernel quantizes 32x1."""
    # parallelism
    ep: Annotated[int | None, _also("parallelism.expert_parallel_degree")] = None
    """Expert-parallel degree; default: the largest that ranks and experts allow."""
    tp: Annotated[int, _also("parallelism.tensor_parallel_degree")] = 1
    """Tensor-parallel degree, of attention and dense FFN."""
    pp: Annotated[int, _also("parallelism.pipeline_parallel_degree")] = 1
    """Pipeline-parallel degree."""
    dp_shard: Annotated[int, _also("parallelism.data_parallel_shard_degree")] = -1
    """Ranks that shard the model (FSDP2); -1: all that the other degrees leave."""
    dp_replicate: Annotated[int, _also("parallelism.data_parallel_replicate_degree")] = 1
    """Model replicas, each sharded (HSDP)."""
    pp_schedule: Annotated[Literal["1F1B", "Interleaved1F1B"], _also("parallelism.pipeline_parallel_schedule")] = "1F1B"
    """Pipeline schedule; Interleaved1F1B gives every rank two stages."""
    microbatch: Annotated[int, _also("parallelism.pipeline_parallel_microbatch_size")] = 1
    """Sequences per pipeline microbatch; divides --batch."""
    transport: Literal["auto", "collective", "symmetric"] | None = None
    """Token exchange of an EP group: torch.distributed (collective) or memory shared by the GPUs of one machine (symmetric); default:
    $MXEP_TRANSPORT, else auto."""
    expert_tp: Annotated[int, _also("parallelism.expert_tensor_parallel_degree")] = 1
    """Only 1: routed experts are never split by tensor parallelism."""
    cp: Annotated[int, _also("parallelism.context_parallel_degree")] = 1
    """Only 1: context parallelism is not available."""
    # memory and speed
    activation_checkpoint: Annotated[Literal["none", "keep_moe", "selective", "full", "auto"], _also("activation_checkpoint.mode")] = "auto"
    """What backward recomputes: nothing, all but the MoE layers (keep_moe), cheap operations (selective), whole layers (full), or, layer
    by layer, as little as the GPUs' memory allows (auto; on a CPU nothing)."""
    fused_experts: bool = True
    """With --no-fused-layer, run experts with MXFP8 GEMMs as one function: half the memory for backward. Activations are quantised without
    a rounding to bf16."""
    fused_layer: bool = True
    """Run each MoE layer as one function, which is faster: a token is sent once to each rank instead of once per expert. Separate blocks
    (--no-fused-layer) round values in other places."""
    keep_first_product: Literal["hp", "mxfp8"] = "hp"
    """Keep gate and up of each MoE layer as they are, or in MXFP8: half the bytes, which backward reads rounded."""
    cache_weights: bool = False
    """Quantize expert weights once per step instead of once per microbatch and direction: same numbers, 2 bytes per weight more memory."""
    compile: Annotated[bool, _also("compile.enable")] = False
    """torch.compile for every layer, without its exchanges and routed experts."""
    compile_components: Annotated[str, _also("compile.components")] = "model,loss"
    """What --compile compiles, separated by commas: model; loss is accepted and has no effect."""
    compile_backend: Annotated[str, _also("compile.backend")] = "inductor"
    """Backend of torch.compile."""
    cuda_graph: bool = False
    """Run a step (forward, backward, clipping, optimizer) as a CUDA graph after a few eager ones: same numbers, no time between kernels.
    Not with --no-fused-layer."""
    gc_freq: Annotated[int, _also("training.gc_freq")] = 50
    """Steps between Python's garbage collections, on all ranks at the same step; 0: whenever each rank's Python decides, which stops the
    others too."""
    # checkpoint
    checkpoint: Annotated[bool, _also("checkpoint.enable")] = True
    """Write checkpoints; off, there is nothing to resume from (for speed measurements)."""
    checkpoint_every: Annotated[int | None, _also("checkpoint.interval")] = None
    """Steps between checkpoints; default: a tenth of the run, at most 500. The end and Ctrl-C always write one."""
    keep: Annotated[int, _also("checkpoint.keep_latest_k")] = 2
    """Checkpoints to keep."""
    async_checkpoint: Annotated[Literal["disabled", "async"], _also("checkpoint.async_mode")] = "async"
    """Write checkpoints in the background from a copy in CPU memory, or block training."""
    # metrics and profiling
    log_every: Annotated[int, _also("metrics.log_freq")] = 10
    """Steps between printed lines; metrics.jsonl has every step."""
    tensorboard: Annotated[bool, _also("metrics.enable_tensorboard")] = False
    """Write every figure to <out>/tensorboard as well."""
    numerics_every: int | None = None
    """Steps between counts of what MXFP8 does to each layer's rows and gradients: non-finite blocks, codes at +-448, zeros."""
    profile_step: int | None = None
    """First step of a torch profiler trace of every rank, in <out>/profile."""
    profile_steps: int = 3
    """Steps per trace."""
    profile_host: bool = True
    """Trace the host as well; off, gaps between GPU kernels are those of untraced steps."""
    shape: Annotated[dict[str, Any] | None, Fixed, Suppress] = None
    """No option: the shape of the model. A run saves it at its start, so that it resumes after files or presets have changed."""

    def __post_init__(self) -> None:
        for name in _PATHS:
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(os.path.expanduser(path)))  # in a TOML file
        if isinstance(self.model, str):
            object.__setattr__(self, "model", os.path.expanduser(self.model))
        positive = ("steps", "batch", "accumulate", "seq_len", "lr", "nproc", "ep", "eval_every", "eval_tokens", "checkpoint_every")
        degrees = ("dp_replicate", "tp", "expert_tp", "pp", "cp", "microbatch", "profile_steps", "profile_step", "numerics_every")
        for name in (*positive, *degrees, "keep", "log_every", "stop_after", "layers", "resume_step"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{flag_of(name)}={value}, want more than 0")
        for name in (
            "weight_decay",
            "max_grad_norm",
            "max_skipped",
            "gc_freq",
            "warmup",
            "seed",
            "balance_loss",
            "z_loss",
            "bias_update_rate",
        ):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{flag_of(name)}={value}, want 0 or more")
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"--lr-floor={self.lr_floor}, want 0 to 1")
        if self.decay_ratio is not None and not 0 <= self.decay_ratio <= 1:
            raise ValueError(f"--decay-ratio={self.decay_ratio}, want 0 to 1, a share of the steps")
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"--dp-shard={self.dp_shard}, want 1 or more, or -1 for all ranks that the other degrees leave")
        if self.compare is not None and self.resume:
            raise ValueError("--compare with --resume: resume each of the two runs in its own folder")
        if self.resume_step is not None and self.resume is not True:
            raise ValueError(f"--resume-step={self.resume_step}: give --resume with it" + (", not auto" if self.resume else ""))
        if self.resume_step is not None and self.stop_after is not None and self.stop_after <= self.resume_step:
            raise ValueError(f"--stop-after={self.stop_after} with --resume-step={self.resume_step}, want a later step: nothing is trained")
        if self.max_grad_norm == math.inf:
            raise ValueError("--max-grad-norm=inf, want a finite number; 0 disables clipping")
        for name, value in self.to_json().items():  # what a file cannot hold would make the run unreadable
            value_from_file(flag_of(name), value, option_types()[name])
        self._check_choices()

    def _check_choices(self) -> None:
        """Raise ValueError for values that mxep does not support."""
        for name in ("rows_cast_kernel", "columns_cast_kernel"):
            if getattr(self, name) not in (None, *_CAST_KERNELS):
                raise ValueError(f"{flag_of(name)}={getattr(self, name)}, want {', '.join(_CAST_KERNELS)}")
        for name in self.named_changes():
            if name not in CHANGEABLE:
                raise ValueError(
                    f"--change={name}, want {', '.join(CHANGEABLE)}; other options may differ without being named, or never may"
                )
        for converter in split_names(self.converters):
            if converter not in _CONVERTERS:
                raise ValueError(f"--converters={converter}, which mxep does not have; want {', '.join(_CONVERTERS)}")
        if not split_names(self.converters):
            raise ValueError(f"--converters names nothing, want {', '.join(_CONVERTERS)}; experts in bf16 are --recipe bf16")
        for component in split_names(self.compile_components):
            if component not in ("model", "loss"):
                raise ValueError(f"--compile-components={component}, want model or loss or both")
        for name, why in _SINGLE_VALUED.items():
            default = getattr(TrainConfig, name)
            if getattr(self, name) != default:
                raise ValueError(f"{flag_of(name)}={getattr(self, name)}: {why}; want {default}")

    def named_changes(self) -> list[str]:
        """The names in `--change`, spelled as in `CHANGEABLE`."""
        return split_names(self.change.replace("_", "-"))

    def converts(self, converter: str) -> bool:
        """True if `--converters` names it."""
        return converter in split_names(self.converters)

    def without_mxfp8(self) -> dict[str, str]:
        """Options, by name, that leave nothing in MXFP8 beside a recipe in high precision."""
        return {"output_recipe": "bf16", "keep_first_product": "hp"} | ({"linear_recipe": "bf16"} if self.linear_recipe else {})

    def to_json(self) -> dict[str, Any]:
        """Plain values only, for checkpoints and logs."""
        values = dataclasses.asdict(self)
        values |= {name: list(values[name]) for name in LISTS}
        for name in _PATHS:
            values[name] = None if values[name] is None else str(values[name])
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_json`. Options that did not exist when `values` were saved get their `LEGACY_VALUES`.

        Raises:
            ValueError: an unknown name, or a value of a wrong type or range.
        """
        hints = option_types()
        if unknown := sorted(set(values) - set(hints)):
            raise ValueError(f"saved settings: unknown {', '.join(unknown)}; written by another version of mxep?")
        return TrainConfig(**{name: value_from_file(name, value, hints[name]) for name, value in {**LEGACY_VALUES, **values}.items()})


@functools.cache
def option_types() -> dict[str, Any]:
    """Field of `TrainConfig` -> its type, without notes for tyro."""
    return get_type_hints(TrainConfig)


@functools.cache
def option_names() -> dict[str, str]:
    """Every name of every option (with underscores, without the leading dashes) -> its field, in the order of `TrainConfig`.

    >>> option_names()["training.seq_len"], option_names()["seq_len"]
    ('seq_len', 'seq_len')
    """
    names: dict[str, str] = {}
    for field, hint in get_type_hints(TrainConfig, include_extras=True).items():
        if field == "shape":  # saved by a run, not an option
            continue
        aliases = [alias for note in getattr(hint, "__metadata__", ()) for alias in getattr(note, "aliases", None) or ()]
        names |= {name.removeprefix("--").replace("-", "_"): field for name in (field, *aliases)}
    return names


def split_names(names: str) -> list[str]:
    """The names of an option that holds a comma-separated list.

    >>> split_names("model, loss")
    ['model', 'loss']
    """
    return [name.strip() for name in names.split(",") if name.strip()]


def save_config(config: TrainConfig, out: Path) -> None:
    """Write the run's options to <out>/config.json, which --resume reads."""
    lasting = config.to_json() | {name: getattr(TrainConfig, name) for name in PER_START}
    replace_file(out / CONFIG_FILE, (json.dumps(lasting, indent=2) + "\n").encode())


def load_config(out: Path) -> TrainConfig:
    """The options of the run in `out`. Raises ValueError if there are none or they are damaged."""
    path = out / CONFIG_FILE
    if not path.exists():
        raise ValueError(f"resume: no run in {out} (no {CONFIG_FILE}); name its folder with --out")
    values = read_json_object(path, "resume")
    try:
        return TrainConfig.from_json(values)
    except ValueError as error:
        raise ValueError(f"resume: {path} is damaged: {error}") from error


def value_from_file(where: str, value: Any, hint: Any) -> Any:
    """Convert a value of a TOML or JSON file to a field's type `hint`. For a string with commas a list is accepted as well.

    Raises:
        ValueError: the value does not fit; the message begins with `where`.
    """
    kinds = [get_origin(kind) or kind for kind in (get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,))]
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    texts = value if strings else [value] if isinstance(value, str) else []
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} = {repr(value)[:80]}, want text in UTF-8; give the file another name") from error
    found = value
    if tuple in kinds and (strings or texts):
        found = tuple(texts)
    elif str in kinds and strings:
        found = ",".join(value)
    elif Path in kinds and isinstance(value, str) and "\0" not in value:
        found = Path(value)
    elif float in kinds and type(value) is int and abs(value) < 1 << 63:
        found = float(value)
    fits, wants = type_test(hint)
    too_large = type(found) is int and abs(found) >= 1 << 63
    if not too_large and fits(found):
        return found
    wanted = [_IN_FILES.get(want, want) for want in wants if want != "None"]
    raise ValueError(f"{where} = {repr(value)[:80]}, want {listed(wanted)}")

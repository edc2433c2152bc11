"""Everything that `mxep train` can be told: one dataclass, read by tyro, kept in every checkpoint (no torch here)."""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Fixed, Suppress

from mxep.degrees import Degrees
from mxep.json_files import read_json_object
from mxep.models.presets import BalanceLossType, ModelConfig, RouterDtype, at_length, train_defaults
from mxep.models.published import published_router_dtype
from mxep.train.full_disk import replace_file
from mxep.train.model_choice import ModelChoice, choose_model

CONFIG_FILE = "config.json"
MAX_CHECKPOINT_EVERY = 500  # the default of torchtitan: what a kill costs must not grow with the run


def _also(*names: str) -> Any:
    """More names of an option, as torchtitan's command line and TOML files call it; either of - and _ is understood."""
    return tyro.conf.arg(aliases=["--" + name.replace("_", "-") for name in names])


# Options whose other values ask for what there is not: name -> why.
_NOT_THERE = {
    "cp": "there is no context parallelism here, torchtitan has it",
    "expert_tp": "routed experts are never split by tensor parallelism, their GEMMs would become too small",
}
_PATHS = ("config", "init_from", "out", "tokenizer", "data_cache")
_NAMES = ("data", "validation_data")
EXPERTS, LINEARS = _CONVERTERS = ("quantize.grouped_mm.mx", "quantize.linear.mx")
_CAST_KERNELS = ("triton", "cuda", "torch")
CHANGEABLE = ("data", "seq-len", "batch")
PER_START = (
    "config",
    "resume",
    "resume_step",
    "change",
    "stop_after",
    "compare",
    "profile_step",
)  # options of one start, which the next does not take over
# Options that change a run's numbers and came later than the first runs: name -> what a run did before the option existed.
# A run whose saved settings lack the name goes on with this value instead of today's default.
LEGACY_VALUES: dict[str, Any] = {
    "router_dtype": "bf16",
    "shape": {},  # that of the preset as it was then, with its YaRN at every length
}
ROUTER_OPTIONS = ("router_dtype", "balance_loss", "balance_loss_type", "z_loss", "bias_update_rate")  # fields of a model's shape, too


@dataclass(frozen=True)
class TrainConfig:
    """Train a MoE model. With no arguments: a DeepSeek-V3-shaped model that suits the machine, on the Python standard library's source.

    Options without a value here take what suits the model and the machine; the run prints them. Names with a dot are torchtitan's.
    """

    config: Annotated[Path | None, _also("job.config_file")] = None
    """TOML file with options, by either of their names; the command line goes before it."""
    model: str | None = None
    """A preset: dsv3_debug_cpu, dsv3_debug, dsv3_small, dsv3_16b, dsv3_671b, qwen3_debug_cpu, qwen3_debug or qwen3_30b_a3b. Or a folder
    with a Hugging Face config.json (deepseek_v2, deepseek_v3, qwen3_moe), or such a file: a model of its shape, with random weights."""
    model_name: Annotated[str | None, _also("model.name")] = None
    """With --model-flavor another way to name a preset: deepseek_v3 or qwen3."""
    model_flavor: Annotated[str | None, _also("model.flavor")] = None
    """debugmodel, 16B or 671B of deepseek_v3; debugmodel_moe or 30B-A3B of qwen3."""
    layers: Annotated[int | None, _also("num_layers")] = None
    """Only the first layers of the model, as many as this, between its embedding and its output: a model that a smaller machine holds,
    whose layers are the model's. Its name says so, dsv3_16b_of_8_layers."""
    yarn: Literal["auto", "on", "off"] = "auto"
    """YaRN's extension of the context, for models that have it (rope_scaling in config.json, DeepSeek's presets): auto applies it to random
    weights where --seq-len is longer than the context before the extension, and to those of --init-from as their config.json says. A run
    keeps what it began with."""
    shape: Annotated[dict[str, Any] | None, Fixed, Suppress] = None
    """No option: the shape of the model, which a run keeps from its start, so that it goes on when files or presets have changed."""
    recipe: Annotated[str, _also("quantize.grouped_mm.mx.recipe_name")] = "mxfp8_wgrad_with_hp"
    """Precision of the MoE exchanges and GEMMs; "bf16" is the high-precision arm (float32 on a CPU)."""
    mx_fqns: Annotated[str, _also("quantize.grouped_mm.mx.fqns")] = "experts"
    """Experts that run in the recipe, by parts of their names with wildcards, separated by commas; the others run in high precision."""
    converters: Annotated[str, _also("model.converters")] = "quantize.grouped_mm.mx"
    """What is converted, separated by commas: quantize.grouped_mm.mx (routed experts), quantize.linear.mx (attention, dense FFN)."""
    linear_recipe: Annotated[str | None, _also("quantize.linear.mx.recipe_name")] = None
    """Precision of the converted linear layers; nothing means that of --recipe."""
    linear_fqns: str | None = None
    """Linear layers to convert, by parts of their names as for --mx-fqns; nothing means all but routers and the output."""
    linear_skip: Annotated[str, _also("quantize.linear.mx.filter_fqns")] = ""
    """Linear layers that stay in high precision, by parts of their names."""
    print_model: Annotated[bool, _also("model.print_after_conversion")] = False
    """Print the model's modules, with the recipe of its experts."""
    rows_cast_kernel: Annotated[str | None, _also("quantize.linear.mx.mxfp8_dim0_cast_kernel_choice")] = None
    """triton, cuda or torch: accepted and printed, there is one kernel that quantises 1x32."""
    columns_cast_kernel: Annotated[str | None, _also("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice")] = None
    """triton, cuda or torch: accepted and printed, there is one kernel that quantises 32x1."""
    data: Annotated[tuple[str, ...], _also("training.dataset_path")] = ()
    """Text, .jsonl, .parquet or .arrow files, folders or patterns of them, folders of Hugging Face's datasets, hf://datasets/OWNER/NAME/FILES
    of its cache; nothing means the Python standard library's source."""
    data_field: str = "text"
    """Field of .jsonl, column of .parquet and .arrow, that holds the text."""
    validation_data: Annotated[tuple[str, ...], _also("validation.dataset_path")] = ()
    """Held-out text of its own, as for --data, instead of a share of it; documents that are in both are not trained on."""
    data_cache: Path | None = None
    """Folder for the token files of large corpora and of tokenizers; nothing means $MXEP_CACHE/tokens, without such a variable
    $XDG_CACHE_HOME/mxep/tokens (~/.cache/mxep/tokens)."""
    mask_documents: bool = False
    """A token attends to its own document alone, and positions start anew at each; without, attention sees across documents' ends."""
    tokenizer: Annotated[Path | None, _also("model.hf_assets_path", "model.tokenizer_path")] = None
    """Folder with a tokenizer.json (as Hugging Face publishes it), or such a file; nothing means that tokens are bytes."""
    held_out_share: float = 0.02
    """Share of the documents that is kept for evaluation where there is no --validation-data, chosen by a hash of their content."""
    out: Annotated[Path | None, _also("job.dump_folder")] = None
    """Folder of the run; runs/<model>-<recipe>, numbered when that is taken."""
    init_from: Annotated[Path | None, _also("checkpoint.initial_load_path")] = None
    """Hugging Face folder to start from (config.json, safetensors) instead of random weights, which without --model says what the model
    is, too; `mxep convert` writes such folders."""
    resume: bool | Literal["auto"] = False
    """Go on from the run in --out (else from the newest under runs/), with its settings where none are given; --resume alone means True.
    "auto" begins where --out has no checkpoint yet: for jobs that are started again by torchrun or a scheduler."""
    resume_step: int | None = None
    """With --resume: go on from the checkpoint of this step instead of the newest; newer ones are moved to checkpoints/set_aside."""
    change: str = ""
    """What --resume may find different, separated by commas: data, seq-len, batch (sequences of a step, of all ranks together). Weights,
    moments and the step stay; other data and another length start their order at its beginning."""
    steps: Annotated[int | None, _also("training.steps")] = None
    """Optimizer steps of the whole run."""
    stop_after: int | None = None
    """Stop here with a checkpoint, as a signal would; the schedule stays that of --steps."""
    batch: Annotated[int | None, _also("training.local_batch_size")] = None
    """Sequences a rank and pass."""
    accumulate: int = 1
    """Passes a step (gradient accumulation)."""
    seq_len: Annotated[int | None, _also("training.seq_len")] = None
    """Tokens a sequence."""
    lr: Annotated[float | None, _also("optimizer.lr")] = None
    """Highest learning rate."""
    warmup: Annotated[int | None, _also("lr_scheduler.warmup_steps")] = None
    """Steps of linear warmup."""
    lr_floor: Annotated[float, _also("lr_scheduler.min_lr_factor")] = 0.1
    """Learning rate at the end, as a share of the highest."""
    decay_ratio: Annotated[float | None, _also("lr_scheduler.decay_ratio")] = None
    """Share of the steps, at the end, in which the rate falls; between warmup and these it is constant (WSD). Nothing means that it falls
    from the warmup on, 0 that it never does."""
    decay_type: Annotated[Literal["cosine", "linear", "sqrt"], _also("lr_scheduler.decay_type")] = "cosine"
    """How the rate falls: half a cosine, a line, or 1 - sqrt, steep at first."""
    weight_decay: Annotated[float, _also("optimizer.weight_decay")] = 0.1
    """On matrices only."""
    max_grad_norm: Annotated[float, _also("training.max_norm")] = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    max_skipped: int = 3
    """Steps in a row that may be skipped because their gradient is not finite; one more ends the run, with a checkpoint."""
    seed: Annotated[int, _also("debug.seed")] = 0
    """Of the initialisation and of the data's order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs when there are any."""
    nproc: int | None = None
    """Ranks to start; as many as the degrees ask for, else all GPUs, or 2 on a CPU. Under torchrun its ranks are used."""
    dp_replicate: Annotated[int, _also("parallelism.data_parallel_replicate_degree")] = 1
    """Groups of ranks that each hold the whole model, sharded (HSDP)."""
    dp_shard: Annotated[int, _also("parallelism.data_parallel_shard_degree")] = -1
    """Ranks that the model is sharded over (FSDP2); -1: all that the other degrees leave."""
    ep: Annotated[int | None, _also("parallelism.expert_parallel_degree")] = None
    """Ranks that share one set of experts; as many as there are where the expert count allows."""
    tp: Annotated[int, _also("parallelism.tensor_parallel_degree")] = 1
    """Ranks that share one attention and dense FFN (tensor parallelism)."""
    expert_tp: Annotated[int, _also("parallelism.expert_tensor_parallel_degree")] = 1
    """1: routed experts are never split this way."""
    pp: Annotated[int, _also("parallelism.pipeline_parallel_degree")] = 1
    """Stages of layers (pipeline parallelism)."""
    pp_schedule: Annotated[Literal["1F1B", "Interleaved1F1B"], _also("parallelism.pipeline_parallel_schedule")] = "1F1B"
    """Order of the pipeline's passes; Interleaved1F1B gives every rank two stages."""
    microbatch: Annotated[int, _also("parallelism.pipeline_parallel_microbatch_size")] = 1
    """Sequences that go through the pipeline together; divides --batch."""
    cp: Annotated[int, _also("parallelism.context_parallel_degree")] = 1
    """1: there is no context parallelism."""
    activation_checkpoint: Annotated[Literal["none", "selective", "full"], _also("activation_checkpoint.mode")] = "none"
    """What backward computes again instead of keeping it: nothing, what is cheap (selective), or whole layers (full)."""
    compile: Annotated[bool, _also("compile.enable")] = False
    """torch.compile for every layer outside of its exchanges and routed experts."""
    compile_components: Annotated[str, _also("compile.components")] = "model,loss"
    """What --compile compiles, separated by commas: model; loss changes nothing, it runs chunk by chunk of tokens."""
    compile_backend: Annotated[str, _also("compile.backend")] = "inductor"
    """Of torch.compile."""
    cache_weights: bool = False
    """Quantise the experts' weights once a step instead of once a pass and direction: same numbers, 2 bytes a weight more memory."""
    fused_experts: bool = True
    """Run the experts as one function where the recipe has one (MXFP8 GEMMs): half as much is kept for backward; in bf16 the
    results differ in the last bits from those of one GEMM after the other."""
    fused_layer: bool = False
    """Run each MoE layer as one function, router to output: a token travels once to each rank that holds one of its experts, and not
    once for each expert; sums are rounded in another order."""
    transport: Literal["auto", "collective", "symmetric"] | None = None
    """What carries tokens between the ranks of an EP group: torch.distributed (collective), or memory that the GPUs of one machine share
    (symmetric); nothing means what MXEP_TRANSPORT says, else auto."""
    router_dtype: Annotated[RouterDtype | None, _also("moe_router_dtype")] = None
    """Of the router's product, forward and backward: fp32, or bf16, the tokens' dtype (float32 on a CPU). Nothing means fp32, but with
    --init-from what transformers does with such a model: fp32 for deepseek_v2 and deepseek_v3, bf16 for qwen3_moe."""
    balance_loss: Annotated[float | None, _also("router_aux_loss_coef")] = None
    """Factor of the load-balancing loss as in transformers: E sum f P, where the f sum to top-k, averaged over the MoE layers. Megatron's
    coefficient is this times top-k / MoE layers. Nothing means the preset's; 0 is off."""
    balance_loss_type: Annotated[BalanceLossType | None, _also("moe_router_load_balancing_type")] = None
    """Whose tokens the loads in that loss are counted of: aux_loss, those of each rank's pass; global_aux_loss, those of all ranks and of
    the step's passes so far. Nothing means the preset's."""
    z_loss: Annotated[float | None, _also("moe_z_loss_coeff")] = None
    """Factor of the router's z-loss, summed over the layers; nothing means the preset's, 0 is off."""
    bias_update_rate: Annotated[float | None, _also("moe_router_bias_update_rate")] = None
    """Step of the expert bias that balances the load without a loss; nothing means the preset's, 0 leaves the bias where it is."""
    force_balance: Annotated[bool, _also("debug.moe_force_load_balance")] = False
    """Give every expert the same number of tokens (for measurements of speed)."""
    evaluate: Annotated[bool, _also("validation.enable")] = True
    """Evaluate on held-out text; without, not even at the end (for measurements of speed)."""
    eval_every: Annotated[int | None, _also("validation.freq")] = None
    """Steps between held-out evaluations; a third of the run. There is always one at the end."""
    eval_tokens: int = 32768
    """Targets of an evaluation, at most."""
    checkpoint: Annotated[bool, _also("checkpoint.enable")] = True
    """Write checkpoints; without, there is nothing to resume from (for measurements of speed)."""
    checkpoint_every: Annotated[int | None, _also("checkpoint.interval")] = None
    """Steps between checkpoints, what a kill can cost; a tenth of the run, 500 at most. There is always one at the end and on Ctrl-C."""
    keep: Annotated[int, _also("checkpoint.keep_latest_k")] = 2
    """Checkpoints to keep."""
    async_checkpoint: Annotated[Literal["disabled", "async"], _also("checkpoint.async_mode")] = "async"
    """Write checkpoints beside the training, from a copy in the CPU's memory, or make it wait."""
    compare: str | None = None
    """Train once more in this recipe, with the same data, and draw the losses and tokens/s of both."""
    tensorboard: Annotated[bool, _also("metrics.enable_tensorboard")] = False
    """Write every figure to <out>/tensorboard as well."""
    profile_step: int | None = None
    """Record torch profiler traces from this step on, of every rank, in <out>/profile."""
    profile_steps: int = 3
    """Steps of such a trace."""
    profile_host: bool = True
    """Record the host's work, too; without, gaps between a GPU's kernels are what they are in other steps."""
    numerics_every: int | None = None
    """Steps between counts of what MXFP8 does to each layer's rows and gradients: non-finite blocks, codes at +-448, zeros."""
    log_every: Annotated[int, _also("metrics.log_freq")] = 10
    """Steps between printed lines; the JSONL has every step."""

    def __post_init__(self) -> None:
        positive = ("steps", "batch", "accumulate", "seq_len", "lr", "nproc", "ep", "eval_every", "eval_tokens", "checkpoint_every")
        degrees = ("dp_replicate", "tp", "expert_tp", "pp", "cp", "microbatch", "profile_steps", "profile_step", "numerics_every")
        for name in (*positive, *degrees, "keep", "log_every", "stop_after", "layers", "resume_step"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')}={value}, want more than 0")
        for name in ("weight_decay", "max_grad_norm", "max_skipped", "warmup", "seed", "balance_loss", "z_loss", "bias_update_rate"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"--{name.replace('_', '-')}={value}, want 0 or more")
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"--lr-floor={self.lr_floor}, want 0 to 1")
        if self.decay_ratio is not None and not 0 <= self.decay_ratio <= 1:
            raise ValueError(f"--decay-ratio={self.decay_ratio}, want 0 to 1, a share of the steps")
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"--dp-shard={self.dp_shard}, want 1 or more, or -1 for all ranks that the other degrees leave")
        if self.compare is not None and self.resume:
            raise ValueError("--compare with --resume: go on with each of the two runs in its own folder")
        if self.resume_step is not None and self.resume is not True:
            raise ValueError(f"--resume-step={self.resume_step}: give --resume with it" + (", not auto" if self.resume else ""))
        self._check_choices()

    def _check_choices(self) -> None:
        """What options of other trainers ask for is there, or a ValueError says that it is not."""
        for name in ("rows_cast_kernel", "columns_cast_kernel"):
            if getattr(self, name) not in (None, *_CAST_KERNELS):
                raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)}, want {', '.join(_CAST_KERNELS)}")
        for name in self.named_changes():
            if name not in CHANGEABLE:
                raise ValueError(
                    f"--change={name}, want {', '.join(CHANGEABLE)}; other options may differ without being named, or never may"
                )
        for converter in split_names(self.converters):
            if converter not in _CONVERTERS:
                raise ValueError(f"--converters={converter}, which there is not here; want {', '.join(_CONVERTERS)}")
        if not split_names(self.converters):
            raise ValueError(f"--converters names nothing, want {', '.join(_CONVERTERS)}; experts in bf16 are --recipe bf16")
        for component in split_names(self.compile_components):
            if component not in ("model", "loss"):
                raise ValueError(f"--compile-components={component}, want model or loss or both")
        for name, why in _NOT_THERE.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)}: {why}; want {default}")

    def named_changes(self) -> list[str]:
        """The names in `--change`, written as in `CHANGEABLE`."""
        return split_names(self.change.replace("_", "-"))

    def converts(self, converter: str) -> bool:
        """Whether `--converters` names it."""
        return converter in split_names(self.converters)

    def to_json(self) -> dict[str, Any]:
        """Plain values only, for checkpoints and logs."""
        values = dataclasses.asdict(self)
        values |= {name: list(values[name]) for name in _NAMES}
        for name in _PATHS:
            values[name] = None if values[name] is None else str(values[name])
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_json`; `LEGACY_VALUES` stand in for options that did not exist when `values` were saved.

        Raises:
            ValueError: a name that there is no option for, a value of another type than its option's, or one that it cannot have.
        """
        hints = get_type_hints(TrainConfig)
        if unknown := sorted(set(values) - set(hints)):
            raise ValueError(f"saved settings: unknown {', '.join(unknown)}; written by another version of mxep?")
        return TrainConfig(**{name: checked_value(name, value, hints[name]) for name, value in {**LEGACY_VALUES, **values}.items()})


@dataclass(frozen=True)
class Settings:
    """A `TrainConfig` with nothing left open; the fields are those of the options, but for the first ones.

    Attributes:
        choice: the model that was asked for.
        shape: what of it is trained, with or without YaRN.
        defaults_of: preset whose values stand in for steps, batch and so on where nothing was said.
    """

    choice: ModelChoice
    shape: ModelConfig
    defaults_of: str
    yarn: bool
    dp_shard: int
    steps: int
    batch: int
    seq_len: int
    lr: float
    warmup: int
    ep: int
    eval_every: int
    checkpoint_every: int
    degrees: Degrees

    @property
    def model(self) -> str:
        """What the model is called."""
        return self.choice.name

    @property
    def data_world(self) -> int:
        """Parts in which a batch is cut; tensor-parallel ranks and the stages of a pipeline share theirs."""
        return self.degrees.replicate * self.dp_shard


def settle(config: TrainConfig, device_type: str, world: int) -> Settings:
    """Fill what the command line left open from the model and the machine.

    Raises:
        ValueError: what `choose_model` finds wrong, YaRN for a model that has none, sequences longer than the model's, degrees that do not
            fit ranks, sequences, batch, layers or experts; options for dense linear layers that are not converted.
    """
    # Not when a `TrainConfig` is made: one of the two may be in the TOML file or in a run that goes on, and the other not yet read.
    given = [name for name in ("linear_recipe", "linear_fqns", "linear_skip") if getattr(config, name)]
    if given and not config.converts(LINEARS):
        raise ValueError(f"--{given[0].replace('_', '-')} without {LINEARS} in --converters={config.converters}; add it there")
    choice = choose_model(config, device_type)
    model, shape = choice.name, choice.shape
    defaults_of, defaults = train_defaults(model, shape)
    steps = config.steps or defaults.steps
    seq_len = config.seq_len or min(defaults.seq_len, shape.max_seq_len)
    if seq_len > shape.max_seq_len:
        raise ValueError(f"--seq-len={seq_len}, want at most {model}'s max_seq_len={shape.max_seq_len}")
    yarn = choice.applies_yarn(config.yarn, seq_len)
    batch = config.batch or defaults.batch
    rest = config.dp_replicate * config.tp * config.pp
    dp_shard = world // rest if config.dp_shard == -1 else config.dp_shard
    if dp_shard * rest != world:
        degrees = f"--dp-replicate={config.dp_replicate} --dp-shard={config.dp_shard} --tp={config.tp} --pp={config.pp}"
        raise ValueError(f"{degrees}: their product is not the {world} ranks; change a degree or --nproc")
    shards, tp = dp_shard * config.tp, config.tp
    fitting = [d for d in range(1, shards + 1) if shards % d == 0 and max(d, tp) % min(d, tp) == 0 and shape.num_experts % d == 0]
    ep = config.ep or max(fitting)
    if shards % ep:
        of = "" if shards == world else " of one stage and replica"
        raise ValueError(f"--ep={ep} does not divide the {shards} ranks{of}")
    if shape.num_experts % ep:
        raise ValueError(f"--ep={ep} does not divide the {shape.num_experts} experts of {model}")
    if config.transport == "symmetric" and ep == 1:
        raise ValueError("--transport=symmetric with --ep=1, where no token leaves its rank; give another --ep or leave it away")
    places = Degrees(ep, tp, config.pp, config.dp_replicate, config.cp)
    places.shards(world)
    if seq_len % tp:
        raise ValueError(f"--seq-len={seq_len} is not divisible by --tp={tp}, whose ranks share every sequence; change either")
    if config.pp > 1 and batch % config.microbatch:
        raise ValueError(f"--microbatch={config.microbatch} does not divide --batch={batch}; change either")
    return Settings(
        choice=choice,
        shape=at_length(shape, seq_len, yarn),
        defaults_of=defaults_of,
        yarn=yarn,
        dp_shard=dp_shard,
        steps=steps,
        batch=batch,
        seq_len=seq_len,
        lr=config.lr or defaults.lr,
        warmup=defaults.warmup if config.warmup is None else config.warmup,
        ep=ep,
        eval_every=config.eval_every or max(-(-steps // 3), 1),
        checkpoint_every=config.checkpoint_every or min(-(-steps // 10), MAX_CHECKPOINT_EVERY),
        degrees=places,
    )


def routed_as_asked(shape: ModelConfig, config: TrainConfig) -> ModelConfig:
    """The model's shape with the `ROUTER_OPTIONS` that were given; with --init-from it routes in the precision of that file's family."""
    published = {} if config.init_from is None else {"router_dtype": published_router_dtype(shape)}
    given = {name: getattr(config, name) for name in ROUTER_OPTIONS if getattr(config, name) is not None}
    return dataclasses.replace(shape, **{**published, **given})


def keep_model(config: TrainConfig, settings: Settings) -> TrainConfig:
    """The options with the model that they came to, so that a run goes on with it whatever becomes of files and presets."""
    return dataclasses.replace(config, shape=settings.choice.to_json(), yarn="on" if settings.yarn else "off")


def split_names(names: str) -> list[str]:
    """The names of an option that holds several.

    >>> split_names("model, loss")
    ['model', 'loss']
    """
    return [name.strip() for name in names.split(",") if name.strip()]


def save_config(config: TrainConfig, out: Path) -> None:
    """Write the run's options to <out>/config.json, for --resume to start from."""
    lasting = config.to_json() | {name: TrainConfig.__dataclass_fields__[name].default for name in PER_START}
    replace_file(out / CONFIG_FILE, (json.dumps(lasting, indent=2) + "\n").encode())


def load_config(out: Path) -> TrainConfig:
    """The options of the run in `out`. Raises ValueError when there are none or they are damaged."""
    path = out / CONFIG_FILE
    if not path.exists():
        raise ValueError(f"resume: no run in {out} (no {CONFIG_FILE}); name its folder with --out")
    values = read_json_object(path, "resume")
    try:
        return TrainConfig.from_json(values)
    except ValueError as error:
        raise ValueError(f"resume: {path} is damaged: {error}") from error


def checked_value(where: str, value: Any, hint: Any) -> Any:
    """A value of a TOML or JSON file as a field of type `hint` holds it; a list may stand for names separated by commas.

    Raises:
        ValueError: it begins with `where` and says what is wanted.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    wanted: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            if isinstance(value, str) and value in get_args(kind):
                return value
            wanted.append(f"one of {', '.join(map(repr, get_args(kind)))}")
        elif get_origin(kind) is tuple:
            if strings or isinstance(value, str):
                return tuple(value) if strings else (value,)
            wanted.append("a list of strings")
        elif get_origin(kind) is dict:
            if isinstance(value, dict):
                return value
            wanted.append("an object")
        elif kind is str and strings:
            return ",".join(value)
        elif kind is Path and isinstance(value, str) and "\0" not in value:
            return Path(value)
        elif type(value) is int and abs(value) >= 1 << 63:
            wanted.append("a number of 64 bits")
        elif kind is float and type(value) is int:
            return float(value)
        elif type(value) is kind:
            return value
        elif kind is not types.NoneType:
            wanted.append({str: "a string", bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}[kind])
    raise ValueError(f"{where} = {repr(value)[:80]}, want {' or '.join(dict.fromkeys(wanted))}")

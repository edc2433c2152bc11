"""Resolves options: the model that they name or describe, and a value for every option that was not given. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mxep.models.huggingface import published_router_dtype
from mxep.models.huggingface_shape import check_published_config, find_model, read_shape
from mxep.models.presets import (
    FLAVORS,
    LEGACY_MODELS,
    DeepSeekV3Config,
    ModelConfig,
    at_length,
    default_model,
    first_layers,
    resolve_model,
    shape_from_json,
    shape_to_json,
    train_defaults,
)
from mxep.parallel_dims import ParallelDims
from mxep.train.config import AUTO, LINEARS, ROUTER_OPTIONS, TrainConfig, flag_of

MAX_CHECKPOINT_EVERY = 500  # torchtitan's default: the work that a kill loses must not grow with the run


@dataclass(frozen=True)
class ModelChoice:
    """The model that the options choose.

    Attributes:
        name: of the preset or folder, with the number of layers if not all are trained.
        shape: as published, with YaRN if the model has it.
        yarn: whether the initial weights were trained with YaRN; None: random weights.
        notes: lines about keys of its config.json that are ignored.
    """

    name: str
    shape: ModelConfig
    yarn: bool | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values that a run saves: `TrainConfig.shape`."""
        return {"name": self.name, **shape_to_json(self.shape)}

    def applies_yarn(self, asked: str, seq_len: int) -> bool:
        """True if a run with `seq_len` tokens per sequence applies YaRN; `asked` is its --yarn.

        Raises:
            ValueError: --yarn=on for a model without YaRN.
        """
        extension = self.shape.yarn
        if extension is None:
            if asked == "on":
                raise ValueError(f"--yarn=on, but {self.name} has no YaRN (no rope_scaling); leave it out")
            return False
        if asked != "auto":
            return asked == "on"
        return seq_len > extension.original_seq_len if self.yarn is None else self.yarn


def choose_model(config: TrainConfig, device_type: str) -> ModelChoice:
    """The model of a run. A shape that the run has saved takes precedence over files and presets.

    Raises:
        ValueError: no such model or folder; a config.json that our models do not cover, or of another model than --model; --layers of
            a folder with weights.
    """
    named = chosen_model(config)
    if config.shape is not None:
        return kept_model(config.shape, named or default_model(device_type), config.layers)
    folder = config.init_from
    if folder is not None and not folder.is_dir():
        got = "is a file" if folder.is_file() else "does not exist"
        raise ValueError(f"--init-from={folder} {got}, want a Hugging Face folder with its config.json and weights")
    if named is None and folder is not None:
        if config.layers is not None:
            raise ValueError(f"--layers={config.layers} with --init-from={folder}, whose weights are of all its layers; leave --layers out")
        named = str(folder)
    name, shape, notes = find_model(named or default_model(device_type), config.layers)
    if folder is None:
        return ModelChoice(name, shape, notes=tuple(notes))
    check_published_config(shape, folder, any_yarn=True)  # its notes are returned again when the weights are loaded
    theirs, _ = read_shape(folder)
    if not isinstance(shape, DeepSeekV3Config):
        return ModelChoice(name, shape)
    return ModelChoice(name, replace(shape, yarn=theirs.yarn or shape.yarn), theirs.yarn is not None)


def kept_model(values: dict[str, Any], named: str, layers: int | None = None) -> ModelChoice:
    """The model that a run has saved.

    Args:
        values: from `ModelChoice.to_json`. Older runs saved nothing (an empty dict): their model is the preset `named`, or its first
            `layers`, as the preset was then.

    Raises:
        ValueError: the values are no model, or there is no such preset.
    """
    if values == {}:
        name, shape = first_layers(named, resolve_model(named, LEGACY_MODELS), layers)
        return ModelChoice(name, shape, yarn=True)  # older runs applied it at every length
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ValueError(f"saved shape: got {values!r}, want an object with a name")
    return ModelChoice(values["name"], shape_from_json({key: value for key, value in values.items() if key != "name"}))


def chosen_model(config: TrainConfig) -> str | None:
    """The preset or path that the options name, by --model or by --model-name and --model-flavor; None if they name none.

    Raises:
        ValueError: a name without a flavor or the reverse, an unknown pair, or two different presets.
    """
    name, flavor = config.model_name, config.model_flavor
    if name is None and flavor is None:
        return config.model
    found = FLAVORS.get((name or "", flavor or ""))
    if found is None:
        pairs = ", ".join(f"{known} {size}" for known, size in FLAVORS)
        raise ValueError(f"--model-name={name} --model-flavor={flavor}, want one of {pairs}; or --model with a preset")
    if config.model not in (None, found):
        raise ValueError(f"--model={config.model}, but --model-name={name} --model-flavor={flavor} is {found}; give one of them")
    return found


@dataclass(frozen=True)
class ResolvedConfig:
    """A `TrainConfig` with all values filled in; fields that are not listed are options of the same name.

    Attributes:
        choice: the model.
        shape: the shape that is trained, with or without YaRN.
        defaults_of: the preset that gives steps, batch and so on if they are not given.
        last_step: of this start: `steps`, or earlier with --stop-after.
        forward_sequences: of one forward of a rank: the batch, with a pipeline a microbatch.
    """

    choice: ModelChoice
    shape: ModelConfig
    defaults_of: str
    yarn: bool
    dp_shard: int
    steps: int
    last_step: int
    batch: int
    seq_len: int
    lr: float
    warmup: int
    ep: int
    eval_every: int
    checkpoint_every: int
    forward_sequences: int
    degrees: ParallelDims

    @property
    def model(self) -> str:
        """The model's name."""
        return self.choice.name

    @property
    def forward_tokens(self) -> int:
        """Tokens of `forward_sequences`."""
        return self.forward_sequences * self.seq_len

    @property
    def data_world(self) -> int:
        """Data-parallel shards of a batch; tensor-parallel ranks and pipeline stages share one."""
        return self.degrees.replicate * self.dp_shard


def resolve(config: TrainConfig, device_type: str, world: int) -> ResolvedConfig:
    """Fill in options that were not given, from the model and the machine.

    Raises:
        ValueError: what `choose_model` raises, --no-assistant-only-loss without --chat, YaRN for a model without it, sequences longer than
            the model's, degrees that do not fit ranks, sequences, batch, layers or experts, options for dense linear layers that are not
            converted, what a CUDA graph cannot hold, a trace after the last step; of a new run `never_used`.
    """
    # Not in `TrainConfig`: one of the two may come from the TOML file or the resumed run, which are read later.
    given = [name for name in ("linear_recipe", "linear_fqns", "linear_skip") if getattr(config, name) not in (None, "", AUTO)]
    if given and not config.converts(LINEARS):
        raise ValueError(f"{flag_of(given[0])} without {LINEARS} in --converters={config.converters}; add it there")
    blocks = "give --fused-layer" if config.resume else "leave that out"  # a resumed run has the saved option
    if config.keep_first_product == "mxfp8" and not config.fused_layer:
        raise ValueError(f"--keep-first-product=mxfp8 with --no-fused-layer, whose separate blocks keep it as it is; {blocks}")
    if not config.assistant_only_loss and not config.chat:
        raise ValueError("--no-assistant-only-loss without --chat, where every token is trained on; leave it out, or add --chat")
    if config.optimizer_in_backward:
        for name, value, wanted in (("max-grad-norm", config.max_grad_norm, 0), ("accumulate", config.accumulate, 1), ("pp", config.pp, 1)):
            if value != wanted:
                raise ValueError(
                    f"--optimizer-in-backward with --{name}={value}, which needs all gradients before the first update; "
                    f"give --{name} {wanted}, or leave --optimizer-in-backward out"
                )
    if config.cuda_graph:
        _check_recordable(config, device_type)
    choice = choose_model(config, device_type)
    model, shape = choice.name, choice.shape
    defaults_of, defaults = train_defaults(model, shape)
    steps = config.steps or defaults.steps
    last_step = min(steps, config.stop_after or steps)
    if config.profile_step is not None and config.profile_step > last_step:
        raise ValueError(
            f"--profile-step={config.profile_step}, want at most {last_step}, the last step of this start; lower it, or leave it out"
        )
    seq_len = config.seq_len or min(defaults.seq_len, shape.max_seq_len)
    if seq_len > shape.max_seq_len:
        raise ValueError(f"--seq-len={seq_len}, want at most {model}'s max_seq_len={shape.max_seq_len}")
    if not config.resume:
        for problem in never_used(config, shape, steps, seq_len):
            raise ValueError(problem)
    yarn = choice.applies_yarn(config.yarn, seq_len)
    batch = config.batch or defaults.batch
    rest = config.dp_replicate * config.tp * config.pp
    dp_shard = world // rest if config.dp_shard == -1 else config.dp_shard
    if dp_shard * rest != world:
        degrees = f"--dp-replicate={config.dp_replicate} --dp-shard={config.dp_shard} --tp={config.tp} --pp={config.pp}"
        raise ValueError(f"{degrees}: their product is not the {world} ranks; change a degree or --nproc")
    shards, tp = dp_shard * config.tp, config.tp
    ep = config.ep or max(ep_degrees(shards, tp, shape.num_experts))
    if shards % ep:
        of = "" if shards == world else " of one stage and replica"
        raise ValueError(f"--ep={ep} does not divide the {shards} ranks{of}; choose a divisor, or leave --ep out")
    if shape.num_experts % ep:
        raise ValueError(f"--ep={ep} does not divide the {shape.num_experts} experts of {model}; choose a divisor, or leave --ep out")
    if config.transport == "symmetric" and ep == 1:
        raise ValueError("--transport=symmetric with --ep=1, where no token leaves its rank; give another --ep or omit --transport")
    dims = ParallelDims(ep, tp, config.pp, config.dp_replicate, config.cp)
    dims.shards(world)
    if seq_len % tp:
        raise ValueError(f"--seq-len={seq_len} is not divisible by --tp={tp}, whose ranks share every sequence; change either")
    if config.pp > 1 and batch % config.microbatch:
        raise ValueError(f"--microbatch={config.microbatch} does not divide --batch={batch}; change either")
    return ResolvedConfig(
        choice=choice,
        shape=at_length(shape, seq_len, yarn),
        defaults_of=defaults_of,
        yarn=yarn,
        dp_shard=dp_shard,
        steps=steps,
        last_step=last_step,
        batch=batch,
        seq_len=seq_len,
        lr=config.lr or defaults.lr,
        warmup=defaults.warmup if config.warmup is None else config.warmup,
        ep=ep,
        eval_every=config.eval_every or max(-(-steps // 3), 1),
        forward_sequences=config.microbatch if config.pp > 1 else batch,
        checkpoint_every=config.checkpoint_every or min(-(-steps // 10), MAX_CHECKPOINT_EVERY),
        degrees=dims,
    )


def ep_degrees(shards: int, tp: int, experts: int) -> list[int]:
    """The EP degrees that the ranks of a stage and replica can have, ascending.

    >>> ep_degrees(8, 2, 64), ep_degrees(12, 4, 96)
    ([1, 2, 4, 8], [1, 2, 4, 12])
    """
    return [d for d in range(1, shards + 1) if shards % d == 0 and max(d, tp) % min(d, tp) == 0 and experts % d == 0]


def never_used(config: TrainConfig, shape: ModelConfig, steps: int, seq_len: int) -> Iterator[str]:
    """Options that ask for what the run never does, as errors. A resumed run may have saved them, and prints the same lines."""
    if config.numerics_every is not None and config.numerics_every > steps:
        yield f"--numerics-every={config.numerics_every}, want at most the {steps} steps of the run; lower it, or leave it out"
    if config.evaluate and TrainConfig.eval_tokens != config.eval_tokens < seq_len:
        yield f"--eval-tokens={config.eval_tokens}, want at least the {seq_len} tokens of a sequence (--seq-len), all evaluated; raise it"
    if config.balance_loss_type not in (None, shape.balance_loss_type) and not routed_as_asked(shape, config).balance_loss:
        given = f"--balance-loss-type={config.balance_loss_type} without a balance loss"
        yield f"{given}, want a --balance-loss above 0; give it, or leave --balance-loss-type out"


def _check_recordable(config: TrainConfig, device_type: str) -> None:
    """Raise ValueError unless a step with these options can be a CUDA graph: the host does the same in every step, and waits in none."""
    problems = (
        (device_type != "cuda", f"device {device_type}", "want a GPU"),
        (
            not config.fused_layer,
            "--no-fused-layer",
            "its separate blocks read on the host how many rows each rank sends; "
            + ("give --fused-layer" if config.resume else "leave that out"),
        ),
        (config.pp > 1, f"--pp={config.pp}", "the host runs the schedule of a pipeline; give --pp 1"),
        (
            config.mask_documents,
            "--mask-documents",
            "the number and the length of documents, which launch attention, differ from step to step",
        ),
        (config.numerics_every is not None, f"--numerics-every={config.numerics_every}", "only some of the steps count codes"),
    )
    for problem, got, why in problems:
        if problem:
            raise ValueError(f"--cuda-graph with {got}: {why}, or give --no-cuda-graph")


def routed_as_asked(shape: ModelConfig, config: TrainConfig) -> ModelConfig:
    """The model's shape with the given `ROUTER_OPTIONS`; with --init-from the router has the family's published precision."""
    published = {} if config.init_from is None else {"router_dtype": published_router_dtype(shape)}
    given = {name: getattr(config, name) for name in ROUTER_OPTIONS if getattr(config, name) is not None}
    return replace(shape, **{**published, **given})


def keep_model(config: TrainConfig, settings: ResolvedConfig) -> TrainConfig:
    """The options with the chosen model's shape, so that a run resumes with it even if files or presets change."""
    return replace(config, shape=settings.choice.to_json(), yarn="on" if settings.yarn else "off")

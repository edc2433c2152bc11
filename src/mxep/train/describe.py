"""Lines that a run prints before its first step: router, model, schedule, and options that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from mxep.device import total_memory
from mxep.field_types import listed
from mxep.models.presets import ModelConfig, preset_of
from mxep.recipe import resolve_recipe
from mxep.train.config import EXPERTS, TrainConfig, flag_of, split_names
from mxep.train.data.corpus import NO_TARGET, Corpus
from mxep.train.linear_choice import linear_recipe
from mxep.train.optimizer import Schedule
from mxep.train.option_parser import passed_over
from mxep.train.recompute_budget import RecomputeChoice
from mxep.train.resolved_config import ResolvedConfig
from mxep.train.state_precision import StatePrecision

_KERNELS = {
    "rows_cast_kernel": "1x32, along rows, is a Triton kernel on GPUs, plain PyTorch on a CPU",
    "columns_cast_kernel": "32x1, along columns, is CUDA C++ on Hopper, a Triton kernel on other GPUs, plain PyTorch on a CPU",
}


def describe_recompute(config: TrainConfig, choice: RecomputeChoice | None, device: torch.device) -> list[str]:
    """A line about what `--activation-checkpoint auto` chose for the layers of this rank; `choice` is None on a CPU and for other modes."""
    of_stage = ", first rank of the pipeline" if config.pp > 1 else ""
    return [] if choice is None else [f"activation checkpointing auto{of_stage}: {choice.in_words(total_memory(device))}"]


def out_of_memory_note(config: TrainConfig) -> str:
    """What to change where a step needs more memory than a GPU had free."""
    ways: list[str] = [] if config.activation_checkpoint == "full" else ["--activation-checkpoint full"]
    ways.append("a smaller --microbatch" if config.pp > 1 else "a smaller --batch with more --accumulate")
    ways.append("more GPUs")
    return (
        f"mxep train: a step needs more memory than this GPU had free; give {listed(ways)} (`mxep explain` estimates what a run needs, "
        "docs/troubleshooting.md lists what takes memory)"
    )


def describe_router(shape: ModelConfig, device_type: str) -> str:
    """A line about the router GEMM's precision and the load balancing."""
    product = "float32" if shape.router_dtype == "fp32" or device_type == "cpu" else "bf16"
    balance = f"balance loss {shape.balance_loss:g} ({shape.balance_loss_type})" if shape.balance_loss else "no balance loss"
    balance += f", z-loss {shape.z_loss:g}" if shape.z_loss else ""
    balance += f", expert bias by {shape.bias_update_rate:g} a step" if shape.bias_update_rate else ""
    return f"router product in {product}; {balance}"


def describe_model(settings: ResolvedConfig) -> list[str]:
    """Lines about a model that is no preset (what is left out, whose defaults it uses), and about YaRN."""
    s, yarn = settings, settings.choice.shape.yarn
    lines = [*s.choice.notes]
    if preset_of(s.model) != s.defaults_of:
        lines.append(f"steps, batch, sequence length, learning rate and warmup where not given: those of {s.defaults_of}")
    if yarn is not None:
        extended = f"a context of {yarn.original_seq_len:,} tokens {yarn.factor:g} times"
        longer = f", though sequences are longer: {s.seq_len:,} tokens" if s.seq_len > yarn.original_seq_len else ""
        lines.append(f"YaRN extends {extended}" if s.yarn else f"without YaRN, which would extend {extended}{longer}")
    return lines


def describe_peak(peak: float | None) -> list[str]:
    """A line about what mfu and hfu are shares of; none where the peak is not known, FLOP/s in dense bf16."""
    return [] if peak is None else [f"mfu and hfu of {peak / 1e12:g} TFLOP/s a GPU: dense products in bf16, in recipes with MXFP8 as well"]


def describe_state(precision: StatePrecision) -> str:
    """The precision of the weights and of the optimizer's moments.

    >>> describe_state(StatePrecision()), describe_state(StatePrecision("adamw8bit", "bfloat16"))
    ('float32 weights', 'bf16 weights rounded stochastically, 8-bit moments')
    """
    weights = "float32 weights" if precision.dtype == "float32" else "bf16 weights rounded stochastically"
    bits = precision.optimizer.removeprefix("adamw").removesuffix("bit")
    return f"{weights}, {bits}-bit moments" if bits else weights


def describe_chat(corpus: Corpus, seq_len: int) -> list[str]:
    """Lines about conversations: how many tokens are targets, and how many conversations no sequence holds whole."""
    ends = np.append(corpus.train_starts[1:], len(corpus.train))
    cut, count = int((ends - corpus.train_starts > seq_len).sum()), corpus.num_train_documents
    targets = int((corpus.train < NO_TARGET).sum())
    return [
        f"chat: {targets:,} of {len(corpus.train):,} training tokens are targets",
        f"chat: {cut:,} of {count:,} conversations are longer than a sequence of {seq_len:,} tokens and are cut into several",
    ]


def describe_schedule(schedule: Schedule) -> list[str]:
    """A line if the learning rate cannot follow the options: the warmup is too long, or the decay begins in it or is too short."""
    s = schedule
    if s.warmup > s.steps:
        return [f"--warmup={s.warmup} is longer than the run of {s.steps} steps: the rate never reaches {s.peak:g}"]
    if s.decay_ratio and (left := s.steps - s.decay_start) < 2:
        decay = f"leaves {left} to the decay, which begins at the peak rate: the rate never falls"
        return [f"--decay-ratio={s.decay_ratio:g} of {s.steps} steps with the warmup of {s.warmup} {decay}"]
    if s.decay_ratio is not None and s.steps - round(s.decay_ratio * s.steps) < s.warmup:
        short = f"the rate falls in the last {s.steps - s.warmup}"
        return [f"--decay-ratio={s.decay_ratio:g} of {s.steps} steps begins in the warmup of {s.warmup}: {short}"]
    return []


def describe_mapped(config: TrainConfig) -> list[str]:
    """A line for each given option that has no effect, and for keys of torchtitan that are ignored."""
    lines = [
        f"{flag_of(name)}={getattr(config, name)} changes nothing: what quantises {kernels}"
        for name, kernels in _KERNELS.items()
        if getattr(config, name) is not None
    ]
    if config.compile:
        model = "every layer outside of exchanges and routed experts" if "model" in split_names(config.compile_components) else "nothing"
        lines.append(f"--compile compiles {model} ({config.compile_backend}); the loss runs chunk by chunk of tokens, not compiled")
    lines += [
        f"{flag_of(name)}={given} changes nothing {why}"
        for name, why in _without_effect(config)
        if (given := getattr(config, name)) != getattr(TrainConfig, name)
    ]
    if config.config is not None and (keys := passed_over(config.config)):
        lines.append(f"{config.config} has keys of torchtitan that mean nothing here and are passed over: {', '.join(keys)}")
    return lines


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """(option, reason) for options that have no effect in combination with the others."""
    if not config.resume:
        yield "change", "without --resume"
    if config.pp == 1:
        yield "pp_schedule", "without pipeline stages (--pp above 1)"
        yield "microbatch", "without pipeline stages (--pp above 1)"
    if not config.evaluate:
        yield "eval_every", "with --no-evaluate"
        yield "eval_tokens", "with --no-evaluate"
    if not config.checkpoint:
        for name in ("checkpoint_every", "keep", "async_checkpoint"):
            yield name, "with --no-checkpoint"
    if config.validation_data:
        yield "held_out_share", "with --validation-data, which is held out"
    if config.decay_ratio == 0:
        yield "decay_type", "with --decay-ratio 0, where the rate never falls"
        yield "lr_floor", "with --decay-ratio 0, where the rate never falls"
    if config.profile_step is None:
        yield "profile_steps", "without --profile-step"
        yield "profile_host", "without --profile-step"
    if not config.compile:
        yield "compile_components", "without --compile"
        yield "compile_backend", "without --compile"
    if not config.converts(EXPERTS) or resolve_recipe(config.recipe).gemm != "mxfp8":
        yield "numerics_every", "where no experts multiply in MXFP8 (--recipe, --converters)"
    in_mx = any(resolve_recipe(name).gemm == "mxfp8" for name in (config.recipe, config.output_recipe))
    if not in_mx and linear_recipe(config) is None:
        yield "cache_weights", f"where nothing multiplies in MXFP8 (--recipe {config.recipe})"
    if config.fused_layer:
        yield "fused_experts", "where MoE layers are one function, experts included; give --no-fused-layer for separate blocks"

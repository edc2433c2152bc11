"""What a run says of options that mean less here than elsewhere, or nothing beside the others that were given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mxep.recipe import resolve_recipe
from mxep.train.config import LINEARS, TrainConfig, split_names

_KERNELS = {
    "rows_cast_kernel": "1x32, along rows, is a Triton kernel on GPUs, plain PyTorch on a CPU",
    "columns_cast_kernel": "32x1, along columns, is CUDA C++ on Hopper, a Triton kernel on other GPUs, plain PyTorch on a CPU",
}


def describe_mapped(config: TrainConfig) -> list[str]:
    """What options of other trainers come to here, and which of those that were given change nothing: a line for each."""
    lines = [
        f"{_flag(name)}={getattr(config, name)} changes nothing: what quantises {kernels}"
        for name, kernels in _KERNELS.items()
        if getattr(config, name) is not None
    ]
    if config.compile:
        model = "every layer outside of exchanges and routed experts" if "model" in split_names(config.compile_components) else "nothing"
        lines.append(f"--compile compiles {model} ({config.compile_backend}); the loss runs chunk by chunk of tokens, not compiled")
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    lines += [
        f"{_flag(name)}={given[name]} changes nothing {why}" for name, why in _without_effect(config) if given[name] != defaults[name]
    ]
    return lines


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_effect(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Options that have no effect beside the others, with the reason."""
    if config.pp == 1:
        yield "pp_schedule", "without pipeline stages (--pp above 1)"
        yield "microbatch", "without pipeline stages (--pp above 1)"
    if config.profile_step is None:
        yield "profile_steps", "without --profile-step"
    if not config.compile:
        yield "compile_components", "without --compile"
    if resolve_recipe(config.recipe).gemm != "mxfp8" and LINEARS not in split_names(config.converters):
        yield "cache_weights", f"where nothing multiplies in MXFP8 (--recipe {config.recipe})"
    if config.fused_layer:
        yield "fused_experts", "beside --fused-layer, whose experts are always one function"

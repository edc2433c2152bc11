"""`--linear-fqns auto`: which dense linear layers of a run compute in MXFP8, from the measured times of their shapes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mxep.device import resolve_gemm_path
from mxep.models.families import build_model
from mxep.models.presets import ModelConfig
from mxep.moe import Router
from mxep.parallel.linears import MXLinear, why_linear_stays
from mxep.parallel.module_names import check_patterns, matches_any, name_patterns, shown_names
from mxep.recipe import Recipe, resolve_recipe
from mxep.train.config import AUTO, LINEARS, TrainConfig, split_names


def linear_recipe(config: TrainConfig) -> Recipe | None:
    """Of the dense linear layers that the options convert; None: all of them stay in high precision."""
    recipe = resolve_recipe(config.linear_recipe or config.recipe) if config.converts(LINEARS) else None
    return recipe if recipe is not None and recipe.gemm == "mxfp8" else None


def linears_by_gain(shape: ModelConfig, recipe: Recipe, tokens: int, tp: int) -> dict[str, str | None]:
    """For each dense linear layer of a model, why it stays in high precision; None: it is faster in MXFP8 (`why_linear_stays`)."""
    with torch.device("meta"):
        model = build_model(shape, resolve_recipe("hp"))
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    return {name: why_linear_stays(name, layer, recipe, tokens, tp) for name, layer in layers.items()}


def choose_linears(config: TrainConfig, shape: ModelConfig, tokens: int, device: torch.device) -> TrainConfig:
    """The options with the names of the layers that `--linear-fqns auto` stands for, so that a run saves them and resumes with them.

    Args:
        config: the options; without "auto", or with linear layers in high precision, they are returned as they are.
        shape: of the model.
        tokens: of one forward of a rank.
        device: that computes. The measurements are those of the GEMM path "fp8"; where another one runs, nothing is chosen.

    Raises:
        ValueError: --linear-skip matches no linear layer.
    """
    recipe = linear_recipe(config)
    if recipe is None or config.linear_fqns != AUTO:
        return config
    by_gain, skip = linears_by_gain(shape, recipe, tokens, config.tp), split_names(config.linear_skip)
    check_patterns("--linear-skip", skip, "torch.nn.Linear", by_gain)
    measured = resolve_gemm_path(recipe.gemm_path, device) == "fp8"
    chosen = [name for name, stays in by_gain.items() if measured and stays is None and not matches_any(name, skip)]
    return replace(config, linear_fqns=",".join(name_patterns(chosen, [name for name in by_gain if name not in chosen])))


def converts_attention(config: TrainConfig, shape: ModelConfig) -> bool:
    """Whether linear layers of attention are among those that the options convert.

    >>> from mxep.models.presets import MODELS
    >>> shape, only = MODELS["dsv3_debug_cpu"], TrainConfig(linear_fqns="layers.*.feed_forward.w1")
    >>> converts_attention(only, shape), converts_attention(replace(only, linear_fqns="layers.3.attention.wo"), shape)
    (False, True)

    Args:
        config: as `choose_linears` returns it.
    """
    if linear_recipe(config) is None:
        return False
    named = None if config.linear_fqns is None else split_names(config.linear_fqns)
    with torch.device("meta"):
        layers = build_model(shape, resolve_recipe("hp")).layers
    names = [f"layers.{name}" for name, module in layers.named_modules() if ".attention." in name and type(module) is nn.Linear]
    return any(matches_any(name, named) and not matches_any(name, split_names(config.linear_skip)) for name in names)


def describe_linears(model: nn.Module, config: TrainConfig) -> list[str]:
    """A line about the dense linear layers of a built model: which of them compute in MXFP8, and which do not.

    Args:
        model: with converted layers.
        config: the options of its run.
    """
    recipe = linear_recipe(config)
    if recipe is None:
        named = config.linear_fqns not in ("", AUTO, None) or config.linear_skip
        return ["dense linear layers in high precision: --linear-fqns and --linear-skip change nothing"] if named else []
    converted = [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    if not converted:
        return ["dense linear layers: all in high precision (--linear-fqns auto converts those that gain, on a Hopper GPU)"]
    routers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Router))
    others = [name for name, module in model.named_modules() if type(module) is nn.Linear and not name.startswith(routers)]
    return [f"dense linear layers in {recipe.name}: {shown_names(converted)}; in high precision: {shown_names(others)}"]

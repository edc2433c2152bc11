"""Options, weights and top-k choices of one call of the fused layer, checked and resolved.

Errors name the call, `where`: "fused_moe" or "fused_experts".
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.checks import HIGH_PRECISION, check_tensors, values_checked
from mxep.fused.dispatcher import DispatchSpec
from mxep.fused.make_dispatcher import ep_degree
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.grouped_mm.products import gemm_options
from mxep.moe.config import MoEConfig, check_activation
from mxep.moe.expert_mlp import Activation, ExpertOptions, ExpertWeights, check_lora
from mxep.mx.tensor import MXTensor
from mxep.mx.weight import MXWeight
from mxep.ops.activation.functions import SwiGLU, is_gated
from mxep.ops.activation.reference import LAYOUTS
from mxep.ops.routing.index_reference import has_duplicates, topk_valid
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_DEFAULT_RUNTIME = RuntimeEPConfig()


class ScalingModes(NamedTuple):
    """Scaling mode of each exchange, "" for rows that are sent as they are; combine's are those of its own direction."""

    dispatch: str
    combine: str
    dispatch_backward: str
    combine_backward: str


class FusedOptions(NamedTuple):
    """Everything about a call that is no tensor and that all calls of a layer share.

    Attributes:
        router: shape and routing rules.
        recipe, runtime: as given.
        experts: of the experts' GEMMs and activation.
        scaling_modes: of the exchanges.
        spec: what must be the same on every rank, for a forward without a backward.
        group_name: of the EP group, "" for this rank alone.
        keep_as: scaling mode with which gate and up are kept for backward, "" to keep them as they are.
        score_dtype: of the scores' gradient: that of the caller's scores, float32 for a router's.
    """

    router: MoEConfig
    recipe: Recipe
    runtime: RuntimeEPConfig
    experts: ExpertOptions
    scaling_modes: ScalingModes
    spec: DispatchSpec
    group_name: str
    keep_as: str = ""
    score_dtype: torch.dtype = torch.float32

    def for_rows(self, tokens: int) -> FusedOptions:
        """The options for that many tokens of all ranks: with GEMMs in high precision if these are too few (`Recipe.hp_below_rows`)."""
        if self.experts.gemm is None or not self.recipe.multiplies_in_hp(tokens * self.router.top_k, self.router.num_experts):
            return self
        return self._replace(experts=self.experts._replace(gemm=None))


def resolve_runtime(where: str, config: RuntimeEPConfig | None, name: str = "config") -> RuntimeEPConfig:
    """The configuration given as the argument `name`, or the default. Raises ValueError for anything else."""
    if config is not None and not isinstance(config, RuntimeEPConfig):
        raise ValueError(f"{where}: {name} is a {type(config).__name__}, want a RuntimeEPConfig or None; RuntimeEPConfig(**options)")
    return config or _DEFAULT_RUNTIME


# Configurations are kept, since their checks cost the host as much as several launches.  By type too: 4.0 is no number of experts, 4 is.
kept_config = functools.lru_cache(maxsize=1024, typed=True)(MoEConfig)


@functools.lru_cache(maxsize=1024)
def _resolve(
    where: str,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    config: MoEConfig,
    recipe: Recipe,
    runtime: RuntimeEPConfig,
    layout: str,
    swiglu: SwiGLU,
    group_name: str,
    weight_dtype: torch.dtype | None,
) -> FusedOptions:
    """The options of a call with tokens of that width and dtype; a layer asks for the same in every forward."""
    check_activation(where, config.activation, swiglu)
    recipe = runtime.apply_to(recipe)
    mode = recipe.scaling_mode.value
    precisions = recipe.dispatch, runtime.combine_forward, runtime.dispatch_backward, recipe.combine_backward
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"{where}: input is {dtype}, want bfloat16 or float32; cast it first")
    if width % MX_BLOCK and (recipe.gemm == "mxfp8" or "mxfp8" in precisions):
        raise ValueError(f"{where}: input has {width} columns, want a width in multiples of {MX_BLOCK} (one MX block); pad with zeros")
    gemm = None
    if recipe.gemm == "mxfp8":
        gemm = gemm_options(device, dtype, recipe.gemm_path, recipe.wgrad, mode, weight_dtype=weight_dtype)
    activation = Activation(config.activation, layout, tuple(swiglu))
    spec = DispatchSpec(
        config.num_experts,
        config.top_k,
        width,
        dtype.itemsize,
        1024 * runtime.number + recipe.number,
        runtime.wires,
        recipe.group_size_multiple_of,
        sync_row_count=runtime.cpu_sync_on_runtime,
    )
    experts = ExpertOptions(gemm, activation, weight_dtype, padding_rows="skip")
    modes = ScalingModes(*(mode if precision == "mxfp8" else "" for precision in precisions))
    keep_as = mode if runtime.keep_first_product == "mxfp8" else ""
    return FusedOptions(config, recipe, runtime, experts, modes, spec, group_name, keep_as)


def make_options(
    where: str,
    x: Tensor,
    router: Tensor | None,
    weights: ExpertWeights,
    config: MoEConfig,
    recipe: Recipe,
    runtime: RuntimeEPConfig | None,
    swiglu: SwiGLU,
    group_name: str,
    weight_dtype: torch.dtype | None = None,
) -> FusedOptions:
    """Options of a call with tokens x (T, D); `runtime` None is the default.

    Raises ValueError for options that do not fit, and for weights or biases that do not belong to the tokens and to each other.
    """
    runtime, layout = resolve_runtime(where, runtime), weights.layout
    options = _resolve(where, int(x.shape[1]), x.dtype, x.device, config, recipe, runtime, layout, swiglu, group_name, weight_dtype)
    _check_weights(where, x, router, weights, options)
    return options


def _check_weights(where: str, x: Tensor, router: Tensor | None, weights: ExpertWeights, options: FusedOptions) -> None:
    """Raise ValueError unless weights, biases and adapters belong to the tokens and to each other."""
    config, group_name = options.router, options.group_name
    L = config.num_experts // ep_degree(group_name, config.num_experts, x.device) if group_name else config.num_experts
    H, D = config.hidden, config.dim
    gate = H if weights.w3 is not None or not is_gated(config.activation) else 2 * H
    wanted = (
        ("router_weight", router, (config.num_experts, D)),
        ("w1", weights.w1, (L, gate, D)),
        ("w2", weights.w2, (L, D, H)),
        ("w3", weights.w3, (L, H, D)),
        ("b1", weights.b1, (L, gate)),
        ("b2", weights.b2, (L, D)),
        ("b3", weights.b3, (L, H)),
    )
    for name, value, shape in wanted:
        if value is None:
            continue
        if not isinstance(value, Tensor):
            check_tensors(where, **{name: value})
        if isinstance(value, DTensor):
            raise ValueError(f"{where}: {name} is a DTensor {tuple(value.shape)}, want this rank's own part; pass {name}.to_local()")
        moved = isinstance(value, MXTensor) and not (isinstance(value, MXWeight) and name in ("w1", "w2", "w3"))
        if moved or value.shape != shape or value.dtype not in HIGH_PRECISION or value.device != x.device:
            raise ValueError(
                f"{where}: {name} is {tuple(value.shape)} {value.dtype} on {value.device}, want {shape} bfloat16 or float32 on "
                f"{x.device}: {L} of {config.num_experts} experts, {config.activation}, tokens of width {D}"
            )
    if any(factor is not None for factor in weights.lora):
        check_lora(where, x, weights)
    if (options.experts.gemm is not None or options.keep_as) and H % MX_BLOCK:
        raise ValueError(f"{where}: H = {H}, want a multiple of {MX_BLOCK} (one MX block); pad the weights")


def check_layout(where: str, x: Tensor, w1: Tensor, w2: Tensor, layout: str) -> None:
    """Raise ValueError for tokens or weights without the dimensions that sizes are read from, and for an unknown layout."""
    check_tensors(where, x=x, w1=w1, w2=w2)
    if x.dim() < 1 or w2.dim() != 3:
        raise ValueError(f"{where}: x is {tuple(x.shape)} and w2 is {tuple(w2.shape)}, want (..., D) and (L, D, H)")
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: layout={layout!r}, want one of {', '.join(LAYOUTS)}")


# ---------------------------------------------------------------- top-k choices of another router


class TopK(NamedTuple):
    """Top-k choices of the caller's router.

    Attributes:
        experts: (T, C) int64.  scores: (T, C), any float dtype.
    """

    experts: Tensor
    scores: Tensor


class AllowedTopK(NamedTuple):
    """What a row of the caller's choices may contain.

    Attributes:
        minus_one: -1, for no expert.  duplicates: an expert more than once.
    """

    minus_one: bool
    duplicates: bool


def allowed_topk(group_name: str, runtime: RuntimeEPConfig) -> AllowedTopK:
    """On one rank every choice has an expert row of its own or none; but a chunk of a fixed size has room for a token once per expert."""
    alone = not group_name
    return AllowedTopK(alone, alone and not isinstance(runtime.scratch_rows, int))


def check_topk(where: str, tokens: Tensor, experts: Tensor, scores: Tensor, num_experts: int, allowed: AllowedTopK) -> TopK:
    """(..., C) each -> (T, C). Raises ValueError unless each token has C choices, in checking mode also unless they are among the experts.

    Values that are not read here are asserted on the device by `sort_topk`.
    """
    check_tensors(where, experts=experts, scores=scores)
    T, C = tokens.shape[0], experts.shape[-1] if experts.dim() else 0
    fits = 1 <= C <= num_experts and experts.numel() == T * C and scores.shape == experts.shape
    fits &= experts.dtype == torch.int64 and scores.is_floating_point() and experts.device == scores.device == tokens.device
    if not fits:
        got = " and ".join(f"{n} {tuple(t.shape)} {t.dtype} on {t.device}" for n, t in (("experts", experts), ("scores", scores)))
        raise ValueError(
            f"{where}: {got}, want (..., C) int64 and float for {T} tokens on {tokens.device}, C from 1 to {num_experts}; as "
            "torch.topk gives them"
        )
    topk = TopK(experts, scores) if experts.dim() == 2 else TopK(experts.reshape(T, C), scores.reshape(T, C))
    if values_checked(experts) and not topk_valid(topk.experts, num_experts, *allowed):  # host sync: checking
        first, last, again = int(experts.min()), int(experts.max()), not allowed.duplicates and bool(has_duplicates(topk.experts))
        got = f"experts from {first} to {last}{', one of them twice for a token' if again else ''}"
        kinds = f"{'experts' if allowed.duplicates else 'C different ones'} of 0 to {num_experts - 1}"
        raise ValueError(f"{where}: {got}, want {kinds}{', or -1 for none,' if allowed.minus_one else ''} for each token")
    return topk

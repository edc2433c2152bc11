"""What a call of the fused layer is made of: its options, weights and choices, checked and resolved.

Errors name the call, `where`: "fused_moe" or "fused_experts".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.checks import check_mode, check_rows, check_tensors, values_checked
from mxep.fused.activation import Activation
from mxep.fused.fused_operands import Choices, FusedWeights, How
from mxep.fused.make_dispatcher import ep_degree
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.grouped_mm.products import gemm_options
from mxep.moe.config import MoEConfig, check_activation
from mxep.mx.tensor import MXTensor
from mxep.mx.weight_cache import CachedWeight
from mxep.ops.activation.functions import SwiGLU, is_gated
from mxep.ops.activation.reference import LAYOUTS
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK

_DTYPES = (torch.bfloat16, torch.float32)


def runtime_of(where: str, config: RuntimeEPConfig | None) -> RuntimeEPConfig:
    """The one that was given, or the default. Raises ValueError for anything else."""
    if config is not None and not isinstance(config, RuntimeEPConfig):
        raise ValueError(f"{where}: config is a {type(config).__name__}, want a RuntimeEPConfig or None; RuntimeEPConfig(**options)")
    return config or RuntimeEPConfig()


def how_of(
    where: str,
    x: Tensor,
    config: MoEConfig,
    recipe: Recipe,
    runtime: RuntimeEPConfig,
    layout: str,
    swiglu: SwiGLU,
    group_name: str,
    kept: dict[str, CachedWeight] | None = None,
    weight_dtype: torch.dtype | None = None,
) -> How:
    """Everything about a call of tokens x (T, D) that is no tensor. Raises ValueError for options that do not fit."""
    check_activation(where, config.activation, swiglu)
    recipe = runtime.apply_to(recipe)
    mode = check_mode(where, recipe.scaling_mode, MX_BLOCK)
    wires = (recipe.dispatch, recipe.combine_backward, runtime.combine_forward, runtime.dispatch_backward)
    check_rows(where, x, quantised=recipe.gemm == "mxfp8" or "mxfp8" in wires)
    gemm = None
    if recipe.gemm == "mxfp8":
        gemm = gemm_options(x, x.dtype, recipe.gemm_path, recipe.wgrad, mode, pad_groups=False, weight_dtype=weight_dtype)
    places = (None, None) if kept is None else (kept.get("w13"), kept.get("w2"))
    activation = Activation(config.activation, layout, mode if gemm else "", swiglu)
    return How(config, recipe, runtime, gemm, activation, group_name, places, weight_dtype=weight_dtype)


def check_weights(where: str, x: Tensor, weights: FusedWeights, how: How) -> None:
    """Raise ValueError unless weights and biases belong to the tokens and to each other."""
    config = how.router
    L, H, D = config.num_experts // ep_degree(how.group_name, config.num_experts, x.device), config.hidden, config.dim
    first = H if weights.w3 is not None or not is_gated(config.activation) else 2 * H
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "router_weight": (weights.router, (config.num_experts, D)),
        "w1": (weights.w1, (L, first, D)),
        "w2": (weights.w2, (L, D, H)),
        "w3": (weights.w3, (L, H, D)),
        "b1": (weights.b1, (L, first)),
        "b2": (weights.b2, (L, D)),
        "b3": (weights.b3, (L, H)),
    }
    for name, (value, shape) in wanted.items():
        if value is None:
            continue
        if isinstance(value, DTensor):
            raise ValueError(f"{where}: {name} is a DTensor {tuple(value.shape)}, want this rank's own part; pass {name}.to_local()")
        if isinstance(value, MXTensor) or tuple(value.shape) != shape or value.dtype not in _DTYPES or value.device != x.device:
            raise ValueError(
                f"{where}: {name} is {tuple(value.shape)} {value.dtype} on {value.device}, want {shape} bfloat16 or float32 on "
                f"{x.device}: {L} of {config.num_experts} experts, {config.activation}, tokens of width {D}"
            )
    if (how.gemm is not None or how.runtime.keep_first_product == "mxfp8") and H % MX_BLOCK:
        raise ValueError(f"{where}: H = {H}, want a multiple of {MX_BLOCK} (one MX block); pad the weights")


def check_layout(where: str, x: Tensor, w2: Tensor, layout: str) -> None:
    """Raise ValueError for tokens or weights without the dimensions that sizes are read from, and for a layout that there is not."""
    check_tensors(where, x=x, w2=w2)
    if x.dim() < 1 or w2.dim() != 3:
        raise ValueError(f"{where}: x is {tuple(x.shape)} and w2 is {tuple(w2.shape)}, want (..., D) and (L, D, H)")
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: layout={layout!r}, want one of {', '.join(LAYOUTS)}")


def _repeated(ordered: Tensor) -> Tensor:
    """(T, C - 1) bool: which choice, in rising order, is an expert that the one before it is, too."""
    return (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)


def fit(ordered: Tensor, num_experts: int, alone: bool, twice: bool) -> Tensor:
    """() bool: choices (T, C), in rising order, are as `choices_of` wants them; for devices whose values nobody reads."""
    there = ((ordered >= -alone) & (ordered < num_experts)).all()
    return there if twice else there & ~_repeated(ordered).any()


def choices_of(where: str, tokens: Tensor, experts: Tensor, scores: Tensor, num_experts: int, alone: bool, twice: bool) -> Choices:
    """(..., C) each -> (T, C) in the experts' order. Raises ValueError for what is no choice of C of E experts for each token.

    On one rank alone, where every choice has a place of its own or none, -1 is no expert; and if `twice`, a token may name one twice.
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
    ordered, order = experts.reshape(T, C).sort(1)
    if values_checked(ordered) and ordered.numel():  # host sync: checking
        first, last, again = int(ordered.min()), int(ordered.max()), not twice and bool(_repeated(ordered).any())
        if first < -alone or last >= num_experts or again:
            got = f"experts from {first} to {last}{', one of them twice for a token' if again else ''}"
            want = f"{'experts' if twice else 'C different ones'} of 0 to {num_experts - 1}{', or -1 for none,' if alone else ''}"
            raise ValueError(f"{where}: {got}, want {want} for each token")
    return Choices(ordered, scores.reshape(T, C).float().gather(1, order))

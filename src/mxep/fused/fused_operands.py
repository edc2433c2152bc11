"""What the fused layer's autograd function works on: its weights, its choices, what it keeps for backward, and for which gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxep.fused.activation import Activation
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.grouped_mm.products import GemmOptions, is_transposed
from mxep.moe.config import MoEConfig
from mxep.mx.weight_cache import CachedWeight
from mxep.recipe import Recipe


class FusedWeights(NamedTuple):
    """What the layer multiplies by: this rank's L experts and the whole router.

    Attributes:
        router: (E, D), None where the choices are given.  w1: gate (L, H, D) with w3, gate and up joined (L, 2H, D), or (L, H, D) without
            a gate.  w2: (L, D, H).
        w3: up (L, H, D) or None.  b1, b2, b3: biases like w1's, w2's and w3's rows, each may be None.
    """

    router: Tensor | None
    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None

    def transposed(self, name: str) -> bool:
        """Whether a weight's gradient is stored as (L, K, N), as the weight is: `is_transposed`; halves that are apart never are."""
        weight = getattr(self, name)
        return is_transposed(weight) and (name == "w2" or self.w3 is None)


class How(NamedTuple):
    """Everything about one call that is no tensor."""

    router: MoEConfig
    recipe: Recipe
    runtime: RuntimeEPConfig
    gemm: GemmOptions | None  # None multiplies in high precision
    activation: Activation
    group_name: str
    kept: tuple[CachedWeight | None, CachedWeight | None]  # of the first and of the second product's weights
    saves: bool = True  # whether a backward can follow
    weight_dtype: torch.dtype | None = None  # to which the experts' weights are rounded wherever they are read, None: not at all

    def wgrad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which wgrad makes dW of weights of `dtype`."""
        return (self.weight_dtype or dtype) if self.gemm is None else self.gemm.wgrad_dtype(dtype)

    def on_wire(self, precision: str) -> str:
        """Scale rule of an exchange, "" where rows travel as they are."""
        return self.recipe.scaling_mode.value if precision == "mxfp8" else ""


def takes_of(group_name: str, runtime: RuntimeEPConfig) -> tuple[bool, bool]:
    """Of choices from outside: whether -1, no expert, is one, and whether a token may name an expert twice.

    On one rank alone a choice has a place of its own or none; but a pass of so many places has room for every token once for an expert.
    """
    return not group_name, not group_name and not isinstance(runtime.scratch_rows, int)


class Choices(NamedTuple):
    """Choices that somebody else's router has made.

    Attributes:
        experts: (T, C) int64, in rising order; `takes_of` says what each row may hold.  scores: (T, C) float32.
    """

    experts: Tensor
    scores: Tensor


class Needs(NamedTuple):
    """Which inputs want a gradient; `scores`, whether that of the choices' scores is asked for, by a router here or from outside."""

    x: bool
    router: bool
    w1: bool
    w2: bool
    w3: bool
    b1: bool
    b2: bool
    b3: bool
    scores: bool

    @property
    def first(self) -> bool:
        """Whether the gradient of the first product is wanted."""
        return self.x or self.w1 or self.w3 or self.b1 or self.b3

    def number(self, redispatches: bool) -> int:
        """What backward's exchanges hang on, as `DispatchSpec.gradients` has it."""
        read = (self.w1 or self.w3, self.first or self.w2 or self.scores) if redispatches else ()
        return 1 + sum(bit << place for place, bit in enumerate((self.x, self.scores, *read)))


class Kept(NamedTuple):
    """What forward saves beside weights and maps, None for what nothing will read."""

    x: Tensor | None  # (T, D), the input itself
    logits: Tensor | None  # (T, E); made again where x is kept
    rows: Tensor | None  # (R, D), qdata or plain
    scale: Tensor | None  # (R, D/32)
    first: Tensor | None  # (P, 2H) or (P, H), qdata or plain
    first_scale: Tensor | None  # (P, 2H/32) or (P, H/32)

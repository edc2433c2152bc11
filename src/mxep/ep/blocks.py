"""The stages of a layer: an `ExchangePlan` has the destinations of the rows, a recipe the precisions.

Each function takes the MX or the plain form of its block by the recipe; both are differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxep.checks import check_rows
from mxep.ep.dispatch import AllToAll
from mxep.ep.exchange_plan import ExchangePlan
from mxep.ep.permute import permute_rows
from mxep.ep.unpermute import unpermute_rows
from mxep.recipe import Recipe


class Permuted(NamedTuple):
    """Rows in expert-major order, and what `unpermute` needs."""

    rows: torch.Tensor  # (P, D), MX or plain
    row_map: torch.Tensor  # (P,) int32, -1 = padding
    padded_counts: torch.Tensor  # (L,) int32
    offsets: torch.Tensor  # (L,) int32, END offsets
    padded_shape: torch.Size  # (R+1, D)
    backward_mode: str  # scaling mode by which unpermute's backward quantises plain gradients; "" = not at all


def dispatch(rows: torch.Tensor, plan: ExchangePlan, recipe: Recipe) -> torch.Tensor:
    """(T', D) sorted by expert -> (R, D) from all ranks, MX when the recipe dispatches in MXFP8."""
    check_rows("dispatch", rows, quantised=recipe.dispatch == "mxfp8")
    mode = recipe.scaling_mode.value if recipe.dispatch == "mxfp8" else ""
    return AllToAll.apply(rows, plan.output_splits, plan.input_splits, plan.group_name, mode, "")


def permute(rows: torch.Tensor, plan: ExchangePlan, recipe: Recipe) -> Permuted:
    """(R, D) rank-major -> (P, D) expert-major and padded; MX stays MX, and plain rows become MX if the recipe's GEMMs need it."""
    mode = recipe.scaling_mode.value
    shape, permuted, row_map, padded_counts, offsets = permute_rows(
        "permute",
        rows,
        plan.num_tokens_per_expert_received,
        plan.ep_degree,
        plan.num_local_experts,
        recipe.group_size_multiple_of,
        mode if recipe.quantizes_in_permute else "",
    )
    return Permuted(permuted, row_map, padded_counts, offsets, shape, mode if recipe.quantizes_in_unpermute_backward else "")


def unpermute(rows: torch.Tensor, permuted: Permuted) -> torch.Tensor:
    """(P, N) expert-major -> (R, N) rank-major."""
    return unpermute_rows(rows, permuted.row_map, permuted.padded_shape, permuted.backward_mode)


def combine(rows: torch.Tensor, plan: ExchangePlan, recipe: Recipe) -> torch.Tensor:
    """(R, N) -> (T', N) on the ranks that sent them, in the order they were sent."""
    check_rows("combine", rows, quantised=recipe.combine_backward == "mxfp8")
    backward_mode = recipe.scaling_mode.value if recipe.combine_backward == "mxfp8" else ""
    return AllToAll.apply(rows, plan.input_splits, plan.output_splits, plan.group_name, "", backward_mode)

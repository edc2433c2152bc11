"""Shapes, bytes and FLOPs of one MoE layer, stop by stop, and what it and the layer around it keep for backward: arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxep.models.presets import ModelConfig
from mxep.moe.ffn import runs_fused
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK, record_bytes, round_up

_BF16 = 2


@dataclass(frozen=True)
class Stop:
    """One stop of the layer on one rank: shape that leaves it, precision, bytes sent and FLOPs, each forward and backward."""

    name: str
    out: tuple[int, int]
    forward: str
    backward: str
    wire_bytes: tuple[int, int]
    flops: tuple[int, int]


def row_bytes(width: int, precision: str) -> int:
    return record_bytes(width) if precision == "mxfp8" else width * _BF16


def layer_stops(T: int, D: int, H: int, E: int, C: int, W: int, recipe: Recipe) -> list[Stop]:
    """The stops of one MoE layer with balanced routing.

    Args:
        T, D, H, E, C, W: see `mxep.shapes.LEGEND`.  recipe: precision of each wire and GEMM.

    Returns:
        stops in the order of forward; wire bytes are those that leave this rank for other ranks.

    Raises:
        ValueError: E is not a multiple of W.
    """
    if E % W:
        raise ValueError(f"explain: {E} experts on {W} ranks, want a multiple; change --ep")
    L, rows = E // W, T * C
    P = round_up(rows + L * recipe.group_size_multiple_of, recipe.group_size_multiple_of)
    away = rows * (W - 1) // W  # rows whose expert lives elsewhere
    wire = {"mxfp8": "mxfp8", "mx": "mxfp8", "hp": "bf16"}
    gemm = 2 * rows * D * H
    experts = (wire[recipe.gemm], f"{wire[recipe.gemm]}, {wire[recipe.wgrad]}")  # dgrad, wgrad
    given_back = "mxfp8" if recipe.quantizes_in_unpermute_backward else wire[recipe.combine_backward]
    nothing = (0, 0)

    def sent(forward: str, backward: str) -> tuple[int, int]:
        return away * row_bytes(D, forward), away * row_bytes(D, backward)

    return [
        Stop("router", (T, C), "float32", "float32", nothing, (2 * T * D * E, 4 * T * D * E)),
        Stop("dispatch", (rows, D), wire[recipe.dispatch], "bf16", sent(recipe.dispatch, "hp"), nothing),
        Stop("permute", (P, D), "mxfp8" if recipe.quantizes_in_permute else wire[recipe.dispatch], "bf16", nothing, nothing),
        Stop("w1 and w3", (P, H), *experts, nothing, (2 * gemm, 4 * gemm)),
        Stop("w2", (P, D), *experts, nothing, (gemm, 2 * gemm)),
        Stop("unpermute", (rows, D), "bf16", given_back, nothing, nothing),
        Stop("combine", (rows, D), "bf16", wire[recipe.combine_backward], sent("hp", recipe.combine_backward), nothing),
    ]


def fused_rows(T: int, E: int, C: int, W: int) -> dict[str, int]:
    """Rows that leave a rank for others in one direction of the fused layer, by the mode of the wire, expected of random routing."""
    L = E // W
    reached = 1 - math.comb(E - L, C) / math.comb(E, C)  # the chance that one of a token's choices lies on a given rank
    return {
        "rank_dedup": round(T * (W - 1) * reached),
        "all_to_all": T * C * (W - 1) // W,
        "all_gather / reduce_scatter": T * (W - 1),
    }


def kept_bytes(T: int, D: int, H: int, E: int, C: int, W: int, shared: int, recipe: Recipe) -> int:
    """Bytes that one MoE layer keeps for backward on one rank, with balanced routing; the layer's input, and indices of rows left out.

    Args:
        T, D, H, E, C, W: see `mxep.shapes.LEGEND`.  shared: shared experts of hidden width H.  recipe: decides what is in MX.
    """
    L, rows = E // W, T * C
    P = round_up(rows + L * recipe.group_size_multiple_of, recipe.group_size_multiple_of)
    mx_row, row = D + D // MX_BLOCK, D * _BF16
    if runs_fused(recipe):  # rows as the GEMM took them, and both of its products
        arrives_in_mx = recipe.dispatch == "mxfp8" or recipe.quantizes_in_permute
        experts = P * ((mx_row if arrives_in_mx else row) + 2 * H * _BF16)
    elif recipe.wgrad == "mxfp8":  # both GEMMs quantise their rows along the tokens, and so does the third
        experts = P * (2 * mx_row + 3 * H * _BF16 + H + H // MX_BLOCK)
    else:
        experts = P * (row + 4 * H * _BF16)
    weighted_sum = rows * D * _BF16  # the experts' results
    return experts + weighted_sum + T * shared * H * 4 * _BF16 + T * E * 4


def block_kept_bytes(T: int, model: ModelConfig, W: int, recipe: Recipe, dense: bool) -> int:
    """Bytes that one whole layer of a model keeps for backward on one rank, what enters it included: norms, attention, FFN or MoE.

    Args:
        T, W: see `mxep.shapes.LEGEND`.  dense: a layer with a dense FFN.
    """
    entering = 4 * model.dim  # the layer, its two norms' results, and what stands between attention and FFN
    around = T * (entering + model.attention_kept) * _BF16
    if dense:
        return around + T * 4 * model.dense_hidden * _BF16
    letters = (T, model.dim, model.expert_hidden, model.num_experts, model.top_k, W)
    return around + kept_bytes(*letters, model.num_shared_experts, recipe)

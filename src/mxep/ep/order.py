"""Token order and back: every token once per chosen expert, sorted by expert, and the way home.

Both directions sum in float32 in a fixed order, so results do not depend on timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mxep.ep.checks import values_checked
from mxep.mx.in_graph import in_graph


class SortedRows(NamedTuple):
    """Rows sorted by expert and the order that was used."""

    rows: torch.Tensor  # (T*C, D)
    order: torch.Tensor  # (T*C,) int32: slot t*C + c of each sorted row
    counts: torch.Tensor  # (E,) int64: rows per expert


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order.long()] = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    return inverse


def _by_token(rows: torch.Tensor, choices: int) -> torch.Tensor:
    return rows.view(rows.shape[0] // choices, choices, rows.shape[1])  # (T, C, D), also for T = 0


@in_graph
class _SortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return torch.ops.mxep.gather_rows(tokens, order // choices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (order,) = ctx.saved_tensors
        return torch.ops.mxep.sum_rows(grads[0], _inverse(order).view(-1, ctx.choices)), None, None


@in_graph
class _UnsortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return torch.ops.mxep.gather_rows(rows, _inverse(order))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (order,) = ctx.saved_tensors
        return torch.ops.mxep.gather_rows(grads[0].contiguous(), order), None


@in_graph
class _WeightedSum(torch.autograd.Function):
    """Keeps the rows as they came, not in float32."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out, weights)
        return torch.ops.mxep.weigh(out, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.mxep.weigh_backward(grads[0], *ctx.saved_tensors)


def sort_rows(tokens: torch.Tensor, experts: torch.Tensor, num_experts: int) -> SortedRows:
    """Copy every token once per chosen expert, sorted by expert (stable: by token inside an expert).

    Args:
        tokens: (T, D).  experts: (T, C) int64, the chosen experts of each token.  num_experts: E.

    Returns:
        rows (T*C, D), order (T*C,) int32, counts (E,) int64.  The gradient of a token is the float32 sum over its choices.

    Raises:
        ValueError: `experts` is not (T, C) int64; in checking mode also an expert outside of 0..E-1.
    """
    if experts.dim() != 2 or experts.shape[0] != tokens.shape[0] or experts.dtype != torch.int64:
        raise ValueError(
            f"sort_rows: experts is {tuple(experts.shape)} {experts.dtype}, want ({tokens.shape[0]}, C) int64, the choices of each token"
        )
    if (
        values_checked(experts) and experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < num_experts
    ):  # host sync: checking
        raise ValueError(f"sort_rows: experts from {int(experts.min())} to {int(experts.max())}, want 0 to {num_experts - 1}")
    flat = experts.flatten()
    order = flat.argsort(stable=True).int()
    # not torch.bincount, which syncs the host on a GPU: where each expert's run ends in the sorted order
    ends = torch.searchsorted(flat[order], torch.arange(num_experts, device=flat.device), right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return SortedRows(_SortRows.apply(tokens, order, experts.shape[1]), order, counts)


def unsort_rows(rows: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
    """Undo the order of `sort_rows`: (T*C, D) -> (T, C, D), not summed."""
    return _by_token(_UnsortRows.apply(rows, order), choices)


def sum_choices(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(T, C, D) times weights (T, C) float32 -> (T, D), the sum over a token's choices; computed in float32, rounded once."""
    return _WeightedSum.apply(out, weights)

"""Sorts tokens by expert, one row for each of a token's top-k experts, and combines the experts' rows per token.

Forward and backward sum in float32 in a fixed order, so results do not depend on timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mxep.checks import HIGH_PRECISION, values_checked
from mxep.mx.compile import in_graph
from mxep.operators import direct


class SortedRows(NamedTuple):
    """Rows sorted by expert and the order that was used."""

    rows: torch.Tensor  # (T*C, D)
    order: torch.Tensor  # (T*C,) int32: of each sorted row, token * C + column
    counts: torch.Tensor  # (E,) int64: rows per expert


def _slots(order: torch.Tensor, top_k: int) -> torch.Tensor:
    """(T, C) int32: the sorted row of each of a token's experts."""
    slots = torch.empty_like(order)
    slots[order.long()] = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    return slots.view(-1, top_k)


def _sort_or_sum(values: torch.Tensor, order: torch.Tensor, top_k: int, sums: bool) -> torch.Tensor:
    """Tokens (T, D) -> their rows (T*C, D), sorted; with `sums` rows (T*C, D) -> tokens (T, D)."""
    if sums:
        return direct.reduce_rows(values, _slots(order, top_k))
    return direct.gather_rows(values, order // top_k)


@in_graph
class _SortRows(torch.autograd.Function):
    """`_sort_or_sum`, whose two directions are each other's gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, order: torch.Tensor, top_k: int, sums: bool) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.top_k, ctx.sums = top_k, sums
        return _sort_or_sum(values, order, top_k, sums)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (order,) = ctx.saved_tensors
        return _sort_or_sum(grads[0], order, ctx.top_k, not ctx.sums), None, None, None


@in_graph
class _WeightedSum(torch.autograd.Function):
    """Saves the rows in their dtype and order, neither in float32 nor by token."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = _slots(order, weights.shape[1])
        ctx.save_for_backward(rows, slots, weights)
        return direct.reduce_rows(rows, slots, None, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        d_rows, d_weights = direct.reduce_rows_backward(grads[0], *ctx.saved_tensors)
        return d_rows, None, d_weights


def sort_tokens_by_expert(tokens: torch.Tensor, experts: torch.Tensor, num_experts: int) -> SortedRows:
    """Copy every token once for each of its top-k experts, sorted by expert (stable: by token inside an expert).

    Args:
        tokens: (T, D).  experts: (T, C) int64, the top-k experts of each token.  num_experts: E.

    Returns:
        rows (T*C, D), order (T*C,) int32, counts (E,) int64.  The gradient of a token is the float32 sum over its rows.

    Raises:
        ValueError: `experts` is not (T, C) int64; in checking mode also an expert outside of 0..E-1.
    """
    if experts.dim() != 2 or experts.shape[0] != tokens.shape[0] or experts.dtype != torch.int64:
        got = f"experts is {tuple(experts.shape)} {experts.dtype}"
        raise ValueError(f"sort_tokens_by_expert: {got}, want ({tokens.shape[0]}, C) int64, the top-k experts of each token")
    if (
        values_checked(experts) and experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < num_experts
    ):  # host sync: checking
        raise ValueError(f"sort_tokens_by_expert: experts from {int(experts.min())} to {int(experts.max())}, want 0 to {num_experts - 1}")
    flat = experts.flatten()
    order = flat.argsort(stable=True).int()
    # not torch.bincount, which syncs the host on a GPU: the end of each expert's rows in the sorted order
    ends = torch.searchsorted(flat[order], torch.arange(num_experts, device=flat.device), right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return SortedRows(_SortRows.apply(tokens, order, experts.shape[1], False), order, counts)


def combine_topk(rows: torch.Tensor, order: torch.Tensor, top_k: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over each token's top-k rows in the order of `sort_tokens_by_expert`: in float32, c from left to right, rounded once.

    Args:
        rows: (T*C, D) bf16 or float32, sorted by expert.  order: (T*C,) int32, that of `sort_tokens_by_expert`.  top_k: C.
        weights: (T, C) float32, factors of the rows; None sums the rows as they are.

    Returns:
        (T, D) in rows' dtype.  Saves the rows for backward, without weights nothing but the order.

    Raises:
        ValueError: rows, order or weights of other shapes or dtypes; in checking mode also an order that is not a permutation.
    """
    fits = rows.dim() == 2 and rows.dtype in HIGH_PRECISION and top_k > 0 and rows.shape[0] % top_k == 0
    if not fits or order.shape != rows.shape[:1] or order.dtype != torch.int32:
        raise ValueError(
            f"combine_topk: rows {tuple(rows.shape)} {rows.dtype} with order {tuple(order.shape)} {order.dtype}, want (T*C, D) bfloat16 or "
            f"float32 with (T*C,) int32 of sort_tokens_by_expert, C = {top_k}"
        )
    if values_checked(order) and not torch.equal(order.sort().values, torch.arange(len(order), dtype=order.dtype, device=order.device)):
        raise ValueError(
            f"combine_topk: order has not each of 0 to {len(order) - 1} once, want that of sort_tokens_by_expert"
        )  # host sync: checking
    if weights is None:
        return _SortRows.apply(rows, order, top_k, True)
    tokens = rows.shape[0] // top_k
    if weights.shape != (tokens, top_k) or weights.dtype != torch.float32:
        raise ValueError(f"combine_topk: weights are {tuple(weights.shape)} {weights.dtype}, want ({tokens}, {top_k}) float32")
    return _WeightedSum.apply(rows, order, weights)

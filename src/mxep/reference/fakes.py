"""Fake (shape-only) forms of `torch.ops.mxep.*`, one function per operator, for torch.compile and meta tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.reference.activation_functions import is_gated
from mxep.shapes import MX_BLOCK, record_bytes


def _mx_like(x: Tensor, shape: tuple) -> tuple[Tensor, Tensor]:
    *lead, width = shape
    return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty((*lead, width // MX_BLOCK), dtype=torch.float8_e8m0fnu)


def quantize(x: Tensor, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return _mx_like(x, tuple(x.shape))


def quantize_transposed(x: Tensor, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return _mx_like(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


def quantize_both(x: Tensor, scaling_mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*quantize(x, scaling_mode), *quantize_transposed(x, scaling_mode))


def quantize_packed(x: Tensor, scaling_mode: str) -> Tensor:
    return x.new_empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8)


def quantize_packed_into(x: Tensor, records: Tensor, scaling_mode: str) -> None:
    return None


def dequantize(qdata: Tensor, scale: Tensor, dtype: torch.dtype, live: Tensor | None = None) -> Tensor:
    return qdata.new_empty(qdata.shape, dtype=dtype)


def dequantize_packed_into(records: Tensor, values: Tensor) -> None:
    return None


def quantize_joined(a: Tensor, b: Tensor, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return _mx_like(a, (a.shape[0], a.shape[1] + b.shape[1], a.shape[2]))


def quantize_joined_transposed(a: Tensor, b: Tensor, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return _mx_like(a, (a.shape[0], a.shape[2], a.shape[1] + b.shape[1]))


def activate(
    x: Tensor,
    layout: str,
    exact: bool = False,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    scores: Tensor | None = None,
    live: Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // (1 + is_gated(activation))))


def activate_quantize(
    x: Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    scores: Tensor | None = None,
    live: Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> tuple[Tensor, Tensor]:
    return _mx_like(x, (x.shape[0], x.shape[1] // (1 + is_gated(activation))))


def activate_quantize_both(
    x: Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    scores: Tensor | None = None,
    live: Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*activate_quantize(x, layout, scaling_mode, activation=activation), *_mx_like(x, tuple(x.shape)))


def activate_backward(
    dh: Tensor,
    x: Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    dx: str = "mx",
    h: str = "mx",
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    scores: Tensor | None = None,
    x_scale: Tensor | None = None,
    live: Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> list[Tensor]:
    out: list[Tensor] = []
    x = x if x_scale is None else dh.new_empty(x.shape)
    for forms, shape in ((dx, tuple(x.shape)), (h, tuple(dh.shape))):
        out += _mx_like(x, shape) if "mx" in forms else ()
        out += (x.new_empty(shape),) if "hp" in forms else ()
    return out if scores is None else [*out, scores.new_empty(scores.shape)]


def add_group_bias(rows: Tensor, bias: Tensor, offs: Tensor, scores: Tensor | None = None) -> Tensor:
    return rows.new_empty(tuple(rows.shape))


def dot_group_bias(rows: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float32)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.new_empty(labels.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


def cross_entropy_to_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


def gather_rows(rows: Tensor, row_map: Tensor, live: Tensor | None = None) -> Tensor:
    return rows.new_empty((row_map.shape[0], *rows.shape[1:]))


def gather_mx_rows(qdata: Tensor, scale: Tensor, row_map: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return gather_rows(qdata, row_map), gather_rows(scale, row_map)


def gather_quantize(rows: Tensor, row_map: Tensor, scaling_mode: str) -> tuple[Tensor, Tensor]:
    return _mx_like(rows, (row_map.shape[0], rows.shape[1]))


def scatter_rows(rows: Tensor, row_map: Tensor, num_rows: int) -> Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


def scatter_mx_rows(qdata: Tensor, scale: Tensor, row_map: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return scatter_rows(qdata, row_map, num_rows), scatter_rows(scale, row_map, num_rows)


def sum_rows(rows: Tensor, slots: Tensor, added: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    return rows.new_empty((slots.shape[0], rows.shape[1]))


def sum_rows_backward(grad: Tensor, rows: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def push_rows(rows: Tensor, slots: Tensor, ranks: Tensor | None, addresses: Sequence[int], pitch: int, mode: str) -> None:
    return None


def push_sums(
    placed: Tensor,
    slots: Tensor,
    region: int,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    window: Tensor | None = None,
    begun: Tensor | None = None,
    carry: Tensor | None = None,
) -> None:
    return None


def group_index(
    counts: Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(counts.new_empty((n,), dtype=torch.int32) for n in (num_padded_rows, num_local_experts, num_local_experts))  # type: ignore[return-value]


def sum_rows_within(
    rows: Tensor,
    slots: Tensor,
    row_map: Tensor,
    window: Tensor,
    out: Tensor,
    carry: Tensor | None = None,
) -> None:
    return None


def grouped_mm_hp(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype, tail: str = "zero") -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def rebase_weight(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qdata, memory_format=torch.contiguous_format), scale.new_empty(qdata.shape[:2], dtype=torch.float32)


def grouped_mm_mx(
    qa: Tensor,
    sa: Tensor,
    qb: Tensor,
    sb: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    path: str,
    row_map: Tensor | None = None,
    tail: str = "zero",
) -> Tensor:
    return qa.new_empty(((qa if row_map is None else row_map).shape[0], qb.shape[1]), dtype=out_dtype)


def grouped_wgrad_hp(grad: Tensor, a: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((offs.shape[0], grad.shape[1], a.shape[1]), dtype=out_dtype)


def grouped_wgrad_mx_rows(
    qg: Tensor,
    sg: Tensor,
    qa: Tensor,
    sa: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    path: str,
    g_map: Tensor | None = None,
    a_map: Tensor | None = None,
) -> Tensor:
    return grouped_wgrad_hp(qg, qa, offs, out_dtype)


def grouped_wgrad_hp_add(into: Tensor, grad: Tensor, a: Tensor, offs: Tensor) -> None:
    return None


def grouped_wgrad_mx_rows_add(into: Tensor, qg: Tensor, sg: Tensor, qa: Tensor, sa: Tensor, offs: Tensor, path: str) -> None:
    return None


def copy_groups(into: Tensor, made: Tensor, offs: Tensor, empty: bool = False) -> None:
    return None


def grouped_wgrad_hp_into(into: Tensor, grad: Tensor, a: Tensor, offs: Tensor) -> None:
    return None


def grouped_wgrad_mx_rows_into(
    into: Tensor,
    qg: Tensor,
    sg: Tensor,
    qa: Tensor,
    sa: Tensor,
    offs: Tensor,
    path: str,
    g_map: Tensor | None = None,
    a_map: Tensor | None = None,
    few: bool = True,
) -> None:
    return None


def grouped_wgrad_mx_halves_into(
    left: Tensor,
    right: Tensor,
    qg: Tensor,
    sg: Tensor,
    qa: Tensor,
    sa: Tensor,
    offs: Tensor,
    path: str,
    a_map: Tensor | None = None,
    few: bool = True,
) -> None:
    return None


def grouped_wgrad_mx_halves(
    qg: Tensor,
    sg: Tensor,
    qa: Tensor,
    sa: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    path: str,
    a_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (offs.shape[0], qg.shape[1] // 2, qa.shape[1])
    return qa.new_empty(shape, dtype=out_dtype), qa.new_empty(shape, dtype=out_dtype)


def grouped_wgrad_mx(qg: Tensor, sg: Tensor, qa: Tensor, sa: Tensor, offs: Tensor, out_dtype: torch.dtype, path: str) -> Tensor:
    return qa.new_empty((offs.shape[0], qg.shape[0], qa.shape[0]), dtype=out_dtype)


def place_choices(experts: Tensor, num_local_experts: int, alignment: int, num_places: int) -> tuple[Tensor, Tensor, Tensor]:
    ints = torch.int32
    return (
        experts.new_empty(experts.shape, dtype=ints),
        experts.new_empty(num_local_experts, dtype=ints),
        experts.new_empty(num_places, dtype=ints),
    )


def route_tokens(
    logits: Tensor,
    expert_bias: Tensor | None,
    top_k: int,
    score_function: str,
    num_groups: int,
    top_groups: int,
    forced: bool,
    renormalize: bool,
    route_scale: float,
    with_shares: bool,
    with_z: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (T, E), values, numbers = logits.shape, torch.float32, torch.int64
    return (
        logits.new_empty((T, top_k), dtype=values),
        logits.new_empty((T, top_k), dtype=numbers),
        logits.new_empty(E, dtype=numbers),
        logits.new_empty(E, dtype=values),
        logits.new_empty((), dtype=values),
    )


def router_backward(
    logits: Tensor,
    experts: Tensor,
    d_weights: Tensor,
    d_shares: Tensor | None,
    d_z: Tensor | None,
    score_function: str,
    renormalize: bool,
    route_scale: float,
    dtype: torch.dtype,
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=dtype)


def place_table(
    table: Tensor, rank: int, num_local_experts: int, alignment: int, num_places: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    places, ends, choices = place_choices(table[:, : table.shape[1] // 2], num_local_experts, alignment, num_places)
    places = table.new_empty((table.shape[0], table.shape[1] // 2))
    return places, ends, choices, torch.empty_like(choices), torch.empty_like(choices, dtype=torch.float32)


def pack_choices(experts: Tensor, scores: Tensor, most: int) -> Tensor:
    return experts.new_empty((most, 2 * experts.shape[1]), dtype=torch.int32)


def sent_regions(experts: Tensor, mode: str, num_local_experts: int, world: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    (T, C), every = experts.shape, mode == "all_to_all"
    slots = experts.new_empty((T, C if every else world), dtype=torch.int32)
    return slots, torch.empty_like(slots), experts.new_empty((T if every else 0, C), dtype=torch.int32)


def cut_windows(ends: Tensor, capacity: int, count: int) -> Tensor:
    return ends.new_empty(count + 1)


def window_places(
    offs: Tensor, scores: Tensor, token_map: Tensor, grad_map: Tensor | None, window: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = [token_map.new_empty(0 if row_map is None else capacity) for row_map in (token_map, grad_map)]
    return offs.new_empty(offs.shape), scores.new_empty(capacity), own[0], own[1]


def pick_values(index: Tensor, values: Tensor) -> Tensor:
    return values.new_empty(index.shape)


def exchange_rows(rows: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str) -> Tensor:
    return rows.new_empty((sum(output_splits), rows.shape[1]))


def exchange_quantized(
    rows: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> Tensor:
    return rows.new_empty((sum(output_splits), record_bytes(rows.shape[1])), dtype=torch.uint8)


def exchange_dequantized(
    rows: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> Tensor:
    return rows.new_empty((sum(output_splits), rows.shape[1]))

"""Fake (shape-only) forms of `torch.ops.mxep.*`, one function per operator, for torch.compile and meta tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxep.shapes import MX_BLOCK, record_bytes


def _mx_like(x: torch.Tensor, shape: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, width = shape
    return x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty((*lead, width // MX_BLOCK), dtype=torch.float8_e8m0fnu)


def quantize(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(x, tuple(x.shape))


def quantize_transposed(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


def quantize_both(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (*quantize(x, scaling_mode), *quantize_transposed(x, scaling_mode))


def quantize_packed(x: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8)


def quantize_packed_into(x: torch.Tensor, records: torch.Tensor, scaling_mode: str) -> None:
    return None


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, live: torch.Tensor | None = None) -> torch.Tensor:
    return qdata.new_empty(qdata.shape, dtype=dtype)


def dequantize_packed_into(records: torch.Tensor, values: torch.Tensor) -> None:
    return None


def quantize_joined(a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(a, (a.shape[0], a.shape[1] + b.shape[1], a.shape[2]))


def quantize_joined_transposed(a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(a, (a.shape[0], a.shape[2], a.shape[1] + b.shape[1]))


def swiglu(
    x: torch.Tensor,
    layout: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def swiglu_quantize(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(x, (x.shape[0], x.shape[1] // 2))


def swiglu_quantize_both(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (*swiglu_quantize(x, layout, scaling_mode), *_mx_like(x, tuple(x.shape)))


def swiglu_backward_quantize(
    dh: torch.Tensor,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    dx: str = "mx",
    h: str = "mx",
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    x = x if x_scale is None else dh.new_empty(x.shape)
    for forms, shape in ((dx, tuple(x.shape)), (h, tuple(dh.shape))):
        out += _mx_like(x, shape) if "mx" in forms else ()
        out += (x.new_empty(shape),) if "hp" in forms else ()
    return out if scores is None else [*out, scores.new_empty(scores.shape)]


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(tuple(rows.shape))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(labels.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


def cross_entropy_to_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels)


def gather_rows(rows: torch.Tensor, row_map: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    return rows.new_empty((row_map.shape[0], *rows.shape[1:]))


def gather_mx_rows(
    qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return gather_rows(qdata, row_map), gather_rows(scale, row_map)


def gather_quantize(rows: torch.Tensor, row_map: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _mx_like(rows, (row_map.shape[0], rows.shape[1]))


def scatter_rows(rows: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


def scatter_mx_rows(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return scatter_rows(qdata, row_map, num_rows), scatter_rows(scale, row_map, num_rows)


def sum_rows(
    rows: torch.Tensor, slots: torch.Tensor, added: torch.Tensor | None = None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    return rows.new_empty((slots.shape[0], rows.shape[1]))


def sum_rows_backward(
    grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def push_rows(rows: torch.Tensor, slots: torch.Tensor, ranks: torch.Tensor | None, addresses: Sequence[int], pitch: int, mode: str) -> None:
    return None


def push_sums(
    placed: torch.Tensor,
    slots: torch.Tensor,
    region: int,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    window: torch.Tensor | None = None,
    begun: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
) -> None:
    return None


def group_index(
    counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(counts.new_empty((n,), dtype=torch.int32) for n in (num_padded_rows, num_local_experts, num_local_experts))  # type: ignore[return-value]


def sum_rows_within(
    rows: torch.Tensor,
    slots: torch.Tensor,
    row_map: torch.Tensor,
    window: torch.Tensor,
    out: torch.Tensor,
    carry: torch.Tensor | None = None,
) -> None:
    return None


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, tail: str = "zero") -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def rebase_weight(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(qdata, memory_format=torch.contiguous_format), scale.new_empty(qdata.shape[:2], dtype=torch.float32)


def grouped_mm_mx(
    qa: torch.Tensor,
    sa: torch.Tensor,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    row_map: torch.Tensor | None = None,
    tail: str = "zero",
) -> torch.Tensor:
    return qa.new_empty(((qa if row_map is None else row_map).shape[0], qb.shape[1]), dtype=out_dtype)


def grouped_wgrad_hp(grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((offs.shape[0], grad.shape[1], a.shape[1]), dtype=out_dtype)


def grouped_wgrad_mx_rows(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    g_map: torch.Tensor | None = None,
    a_map: torch.Tensor | None = None,
) -> torch.Tensor:
    return grouped_wgrad_hp(qg, qa, offs, out_dtype)


def grouped_wgrad_hp_add(into: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor) -> None:
    return None


def grouped_wgrad_mx_rows_add(
    into: torch.Tensor, qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, path: str
) -> None:
    return None


def copy_groups(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor, empty: bool = False) -> None:
    return None


def grouped_wgrad_hp_into(into: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor) -> None:
    return None


def grouped_wgrad_mx_rows_into(
    into: torch.Tensor,
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    path: str,
    g_map: torch.Tensor | None = None,
    a_map: torch.Tensor | None = None,
    few: bool = True,
) -> None:
    return None


def grouped_wgrad_mx_halves_into(
    left: torch.Tensor,
    right: torch.Tensor,
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    path: str,
    a_map: torch.Tensor | None = None,
    few: bool = True,
) -> None:
    return None


def grouped_wgrad_mx_halves(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    a_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (offs.shape[0], qg.shape[1] // 2, qa.shape[1])
    return qa.new_empty(shape, dtype=out_dtype), qa.new_empty(shape, dtype=out_dtype)


def grouped_wgrad_mx(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    return qa.new_empty((offs.shape[0], qg.shape[0], qa.shape[0]), dtype=out_dtype)


def place_choices(
    experts: torch.Tensor, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ints = torch.int32
    return (
        experts.new_empty(experts.shape, dtype=ints),
        experts.new_empty(num_local_experts, dtype=ints),
        experts.new_empty(num_places, dtype=ints),
    )


def route_tokens(
    logits: torch.Tensor,
    expert_bias: torch.Tensor | None,
    top_k: int,
    score_function: str,
    num_groups: int,
    top_groups: int,
    forced: bool,
    renormalize: bool,
    route_scale: float,
    balance: float,
    z: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (T, E), values, numbers = logits.shape, torch.float32, torch.int64
    return (
        logits.new_empty((T, top_k), dtype=values),
        logits.new_empty((T, top_k), dtype=numbers),
        logits.new_empty(E, dtype=numbers),
        logits.new_empty((), dtype=values),
    )


def router_backward(
    logits: torch.Tensor,
    experts: torch.Tensor,
    counts: torch.Tensor,
    d_weights: torch.Tensor,
    d_loss: torch.Tensor,
    score_function: str,
    renormalize: bool,
    route_scale: float,
    balance: float,
    z: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=dtype)


def place_table(
    table: torch.Tensor, rank: int, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    places, ends, choices = place_choices(table[:, : table.shape[1] // 2], num_local_experts, alignment, num_places)
    places = table.new_empty((table.shape[0], table.shape[1] // 2))
    return places, ends, choices, torch.empty_like(choices), torch.empty_like(choices, dtype=torch.float32)


def pack_choices(experts: torch.Tensor, scores: torch.Tensor, most: int) -> torch.Tensor:
    return experts.new_empty((most, 2 * experts.shape[1]), dtype=torch.int32)


def sent_regions(
    experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (T, C), every = experts.shape, mode == "all_to_all"
    slots = experts.new_empty((T, C if every else world), dtype=torch.int32)
    return slots, torch.empty_like(slots), experts.new_empty((T if every else 0, C), dtype=torch.int32)


def cut_windows(ends: torch.Tensor, capacity: int, count: int) -> torch.Tensor:
    return ends.new_empty(count + 1)


def window_places(
    offs: torch.Tensor, scores: torch.Tensor, token_map: torch.Tensor, grad_map: torch.Tensor | None, window: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own = [token_map.new_empty(0 if row_map is None else capacity) for row_map in (token_map, grad_map)]
    return offs.new_empty(offs.shape), scores.new_empty(capacity), own[0], own[1]


def pick_values(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(index.shape)


def exchange_rows(rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str) -> torch.Tensor:
    return rows.new_empty((sum(output_splits), rows.shape[1]))


def exchange_quantized(
    rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> torch.Tensor:
    return rows.new_empty((sum(output_splits), record_bytes(rows.shape[1])), dtype=torch.uint8)


def exchange_dequantized(
    rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> torch.Tensor:
    return rows.new_empty((sum(output_splits), rows.shape[1]))

"""What the fused layer works out of its choices and places, a launch each: between exchanges the host has no time for dozens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.reference.plan import MODES, check_pack_choices, check_sent_regions
from mxep.shapes import cdiv, next_power_of_2

_BEHIND = tl.constexpr(2**31 - 1)  # no place


@triton.jit(do_not_specialize=["T", "most"])
def _pack_choices_kernel(
    experts,  # (T, C) int64
    scores,  # (T, C) int32, the bits
    table,  # (S, 2C) int32
    T,
    C: tl.constexpr,
    most,  # S
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,  # C as a power of two
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    choice = tl.arange(0, CHOICES)[None, :]
    there = (token < T) & (choice < C)
    expert = tl.load(experts + token * C + choice, mask=there, other=-1)
    score = tl.load(scores + token * C + choice, mask=there, other=-1)
    line = table + token * (2 * C) + choice
    tl.store(line, expert.to(tl.int32), mask=(token < most) & (choice < C))
    tl.store(line + C, score, mask=(token < most) & (choice < C))


def pack_choices(experts: torch.Tensor, scores: torch.Tensor, most: int) -> torch.Tensor:
    """The table of a rank's choices. Twin: `reference.pack_choices`."""
    check_pack_choices(experts, scores, most)
    T, C = experts.shape
    table = torch.empty((most, 2 * C), dtype=torch.int32, device=experts.device)
    if table.numel():
        launch(
            _pack_choices_kernel,
            cdiv(most, tiles.PLAN_TOKENS),
            {
                "experts": experts.contiguous(),
                "scores": scores.contiguous().view(torch.int32),
                "table": table,
                "T": T,
                "C": C,
                "most": most,
                "TOKENS": tiles.PLAN_TOKENS,
                "CHOICES": next_power_of_2(C),
            },
            num_warps=tiles.PLAN_WARPS,
        )
    return table


@triton.jit(do_not_specialize=["T", "L", "W", "most", "kept"])
def _sent_regions_kernel(
    experts,  # (T, C) int64
    slots,  # (T, columns) int32
    home,  # (T, columns) int32
    ranks,  # (T, C) int32, or nothing
    T,
    C: tl.constexpr,
    L,
    W,
    most,  # S
    kept,  # K, choices of a token that one rank can hold
    EVERY: tl.constexpr,  # choice a row of its own
    ALL: tl.constexpr,  # ranks get every token
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the results, as a power of two
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)[None, :]
    row = token.to(tl.int64)
    if EVERY:
        there = (token < T)[:, None] & (column < C)
        rank = (tl.load(experts + row[:, None] * C + column, mask=there, other=0) // L).to(tl.int32)
        number = tl.zeros((TOKENS, COLUMNS), tl.int32)
        for choice in range(C):
            other = (tl.load(experts + row * C + choice, mask=token < T, other=0) // L).to(tl.int32)[:, None]
            number += ((other == rank) & (choice < column)).to(tl.int32)
        slot = token[:, None] * kept + number
        at = row[:, None] * C + column
        tl.store(slots + at, slot, mask=there)
        tl.store(ranks + at, rank, mask=there)
        tl.store(home + at, rank * (most * kept) + slot, mask=there)
    else:
        there = (token < T)[:, None] & (column < W)
        chosen = tl.zeros((TOKENS, COLUMNS), tl.int1)
        for choice in range(C):
            rank = (tl.load(experts + row * C + choice, mask=token < T, other=0) // L).to(tl.int32)
            chosen = chosen | (rank[:, None] == column)
        at = row[:, None] * W + column
        sent = chosen | (column >= 0) if ALL else chosen
        tl.store(slots + at, tl.where(sent, token[:, None], -1), mask=there)
        tl.store(home + at, tl.where(chosen, column * most + token[:, None], -1), mask=there)


def sent_regions(
    experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of a wire at home. Twin: `reference.sent_regions`."""
    check_sent_regions(experts, mode, num_local_experts, world, most)
    (T, C), every = experts.shape, mode == MODES[1]

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    columns = C if every else world
    slots, home, ranks = ints(T, columns), ints(T, columns), ints(T if every else 0, C)
    if slots.numel():
        launch(
            _sent_regions_kernel,
            cdiv(T, tiles.PLAN_TOKENS),
            {
                "experts": experts.contiguous(),
                "slots": slots,
                "home": home,
                "ranks": ranks,
                "T": T,
                "C": C,
                "L": num_local_experts,
                "W": world,
                "most": most,
                "kept": min(C, num_local_experts),
                "EVERY": every,
                "ALL": mode == MODES[2],
                "TOKENS": tiles.PLAN_TOKENS,
                "COLUMNS": next_power_of_2(columns),
            },
            num_warps=tiles.PLAN_WARPS,
        )
    return slots, home, ranks


@triton.jit(do_not_specialize=["L", "capacity", "count"])
def _cut_windows_kernel(
    ends,  # (L,) int32
    bounds,  # (count + 1,) int32
    L,
    capacity,
    count,
    EXPERTS: tl.constexpr,  # a power of two beyond L
):
    expert = tl.arange(0, EXPERTS)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert <= L), other=0)  # where each expert begins; behind the last one the end
    begin = tl.where(expert <= L, begin, _BEHIND)
    at = tl.max(tl.where(expert <= L, begin, 0), axis=0)
    tl.store(bounds + count, at)
    for window in range(count):
        first = tl.sum((begin < at - capacity).to(tl.int32), axis=0)  # the first expert of a window that ends here
        at = tl.sum(tl.where(expert == first, begin, 0), axis=0)
        tl.store(bounds + count - 1 - window, at)


def cut_windows(ends: torch.Tensor, capacity: int, count: int) -> torch.Tensor:
    """Where windows begin and end. Twin: `reference.cut_windows`."""
    bounds = torch.empty(count + 1, dtype=torch.int32, device=ends.device)
    launch(
        _cut_windows_kernel,
        1,
        {
            "ends": ends.contiguous(),
            "bounds": bounds,
            "L": ends.shape[0],
            "capacity": capacity,
            "count": count,
            "EXPERTS": next_power_of_2(ends.shape[0] + 1),
        },
        num_warps=4,
    )
    return bounds


@triton.jit(do_not_specialize=["L", "capacity"])
def _window_places_kernel(
    offs,  # (L,) int32
    scores,  # (P,) float32
    token_map,  # (P,) int32
    grad_map,  # (P,) int32
    window,  # (2,) int32
    own_offs,  # (L,) int32
    own_scores,  # (capacity,)
    own_token_map,  # (capacity,)
    own_grad_map,  # (capacity,), or nothing
    L,
    capacity,
    APART: tl.constexpr,  # two maps
    EXPERTS: tl.constexpr,  # L as a power of two
    PLACES: tl.constexpr,
):
    first, end = tl.load(window), tl.load(window + 1)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        own = tl.minimum(tl.load(offs + expert, mask=expert < L, other=0), end) - first
        tl.store(own_offs + expert, tl.maximum(own, 0), mask=expert < L)
    here = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    inside = here < tl.minimum(end - first, capacity)
    place = first.to(tl.int64) + here
    tl.store(own_scores + here, tl.load(scores + place, mask=inside, other=0.0), mask=here < capacity)
    tl.store(own_token_map + here, tl.load(token_map + place, mask=inside, other=-1), mask=here < capacity)
    if APART:
        tl.store(own_grad_map + here, tl.load(grad_map + place, mask=inside, other=-1), mask=here < capacity)


def window_places(
    offs: torch.Tensor, scores: torch.Tensor, token_map: torch.Tensor, grad_map: torch.Tensor | None, window: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places of one window, counted from its start. Twin: `reference.window_places`."""
    own_offs, own_scores = torch.empty_like(offs), scores.new_empty(capacity)
    own_token_map, own_grad_map = (token_map.new_empty(0 if row_map is None else capacity) for row_map in (token_map, grad_map))
    launch(
        _window_places_kernel,
        max(cdiv(capacity, tiles.PLAN_PLACES), 1),
        {
            "offs": offs.contiguous(),
            "scores": scores.contiguous(),
            "token_map": token_map.contiguous(),
            "grad_map": token_map if grad_map is None else grad_map.contiguous(),
            "window": window,
            "own_offs": own_offs,
            "own_scores": own_scores,
            "own_token_map": own_token_map,
            "own_grad_map": own_grad_map,
            "L": offs.shape[0],
            "capacity": capacity,
            "APART": grad_map is not None,
            "EXPERTS": next_power_of_2(offs.shape[0]),
            "PLACES": tiles.PLAN_PLACES,
        },
        num_warps=tiles.PLAN_WARPS,
    )
    return own_offs, own_scores, own_token_map, own_grad_map


@triton.jit(do_not_specialize=["size"])
def _pick_values_kernel(
    index,  # (size,) int32
    values,  # (N,)
    out,  # (size,)
    size,
    PLACES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    picked = tl.load(index + at, mask=at < size, other=-1)
    tl.store(out + at, tl.load(values + picked, mask=picked >= 0, other=0), mask=at < size)


def pick_values(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """values[index], 0 where index is -1. Twin: `reference.pick_values`."""
    out = torch.empty(index.shape, dtype=values.dtype, device=values.device)
    if size := out.numel():
        arguments = {"index": index.contiguous(), "values": values.contiguous(), "out": out, "size": size, "PLACES": tiles.PLAN_PLACES}
        launch(_pick_values_kernel, cdiv(size, tiles.PLAN_PLACES), arguments, num_warps=tiles.PLAN_WARPS)
    return out

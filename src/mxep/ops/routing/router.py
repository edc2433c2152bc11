"""The router in two launches, and the gradient of its logits in one, where torch's own operators take some thirty and forty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.routing.router_reference import FLOOR, FORCED_SEED, SCORE_FUNCTIONS, check_route_tokens, check_router_backward
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2


@triton.jit
def _scores_of(logit, expert, E: tl.constexpr, SOFTMAX: tl.constexpr):
    """Of logits (TOKENS, EXPERTS), columns from E on aside: scores, softmax, each row's maximum, and its sum of exponentials below that."""
    most = tl.max(tl.where(expert < E, logit, float("-inf")), axis=1)[:, None]
    power = tl.where(expert < E, tl.exp(logit - most), 0.0)
    whole = tl.sum(power, axis=1)[:, None]
    softmax = power / whole
    if SOFTMAX:
        score = softmax
    else:
        score = tl.where(expert < E, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    return score, softmax, most, whole


@triton.jit
def _first_best(ranking, free, number, COLUMNS: tl.constexpr):
    """Of each row the first column among the free ones that has their best value: (ROWS, 1), COLUMNS where none is free."""
    best = tl.max(tl.where(free, ranking, float("-inf")), axis=1)[:, None]
    return tl.min(tl.where(free & (ranking == best), number, COLUMNS), axis=1)[:, None]


@triton.jit
def _hash(number, SEED: tl.constexpr):
    """The hash by which `router_reference.shuffled_experts` orders experts."""
    hashed = (number + SEED).to(tl.uint32)
    hashed ^= hashed >> 16
    hashed *= 0x85EBCA6B
    hashed ^= hashed >> 13
    hashed *= 0xC2B2AE35
    return hashed ^ (hashed >> 16)


@triton.jit
def _in_best_groups(
    ranking,  # (TOKENS, EXPERTS) without NaN
    expert,  # (1, EXPERTS)
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NUMBERS: tl.constexpr,  # GROUPS as a power of two
):
    """Which experts are in their token's best groups, by the sums of their two best: 1 or 0."""
    group = expert // (E // GROUPS)
    number = tl.arange(0, NUMBERS)[None, :]
    sums = tl.full((TOKENS, NUMBERS), float("-inf"), tl.float32)
    for this in range(GROUPS):
        mine = (group == this) & (expert < E)
        total = tl.max(tl.where(mine, ranking, float("-inf")), axis=1)[:, None]
        if E // GROUPS > 1:
            first = _first_best(ranking, mine, expert, EXPERTS)
            total += tl.max(tl.where(mine & (expert != first), ranking, float("-inf")), axis=1)[:, None]
        total = tl.where(total == total, total, float("inf"))
        sums = tl.where(number == this, total, sums)
    opened = tl.zeros((TOKENS, NUMBERS), tl.int32)
    for _ in range(TOP_GROUPS):
        first = _first_best(sums, (number < GROUPS) & (opened == 0), number, NUMBERS)
        opened = tl.where(number == first, 1, opened)
    found = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for this in range(GROUPS):
        is_open = tl.max(tl.where(number == this, opened, 0), axis=1)[:, None]
        found = tl.where((group == this) & (expert < E), is_open, found)
    return found


@triton.jit(do_not_specialize=["T"])
def _route_tokens_kernel(
    logits,  # (T, E)
    bias,  # (E,), or None
    weights,  # (T, C) float32
    experts,  # (T, C) int64
    counted,  # (programs, E) int32, each program's counts
    shared,  # (programs, E) float32, each program's sums of shares, or None
    squared,  # (programs,) float32, of squared logarithms, or None
    T,
    E: tl.constexpr,
    C: tl.constexpr,
    SOFTMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    FORCED_SEED: tl.constexpr,  # of forced balance; None: the best experts
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    FLOOR: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,  # E as a power of two
    NUMBERS: tl.constexpr,  # GROUPS as one
):
    expert = tl.arange(0, EXPERTS)[None, :]
    counts_here = tl.zeros((EXPERTS,), tl.int32)
    shares = tl.zeros((EXPERTS,), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    if FORCED_SEED is not None:
        position = tl.zeros((1, EXPERTS), tl.int32)  # of an expert in the fixed random order
        for other in range(E):
            before = _hash(tl.zeros((1, 1), tl.int32) + other, FORCED_SEED) < _hash(expert, FORCED_SEED)
            position += before.to(tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(T, TOKENS), tl.num_programs(0)):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        row = token.to(tl.int64)[:, None]
        inside = (token < T)[:, None] & (expert < E)
        logit = tl.load(logits + row * E + expert, mask=inside, other=0.0).to(tl.float32)
        score, _, most, whole = _scores_of(logit, expert, E, SOFTMAX)
        if FORCED_SEED is not None:
            after = position - ((row * C) % E).to(tl.int32)
            chosen = ((tl.where(after < 0, after + E, after) < C) & (expert < E)).to(tl.int32)
        else:
            ranking = score
            if bias is not None:
                ranking += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
            ranking = tl.where(ranking == ranking, ranking, float("inf"))  # a NaN is the best of all, as for topk
            is_open = inside
            if GROUPS > 1:
                is_open = _in_best_groups(ranking, expert, E, GROUPS, TOP_GROUPS, TOKENS, EXPERTS, NUMBERS) > 0
            chosen = tl.zeros((TOKENS, EXPERTS), tl.int32)
            for _ in range(C):
                chosen = tl.where(expert == _first_best(ranking, is_open & (chosen == 0), expert, EXPERTS), 1, chosen)

        weight = score
        if RENORMALIZE:
            weight = score / (tl.sum(tl.where(chosen > 0, score, 0.0), axis=1)[:, None] + FLOOR)
        at = row * C + tl.cumsum(chosen, axis=1) - 1
        mine = inside & (chosen > 0)
        tl.store(weights + at, weight * SCALE, mask=mine)
        tl.store(experts + at, (expert + tl.zeros((TOKENS, EXPERTS), tl.int32)).to(tl.int64), mask=mine)
        counts_here += tl.sum(mine.to(tl.int32), axis=0)
        if shared is not None:
            shares += tl.sum(tl.where(inside, score / (tl.sum(score, axis=1)[:, None] + FLOOR), 0.0), axis=0)
        if squared is not None:
            logarithm = tl.sum(most + tl.log(whole), axis=1)  # of a single column
            squares += tl.where(token < T, logarithm * logarithm, 0.0)
    column = tl.arange(0, EXPERTS)
    here = tl.program_id(0) * E + column
    tl.store(counted + here, counts_here, mask=column < E)
    if shared is not None:
        tl.store(shared + here, shares, mask=column < E)
    if squared is not None:
        tl.store(squared + tl.program_id(0), tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["T", "programs"])
def _sum_routes_kernel(
    counted,  # (programs, E) int32
    shared,  # (programs, E) float32, or None
    squared,  # (programs,) float32, or None
    counts,  # (E,) int64
    mean_shares,  # (E,) float32
    z,  # () float32
    T,
    programs,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    counts_here = tl.zeros((EXPERTS,), tl.int32)
    shares = tl.zeros((EXPERTS,), tl.float32)
    squares = tl.zeros((PARTS,), tl.float32)
    for first in range(0, programs, PARTS):
        program = first + tl.arange(0, PARTS)
        at = program[:, None] * E + expert[None, :]
        there = (program < programs)[:, None] & (expert < E)[None, :]
        counts_here += tl.sum(tl.load(counted + at, mask=there, other=0), axis=0)
        if shared is not None:
            shares += tl.sum(tl.load(shared + at, mask=there, other=0.0), axis=0)
        if squared is not None:
            squares += tl.load(squared + program, mask=program < programs, other=0.0)
    tl.store(counts + expert, counts_here.to(tl.int64), mask=expert < E)
    tokens = tl.maximum(T, 1).to(tl.float32)
    tl.store(mean_shares + expert, shares / tokens, mask=expert < E)
    tl.store(z + tl.arange(0, 1), tl.zeros((1,), tl.float32) + tl.sum(squares, axis=0) / tokens)


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
    with_shares: bool,
    with_z: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of each token, their weights and the losses' parts; of experts that tie the first."""
    check_route_tokens(logits, expert_bias, top_k, score_function, num_groups, top_groups)
    (T, E), device = logits.shape, logits.device
    weights = torch.empty((T, top_k), dtype=torch.float32, device=device)
    experts = torch.empty((T, top_k), dtype=torch.int64, device=device)
    counts = torch.empty(E, dtype=torch.int64, device=device)
    shares, z = (torch.empty(shape, dtype=torch.float32, device=device) for shape in ((E,), ()))
    columns = next_power_of_2(E)
    tokens = max(1, tiles.ROUTER_SCORES // columns)
    programs = max(1, min(cdiv(T, tokens), tiles.ROUTER_PROGRAMS))
    counted = torch.empty((programs, E), dtype=torch.int32, device=device)
    shared = torch.empty((programs, E), dtype=torch.float32, device=device) if with_shares else None
    squared = torch.empty(programs, dtype=torch.float32, device=device) if with_z else None
    launch(
        _route_tokens_kernel,
        programs,
        {
            "logits": logits.contiguous(),
            "bias": None if expert_bias is None else expert_bias.contiguous(),
            "weights": weights,
            "experts": experts,
            "counted": counted,
            "shared": shared,
            "squared": squared,
            "T": T,
            "E": E,
            "C": top_k,
            "SOFTMAX": score_function == SCORE_FUNCTIONS[0],
            "GROUPS": num_groups,
            "TOP_GROUPS": top_groups,
            "FORCED_SEED": FORCED_SEED if forced else None,
            "RENORMALIZE": renormalize,
            "SCALE": route_scale,
            "FLOOR": FLOOR,
            "TOKENS": tokens,
            "EXPERTS": columns,
            "NUMBERS": next_power_of_2(num_groups),
        },
        num_warps=tiles.ROUTER_WARPS,
    )
    launch(
        _sum_routes_kernel,
        1,
        {
            "counted": counted,
            "shared": shared,
            "squared": squared,
            "counts": counts,
            "mean_shares": shares,
            "z": z,
            "T": T,
            "programs": programs,
            "E": E,
            "PARTS": max(1, min(tiles.ROUTER_PARTS, tiles.ROUTER_PART_SUMS // columns)),
            "EXPERTS": columns,
        },
        num_warps=tiles.ROUTER_WARPS,
    )
    return weights, experts, counts, shares, z


@triton.jit(do_not_specialize=["T"])
def _router_backward_kernel(
    logits,  # (T, E)
    experts,  # (T, C), signed integers
    d_weights,  # (T, C) float32
    d_shares,  # (E,) float32, or None
    d_z,  # () float32, or None
    out,  # (T, E), or (T, 3, E) with the parts
    T,
    E: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,  # 1 or 3
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    FLOOR: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,  # E as a power of two
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)[None, :]
    row = token.to(tl.int64)
    inside = (token < T)[:, None] & (expert < E)
    logit = tl.load(logits + row[:, None] * E + expert, mask=inside, other=0.0).to(tl.float32)
    score, softmax, most, whole = _scores_of(logit, expert, E, SOFTMAX)

    total = tl.zeros((TOKENS, 1), tl.float32) + FLOOR
    weighted = tl.zeros((TOKENS, 1), tl.float32)
    if RENORMALIZE:
        for k in range(C):
            mine = tl.load(experts + row * C + k, mask=token < T, other=-1)[:, None] == expert
            chosen = tl.sum(tl.where(mine, score, 0.0), axis=1)[:, None]
            total += chosen
            weighted += chosen * tl.load(d_weights + row * C + k, mask=token < T, other=0.0)[:, None]
    d_score = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for k in range(C):
        mine = tl.load(experts + row * C + k, mask=token < T, other=-1)[:, None] == expert
        d_chosen = tl.load(d_weights + row * C + k, mask=token < T, other=0.0)[:, None]
        if RENORMALIZE:
            d_chosen = (d_chosen - weighted / total) / total
        d_score += tl.where(mine, d_chosen * SCALE, 0.0)
    tokens = T.to(tl.float32)
    if d_shares is not None:
        d_share = tl.load(d_shares + expert, mask=expert < E, other=0.0) / tokens
        all_scores = tl.sum(score, axis=1)[:, None] + FLOOR
        d_score += (d_share - tl.sum(d_share * score, axis=1)[:, None] / all_scores) / all_scores
    if SOFTMAX:
        d_logit = score * (d_score - tl.sum(d_score * score, axis=1)[:, None])
    else:
        d_logit = d_score * score * (1.0 - score)
    if d_z is not None:
        d_logit += tl.load(d_z) * 2 / tokens * (most + tl.log(whole)) * softmax
    for part in tl.static_range(PARTS):
        rounded = d_logit.to(out.dtype.element_ty)
        tl.store(out + (row[:, None] * PARTS + part) * E + expert, rounded, mask=inside)
        d_logit -= rounded.to(tl.float32)


def router_backward(
    logits: torch.Tensor,
    experts: torch.Tensor,
    d_weights: torch.Tensor,
    d_shares: torch.Tensor | None,
    d_z: torch.Tensor | None,
    score_function: str,
    renormalize: bool,
    route_scale: float,
    dtype: torch.dtype,
    in_parts: bool = False,
) -> torch.Tensor:
    """Gradient of the logits, (T, E) or in parts (T, 3, E), from those of the chosen weights and of the losses' parts."""
    check_router_backward(logits, experts, d_weights, d_shares, score_function)
    (T, E), C = logits.shape, experts.shape[1]
    shape, dtype = ((T, 3, E), torch.bfloat16) if in_parts else ((T, E), dtype)
    out = torch.empty(shape, dtype=dtype, device=logits.device)
    if out.numel():
        columns = next_power_of_2(E)
        tokens = max(1, tiles.ROUTER_SCORES // columns)
        launch(
            _router_backward_kernel,
            cdiv(T, tokens),
            {
                "logits": logits.contiguous(),
                "experts": experts.contiguous(),
                "d_weights": d_weights.contiguous(),
                "d_shares": None if d_shares is None else d_shares.contiguous(),
                "d_z": d_z,
                "out": out,
                "T": T,
                "E": E,
                "C": C,
                "PARTS": 3 if in_parts else 1,
                "SOFTMAX": score_function == SCORE_FUNCTIONS[0],
                "RENORMALIZE": renormalize,
                "SCALE": route_scale,
                "FLOOR": FLOOR,
                "TOKENS": tokens,
                "EXPERTS": columns,
            },
            num_warps=tiles.ROUTER_WARPS,
        )
    return out

"""Index arithmetic of the fused layer: of its choices before rows travel over symmetric memory, and of its places before a pass.

Regions and tables are those of mxep/ep/regions.py, windows those of mxep/ep/passes.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MODES = ("rank_dedup", "all_to_all", "all_ranks")  # of a wire (mxep/ep/routes.py), in the order of `count_rows`'s columns


def pack_choices(experts: torch.Tensor, scores: torch.Tensor, most: int) -> torch.Tensor:
    """The table of a rank's choices that goes to all ranks.

    Args:
        experts: (T, C) int64, from 0 on, or -1 for none.  scores: (T, C) float32.  most: S, at least T.

    Returns:
        (S, 2C) int32, experts and the bits of their scores, -1 behind the last token.

    >>> pack_choices(torch.tensor([[1, 2]]), torch.zeros(1, 2), 3).tolist()
    [[1, 2, 0, 0], [-1, -1, -1, -1], [-1, -1, -1, -1]]
    """
    check_pack_choices(experts, scores, most)
    table = torch.cat((experts.contiguous().int(), scores.contiguous().view(torch.int32)), 1)
    return F.pad(table, (0, 0, 0, most - table.shape[0]), value=-1)


def check_pack_choices(experts: torch.Tensor, scores: torch.Tensor, most: int) -> None:
    """Raise ValueError unless these are `pack_choices`' arguments."""
    if experts.dim() != 2 or experts.dtype != torch.int64 or scores.shape != experts.shape or scores.dtype != torch.float32:
        got = f"experts {tuple(experts.shape)} {experts.dtype} and scores {tuple(scores.shape)} {scores.dtype}"
        raise ValueError(f"pack_choices: {got}, want (T, C) int64 and float32")
    if most < experts.shape[0]:
        raise ValueError(f"pack_choices: {experts.shape[0]} tokens, room for {most}; want room for all")


def sent_regions(
    experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of a wire at home.

    Args:
        experts: (T, C) int64, from 0 to W * L - 1.  mode: of `MODES`.  num_local_experts: L.  world: W.  most: S, at least T.

    Returns:
        slots, home: (T, W) or, in all_to_all, (T, C) int32, as in `mxep.ep.regions.Sent`; ranks: (T, C) int32 in all_to_all, else (0, C).
    """
    check_sent_regions(experts, mode, num_local_experts, world, most)
    (T, C), device = experts.shape, experts.device
    tokens = torch.arange(T, device=device, dtype=torch.int32)[:, None]
    ranks = torch.div(experts.contiguous(), num_local_experts, rounding_mode="floor").int()
    if mode == "all_to_all":
        kept = min(C, num_local_experts)
        before = torch.ones(C, C, dtype=torch.bool, device=device).tril(-1)
        number = ((ranks[:, :, None] == ranks[:, None, :]) & before).sum(-1)  # of a choice among those of its token on its rank
        slots = (tokens * kept + number).int()
        return slots, ranks * (most * kept) + slots, ranks
    chosen = torch.zeros(T, world, dtype=torch.bool, device=device).scatter_(1, ranks.long(), True)
    regions = torch.arange(world, device=device, dtype=torch.int32) * most
    slots = tokens.expand(T, world).contiguous() if mode == "all_ranks" else torch.where(chosen, tokens, -1)
    return slots, torch.where(chosen, regions + tokens, -1), ranks[:0]


def check_sent_regions(experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int) -> None:
    """Raise ValueError unless these are `sent_regions`' arguments."""
    if experts.dim() != 2 or experts.dtype != torch.int64 or mode not in MODES:
        raise ValueError(f"sent_regions: experts {tuple(experts.shape)} {experts.dtype} in mode {mode!r}, want (T, C) int64, {MODES}")
    if num_local_experts < 1 or world < 1 or most < experts.shape[0] or world * most * experts.shape[1] >= 2**31:
        got = f"{experts.shape[0]} tokens, room for {most}, {num_local_experts} experts on each of {world} ranks"
        raise ValueError(f"sent_regions: {got}; want room, experts and ranks, and fewer than 2^31 choices")


def cut_windows(ends: torch.Tensor, capacity: int, count: int) -> torch.Tensor:
    """Where windows begin and end: from the last expert on, each takes the experts before it while they fit.

    Args:
        ends: (L,) int32 END places of the experts, none of which has more than `capacity`.  count: of windows, as many as can be needed.

    Returns:
        (count + 1,) int32: window w is from [w] to [w + 1].

    >>> cut_windows(torch.tensor([4, 12, 16, 20, 32], dtype=torch.int32), 12, 5).tolist()
    [0, 0, 0, 12, 20, 32]
    """
    borders = torch.cat((ends.new_zeros(1), ends))  # (L + 1,), where expert e begins
    leading = torch.searchsorted(borders, borders - capacity)  # the first expert of a window that ends before e
    expert = torch.full((1,), ends.shape[0], device=ends.device)
    firsts = [expert]
    for _ in range(count):
        expert = leading.take(expert)
        firsts.append(expert)
    return borders.take(torch.cat(firsts[::-1]))


def window_places(
    offs: torch.Tensor, scores: torch.Tensor, token_map: torch.Tensor, grad_map: torch.Tensor | None, window: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places of one window, counted from its start.

    Args:
        offs: (L,) int32 END places.  scores: (P,) float32.  token_map: (P,) int32.  grad_map: the same, or None where it is token_map.
        window: (2,) int32, its first place and its end.  capacity: places that it may have.

    Returns:
        (L,) int32 END places; scores (capacity,), 0 behind the window's end; the maps (capacity,) int32, -1 there; (0,) for no grad_map.
    """
    here = torch.arange(capacity, device=window.device)
    inside, place = here < window[1:] - window[:1], (here + window[:1]).clamp(max=max(scores.shape[0] - 1, 0))
    maps = [torch.where(inside, row_map[place], -1) for row_map in (token_map, grad_map) if row_map is not None]
    if grad_map is None:
        maps.append(token_map.new_empty(0))
    return (offs.clamp(max=window[1:]) - window[:1]).clamp(min=0), torch.where(inside, scores[place], 0.0), maps[0], maps[1]


def pick_values(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """values[index], 0 where index is -1. index: int32 of any shape; values: (N,), which may be empty.

    >>> pick_values(torch.tensor([[1, -1]]), torch.tensor([5.0, 7.0])).tolist()
    [[7.0, 0.0]]
    """
    return torch.cat((values, values.new_zeros(1)))[index.long()]

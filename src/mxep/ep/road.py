"""The two wires of the fused layer over the collective transport: tokens to the ranks of their experts, sums home, and back again.

before  the router's choice (T, C) and scores
after   rows at the experts, read through a map; sums of the experts' rows at home
wires   `Wire.out` carries tokens (T, D) to the experts, `Wire.home` the experts' rows (P, D) to their tokens, summed on both ends in
        float32 and rounded once on each.  Dispatch is one wire: out forward, home backward; combine another: home forward, out backward
host syncs  one, for the splits of the exchanges; none on one rank
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comm import gather_all_rows, resolve_group
from mxep.ep.dispatch import from_records
from mxep.ep.routes import (
    MODES,
    Held,
    Sent,
    count_rows,
    held_rows,
    pack_metadata,
    place_choices,
    sent_rows,
    unpack_metadata,
)
from mxep.mx.tensor import dequantize_data
from mxep.shapes import round_up

_WHERE = "fused_moe"


class Wire(NamedTuple):
    """One wire: the rows on both of its ends (see ep/routes.py) and how many travel.

    Attributes:
        mode: one of `MODES`.  group_name: "" stays on this rank.
        out_splits, home_splits: rows to and from the ranks of the experts: sent by this rank's tokens, and held for its experts.
    """

    mode: str
    group_name: str
    out_splits: list[int]
    home_splits: list[int]
    tokens: Tensor
    sent_slots: Tensor
    row_map: Tensor
    held_slots: Tensor

    def out(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        """Tokens (T, D) -> rows (R, D) at their experts: MX with a scale rule, quantised once per token, else as they are."""
        rows = torch.ops.mxep.quantize_packed(tokens, scaling_mode) if scaling_mode else tokens.contiguous()
        if self.mode == "all_ranks":
            rows = gather_all_rows(rows, self.home_splits, self.group_name) if self.group_name else rows
        elif self.group_name or self.mode == "all_to_all":  # alone, every token is one row of rank_dedup
            rows = torch.ops.mxep.gather_rows(rows, self.tokens)
            rows = self._exchange(rows, self.home_splits, self.out_splits)
        return from_records(rows, tokens.shape[1], tokens.dtype) if scaling_mode else rows

    def home(self, placed: Tensor, scaling_mode: str, added: Tensor | None = None) -> Tensor:
        """Experts' rows (P, D) -> their sums at home (T, D), with added (T, D) as last term; in MX on the wire with a scale rule."""
        if not self.group_name and not scaling_mode and self.mode != "all_to_all":
            return torch.ops.mxep.sum_rows(placed, self.held_slots, added)
        rows = torch.ops.mxep.sum_rows(placed, self.held_slots)
        if scaling_mode:
            records = torch.ops.mxep.quantize_packed(rows, scaling_mode)
            records = self._exchange(records, self.out_splits, self.home_splits)
            rows = dequantize_data(from_records(records, rows.shape[1], rows.dtype))
        else:
            rows = self._exchange(rows, self.out_splits, self.home_splits)
        return torch.ops.mxep.sum_rows(rows, self.sent_slots, added)

    def _exchange(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        return torch.ops.mxep.exchange_rows(rows, output_splits, input_splits, self.group_name) if self.group_name else rows


class Road(NamedTuple):
    """Both wires and where the experts' rows stand.

    Attributes:
        dispatch, combine: the wires.  offs: (L,) int32 END places of the experts.
        scores: (P,) float32, the score of each place, 0 in padding.
        places: (R, C) int32, of the choices in rows of rank_dedup, -1 for a choice that is elsewhere.
        slots: (T, C) int32, the row of rank_dedup that each choice at home is in.
        splits: rows of rank_dedup sent to and held for each rank.
    """

    dispatch: Wire
    combine: Wire
    offs: Tensor
    scores: Tensor
    places: Tensor
    slots: Tensor
    splits: tuple[list[int], list[int]]

    def for_backward(self) -> tuple[Road, tuple[Tensor, ...]]:
        """The road without its tensors, and those of them that backward reads, for `refilled`."""
        d, c = self.dispatch, self.combine
        tensors = (d.tokens, d.sent_slots, d.row_map, d.held_slots, c.tokens, c.row_map, self.offs, self.scores, self.places, self.slots)
        none = self.offs.new_empty(0)
        bare = [wire._replace(tokens=none, sent_slots=none, row_map=none, held_slots=none) for wire in (d, c)]
        return Road(bare[0], bare[1], none, none, none, none, self.splits), tensors

    def refilled(self, tensors: tuple[Tensor, ...]) -> Road:
        sent, sent_slots, row_map, held_slots, tokens, combine_map, *rest = tensors
        dispatch = self.dispatch._replace(tokens=sent, sent_slots=sent_slots, row_map=row_map, held_slots=held_slots)
        offs, scores, places, slots = rest
        return Road(dispatch, self.combine._replace(tokens=tokens, row_map=combine_map), offs, scores, places, slots, self.splits)

    def scores_home(self, d_scores: Tensor) -> Tensor:
        """Gradients of the places' scores (P,) -> of the choices' scores at home (T, C); (R, C) float32 travel."""
        here = self.places >= 0
        rows = torch.where(here, d_scores[self.places.clamp(min=0).long()], 0.0)
        if self.dispatch.group_name:
            rows = torch.ops.mxep.exchange_rows(rows, *self.splits, self.dispatch.group_name)
        return rows.gather(0, self.slots.long())


_FACTS = ("num_experts", "top_k", "the tokens' width", "RuntimeEPConfig and recipe, by number")


class Facts(NamedTuple):
    """What every rank must bring alike."""

    experts: int
    choices: int
    width: int
    options: int  # a number that stands for modes and precisions

    def disagreement(self, of_ranks: list[list[int]]) -> str | None:
        for rank, theirs in enumerate(of_ranks):
            for name, mine, other in zip(_FACTS, self, theirs, strict=True):
                if mine != other:
                    return f"rank {rank} has {other}, this rank {mine}: {name}"
        return None


def _exchange_counts(counts: Tensor, facts: Facts, group_name: str) -> tuple[list[list[int]], list[list[int]]]:
    """What `count_rows` says of this rank's rows for every rank, and what the others say of theirs for this one, on the host."""
    world, group = counts.shape[0], resolve_group(_WHERE, group_name)
    mine = torch.cat((counts, *(torch.full((world, 1), fact, device=counts.device) for fact in facts)), 1)  # filled there, not copied
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    sent, received = torch.stack((mine, theirs)).tolist()  # host sync: the splits of the exchanges are host lists
    problem = facts.disagreement([row[counts.shape[1] :] for row in received])
    if problem is not None:
        raise ValueError(f"{_WHERE} (this is rank {dist.get_rank(group)} of {world}): {problem}; give every rank of the group the same")
    return sent, received


def ep_degree(group_name: str, num_experts: int) -> int:
    """W, 1 without a group. Raises ValueError unless it divides the experts."""
    world = dist.get_world_size(resolve_group(_WHERE, group_name)) if group_name else 1
    if num_experts % world:
        raise ValueError(f"{_WHERE}: {num_experts} experts on an EP group of {world}, want a multiple of it; change either")
    return world


def plan_road(experts: Tensor, scores: Tensor, facts: Facts, modes: tuple[str, str], alignment: int, group_name: str) -> Road:
    """Who sends which rows where, agreed with the other ranks.

    Args:
        experts, scores: (T, C) int64 and float32, what the router chose.
        modes: of dispatch's wire and of combine's.  alignment: rows that every expert's group is padded to.
        group_name: process group of W ranks with E / W experts each; "" is this rank alone.

    Raises:
        ValueError: E is not a multiple of W; on every rank: ranks whose `facts` differ.
    """
    world = ep_degree(group_name, facts.experts)
    num_local = facts.experts // world
    counts = count_rows(experts, num_local, world)
    T, C = experts.shape
    sent, received = ([[T, T * C, T]],) * 2 if not group_name else _exchange_counts(counts, facts, group_name)

    def total(table: list[list[int]], mode: str) -> list[int]:
        return [row[MODES.index(mode)] for row in table]

    ends = {mode: sent_rows(mode, experts, num_local, world, sum(total(sent, mode))) for mode in {"rank_dedup", *modes}}
    metadata = pack_metadata(experts, scores, ends["rank_dedup"], counts[:, 0], num_local)
    splits = total(sent, "rank_dedup"), total(received, "rank_dedup")
    if group_name:
        metadata = torch.ops.mxep.exchange_rows(metadata, splits[1], splits[0], group_name)
    local, row_scores, tokens = unpack_metadata(metadata)
    num_places = round_up(sum(total(received, "all_to_all")) + num_local * alignment, alignment)
    places, offs = place_choices(local, num_local, alignment, num_places)

    def wire(mode: str) -> Wire:
        sides: tuple[Sent, Held] = ends[mode], held_rows(mode, places, tokens, received, num_places)
        return Wire(mode, group_name, total(sent, mode), total(received, mode), *sides[0], *sides[1])

    dispatch = wire(modes[0])
    combine = dispatch if modes[0] == modes[1] else wire(modes[1])
    spare = torch.zeros(num_places + 1, dtype=torch.float32, device=scores.device)  # the last place takes what stands nowhere
    flat = places.flatten().long()
    of_places = spare.scatter_(0, torch.where(flat < 0, num_places, flat), row_scores.flatten())[:num_places].contiguous()
    rank_of_choice = torch.div(experts, num_local, rounding_mode="floor")
    slots = ends["rank_dedup"].slots.gather(1, rank_of_choice)
    return Road(dispatch, combine, offs, of_places, places, slots, splits)

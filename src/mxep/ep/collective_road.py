"""The road of the fused layer over the collective transport (ep/road.py): the host knows how many rows travel from rank to rank.

Rows travel packed, without gaps.  Host syncs: one, for the splits of the exchanges; none on one rank, where no row travels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.comm import gather_all_rows, transport_of
from mxep.ep.dispatch import from_records
from mxep.ep.road import Begun, Facts, check_numbers, choices_dtype
from mxep.ep.routes import (
    MODES,
    Held,
    Sent,
    count_rows,
    held_rows,
    pack_metadata,
    place_choices,
    scores_of_choices,
    scores_of_places,
    sent_rows,
    unpack_metadata,
)
from mxep.mx.tensor import dequantize_data
from mxep.shapes import round_up


class CollectiveWire(NamedTuple):
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
        rows = torch.ops.mxep.quantize_packed(tokens, scaling_mode) if scaling_mode else tokens.contiguous()
        if self.mode == "all_ranks":
            rows = gather_all_rows(rows, self.home_splits, self.group_name) if self.group_name else rows
        elif self.group_name or self.mode == "all_to_all":  # alone, every token is one row of rank_dedup
            rows = torch.ops.mxep.gather_rows(rows, self.tokens)
            rows = self._exchange(rows, self.home_splits, self.out_splits)
        return from_records(rows, tokens.shape[1], tokens.dtype) if scaling_mode else rows

    def send_out_again(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """At once."""
        rows = self.out(tokens, scaling_mode)
        return lambda: rows

    def home(self, placed: Tensor, scaling_mode: str, added: Tensor | None = None, begun: Begun | None = None) -> Tensor:
        return self.send_home(placed, scaling_mode, begun)(added)

    def send_home(self, placed: Tensor, scaling_mode: str, begun: Begun | None = None) -> Callable[[Tensor | None], Tensor]:
        """All but the last sum at once: nothing goes beside a GEMM over this transport, and sums take less memory than their terms."""
        if begun is not None:
            torch.ops.mxep.sum_rows_within(placed, self.held_slots, *begun)
            rows = begun.sums
            if not self.group_name or self.mode == "all_ranks":  # where a row here may be no choice's: nobody wrote its sum
                rows.masked_fill_((self.held_slots < 0).all(1, keepdim=True), 0)
        else:
            rows = torch.ops.mxep.sum_rows(placed, self.held_slots)
        if scaling_mode:
            records = torch.ops.mxep.quantize_packed(rows, scaling_mode)
            records = self._exchange(records, self.out_splits, self.home_splits)
            rows = dequantize_data(from_records(records, rows.shape[1], rows.dtype))
        else:
            rows = self._exchange(rows, self.out_splits, self.home_splits)
        return partial(self._sum_at_home, rows)

    def _sum_at_home(self, rows: Tensor, added: Tensor | None) -> Tensor:
        if not self.group_name and self.mode != "all_to_all" and added is None:
            return rows  # one for each token, in order
        return torch.ops.mxep.sum_rows(rows, self.sent_slots, added)

    def leaving(self, way: str) -> int:
        splits = self.out_splits if way == "out" else self.home_splits
        return sum(splits) - splits[transport_of(self.group_name, self.tokens.device).rank if self.group_name else 0]

    def _exchange(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        return torch.ops.mxep.exchange_rows(rows, output_splits, input_splits, self.group_name) if self.group_name else rows


class CollectiveRoad(NamedTuple):
    """See `mxep.ep.road.Road`.

    Attributes:
        dispatch, combine: the wires.  offs: (L,) int32 END places of the experts.
        scores: (P,) float32, the score of each place, 0 in padding.
        places: (R, C) int32, of the choices in rows of rank_dedup, -1 for a choice that is elsewhere.
        experts: (T, C) int64, the choices at home.
        slots: (T, C) int32, the row of rank_dedup that each of them is in; none of them on one rank.
        splits: rows of rank_dedup sent to and held for each rank.  tokens: of all ranks.
    """

    dispatch: CollectiveWire
    combine: CollectiveWire
    offs: Tensor
    scores: Tensor
    places: Tensor
    experts: Tensor
    slots: Tensor
    splits: tuple[list[int], list[int]]
    tokens: int

    @property
    def share(self) -> None:
        """P is what came."""

    def for_backward(self) -> tuple[CollectiveRoad, tuple[Tensor | None, ...]]:
        d, c = self.dispatch, self.combine
        wires = d.tokens, d.sent_slots, d.row_map, d.held_slots, c.tokens, c.row_map
        num_experts = self.offs.shape[0] * len(self.splits[0])
        tensors = (*wires, self.offs, self.scores, self.places, self.experts.to(choices_dtype(num_experts)), self.slots)
        none = self.offs.new_empty(0)
        bare = [wire._replace(tokens=none, sent_slots=none, row_map=none, held_slots=none) for wire in (d, c)]
        return CollectiveRoad(bare[0], bare[1], none, none, none, none, none, self.splits, self.tokens), tensors

    def refilled(self, tensors: tuple[Tensor, ...]) -> CollectiveRoad:
        sent, sent_slots, row_map, held_slots, tokens, combine_map, offs, scores, places, experts, slots = tensors
        dispatch = self.dispatch._replace(tokens=sent, sent_slots=sent_slots, row_map=row_map, held_slots=held_slots)
        combine = self.combine._replace(tokens=tokens, row_map=combine_map)
        return CollectiveRoad(dispatch, combine, offs, scores, places, experts.long(), slots, self.splits, self.tokens)

    def send_scores_home(self, d_scores: Tensor) -> Callable[[], Tensor]:
        """At once, (R, C) float32 travel."""
        rows = scores_of_choices(self.places, d_scores)
        if not self.dispatch.group_name:
            return lambda: rows
        rows = torch.ops.mxep.exchange_rows(rows, *self.splits, self.dispatch.group_name)
        return partial(rows.gather, 0, self.slots.long())


def _exchange_counts(counts: Tensor, facts: Facts, group_name: str) -> tuple[list[list[int]], list[list[int]]]:
    """What `count_rows` says of this rank's rows for every rank, and what the others say of theirs for this one, on the host."""
    world = counts.shape[0]
    numbers = [torch.full((world, 1), fact, device=counts.device) for fact in facts.numbers]  # filled there, not copied
    mine = torch.cat((counts, *numbers), 1)
    theirs = torch.ops.mxep.exchange_rows(mine, [1] * world, [1] * world, group_name)
    sent, received = torch.stack((mine, theirs)).tolist()  # host sync: the splits of the exchanges are host lists
    check_numbers([row[counts.shape[1] :] for row in received])
    return sent, received


def _plan_alone(facts: Facts, experts: Tensor, scores: Tensor) -> CollectiveRoad:
    """`plan` on one rank, by the kernels that place what came over symmetric memory; a row is a token or, in all_to_all, a choice."""
    T, C = experts.shape
    num_places = round_up(T * C + facts.experts * facts.alignment, facts.alignment)
    table = torch.ops.mxep.pack_choices(experts, scores, T)
    places, offs, choices, row_map, of_places = torch.ops.mxep.place_table(table, 0, facts.experts, facts.alignment, num_places)

    def wire(mode: str) -> CollectiveWire:
        rows = torch.arange(T * C if mode == "all_to_all" else T, dtype=torch.int32, device=experts.device)
        counts = [rows.shape[0]]
        if mode == "all_to_all":
            tokens = torch.div(rows, C, rounding_mode="floor")
            return CollectiveWire(mode, "", counts, counts, tokens, rows.view(T, C), choices, places.view(-1, 1))
        return CollectiveWire(mode, "", counts, counts, rows, rows[:, None], row_map, places)

    wires = {mode: wire(mode) for mode in dict.fromkeys(facts.modes)}
    none = offs.new_empty(0)
    dispatch, combine = (wires[mode] for mode in facts.modes)
    return CollectiveRoad(dispatch, combine, offs, of_places, places, experts, none, ([T], [T]), T)


def plan(facts: Facts, experts: Tensor, scores: Tensor, world: int, group_name: str) -> CollectiveRoad:
    """See `mxep.ep.plan_road.plan_road`."""
    if not group_name:
        return _plan_alone(facts, experts, scores)
    num_local = facts.experts // world
    counts = count_rows(experts, num_local, world)
    sent, received = _exchange_counts(counts, facts, group_name)

    def total(table: list[list[int]], mode: str) -> list[int]:
        return [row[MODES.index(mode)] for row in table]

    ends = {mode: sent_rows(mode, experts, num_local, world, sum(total(sent, mode))) for mode in {"rank_dedup", *facts.modes}}
    metadata = pack_metadata(experts, scores, ends["rank_dedup"], counts[:, 0], num_local)
    splits = total(sent, "rank_dedup"), total(received, "rank_dedup")
    metadata = torch.ops.mxep.exchange_rows(metadata, splits[1], splits[0], group_name)
    local, row_scores, tokens = unpack_metadata(metadata)
    num_places = round_up(sum(total(received, "all_to_all")) + num_local * facts.alignment, facts.alignment)
    placed = place_choices(local, num_local, facts.alignment, num_places)

    def wire(mode: str) -> CollectiveWire:
        sides: tuple[Sent, Held] = ends[mode], held_rows(mode, placed, tokens, received)
        return CollectiveWire(mode, group_name, total(sent, mode), total(received, mode), *sides[0], *sides[1])

    dispatch = wire(facts.modes[0])
    combine = dispatch if facts.modes[0] == facts.modes[1] else wire(facts.modes[1])
    rank_of_choice = torch.div(experts, num_local, rounding_mode="floor")
    slots = ends["rank_dedup"].slots.gather(1, rank_of_choice)
    of_places = scores_of_places(placed.choices, row_scores)
    everyone = sum(total(received, "all_ranks"))
    return CollectiveRoad(dispatch, combine, placed.offs, of_places, placed.places, experts, slots, splits, everyone)

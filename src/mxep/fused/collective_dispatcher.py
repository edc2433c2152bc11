"""The token dispatcher over `Transport.exchange`: the host knows how many rows go from rank to rank.

Rows are sent packed, without gaps.  Host syncs: one, for the splits of the exchanges; none on one rank, where no row is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.comm import gather_all_rows, transport_of
from mxep.ep.dispatch import from_records
from mxep.fused.dispatcher import DispatchSpec, PartialSums, check_numbers, choices_dtype
from mxep.fused.row_index import (
    MODES,
    CollectiveSendIndex,
    RecvIndex,
    count_rows,
    index_expert_rows,
    pack_metadata,
    recv_index,
    scores_of_choices,
    scores_of_places,
    send_index,
    unpack_metadata,
)
from mxep.mx.tensor import dequantize_data
from mxep.shapes import round_up


class CollectiveRowExchange(NamedTuple):
    """One exchange: the rows on both of its ends (see fused/row_index.py) and how many travel.

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
    row_slots: Tensor

    def to_experts(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        rows = torch.ops.mxep.quantize_packed(tokens, scaling_mode) if scaling_mode else tokens.contiguous()
        if self.mode == "all_ranks":
            rows = gather_all_rows(rows, self.home_splits, self.group_name) if self.group_name else rows
        elif self.group_name or self.mode == "all_to_all":  # alone, every token is one row of rank_dedup
            rows = torch.ops.mxep.gather_rows(rows, self.tokens)
            rows = self._exchange(rows, self.home_splits, self.out_splits)
        return from_records(rows, tokens.shape[1], tokens.dtype) if scaling_mode else rows

    def start_to_experts(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """At once."""
        rows = self.to_experts(tokens, scaling_mode)
        return lambda: rows

    def to_tokens(self, placed: Tensor, scaling_mode: str, added: Tensor | None = None, earlier: PartialSums | None = None) -> Tensor:
        return self.start_to_tokens(placed, scaling_mode, earlier)(added)

    def start_to_tokens(self, placed: Tensor, scaling_mode: str, earlier: PartialSums | None = None) -> Callable[[Tensor | None], Tensor]:
        """All but the last sum at once: nothing goes beside a GEMM over this transport, and sums take less memory than their terms."""
        if earlier is not None:
            torch.ops.mxep.reduce_rows_chunk(placed, self.row_slots, *earlier)
            rows = earlier.sums
            if not self.group_name or self.mode == "all_ranks":  # where a row here may be no choice's: nobody wrote its sum
                rows.masked_fill_((self.row_slots < 0).all(1, keepdim=True), 0)
        else:
            rows = torch.ops.mxep.reduce_rows(placed, self.row_slots)
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
        return torch.ops.mxep.reduce_rows(rows, self.sent_slots, added)

    def rows_off_rank(self, way: str) -> int:
        splits = self.out_splits if way == "to_experts" else self.home_splits
        return sum(splits) - splits[transport_of(self.group_name, self.tokens.device).rank if self.group_name else 0]

    def _exchange(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        return torch.ops.mxep.exchange_rows(rows, output_splits, input_splits, self.group_name) if self.group_name else rows


class CollectiveDispatcher(NamedTuple):
    """See `mxep.fused.dispatcher.TokenDispatcher`.

    Attributes:
        dispatch, combine: the wires.  offs: (L,) int32 END places of the experts.
        scores: (P,) float32, the score of each place, 0 in padding.
        places: (R, C) int32, of the choices in rows of rank_dedup, -1 for a choice that is elsewhere.
        experts: (T, C) int64, the choices at home.
        slots: (T, C) int32, the row of rank_dedup that each of them is in; none of them on one rank.
        splits: rows of rank_dedup sent to and held for each rank.  tokens: of all ranks.
    """

    dispatch: CollectiveRowExchange
    combine: CollectiveRowExchange
    offs: Tensor
    scores: Tensor
    places: Tensor
    experts: Tensor
    slots: Tensor
    splits: tuple[list[int], list[int]]
    tokens: int

    @property
    def expected_rows(self) -> None:
        """P is what came."""

    def for_backward(self) -> tuple[CollectiveDispatcher, tuple[Tensor | None, ...]]:
        d, c = self.dispatch, self.combine
        exchanges = d.tokens, d.sent_slots, d.row_map, d.row_slots, c.tokens, c.row_map
        num_experts = self.offs.shape[0] * len(self.splits[0])
        tensors = (*exchanges, self.offs, self.scores, self.places, self.experts.to(choices_dtype(num_experts)), self.slots)
        none = self.offs.new_empty(0)
        bare = [exchange._replace(tokens=none, sent_slots=none, row_map=none, row_slots=none) for exchange in (d, c)]
        return CollectiveDispatcher(bare[0], bare[1], none, none, none, none, none, self.splits, self.tokens), tensors

    def refilled(self, tensors: tuple[Tensor, ...]) -> CollectiveDispatcher:
        sent, sent_slots, row_map, row_slots, tokens, combine_map, offs, scores, places, experts, slots = tensors
        dispatch = self.dispatch._replace(tokens=sent, sent_slots=sent_slots, row_map=row_map, row_slots=row_slots)
        combine = self.combine._replace(tokens=tokens, row_map=combine_map)
        return CollectiveDispatcher(dispatch, combine, offs, scores, places, experts.long(), slots, self.splits, self.tokens)

    def start_scores_to_tokens(self, d_scores: Tensor) -> Callable[[], Tensor]:
        """At once, (R, C) float32 travel."""
        rows = scores_of_choices(self.places, d_scores)
        if not self.dispatch.group_name:
            return lambda: rows
        rows = torch.ops.mxep.exchange_rows(rows, *self.splits, self.dispatch.group_name)
        return partial(rows.gather, 0, self.slots.long())


def _exchange_counts(counts: Tensor, spec: DispatchSpec, group_name: str) -> tuple[list[list[int]], list[list[int]]]:
    """What `count_rows` says of this rank's rows for every rank, and what the others say of theirs for this one, on the host."""
    world = counts.shape[0]
    numbers = [torch.full((world, 1), fact, device=counts.device) for fact in spec.numbers]  # filled there, not copied
    mine = torch.cat((counts, *numbers), 1)
    theirs = torch.ops.mxep.exchange_rows(mine, [1] * world, [1] * world, group_name)
    sent, received = torch.stack((mine, theirs)).tolist()  # host sync: the splits of the exchanges are host lists
    check_numbers([row[counts.shape[1] :] for row in received])
    return sent, received


def _plan_alone(spec: DispatchSpec, experts: Tensor, scores: Tensor) -> CollectiveDispatcher:
    """`plan` on one rank, by the kernels that place what came over symmetric memory; a row is a token or, in all_to_all, a choice."""
    T, C = experts.shape
    num_places = round_up(T * C + spec.experts * spec.alignment, spec.alignment)
    table = torch.ops.mxep.pack_topk(experts, scores, T)
    places, offs, choices, row_map, of_places = torch.ops.mxep.index_topk_table(table, 0, spec.experts, spec.alignment, num_places)

    def exchange(mode: str) -> CollectiveRowExchange:
        rows = torch.arange(T * C if mode == "all_to_all" else T, dtype=torch.int32, device=experts.device)
        counts = [rows.shape[0]]
        if mode == "all_to_all":
            tokens = torch.div(rows, C, rounding_mode="floor")
            return CollectiveRowExchange(mode, "", counts, counts, tokens, rows.view(T, C), choices, places.view(-1, 1))
        return CollectiveRowExchange(mode, "", counts, counts, rows, rows[:, None], row_map, places)

    exchanges = {mode: exchange(mode) for mode in dict.fromkeys(spec.modes)}
    none = offs.new_empty(0)
    dispatch, combine = (exchanges[mode] for mode in spec.modes)
    return CollectiveDispatcher(dispatch, combine, offs, of_places, places, experts, none, ([T], [T]), T)


def plan(
    spec: DispatchSpec, experts: Tensor, scores: Tensor, tokens: Tensor, scaling_mode: str, group_name: str, saves: bool = True
) -> tuple[CollectiveDispatcher, Tensor]:
    """See `mxep.fused.make_dispatcher.make_dispatcher`; over any transport's `exchange`."""
    world = transport_of(group_name, tokens.device).world if group_name else 1
    if world > 1:
        dispatcher = _plan_with_peers(spec, experts, scores, world, group_name)
    else:
        dispatcher = _plan_alone(spec, experts, scores)
    return dispatcher, dispatcher.dispatch.to_experts(tokens, scaling_mode)


def _plan_with_peers(spec: DispatchSpec, experts: Tensor, scores: Tensor, world: int, group_name: str) -> CollectiveDispatcher:
    num_local = spec.experts // world
    counts = count_rows(experts, num_local, world)
    sent, received = _exchange_counts(counts, spec, group_name)

    def total(table: list[list[int]], mode: str) -> list[int]:
        return [row[MODES.index(mode)] for row in table]

    ends = {mode: send_index(mode, experts, num_local, world, sum(total(sent, mode))) for mode in {"rank_dedup", *spec.modes}}
    metadata = pack_metadata(experts, scores, ends["rank_dedup"], counts[:, 0], num_local)
    splits = total(sent, "rank_dedup"), total(received, "rank_dedup")
    metadata = torch.ops.mxep.exchange_rows(metadata, splits[1], splits[0], group_name)
    local, row_scores, tokens = unpack_metadata(metadata)
    num_places = round_up(sum(total(received, "all_to_all")) + num_local * spec.alignment, spec.alignment)
    placed = index_expert_rows(local, num_local, spec.alignment, num_places)

    def exchange(mode: str) -> CollectiveRowExchange:
        sides: tuple[CollectiveSendIndex, RecvIndex] = ends[mode], recv_index(mode, placed, tokens, received)
        return CollectiveRowExchange(mode, group_name, total(sent, mode), total(received, mode), *sides[0], *sides[1])

    dispatch = exchange(spec.modes[0])
    combine = dispatch if spec.modes[0] == spec.modes[1] else exchange(spec.modes[1])
    rank_of_choice = torch.div(experts, num_local, rounding_mode="floor")
    slots = ends["rank_dedup"].slots.gather(1, rank_of_choice)
    of_places = scores_of_places(placed.choices, row_scores)
    everyone = sum(total(received, "all_ranks"))
    return CollectiveDispatcher(dispatch, combine, placed.offs, of_places, placed.places, experts, slots, splits, everyone)

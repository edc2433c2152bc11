"""The token dispatcher over symmetric memory: kernels write rows and sums into the memory of the rank that reads them.

Every rank receives in regions, so the host knows sizes, and no rank knows counts before rows are sent: capacities are the worst case,
P = round_up(sum of all T * min(C, L) + L * alignment) expert rows among them.
overlap           rows are sent while expert rows are indexed; backward's sums and the scores' gradients are sent during wgrad, by copy
                  engines if most of a region is filled
ownership         received rows stay where they arrived, in a buffer that is in use as long as a tensor on it (`mxep.comm.symmetric_memory`)
Host syncs: none; the host waits for the other ranks' hosts once for each exchange, but the top-k tables and the tokens are sent after one
rendezvous (two if the ranks' numbers of tokens differ).

Every rank has a region in every other rank's memory, as large as the most rows that it may send: so no rank counts before it sends, nothing
overflows, and a row's position depends on its token only.  S is the largest T of any rank, K = min(C, L) the number of a token's experts
that one rank can have:

    rank_dedup, all_ranks   S rows a region, row t is token t's
    all_to_all              S*K rows a region, row t*K + j is that of the j-th expert of token t on that rank

Sums are sent in the same regions.  The top-k and scores of every token go to every rank, which takes what belongs to its experts.  No
index names a row that did not arrive.  Expert rows have the order of fused/row_index.py in every mode, so every sum has the same order.

Two ranks of two experts; on rank 0 token 0 chose experts 0 and 3, token 1 experts 2 and 3, rank 1 has three tokens, so S = 3:

>>> experts, scores = torch.tensor([[0, 3], [2, 3]]), torch.full((2, 2), 0.5)
>>> send_index("rank_dedup", experts, 2, 2, 3).slots.tolist()
[[0, 0], [-1, 1]]
>>> sent = send_index("all_to_all", experts, 2, 2, 3)
>>> sent.slots.tolist(), sent.ranks.tolist(), sent.home.tolist()
([[0, 0], [2, 3]], [[0, 1], [1, 1]], [[0, 6], [8, 9]])

On rank 1, whose experts are 2 and 3, and if its own tokens chose nothing of its own, the choices would stand in places 4, 0 and 5, each
group padded to 4:

>>> from mxep.fused.row_index import ExpertRowIndex
>>> table = torch.ops.mxep.pack_topk(experts, scores, 3)
>>> *placed, row_map, of_places = torch.ops.mxep.index_topk_table(torch.cat((table, torch.full_like(table, -1))), 1, 2, 4, 8)
>>> placed = ExpertRowIndex(*placed)
>>> recv_index_of_regions("rank_dedup", placed, row_map, 2).row_map.tolist()
[1, -1, -1, -1, 0, 1, -1, -1]
>>> held = recv_index_of_regions("all_to_all", placed, row_map, 2)
>>> held.row_map.tolist(), held.slots.flatten().tolist()
([2, -1, -1, -1, 0, 3, -1, -1], [4, -1, 0, 5, -1, -1, -1, -1, -1, -1, -1, -1])
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, cast

import torch
from torch import Tensor

import mxep.operators  # noqa: F401
from mxep.comm import transport_of
from mxep.comm.exchange import Exchange
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep.dispatch import from_records
from mxep.fused.dispatcher import WHERE, DispatchSpec, PartialSums, check_numbers, choices_dtype
from mxep.fused.row_index import ExpertRowIndex, RecvIndex, pick, scores_of_choices
from mxep.mx.tensor import dequantize_data
from mxep.shapes import record_bytes, round_up

_PLAN, _OUT, _HOME, _SCORES = 4, 6, 7, 8  # kinds of exchanges, which every rank compares
_ROW_BYTES = 16  # a row starts at a multiple of it
_FILLED = 0.5  # from that share on whole regions are copied
Steps = Generator[None, Tensor | None, Tensor]  # sends up to its yield, then takes the last term of the sums, if any, and receives


class _Arriving:
    """An exchange that was sent and not waited for yet; if it is never waited for, that is a failure of this rank."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        next(steps)

    def __call__(self, added: Tensor | None = None) -> Tensor:
        try:
            self._steps.send(added)
        except StopIteration as end:
            return end.value
        raise AssertionError("an exchange has two steps")


class SymmetricSendIndex(NamedTuple):
    """The rows of an exchange at home.

    Attributes:
        slots: (T, W) or, in all_to_all, (T, C) int32, the row of this rank's region that a token goes to, -1 for none.
        ranks: (T, C) int32, on which rank, in all_to_all; None: column r is rank r's.
        home: like slots, the row of all regions in which the sum for it comes home, -1 where none comes.
    """

    slots: Tensor
    ranks: Tensor | None
    home: Tensor


def rows_of_region(mode: str, most: int, kept: int) -> int:
    """How many rows a region has; most: S, kept: K."""
    return most * kept if mode == "all_to_all" else most


def send_index(mode: str, experts: Tensor, num_local_experts: int, world: int, most: int) -> SymmetricSendIndex:
    """The rows of an exchange at home, of choices (T, C); most: S."""
    slots, home, ranks = torch.ops.mxep.send_index(experts, mode, num_local_experts, world, most)
    return SymmetricSendIndex(slots, ranks if mode == "all_to_all" else None, home)


def home_lines(experts: Tensor, num_local_experts: int, most: int) -> Tensor:
    """Of all ranks' lines (R, ...), that in which something comes home for each choice (T, C); most: S.

    >>> home_lines(torch.tensor([[0, 3], [2, 3]]), 2, 3).tolist()
    [[0, 3], [4, 4]]
    """
    tokens = torch.arange(experts.shape[0], device=experts.device)[:, None]
    return torch.div(experts, num_local_experts, rounding_mode="floor") * most + tokens


def recv_index_of_regions(mode: str, placed: ExpertRowIndex, row_map: Tensor, kept: int) -> RecvIndex:
    """The rows of an exchange on the rank of the experts.

    Args:
        placed: the choices of all ranks' tokens (R, C), R = W*S.  row_map: (P,) int32, the line of R in each place, -1 in padding.
        kept: K.

    Returns:
        row_map (P,) int32; slots (R, C) or, in all_to_all, (R*K, 1) int32.
    """
    places, _, choices = placed
    if mode != "all_to_all":
        return RecvIndex(row_map, places)
    R, here = places.shape[0], places >= 0
    number = here.cumsum(1, dtype=torch.int32) - 1
    slots = torch.full((R, kept + 1), -1, dtype=torch.int32, device=places.device)  # the last one takes what stands nowhere
    slots = slots.scatter_(1, torch.where(here, number, kept).long(), places)[:, :kept]
    rows = torch.arange(R, device=places.device, dtype=torch.int32)[:, None] * kept + number
    return RecvIndex(pick(choices, rows.flatten()), slots.reshape(R * kept, 1))


class SymmetricRowExchange(NamedTuple):
    """The rows of an exchange on both sides.

    Attributes:
        mode: of fused/row_index.py.  region: rows that a rank may send to another.
        sent: of this rank's tokens.  row_map, row_slots: of its experts.
    """

    transport: SymmetricTransport
    mode: str
    region: int
    sent: SymmetricSendIndex
    row_map: Tensor
    row_slots: Tensor

    def to_experts(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        return self.push_to_experts(tokens, scaling_mode)()

    def to_tokens(self, placed: Tensor, scaling_mode: str, added: Tensor | None = None, earlier: PartialSums | None = None) -> Tensor:
        return _Arriving(self._push_home(placed, scaling_mode, earlier))(added)

    def push_to_experts(self, tokens: Tensor, scaling_mode: str, exchange: Exchange | None = None) -> _Arriving:
        """`to_experts` in two steps, in an exchange of its own or in one that has begun."""
        pitch = _pitch(tokens, scaling_mode)
        return _Arriving(self._out(tokens.contiguous(), scaling_mode, pitch, exchange or self._open(_OUT, pitch)))

    def start_to_experts(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """Sends every token to every rank if copy engines can: they leave the multiprocessors to the next kernels."""
        if self._copies(tokens, scaling_mode):
            return _Arriving(self._copy_out(tokens.contiguous(), scaling_mode))
        return self.push_to_experts(tokens, scaling_mode)

    def start_to_tokens(self, placed: Tensor, scaling_mode: str, earlier: PartialSums | None = None) -> Callable[[Tensor | None], Tensor]:
        """Sums on this rank first if copy engines can send the sums, as in `start_to_experts`."""
        return _Arriving((self._copy_home if self._copies(placed, scaling_mode) else self._push_home)(placed, scaling_mode, earlier))

    def _copies(self, rows: Tensor, scaling_mode: str) -> bool:
        """True if whole regions are copied: rows have the same pitch on both sides, and most rows of a region are needed.

        A token has an expert on a rank with a probability of about 1 - (1 - 1/W)^C.
        """
        filled = 1 - (1 - 1 / self.transport.world) ** self.row_slots.shape[1]
        whole_rows = bool(scaling_mode) or rows.shape[1] * rows.element_size() % _ROW_BYTES == 0
        return self.mode != "all_to_all" and whole_rows and filled >= _FILLED

    def rows_off_rank(self, way: str) -> int:
        rank, here = self.transport.rank, self.row_slots.view(self.transport.world, -1, self.row_slots.shape[1])
        if way == "to_tokens":
            return int((here >= 0).any(2).sum(1).sum() - (here[rank] >= 0).any(1).sum())  # host sync: for measurements
        there = self.sent.slots >= 0
        own = there[:, rank] if self.sent.ranks is None else there & (self.sent.ranks == rank)
        return int(there.sum() - own.sum())  # host sync: for measurements

    def _out(self, tokens: Tensor, scaling_mode: str, pitch: int, exchange: Exchange) -> Steps:
        slots, ranks, _ = self.sent

        def write(addresses: list[int]) -> None:
            torch.ops.mxep.p2p_scatter_rows(tokens, slots, ranks, addresses, pitch, scaling_mode)

        with exchange:
            exchange.hold(tokens, slots, *([] if ranks is None else [ranks]))
            exchange.put(0, self.transport.rank * self.region * pitch, write)
            yield
            exchange.wait(1)
        return self._received(exchange, tokens, pitch, scaling_mode)

    def _copy_out(self, tokens: Tensor, scaling_mode: str) -> Steps:
        pitch, world = _pitch(tokens, scaling_mode), self.transport.world
        rows = torch.ops.mxep.quantize_packed(tokens, scaling_mode) if scaling_mode else tokens
        like = tokens.new_empty((0, tokens.shape[1]))
        with self._open(_OUT, pitch) as exchange:
            exchange.scatter_copy(0, self.transport.rank * self.region * pitch, [rows] * world)
            del rows, tokens
            yield
            exchange.wait(1)
        return self._received(exchange, like, pitch, scaling_mode)

    def _push_home(self, placed: Tensor, scaling_mode: str, earlier: PartialSums | None) -> Steps:
        slots, sums = self.row_slots, _earlier_sums(earlier)

        def write(addresses: list[int]) -> None:
            torch.ops.mxep.p2p_reduce_rows(placed, slots, self.region, addresses, pitch, scaling_mode, *sums)

        pitch = _pitch(placed, scaling_mode)
        with self._open(_HOME, pitch) as exchange:
            exchange.hold(placed, slots, *(part for part in sums if part is not None))
            exchange.put(0, self.transport.rank * self.region * pitch, write)
            added = yield
            exchange.wait(1)
        return self._added_up(exchange, placed, pitch, scaling_mode, added)

    def _copy_home(self, placed: Tensor, scaling_mode: str, earlier: PartialSums | None) -> Steps:
        pitch, world = _pitch(placed, scaling_mode), self.transport.world
        rows = torch.empty((world * self.region, pitch), dtype=torch.uint8, device=placed.device)  # rows without a sum stay uninitialised
        addresses = [rows.data_ptr() + rank * self.region * pitch for rank in range(world)]
        torch.ops.mxep.p2p_reduce_rows(placed, self.row_slots, self.region, addresses, pitch, scaling_mode, *_earlier_sums(earlier))
        with self._open(_HOME, pitch) as exchange:
            exchange.scatter_copy(0, self.transport.rank * self.region * pitch, rows.chunk(world))
            like = placed.new_empty((0, placed.shape[1]))  # of the tensors that are deleted here
            del rows, placed, earlier
            added = yield
            exchange.wait(1)
        return self._added_up(exchange, like, pitch, scaling_mode, added)

    def _added_up(self, exchange: Exchange, like: Tensor, pitch: int, scaling_mode: str, added: Tensor | None) -> Tensor:
        rows = self._received(exchange, like, pitch, scaling_mode)
        return torch.ops.mxep.reduce_rows(dequantize_data(rows), self.sent.home, added)

    def _open(self, kind: int, pitch: int) -> Exchange:
        size = self.transport.world * self.region * pitch
        return self.transport.open((kind, self.region, pitch), (size,), [], in_graphs=True)

    def _received(self, exchange: Exchange, like: Tensor, pitch: int, scaling_mode: str) -> Tensor:
        """The rows received in all regions, in the width and dtype of `like`."""
        count, width = self.transport.world * self.region, like.shape[1]
        rows = exchange.buffers[0][: count * pitch].view(count, pitch)
        if scaling_mode:
            return from_records(rows, width, like.dtype)
        return rows[:, : width * like.element_size()].view(like.dtype).contiguous()  # a copy where rows end off `_ROW_BYTES` alone


class _Layout(NamedTuple):
    """What determines the expert rows, besides all ranks' top-k: tokens T of this rank, experts L, alignment, and the number of rows P."""

    tokens: int
    experts: int
    alignment: int
    places: int


class SymmetricDispatcher(NamedTuple):
    """See `mxep.fused.dispatcher.TokenDispatcher`.

    Attributes:
        dispatch, combine: the wires.  offs: (L,) int32 END places of the experts.
        scores: (P,) float32, the score of each place, 0 in padding.
        places: (R, C) int32, R = W*S, of the choices of all ranks' tokens, -1 for a choice that is elsewhere.
        experts: (T, C) int64, the choices at home.
        chosen: (R, C) in `choices_dtype`, those of all ranks, -1 behind a rank's tokens.  bits: (R, C) int32, of their scores.
            Both are for backward alone, and empty where none follows.
        tokens: of all ranks.  expected_rows: see `TokenDispatcher.expected_rows`.
    """

    dispatch: SymmetricRowExchange
    combine: SymmetricRowExchange
    offs: Tensor
    scores: Tensor
    places: Tensor
    experts: Tensor
    chosen: Tensor
    bits: Tensor
    layout: _Layout
    tokens: int
    expected_rows: int | None

    def for_backward(self) -> tuple[SymmetricDispatcher, tuple[Tensor | None, ...]]:
        """The choices and their scores, of which all else is made again: what stands in all places that there can be is large.

        And how many places there are, as the size of a tensor without values: where a forward runs again (activation checkpointing), what
        it saves is taken and this dispatcher is not, and where its places were counted there may be others.
        """
        none = self.offs.new_empty(0)
        bare = [
            exchange._replace(sent=SymmetricSendIndex(none, None, none), row_map=none, row_slots=none)
            for exchange in (self.dispatch, self.combine)
        ]
        return self._replace(
            dispatch=bare[0], combine=bare[1], offs=none, scores=none, places=none, experts=none, chosen=none, bits=none
        ), (self.chosen, self.bits, self.bits.new_empty(0, self.layout.places))

    def refilled(self, tensors: tuple[Tensor, ...]) -> SymmetricDispatcher:
        (chosen, bits, places), transport = tensors, self.dispatch.transport
        layout = self.layout._replace(places=places.shape[1])
        most = chosen.shape[0] // transport.world
        experts = chosen[transport.rank * most :][: layout.tokens].long()
        bare = {exchange.mode: exchange for exchange in (self.dispatch, self.combine)}
        exchanges = {
            mode: exchange._replace(sent=send_index(mode, experts, layout.experts, transport.world, most))
            for mode, exchange in bare.items()
        }
        exchanges, placed, scores = _index_expert_rows(exchanges, torch.cat((chosen.int(), bits), 1), layout, transport)
        dispatch, combine = exchanges[self.dispatch.mode], exchanges[self.combine.mode]
        return SymmetricDispatcher(
            dispatch, combine, placed.offs, scores, placed.places, experts, chosen, bits, layout, self.tokens, self.expected_rows
        )

    def start_scores_to_tokens(self, d_scores: Tensor) -> Callable[[], Tensor]:
        return _Arriving(self._scores_to_tokens(d_scores))

    def _scores_to_tokens(self, d_scores: Tensor) -> Steps:
        transport, (R, C) = self.dispatch.transport, self.places.shape
        block = R // transport.world * C * d_scores.element_size()
        rows = scores_of_choices(self.places, d_scores)  # (R, C)
        with transport.open((_SCORES, block), (transport.world * block,), [], in_graphs=True) as exchange:
            exchange.scatter_copy(0, transport.rank * block, rows.chunk(transport.world))
            yield
            exchange.wait(1)
        homes = home_lines(self.experts, self.layout.experts, R // transport.world)
        return exchange.buffers[0][: R * C * d_scores.element_size()].view(d_scores.dtype).view(R, C).gather(0, homes)


def _pitch(rows: Tensor, scaling_mode: str) -> int:
    """Bytes from row to row where rows (N, D) are received."""
    return record_bytes(rows.shape[1]) if scaling_mode else round_up(rows.shape[1] * rows.element_size(), _ROW_BYTES)


def _earlier_sums(earlier: PartialSums | None) -> tuple[Tensor | None, ...]:
    """What `p2p_reduce_rows` takes of sums of earlier chunks."""
    return () if earlier is None else (earlier.window, earlier.sums, earlier.carry)


def _tables(exchange: Exchange, table: Tensor, transport: SymmetricTransport) -> Steps:
    """All-gather of the ranks' tables (S, 2C) -> (W*S, 2C)."""
    block = table.numel() * table.element_size()
    with exchange:
        exchange.scatter_copy(0, transport.rank * block, [table] * transport.world)
        yield
        exchange.wait(1)
    received = exchange.buffers[0][: transport.world * block].view(table.dtype)
    return received.view(transport.world * table.shape[0], table.shape[1])


def _agreed(metadata: list[list[int]], choices: int) -> list[int]:
    """The number of tokens of every rank, from all ranks' metadata; ValueError on every rank unless the ranks agree."""
    check_numbers([numbers for *numbers, _ in metadata])
    counts = [count for *_, count in metadata]
    if len(counts) * max(counts) * choices >= 2**31:
        raise ValueError(f"{WHERE}: {counts} tokens with {choices} choices each, want fewer than 2^31 choices; give fewer tokens at a time")
    return counts


def _index_expert_rows(
    exchanges: dict[str, SymmetricRowExchange], table: Tensor, layout: _Layout, transport: SymmetricTransport, sync_row_count: bool = False
) -> tuple[dict[str, SymmetricRowExchange], ExpertRowIndex, Tensor]:
    """The exchanges of a table (R, 2C) at the experts, their places, and the score of each (P,); P is what came if `sync_row_count`."""
    *found, row_map, scores = torch.ops.mxep.index_topk_table(table, transport.rank, layout.experts, layout.alignment, layout.places)
    placed = ExpertRowIndex(*found)
    if sync_row_count:
        came = int(placed.offs[-1])  # host sync: asked for
        placed, row_map, scores = placed._replace(choices=placed.choices[:came]), row_map[:came], scores[:came]
    kept, held = min(placed.places.shape[1], layout.experts), dict[str, SymmetricRowExchange]()
    for mode, exchange in exchanges.items():
        wire_map, row_slots = recv_index_of_regions(mode, placed, row_map, kept)
        held[mode] = exchange._replace(row_map=wire_map, row_slots=row_slots)
    return held, placed, transport.or_nan(scores)


def plan(
    spec: DispatchSpec,
    experts: Tensor,
    scores: Tensor,
    tokens: Tensor,
    scaling_mode: str,
    group_name: str,
    saves: bool = True,
) -> tuple[SymmetricDispatcher, Tensor]:
    """See `mxep.fused.make_dispatcher.make_dispatcher`."""
    transport = cast(SymmetricTransport, transport_of(group_name, tokens.device))
    transport.check_device(tokens)
    world, (T, C), L = transport.world, experts.shape, spec.experts // transport.world
    if spec.sync_row_count and transport.captures():
        raise ValueError(f"{WHERE}: RuntimeEPConfig.cpu_sync_on_runtime inside a CUDA graph capture, where no host waits; set it to False")
    kept, pitch, counts = min(C, L), _pitch(tokens, scaling_mode), list[int]()

    def sizes(most: int) -> tuple[int, int]:
        table_bytes = 2 * C * torch.int32.itemsize
        return world * most * table_bytes, world * rows_of_region(spec.modes[0], most, kept) * pitch

    def revise(metadata: list[list[int]]) -> tuple[int, int] | None:
        counts[:] = _agreed(metadata, C)
        return None if len(set(counts)) == 1 else sizes(max(counts))

    # The guess: all ranks have as many tokens as this one.
    opened = transport.open_each((_PLAN,), sizes(T), [*spec.numbers, T], in_graphs=True, revise=revise)
    most = max(counts)
    num_places = round_up(sum(counts) * kept + L * spec.alignment, spec.alignment)
    try:
        table = torch.ops.mxep.pack_topk(experts, scores, most)
        tables = _Arriving(_tables(opened[0], table, transport))

        def exchange(mode: str) -> SymmetricRowExchange:
            none = experts.new_empty(0)
            return SymmetricRowExchange(
                transport, mode, rows_of_region(mode, most, kept), send_index(mode, experts, L, world, most), none, none
            )

        exchanges = {mode: exchange(mode) for mode in dict.fromkeys(spec.modes)}
        arriving = exchanges[spec.modes[0]].push_to_experts(tokens, scaling_mode, opened[1])
    except BaseException as error:
        transport.abort(error)  # the other ranks wait for both exchanges
        raise
    table, layout = tables(), _Layout(T, L, spec.alignment, num_places)
    exchanges, placed, of_places = _index_expert_rows(exchanges, table, layout, transport, spec.sync_row_count)
    dispatch, combine = (exchanges[mode] for mode in spec.modes)
    expected_rows = None if spec.sync_row_count else -(-sum(counts) * C // world)
    chosen = bits = experts.new_empty(0)
    if saves:
        # The table's memory is leased, and four times as large as choices in the dtype that just holds them.
        chosen, bits = table[:, :C].to(choices_dtype(spec.experts)), table[:, C:].contiguous()
        # This rank's own as they are here: in a table that did not come in time there is no expert, and no index may hang on that.
        chosen[transport.rank * most :][:T].copy_(experts)
    layout = layout._replace(places=of_places.shape[0])
    dispatcher = SymmetricDispatcher(
        dispatch, combine, placed.offs, of_places, placed.places, experts, chosen, bits, layout, sum(counts), expected_rows
    )
    return dispatcher, arriving()

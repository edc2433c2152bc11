"""The road of the fused layer over symmetric memory (ep/road.py): kernels write rows and sums where they are read, on whatever rank.

Every rank receives in regions (ep/regions.py), so the host knows sizes and nobody knows counts before rows travel: capacities are the
worst case, P = round_up(sum of all T * min(C, L) + L * alignment) places among them.
beside the work   rows leave while choices are placed; backward's sums and scores' gradients go home beside wgrad, by copy engines where
                  most of a region is filled
ownership         what is received stays where it landed, its slab leased as long as a tensor on it lives (`mxep.comm.pool`)
Host syncs: none; the host waits for the other ranks' hosts once for each exchange, but the tables of choices and the tokens leave in one
meeting (two where ranks have other numbers of tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.comm.session import Session
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep.dispatch import from_records
from mxep.ep.regions import Sent, held_regions, home_lines, rows_of_region, sent_regions
from mxep.ep.road import WHERE, Begun, Facts, check_numbers, choices_dtype
from mxep.ep.routes import Placed, scores_of_choices
from mxep.mx.tensor import dequantize_data
from mxep.shapes import record_bytes, round_up

_PLAN, _OUT, _HOME, _SCORES = 4, 6, 7, 8  # what a session does, the first fact on the board
_ROW_BYTES = 16  # a row starts at a multiple of it
_FILLED = 0.5  # from that share on whole regions are copied
Steps = Generator[None, Tensor | None, Tensor]  # sends up to its yield, then takes the last term of the sums, if any, and receives


class _Arriving:
    """What was sent and has not been waited for; an exchange that nobody waits for is a failure of this rank."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        next(steps)

    def __call__(self, added: Tensor | None = None) -> Tensor:
        try:
            self._steps.send(added)
        except StopIteration as end:
            return end.value
        raise AssertionError("an exchange has two steps")


class SymmetricWire(NamedTuple):
    """One wire: its rows at home and at the experts, as in ep/regions.py.

    Attributes:
        mode: of ep/routes.py.  region: rows that a rank may send to another.
        sent: at home.  row_map, held_slots: at the experts.
    """

    transport: SymmetricTransport
    mode: str
    region: int
    sent: Sent
    row_map: Tensor
    held_slots: Tensor

    def out(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        return self.send_out(tokens, scaling_mode)()

    def home(self, placed: Tensor, scaling_mode: str, added: Tensor | None = None, begun: Begun | None = None) -> Tensor:
        return _Arriving(self._push_home(placed, scaling_mode, begun))(added)

    def send_out(self, tokens: Tensor, scaling_mode: str, session: Session | None = None) -> _Arriving:
        """`out` in two steps, in an exchange of its own or in one that has begun."""
        pitch = _pitch(tokens, scaling_mode)
        return _Arriving(self._out(tokens.contiguous(), scaling_mode, pitch, session or self._open(_OUT, pitch)))

    def send_out_again(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """Every token to every rank where copy engines can take them: they leave the multiprocessors to what follows, kernels do not."""
        if self._copies(tokens, scaling_mode):
            return _Arriving(self._copy_out(tokens.contiguous(), scaling_mode))
        return self.send_out(tokens, scaling_mode)

    def send_home(self, placed: Tensor, scaling_mode: str, begun: Begun | None = None) -> Callable[[Tensor | None], Tensor]:
        """Added up here first where copy engines can take the sums, as in `send_out_again`."""
        return _Arriving((self._copy_home if self._copies(placed, scaling_mode) else self._push_home)(placed, scaling_mode, begun))

    def _copies(self, rows: Tensor, scaling_mode: str) -> bool:
        """Whether whole regions travel: rows are as far apart there as here, and most of a region's lines hold one that is wanted.

        A token has a choice on a rank with odds of about 1 - (1 - 1/W)^C.
        """
        filled = 1 - (1 - 1 / self.transport.world) ** self.held_slots.shape[1]
        whole_rows = bool(scaling_mode) or rows.shape[1] * rows.element_size() % _ROW_BYTES == 0
        return self.mode != "all_to_all" and whole_rows and filled >= _FILLED

    def leaving(self, way: str) -> int:
        rank, here = self.transport.rank, self.held_slots.view(self.transport.world, -1, self.held_slots.shape[1])
        if way == "home":
            return int((here >= 0).any(2).sum(1).sum() - (here[rank] >= 0).any(1).sum())  # host sync: for measurements
        there = self.sent.slots >= 0
        own = there[:, rank] if self.sent.ranks is None else there & (self.sent.ranks == rank)
        return int(there.sum() - own.sum())  # host sync: for measurements

    def _out(self, tokens: Tensor, scaling_mode: str, pitch: int, session: Session) -> Steps:
        slots, ranks, _ = self.sent

        def write(addresses: list[int]) -> None:
            torch.ops.mxep.push_rows(tokens, slots, ranks, addresses, pitch, scaling_mode)

        with session:
            session.hold(tokens, slots, *([] if ranks is None else [ranks]))
            session.push(0, self.transport.rank * self.region * pitch, write)
            yield
            session.arrive(1)
        return self._received(session, tokens, pitch, scaling_mode)

    def _copy_out(self, tokens: Tensor, scaling_mode: str) -> Steps:
        pitch, world = _pitch(tokens, scaling_mode), self.transport.world
        rows = torch.ops.mxep.quantize_packed(tokens, scaling_mode) if scaling_mode else tokens
        like = tokens.new_empty((0, tokens.shape[1]))
        with self._open(_OUT, pitch) as session:
            session.spread(0, self.transport.rank * self.region * pitch, [rows] * world)
            del rows, tokens
            yield
            session.arrive(1)
        return self._received(session, like, pitch, scaling_mode)

    def _push_home(self, placed: Tensor, scaling_mode: str, begun: Begun | None) -> Steps:
        slots, earlier = self.held_slots, _behind(begun)

        def write(addresses: list[int]) -> None:
            torch.ops.mxep.push_sums(placed, slots, self.region, addresses, pitch, scaling_mode, *earlier)

        pitch = _pitch(placed, scaling_mode)
        with self._open(_HOME, pitch) as session:
            session.hold(placed, slots, *(part for part in earlier if part is not None))
            session.push(0, self.transport.rank * self.region * pitch, write)
            added = yield
            session.arrive(1)
        return self._added_up(session, placed, pitch, scaling_mode, added)

    def _copy_home(self, placed: Tensor, scaling_mode: str, begun: Begun | None) -> Steps:
        pitch, world = _pitch(placed, scaling_mode), self.transport.world
        rows = torch.empty((world * self.region, pitch), dtype=torch.uint8, device=placed.device)  # lines without a sum stay as they are
        addresses = [rows.data_ptr() + rank * self.region * pitch for rank in range(world)]
        torch.ops.mxep.push_sums(placed, self.held_slots, self.region, addresses, pitch, scaling_mode, *_behind(begun))
        with self._open(_HOME, pitch) as session:
            session.spread(0, self.transport.rank * self.region * pitch, rows.chunk(world))
            like = placed.new_empty((0, placed.shape[1]))  # of what is freed here
            del rows, placed, begun
            added = yield
            session.arrive(1)
        return self._added_up(session, like, pitch, scaling_mode, added)

    def _added_up(self, session: Session, like: Tensor, pitch: int, scaling_mode: str, added: Tensor | None) -> Tensor:
        rows = self._received(session, like, pitch, scaling_mode)
        return torch.ops.mxep.sum_rows(dequantize_data(rows), self.sent.home, added)

    def _open(self, kind: int, pitch: int) -> Session:
        size = self.transport.world * self.region * pitch
        return self.transport.open((kind, self.region, pitch), (size,), [], in_graphs=True)

    def _received(self, session: Session, like: Tensor, pitch: int, scaling_mode: str) -> Tensor:
        """What landed in all regions, rows as those of `like`."""
        count, width = self.transport.world * self.region, like.shape[1]
        rows = session.buffers[0][: count * pitch].view(count, pitch)
        if scaling_mode:
            return from_records(rows, width, like.dtype)
        return rows[:, : width * like.element_size()].view(like.dtype).contiguous()  # a copy where rows end off `_ROW_BYTES` alone


class _Layout(NamedTuple):
    """What places hang on beside the choices of all ranks: tokens T of this one, experts L, alignment, and how many places, P."""

    tokens: int
    experts: int
    alignment: int
    places: int


class SymmetricRoad(NamedTuple):
    """See `mxep.ep.road.Road`.

    Attributes:
        dispatch, combine: the wires.  offs: (L,) int32 END places of the experts.
        scores: (P,) float32, the score of each place, 0 in padding.
        places: (R, C) int32, R = W*S, of the choices of all ranks' tokens, -1 for a choice that is elsewhere.
        experts: (T, C) int64, the choices at home.
        chosen: (R, C) in `choices_dtype`, those of all ranks, -1 behind a rank's tokens.  bits: (R, C) int32, of their scores.
            Both are for backward alone, and empty where none follows.
        tokens: of all ranks.  share: see `Road.share`.
    """

    dispatch: SymmetricWire
    combine: SymmetricWire
    offs: Tensor
    scores: Tensor
    places: Tensor
    experts: Tensor
    chosen: Tensor
    bits: Tensor
    layout: _Layout
    tokens: int
    share: int | None

    def for_backward(self) -> tuple[SymmetricRoad, tuple[Tensor | None, ...]]:
        """The choices and their scores, of which all else is made again: what stands in all places that there can be is large.

        And how many places there are, as the size of a tensor without values: where a forward runs again (activation checkpointing), what
        it saves is taken and this road is not, and where its places were counted there may be others.
        """
        none = self.offs.new_empty(0)
        bare = [wire._replace(sent=Sent(none, None, none), row_map=none, held_slots=none) for wire in (self.dispatch, self.combine)]
        return self._replace(
            dispatch=bare[0], combine=bare[1], offs=none, scores=none, places=none, experts=none, chosen=none, bits=none
        ), (self.chosen, self.bits, self.bits.new_empty(0, self.layout.places))

    def refilled(self, tensors: tuple[Tensor, ...]) -> SymmetricRoad:
        (chosen, bits, places), transport = tensors, self.dispatch.transport
        layout = self.layout._replace(places=places.shape[1])
        most = chosen.shape[0] // transport.world
        experts = chosen[transport.rank * most :][: layout.tokens].long()
        bare = {wire.mode: wire for wire in (self.dispatch, self.combine)}
        wires = {
            mode: wire._replace(sent=sent_regions(mode, experts, layout.experts, transport.world, most)) for mode, wire in bare.items()
        }
        wires, placed, scores = _hold(wires, torch.cat((chosen.int(), bits), 1), layout, transport)
        dispatch, combine = wires[self.dispatch.mode], wires[self.combine.mode]
        return SymmetricRoad(dispatch, combine, placed.offs, scores, placed.places, experts, chosen, bits, layout, self.tokens, self.share)

    def send_scores_home(self, d_scores: Tensor) -> Callable[[], Tensor]:
        return _Arriving(self._scores_home(d_scores))

    def _scores_home(self, d_scores: Tensor) -> Steps:
        transport, (R, C) = self.dispatch.transport, self.places.shape
        block = R // transport.world * C * d_scores.element_size()
        rows = scores_of_choices(self.places, d_scores)  # (R, C)
        with transport.open((_SCORES, block), (transport.world * block,), [], in_graphs=True) as session:
            session.spread(0, transport.rank * block, rows.chunk(transport.world))
            yield
            session.arrive(1)
        homes = home_lines(self.experts, self.layout.experts, R // transport.world)
        return session.buffers[0][: R * C * d_scores.element_size()].view(d_scores.dtype).view(R, C).gather(0, homes)


def _pitch(rows: Tensor, scaling_mode: str) -> int:
    """Bytes from row to row where rows (N, D) are received."""
    return record_bytes(rows.shape[1]) if scaling_mode else round_up(rows.shape[1] * rows.element_size(), _ROW_BYTES)


def _behind(begun: Begun | None) -> tuple[Tensor | None, ...]:
    """What `push_sums` takes of sums that windows before have begun."""
    return () if begun is None else (begun.window, begun.sums, begun.carry)


def _tables(session: Session, table: Tensor, transport: SymmetricTransport) -> Steps:
    """This rank's table (S, 2C) to all -> those of all (W*S, 2C)."""
    block = table.numel() * table.element_size()
    with session:
        session.spread(0, transport.rank * block, [table] * transport.world)
        yield
        session.arrive(1)
    received = session.buffers[0][: transport.world * block].view(table.dtype)
    return received.view(transport.world * table.shape[0], table.shape[1])


def _agreed(shown: list[list[int]], choices: int) -> list[int]:
    """How many tokens every rank has, of what all have shown; ValueError on every rank unless they fit each other."""
    check_numbers([numbers for *numbers, _ in shown])
    counts = [count for *_, count in shown]
    if len(counts) * max(counts) * choices >= 2**31:
        raise ValueError(f"{WHERE}: {counts} tokens with {choices} choices each, want fewer than 2^31 choices; give fewer tokens at a time")
    return counts


def _hold(
    wires: dict[str, SymmetricWire], table: Tensor, layout: _Layout, transport: SymmetricTransport, counted: bool = False
) -> tuple[dict[str, SymmetricWire], Placed, Tensor]:
    """The wires of a table (R, 2C) at the experts, their places, and the score of each (P,); P is what came if that is counted."""
    *found, row_map, scores = torch.ops.mxep.place_table(table, transport.rank, layout.experts, layout.alignment, layout.places)
    placed = Placed(*found)
    if counted:
        came = int(placed.offs[-1])  # host sync: asked for
        placed, row_map, scores = placed._replace(choices=placed.choices[:came]), row_map[:came], scores[:came]
    kept, held = min(placed.places.shape[1], layout.experts), dict[str, SymmetricWire]()
    for mode, wire in wires.items():
        wire_map, held_slots = held_regions(mode, placed, row_map, kept)
        held[mode] = wire._replace(row_map=wire_map, held_slots=held_slots)
    return held, placed, transport.or_nan(scores)


def plan(
    facts: Facts, experts: Tensor, scores: Tensor, tokens: Tensor, scaling_mode: str, transport: SymmetricTransport, saves: bool = True
) -> tuple[SymmetricRoad, Tensor]:
    """See `mxep.ep.plan_road.plan_road`."""
    world, (T, C), L = transport.world, experts.shape, facts.experts // transport.world
    if facts.counted and transport.captures():
        raise ValueError(f"{WHERE}: RuntimeEPConfig.cpu_sync_on_runtime inside a CUDA graph capture, where no host waits; set it to False")
    kept, pitch, counts = min(C, L), _pitch(tokens, scaling_mode), list[int]()

    def sizes(most: int) -> tuple[int, int]:
        table_bytes = 2 * C * torch.int32.itemsize
        return world * most * table_bytes, world * rows_of_region(facts.modes[0], most, kept) * pitch

    def revise(shown: list[list[int]]) -> tuple[int, int] | None:
        counts[:] = _agreed(shown, C)
        return None if len(set(counts)) == 1 else sizes(max(counts))

    # The guess is that all ranks have as many tokens as this one.
    meeting = transport.open_each((_PLAN,), sizes(T), [*facts.numbers, T], in_graphs=True, revise=revise)
    most = max(counts)
    num_places = round_up(sum(counts) * kept + L * facts.alignment, facts.alignment)
    try:
        table = torch.ops.mxep.pack_choices(experts, scores, most)
        tables = _Arriving(_tables(meeting[0], table, transport))

        def wire(mode: str) -> SymmetricWire:
            none = experts.new_empty(0)
            return SymmetricWire(transport, mode, rows_of_region(mode, most, kept), sent_regions(mode, experts, L, world, most), none, none)

        wires = {mode: wire(mode) for mode in dict.fromkeys(facts.modes)}
        arriving = wires[facts.modes[0]].send_out(tokens, scaling_mode, meeting[1])
    except BaseException as error:
        transport.abort(error)  # the others wait for both
        raise
    table, layout = tables(), _Layout(T, L, facts.alignment, num_places)
    wires, placed, of_places = _hold(wires, table, layout, transport, facts.counted)
    dispatch, combine = (wires[mode] for mode in facts.modes)
    share = None if facts.counted else -(-sum(counts) * C // world)
    chosen = bits = experts.new_empty(0)
    if saves:
        # The table's memory is leased, and four times as large as choices in the dtype that just holds them.
        chosen, bits = table[:, :C].to(choices_dtype(facts.experts)), table[:, C:].contiguous()
        # This rank's own as they are here: in a table that did not come in time there is no expert, and no index may hang on that.
        chosen[transport.rank * most :][:T].copy_(experts)
    layout = layout._replace(places=of_places.shape[0])
    road = SymmetricRoad(dispatch, combine, placed.offs, of_places, placed.places, experts, chosen, bits, layout, sum(counts), share)
    return road, arriving()

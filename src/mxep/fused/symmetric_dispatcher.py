"""The token dispatcher over symmetric memory: kernels write rows and sums into the memory of the rank that reads them.

Every rank receives in regions of worst-case size, so the host needs no row counts before rows are sent.  There are
P = round_up(sum of all T * min(C, L) + L * alignment) expert rows.
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

Sums are sent in the same regions.  The top-k ids and scores of every token go to every rank, which takes those of its experts.  No index
points to a row that was not sent.

Two ranks of two experts.  On rank 0 token 0 has experts 0 and 3, token 1 has experts 2 and 3.  Rank 1 has three tokens, so S = 3:

>>> experts, scores = torch.tensor([[0, 3], [2, 3]]), torch.full((2, 2), 0.5)
>>> send_index("rank_dedup", experts, 2, 2, 3).slots.tolist()
[[0, 0], [-1, 1]]
>>> sent = send_index("all_to_all", experts, 2, 2, 3)
>>> sent.slots.tolist(), sent.ranks.tolist(), sent.return_slots.tolist()
([[0, 0], [2, 3]], [[0, 1], [1, 1]], [[0, 6], [8, 9]])

On rank 1, whose experts are 2 and 3, and if its own tokens have no expert, token 0's expert 3 and token 1's experts 2 and 3 have the
expert rows 4, 0 and 5, each group padded to 4:

>>> table = torch.ops.mxep.pack_topk(experts, scores, 3)
>>> table = torch.cat((table, torch.full_like(table, -1)))
>>> index = ExpertRowIndex(*torch.ops.mxep.index_topk(table[:, :2], table[:, 2:].view(torch.float32), 1, 2, 4, 8))
>>> recv_index("rank_dedup", index, 2).row_map.tolist()
[1, -1, -1, -1, 0, 1, -1, -1]
>>> received = recv_index("all_to_all", index, 2)
>>> received.row_map.tolist(), received.slots.flatten().tolist()
([2, -1, -1, -1, 0, 3, -1, -1], [4, -1, 0, 5, -1, -1, -1, -1, -1, -1, -1, -1])
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

import mxep.operators  # noqa: F401
from mxep.comm import transport_of
from mxep.comm.exchange import Exchange
from mxep.comm.symmetric import SymmetricTransport
from mxep.fused.dispatcher import WHERE, DispatchSpec, ExpertRowIndex, PartialSums, RecvIndex, check_numbers, pick
from mxep.mx.tensor import dequantize_data, from_records
from mxep.shapes import record_bytes, round_up

_PLAN, _TO_EXPERTS, _TO_TOKENS, _SCORES = 4, 6, 7, 8  # kinds of exchanges, which every rank compares
_ROW_BYTES = 16  # a row starts at a multiple of it
_FILLED = 0.5  # from that share on whole regions are copied
Steps = Generator[None, Tensor | None, Tensor]  # sends up to its yield, then takes the last term of the sums, if any, and receives


class _Started:
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


# ---------------------------------------------------------------- index arithmetic


class SymmetricSendIndex(NamedTuple):
    """The rows of an exchange on the rank of the tokens.

    Attributes:
        slots: (T, W) or, in all_to_all, (T, C) int32, the row of this rank's region that a token goes to, -1 for none.
        ranks: (T, C) int32, on which rank, in all_to_all; None: column r is rank r's.
        return_slots: like slots, the row of all regions in which its sum returns, -1 for none.
    """

    slots: Tensor
    ranks: Tensor | None
    return_slots: Tensor


def rows_of_region(mode: str, most: int, per_token: int) -> int:
    """The number of rows of a region; most: S, per_token: K."""
    return most * per_token if mode == "all_to_all" else most


def send_index(mode: str, experts: Tensor, num_local_experts: int, world: int, most: int) -> SymmetricSendIndex:
    """The rows to which this rank sends its tokens, whose top-k ids are `experts` (T, C); most: S."""
    slots, return_slots, ranks = torch.ops.mxep.send_index(experts, mode, num_local_experts, world, most)
    return SymmetricSendIndex(slots, ranks if mode == "all_to_all" else None, return_slots)


def score_slots(experts: Tensor, num_local_experts: int, most: int) -> Tensor:
    """Where the rank of each expert (T, C) returns the gradient of its score: a place in the W regions of S rows of C scores; most: S.

    >>> score_slots(torch.tensor([[0, 3], [2, 3]]), 2, 3).tolist()
    [[0, 7], [8, 9]]
    """
    topk_ids = torch.arange(experts.numel(), device=experts.device).view_as(experts)
    return torch.div(experts, num_local_experts, rounding_mode="floor") * (most * experts.shape[1]) + topk_ids


def recv_index(mode: str, index: ExpertRowIndex, per_token: int) -> RecvIndex:
    """The rows of an exchange on the rank of the experts.

    Args:
        index: of the top-k ids of all ranks' tokens (R, C), R = W*S.
        per_token: K.

    Returns:
        row_map (P,) int32; slots (R, C) or, in all_to_all, (R*K, 1) int32.
    """
    expert_rows = index.expert_rows
    if mode != "all_to_all":
        return RecvIndex(index.row_map, expert_rows)
    R, here = expert_rows.shape[0], expert_rows >= 0
    number = here.cumsum(1, dtype=torch.int32) - 1
    slots = torch.full((R, per_token + 1), -1, dtype=torch.int32, device=expert_rows.device)  # the last one takes ids of other ranks
    slots = slots.scatter_(1, torch.where(here, number, per_token).long(), expert_rows)[:, :per_token]
    rows = torch.arange(R, device=expert_rows.device, dtype=torch.int32)[:, None] * per_token + number
    return RecvIndex(pick(index.topk_ids, rows.flatten()), slots.reshape(R * per_token, 1))


# ---------------------------------------------------------------- exchanges


class SymmetricRowExchange(NamedTuple):
    """The rows of an exchange on both sides.

    Attributes:
        mode: see `mxep.fused.dispatcher`.  region: the number of rows that a rank may send to another.
        sent: where this rank's tokens go.  row_map, row_slots: `RecvIndex` of this rank's experts.
    """

    transport: SymmetricTransport
    mode: str
    region: int
    sent: SymmetricSendIndex
    row_map: Tensor
    row_slots: Tensor

    def to_experts(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        return self.write_to_experts(tokens, scaling_mode)()

    def write_to_experts(self, tokens: Tensor, scaling_mode: str, opened: Exchange | None = None) -> _Started:
        """`to_experts` by a kernel, in an exchange of its own or in one that is open."""
        (slots, ranks, _), tokens, pitch = self.sent, tokens.contiguous(), _pitch(tokens, scaling_mode)

        def write(addresses: list[int]) -> None:
            torch.ops.mxep.p2p_scatter_rows(tokens, slots, ranks, addresses, pitch, scaling_mode)

        def send(exchange: Exchange) -> None:
            exchange.hold(tokens, slots, *([] if ranks is None else [ranks]))
            exchange.put(0, self.transport.rank * self.region * pitch, write)

        return self._start(_TO_EXPERTS, tokens, scaling_mode, send, opened)

    def start_to_experts(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """Sends every token to every rank if copy engines can: the multiprocessors are then free for the next kernels."""
        if not self._copies(tokens, scaling_mode):
            return self.write_to_experts(tokens, scaling_mode)
        rows = torch.ops.mxep.quantize_packed(tokens, scaling_mode) if scaling_mode else tokens.contiguous()
        return self._copy(_TO_EXPERTS, tokens, scaling_mode, [rows] * self.transport.world)

    def to_tokens(self, rows: Tensor, scaling_mode: str, earlier: PartialSums | None = None) -> Tensor:
        return self._write_to_tokens(rows, scaling_mode, earlier)()

    def _write_to_tokens(self, rows: Tensor, scaling_mode: str, earlier: PartialSums | None) -> _Started:
        """`start_to_tokens` by a kernel."""
        slots, sums, pitch = self.row_slots, _earlier_sums(earlier), _pitch(rows, scaling_mode)

        def write(addresses: list[int]) -> None:
            torch.ops.mxep.p2p_reduce_rows(rows, slots, self.region, addresses, pitch, scaling_mode, *sums)

        def send(exchange: Exchange) -> None:
            exchange.hold(rows, slots, *(part for part in sums if part is not None))
            exchange.put(0, self.transport.rank * self.region * pitch, write)

        return self._start(_TO_TOKENS, rows, scaling_mode, send)

    def start_to_tokens(self, rows: Tensor, scaling_mode: str, earlier: PartialSums | None = None) -> Callable[[Tensor | None], Tensor]:
        """Sums on this rank first if copy engines can send the sums, as in `start_to_experts`."""
        if not self._copies(rows, scaling_mode):
            return self._write_to_tokens(rows, scaling_mode, earlier)
        pitch, world = _pitch(rows, scaling_mode), self.transport.world
        sums = torch.empty((world * self.region, pitch), dtype=torch.uint8, device=rows.device)  # rows without a sum stay uninitialised
        addresses = [sums.data_ptr() + rank * self.region * pitch for rank in range(world)]
        torch.ops.mxep.p2p_reduce_rows(rows, self.row_slots, self.region, addresses, pitch, scaling_mode, *_earlier_sums(earlier))
        return self._copy(_TO_TOKENS, rows, scaling_mode, sums.chunk(world))

    def _copies(self, rows: Tensor, scaling_mode: str) -> bool:
        """True if whole regions are copied: rows have the same pitch on both sides, and most rows of a region are needed.

        A token has an expert on a rank with a probability of about 1 - (1 - 1/W)^C.
        """
        filled = 1 - (1 - 1 / self.transport.world) ** self.row_slots.shape[1]
        whole_rows = bool(scaling_mode) or rows.shape[1] * rows.element_size() % _ROW_BYTES == 0
        return self.mode != "all_to_all" and whole_rows and filled >= _FILLED

    def _copy(self, kind: int, like: Tensor, scaling_mode: str, pieces: Sequence[Tensor]) -> _Started:
        """Sends contiguous pieces, one for each rank, by copy engines."""
        at = self.transport.rank * self.region * _pitch(like, scaling_mode)
        return self._start(kind, like, scaling_mode, lambda exchange: exchange.scatter_copy(0, at, pieces))

    def _start(
        self, kind: int, like: Tensor, scaling_mode: str, send: Callable[[Exchange], None], opened: Exchange | None = None
    ) -> _Started:
        """Sends by `send`; then the rows that this rank received, or their sums per token, in the width and dtype of `like`."""
        pitch, width, dtype = _pitch(like, scaling_mode), like.shape[1], like.dtype
        size = self.transport.world * self.region * pitch
        exchange = opened or self.transport.open((kind, self.region, pitch), (size,), [], in_graphs=True)
        return _Started(self._steps(exchange, kind, (pitch, width, dtype), scaling_mode, send))

    def _steps(
        self, exchange: Exchange, kind: int, form: tuple[int, int, torch.dtype], scaling_mode: str, send: Callable[[Exchange], None]
    ) -> Steps:
        (pitch, width, dtype), count = form, self.transport.world * self.region
        with exchange:
            send(exchange)
            del send  # and with it the tensors that are sent, once the exchange has ended
            added = yield
            exchange.wait(1)
        rows = exchange.buffers[0][: count * pitch].view(count, pitch)
        if scaling_mode:
            rows = from_records(rows, width, dtype)
        else:
            rows = rows[:, : width * dtype.itemsize].view(dtype).contiguous()  # a copy only where rows do not end at `_ROW_BYTES`
        return torch.ops.mxep.reduce_rows(dequantize_data(rows), self.sent.return_slots, added) if kind == _TO_TOKENS else rows

    def rows_off_rank(self, way: str) -> int:
        rank, here = self.transport.rank, self.row_slots.view(self.transport.world, -1, self.row_slots.shape[1])
        if way == "to_tokens":
            return int((here >= 0).any(2).sum(1).sum() - (here[rank] >= 0).any(1).sum())  # host sync: for measurements
        there = self.sent.slots >= 0
        own = there[:, rank] if self.sent.ranks is None else there & (self.sent.ranks == rank)
        return int(there.sum() - own.sum())  # host sync: for measurements


def _pitch(rows: Tensor, scaling_mode: str) -> int:
    """Bytes from row to row where rows (N, D) are received."""
    return record_bytes(rows.shape[1]) if scaling_mode else round_up(rows.shape[1] * rows.element_size(), _ROW_BYTES)


def _earlier_sums(earlier: PartialSums | None) -> tuple[Tensor | None, ...]:
    """The arguments of `p2p_reduce_rows` for sums of earlier chunks."""
    return () if earlier is None else (earlier.chunk, earlier.sums, earlier.carry)


def _all_to_all(exchange: Exchange, transport: SymmetricTransport, pieces: Sequence[Tensor]) -> Steps:
    """Pieces (S, N), one for each rank -> (W*S, N), rank 0's first, by copy engines."""
    (S, N), dtype, world = pieces[0].shape, pieces[0].dtype, transport.world
    block = S * N * dtype.itemsize
    with exchange:
        exchange.scatter_copy(0, transport.rank * block, pieces)
        del pieces
        yield
        exchange.wait(1)
    return exchange.buffers[0][: world * block].view(dtype).view(world * S, N)


# ---------------------------------------------------------------- the dispatcher


class _Layout(NamedTuple):
    """What determines the expert rows, besides all ranks' top-k ids.

    Attributes:
        tokens: T of this rank.  experts: L.  alignment: rows that every expert's group is padded to.  num_expert_rows: P.
    """

    tokens: int
    experts: int
    alignment: int
    num_expert_rows: int


class SymmetricDispatcher(NamedTuple):
    """See `mxep.fused.dispatcher.TokenDispatcher`.

    Attributes:
        dispatch, combine: the exchanges.  offs: (L,) int32 END offsets of the experts.
        scores: (P,) float32, the score of each expert row, 0 in padding.
        expert_rows: (R, C) int32, R = W*S, of the top-k ids of all ranks' tokens, -1 for an expert of another rank.
        experts: (T, C) int64, the top-k experts of this rank's tokens.
        topk_ids: (R, C), those of all ranks, -1 after a rank's tokens.  score_bits: (R, C) int32, of their scores.
            Both are for backward only, and empty without a backward.
        tokens: of all ranks.  expected_rows: see `TokenDispatcher.expected_rows`.
    """

    dispatch: SymmetricRowExchange
    combine: SymmetricRowExchange
    offs: Tensor
    scores: Tensor
    expert_rows: Tensor
    experts: Tensor
    topk_ids: Tensor
    score_bits: Tensor
    layout: _Layout
    tokens: int
    expected_rows: int | None

    def for_backward(self, reads_experts: bool) -> tuple[SymmetricDispatcher, tuple[Tensor | None, ...]]:
        """Saves the top-k ids (which give `experts`) and scores. `refilled` computes the rest again, since tensors of P rows are large.

        The number of expert rows is saved as the size of an empty tensor.  Under activation checkpointing the tensors that the second
        forward saves are used with the dispatcher of the first, and with `sync_row_count` their numbers of expert rows may differ.
        """
        none = cast(Tensor, None)
        dispatch, combine = (
            exchange._replace(sent=SymmetricSendIndex(none, None, none), row_map=none, row_slots=none)
            for exchange in (self.dispatch, self.combine)
        )
        bare = SymmetricDispatcher(dispatch, combine, none, none, none, none, none, none, *self[-3:])
        return bare, (self.topk_ids, self.score_bits, self.score_bits.new_empty(0, self.layout.num_expert_rows))

    def refilled(self, tensors: tuple[Tensor, ...]) -> SymmetricDispatcher:
        (topk_ids, score_bits, num_expert_rows), transport = tensors, self.dispatch.transport
        layout = self.layout._replace(num_expert_rows=num_expert_rows.shape[1])
        most = topk_ids.shape[0] // transport.world
        experts = topk_ids[transport.rank * most :][: layout.tokens].long()
        bare = {exchange.mode: exchange for exchange in (self.dispatch, self.combine)}
        exchanges = {
            mode: exchange._replace(sent=send_index(mode, experts, layout.experts, transport.world, most))
            for mode, exchange in bare.items()
        }
        exchanges, index = _index_expert_rows(exchanges, topk_ids.int(), score_bits.view(torch.float32), layout, transport)
        dispatch, combine = exchanges[self.dispatch.mode], exchanges[self.combine.mode]
        tables = experts, topk_ids, score_bits, layout
        return SymmetricDispatcher(dispatch, combine, index.offs, index.scores, index.expert_rows, *tables, self.tokens, self.expected_rows)

    def start_scores_to_tokens(self, d_scores: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Callable[[], Tensor]:
        transport = self.dispatch.transport
        rows = torch.ops.mxep.gather_or_zero(self.expert_rows, d_scores)  # (R, C)
        size = rows.numel() * rows.element_size()
        exchange = transport.open((_SCORES, size // transport.world), (size,), [], in_graphs=True)
        started = _Started(_all_to_all(exchange, transport, rows.chunk(transport.world)))
        return partial(self._scores_of_tokens, started, columns, dtype)

    def _scores_of_tokens(self, received: _Started, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = received()  # (R, C)
        slots = score_slots(self.experts, self.layout.experts, rows.shape[0] // self.dispatch.transport.world)
        return torch.ops.mxep.gather_or_zero(slots, rows.flatten(), columns, dtype)


def _index_expert_rows(
    exchanges: dict[str, SymmetricRowExchange],
    topk_ids: Tensor,
    scores: Tensor,
    layout: _Layout,
    transport: SymmetricTransport,
    sync_row_count: bool = False,
) -> tuple[dict[str, SymmetricRowExchange], ExpertRowIndex]:
    """The exchanges on the rank of the experts, and the index of all ranks' top-k ids (R, C).

    With `sync_row_count`, P is the number of rows received, padded.
    """
    sizes = layout.experts, layout.alignment, layout.num_expert_rows
    index = ExpertRowIndex(*torch.ops.mxep.index_topk(topk_ids, scores, transport.rank, *sizes))
    if sync_row_count:
        count = int(index.offs[-1])  # host sync: asked for
        index = ExpertRowIndex(*index[:2], *(of_expert_rows[:count] for of_expert_rows in index[2:]))
    per_token, indexed = min(index.expert_rows.shape[1], layout.experts), dict[str, SymmetricRowExchange]()
    for mode, exchange in exchanges.items():
        row_map, row_slots = recv_index(mode, index, per_token)
        indexed[mode] = exchange._replace(row_map=row_map, row_slots=row_slots)
    return indexed, index._replace(scores=transport.or_nan(index.scores))


# ---------------------------------------------------------------- planning


def _agreed(metadata: list[list[int]], top_k: int) -> list[int]:
    """The number of tokens of every rank, from all ranks' metadata; ValueError on every rank unless the ranks agree."""
    check_numbers([numbers for *numbers, _ in metadata])
    counts = [count for *_, count in metadata]
    if len(counts) * max(counts) * top_k >= 2**31:
        raise ValueError(f"{WHERE}: {counts} tokens with {top_k} experts each, want fewer than 2^31 pairs; give fewer tokens at a time")
    return counts


def plan(
    spec: DispatchSpec,
    experts: Tensor,
    scores: Tensor,
    tokens: Tensor,
    scaling_mode: str,
    group_name: str,
    saved_dtype: torch.dtype | None = None,
) -> tuple[SymmetricDispatcher, Tensor]:
    """See `mxep.fused.make_dispatcher.make_dispatcher`."""
    transport = cast(SymmetricTransport, transport_of(group_name, tokens.device))
    transport.check_device(tokens)
    world, (T, C), L = transport.world, experts.shape, spec.experts // transport.world
    if spec.sync_row_count and transport.captures():
        raise ValueError(f"{WHERE}: RuntimeEPConfig.cpu_sync_on_runtime inside a CUDA graph capture, where no host waits; set it to False")
    per_token, pitch, counts = min(C, L), _pitch(tokens, scaling_mode), list[int]()

    def sizes(most: int) -> tuple[int, int]:
        table_bytes = 2 * C * torch.int32.itemsize
        return world * most * table_bytes, world * rows_of_region(spec.modes[0], most, per_token) * pitch

    def revise(metadata: list[list[int]]) -> tuple[int, int] | None:
        counts[:] = _agreed(metadata, C)
        return None if len(set(counts)) == 1 else sizes(max(counts))

    # The guess: all ranks have as many tokens as this one.
    opened = transport.open_each((_PLAN,), sizes(T), [*spec.numbers, T], revise=revise)
    most = max(counts)
    layout = _Layout(T, L, spec.alignment, round_up(sum(counts) * per_token + L * spec.alignment, spec.alignment))
    try:
        started_table = _Started(_all_to_all(opened[0], transport, [torch.ops.mxep.pack_topk(experts, scores, most)] * world))
        none, exchanges = experts.new_empty(0), dict[str, SymmetricRowExchange]()
        for mode in dict.fromkeys(spec.modes):
            region, sent = rows_of_region(mode, most, per_token), send_index(mode, experts, L, world, most)
            exchanges[mode] = SymmetricRowExchange(transport, mode, region, sent, none, none)
        started_tokens = exchanges[spec.modes[0]].write_to_experts(tokens, scaling_mode, opened[1])
    except BaseException as error:
        transport.abort(error)  # the other ranks wait for both exchanges
        raise
    table = started_table()
    of_all = table[:, :C], table[:, C:].view(torch.float32)
    exchanges, index = _index_expert_rows(exchanges, *of_all, layout, transport, spec.sync_row_count)
    dispatch, combine = (exchanges[mode] for mode in spec.modes)
    expected_rows = None if spec.sync_row_count else -(-sum(counts) * C // world)
    topk_ids = score_bits = experts.new_empty(0)
    if saved_dtype is not None:
        # The table keeps a buffer in use, and is four times as large as ids of the smallest dtype.
        topk_ids, score_bits = table[:, :C].to(saved_dtype), table[:, C:].contiguous()
        # This rank's ids as they are here: a table that did not arrive in time has no valid ids, which must not become indices.
        topk_ids[transport.rank * most :][:T].copy_(experts)
    tables = experts, topk_ids, score_bits, layout._replace(num_expert_rows=index.scores.shape[0])
    dispatcher = SymmetricDispatcher(dispatch, combine, index.offs, index.scores, index.expert_rows, *tables, sum(counts), expected_rows)
    return dispatcher, started_tokens()

"""`ep_grouped_mm` over symmetric memory: exchange and GEMM overlap, one chunk of experts after the other, with the same bits.

forward   quantises and sends one chunk of experts after the other, copy engines overlapping with the quantiser.  A chunk's GEMMs start as
          soon as its rows have arrived, each during the last tiles of the previous one; their rows return during the next GEMM
backward  the same for the gradient and dgrad; wgrad runs while the last chunks' rows return
saves     what the collective form saves (`mxep.ep.ep_grouped_mm_collective`): the received bytes, where they arrived
host      reads the counts of all ranks: a host sync per forward if they are on a GPU, none if they are on the host

Every rank computes the position of every row from the counts of all ranks.  counts[s][e] rows go from rank s to expert e, the local
expert e % L of rank e // L.  Rows have three orders:

    source   on the sending rank, by expert
    arrival  on the receiving rank, by sender and then by expert: the order that an all-to-all delivers
    padded   on the receiving rank, by expert and then by sender, every expert's group padded: the order of the grouped GEMM

The rows from one sender to neighbouring experts are contiguous in source and in arrival order; those to one expert also in padded order.

    W = 2, L = 1, alignment 4, counts = [[3, 1], [2, 2]]; rank 0 receives 3 + 2 rows for its expert
    source starts  [[0, 3], [0, 2]]     arrival starts at rank 0  [0, 3]     padded: group 0..8, rows 5..7 padding
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.comm.collective import splits_or_invalid
from mxep.comm.exchange import Copy, Exchange, SplitsDisagreeError, check_splits
from mxep.comm.symmetric import SymmetricTransport
from mxep.grouped_mm.products import Bytes, GemmOptions, Weights, mx_gemm
from mxep.grouped_mm.wgrad_gemm import wgrad_gemm
from mxep.mx.first_order import first_order
from mxep.mx.tensor import MXTensor, dequantize_data, from_records
from mxep.mx.weight_cache import CachedWeight
from mxep.shapes import record_bytes, round_up

_FORWARD, _BACKWARD = 2, 3  # the kind of an exchange, which every rank compares
MOST_CHUNKS = 4
LEAST_CHUNK_BYTES = 200 << 20  # of one rank's records: with smaller chunks the host launches their work more slowly than the GPU does it
# GEMMs of all chunks, if these are fewer; on four H200s 3 and 4 were no faster, and cost the host 0.3 to 1 ms more a call (2026-11-22).
MOST_GEMMS = 2
LEAST_GEMM_BYTES = 64 << 20  # of one rank's records that each of several GEMMs of a chunk reads; not tuned on GPUs
Chunk = tuple[int, int]  # local experts [first, end), the same on every rank


# ---------------------------------------------------------------- index arithmetic


class RowSegment(NamedTuple):
    """Rows that are contiguous on both sides."""

    peer: int
    here: int  # first row on this rank
    there: int  # first row on the peer
    rows: int


class Segments:
    """Which rows of one rank go where.

    Args:
        counts: (W, E), rows from every rank for every expert.  rank: this one.
        alignment: rows that every expert's group is padded to; an expert without rows has `alignment` rows of padding.
    """

    def __init__(self, counts: Sequence[Sequence[int]], rank: int, alignment: int) -> None:
        self.counts, self.rank = counts, rank
        self.world = len(counts)
        self.num_local_experts = L = len(counts[0]) // self.world
        local = [sum(row[e] for row in counts) for e in range(rank * L, (rank + 1) * L)]
        self.group_starts = _starts([round_up(max(rows, 1), alignment) for rows in local])  # (L + 1,) in padded order

    @cached_property
    def sources(self) -> list[list[int]]:
        """[s][e]: first row for expert e in the source order of rank s; the last column is the number of rows that s sends."""
        return [_starts(row) for row in self.counts]

    @cached_property
    def arrivals(self) -> list[list[int]]:
        """[s][r]: first row from rank s in the arrival order of rank r; the last row is the number of rows that r receives."""
        L, W = self.num_local_experts, self.world
        table = [[source[(r + 1) * L] - source[r * L] for r in range(W)] for source in self.sources]
        columns = [_starts([row[r] for row in table]) for r in range(W)]
        return [[columns[r][s] for r in range(W)] for s in range(W + 1)]

    @property
    def num_received(self) -> int:
        return self.arrivals[self.world][self.rank]

    def to_experts(self, peer: int, chunk: Chunk) -> RowSegment | None:
        """This rank's rows for a chunk of `peer`'s experts: source order here, arrival order there; None without rows."""
        first, mine = peer * self.num_local_experts, self.sources[self.rank]
        start, end = mine[first + chunk[0]], mine[first + chunk[1]]
        return RowSegment(peer, start, self.arrivals[self.rank][peer] + start - mine[first], end - start) if start < end else None

    def to_tokens(self, peer: int, chunk: Chunk) -> list[RowSegment]:
        """`peer`'s rows of a chunk of this rank's experts: padded order from the chunk's start here, source order there."""
        first, segments = self.rank * self.num_local_experts, []
        for e in range(*chunk):
            before = sum(self.counts[s][first + e] for s in range(peer))
            rows = self.counts[peer][first + e]
            if rows:
                here = self.group_starts[e] - self.group_starts[chunk[0]] + before
                segments.append(RowSegment(peer, here, self.sources[peer][first + e], rows))
        return segments


def sent_counts(received: Sequence[Sequence[int]]) -> list[list[int]]:
    """The argument `counts` of `Segments`, from what every rank receives: (W*L,) each, by sender.

    >>> sent_counts([[3, 2], [1, 2]])
    [[3, 1], [2, 2]]
    """
    world = len(received)
    L = len(received[0]) // world
    return [[table[s * L + e] for table in received for e in range(L)] for s in range(world)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """[2, 0, 3] -> [0, 2, 2, 5]"""
    return list(itertools.accumulate(sizes, initial=0))


def _bytes_per_rank(counts: Sequence[Sequence[int]], row_bytes: int) -> int:
    return sum(map(sum, counts)) * row_bytes // len(counts)


def _divide(first: int, end: int, parts: int) -> list[Chunk]:
    """[first, end) in so many parts."""
    return list(itertools.pairwise(first + i * (end - first) // parts for i in range(parts + 1)))


def chunk_experts(counts: Sequence[Sequence[int]], row_bytes: int) -> list[Chunk]:
    """Divide the local experts into chunks, the unit in which exchange and GEMM overlap; the same on every rank.

    `MOST_CHUNKS` if each has enough rows. On two H200s, 131072 rows a rank and 8 experts, 4 were best or within noise of it at rows of
    7168 and 8192 values, 1 at rows of 2048 (2026-11-21).

    >>> chunk_experts([[8192] * 16] * 2, 7392), chunk_experts([[8192] * 16] * 2, 2112)
    ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 8)])
    """
    num_local_experts = len(counts[0]) // len(counts)
    enough = _bytes_per_rank(counts, row_bytes) // LEAST_CHUNK_BYTES
    return _divide(0, num_local_experts, max(1, min(MOST_CHUNKS, num_local_experts, enough)))


def chunk_gemms(counts: Sequence[Sequence[int]], row_bytes: int, chunks: Sequence[Chunk]) -> list[tuple[int, Chunk]]:
    """The GEMMs of these chunks: how many messages of every rank each one waits for, and its experts; the same on every rank.

    If there are fewer chunks than `MOST_GEMMS`, each chunk has several GEMMs, so that the rows of one return during the next one: that
    costs the host less than more chunks.

    >>> chunk_gemms([[8192] * 16] * 2, 2112, [(0, 8)])
    [(1, (0, 4)), (1, (4, 8))]
    """
    enough = _bytes_per_rank(counts, row_bytes) // (len(chunks) * LEAST_GEMM_BYTES)
    gemms = []
    for i, (first, end) in enumerate(chunks, 1):
        parts = max(1, min(MOST_GEMMS // len(chunks), end - first, enough))
        gemms += [(i, experts) for experts in _divide(first, end, parts)]
    return gemms


# ---------------------------------------------------------------- one call


class LocalCall(NamedTuple):
    """One call as this rank knows it before it sees the other ranks' counts.

    Attributes:
        input_splits, output_splits: (W,) rows sent and received.  counts: (W*L,) rows received, rank-major.
        row_map: (P,) int32, padded row -> arrived row.  offs: (L,) int32 END offsets in padded order.
        alignment: rows that every expert's group is padded to.
        mode: scaling mode of both exchanges.  gemm: how to multiply.  kept: the weight's entry in a cache, or None.
    """

    input_splits: Sequence[int]
    output_splits: Sequence[int]
    counts: Tensor
    row_map: Tensor
    offs: Tensor
    alignment: int
    mode: str
    gemm: GemmOptions
    kept: CachedWeight | None

    def metadata(self, num_rows: int, world: int) -> list[int]:
        """This rank's rows, W splits to send, W to receive, and W * L counts of the rows received: for the other ranks."""
        splits = splits_or_invalid(self.input_splits, self.output_splits, world)
        return [num_rows, *splits, *self.counts.tolist()]  # host sync if the counts are on a GPU


class ChunkGemm(NamedTuple):
    """One GEMM, of a few experts: the number of messages of every rank that it waits for, its operands, and the segments of its output."""

    messages: int
    experts: Chunk
    row_map: Tensor  # (P',) int32, padded row of these experts -> arrived row
    offs: Tensor  # (L',) int32 END offsets among them
    segments: list[RowSegment]


@dataclass(frozen=True)
class Call:
    """One call on this rank, which forward saves for backward."""

    transport: SymmetricTransport
    local: LocalCall
    segments: Segments
    chunks: list[Chunk]
    gemms: list[ChunkGemm]


def _plan(transport: SymmetricTransport, local: LocalCall, received: list[list[int]], width: int) -> Call:
    """received: every rank's counts (W*L,).  width: of the rows."""
    counts = sent_counts(received)
    segments, row_map, offs = Segments(counts, transport.rank, local.alignment), local.row_map, local.offs
    chunks, gemms = chunk_experts(counts, record_bytes(width)), []
    for messages, (l0, l1) in chunk_gemms(counts, record_bytes(width), chunks):
        first, end = segments.group_starts[l0], segments.group_starts[l1]
        outputs = [segment for peer in transport.order for segment in segments.to_tokens(peer, (l0, l1))]
        gemms.append(ChunkGemm(messages, (l0, l1), row_map[first:end], offs[l0:l1] - first if first else offs[:l1], outputs))
    return Call(transport, local, segments, chunks, gemms)


def _rows_on(buffer: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The first bytes of a buffer as (rows, width)."""
    return buffer[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


def _send_chunks(exchange: Exchange, call: Call, rows: Tensor, mine: Tensor) -> None:
    """Quantise rows (T', width) and send them, chunk by chunk; rows for this rank are quantised in place in the records `mine`."""
    record, mode = mine.shape[1], call.local.mode
    staging = torch.empty((rows.shape[0], record), dtype=torch.uint8, device=rows.device)
    exchange.hold(staging)
    *others, own = call.transport.order
    for chunk in call.chunks:
        for peer in others:
            segment, copies = call.segments.to_experts(peer, chunk), []
            if segment is not None:
                first, last = segment.here, segment.here + segment.rows
                torch.ops.mxep.quantize_packed_into(rows[first:last], staging[first:last], mode)
                copies = [Copy(staging.data_ptr() + segment.here * record, segment.there * record, segment.rows * record)]
            exchange.fork(peer)
            exchange.send(peer, 0, copies)
        segment = call.segments.to_experts(own, chunk)
        if segment is not None:
            here, there = rows[segment.here : segment.here + segment.rows], mine[segment.there : segment.there + segment.rows]
            torch.ops.mxep.quantize_packed_into(here, there, mode)
        exchange.fork(own)
        exchange.send(own, 0, [])


def _multiply_and_return(exchange: Exchange, call: Call, a: MXTensor, weight: Bytes, returns: bool) -> None:
    """Run each GEMM as soon as its rows have arrived, and send its rows to their tokens.

    The GEMMs of different chunks run on alternate streams, so that one starts during the last tiles of another.  Those of one chunk do
    not: the second might overtake the first, whose rows are sent first.
    """
    arrived = 0
    call.transport.copy_streams.fork_alternate()
    for messages, (l0, l1), row_map, offs, segments in call.gemms:
        with call.transport.copy_streams.alternate(messages - 1):
            if messages > arrived:
                exchange.wait(messages)
                arrived = messages
            if not returns:
                continue
            out = mx_gemm((a.qdata, a.scale), (weight[0][l0:l1], weight[1][l0:l1]), offs, call.local.gemm, row_map)
            exchange.fork()
            exchange.hold(out)
            first, width = out.data_ptr(), out.shape[1] * out.element_size()
            exchange.send_each(1, [(s.peer, Copy(first + s.here * width, s.there * width, s.rows * width)) for s in segments])


def _check_counts(metadata: list[list[int]], world: int) -> None:
    """Raise the same ValueError on every rank unless the splits and counts of all ranks agree."""
    check_splits([table[: 1 + 2 * world] for table in metadata], world)
    for rank, table in enumerate(metadata):
        splits, counts = table[1 + world : 1 + 2 * world], table[1 + 2 * world :]
        per_rank = len(counts) // world
        received = [sum(counts[s * per_rank : (s + 1) * per_rank]) for s in range(world)]
        if received != splits or min(counts, default=0) < 0:
            raise SplitsDisagreeError(
                f"ep_grouped_mm: rank {rank} has num_tokens_per_expert with {received} rows from the ranks, output_splits {splits}, want "
                "the same; pass the counts that came from the counts exchange, rank-major"
            )


@first_order
class OverlappedEPGroupedMM(torch.autograd.Function):
    """`ep_grouped_mm` of recipes that exchange in MXFP8 both ways, over symmetric memory; eager only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, transport: SymmetricTransport, local: LocalCall) -> Tensor:
        """x (T', D) and w (L, N, D) -> (T', N)."""
        (T, D), (L, N, _), W = x.shape, w.shape, transport.world
        metadata = local.metadata(T, W)
        received = sum(metadata[1 + W : 1 + 2 * W])
        facts = (_FORWARD, D, N, L, x.element_size())
        with transport.open(facts, (received * record_bytes(D), T * N * x.element_size()), metadata) as exchange:
            _check_counts(exchange.peer_metadata, W)
            ctx.call = call = _plan(transport, local, [table[1 + 2 * W :] for table in exchange.peer_metadata], D)
            records = _rows_on(exchange.buffers[0], received, record_bytes(D), torch.uint8)
            _send_chunks(exchange, call, x, records)
            a, weight = from_records(records, D, x.dtype), Weights(w, None, local.gemm, local.kept).quantized("forward")
            exchange.hold(*weight)
            _multiply_and_return(exchange, call, a, weight, returns=True)
            exchange.wait(len(call.chunks) + len(call.gemms))
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(*((a.qdata, a.scale) if needs_w else (None, None)), w if needs_x or needs_w else None)
        return _rows_on(exchange.buffers[1], T, N, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """The gradient (T', N) -> that of x (T', D) and of w (L, N, D), where they are needed."""
        (qdata, scale, w), needs, grad = ctx.saved_tensors, ctx.needs_input_grad[:2], dequantize_data(grads[0])
        call: Call = ctx.call
        transport, local, gemm = call.transport, call.local, call.local.gemm
        (T, N), (L, _, D), item, received = grad.shape, w.shape, grad.element_size(), call.segments.num_received
        d_w, facts = None, (_BACKWARD, D, N, L, item, *needs)
        with transport.open(facts, (received * record_bytes(N), T * D * item if needs[0] else 0), []) as exchange:
            records = _rows_on(exchange.buffers[0], received, record_bytes(N), torch.uint8)
            _send_chunks(exchange, call, grad, records)
            g, weights = from_records(records, N, grad.dtype), Weights(w, None, gemm, local.kept)
            weight = weights.quantized("dgrad") if needs[0] else (w, w)
            exchange.hold(*weight)
            _multiply_and_return(exchange, call, g, weight, returns=needs[0])
            if needs[1]:
                exchange.wait(len(call.chunks))
                a = MXTensor(qdata, scale, gemm.out_dtype)
                d_w = wgrad_gemm(g, a, local.offs, gemm, w.dtype, local.row_map, local.row_map, weights.transposed)
            exchange.wait(len(call.chunks) + needs[0] * len(call.gemms))
        return _rows_on(exchange.buffers[1], T, D, grad.dtype) if needs[0] else None, d_w, None, None


def overlapped_ep_grouped_mm(transport: Any, x: Tensor, w: Tensor, local: LocalCall) -> Tensor:
    """A row of `mxep.ep.ep_grouped_mm_collective.OVERLAPPED`, for a `SymmetricTransport`."""
    transport.check_device(x)
    return OverlappedEPGroupedMM.apply(x, w, transport, local)

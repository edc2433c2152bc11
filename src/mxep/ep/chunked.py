"""`ep_grouped_mm` over symmetric memory: exchanges in chunks of experts, behind and beside the work, with the same bits.

forward   a chunk of experts after the other is quantised and sent, copy engines behind quantising; a chunk's GEMM (several,
          where chunks are few) runs as soon as its rows are there, the next one beside its last tiles; its rows go home, each into its own
          place, beside the next GEMM
backward  the same with the gradient and dgrad; wgrad runs while the last chunks' rows go home
saves     what the one call over any transport saves (`mxep.ep.pipeline`): the bytes as they came, where they landed
host      reads the counts of all ranks: a host sync per forward where they are on a GPU, none where they are on the host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.comm.session import Copy, Session, SplitsDisagreeError, check_splits
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep.dispatch import from_records
from mxep.ep.runs import Chunk, Run, Runs, chunks_of, counts_of, products_of
from mxep.gemm_options import GemmOptions
from mxep.grouped_mm import weight_form
from mxep.mx.first_order import first_order
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.mx.weight_cache import CachedWeight
from mxep.mx.weight_forms import Bytes
from mxep.shapes import record_bytes
from mxep.wgrad import WgradOperands, lies_transposed

_FORWARD, _BACKWARD = 2, 3  # what a session does, the first fact on the board
Way = Callable[[int, Chunk], list[Run]]


class Modes(NamedTuple):
    """Scale rules of the two quantised exchanges, and the GEMM."""

    dispatch: str
    combine: str
    gemm: GemmOptions


class Part(NamedTuple):
    """One GEMM, of a few experts: behind how many messages of every rank it may run, its operands, and where its rows belong."""

    messages: int
    experts: Chunk
    row_map: Tensor  # (P',) int32, padded row of these experts -> arrived row
    offs: Tensor  # (L',) int32 END offsets among them
    home: list[Run]


@dataclass(frozen=True)
class Call:
    """One call on this rank, as forward leaves it to backward."""

    transport: SymmetricTransport
    modes: Modes
    kept: CachedWeight | None
    row_map: Tensor  # (P,) int32, padded row -> arrived row
    offs: Tensor  # (L,) int32 END offsets in padded order
    runs: Runs
    chunks: list[Chunk]
    parts: list[Part]


def as_mx_rows(buffer: Tensor, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, MXTensor]:
    """The first bytes of a buffer as packed records (rows, record), and as MX (rows, width)."""
    record = record_bytes(width)
    records = buffer[: rows * record].view(rows, record)
    return records, from_records(records, width, dtype)


def send_chunks(session: Session, chunks: Sequence[Chunk], way: Way, rows: Tensor, mode: str, mine: Tensor) -> None:
    """Quantise rows (T', width) and send them, chunk by chunk; what stays here is quantised into its place in the records `mine`.

    Args:
        way: the runs to a rank of a chunk of its experts, `Runs.send` or `Runs.place`.
    """
    record = mine.shape[1]
    staging = torch.empty((rows.shape[0], record), dtype=torch.uint8, device=rows.device)
    session.hold(staging)
    *others, own = session.order()
    for chunk in chunks:
        for peer in others:
            runs = way(peer, chunk)
            if runs:  # one piece of memory here, however many there
                first, last = runs[0].here, runs[-1].here + runs[-1].rows
                torch.ops.mxep.quantize_packed_into(rows[first:last], staging[first:last], mode)
            session.fork(peer)
            copies = [Copy(staging.data_ptr() + run.here * record, run.there * record, run.rows * record) for run in runs]
            session.send(peer, 0, copies)
        for run in way(own, chunk):
            here, there = rows[run.here : run.here + run.rows], mine[run.there : run.there + run.rows]
            torch.ops.mxep.quantize_packed_into(here, there, mode)
        session.fork(own)
        session.send(own, 0, [])


def _multiply_and_return(session: Session, call: Call, a: MXTensor, weight: Bytes, options: GemmOptions, goes_home: bool) -> None:
    """Each GEMM as soon as its rows are there, and what it makes home.

    Chunks take turns, one's last tiles beside the next one's first.  GEMMs of the same chunk do not: the second might overtake the first,
    whose rows go home first.
    """
    path, came = options.path_to(options.out_dtype), 0
    session.take_turns()
    for messages, (l0, l1), row_map, offs, home in call.parts:
        with session.turn(messages - 1):
            if messages > came:
                session.arrive(messages)
                came = messages
            if not goes_home:
                continue
            b = weight[0][l0:l1], weight[1][l0:l1]
            out = torch.ops.mxep.grouped_mm_mx(a.qdata, a.scale, *b, offs, options.out_dtype, path, row_map)
            session.fork()
            session.hold(out)
            first, width = out.data_ptr(), out.shape[1] * out.element_size()
            session.send_each(1, [(run.peer, Copy(first + run.here * width, run.there * width, run.rows * width)) for run in home])


def told(x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], counts: Tensor, world: int) -> list[int]:
    """What a rank shows before forward: its rows, W splits to send, W to receive, and W * L counts of the rows received."""
    valid = len(input_splits) == len(output_splits) == world
    splits = [*input_splits, *output_splits] if valid else [-1] * 2 * world
    return [x.shape[0], *splits, *counts.tolist()]  # host sync where the counts are on a GPU


def check_shown(where: str, shown: list[list[int]], world: int) -> None:
    """Raise the same ValueError on every rank unless splits and counts of all ranks tell the same story."""
    check_splits([table[: 1 + 2 * world] for table in shown], world)
    for rank, table in enumerate(shown):
        awaited, counts = table[1 + world : 1 + 2 * world], table[1 + 2 * world :]
        per_rank = len(counts) // world
        held = [sum(counts[s * per_rank : (s + 1) * per_rank]) for s in range(world)]
        if held != awaited or min(counts, default=0) < 0:
            raise SplitsDisagreeError(
                f"{where}: rank {rank} has num_tokens_per_expert with {held} rows from the ranks, output_splits {awaited}, want the "
                "same; pass the counts that came from the counts exchange, rank-major"
            )


def _home(buffer: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return buffer[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


def run_forward(call_of: Callable[[list[list[int]]], Call], transport: SymmetricTransport, x: Tensor, w: Tensor, shown: list[int],
                modes: Modes) -> tuple[Tensor, MXTensor, Call]:  # fmt: skip
    """x (T', D) and w (L, N, D) -> (T', N), the rows as they came, MX (R, D), and the call.

    Args:
        call_of: makes the call of what all ranks showed.
        shown: what `told` says.
    """
    (T, D), (L, N, _), W = x.shape, w.shape, transport.world
    received = sum(shown[1 + W : 1 + 2 * W])
    facts = (_FORWARD, D, N, L, x.element_size())
    with transport.open(facts, (received * record_bytes(D), T * N * x.element_size()), shown) as session:
        check_shown("ep_grouped_mm", session.shown, W)
        call = call_of([table[1 + 2 * W :] for table in session.shown])
        records, a = as_mx_rows(session.buffers[0], received, D, x.dtype)
        send_chunks(session, call.chunks, call.runs.send, x, modes.dispatch, records)
        weight = weight_form(w, modes.gemm, call.kept, "forward")
        session.hold(*weight)
        _multiply_and_return(session, call, a, weight, modes.gemm, goes_home=True)
        session.arrive(len(call.chunks) + len(call.parts))
    return _home(session.buffers[1], T, N, x.dtype), a, call


def run_backward(call: Call, grad: Tensor, a: MXTensor | None, w: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """The gradient (T', N) of what `run_forward` returned -> that of x (T', D) and of w (L, N, D), where they are needed."""
    transport, runs, options = call.transport, call.runs, call.modes.gemm
    (T, N), (L, _, D) = grad.shape, w.shape
    facts = (_BACKWARD, D, N, L, grad.element_size(), *needs)
    received, item = runs.num_received, grad.element_size()
    d_w, sizes = None, (received * record_bytes(N), T * D * item if needs[0] else 0)
    with transport.open(facts, sizes, []) as session:
        records, g = as_mx_rows(session.buffers[0], received, N, grad.dtype)
        send_chunks(session, call.chunks, runs.send, grad, call.modes.combine, records)
        weight = weight_form(w.transpose(-2, -1), options, call.kept, "dgrad") if needs[0] else (w, w)
        session.hold(*weight)
        _multiply_and_return(session, call, g, weight, options, goes_home=needs[0])
        if needs[1]:
            assert a is not None
            session.arrive(len(call.chunks))
            d_w = WgradOperands(g, a).product(call.offs, options, w.dtype, call.row_map, call.row_map, lies_transposed(w))
        session.arrive(len(call.chunks) + needs[0] * len(call.parts))
    return _home(session.buffers[1], T, D, grad.dtype) if needs[0] else None, d_w


@first_order
class ChunkedEPGroupedMM(torch.autograd.Function):
    """`ep_grouped_mm` of recipes whose exchanges are both in MXFP8, over symmetric memory; eager only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, transport: SymmetricTransport, call_of: Callable, shown: list[int], modes: Modes) -> Tensor:
        out, a, call = run_forward(call_of, transport, x, w, shown, modes)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        saved = (a.qdata, a.scale) if needs_w else (None, None)
        ctx.save_for_backward(*saved, w if needs_x or needs_w else None)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        qdata, scale, w = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        a = None if qdata is None else MXTensor(qdata, scale, ctx.call.modes.gemm.out_dtype)
        return *run_backward(ctx.call, dequantize_data(grads[0]), a, w, needs), None, None, None, None


def call_maker(transport: SymmetricTransport, modes: Modes, kept: CachedWeight | None, row_map: Tensor, offs: Tensor,
               alignment: int, width: int) -> Callable[[list[list[int]]], Call]:  # fmt: skip
    """What `run_forward` makes a call with: from every rank's counts (W*L,) of the rows that it receives."""

    def make(received: list[list[int]]) -> Call:
        counts = counts_of(received)
        runs = Runs(counts, transport.rank, alignment)
        chunks, parts = chunks_of(counts, record_bytes(width)), []
        for messages, (l0, l1) in products_of(counts, record_bytes(width), chunks):
            first, last = runs.ends[l0], runs.ends[l1]
            home = [run for peer in runs.peers() for run in runs.home(peer, (l0, l1))]
            parts.append(Part(messages, (l0, l1), row_map[first:last], offs[l0:l1] - first if first else offs[:l1], home))
        return Call(transport, modes, kept, row_map, offs, runs, chunks, parts)

    return make

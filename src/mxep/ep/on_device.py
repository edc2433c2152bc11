"""All-to-all of rows whose splits are on the device: MXFP8 (RCEIL) on the wire both ways, high precision at both ends.

before  rows sorted by destination rank, and how many go to each, as a tensor that the host has not read
over symmetric memory   the ranks write each other their splits, everybody works out every place on the device, a kernel quantises a row
        and writes it where it belongs: two messages forward; one backward, by the same table
over torch.distributed  (CPUs, several hosts) its all-to-all takes host lists: the ranks gather their splits and read them, a host sync
        that is there whatever is asked for; results, flags and errors are the same
host syncs  over symmetric memory one at the end of forward, for the number of rows, with `out_padded` none; none in backward
saves   the splits of all ranks, no rows
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.comm import group_name_of, resolve_group, transport_of
from mxep.comm.session import SplitsDisagreeError
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep.checks import check_rows
from mxep.ep.device_splits import cut_splits, cut_table, homeward, outgoing
from mxep.ep.dispatch import from_records
from mxep.mx.first_order import first_order
from mxep.mx.tensor import dequantize_data
from mxep.shapes import record_bytes

_WHERE = "mxfp8_on_device_all_to_all_v"
_OUT, _HOME = 9, 10  # what a session does, the first fact on the board
_MODE = "rceil"
_FACTS = ("input's width", "bytes of an input's value", "max_output_rows_per_rank", "out_padded")


class _Options(NamedTuple):
    group_name: str
    most: int  # rows that a rank receives at most
    padded: bool

    def facts(self, rows: Tensor) -> list[int]:
        """What every rank must bring alike."""
        return [rows.shape[1], rows.element_size(), self.most, int(self.padded)]


# By group and device: 1 where rows did not fit, or splits did not, since somebody asked.
_flags: dict[tuple[str, torch.device], Tensor] = {}


def _raise_flag(options: _Options, wrong: Tensor) -> None:
    """Sets the group's flag where `wrong`, a bool on the device, is."""
    with torch.inference_mode(False):  # it outlives this call, and what is made in inference mode is written to in that alone
        flag = _flags.setdefault((options.group_name, wrong.device), torch.zeros((), dtype=torch.bool, device=wrong.device))
    flag.logical_or_(wrong)


def _problem(counts: list[list[int]], bad: list[int], most: int) -> str | None:
    """What is wrong with the ranks' splits, or None; the same text on every rank."""
    for rank, wrong in enumerate(bad):
        if wrong:
            return f"input_splits of rank {rank} are no row counts of at least 0 that its input has, want sum(input_splits) <= its rows"
    received = [sum(column) for column in zip(*counts, strict=True)]
    if max(received) > most:
        return (
            f"the ranks would receive {received} rows, want at most max_output_rows_per_rank={most}; pass a larger one, or "
            f"out_padded=True and ask {_WHERE}_overflowed()"
        )
    return None


def _check_agreed(facts: list[list[int]]) -> None:
    """Raise the same ValueError on every rank unless all brought the same facts."""
    for rank, theirs in enumerate(facts):
        for name, first, other in zip(_FACTS, facts[0], theirs, strict=True):
            if first != other:
                differ = f"{name} is {first} on rank 0 and {other} on rank {rank}"
                raise SplitsDisagreeError(f"{_WHERE}: {differ}, want one on all; pass the same")


def _check_fit(table: list[list[int]], most: int) -> None:
    """Raise ValueError, on every rank, where a rank's splits are wrong or its rows do not fit; `table` on the host."""
    problem = _problem([line[:-1] for line in table], [line[-1] for line in table], most)
    if problem is not None:
        raise ValueError(f"{_WHERE}: {problem}")


def _values(records: Tensor, like: Tensor, arrived: Tensor | None) -> Tensor:
    """Records (N, record) as rows of `like`'s width and dtype; 0 in the lines in which nothing arrived."""
    if arrived is not None:
        records.view(torch.int32).masked_fill_(~arrived[:, None], 0)  # a record of zeros stands for zeros
    return dequantize_data(from_records(records, like.shape[1], like.dtype))


# ---------------------------------------------------------------- over symmetric memory


def _out_by_push(rows: Tensor, splits: Tensor, options: _Options, transport: SymmetricTransport) -> tuple[Tensor, Tensor]:
    """-> out, (R, D) or padded; the table of all ranks (W, W + 1) as `cut_splits` has it."""
    world, rank, record, line = transport.world, transport.rank, record_bytes(rows.shape[1]), 8 * (transport.world + 1)
    told, everywhere = cut_splits(splits, rows.shape[0])[None], torch.zeros(1, world, dtype=torch.int32, device=rows.device)
    with transport.open((_OUT,), (world * line, options.most * record), options.facts(rows)) as session:
        _check_agreed(session.shown)
        session.hold(rows, told, everywhere)
        session.push(0, rank * line, lambda addresses: torch.ops.mxep.push_rows(told, everywhere, None, addresses, line, ""))
        session.arrive(1)
        table = session.buffers[0][: world * line].view(torch.int64).view(world, world + 1).clone()
        counts = table[:, :-1]
        kept = cut_table(counts, options.most)
        ranks, slots = outgoing(counts, kept, rank, rows.shape[0])
        session.hold(ranks, slots)
        session.push(1, 0, lambda addresses: torch.ops.mxep.push_rows(rows, slots, ranks, addresses, record, _MODE))
        session.arrive(2)
    received = session.buffers[1][: options.most * record].view(options.most, record)
    if options.padded:
        _raise_flag(options, (kept != counts).any() | table[:, -1].any())
        here = torch.arange(options.most, device=rows.device) < kept[:, rank].sum()
        return _values(received, rows, here), table
    lines = table.tolist()  # host sync: the caller wants no row too many
    _check_fit(lines, options.most)
    return _values(received[: sum(line[rank] for line in lines)], rows, None), table


def _home_by_push(grad: Tensor, table: Tensor, rows: int, options: _Options, transport: SymmetricTransport) -> Tensor:
    """Gradient of out -> of the input (rows, D)."""
    counts, record = table[:, :-1], record_bytes(grad.shape[1])
    kept = cut_table(counts, options.most)
    ranks, slots = homeward(counts, kept, transport.rank, grad.shape[0])
    with transport.open((_HOME, record), (rows * record,), []) as session:
        session.hold(grad, ranks, slots)
        session.push(0, 0, lambda addresses: torch.ops.mxep.push_rows(grad, slots, ranks, addresses, record, _MODE))
        session.arrive(1)
    sent = outgoing(counts, kept, transport.rank, rows).slots[:, 0] >= 0
    return _values(session.buffers[0][: rows * record].view(rows, record), grad, sent)


# ---------------------------------------------------------------- over torch.distributed


def _out_by_lists(rows: Tensor, splits: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """`_out_by_push` over torch.distributed; the table is on the host."""
    group = resolve_group(_WHERE, options.group_name)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = torch.cat((cut_splits(splits, rows.shape[0]), torch.tensor(options.facts(rows), device=rows.device)))
    shown = torch.empty(world, mine.numel(), dtype=mine.dtype, device=rows.device)
    dist.all_gather_into_tensor(shown.view(-1), mine, group=group)
    shown = shown.cpu()  # host sync: torch.distributed takes its splits from the host
    _check_agreed(shown[:, world + 1 :].tolist())
    table = shown[:, : world + 1]
    sent, received, travels = _lists(table, options.most, rank, rows)
    if options.padded:
        wrong = (cut_table(table[:, :-1], options.most) != table[:, :-1]).any() | table[:, -1].any()
        _raise_flag(options, wrong.to(rows.device))
    else:
        _check_fit(table.tolist(), options.most)
    out = torch.ops.mxep.exchange_dequantized(rows[travels], received, sent, options.group_name, _MODE)
    return torch.cat((out, out.new_zeros(options.most - out.shape[0], out.shape[1]))) if options.padded else out, table


def _home_by_lists(grad: Tensor, table: Tensor, rows: int, options: _Options) -> Tensor:
    """`_home_by_push` over torch.distributed."""
    home = grad.new_zeros(rows, grad.shape[1])
    sent, received, travels = _lists(table, options.most, dist.get_rank(resolve_group(_WHERE, options.group_name)), home)
    home[travels] = torch.ops.mxep.exchange_dequantized(grad[: sum(received)], sent, received, options.group_name, _MODE)
    return home


def _lists(table: Tensor, most: int, rank: int, rows: Tensor) -> tuple[list[int], list[int], slice | Tensor]:
    """Splits that this rank sends and receives, and which of its rows travel: the first ones, or not all of those."""
    counts = table[:, :-1]
    kept = cut_table(counts, most)
    sent, received = kept[rank].tolist(), kept[:, rank].tolist()
    if torch.equal(kept[rank], counts[rank]):
        return sent, received, slice(sum(sent))
    return sent, received, (outgoing(counts, kept, rank, rows.shape[0]).slots[:, 0] >= 0).nonzero()[:, 0].to(rows.device)


# ---------------------------------------------------------------- autograd


@first_order
class _OnDeviceAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        transport = transport_of(options.group_name, rows.device)
        rows = dequantize_data(rows).contiguous()
        if isinstance(transport, SymmetricTransport):
            transport.check_device(rows)
            out, table = _out_by_push(rows, splits, options, transport)
        else:
            out, table = _out_by_lists(rows, splits, options)
        ctx.transport, ctx.options, ctx.rows = transport, options, rows.shape[0]
        ctx.save_for_backward(table)
        received = cut_table(table[:, :-1], options.most)[:, transport.rank].to(rows.device, copy=True)
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (table,), grad = ctx.saved_tensors, dequantize_data(grads[0])
        if isinstance(ctx.transport, SymmetricTransport):
            return _home_by_push(grad.contiguous(), table, ctx.rows, ctx.options, ctx.transport), None, None
        return _home_by_lists(grad, table, ctx.rows, ctx.options), None, None


@torch.compiler.disable(reason=f"{_WHERE} meets the other ranks on the host; compile what stands around it")
def mxfp8_on_device_all_to_all_v(
    input: Tensor,
    input_splits: Tensor,
    max_output_rows_per_rank: int,
    group: str | ProcessGroup | None = None,
    out_padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Differentiable all-to-all of plain rows with splits on the device; they travel as MXFP8 (RCEIL), forward and backward.

    Over symmetric memory (`mxep.set_transport("symmetric", group)`) the host does not learn the splits on the way.  Any other group
    exchanges over torch.distributed: the same results and errors, with a host sync for its host lists, also where `out_padded` is set.

    Args:
        input: (T, D) bf16 or float32, rows sorted by destination rank, D a multiple of 32.  Rows behind the last
            split stay, with gradient 0.
        input_splits: (W,) int64 on the input's device, rows for each rank of the group, at most T together.
        max_output_rows_per_rank: most rows that a rank may receive, the same on every rank: memory for so many is taken.
        group: process group, its name, or None for WORLD.
        out_padded: True: out has max_output_rows_per_rank rows, zeros behind the last, and nothing is read on the host.  What does not fit
            is cut off, in output_splits too, and `mxfp8_on_device_all_to_all_v_overflowed` says so on every rank.

    Returns:
        out: (R, D) or padded, input's dtype, rows from rank 0 first.  output_splits: (W,) int64 on the device, rows from each rank.

    Raises:
        ValueError: shapes or dtypes that do not fit; on every rank: ranks that pass other numbers; without `out_padded` also rows that
            do not fit on some rank, and splits that are negative or more than the rows of some rank.
    """
    check_rows(_WHERE, input, quantised=True)
    name = group_name_of(_WHERE, group)
    world = transport_of(name, input.device).world
    if not isinstance(input_splits, Tensor) or input_splits.dtype != torch.int64 or input_splits.device != input.device:
        got = f"{input_splits.dtype} on {input_splits.device}" if isinstance(input_splits, Tensor) else type(input_splits).__name__
        raise ValueError(f"{_WHERE}: input_splits are {got}, want an int64 tensor on {input.device}; host lists: to_mxfp8_a2a_dequant")
    if tuple(input_splits.shape) != (world,):
        raise ValueError(f"{_WHERE}: input_splits are {tuple(input_splits.shape)}, want ({world},), rows for each rank of the group")
    if type(max_output_rows_per_rank) is not int or max_output_rows_per_rank < 0:
        got = repr(max_output_rows_per_rank)
        raise ValueError(f"{_WHERE}: max_output_rows_per_rank={got}, want an int of at least 0; pass the most rows a rank may receive")
    options = _Options(name, max_output_rows_per_rank, bool(out_padded))
    return _OnDeviceAllToAll.apply(input, input_splits, options)


def mxfp8_on_device_all_to_all_v_overflowed(group: str | ProcessGroup | None = None) -> bool:
    """Whether any call with `out_padded` on this group cut rows off, on any rank, since this was last asked; a host sync.

    Also where a rank's input_splits were negative or more than its rows.  Every rank gets the same answer; gradients of rows that were cut
    off are 0.
    """
    name = group_name_of(_WHERE, group)
    raised = False
    for (of_group, _), flag in _flags.items():
        if of_group == name:
            raised |= bool(flag)  # host sync: that is what was asked for
            flag.zero_()
    return raised

"""All-to-all with MXFP8 on the wire both ways and high precision at both ends, for exchanges that no MXFP8 GEMM follows.

`to_mxfp8_a2a_dequant` takes its splits from the host.  Forward and backward each quantise 1x32, exchange packed records once and
dequantise; over symmetric memory the rounds overlap (`mxep.comm.slot_buffers`).  Saves no tensor.  Host syncs: none.

`mxfp8_on_device_all_to_all_v` takes rows sorted by destination rank and its splits from the device, where the host has not read them.
over symmetric memory   the ranks write each other their splits, each computes all destinations on the device, and a kernel quantises rows
        and writes them there: two messages forward, one backward, by the same table
over other transports   the ranks gather their splits and read them, a host sync in every call; results, flags and errors are the same
host syncs  over symmetric memory one at the end of forward, for the number of rows, with `out_padded` none; none in backward
saves   the splits of all ranks, no rows

A table of splits is (W, W) int64: row s has the splits that rank s sends.  A rank receives its rows by sender, each sender's in their
order, at most `most` of them.  Rank 0 has three rows and sends 2 and 1, rank 1 sends 1 and 3; a rank receives 3 at most:

>>> cut_splits(torch.tensor([2, 1]), 3).tolist(), cut_splits(torch.tensor([2, 5]), 3).tolist()
([2, 1, 0], [2, 1, 1])
>>> counts = torch.tensor([[2, 1], [1, 3]])
>>> kept = cut_table(counts, 3)
>>> kept.tolist()
[[2, 1], [1, 2]]
>>> destinations(counts, kept, 1, 4)[1].flatten().tolist()  # of rank 1's rows: after those of rank 0; the last one does not fit
[2, 1, 2, -1]
>>> sources = origins(counts, kept, 1, 3)  # of rank 1's received rows: the sender, and which of its rows
>>> sources.ranks.flatten().tolist(), sources.slots.flatten().tolist()
([0, 1, 1], [2, 1, 2])
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.checks import check_rows
from mxep.comm import Transport, group_name_of, resolve_group, transport_of
from mxep.comm.exchange import SplitsDisagreeError
from mxep.ep.dispatch import check_exchange, exchange_mx
from mxep.mx.compile import in_graph
from mxep.mx.first_order import first_order
from mxep.mx.tensor import dequantize_data, from_records
from mxep.shapes import record_bytes

_F = TypeVar("_F", bound=Callable)
_WHERE = "mxfp8_on_device_all_to_all_v"
_SEND, _RETURN = 9, 10  # the kind of an exchange, which every rank compares
_MODE = "rceil"
_FACTS = ("input's width", "bytes of an input's value", "max_output_rows_per_rank", "out_padded")


# ---------------------------------------------------------------- splits on the host


def _exchange(rows: torch.Tensor, output_splits: list[int], input_splits: list[int], group_name: str) -> torch.Tensor:
    if group_name:
        return torch.ops.mxep.exchange_dequantized(rows, output_splits, input_splits, group_name, _MODE)
    return dequantize_data(exchange_mx(rows, output_splits, input_splits, group_name, _MODE))


@in_graph
class ToMXFP8AllToAllVDequant(torch.autograd.Function):
    """The autograd function of `to_mxfp8_a2a_dequant`; `.apply` has its arguments.

    Examples:
        >>> rows = torch.ones(64, 128, dtype=torch.bfloat16)
        >>> mxep.ToMXFP8AllToAllVDequant.apply(rows, [64], [64], torch.distributed.group.WORLD).shape
        torch.Size([64, 128])
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str | ProcessGroup | None = None
    ) -> torch.Tensor:
        name = check_exchange("to_mxfp8_a2a_dequant", input, output_splits, input_splits, group, quantised=True)
        ctx.splits = (list(input_splits), list(output_splits), name)
        return _exchange(input, output_splits, input_splits, name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return _exchange(dequantize_data(grads[0]), *ctx.splits), None, None, None


def to_mxfp8_a2a_dequant(
    input: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str | ProcessGroup | None = None
) -> torch.Tensor:
    """Differentiable all-to-all of plain rows, sent as MXFP8 (RCEIL) forward and backward.

    Over symmetric memory the group's first call allocates 256 MiB on every GPU, and in later calls no host waits for another.  Splits
    that disagree between ranks are an error on every rank in checking mode; otherwise rows whose number differs from the receiver's
    output_splits arrive as NaN, and the receiver's next exchange raises `ExchangeError`.

    Args:
        input: (T', D) bf16 or float32, D a multiple of 32.
        output_splits: rows received from each rank, a host list.
        input_splits: rows sent to each rank, a host list.
        group: process group, its name, or None for WORLD.

    Returns:
        (sum(output_splits), D) in input's dtype.

    Raises:
        ValueError: dtype, width or splits that do not fit.

    Examples:
        >>> rows = torch.ones(64, 128, dtype=torch.bfloat16)
        >>> received = mxep.to_mxfp8_a2a_dequant(rows, output_splits=[64], input_splits=[64])  # a group of one rank
        >>> torch.equal(received, rows)  # MXFP8 represents ones exactly
        True
    """
    return ToMXFP8AllToAllVDequant.apply(input, output_splits, input_splits, group)


# ---------------------------------------------------------------- splits on the device


class _OnDeviceOptions(NamedTuple):
    group_name: str
    most: int  # rows that a rank receives at most
    padded: bool

    def facts(self, rows: Tensor) -> list[int]:
        """What must be the same on every rank."""
        return [rows.shape[1], rows.element_size(), self.most, int(self.padded)]


_Flags = dict[torch.device, Tensor]
# By group: True if rows or splits did not fit since `mxfp8_on_device_all_to_all_v_overflowed` was last called.  Another group may have the
# name of one that was destroyed; names without a group are those of one rank and of tests.
_flags: weakref.WeakKeyDictionary[ProcessGroup, _Flags] = weakref.WeakKeyDictionary()
_flags_by_name: dict[str, _Flags] = {}


def _flags_of(group_name: str) -> _Flags:
    try:
        return _flags.setdefault(resolve_group(_WHERE, group_name), {})
    except ValueError:
        return _flags_by_name.setdefault(group_name, {})


def _raise_flag(options: _OnDeviceOptions, wrong: Tensor) -> None:
    """Sets the group's flag if `wrong`, a bool on the device, is set."""
    with torch.inference_mode(False):  # the flag outlives this call, and a tensor of inference mode can be written only there
        flag = _flags_of(options.group_name).setdefault(wrong.device, torch.zeros((), dtype=torch.bool, device=wrong.device))
    flag.logical_or_(wrong)


def _check_agreed(facts: list[list[int]]) -> None:
    """Raise the same ValueError on every rank unless the facts are the same on all."""
    for rank, theirs in enumerate(facts):
        for name, first, other in zip(_FACTS, facts[0], theirs, strict=True):
            if first != other:
                differ = f"{name} is {first} on rank 0 and {other} on rank {rank}"
                raise SplitsDisagreeError(f"{_WHERE}: {differ}, want one on all; pass the same")


def _check_fit(table: list[list[int]], most: int) -> None:
    """Raise the same ValueError on every rank if a rank's splits are wrong or its rows do not fit; lines of `cut_splits`, on the host."""
    for rank, line in enumerate(table):
        if line[-1]:
            problem = f"input_splits of rank {rank} are no row counts of at least 0 that its input has"
            raise ValueError(f"{_WHERE}: {problem}, want sum(input_splits) <= its rows")
    *received, _ = (sum(column) for column in zip(*table, strict=True))
    if max(received) > most:
        raise ValueError(
            f"{_WHERE}: the ranks would receive {received} rows, want at most max_output_rows_per_rank={most}; pass a larger one, or "
            f"out_padded=True and ask {_WHERE}_overflowed()"
        )


def _values(records: Tensor, like: Tensor, arrived: Tensor | None) -> Tensor:
    """Records (N, record) as rows of `like`'s width and dtype; zeros in rows that did not arrive."""
    if arrived is not None:
        records.view(torch.int32).masked_fill_(~arrived[:, None], 0)  # a record of zeros has values of zero
    return dequantize_data(from_records(records, like.shape[1], like.dtype))


# ---------------------------------------------------------------- index arithmetic on the device


class _Destinations(NamedTuple):
    """To which rank and slot rows go: (N, 1) int32 each, arguments of `torch.ops.mxep.p2p_scatter_rows`; slot -1 for none."""

    ranks: Tensor
    slots: Tensor


def _diff(ends: Tensor) -> Tensor:
    """END offsets along dimension 0 -> sizes."""
    return ends.diff(dim=0, prepend=ends.new_zeros(1, *ends.shape[1:]))


def cut_splits(splits: Tensor, rows: int) -> Tensor:
    """The splits that a rank with so many rows sends to the others: (W,) int64 -> (W + 1,), cut to the rows, then 1 if that changed any."""
    cut = _diff(splits.clamp(0, rows).cumsum(0).clamp(max=rows))
    return torch.cat((cut, (cut != splits).any().long()[None]))


def cut_table(counts: Tensor, most: int) -> Tensor:
    """The counts (W, W) that fit: a rank receives `most` rows at most, and the last senders' rows are cut off."""
    return _diff(counts.cumsum(0).clamp(max=most))


def _destinations(sizes: Tensor, first: Tensor, limits: Tensor, rows: int) -> _Destinations:
    """Of rows in parts of these sizes (W,), one part for each rank: the slots from `first` (W,) on, for at most `limits` (W,) rows each."""
    row, ends = torch.arange(rows, device=sizes.device), sizes.cumsum(0)
    part = torch.searchsorted(ends, row, right=True)
    inside, part = part < ends.shape[0], part.clamp(max=ends.shape[0] - 1)
    number = row - (ends - sizes)[part]
    slots = torch.where(inside & (number < limits[part]), first[part] + number, -1)
    return _Destinations(part.int()[:, None], slots.int()[:, None])


def destinations(counts: Tensor, kept: Tensor, rank: int, rows: int) -> _Destinations:
    """The ranks and slots that this rank's rows, sorted by destination, are written to."""
    return _destinations(counts[rank], (kept.cumsum(0) - kept)[rank], kept[rank], rows)


def origins(counts: Tensor, kept: Tensor, rank: int, rows: int) -> _Destinations:
    """The ranks and rows that the first `rows` rows received by this rank came from."""
    return _destinations(kept[:, rank], (counts.cumsum(1) - counts)[:, rank], kept[:, rank], rows)


# ---------------------------------------------------------------- over symmetric memory


def _send_by_put(rows: Tensor, splits: Tensor, options: _OnDeviceOptions, transport: Any) -> tuple[Tensor, Tensor]:
    """-> out, (R, D) or padded; the table of all ranks (W, W + 1) as `cut_splits` has it."""
    transport.check_device(rows)
    world, rank, record, line = transport.world, transport.rank, record_bytes(rows.shape[1]), 8 * (transport.world + 1)
    own, everywhere = cut_splits(splits, rows.shape[0])[None], torch.zeros(1, world, dtype=torch.int32, device=rows.device)
    with transport.open((_SEND,), (world * line, options.most * record), options.facts(rows)) as exchange:
        _check_agreed(exchange.peer_metadata)
        exchange.hold(rows, own, everywhere)
        exchange.put(0, rank * line, lambda addresses: torch.ops.mxep.p2p_scatter_rows(own, everywhere, None, addresses, line, ""))
        exchange.wait(1)
        table = exchange.buffers[0][: world * line].view(torch.int64).view(world, world + 1).clone()
        counts = table[:, :-1]
        kept = cut_table(counts, options.most)
        ranks, slots = destinations(counts, kept, rank, rows.shape[0])
        exchange.hold(ranks, slots)
        exchange.put(1, 0, lambda addresses: torch.ops.mxep.p2p_scatter_rows(rows, slots, ranks, addresses, record, _MODE))
        exchange.wait(2)
    received = exchange.buffers[1][: options.most * record].view(options.most, record)
    if options.padded:
        _raise_flag(options, (kept != counts).any() | table[:, -1].any())
        here = torch.arange(options.most, device=rows.device) < kept[:, rank].sum()
        return _values(received, rows, here), table
    lines = table.tolist()  # host sync: for the number of rows
    _check_fit(lines, options.most)
    return _values(received[: sum(line[rank] for line in lines)], rows, None), table


def _return_by_put(grad: Tensor, table: Tensor, rows: int, options: _OnDeviceOptions, transport: Any) -> Tensor:
    """Gradient of out -> of the input (rows, D)."""
    grad = grad.contiguous()
    counts, record = table[:, :-1], record_bytes(grad.shape[1])
    kept = cut_table(counts, options.most)
    ranks, slots = origins(counts, kept, transport.rank, grad.shape[0])
    with transport.open((_RETURN, record), (rows * record,), []) as exchange:
        exchange.hold(grad, ranks, slots)
        exchange.put(0, 0, lambda addresses: torch.ops.mxep.p2p_scatter_rows(grad, slots, ranks, addresses, record, _MODE))
        exchange.wait(1)
    sent = destinations(counts, kept, transport.rank, rows).slots[:, 0] >= 0
    return _values(exchange.buffers[0][: rows * record].view(rows, record), grad, sent)


# ---------------------------------------------------------------- over any transport


def _send_by_lists(rows: Tensor, splits: Tensor, options: _OnDeviceOptions, transport: Transport) -> tuple[Tensor, Tensor]:
    """`_send_by_put` over any transport; the table is on the host."""
    group, world = resolve_group(_WHERE, options.group_name), transport.world
    mine = torch.cat((cut_splits(splits, rows.shape[0]), torch.tensor(options.facts(rows), device=rows.device)))
    gathered = torch.empty(world, mine.numel(), dtype=mine.dtype, device=rows.device)
    dist.all_gather_into_tensor(gathered.view(-1), mine, group=group)
    gathered = gathered.cpu()  # host sync: torch.distributed takes its splits from the host
    _check_agreed(gathered[:, world + 1 :].tolist())
    table = gathered[:, : world + 1]
    sent, received, leaving = _lists(table, options.most, transport.rank, rows)
    if options.padded:
        wrong = (cut_table(table[:, :-1], options.most) != table[:, :-1]).any() | table[:, -1].any()
        _raise_flag(options, wrong.to(rows.device))
    else:
        _check_fit(table.tolist(), options.most)
    out = torch.ops.mxep.exchange_dequantized(rows[leaving], received, sent, options.group_name, _MODE)
    return torch.cat((out, out.new_zeros(options.most - out.shape[0], out.shape[1]))) if options.padded else out, table


def _return_by_lists(grad: Tensor, table: Tensor, rows: int, options: _OnDeviceOptions, transport: Transport) -> Tensor:
    """`_return_by_put` over any transport."""
    d_rows = grad.new_zeros(rows, grad.shape[1])
    sent, received, leaving = _lists(table, options.most, transport.rank, d_rows)
    d_rows[leaving] = torch.ops.mxep.exchange_dequantized(grad[: sum(received)], sent, received, options.group_name, _MODE)
    return d_rows


def _lists(table: Tensor, most: int, rank: int, rows: Tensor) -> tuple[list[int], list[int], slice | Tensor]:
    """Splits that this rank sends and receives, and which of its rows it sends: the first ones, or some of those."""
    counts = table[:, :-1]
    kept = cut_table(counts, most)
    sent, received = kept[rank].tolist(), kept[:, rank].tolist()
    if torch.equal(kept[rank], counts[rank]):
        return sent, received, slice(sum(sent))
    return sent, received, (destinations(counts, kept, rank, rows.shape[0]).slots[:, 0] >= 0).nonzero()[:, 0].to(rows.device)


# By the transport's name: forward, (rows, splits, options, transport) -> (out, table), and backward,
# (grad, table, rows, options, transport) -> d_rows.  Transports without a row use the lists, which need nothing but `exchange_dequantized`.
ON_DEVICE: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {"symmetric": (_send_by_put, _return_by_put)}
_BY_LISTS = _send_by_lists, _return_by_lists


# ---------------------------------------------------------------- autograd


@first_order
class _OnDeviceAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Tensor, options: _OnDeviceOptions) -> tuple[Tensor, Tensor]:
        transport = transport_of(options.group_name, rows.device)
        rows = dequantize_data(rows).contiguous()
        send, ctx.give_back = ON_DEVICE.get(transport.name, _BY_LISTS)
        out, table = send(rows, splits, options, transport)
        ctx.transport, ctx.options, ctx.rows = transport, options, rows.shape[0]
        ctx.save_for_backward(table)
        received = cut_table(table[:, :-1], options.most)[:, transport.rank].to(rows.device, copy=True)
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (table,), grad = ctx.saved_tensors, dequantize_data(grads[0])
        return ctx.give_back(grad, table, ctx.rows, ctx.options, ctx.transport), None, None


# torch does not annotate this decorator, and without its type callers would lose the function's signature.
_outside_graphs: Callable[[_F], _F] = torch.compiler.disable(
    reason=f"{_WHERE} synchronises with the other ranks on the host; compile the code around it"
)


@_outside_graphs
def mxfp8_on_device_all_to_all_v(
    input: Tensor,
    input_splits: Tensor,
    max_output_rows_per_rank: int,
    group: str | ProcessGroup | None = None,
    out_padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Differentiable all-to-all of plain rows with splits on the device, sent as MXFP8 (RCEIL) forward and backward.

    Over symmetric memory (`mxep.set_transport("symmetric", group)`) the host does not read the splits.  Other transports give the same
    results and errors, with a host sync for their host lists even with `out_padded`.

    Args:
        input: (T, D) bf16 or float32, rows sorted by destination rank, D a multiple of 32.  Rows after the last
            split are not sent; their gradient is 0.
        input_splits: (W,) int64 on the input's device, rows for each rank of the group, at most T together.
        max_output_rows_per_rank: most rows that a rank may receive, the same on every rank: memory for so many is allocated.
        group: process group, its name, or None for WORLD.
        out_padded: True: out has max_output_rows_per_rank rows, zeros after the last, and nothing is read on the host.  Rows that do not
            fit are cut off, in output_splits too, and `mxfp8_on_device_all_to_all_v_overflowed` reports it on every rank.

    Returns:
        out: (R, D) or padded, input's dtype, rows from rank 0 first.  output_splits: (W,) int64 on the device, rows from each rank.

    Raises:
        ValueError: shapes or dtypes that do not fit; on every rank: ranks that pass other numbers; without `out_padded` also rows that
            do not fit on some rank, and splits that are negative or more than the rows of some rank.

    Examples:
        >>> rows = torch.ones(64, 128, dtype=torch.bfloat16)
        >>> out, output_splits = mxep.mxfp8_on_device_all_to_all_v(rows, torch.tensor([48]), max_output_rows_per_rank=64)
        >>> out.shape, output_splits.tolist()
        (torch.Size([48, 128]), [48])
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
    options = _OnDeviceOptions(name, max_output_rows_per_rank, bool(out_padded))
    return _OnDeviceAllToAll.apply(input, input_splits, options)


def mxfp8_on_device_all_to_all_v_overflowed(group: str | ProcessGroup | None = None) -> bool:
    """True if a call with `out_padded` on this group cut rows off, on any rank, since the last call of this function; a host sync.

    Also true if a rank's input_splits were negative or more than its rows.  Gradients of rows that were cut off are 0.

    Args:
        group: process group, its name, or None for WORLD.

    Returns:
        the same answer on every rank.

    Examples:
        >>> rows, splits = torch.ones(64, 128), torch.tensor([64])
        >>> out, output_splits = mxep.mxfp8_on_device_all_to_all_v(rows, splits, max_output_rows_per_rank=48, out_padded=True)
        >>> output_splits.tolist(), mxep.mxfp8_on_device_all_to_all_v_overflowed()
        ([48], True)
    """
    name = group_name_of(_WHERE, group)
    raised = False
    for flag in _flags_of(name).values():
        raised |= bool(flag)  # host sync: the result
        flag.zero_()
    return raised

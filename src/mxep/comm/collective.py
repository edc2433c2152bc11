"""The collective transport: all-to-all through torch.distributed (NCCL on GPUs, gloo on CPUs).

Rows are sent as bytes: gloo refuses fp8 and NCCL refuses e8m0.  The exchange is an opaque operator, so it can be in a compiled graph.
An exchange that fails is the last one of its process group: the ranks may be out of step, and then one would take another exchange's rows.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from mxep.comm.host_allgather import ExchangeError
from mxep.device import checking
from mxep.operators import direct

_failed: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()  # the first failure of each group


def group_name_of(where: str, group: str | ProcessGroup | None) -> str:
    """The name of a process group.

    Args:
        where: the caller's name, for the error message.
        group: process group, its name, or None for WORLD.

    Returns:
        the name that operators take.

    Raises:
        ValueError: torch.distributed is not initialised, or `group` is something else.

    Examples:
        >>> world = torch.distributed.group.WORLD
        >>> mxep.comm.group_name_of("example", None) == mxep.comm.group_name_of("example", world)
        True
    """
    if isinstance(group, str):
        return group
    if not dist.is_initialized():
        raise ValueError(f"{where}: torch.distributed is not initialised, want a process group; call init_process_group or use torchrun")
    if group is None:
        return dist.group.WORLD.group_name  # type: ignore[union-attr]
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"{where}: group is {type(group).__name__}, want a ProcessGroup, its name or None (WORLD)")
    return group.group_name


def resolve_group(where: str, group_name: str) -> ProcessGroup:
    """The process group of a name.

    Args:
        where: the caller's name, for the error message.
        group_name: as `group_name_of` returns it.

    Returns:
        the process group.

    Raises:
        ValueError: no group has that name.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)
        >>> mxep.comm.resolve_group("example", group_name) is torch.distributed.group.WORLD
        True
    """
    try:
        return _resolve_process_group(group_name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(f"{where}: no process group named {group_name!r}; pass group.group_name or the group itself") from error


def splits_or_invalid(input_splits: Sequence[int], output_splits: Sequence[int], world: int) -> list[int]:
    """Both splits as one list for `disagreement`; -1 everywhere unless each has W numbers: lists of all ranks have the same length."""
    valid = len(input_splits) == len(output_splits) == world
    return [*input_splits, *output_splits] if valid else [-1] * 2 * world


def disagreement(table: list[list[int]], world: int) -> str | None:
    """The problem of the ranks' (rows, row bytes, input splits, output splits), what is wanted and what to do; or None."""
    for rank, (rows, _, *splits) in enumerate(table):
        own = splits[:world]
        if min(splits) < 0:
            problem = f"rank {rank} passed splits that are not {world} row counts of at least 0"
            return f"{problem}; want one for each rank of the group; pass the group that they were made for"
        if sum(own) != rows:
            problem = f"rank {rank} has {rows} rows but input_splits {own}, which add up to {sum(own)}"
            return f"{problem}; want as many; pass the rows' counts, summed by destination rank"
        if table[rank][1] != table[0][1]:
            problem = f"rank {rank} sends rows of {table[rank][1]} bytes, rank 0 rows of {table[0][1]} bytes"
            return f"{problem}; want one width and dtype; give every rank the same layer"
    for sender in range(world):
        for receiver in range(world):
            sent, awaited = table[sender][2 + receiver], table[receiver][2 + world + sender]
            if sent != awaited:
                problem = f"rank {sender} sends {sent} rows to rank {receiver}, whose output_splits await {awaited} from it"
                return f"{problem}; want a's input_splits[b] = b's output_splits[a]; take output_splits from an exchange of the counts"
    return None


def _check_all_ranks(rows: torch.Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> None:
    """Compare every rank's view of the exchange and raise the same ValueError on all of them; one small all-gather and a host sync."""
    world, row_bytes = dist.get_world_size(group), rows.shape[1] * rows.element_size()
    splits = splits_or_invalid(in_splits, out_splits, world)
    mine = torch.tensor([rows.shape[0], row_bytes, *splits], dtype=torch.int64, device=rows.device)
    table = torch.empty(world, mine.numel(), dtype=torch.int64, device=rows.device)
    dist.all_gather_into_tensor(table.view(-1), mine, group=group)
    problem = disagreement(table.tolist(), world)  # host sync: only in checking mode
    if problem is not None:
        raise ValueError(f"all-to-all (this is rank {dist.get_rank(group)} of {world}): {problem}")


def check_locally(rows: torch.Tensor, out_splits: list[int], in_splits: list[int], world: int) -> None:
    """Raise ValueError unless the splits are of so many ranks and fit the rows."""
    for name, splits in (("input_splits", in_splits), ("output_splits", out_splits)):
        if len(splits) != world or min(splits) < 0:
            want = f"want {world} row counts of at least 0, one per rank of the group"
            raise ValueError(f"all-to-all: {name}={splits}, {want}; pass the group that they were made for")
    if sum(in_splits) != rows.shape[0]:
        want = f"want {rows.shape[0]}, the rows of the input"
        raise ValueError(
            f"all-to-all: input_splits {in_splits} add up to {sum(in_splits)}, {want}; pass the rows' counts, summed by destination rank"
        )


@contextlib.contextmanager
def _exchanging(where: str, group: ProcessGroup) -> Iterator[None]:
    """A context in which the ranks of a group exchange; any error in it is final for the group.

    Raises:
        ExchangeError: an earlier exchange failed.
    """
    if (failure := _failed.get(group)) is not None:
        raise ExchangeError(f"{failure}; this group makes no more exchanges; end its processes, or make a new group")
    try:
        yield
    except BaseException as error:
        _failed[group] = f"{where}: rank {dist.get_rank(group)} failed: {type(error).__name__}: {error}"
        raise


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows of any dtype as bytes. Empty rows are contiguous whatever their strides, except for `view`."""
    return (rows if rows.numel() else rows.new_empty(rows.shape)).view(torch.uint8)


def gather_all_rows(rows: torch.Tensor, splits: Sequence[int], group_name: str) -> torch.Tensor:
    """All-gather of rows, a different number from each rank.

    Ranks with fewer rows than others send padding up to the largest number.

    Args:
        rows: (splits[own rank], D) of any dtype.
        splits: rows of each rank, a host list, the same on every rank.
        group_name: name of the process group.

    Returns:
        (sum(splits), D), rank 0's rows first.

    Raises:
        ValueError: rows or splits that do not fit.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)  # a group of one rank
        >>> mxep.comm.gather_all_rows(torch.ones(4, 8), [4], group_name).shape
        torch.Size([4, 8])
    """
    group = resolve_group("all-gather", group_name)
    world, own, most = dist.get_world_size(group), splits[dist.get_rank(group)], max(splits)
    if len(splits) != world or own != rows.shape[0]:
        raise ValueError(f"all-gather: splits {list(splits)} for {rows.shape[0]} rows here, want the rows of each of {world} ranks")
    sent = rows.contiguous() if own == most else torch.cat((rows, rows.new_zeros(most - own, rows.shape[1])))
    out = torch.empty(world * most, rows.shape[1], dtype=rows.dtype, device=rows.device)
    with _exchanging("all-gather", group):
        dist.all_gather_into_tensor(out.view(torch.uint8), _as_bytes(sent), group=group)
    return out if min(splits) == most else torch.cat([part[:rows] for part, rows in zip(out.split(most), splits, strict=True)])


def gather_objects(mine: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's object, by rank; `group` None: of all ranks. Without torch.distributed, this process' own."""
    if not dist.is_initialized():
        return [mine]
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


def exchange_counts(counts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Each rank's rows per expert, sent to the ranks that hold the experts.

    Args:
        counts: (E,) int64, rows of this rank for every expert, E divisible by the group's size.
        group: process group.

    Returns:
        (W*L,) int64, rank-major: rows that rank r sends to local expert e at r*L + e.

    Raises:
        ValueError: in checking mode, on every rank: ranks that count different numbers of experts.

    Examples:
        >>> mxep.comm.exchange_counts(torch.tensor([2, 4]), torch.distributed.group.WORLD).tolist()  # a group of one rank, two experts
        [2, 4]
    """
    if checking(counts.device):
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=counts.device)
        dist.all_gather_into_tensor(sizes, counts.new_full((1,), counts.numel(), dtype=torch.int64), group=group)
        if len(set(sizes.tolist())) > 1:  # host sync: only in checking mode
            raise ValueError(
                f"counts exchange (this is rank {dist.get_rank(group)}): the ranks count {sizes.tolist()} experts, want one number; "
                "give every rank the same layer"
            )
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


class CollectiveTransport:
    """Exchanges over `torch.distributed`; a transport that wraps it inherits from it."""

    name = "collective"

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name

    @classmethod
    def make(cls, group_name: str, device: torch.device, timeout_s: float | None) -> Self:
        """The transport of a group: a row of `mxep.comm.transport.MAKERS`."""
        return cls(group_name)

    @property
    def world(self) -> int:
        return dist.get_world_size(resolve_group("exchange", self._group_name))

    @property
    def rank(self) -> int:
        return dist.get_rank(resolve_group("exchange", self._group_name))

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        """See `Transport.exchange`.

        Raises:
            ValueError: wrong splits; in checking mode also splits that differ between ranks, on every rank.
            ExchangeError: an earlier exchange of the group failed.
        """
        out = self._exchanged(rows, output_splits, input_splits)
        return out.clone() if out is rows else out

    def _exchanged(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        """`exchange`, or `rows` itself in a group of one rank."""
        group = resolve_group("all-to-all", self._group_name)
        out_splits, in_splits, rows, world = list(output_splits), list(input_splits), rows.contiguous(), group.size()
        if checking(rows.device):
            _check_all_ranks(rows, out_splits, in_splits, group)
        check_locally(rows, out_splits, in_splits, world)
        if world == 1:
            return rows
        out = torch.empty(sum(out_splits), rows.shape[1], dtype=rows.dtype, device=rows.device)
        with _exchanging("all-to-all", group):
            dist.all_to_all_single(out.view(torch.uint8), _as_bytes(rows), out_splits, in_splits, group=group)
        return out

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        return self._exchanged(direct.quantize_packed(rows, mode), output_splits, input_splits)

    def exchange_dequantized(
        self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str
    ) -> torch.Tensor:
        records = self.exchange_quantized(rows, output_splits, input_splits, mode)
        values = rows.new_empty((records.shape[0], rows.shape[1]))
        direct.dequantize_packed_into(records, values)
        return values

    def plain_copies(self, pieces: Sequence[torch.Tensor], region: int) -> None:
        return None

    def nbytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

"""The transports, which move rows between ranks, and the choice of one for each process group.

    collective   `torch.distributed`: NCCL on GPUs, gloo on CPUs; any number of machines (`mxep.comm.collective`)
    symmetric    ranks of one machine write into each other's memory by copy engines (`mxep.comm.symmetric`)

Every transport delivers the same bits.  A group takes the transport that `set_transport` gave it, else the one that `MXEP_TRANSPORT`
names, else "auto": symmetric if the group's GPUs can share memory, else collective; the log says once why.  "auto" chooses for each
device type separately, so CPU rows go over gloo whatever the GPUs of the same group use.  A transport that was chosen by name and
cannot run is an error.  A transport belongs to a process group, not to its name: a new group of that name gets its own transport.

To add a transport, write a class with the methods of `Transport` and give it a row in `MAKERS`; `set_transport` and `MXEP_TRANSPORT` then
take its name.  A class that wraps torch.distributed inherits from `CollectiveTransport` and overrides what differs:

    class LoggingTransport(CollectiveTransport):
        name = "logging"

        def exchange(self, rows, output_splits, input_splits):
            log.info("rank %d sends %d rows", self.rank, sum(input_splits))
            return super().exchange(rows, output_splits, input_splits)

    MAKERS["logging"] = LoggingTransport.make

That is all: `ep_grouped_mm`, the fused layer and the on-device all-to-all need nothing but `exchange` of a transport whose name has no row
in their tables.  A transport with a faster algorithm adds a row there: `mxep.fused.make_dispatcher.PLANNERS`,
`mxep.ep.ep_grouped_mm_collective.OVERLAPPED`, `mxep.ep.quantized_all_to_all.ON_DEVICE`.  Row counts of the separate
blocks and all-gathers go over torch.distributed; the counts of the fused layer go through `exchange`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mxep.comm.collective import CollectiveTransport, group_name_of, resolve_group
from mxep.comm.symmetric_setup import make_symmetric
from mxep.device import default_device_type

_WHERE = "set_transport"
_EVERY_DEVICE = ""
_log = logging.getLogger("mxep")


class Transport(Protocol):
    """What every transport does.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)
        >>> transport = mxep.comm.transport_of(group_name, torch.device("cpu"))
        >>> isinstance(transport.name, str), transport.world, transport.rank, transport.nbytes()
        (True, 1, 0, 0)
    """

    name: str

    @property
    def world(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        """All-to-all of rows (sum(input_splits), D) of any dtype -> (sum(output_splits), D), rows from rank 0 first; never an alias.

        Raises:
            ValueError: splits that do not fit, on every rank.
        """

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        """`exchange` of the packed records of rows (T', D), bf16 or float32 -> (R, record_bytes(D)) uint8; mode: a scaling mode's name."""

    def exchange_dequantized(
        self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str
    ) -> torch.Tensor:
        """The values of `exchange_quantized`: (R, D) in the dtype of rows."""

    def plain_copies(self, pieces: Sequence[torch.Tensor], region: int) -> Callable[[], None] | None:
        """For benchmarks, the limit of an exchange: copies of contiguous pieces[rank] to every other rank, without flags.

        Args:
            pieces: one for each rank; this rank's own is not copied.  region: bytes of the largest piece of any rank.

        Returns:
            a function that queues the copies; None if this transport does not copy.
        """

    def nbytes(self) -> int:
        """Bytes of this rank's GPU memory outside of torch's allocator."""

    def close(self) -> None:
        """Release memory and threads."""


# name -> a function of group name, device and time limit (None: the group's own) that returns the transport, or the reason why the group
# cannot have it; every rank of the group calls it together, and gets the same answer.
MAKERS: dict[str, Callable[[str, torch.device, float | None], Transport | str]] = {
    "collective": CollectiveTransport.make,
    "symmetric": make_symmetric,
}
TRANSPORTS = tuple(MAKERS)


@dataclass
class _GroupTransports:
    """The transports of one group.

    Attributes:
        group: their process group; None for a name without one (`register`).
        asked, timeout_s: how to choose for a device type that has no transport yet.
        by_device: the transports that "auto" chose, by device type; or one under `_EVERY_DEVICE`, registered or chosen by name.
        process: the process that made them; a process that was forked from it must not close them.
    """

    group: weakref.ref[ProcessGroup] | None  # weak, so that a destroyed group's threads can end
    asked: str = "auto"
    timeout_s: float | None = None
    by_device: dict[str, Transport] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)


_of_groups: dict[str, _GroupTransports] = {}  # by group name


def register(group_name: str, transport: Transport) -> None:
    """Set the transport of a group, or of any name that calls pass as their group.

    Args:
        group_name: name of the group; its former transports are closed.
        transport: used for rows on every type of device.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)
        >>> transport = mxep.comm.transport_of(group_name, torch.device("cpu"))
        >>> mxep.comm.register("experts", transport)
        >>> mxep.comm.exchange_rows(torch.zeros(4, 8), [4], [4], "experts").shape
        torch.Size([4, 8])
        >>> mxep.close_transports("experts")
    """
    close_transports(group_name)
    _of_groups[group_name] = _GroupTransports(_group_ref(group_name), by_device={_EVERY_DEVICE: transport})


def transport_of(group_name: str, device: torch.device) -> Transport:
    """The transport of a group for rows on `device`.

    `set_transport` decides it, else the first call for each type of device, on every rank alike, with the group's own time limit.  If the
    name now belongs to another process group, or to none, the old transport is closed and the choice is made again.

    Args:
        group_name: name of the process group.
        device: of the rows.

    Returns:
        the transport.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)  # of WORLD
        >>> mxep.comm.transport_of(group_name, torch.device("cpu")).name
        'collective'
    """
    kept = _of_groups.get(group_name)
    if kept is not None and _is_gone(kept, group_name):
        close_transports(group_name)  # of this rank only: it releases its memory and its views of the peers'
        kept = None
    if kept is None:
        kept = _GroupTransports(_group_ref(group_name), os.environ.get("MXEP_TRANSPORT", "auto"))
    found = kept.by_device.get(_EVERY_DEVICE) or kept.by_device.get(device.type)
    if found is None:
        found = _choose(kept.asked, group_name, device, kept.timeout_s)
        kept.by_device[device.type if kept.asked == "auto" else _EVERY_DEVICE] = found
        if kept.group is not None:  # without a group the calls raise; there may be one later
            _of_groups[group_name] = kept
    return found


def _group_ref(group_name: str) -> weakref.ref[ProcessGroup] | None:
    """The process group of that name, None if there is none."""
    try:
        return weakref.ref(resolve_group(_WHERE, group_name))
    except ValueError:
        return None


def _is_gone(kept: _GroupTransports, group_name: str) -> bool:
    """True if the process group is gone; called in every exchange, so it is only a look-up."""
    if kept.group is None:
        return False
    group = kept.group()
    try:
        return group is None or resolve_group(_WHERE, group_name) is not group
    except ValueError:
        return True


def exchange_rows(rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str) -> torch.Tensor:
    """`Transport.exchange` of a group's transport: the operator `torch.ops.mxep.exchange_rows`.

    Args:
        rows: (sum(input_splits), D) of any dtype.
        output_splits: rows received from each rank, a host list.
        input_splits: rows sent to each rank, a host list.
        group_name: name of the process group.

    Returns:
        (sum(output_splits), D), rows from rank 0 first; never an alias of `rows`.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)  # a group of one rank
        >>> mxep.comm.exchange_rows(torch.arange(4.0)[:, None], [4], [4], group_name).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    return transport_of(group_name, rows.device).exchange(rows, output_splits, input_splits)


def exchange_quantized(
    rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> torch.Tensor:
    """`Transport.exchange_quantized` of a group's transport: the operator `torch.ops.mxep.exchange_quantized`.

    Args:
        rows: (sum(input_splits), D) bf16 or float32, D a multiple of 32.
        output_splits: rows received from each rank, a host list.
        input_splits: rows sent to each rank, a host list.
        group_name: name of the process group.
        scaling_mode: a scaling mode's name.

    Returns:
        (sum(output_splits), record_bytes(D)) uint8: e4m3 data and scales of a row in one packed record.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)  # a group of one rank
        >>> records = mxep.comm.exchange_quantized(torch.ones(4, 128), [4], [4], group_name, "rceil")
        >>> records.shape, records.dtype  # 128 bytes of e4m3 and 4 scales, padded to 144 bytes
        (torch.Size([4, 144]), torch.uint8)
    """
    return transport_of(group_name, rows.device).exchange_quantized(rows, output_splits, input_splits, scaling_mode)


def exchange_dequantized(
    rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> torch.Tensor:
    """`Transport.exchange_dequantized` of a group's transport: the operator `torch.ops.mxep.exchange_dequantized`.

    Args:
        rows: (sum(input_splits), D) bf16 or float32, D a multiple of 32.
        output_splits: rows received from each rank, a host list.
        input_splits: rows sent to each rank, a host list.
        group_name: name of the process group.
        scaling_mode: a scaling mode's name.

    Returns:
        (sum(output_splits), D) in the dtype of rows, the values that the MXFP8 rows represent.

    Examples:
        >>> group_name = mxep.comm.group_name_of("example", None)  # a group of one rank
        >>> rows = torch.ones(4, 128)
        >>> torch.equal(mxep.comm.exchange_dequantized(rows, [4], [4], group_name, "rceil"), rows)
        True
    """
    return transport_of(group_name, rows.device).exchange_dequantized(rows, output_splits, input_splits, scaling_mode)


def set_transport(
    name: str,
    group: str | ProcessGroup | None = None,
    *,
    timeout_s: float | None = None,
    device: torch.device | str | None = None,
) -> str:
    """Choose the transport of a process group. Every rank of the group calls it, with the same arguments.

    Args:
        name: "collective", "symmetric", or "auto": symmetric on several GPUs of one machine that reach each other, else collective; rows on
            another type of device than `device` choose for themselves.
        group: process group, its name, or None for WORLD.
        timeout_s: over symmetric memory: seconds after which a rank that waits for another raises `ExchangeError`.  None is the group's
            own limit, the `timeout` of `init_process_group` or `new_group`, or 300 if its backend does not report it.
        device: of the rows; None is the current GPU where the group has a backend for GPUs, else the CPU.

    Returns:
        the name of the transport that was taken.

    Raises:
        ValueError: an unknown name or group, a time limit that is none, or symmetric memory that this group cannot have (says why).

    Examples:
        >>> mxep.set_transport("auto", timeout_s=60)  # gloo ranks on CPUs
        'collective'
    """
    if timeout_s is not None and (not isinstance(timeout_s, int | float) or not timeout_s > 0):
        raise ValueError(f"{_WHERE}: timeout_s={timeout_s!r}, want seconds, more than 0, or None for the group's own limit")
    group_name = group_name_of(_WHERE, group)
    if group_name not in _of_groups:  # `register` takes names of no group
        resolve_group(_WHERE, group_name)
    if device is None:
        on_gpu = default_device_type() == "cuda" and "cuda" in str(dist.get_backend_config(resolve_group(_WHERE, group_name)))
        device = "cuda" if on_gpu else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    transport = _choose(name, group_name, device, timeout_s)
    close_transports(group_name)
    by_device = {device.type if name == "auto" else _EVERY_DEVICE: transport}
    _of_groups[group_name] = _GroupTransports(_group_ref(group_name), name, timeout_s, by_device)
    return transport.name


def close_transports(group_name: str | None = None) -> None:
    """Close one group's transports, or all of them.

    Call it before `torch.distributed.destroy_process_group` if a transport is symmetric.  All are closed, then the first error is raised.
    In a forked process this does nothing: the transports belong to the parent process, and closing them would end its exchanges.

    Args:
        group_name: of the group; None closes the transports of all groups.

    Examples:
        >>> mxep.set_transport("collective")
        'collective'
        >>> mxep.close_transports()  # then torch.distributed.destroy_process_group()
    """
    names = [group_name] if group_name is not None else list(_of_groups)
    with contextlib.ExitStack() as closing:
        for name in names:
            if name in _of_groups and _of_groups[name].process == os.getpid():
                for transport in _of_groups.pop(name).by_device.values():
                    closing.callback(transport.close)


atexit.register(close_transports)


@torch.inference_mode(False)  # a transport's counters are written in training too, wherever its first exchange is
def _choose(name: str, group_name: str, device: torch.device, timeout_s: float | None) -> Transport:
    if name not in ("auto", *MAKERS):
        raise ValueError(f"{_WHERE}: transport {name!r} is unknown, want 'auto', {' or '.join(map(repr, MAKERS))}")
    choice = name
    if name == "auto":
        shared = device.type != "cpu" and dist.get_world_size(resolve_group(_WHERE, group_name)) > 1
        choice = "symmetric" if shared else "collective"
    made = MAKERS[choice](group_name, device, timeout_s)
    if not isinstance(made, str):
        return made
    if name != "auto":
        raise ValueError(f"{_WHERE}: transport {name!r} does not run on group {group_name!r}: {made}; take 'collective' or 'auto'")
    _log.warning("mxep: group %r exchanges over torch.distributed, not over symmetric memory: %s", group_name, made)
    return CollectiveTransport(group_name)

"""How rows get from rank to rank: the transports, and which one a process group takes.

    collective   `torch.distributed`: NCCL on GPUs, gloo on CPUs; any machine, any number of nodes
    symmetric    ranks of one machine write into each other's memory by copy engines (`mxep.comm.symmetric`)

The bits are the same over each.  A group takes the transport that `set_transport` gave it, else the one that `MXEP_TRANSPORT` names, else
"auto": symmetric where the group's GPUs can share memory, else collective, and then the log says once why.  "auto" decides for each type of
device apart, so CPU rows of a group with a backend for each go over gloo whatever its GPUs do.  A transport asked for by its name that
cannot run is an error.  A transport belongs to a process group, not to its name: a new group of that name gets its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mxep.comm import collective
from mxep.comm.board import Board, ExchangeError, open_file, shared_file
from mxep.comm.collective import group_name_of, resolve_group
from mxep.comm.lanes import CudaLanes
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.torch_memory import TorchMemory
from mxep.device import default_device_type, gpu_identity, host_identity, peer_access_problem

TRANSPORTS = ("collective", "symmetric")
DEFAULT_TIMEOUT_S = 300.0  # where a group does not tell its own
_WHERE = "set_transport"
_log = logging.getLogger("mxep")
T = TypeVar("T")


class Transport(Protocol):
    """What every transport does."""

    name: str

    @property
    def world(self) -> int:
        """How many ranks the group has."""

    @property
    def rank(self) -> int:
        """This one's number in the group."""

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        """All-to-all of rows (sum(input_splits), D) of any dtype -> (sum(output_splits), D), rows from rank 0 first; never an alias.

        Raises:
            ValueError: splits that do not fit, on every rank.
        """

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        """`exchange` of the packed records of rows (T', D), bf16 or float32 -> (R, record_bytes(D)) uint8; mode: "rceil" or "floor"."""

    def exchange_dequantized(
        self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str
    ) -> torch.Tensor:
        """The values of what `exchange_quantized` brings: (R, D) in the dtype of rows."""

    def nbytes(self) -> int:
        """Memory of this rank's GPU that it holds outside of torch's allocator."""

    def close(self) -> None:
        """Let go of memory and threads."""


class CollectiveTransport:
    """`torch.distributed`, as `mxep.comm.collective` uses it."""

    name = "collective"

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name

    @property
    def world(self) -> int:
        return dist.get_world_size(resolve_group("exchange", self._group_name))

    @property
    def rank(self) -> int:
        return dist.get_rank(resolve_group("exchange", self._group_name))

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        return collective.exchange_rows(rows, output_splits, input_splits, self._group_name)

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        return self.exchange(torch.ops.mxep.quantize_packed(rows, mode), output_splits, input_splits)

    def exchange_dequantized(
        self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str
    ) -> torch.Tensor:
        records = self.exchange_quantized(rows, output_splits, input_splits, mode)
        values = rows.new_empty((records.shape[0], rows.shape[1]))
        torch.ops.mxep.dequantize_packed_into(records, values)
        return values

    def nbytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


@dataclass
class _Held:
    """The transports of one group.

    Attributes:
        group: the process group that they were made for; None for a name that had none (`register`).
        asked, timeout_s: how to choose for a type of device that has none yet.
        named: the one of all rows, where it was given or asked for by name.
        chosen: those that "auto" took, by type of device.
        process: the one that made them; in a process that was forked from it they are not to be closed.
    """

    group: weakref.ref[ProcessGroup] | None  # weak: a destroyed group's threads must not live on here
    asked: str = "auto"
    timeout_s: float | None = None
    named: Transport | None = None
    chosen: dict[str, Transport] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)


_held: dict[str, _Held] = {}  # by group name


def register(group_name: str, transport: Transport) -> None:
    """Give a group, or any name that calls pass as their group, this transport."""
    close_transports(group_name)
    _held[group_name] = _Held(_find(group_name), named=transport)


def transport_of(group_name: str, device: torch.device) -> Transport:
    """The transport of a group for rows on `device`.

    The first call for a type of device decides it, on every rank alike, where `set_transport` has not, with the group's own time limit.
    Where the name has passed to another process group, or to none, the old transport is closed and the choice made anew.
    """
    held = _held.get(group_name)
    if held is not None and _outlived(held, group_name):
        close_transports(group_name)  # of this rank alone: it lets go of memory here and of views of the peers', who may be gone
        held = None
    if held is None:
        held = _Held(_find(group_name), os.environ.get("MXEP_TRANSPORT", "auto"))
    found = held.named or held.chosen.get(device.type)
    if found is None:
        found = _choose(held.asked, group_name, device, held.timeout_s)
        _keep(held, device, found)
        if held.group is not None:  # of a group that there is not, the calls say so; there may be one later
            _held[group_name] = held
    return found


def _find(group_name: str) -> weakref.ref[ProcessGroup] | None:
    """The process group of that name, None when there is none."""
    try:
        return weakref.ref(resolve_group(_WHERE, group_name))
    except ValueError:
        return None


def _outlived(held: _Held, group_name: str) -> bool:
    """Whether the process group is gone for which these were made; asked in every exchange, so it may cost no more than a look-up."""
    if held.group is None:
        return False
    group = held.group()
    try:
        return group is None or resolve_group(_WHERE, group_name) is not group
    except ValueError:
        return True


def _keep(held: _Held, device: torch.device, transport: Transport) -> None:
    if held.asked == "auto":
        held.chosen[device.type] = transport
    else:
        held.named = transport


def exchange_rows(rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str) -> torch.Tensor:
    """`Transport.exchange` over the transport of a group: what the operator `torch.ops.mxep.exchange_rows` does."""
    return transport_of(group_name, rows.device).exchange(rows, output_splits, input_splits)


def exchange_quantized(
    rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> torch.Tensor:
    """`Transport.exchange_quantized` over the transport of a group: the operator `torch.ops.mxep.exchange_quantized`."""
    return transport_of(group_name, rows.device).exchange_quantized(rows, output_splits, input_splits, scaling_mode)


def exchange_dequantized(
    rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, scaling_mode: str
) -> torch.Tensor:
    """`Transport.exchange_dequantized` over the transport of a group: the operator `torch.ops.mxep.exchange_dequantized`."""
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
            own limit, the `timeout` of `init_process_group` or `new_group`, or 300 where its backend does not tell.
        device: of the rows; None is the current GPU where the group has a backend for GPUs, else the CPU.

    Returns:
        the name of the transport that was taken.

    Raises:
        ValueError: an unknown name, a time limit that is none, or symmetric memory that this group cannot have (says why).
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"{_WHERE}: timeout_s={timeout_s}, want seconds, more than 0, or None for the group's own limit")
    group_name = group_name_of(_WHERE, group)
    if device is None:
        on_gpu = default_device_type() == "cuda" and "cuda" in str(dist.get_backend_config(resolve_group(_WHERE, group_name)))
        device = "cuda" if on_gpu else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    transport = _choose(name, group_name, device, timeout_s)
    close_transports(group_name)
    held = _held[group_name] = _Held(_find(group_name), name, timeout_s)
    _keep(held, device, transport)
    return transport.name


def close_transports(group_name: str | None = None) -> None:
    """Close one group's transports, or all of them; before `torch.distributed.destroy_process_group` where one is symmetric.

    All are closed, then the first error is raised.  In a process that was forked from the one that made them nothing is done: they are the
    other process's, and closing them would end its exchanges.
    """
    names = [group_name] if group_name is not None else list(_held)
    with contextlib.ExitStack() as closing:
        for name in names:
            if name in _held and _held[name].process == os.getpid():
                held = _held.pop(name)
                for transport in (*held.chosen.values(), *([] if held.named is None else [held.named])):
                    closing.callback(transport.close)


atexit.register(close_transports)


# ---------------------------------------------------------------- choosing


@torch.inference_mode(False)  # whoever calls first: what a transport counts in is written to in training too
def _choose(name: str, group_name: str, device: torch.device, timeout_s: float | None) -> Transport:
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"{_WHERE}: transport {name!r} is unknown, want 'auto', {' or '.join(repr(t) for t in TRANSPORTS)}")
    if name == "collective" or (name == "auto" and device.type == "cpu"):
        return CollectiveTransport(group_name)  # of a group that there is not, its calls say so
    group = resolve_group(_WHERE, group_name)
    if name == "auto" and dist.get_world_size(group) == 1:
        return CollectiveTransport(group_name)
    made = _make_symmetric(group, device, _timeout_of(group, device) if timeout_s is None else timeout_s)
    if not isinstance(made, str):
        return made
    if name == "symmetric":
        raise ValueError(f"{_WHERE}: symmetric memory does not run on group {group_name!r}: {made}; take 'collective' or 'auto'")
    _log.warning("mxep: group %r exchanges over torch.distributed, not over symmetric memory: %s", group_name, made)
    return CollectiveTransport(group_name)


def _timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Seconds that the group's own collectives on `device` wait for a rank, `DEFAULT_TIMEOUT_S` where its backend does not tell."""
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # no backend for the device; a backend without options
        return DEFAULT_TIMEOUT_S


def _all(group: ProcessGroup, mine: Any) -> list[Any]:
    """Every rank's object, by rank."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


def _tried(make: Callable[[], T]) -> tuple[T | None, tuple[bool, str] | None]:
    """What `make` makes, or (whether only another rank told of it, text) of its error."""
    try:
        return make(), None
    except Exception as error:
        return None, (isinstance(error, ExchangeError), f"{type(error).__name__}: {error}")


def group_problem(facts: Sequence[tuple[str, str, str | None]]) -> str | None:
    """Why ranks with these (host, GPU, own problem) cannot share memory, None when they can; the same text on every rank."""
    hosts = [host for host, _, _ in facts]
    if len(set(hosts)) > 1:
        return f"its ranks are on {len(set(hosts))} hosts, and symmetric memory is within one"
    for rank, (_, _, problem) in enumerate(facts):
        if problem is not None:
            return f"rank {rank}: {problem}"
    gpus = [gpu for _, gpu, _ in facts]
    return "two of its ranks are on one GPU, want a GPU each" if len(set(gpus)) < len(gpus) else None


def _make_symmetric(group: ProcessGroup, device: torch.device, timeout_s: float) -> SymmetricTransport | str:
    """The transport, or why this group cannot have it; every rank takes every step, and comes to the same end."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    who = host_identity(), gpu_identity(device)
    peers = [gpu for host, gpu in _all(group, who) if host == who[0]]
    problem = group_problem(_all(group, (*who, peer_access_problem(device, peers))))
    if problem is not None:
        return problem
    with contextlib.ExitStack() as files:
        file, trouble = _all(group, _tried(lambda: files.enter_context(shared_file(world))) if rank == 0 else None)[0]
        if trouble is not None:
            return f"rank 0 made no file that the ranks could share: {trouble[1]}"
        path, token = file
        memory = open_file(path, token, world)
        opened = _all(group, memory is not None)
    if memory is None or not all(opened):
        blind = [r for r, seen in enumerate(opened) if not seen]
        return f"ranks {blind} do not see the file that rank 0 made at {path}: they share no memory"
    board = Board(memory, rank, world, timeout_s)
    made, trouble = _tried(
        lambda: SymmetricTransport(TorchMemory(group.group_name, device, board), board, CudaLanes(device), device, timeout_s)
    )
    if trouble is not None:
        board.fail(trouble[1])
    # Ranks that wait on the board for one that failed hear of it there and come here too; so do all when all fail at one step.  One that
    # fails alone inside torch's rendezvous leaves the others in there, in its store up to the store's time limit, in its exchange of
    # handles for good: then nobody falls back, and this gather ends in the group's time limit with the backend's error.
    troubles = [(*text, r) for r, text in enumerate(_all(group, trouble)) if text is not None]
    if not troubles:
        assert made is not None
        return made
    if made is not None:
        made.close()
    _, text, failed = min(troubles, key=lambda trouble: (trouble[0], trouble[2]))  # the first that failed by itself
    return f"rank {failed} could not make it: {text}"

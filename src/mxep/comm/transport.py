"""How rows get from rank to rank: the transports, and which one a process group takes.

    collective   `torch.distributed`: NCCL on GPUs, gloo on CPUs; any machine, any number of nodes
    symmetric    ranks of one machine write into each other's memory by copy engines (`mxep.comm.symmetric`)

The bits are the same over each.  A group takes the transport that `set_transport` gave it, else the one that `MXEP_TRANSPORT` names, else
"auto": symmetric where the group's GPUs can share memory, else collective, and then the log says once why.  A transport asked for by its
name that cannot run is an error.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mxep.comm import collective
from mxep.comm.board import Board, create_file, open_file
from mxep.comm.collective import group_name_of, resolve_group
from mxep.comm.lanes import CudaLanes
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.torch_memory import TorchMemory
from mxep.device import default_device_type, gpu_identity, host_identity, peer_access_problem

TRANSPORTS = ("collective", "symmetric")
DEFAULT_TIMEOUT_S = 300.0
_WHERE = "set_transport"
_log = logging.getLogger("mxep")


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


_transports: dict[str, Transport] = {}  # by group name


def register(group_name: str, transport: Transport) -> None:
    """Give a group, or any name that calls pass as their group, this transport."""
    close_transports(group_name)
    _transports[group_name] = transport


def transport_of(group_name: str, device: torch.device) -> Transport:
    """The transport of a group; the first call decides it, on every rank alike, where `set_transport` has not."""
    found = _transports.get(group_name)
    if found is None:
        asked = os.environ.get("MXEP_TRANSPORT", "auto")
        found = _transports[group_name] = _choose(asked, group_name, device, DEFAULT_TIMEOUT_S)
    return found


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
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
) -> str:
    """Choose the transport of a process group. Every rank of the group calls it, with the same arguments.

    Args:
        name: "collective", "symmetric", or "auto": symmetric on several GPUs of one machine that reach each other, else collective.
        group: process group, its name, or None for WORLD.
        timeout_s: over symmetric memory: seconds after which a rank that waits for another raises `ExchangeError`.
        device: of the rows; None is the current GPU where the group has a backend for GPUs, else the CPU.

    Returns:
        the name of the transport that was taken.

    Raises:
        ValueError: an unknown name, a time limit that is none, or symmetric memory that this group cannot have (says why).
    """
    if not timeout_s > 0:
        raise ValueError(f"{_WHERE}: timeout_s={timeout_s}, want seconds, more than 0")
    group_name = group_name_of(_WHERE, group)
    if device is None:
        on_gpu = default_device_type() == "cuda" and "cuda" in str(dist.get_backend_config(resolve_group(_WHERE, group_name)))
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    transport = _choose(name, group_name, torch.device(device), timeout_s)
    register(group_name, transport)
    return transport.name


def close_transports(group_name: str | None = None) -> None:
    """Close one group's transport, or all of them; before `torch.distributed.destroy_process_group` where one is symmetric."""
    for name in [group_name] if group_name is not None else list(_transports):
        transport = _transports.pop(name, None)
        if transport is not None:
            transport.close()


atexit.register(close_transports)


# ---------------------------------------------------------------- choosing


def _choose(name: str, group_name: str, device: torch.device, timeout_s: float) -> Transport:
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"{_WHERE}: transport {name!r} is unknown, want 'auto', {' or '.join(repr(t) for t in TRANSPORTS)}")
    if name == "collective" or (name == "auto" and device.type == "cpu"):
        return CollectiveTransport(group_name)  # of a group that there is not, its calls say so
    group = resolve_group(_WHERE, group_name)
    if name == "auto" and dist.get_world_size(group) == 1:
        return CollectiveTransport(group_name)
    made = _make_symmetric(group, device, timeout_s)
    if isinstance(made, SymmetricTransport):
        return made
    if name == "symmetric":
        raise ValueError(f"{_WHERE}: symmetric memory does not run on group {group_name!r}: {made}; take 'collective' or 'auto'")
    _log.warning("mxep: group %r exchanges over torch.distributed, not over symmetric memory: %s", group_name, made)
    return CollectiveTransport(group_name)


def _all(group: ProcessGroup, mine: Any) -> list[Any]:
    """Every rank's object, by rank."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


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
    path, token = create_file(world) if rank == 0 else (Path(), b"")
    path, token = _all(group, (path, token))[0]
    memory = open_file(path, token, world)
    opened = _all(group, memory is not None)
    if rank == 0:
        path.unlink()
    if memory is None or not all(opened):
        blind = [r for r, seen in enumerate(opened) if not seen]
        return f"ranks {blind} do not see the file that rank 0 made at {path}: they share no memory"
    board = Board(memory, rank, world, timeout_s)
    return SymmetricTransport(TorchMemory(group.group_name, device, board), board, CudaLanes(device), device, timeout_s)

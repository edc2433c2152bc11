"""Whether the ranks of a process group can share memory, and the symmetric transport of a group that can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mxep.comm.collective import gather_objects, resolve_group
from mxep.comm.copy_streams import CudaCopyStreams
from mxep.comm.host_allgather import ExchangeError, HostAllGather, open_file, shared_file
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.symmetric_memory import TorchMemory
from mxep.device import gpu_identity, host_identity, peer_access_problem

DEFAULT_TIMEOUT_S = 300.0  # of a group whose backend does not say its own
T = TypeVar("T")


def timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Seconds that the group's own collectives on `device` wait for a rank, `DEFAULT_TIMEOUT_S` if its backend does not say."""
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # no backend for the device; a backend without options
        return DEFAULT_TIMEOUT_S


def _tried(make: Callable[[], T]) -> tuple[T | None, tuple[bool, str] | None]:
    """The result of `make`, or of its error (whether it reports another rank's failure, text)."""
    try:
        return make(), None
    except Exception as error:
        return None, (isinstance(error, ExchangeError), f"{type(error).__name__}: {error}")


def group_problem(facts: Sequence[tuple[str, str, str | None]]) -> str | None:
    """Why ranks with these (host, GPU, own problem) cannot share memory, None if they can; the same text on every rank."""
    hosts = [host for host, _, _ in facts]
    if len(set(hosts)) > 1:
        return f"its ranks are on {len(set(hosts))} hosts, and symmetric memory is within one"
    for rank, (_, _, problem) in enumerate(facts):
        if problem is not None:
            return f"rank {rank}: {problem}"
    gpus = [gpu for _, gpu, _ in facts]
    return "two of its ranks are on one GPU, want a GPU each" if len(set(gpus)) < len(gpus) else None


def make_symmetric(group_name: str, device: torch.device, timeout_s: float | None) -> SymmetricTransport | str:
    """The transport, or why this group cannot have it: a row of `mxep.comm.transport.MAKERS`.

    timeout_s: None takes the group's own limit.
    """
    group = resolve_group("set_transport", group_name)
    return _set_up(group, device, timeout_of(group, device) if timeout_s is None else timeout_s)


def _set_up(group: ProcessGroup, device: torch.device, timeout_s: float) -> SymmetricTransport | str:
    """Every rank takes every step and returns the same answer."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    who = host_identity(), gpu_identity(device)
    peers = [gpu for host, gpu in gather_objects(who, group) if host == who[0]]
    problem = group_problem(gather_objects((*who, peer_access_problem(device, peers)), group))
    if problem is not None:
        return problem
    with contextlib.ExitStack() as files:
        file, error = gather_objects(_tried(lambda: files.enter_context(shared_file(world))) if rank == 0 else None, group)[0]
        if error is not None:
            return f"rank 0 made no file that the ranks could share: {error[1]}"
        path, token = file
        memory = open_file(path, token, world)
        opened = gather_objects(memory is not None, group)
    if memory is None or not all(opened):
        blind = [r for r, seen in enumerate(opened) if not seen]
        return f"ranks {blind} do not see the file that rank 0 made at {path}: they share no memory"
    rendezvous = HostAllGather(memory, rank, world, timeout_s)
    memory_of_torch = TorchMemory(group.group_name, device, rendezvous)
    made, error = _tried(lambda: SymmetricTransport(memory_of_torch, rendezvous, CudaCopyStreams(device), device, timeout_s))
    if error is not None:
        rendezvous.fail(error[1])
    # Ranks that wait in the rendezvous for a failed rank get its error and continue here, as do all ranks if all fail at one step.  If a
    # rank fails alone inside torch's own rendezvous, the others wait there, in its store up to the store's time limit, in its exchange of
    # handles without a limit: then no rank falls back, and this gather ends in the group's time limit with the backend's error.
    errors = [(*text, r) for r, text in enumerate(gather_objects(error, group)) if text is not None]
    if not errors:
        assert made is not None
        return made
    if made is not None:
        made.close()
    _, text, failed = min(errors, key=lambda error: (error[0], error[2]))  # the first rank that failed by itself
    return f"rank {failed} could not make it: {text}"

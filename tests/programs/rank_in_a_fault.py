"""One rank of a fused layer over symmetric memory, in a process that ends as a user's does; tests/faults.py starts all of them.

Rank 1 kills or stops itself at a known point; the others must end with an uncaught ExchangeError.

    python rank_in_a_fault.py RANK WORLD FOLDER DEVICE MOMENT SIGNAL TIMEOUT_S
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tests.end_with_parent  # noqa: F401, first: other imports take seconds
import torch
import torch.distributed as dist
import triton
from tests.faults import MOMENTS
from tests.fused.test_fused_ranks import batch, layer
from tests.fused.test_fused_symmetric import spread
from tests.moe_truth import walk
from tests.virtual import HostCopyStreams

from mxep.comm import ExchangeError, register, set_transport, transport_of
from mxep.comm.host_allgather import HostAllGather, open_file
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.symmetric_memory import SymmBuffer
from mxep.fused.expert_chunks import ChunkBounds
from mxep.ops.runtime import launch

VICTIM = 1
_WARM_S = 100  # while kernels are compiled
_SPIN = 200 * 10**9  # cycles, more than a minute


class FileMemory:
    """Buffers that processes without a GPU share: one file for each rank."""

    def __init__(self, rank: int, world: int, folder: Path, rendezvous: HostAllGather) -> None:
        self._rank, self._world, self._folder, self._rendezvous, self._count = rank, world, folder, rendezvous, 0

    def allocate(self, size: int) -> SymmBuffer:
        paths = [self._folder / f"buffer {self._count} of {rank}" for rank in range(self._world)]
        self._count += 1
        paths[self._rank].write_bytes(bytes(size))
        self._rendezvous.all_gather([])
        maps = [mmap.mmap(os.open(path, os.O_RDWR), size) for path in paths]
        addresses = [ctypes.addressof(ctypes.c_byte.from_buffer(there)) for there in maps]
        return SymmBuffer(torch.frombuffer(maps[self._rank], dtype=torch.uint8), addresses, maps)

    def release(self, buffers: Sequence[SymmBuffer]) -> None:
        raise AssertionError("steps of the same sizes keep their memory")

    def flags(self, count: int) -> SymmBuffer:
        return self.allocate(4 * count)


def over_files(rank: int, world: int, folder: Path, timeout_s: float) -> str:
    """The name of a group of processes without GPUs."""
    path, token = (folder / "rendezvous").read_text().split()
    shared = open_file(Path(path), bytes.fromhex(token), world)
    assert shared is not None
    cpu, rendezvous = torch.device("cpu"), HostAllGather(shared, rank, world, _WARM_S)
    streams = HostCopyStreams(cpu, timeout_s, rendezvous.failure)
    register("files", SymmetricTransport(FileMemory(rank, world, folder, rendezvous), rendezvous, streams, cpu, timeout_s))
    rendezvous.timeout_s = timeout_s  # all ranks are there
    return "files"


def over_gpus(rank: int, world: int, folder: Path, timeout_s: float) -> str:
    """The name of a group of GPUs, whose time limit is a user's; kernels have been compiled in another one."""
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    warm, group = (dist.new_group(list(range(world))) for _ in range(2))
    assert set_transport("symmetric", warm, timeout_s=_WARM_S) == "symmetric"
    with patch.object(ChunkBounds, "empty", lambda bounds, chunk: False):  # as to a host that runs far ahead, which launches all kernels
        steps(rank, world, warm.group_name, 1)
    steps(rank, world, warm.group_name, 2)
    assert set_transport("symmetric", group, timeout_s=timeout_s) == "symmetric"
    return group.group_name


def steps(rank: int, world: int, name: str, count: int) -> None:
    """Repeats one step, forward and backward of a fused layer; the host waits for the device only at the end of each step."""
    x, dy = batch(world, "random", torch.bfloat16)
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), rank, world, name)
    for _ in range(count):
        walk(moe, x[rank], dy[rank])
        if x[rank].is_cuda:
            torch.cuda.synchronize()


def around_number(number: int, transport: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` before an exchange opens, and `after` behind its host all-gather; exchanges count from 1, from now on."""
    opens, count = transport._open, [0]

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] != number:
            return opens(*arguments)
        before()
        opened = opens(*arguments)
        after()
        return opened

    transport._open = counted


def forget_kernels() -> None:
    """Triton's kernels are loaded again when they are called next: the driver may wait for the GPU then, and hold its lock."""
    launch._variants.clear()
    for module in list(sys.modules.values()):
        for kernel in list(vars(module).values()):
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()


def main(rank: int, world: int, folder: Path, device: str, moment: str, name_of_signal: str, timeout_s: float) -> None:
    faulthandler.register(signal.SIGUSR1)  # a test asks a hanging rank for its stacks
    name = (over_gpus if device == "cuda" else over_files)(rank, world, folder, timeout_s)
    transport: Any = transport_of(name, torch.device(device, rank if device == "cuda" else None))
    steps(rank, world, name, 2)  # allocates memory
    before = transport.num_exchanges
    steps(rank, world, name, 1)
    assert transport.num_exchanges - before == 6, "forward: tables, tokens, sums; backward: dy, scores, sums"

    def strike() -> None:
        (folder / "struck.part").write_text(str(time.monotonic()))
        (folder / "struck.part").rename(folder / "struck")
        os.kill(os.getpid(), getattr(signal, name_of_signal))
        time.sleep(1)  # backward's thread would run on for a moment, since the signal goes to the main thread

    def nothing() -> None:
        pass

    if rank != VICTIM and moment.endswith("loading"):
        around_number(MOMENTS[moment], transport, nothing, forget_kernels)
    elif rank == VICTIM and moment == "between steps":
        strike()
    elif rank == VICTIM:
        spins = moment.endswith("busy")
        around_number(MOMENTS[moment], transport, (lambda: torch.cuda._sleep(_SPIN)) if spins else nothing, strike)
    try:
        steps(rank, world, name, 3)
    except ExchangeError:
        (folder / f"raised{rank}").write_text(str(time.monotonic()))
        raise
    raise AssertionError("no exchange raised for the missing rank")


if __name__ == "__main__":
    rank, world, folder, device, moment, name_of_signal, timeout_s = sys.argv[1:]
    main(int(rank), int(world), Path(folder), device, moment, name_of_signal, float(timeout_s))

"""Virtual ranks: the symmetric transport with all its ranks in this process, a thread each, on the CPU or on one GPU."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mxep.comm.board import Board, ExchangeError, board_bytes
from mxep.comm.lanes import CudaLanes, HostLanes
from mxep.comm.pool import Slab
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.transport import close_transports, register

_numbers = itertools.count()


class Meeting:
    """Where the threads meet to tell each other addresses."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world, timeout=timeout_s)
        self.addresses, self.shorts = [0] * world, list[bool]()
        self.memory: list[torch.Tensor] = []  # lives until all ranks are done, as what peers have mapped does
        self.released: list[torch.Tensor] = []  # of it what ranks have let go of: NaN bytes, for good

    def addresses_of_all(self, rank: int, mine: torch.Tensor) -> list[int]:
        self.memory.append(mine)
        self.barrier.wait()
        self.addresses[rank] = mine.data_ptr()
        self.barrier.wait()
        return list(self.addresses)

    def short(self, mine: bool) -> int:
        """How many ranks say so."""
        self.shorts.append(mine)
        self.barrier.wait()
        count = sum(self.shorts)
        if self.barrier.wait() == 0:
            self.shorts.clear()
        self.barrier.wait()
        return count


class SharedMemory:
    """Slabs that are ordinary tensors, full of NaN bytes: what nobody wrote shows, and what was let go of.

    Attributes:
        room: bytes that slabs of this rank may take together.
    """

    def __init__(self, rank: int, meeting: Meeting, device: torch.device, flags_on: str = "cpu") -> None:
        self._rank, self._meeting, self._device, self._flags_on = rank, meeting, device, flags_on
        self.room = 1 << 60

    def allocate(self, size: int) -> Slab:
        if short := self._meeting.short(self.room < size):
            raise torch.OutOfMemoryError(f"no room for {size} bytes on {short} ranks")
        self.room -= size
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=self._device)
        if memory.is_cuda:
            torch.cuda.current_stream().synchronize()
        return Slab(memory, self._meeting.addresses_of_all(self._rank, memory))

    def release(self, slabs: Sequence[Slab]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._meeting.barrier.wait()
        for slab in slabs:
            self.room += slab.memory.numel()
            self._meeting.released.append(slab.memory.fill_(0xFF))
            slab.let_go()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._meeting.barrier.wait()

    def flags(self, count: int) -> Slab:
        memory = torch.zeros(4 * count, dtype=torch.uint8, device=self._flags_on)
        return Slab(memory, self._meeting.addresses_of_all(self._rank, memory))


def alone(timeout_s: float = 20, mailbox_bytes: int = 1 << 20) -> SymmetricTransport:
    """One rank on the current GPU, with the streams and flags of a real one."""
    device = torch.device("cuda", torch.cuda.current_device())
    board = Board(bytearray(board_bytes(1)), 0, 1, timeout_s)
    memory = SharedMemory(0, Meeting(1, timeout_s), device, flags_on="cuda")
    return SymmetricTransport(memory, board, CudaLanes(device), device, timeout_s, mailbox_bytes)


def _over_the_host(memory: SharedMemory, board: Board, device: torch.device, timeout_s: float, mailbox_bytes: int) -> SymmetricTransport:
    return SymmetricTransport(memory, board, HostLanes(device, timeout_s, board.failure), device, timeout_s, mailbox_bytes)


class VirtualGroup:
    """One more group of virtual ranks, made before `run_virtual` calls the function that joins it; `ranks` are its members' there."""

    def __init__(self, ranks: Sequence[int], timeout_s: float = 20) -> None:
        self.ranks, self._timeout_s = ranks, timeout_s
        self._memory, self._meeting = bytearray(board_bytes(len(ranks))), Meeting(len(ranks), timeout_s)

    @contextlib.contextmanager
    def joined(self, rank: int, name: str, device: str) -> Iterator[int]:
        """Inside of it this thread's rank has the group under that name; its number there."""
        me, where = list(self.ranks).index(rank), torch.empty(0, device=device).device
        board, shared = Board(self._memory, me, len(self.ranks), self._timeout_s), SharedMemory(me, self._meeting, where)
        register(name, _over_the_host(shared, board, where, self._timeout_s, 1 << 20))
        try:
            yield me
        finally:
            close_transports(name)


def run_virtual(
    function: Callable,
    world: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 20,
    mailbox_bytes: int = 1 << 20,
    transport: Callable[..., SymmetricTransport] = _over_the_host,
) -> list:
    """Call `function(rank, world, group_name, *args)` on `world` threads joined by symmetric memory, over such a transport.

    Returns:
        what the ranks returned, by rank.  What the first of them raised is raised here.
    """
    memory, meeting, where, call = bytearray(board_bytes(world)), Meeting(world, timeout_s), torch.device(device), next(_numbers)
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())

    def main(rank: int) -> Any:
        name = f"virtual{call}-{rank}"
        board = Board(memory, rank, world, timeout_s)
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if where.type == "cuda" else torch.no_grad(), torch.enable_grad():
                shared = SharedMemory(rank, meeting, where)
                register(name, transport(shared, board, where, timeout_s, mailbox_bytes))
                return function(rank, world, name, *args)
        except BaseException as error:
            board.fail(f"{type(error).__name__}: {error}")
            meeting.barrier.abort()
            raise
        finally:
            close_transports(name)

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(main, rank) for rank in range(world)]
        errors = [future.exception() for future in futures]
    raised = [error for error in errors if error is not None]
    if raised:  # the one that the others only tell of
        raise min(raised, key=lambda error: isinstance(error, (ExchangeError, threading.BrokenBarrierError)))
    assert all(bool((memory == 0xFF).all()) for memory in meeting.released), "somebody wrote into memory that was let go of"
    return [future.result() for future in futures]

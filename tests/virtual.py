"""Virtual ranks: the symmetric transport with all its ranks in this process, a thread each, on the CPU or on one GPU."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch

from mxep.comm.copy_streams import WAIT, CudaCopyStreams, Operation
from mxep.comm.host_allgather import ExchangeError, HostAllGather, rendezvous_bytes
from mxep.comm.symmetric import SymmetricTransport
from mxep.comm.symmetric_memory import SymmBuffer
from mxep.comm.transport import close_transports, register, transport_of
from mxep.ops.runtime.nvrtc import DriverFunction

_numbers = itertools.count()
_WORD = 2**32
_PAUSE_S = 50e-6
_copy_bytes = DriverFunction("cuMemcpyDtoDAsync_v2", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
_synchronize = DriverFunction("cuStreamSynchronize", ctypes.c_void_p)


class HostCopyStreams:
    """`CudaCopyStreams` of virtual ranks: each operation runs at once, and a wait blocks the host; flags are words of the host's memory.

    On a GPU every operation waits for the current stream, by the driver and not by torch, whose sync debug mode then sees other syncs only.

    Args:
        device: where the bytes are, the CPU or a GPU.
        timeout_s: how long a wait waits.
        failure: returns the error of another rank that failed; called while waiting.
    """

    def __init__(self, device: torch.device, timeout_s: float, failure: Callable[[], str | None]) -> None:
        self.device, self.timeout_s, self._failure = device, timeout_s, failure

    def fork(self, *streams: int) -> None:
        if self.device.type == "cuda":
            _synchronize(self.device, torch.cuda.current_stream(self.device).cuda_stream)  # host sync: these streams are the host

    def join(self, *streams: int) -> None:
        pass

    def wait_stream(self, handle: int | None) -> None:
        if handle is not None:
            _synchronize(self.device, handle)  # host sync: these streams are the host

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        if self.device.type == "cpu":
            ctypes.memmove(to, source, size)
            return
        handle = torch.cuda.current_stream(self.device).cuda_stream
        _copy_bytes(self.device, to, source, size, handle)
        _synchronize(self.device, handle)  # host sync: these streams are the host

    def copy_each(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        for copy in copies:
            self.copy(stream, *copy)

    def write(self, stream: int | None, flag: int, value: int) -> None:
        self.fork()
        ctypes.c_uint32.from_address(flag).value = value % _WORD

    def wait(self, stream: int | None, flag: int, value: int) -> None:
        word, deadline = ctypes.c_uint32.from_address(flag), time.monotonic() + self.timeout_s
        while (word.value - value) % _WORD >= _WORD // 2:
            time.sleep(_PAUSE_S)
            if (failure := self._failure()) is not None:
                raise ExchangeError(f"exchange: {failure}")
            if time.monotonic() > deadline:
                raise ExchangeError(f"exchange: a peer's part did not come for {self.timeout_s:g} s; it died or hangs, look at its log")

    def batch(self, stream: int | None, operations: Sequence[Operation]) -> None:
        for kind, flag, value in operations:
            (self.wait if kind == WAIT else self.write)(stream, flag, value)

    def handle(self, stream: int | None) -> int | None:
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.device.type == "cuda" else None

    def on(self, stream: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def record(self, stream: int | None) -> torch.cuda.Event | None:
        return None

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        pass

    def recycle(self, event: torch.cuda.Event | None) -> None:
        pass

    def fork_alternate(self) -> None:
        pass

    def alternate(self, index: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


class ThreadBarrier:
    """A barrier of the ranks' threads, at which they exchange addresses."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world, timeout=timeout_s)
        self.addresses, self.shorts = [0] * world, list[bool]()
        self.memory: list[torch.Tensor] = []  # lives until all ranks are done, as memory that peers have mapped does
        self.released: list[torch.Tensor] = []  # the released part of it, filled with NaN bytes for good

    def addresses_of_all(self, rank: int, mine: torch.Tensor) -> list[int]:
        self.memory.append(mine)
        self.barrier.wait()
        self.addresses[rank] = mine.data_ptr()
        self.barrier.wait()
        return list(self.addresses)

    def short(self, mine: bool) -> int:
        """How many ranks pass True."""
        self.shorts.append(mine)
        self.barrier.wait()
        count = sum(self.shorts)
        if self.barrier.wait() == 0:
            self.shorts.clear()
        self.barrier.wait()
        return count


class SharedMemory:
    """Buffers that are ordinary tensors, filled with NaN bytes at first and when they are released.

    Attributes:
        room: bytes that buffers of this rank may take together.
    """

    def __init__(self, rank: int, threads: ThreadBarrier, device: torch.device, flags_on: str = "cpu") -> None:
        self._rank, self._threads, self._device, self._flags_on = rank, threads, device, flags_on
        self.room = 1 << 60

    def allocate(self, size: int) -> SymmBuffer:
        if short := self._threads.short(self.room < size):
            raise torch.OutOfMemoryError(f"no room for {size} bytes on {short} ranks")
        self.room -= size
        memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=self._device)
        if memory.is_cuda:
            torch.cuda.current_stream().synchronize()
        return SymmBuffer(memory, self._threads.addresses_of_all(self._rank, memory))

    def release(self, buffers: Sequence[SymmBuffer]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._threads.barrier.wait()
        for buffer in buffers:
            self.room += buffer.memory.numel()
            self._threads.released.append(buffer.memory.fill_(0xFF))
            buffer.release()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._threads.barrier.wait()

    def flags(self, count: int) -> SymmBuffer:
        memory = torch.zeros(4 * count, dtype=torch.uint8, device=self._flags_on)
        return SymmBuffer(memory, self._threads.addresses_of_all(self._rank, memory))


def alone(timeout_s: float = 20, slot_memory_bytes: int = 1 << 20, device: str = "cuda") -> SymmetricTransport:
    """One rank on the current GPU, with real streams and flags; or on a CPU."""
    rendezvous = HostAllGather(bytearray(rendezvous_bytes(1)), 0, 1, timeout_s)
    if device == "cpu":
        where = torch.device(device)
        return _over_the_host(SharedMemory(0, ThreadBarrier(1, timeout_s), where), rendezvous, where, timeout_s, slot_memory_bytes)
    where = torch.device("cuda", torch.cuda.current_device())
    memory = SharedMemory(0, ThreadBarrier(1, timeout_s), where, flags_on="cuda")
    return SymmetricTransport(memory, rendezvous, CudaCopyStreams(where), where, timeout_s, slot_memory_bytes)


def _over_the_host(
    memory: SharedMemory, rendezvous: HostAllGather, device: torch.device, timeout_s: float, slot_memory_bytes: int
) -> SymmetricTransport:
    return SymmetricTransport(
        memory, rendezvous, HostCopyStreams(device, timeout_s, rendezvous.failure), device, timeout_s, slot_memory_bytes
    )


class VirtualGroup:
    """Another group of virtual ranks, made before `run_virtual` calls the function that joins it; `ranks`: its members, as ranks there."""

    def __init__(self, ranks: Sequence[int], timeout_s: float = 20) -> None:
        self.ranks, self._timeout_s = ranks, timeout_s
        self._memory, self._threads = bytearray(rendezvous_bytes(len(ranks))), ThreadBarrier(len(ranks), timeout_s)

    @contextlib.contextmanager
    def joined(self, rank: int, name: str, device: str) -> Iterator[int]:
        """In this context the thread's rank has the group under that name; yields its rank in the group."""
        me, where = list(self.ranks).index(rank), torch.empty(0, device=device).device
        rendezvous, shared = HostAllGather(self._memory, me, len(self.ranks), self._timeout_s), SharedMemory(me, self._threads, where)
        register(name, _over_the_host(shared, rendezvous, where, self._timeout_s, 1 << 20))
        try:
            yield me
        finally:
            close_transports(name)


def symmetric(name: str) -> SymmetricTransport:
    """The transport of a group of virtual ranks, on the default device."""
    transport = transport_of(name, torch.get_default_device())
    assert isinstance(transport, SymmetricTransport)
    return transport


class ExchangesOnly:
    """A transport with exchanges only, so that a layer takes the collective path."""

    name = "plain"

    def __init__(self, symmetric: SymmetricTransport) -> None:
        self._symmetric, self.world, self.rank = symmetric, symmetric.world, symmetric.rank

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        return self._symmetric.exchange(rows, output_splits, input_splits)

    def exchange_quantized(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], mode: str) -> torch.Tensor:
        return self.exchange(torch.ops.mxep.quantize_packed(rows, mode), output_splits, input_splits)

    def close(self) -> None:
        pass


def collective_group(name: str) -> str:
    """Registers a group of the same ranks with exchanges only; returns its name."""
    register(f"plain {name}", ExchangesOnly(symmetric(name)))  # type: ignore[arg-type]
    return f"plain {name}"


def run_virtual(
    function: Callable,
    world: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 20,
    slot_memory_bytes: int = 1 << 20,
    transport: Callable[..., SymmetricTransport] = _over_the_host,
) -> list:
    """Call `function(rank, world, group_name, *args)` on `world` threads joined by symmetric memory, over such a transport.

    Returns:
        what the ranks returned, by rank.  What the first of them raised is raised here.
    """
    memory, threads, where, call = bytearray(rendezvous_bytes(world)), ThreadBarrier(world, timeout_s), torch.device(device), next(_numbers)
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())

    def main(rank: int) -> Any:
        name = f"virtual{call}-{rank}"
        rendezvous = HostAllGather(memory, rank, world, timeout_s)
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if where.type == "cuda" else torch.no_grad(), torch.enable_grad():
                shared = SharedMemory(rank, threads, where)
                register(name, transport(shared, rendezvous, where, timeout_s, slot_memory_bytes))
                return function(rank, world, name, *args)
        except BaseException as error:
            rendezvous.fail(f"{type(error).__name__}: {error}")
            threads.barrier.abort()
            raise
        finally:
            close_transports(name)

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(main, rank) for rank in range(world)]
        errors = [future.exception() for future in futures]
    raised = [error for error in errors if error is not None]
    if raised:  # the cause, which the others only report
        raise min(raised, key=lambda error: isinstance(error, (ExchangeError, threading.BrokenBarrierError)))
    assert all(bool((memory == 0xFF).all()) for memory in threads.released), "released memory was written to"
    return [future.result() for future in futures]

"""Kernels that work on the memory of a CPU, and graphs of their launches: for tests of `mxep.ops.runtime.replay` without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.ops.runtime import nvrtc, recording, replay
from mxep.ops.runtime.nvrtc import Kernel
from mxep.ops.runtime.replay import replayed

CALLS = 10  # four plain, two recorded, then replayed


class Sizes(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int), ("unused", ctypes.c_int), ("source", ctypes.c_void_p)]


class Nested(ctypes.Structure):
    _fields_ = [("sizes", Sizes), ("out", ctypes.c_void_p)]


def double(config: Any, function: int, pointers: int, extra: None) -> int:
    """cuLaunchKernelEx of a "kernel" that doubles n floats, or whose only argument is a structure."""
    words = (ctypes.c_void_p * 3).from_address(pointers)
    if function == 2:
        nested = Nested.from_address(words[0])
        source, out, n = nested.sizes.source, nested.out, nested.sizes.n
    else:
        source, out = (ctypes.c_uint64.from_address(words[i]).value for i in range(2))
        n = ctypes.c_int.from_address(words[2]).value
    if captured is not None:
        captured.append((source, out, n))
        return 0
    work(source, out, n)
    return 0


captured: list[tuple[int, int, int]] | None = None  # what a graph has, while it captures
graphs: list[int] = []  # launches of each graph


def work(source: int, out: int, n: int) -> None:
    given, made = (ctypes.c_float * n).from_address(source), (ctypes.c_float * n).from_address(out)
    for i in range(n):
        made[i] = 2 * given[i] if source else 0


class Graph:
    """A stub for `LaunchGraph`."""

    alive = 0

    def __init__(self, device: torch.device, launch: Callable[[int], None]) -> None:
        global captured
        captured = []
        launch(0)
        self._launches, captured = captured, None
        graphs.append(len(self._launches))

    def run(self, stream: int) -> None:
        for source, out, n in self._launches:
            work(source, out, n)


def fill(device: torch.device, address: int, value: int, nbytes: int, stream: int) -> None:
    if captured is not None:
        captured.append((0, address, nbytes // 4))
        return
    ctypes.memset(address, value, nbytes)


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the CPU act as the current GPU."""
    monkeypatch.setattr(replay, "_runs_on", lambda device: True)
    monkeypatch.setattr(replay, "checking", lambda device: False)
    monkeypatch.setattr(nvrtc, "_launch", lambda: double)
    monkeypatch.setattr(replay, "LaunchGraph", Graph)
    monkeypatch.setattr(replay, "fill_bytes", fill)
    monkeypatch.setattr(recording, "_LEAST_ADDRESS", 1 << 22)  # a CPU has memory at lower addresses than a GPU
    graphs.clear()
    monkeypatch.setattr(nvrtc, "current_gpu", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    replay._calls.clear()
    with torch.no_grad():
        yield
    replay._calls.clear()
    assert not nvrtc.recorders


def kernel(number: int = 1) -> Kernel:
    found = Kernel("double", (), {}, 32)
    found._loaded[0] = number  # type: ignore[assignment]
    return found


DOUBLE, DOUBLE_OF_STRUCTURE = kernel(), kernel(2)
runs: list[str] = []


def doubled(x: Tensor, n: int | None = None) -> Tensor:
    out = torch.empty_like(x)
    DOUBLE.launch(0, 1, x, out, x.numel() if n is None else n)
    return out


def ready() -> list[bool]:
    return [call.sequence is not None for call in replay._calls.values()]


def problem() -> str:
    (call,) = replay._calls.values()
    assert call.sequence is None
    return call.problem or ""


def check(function: Callable[..., Any], make: Callable[[int], tuple], want: Callable[..., Any], times: int = CALLS) -> Any:
    """Each of several calls with values of their own has the results of `want`; the last ones do not enter `function`. Returns the last."""
    entered = 0

    def counted(options: Any, *arguments: Any) -> Any:
        nonlocal entered
        entered += 1
        return function(options, *arguments)

    kept = []
    for number in range(times):
        arguments = make(number)
        kept.append(arguments)  # so that memory differs from call to call
        results = replayed(counted, "options", *arguments)
        torch.testing.assert_close(results, want(*arguments), rtol=0, atol=0)
    assert entered == 6
    assert ready() == [True]
    return results


def lambda_of_two(options: str, x: Tensor) -> Tensor:
    return doubled(doubled(x))

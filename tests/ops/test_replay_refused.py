"""`mxep.ops.runtime.replay`: calls that are never replayed, the keys of a call, and the limits of memory and graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.ops.replay_on_host import (
    CALLS,
    DOUBLE,
    Graph,
    check,
    double,
    doubled,
    lambda_of_two,
    on_host,  # noqa: F401, a fixture of all tests here
    problem,
    ready,
    work,
)
from torch import Tensor

from mxep.ops.runtime import launch, nvrtc, recording, replay
from mxep.ops.runtime.nvrtc import Arguments, DriverFunction
from mxep.ops.runtime.replay import replayed

OUTSIDE = torch.ones(4)


def reads_on_host(options: str, x: Tensor) -> Tensor:
    return doubled(x) * x.sum().item()


def launches_on_memory_of_others(options: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    DOUBLE.launch(0, 1, OUTSIDE, out, 4)
    return out + x - x


def adds_memory_of_others(options: str, x: Tensor) -> Tensor:
    return x + OUTSIDE


def returns_memory_of_others(options: str, x: Tensor) -> Tensor:
    return OUTSIDE


def returns_an_object(options: str, x: Tensor) -> Any:
    return x + 1, object()


def runs_on_another_stream(options: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    DOUBLE.run(0, 1, Arguments(x, out, 4), stream=7)
    return out


def calls_the_driver(options: str, x: Tensor) -> Tensor:
    function = DriverFunction("cuMemsetD8Async")
    function._function = lambda *arguments: 0
    function(x.device)
    return x + 1


def multiplies_a_selection(options: str, x: Tensor) -> Tensor:
    return doubled(x.nonzero().float()).sum() + x


def selects_by_a_mask(options: str, x: Tensor) -> Tensor:
    return doubled(x[x > 2])


def leaves_memory_to_others(options: str, x: Tensor) -> Tensor:
    """A launch that the recorder does not see, as by another package."""
    out = torch.empty_like(x)
    work(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def launches_by_a_library(options: str, x: Tensor) -> Tensor:
    out = doubled(x)
    nvrtc.unrecorded("a library")
    work(out.data_ptr(), out.data_ptr(), x.numel())
    return out


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor


def returns_a_frozen_object(options: str, x: Tensor) -> Any:
    return x + 1, Frozen(doubled(x)[:1])


def returns_a_class(options: str, x: Tensor) -> Any:
    return x + 1, Frozen


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (reads_on_host, "_local_scalar_dense.default, which reads values"),
        (multiplies_a_selection, "nonzero.default, which reads values"),
        (selects_by_a_mask, "index.Tensor, which reads values"),
        (leaves_memory_to_others, "no launch or operator of the recording uses"),
        (launches_by_a_library, "a library"),
        (returns_a_frozen_object, "a Frozen, which may differ from call to call"),
        (returns_a_class, "a type, which may differ from call to call"),
        (launches_on_memory_of_others, "which it was not given"),
        (adds_memory_of_others, "no view of what it was given"),
        (returns_memory_of_others, "no view of what it was given"),
        (returns_an_object, "a object, which may differ from call to call"),
        (runs_on_another_stream, "on a stream of its own"),
        (calls_the_driver, "cuMemsetD8Async"),
    ],
)
def test_calls_that_cannot_be_recorded(function: Callable[..., Tensor], what: str) -> None:
    for number in range(CALLS):
        x = torch.full((4,), float(number))
        with torch.no_grad():
            got, want = (
                made[0] if isinstance(made, tuple) else made for made in (replayed(function, "options", x), function("options", x))
            )
            assert torch.equal(got, want)
    assert what in problem()


def test_memory_of_two_storages() -> None:
    """In the next call they may be separate."""

    def function(options: str, x: Tensor, y: Tensor) -> Tensor:
        return doubled(y)

    for number in range(CALLS):
        x = torch.full((4,), float(number))
        assert torch.equal(replayed(function, "options", x, torch.from_dlpack(x)), 2 * x)
    assert "which several storages have" in problem()


def test_results_that_a_caller_may_change() -> None:
    def function(options: str, x: Tensor) -> Any:
        return x + 1, [1, 2], {"a": (3, [4])}

    for _ in range(CALLS):
        _, numbers, named = replayed(function, "options", torch.ones(4))
        assert (numbers, named) == ([1, 2], {"a": (3, [4])})
        numbers.append(9)
        named["a"][1].append(9)
    assert ready() == [True]


def test_an_alias_of_an_argument_is_an_object_of_its_own() -> None:
    def function(options: str, x: Tensor) -> Any:
        return doubled(x), x.detach(), x

    for _ in range(CALLS):
        x = torch.ones(4).requires_grad_()
        _, alias, same = replayed(function, "options", x)
        assert same is x
        assert alias is not x
        assert alias.data_ptr() == x.data_ptr()
    assert ready() == [True]


def test_numbers_that_choose_values() -> None:
    def function(options: str, x: Tensor, indices: Tensor) -> Tensor:
        return doubled(x[indices])

    check(function, lambda i: (torch.arange(8.0) + i, torch.tensor([i % 8, 1])), lambda x, indices: 2 * x[indices])


def test_signs_of_zeros_and_empty_tensors() -> None:
    def function(options: str, x: Tensor, empty: Tensor, number: float) -> Tensor:
        return torch.full_like(x, number) + 0 * x.sum() if empty.numel() else torch.full_like(x, number)

    storage = torch.zeros(8)
    for number in (0.0, -0.0):
        for _ in range(CALLS):
            assert replayed(function, "options", torch.ones(4), storage[:0], number).signbit().all() == (number.hex() == "-0x0.0p+0")
    assert ready() == [True, True]


def test_calls_that_differ_each_time() -> None:
    calls = 0

    def function(options: str, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return doubled(x, n=1 + calls % 4)

    for _ in range(CALLS):
        replayed(function, "options", torch.ones(4))
    assert calls == CALLS
    assert problem() == ""


def test_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_BYTES", 40)
    for number in range(CALLS):
        x = torch.full((4,), float(number))
        assert torch.equal(replayed(lambda options, x: doubled(doubled(doubled(x))), number > -1, x), 8 * x)
    assert all(call.sequence is None for call in replay._calls.values())


@pytest.mark.parametrize("free", [0, 1000])
def test_little_free_memory(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter(range(0, 100_000, 400))
    monkeypatch.setattr(replay, "_allocated", lambda device: next(allocated))
    monkeypatch.setattr(replay, "_free", lambda device: free)
    for number in range(CALLS):
        x = torch.full((4,), float(number))
        assert torch.equal(replayed(lambda_of_two, "options", x), 4 * x)
    assert ready() == [free == 1000]
    if not free:
        assert problem() == "it allocates 400 bytes"


def test_an_error_of_the_recorder_does_not_fail_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise AttributeError("recorder")

    monkeypatch.setattr(recording.CallRecorder, "_allocation", fails)
    for number in range(CALLS):
        x = torch.full((4,), float(number))
        assert torch.equal(replayed(lambda_of_two, "options", x), 4 * x)
    assert problem() == "AttributeError('recorder')"


@pytest.mark.parametrize("why", ["the driver has no memory", "there are many graphs"])
def test_without_graphs(why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("CUDA error 2, out of memory")

    if why == "there are many graphs":
        monkeypatch.setattr(Graph, "alive", replay._ALL_GRAPHS)
    monkeypatch.setattr(Graph, "__init__", fails)
    x = torch.zeros(1000)
    for number in range(20):
        x.fill_(float(number))
        assert torch.equal(replayed(lambda_of_two, "options", x), 4 * x)
    assert ready() == [True]
    assert len(caplog.records) == (why == "the driver has no memory")


def test_keys_of_a_call() -> None:
    seen = []

    def function(options: str, x: Tensor, number: Any) -> Tensor:
        seen.append((x.data_ptr() % 16, number))
        return x + number

    memory = torch.zeros(64)
    for number in (1, True, 1.0):
        for first in range(4):
            replayed(function, "options", memory[first : first + 8], number)
    assert len(replay._calls) == len(seen) == 12


def test_rare_calls_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_KEPT", 4)
    for _ in range(CALLS):
        replayed(lambda_of_two, "kept", torch.ones(4))
    for number in range(50):
        replayed(lambda_of_two, "options", torch.ones(5 + number))
    assert len(replay._calls) <= 4
    assert ready().count(True) == 1


def test_zeros_of_an_argument() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        made = doubled(x)
        torch.zeros(4, out=made)
        return made + x

    check(function, lambda i: (torch.full((4,), float(i)),), lambda x: x)


@pytest.mark.parametrize("watched", ["gradients", "checking", "mode", "function mode", "profiler", "capture", "another device"])
def test_calls_run_directly_if_gradients_modes_or_profilers_are_active(watched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = 0

    def function(options: str, x: Tensor) -> Tensor:
        nonlocal entered
        entered += 1
        return doubled(x)

    for _ in range(CALLS):
        replayed(function, "options", torch.ones(4))
    assert entered == 6
    if watched == "gradients":
        with torch.enable_grad():
            replayed(function, "options", torch.ones(4))
    elif watched == "mode":
        with OperatorCalls():
            replayed(function, "options", torch.ones(4))
    elif watched == "function mode":
        from torch.overrides import BaseTorchFunctionMode

        with BaseTorchFunctionMode():
            replayed(function, "options", torch.ones(4))
        with torch.device("cpu"):  # one of torch's own, which changes nothing here
            replayed(function, "options", torch.ones(4))
    elif watched == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            replayed(function, "options", torch.ones(4))
    else:
        names = {"checking": "checking", "capture": "is_capturing", "another device": "_runs_on"}
        monkeypatch.setattr(replay, names[watched], lambda *device: watched != "another device")
        replayed(function, "options", torch.ones(4))
    assert entered == 7


def test_an_error_while_recording() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        if len(nvrtc.recorders):
            raise RuntimeError("in a recording")
        return doubled(x)

    for _ in range(4):
        replayed(function, "options", torch.ones(4))
    with pytest.raises(RuntimeError, match="in a recording"):
        replayed(function, "options", torch.ones(4))
    assert not nvrtc.recorders


def test_launches_of_another_thread_are_not_recorded() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: DOUBLE.launch(0, 1, OUTSIDE, torch.empty(4), 4))
        other.start()
        other.join()
        return doubled(x)

    for number in range(CALLS):
        x = torch.full((4,), float(number))
        assert torch.equal(replayed(function, "options", x), 2 * x)
    assert ready() == [True]


def test_autocast_is_part_of_a_call() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        return torch.mm(x, x)

    for number in range(CALLS):
        x = torch.full((4, 4), 1 + number / 1024)
        want = torch.mm(x, x)
        assert torch.equal(replayed(function, "options", x), want)
        with torch.autocast("cpu", torch.bfloat16):
            got = replayed(function, "options", x)
            assert got.dtype == torch.bfloat16
            assert torch.equal(got, torch.mm(x, x))
    assert ready() == [True, True]


def test_launches_of_triton() -> None:
    launched = []

    def native(x: int, y: int, z: int, stream: int, fixed: str, source: int, out: int, n: int) -> None:
        launched.append((x, y, z, stream, fixed, n))
        arguments = Arguments(source, out, n)
        double(None, 1, arguments.pointers, None)

    def function(options: str, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        recorder = launch.recorder_here() if launch.recorders else None
        values = [x.data_ptr(), out.data_ptr(), 4]
        if recorder is not None:
            recorder.triton(native, (3, 2), ("fixed",), values, [0, 1])
        native(3, 2, 1, 0, "fixed", *values)
        return out

    check(function, lambda i: (torch.full((4,), float(i)),), lambda x: 2 * x)
    assert launched == [(3, 2, 1, 0, "fixed", 4)] * CALLS


def test_old_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_KEPT", 3)
    for number in range(20):
        x = torch.full((4,), float(number))
        assert torch.equal(replayed(lambda options, x: doubled(x), number, x), 2 * x)
        assert len(replay._calls) <= 3

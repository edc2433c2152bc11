"""`mxep.ops.runtime.replay` with kernels that work on the memory of a CPU; tests/gpu/test_replay.py has those of the package."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mxep.mx.tensor import MXTensor, quantize_mx
from mxep.ops.runtime import launch, nvrtc, recording, replay
from mxep.ops.runtime.nvrtc import Arguments, DriverFunction, Kernel
from mxep.ops.runtime.replay import replayed

CALLS = 10  # four plain, two recorded, then replayed


class _Sizes(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int), ("unused", ctypes.c_int), ("source", ctypes.c_void_p)]


class _Nested(ctypes.Structure):
    _fields_ = [("sizes", _Sizes), ("out", ctypes.c_void_p)]


def _double(config: Any, function: int, pointers: int, extra: None) -> int:
    """cuLaunchKernelEx of a "kernel" that doubles n floats, or whose only argument is a structure."""
    words = (ctypes.c_void_p * 3).from_address(pointers)
    if function == 2:
        nested = _Nested.from_address(words[0])
        source, out, n = nested.sizes.source, nested.out, nested.sizes.n
    else:
        source, out = (ctypes.c_uint64.from_address(words[i]).value for i in range(2))
        n = ctypes.c_int.from_address(words[2]).value
    if captured is not None:
        captured.append((source, out, n))
        return 0
    _work(source, out, n)
    return 0


captured: list[tuple[int, int, int]] | None = None  # what a graph has, while it captures
graphs: list[int] = []  # launches of each graph


def _work(source: int, out: int, n: int) -> None:
    given, made = (ctypes.c_float * n).from_address(source), (ctypes.c_float * n).from_address(out)
    for i in range(n):
        made[i] = 2 * given[i] if source else 0


class Graph:
    """Stands for a `LaunchGraph`."""

    alive = 0

    def __init__(self, device: torch.device, launch: Callable[[int], None]) -> None:
        global captured
        captured = []
        launch(0)
        self._launches, captured = captured, None
        graphs.append(len(self._launches))

    def run(self, stream: int) -> None:
        for source, out, n in self._launches:
            _work(source, out, n)


def fill(device: torch.device, address: int, value: int, nbytes: int, stream: int) -> None:
    if captured is not None:
        raise AssertionError("a memory of zeros in a graph is not needed by these tests")
    ctypes.memset(address, value, nbytes)


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU takes the part of the current GPU."""
    monkeypatch.setattr(replay, "_runs_on", lambda device: True)
    monkeypatch.setattr(replay, "checking", lambda device: False)
    monkeypatch.setattr(nvrtc, "_launch", lambda: _double)
    monkeypatch.setattr(replay, "LaunchGraph", Graph)
    monkeypatch.setattr(replay, "fill_bytes", fill)
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


def check(function: Callable[..., Any], make: Callable[[int], tuple], want: Callable[..., Any], times: int = CALLS) -> None:
    """Each of several calls with values of their own has the results of `want`; the last ones do not enter `function`."""
    entered = 0

    def counted(options: Any, *arguments: Any) -> Any:
        nonlocal entered
        entered += 1
        return function(options, *arguments)

    kept = []
    for number in range(times):
        arguments = make(number)
        kept.append(arguments)  # so that memory differs from call to call
        torch.testing.assert_close(replayed(counted, "options", *arguments), want(*arguments), rtol=0, atol=0)
    assert entered == 6
    assert ready() == [True]


def test_launches_allocations_and_operators() -> None:
    def function(options: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = doubled(x)
        zeros = x.new_zeros(x.shape)
        zeros += first  # in place
        return doubled(zeros) + y, zeros, torch.cat([x, y])

    check(function, lambda i: (torch.full((4,), 1.0 + i), torch.full((4,), 100.0 * i)), lambda x, y: (4 * x + y, 2 * x, torch.cat([x, y])))


def test_addresses_inside_of_memory_and_in_structures() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        out = torch.zeros(8)
        DOUBLE.launch(0, 1, x.data_ptr() + 4, out[2:], 3)
        DOUBLE_OF_STRUCTURE.run(0, 1, Arguments(_Nested(_Sizes(2, 0, x.data_ptr()), out[6:].data_ptr())))
        return out

    def want(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(2), 2 * x[1:4], torch.zeros(1), 2 * x[:2]])

    check(function, lambda i: (torch.arange(4.0) + i,), want)


def test_results_of_every_kind() -> None:
    class Pair(NamedTuple):
        first: Tensor | None
        rest: Any

    def function(options: str, x: Tensor, rows: MXTensor, nothing: None, pair: Pair) -> Any:
        assert pair.first is not None
        made = doubled(x)
        others = [x, pair.first.view(2, 2), None, {"options": options}]
        return Pair(made, others), made.view(2, 2)[1], MXTensor(rows.qdata, rows.scale, rows.dtype)

    kept = []
    for number in range(CALLS):
        x, first, rows = torch.full((4,), float(number)), torch.arange(4.0), quantize_mx(torch.full((2, 32), float(number)))
        kept.append((x, first, rows))
        pair, row, again = replayed(function, "options", x, rows, None, Pair(first, (number > -1, 3)))
        assert isinstance(pair, Pair)
        assert pair.first is not None
        assert torch.equal(pair.first, 2 * x)
        assert pair.rest[0] is x
        assert torch.equal(pair.rest[1], first.view(2, 2))
        assert pair.rest[1].data_ptr() == first.data_ptr()
        assert pair.rest[2:] == [None, {"options": "options"}]
        assert torch.equal(row, 2 * x[2:])
        assert row.data_ptr() == pair.first.data_ptr() + 8
        assert isinstance(again, MXTensor)
        assert again.qdata.data_ptr() == rows.qdata.data_ptr()
        assert torch.equal(again.dequantize(), rows.dequantize())
    assert ready() == [True]


def test_tensors_in_one_storage() -> None:
    def function(options: str, x: Tensor, y: Tensor) -> Tensor:
        return doubled(x) + doubled(y)

    def make(number: int) -> tuple[Tensor, Tensor]:
        both = torch.arange(12.0) + number
        return both[:4], both[8:]

    check(function, make, lambda x, y: 2 * x + 2 * y)
    both = torch.arange(12.0)
    assert torch.equal(replayed(function, "options", both[:4], both[4:8]), 2 * both[:4] + 2 * both[4:8])  # another distance
    assert torch.equal(replayed(function, "options", both[:4], both[:4]), 4 * both[:4])


def test_one_tensor_twice() -> None:
    def make(number: int) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), float(number))
        return x, x

    check(lambda options, x, y: doubled(x) + y, make, lambda x, y: 3 * x)


def test_other_shapes_options_and_gradients_are_other_calls() -> None:
    def function(options: int, x: Tensor) -> Tensor:
        return doubled(x) * options

    for _ in range(CALLS):
        for options, x in ((1, torch.ones(4)), (2, torch.ones(4)), (1, torch.ones(8)), (1, torch.ones(4, requires_grad=True))):
            assert torch.equal(replayed(function, options, x), torch.full_like(x, 2.0 * options))
    assert ready() == [True] * 4


def test_results_of_operators_are_freed() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        first = x + 1
        second = first + 1
        del first
        return second + 1

    check(function, lambda i: (torch.full((4,), float(i)),), lambda x: x + 3)
    (call,) = replay._calls.values()
    assert call.sequence is not None
    assert [len(unused) for _, unused in call.sequence._parts] == [0, 1, 1]


def test_launches_at_the_same_addresses_become_a_graph() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        return doubled(doubled(doubled(x)))

    x = torch.zeros(1000)
    for number in range(20):
        x.fill_(float(number))
        out = replayed(function, "options", x)
        assert torch.equal(out, 8 * x)
        del out  # its memory is that of the next result
    assert graphs
    assert set(graphs) == {3}
    other = torch.ones(1000)
    assert torch.equal(replayed(function, "options", other), 8 * other)
    assert torch.equal(replayed(function, "options", x), 8 * x)


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_GRAPHS", 3)
    inputs = [torch.full((64,), float(number)) for number in range(8)]
    kept = []
    for _ in range(6):
        for x in inputs:
            kept.append(replayed(lambda_of_two, "options", x))
            assert torch.equal(kept[-1], 4 * x)
    (call,) = replay._calls.values()
    assert call.sequence is not None
    assert len(call.sequence._parts[-1][0]._graphs) <= 3  # type: ignore[union-attr]


def lambda_of_two(options: str, x: Tensor) -> Tensor:
    return doubled(doubled(x))


def test_zeros_that_launches_use() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        made = torch.zeros(8)
        DOUBLE.launch(0, 1, x, made, 4)
        out = torch.empty(8)
        DOUBLE.launch(0, 1, made, out, 8)
        return out

    check(function, lambda i: (torch.full((4,), float(i)),), lambda x: torch.cat([4 * x, torch.zeros(4)]))


@pytest.mark.parametrize("large", [False, True])
def test_memory_is_shared_by_what_is_not_needed_at_the_same_time(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_LARGE", 100 if large else 1 << 20)
    sizes: list[int] = []

    def function(options: str, x: Tensor) -> Tensor:
        for _ in range(6):
            x = doubled(x)
        return x

    check(function, lambda i: (torch.full((1024,), float(i)),), lambda x: 64 * x)
    (call,) = replay._calls.values()
    assert call.sequence is not None
    if large:
        assert call.sequence._bytes == 0
        held = 0
        for part, unused in call.sequence._parts:
            held += isinstance(part, replay._Allocate) - len(unused)
            sizes.append(held)
        assert max(sizes) == 2
    else:
        assert call.sequence._bytes == 2 * 4096


def test_places_do_not_overlap() -> None:
    generator = torch.Generator().manual_seed(0)

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    for _ in range(200):
        slots = range(1 + number(12))
        temporaries = {slot: 512 * number(5) for slot in slots}
        steps: list[Any] = []
        lives: dict[int, list[int]] = {}
        for slot in slots:
            steps.append(recording.Allocation(slot, torch.Size(), (), torch.uint8, torch.device("cpu"), temporaries[slot], False))
            lives[slot] = [len(steps) - 1] * 2
            used = {other for other in slots[: slot + 1] if number(3) == 0}
            steps.append(SimpleNamespace(slots=used))
            for other in used:
                lives[other][1] = len(steps) - 1
        placed, size = replay._place(steps, temporaries)
        assert set(placed) == set(slots)
        for one in slots:
            assert placed[one] + temporaries[one] <= size
            for other in slots[:one]:
                together = lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]
                apart = placed[one] + temporaries[one] <= placed[other] or placed[other] + temporaries[other] <= placed[one]
                assert apart or not together
        live = max(sum(temporaries[s] for s in slots if lives[s][0] <= i <= lives[s][1]) for i in range(len(steps)))
        assert live <= size <= 2 * live + 512


# ---------------------------------------------------------------- what is never replayed


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
    """A launch that nothing tells of, as by another package."""
    out = torch.empty_like(x)
    _work(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def launches_by_a_library(options: str, x: Tensor) -> Tensor:
    out = doubled(x)
    nvrtc.unrecorded("a library")
    _work(out.data_ptr(), out.data_ptr(), x.numel())
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
def test_what_a_recording_cannot_repeat(function: Callable[..., Tensor], what: str) -> None:
    for number in range(CALLS):
        x = torch.full((4,), float(number))
        with torch.no_grad():
            got, want = (
                made[0] if isinstance(made, tuple) else made for made in (replayed(function, "options", x), function("options", x))
            )
            assert torch.equal(got, want)
    assert what in problem()


def test_memory_of_two_storages() -> None:
    """The next call may have them apart."""

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


def test_what_differs_from_call_to_call() -> None:
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


def test_an_error_of_the_recorder_is_none_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_tells_calls_apart() -> None:
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
def test_runs_as_it_is_where_something_watches(watched: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        with Mode():
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
        _double(None, 1, arguments.pointers, None)

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

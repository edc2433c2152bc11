"""`mxep.ops.runtime.replay`: calls that are replayed. tests/gpu/test_replay.py has the kernels of the package."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.replay_on_host import (
    CALLS,
    DOUBLE,
    DOUBLE_OF_STRUCTURE,
    Nested,
    Sizes,
    check,
    doubled,
    graphs,
    lambda_of_two,
    on_host,  # noqa: F401, a fixture of all tests here
    ready,
)
from torch import Tensor

from mxep.mx.tensor import MXTensor, quantize_mx
from mxep.ops.runtime import recording, replay
from mxep.ops.runtime.nvrtc import Arguments
from mxep.ops.runtime.replay import replayed


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
        DOUBLE_OF_STRUCTURE.run(0, 1, Arguments(Nested(Sizes(2, 0, x.data_ptr()), out[6:].data_ptr())))
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


def test_a_result_that_is_all_of_its_memory_is_allocated_as_it_is() -> None:
    def function(options: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made, twice, in_operator = doubled(x), doubled(x), doubled(x)
        in_operator += 1
        return made.view(2, 2).t(), twice, twice.view(2, 2), in_operator.view(2, 2)

    def want(x: Tensor) -> tuple[Tensor, ...]:
        y = 2 * x
        return y.view(2, 2).t(), y, y.view(2, 2), (y + 1).view(2, 2)

    results = check(function, lambda i: (torch.arange(4.0) + i,), want)
    assert [result._is_view() for result in results] == [False, False, True, True]
    assert results[0].stride() == (1, 2)
    assert results[1].data_ptr() == results[2].data_ptr()


def test_results_that_share_memory_in_every_order() -> None:
    def cut(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(torch.uint8)[:8], x.view(4, 4).t(), x[4:8], x.view(2, 8), x.view(2, 8)

    for order in itertools.permutations(range(5)):
        replay._calls.clear()

        def function(options: str, x: Tensor, order: tuple[int, ...] = order) -> tuple[Tensor, ...]:
            parts = cut(doubled(x))
            return tuple(parts[i] for i in order)

        def want(x: Tensor, order: tuple[int, ...] = order) -> tuple[Tensor, ...]:
            parts = cut(2 * x)
            return tuple(parts[i] for i in order)

        results = check(function, lambda i: (torch.arange(16.0) + i,), want)
        assert len({result.untyped_storage()._cdata for result in results}) == 1
        assert len(set(map(id, results))) == 5, "each one is an object of its own"


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


@pytest.mark.parametrize("offset", [0, 4])
def test_operators_on_views_of_arguments_inside_of_a_storage(offset: int) -> None:
    """As of a router's weight in one storage with others. Another offset of the same alignment is the same call."""

    def make(number: int) -> tuple[Tensor, Tensor]:
        flat = torch.arange(64.0) + number
        start = offset * (1 + number % 2)
        return torch.ones(3, 8), flat[start : start + 32].view(4, 8)

    check(lambda options, x, w: torch.mm(x, w.t()), make, lambda x, w: x @ w.t())


def test_a_launch_without_memory() -> None:
    check(lambda options, x: (DOUBLE.launch(0, 1, None, None, 0), x + 1)[1], lambda i: (torch.full((4,), float(i)),), lambda x: x + 1)


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


def test_zeros_that_launches_use() -> None:
    def function(options: str, x: Tensor) -> Tensor:
        made = torch.zeros(8)
        DOUBLE.launch(0, 1, x, made, 4)
        out = torch.empty(8)
        DOUBLE.launch(0, 1, made, out, 8)
        return out

    check(function, lambda i: (torch.full((4,), float(i)),), lambda x: torch.cat([4 * x, torch.zeros(4)]))


@pytest.mark.parametrize("large", [False, True])
def test_tensors_of_disjoint_lifetimes_share_memory(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_allocations_do_not_overlap() -> None:
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

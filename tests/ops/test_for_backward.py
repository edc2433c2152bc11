"""What a replayed call leaves to its backward (`mxep.ops.runtime.for_backward`): small tensors in one, and the values of a plain call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.ops.replay_on_host import CALLS, DOUBLE, doubled, on_host  # noqa: F401, a fixture of all tests here
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mxep.ops.runtime import replay
from mxep.ops.runtime.for_backward import ForBackward
from mxep.ops.runtime.replay import replayed

N = 8
entered: list[str] = []


def forward(options: str, x: Tensor, w: Tensor) -> tuple[Tensor, ForBackward]:
    """Saves every kind of tensor: None, an argument, its own, views of it, of an operator, one that is a result too, one without values."""
    entered.append("forward")
    first, out = doubled(x), doubled(doubled(w))
    halves = torch.empty(2, N)
    DOUBLE.launch(0, 1, w, halves[1], N)
    DOUBLE.launch(0, 1, w, halves[0], N)
    summed = x + 1
    return out, ForBackward((first, None, x, halves[1:], first.view(2, -1).t(), summed, out, x.new_empty(0)), ("rest", N))


def backward(options: str, grad: Tensor, saved: ForBackward, w: Tensor) -> tuple[Tensor, Tensor]:
    entered.append("backward")
    first, nothing, x, half, turned, summed, out, empty = saved.tensors()
    assert nothing is None
    assert saved.rest == ("rest", N)
    assert not saved.has(1)
    assert saved.has(0)
    for tensor in (first, x, half, turned, summed, out, empty):
        assert tensor is not None
    assert empty is not None
    assert empty.numel() == 0
    return doubled(grad) + doubled(first), half + turned.t().reshape(1, N) + summed + out + x  # type: ignore[operator, arg-type, union-attr]


class Product(torch.autograd.Function):
    """With what is saved as the package's functions have it."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        out, saved = replayed(forward, "options", x, w)
        ctx.save_for_backward(w, *saved.kept)
        ctx.saved = ForBackward((), *saved[1:])
        assert not ctx.saved.kept
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        w, *kept = ctx.saved_tensors
        return replayed(backward, "options", grads[0], ctx.saved.with_saved(kept), w)


def step(number: int) -> tuple[int, tuple[Tensor, ...]]:
    """How many tensors a step saves but for w; its output and gradients, which are checked."""
    x, w = torch.arange(float(N)) + number, torch.arange(float(N)) * 3 - number
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.enable_grad():
        out = Product.apply(*leaves)
        grad = torch.full((N,), 1.0 + number)
        saved = len(out.grad_fn.saved_tensors) - 1
        d_x, d_w = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(out, 4 * w)
    assert torch.equal(d_x, 2 * grad + 4 * x)
    assert torch.equal(d_w, (2 * w + 2 * x + (x + 1) + 4 * w + x))
    return saved, (out.detach(), d_x, d_w)


def test_a_replayed_pair() -> None:
    """Forward's first replay leaves packed tensors, so backward runs and is recorded again; then neither runs."""
    entered.clear()
    counts = [step(number)[0] for number in range(2 * CALLS)]
    # x, the sum, the output and the empty tensor stay apart.
    assert counts == [8] * 6 + [5] * (2 * CALLS - 6)
    assert entered.count("forward") == 6
    assert entered.count("backward") == 2 * 6
    assert [call.sequence is not None for call in replay._calls.values()] == [True] * 3


def test_two_of_one_call_and_of_two() -> None:
    """Which tensors share memory is a fact of a call."""

    def twice(options: str, x: Tensor, first: ForBackward, second: ForBackward) -> tuple[Tensor, Tensor]:
        (one, *_), (two, *_) = first.tensors(), second.tensors()
        return doubled(one), doubled(two)  # type: ignore[arg-type]

    before = None
    for number in range(2 * CALLS):
        x = torch.full((N,), float(number))
        _, saved = replayed(forward, "options", x, x + 1)
        other, factor = (saved, 0) if number < 2 * CALLS - 1 or before is None else (before, 1)
        first, second = replayed(twice, "options", x, saved, other)
        assert torch.equal(first, 4 * x)
        assert torch.equal(second, 4 * (x - factor))
        before = saved


def test_zeros_other_dtypes_and_a_dict_of_results() -> None:
    def make(options: str, x: Tensor) -> dict[str, Any]:
        zeros = x.new_zeros(2 * N)
        DOUBLE.launch(0, 1, x, zeros[N:], N)
        return {"out": doubled(x), "saved": [ForBackward((zeros, zeros[N:].view(torch.int16)[1::2])), ForBackward((doubled(x),))]}

    for number in range(2 * CALLS):
        x = torch.full((N,), 1.0 + number)
        made = replayed(make, "options", x)
        (zeros, words), (other,) = (saved.tensors() for saved in made["saved"])
        assert torch.equal(made["out"], 2 * x)
        assert torch.equal(zeros, torch.cat([torch.zeros(N), 2 * x]))
        assert torch.equal(words, (2 * x).view(torch.int16)[1::2])
        assert torch.equal(other, 2 * x)
    assert [len(saved.kept) for saved in made["saved"]] == [1, 1]
    assert made["saved"][0].packing is not None


def test_large_tensors_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_LARGE", 2 * N * 4)
    assert [step(number)[0] for number in range(2 * CALLS)][-1] == 6  # the two halves are large


@pytest.mark.parametrize("first", [0, 4, 8])
def test_hooks_see_the_same_tensors_in_every_call(first: int) -> None:
    """A checkpoint compares what forward and recomputation save."""
    seen: list[int] = []

    def context(number: int) -> AbstractContextManager:
        return saved_tensors_hooks(lambda t: (seen.append(t.numel()), t)[1], lambda t: t) if number >= first else nullcontext()

    for number in range(2 * CALLS):
        seen.clear()
        with context(number):
            saved, _ = step(number)
        assert saved == (8 if number >= first or number < 6 else 5), number
        assert len(seen) == (8 if number >= first else 0)  # w and what is not None


def test_a_graph_that_is_kept_runs_twice() -> None:
    for number in range(2 * CALLS):
        x, w, grad = torch.arange(float(N)).requires_grad_(), torch.arange(float(N)).requires_grad_(), torch.ones(N)
        with torch.enable_grad():
            out = Product.apply(x, w)
            first, second = (torch.autograd.grad(out, (x, w), grad, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), number


def test_a_change_of_what_is_saved_is_an_error() -> None:
    for _ in range(2 * CALLS):
        with torch.enable_grad():
            x = torch.arange(float(N)).requires_grad_() * 1
            loss = Product.apply(x, torch.arange(float(N)).requires_grad_()).sum()
        x += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

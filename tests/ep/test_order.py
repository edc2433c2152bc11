"""Token order and back: properties over any choices, gradients summed in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.truth import Saved, assert_same, raises_naming, seeded

from mxep.ep.order import sort_rows, unsort_rows

pytestmark = pytest.mark.usefixtures("every_device")


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 40), choices=st.integers(1, 5), num_experts=st.integers(1, 9), seed=st.integers(0, 99))
def test_sorted_and_back(tokens: int, choices: int, num_experts: int, seed: int) -> None:
    generator = seeded(seed)
    experts = torch.randint(num_experts, (tokens, choices), generator=generator)
    x = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    rows, order, counts = sort_rows(x, experts, num_experts)
    assert (rows.shape, order.dtype, counts.dtype) == ((tokens * choices, 8), torch.int32, torch.int64)
    flat = experts.flatten()
    assert counts.tolist() == [int((flat == e).sum()) for e in range(num_experts)]
    assert sorted(order.tolist()) == list(range(tokens * choices))
    walked = [slot for e in range(num_experts) for slot in range(tokens * choices) if flat[slot] == e]
    assert order.tolist() == walked, "by expert, inside an expert by token: stable"
    assert_same(rows.detach(), x.detach()[torch.tensor(walked, dtype=torch.int64) // choices])
    back = unsort_rows(rows, order, choices)
    assert back.shape == (tokens, choices, 8)
    assert_same(back.detach(), x.detach()[:, None].expand(-1, choices, -1).contiguous(), "every choice is its token again")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = torch.randint(4, (10, 3))
    x = torch.randn(10, 8).to(dtype).requires_grad_()
    with Saved() as saved:
        rows, order, _ = sort_rows(x, experts, 4)
    assert [t.dtype for t in saved] == [torch.int32], "saves the order alone"
    grad = torch.randn(30, 8).to(dtype)
    summed = torch.zeros(30, 8).index_copy_(0, order.long(), grad.float()).view(10, 3, 8).sum(1).to(dtype)
    assert_same(torch.autograd.grad(rows, x, grad)[0], summed, "one rounding, of the float32 sum")
    sorted_rows = rows.detach().requires_grad_()
    back = unsort_rows(sorted_rows, order, 3)
    grad = torch.randn(10, 3, 8).to(dtype)
    assert_same(torch.autograd.grad(back, sorted_rows, grad, retain_graph=True)[0], grad.view(30, 8)[order.long()])
    (expanded,) = torch.autograd.grad(back.sum(), sorted_rows)
    assert_same(expanded, torch.ones_like(sorted_rows).detach())


def test_each_other_transposed() -> None:
    """Both ways are linear maps and each other's transpose."""
    torch.manual_seed(1)
    experts = torch.randint(3, (5, 2))
    order = sort_rows(torch.zeros(5, 4), experts, 3).order
    x, y = torch.randn(5, 4), torch.randn(10, 4)
    forward = (sort_rows(x, experts, 3).rows * y).sum()
    leaf = x.clone().requires_grad_()
    (sort_rows(leaf, experts, 3).rows * y).sum().backward()
    torch.testing.assert_close((leaf.grad * x).sum(), forward)
    torch.testing.assert_close(leaf.grad, unsort_rows(y, order, 2).sum(1))


def test_no_tokens() -> None:
    x = torch.randn(0, 8, requires_grad=True)
    rows, order, counts = sort_rows(x, torch.zeros(0, 3, dtype=torch.int64), 4)
    unsort_rows(rows, order, 3).sum().backward()
    assert counts.tolist() == [0, 0, 0, 0]
    assert x.grad.shape == (0, 8)


def test_experts_out_of_range() -> None:
    for experts in (torch.tensor([[0, 4]]), torch.tensor([[-1, 0]])):
        with raises_naming("sort_rows", "experts from", "want 0 to 3"):
            sort_rows(torch.randn(1, 8), experts, 4)
    for experts in (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)):
        with raises_naming("sort_rows", str(experts.dtype), "(1, C) int64"):
            sort_rows(torch.randn(1, 8), experts, 4)

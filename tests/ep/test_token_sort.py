"""Token order and back: properties over any choices, gradients summed in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.truth import assert_same, raises_naming, saved_tensors, seeded

from mxep.ep.token_sort import combine_topk, sort_tokens_by_expert

pytestmark = pytest.mark.usefixtures("every_device")


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 40), choices=st.integers(1, 5), num_experts=st.integers(1, 9), seed=st.integers(0, 99))
def test_sorted_and_back(tokens: int, choices: int, num_experts: int, seed: int) -> None:
    generator = seeded(seed)
    experts = torch.randint(num_experts, (tokens, choices), generator=generator)
    x = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    rows, order, counts = sort_tokens_by_expert(x, experts, num_experts)
    assert (rows.shape, order.dtype, counts.dtype) == ((tokens * choices, 8), torch.int32, torch.int64)
    flat = experts.flatten()
    assert counts.tolist() == [int((flat == e).sum()) for e in range(num_experts)]
    assert sorted(order.tolist()) == list(range(tokens * choices))
    walked = [slot for e in range(num_experts) for slot in range(tokens * choices) if flat[slot] == e]
    assert order.tolist() == walked, "by expert, inside an expert by token: stable"
    assert_same(rows.detach(), x.detach()[torch.tensor(walked, dtype=torch.int64) // choices])
    weights = torch.rand(tokens, choices, generator=generator)
    total = torch.zeros(tokens, 8)
    for weight in weights.unbind(1):
        total += weight[:, None] * x.detach()
    assert_same(combine_topk(rows, order, choices, weights).detach(), total, "every choice is its token again, in order of c")
    ones = torch.ones(tokens, choices)
    assert_same(combine_topk(rows, order, choices).detach(), combine_topk(rows, order, choices, ones).detach(), "no weights are ones")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = torch.randint(4, (10, 3))
    x = torch.randn(10, 8).to(dtype).requires_grad_()
    with saved_tensors() as saved:
        rows, order, _ = sort_tokens_by_expert(x, experts, 4)
    assert [t.dtype for t in saved] == [torch.int32], "saves the order alone"
    grad = torch.randn(30, 8).to(dtype)
    summed = torch.zeros(30, 8).index_copy_(0, order.long(), grad.float()).view(10, 3, 8).sum(1).to(dtype)
    assert_same(torch.autograd.grad(rows, x, grad)[0], summed, "one rounding, of the float32 sum")
    sorted_rows = rows.detach().requires_grad_()
    with saved_tensors() as saved:
        back = combine_topk(sorted_rows, order, 3)
    assert [t.dtype for t in saved] == [torch.int32], "the order alone"
    grad = torch.randn(10, 8).to(dtype)
    assert_same(torch.autograd.grad(back, sorted_rows, grad, retain_graph=True)[0], grad[order.long() // 3])
    (expanded,) = torch.autograd.grad(back.sum(), sorted_rows)
    assert_same(expanded, torch.ones_like(sorted_rows).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("choices", range(1, 9))
def test_weighted_sum_against_float64(choices: int, dtype: torch.dtype) -> None:
    """Values and gradients; saved are the rows in their dtype, the weights, and the positions of the rows."""
    torch.manual_seed(choices)
    tokens, width = 11, 40
    order = sort_tokens_by_expert(torch.zeros(tokens, width), torch.randint(5, (tokens, choices)), 5).order
    rows, weights = torch.randn(tokens * choices, width).to(dtype).requires_grad_(), torch.rand(tokens, choices).requires_grad_()
    with saved_tensors() as saved:
        y = combine_topk(rows, order, choices, weights)
    assert [(t.dtype, t.numel()) for t in saved] == [(dtype, rows.numel()), (torch.int32, order.numel()), (torch.float32, weights.numel())]
    exact_rows, exact_weights = rows.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    exact = torch.zeros(tokens, width, dtype=torch.float64)
    exact = exact.index_add(0, order.long() // choices, exact_rows * exact_weights.flatten()[order.long(), None])
    assert (y.dtype, y.shape) == (dtype, (tokens, width))
    close = {"rtol": 2**-8, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.double(), exact, **close)
    for grad in (torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype).expand(tokens, width)):
        found = torch.autograd.grad(y, (rows, weights), grad, retain_graph=True)
        want = torch.autograd.grad(exact, (exact_rows, exact_weights), grad.double(), retain_graph=True)
        assert [g.dtype for g in found] == [dtype, torch.float32]
        torch.testing.assert_close(found[0].double(), want[0], **close)
        torch.testing.assert_close(found[1].double(), want[1], rtol=1e-5, atol=1e-5)


def test_sums_have_no_second_derivative() -> None:
    order = sort_tokens_by_expert(torch.zeros(4, 8), torch.randint(3, (4, 2)), 3).order
    rows, weights = torch.randn(8, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    for factors in (None, weights):
        (first,) = torch.autograd.grad(combine_topk(rows, order, 2, factors).sum(), rows, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


def test_sort_and_unsort_are_each_others_transpose() -> None:
    """Both are linear maps, and each is the transpose of the other."""
    torch.manual_seed(1)
    experts = torch.randint(3, (5, 2))
    order = sort_tokens_by_expert(torch.zeros(5, 4), experts, 3).order
    x, y = torch.randn(5, 4), torch.randn(10, 4)
    forward = (sort_tokens_by_expert(x, experts, 3).rows * y).sum()
    leaf = x.clone().requires_grad_()
    (sort_tokens_by_expert(leaf, experts, 3).rows * y).sum().backward()
    torch.testing.assert_close((leaf.grad * x).sum(), forward)
    assert_same(leaf.grad, combine_topk(y, order, 2))


def test_no_tokens() -> None:
    x = torch.randn(0, 8, requires_grad=True)
    rows, order, counts = sort_tokens_by_expert(x, torch.zeros(0, 3, dtype=torch.int64), 4)
    for weights in (None, torch.rand(0, 3, requires_grad=True)):
        x.grad = None
        y = combine_topk(rows, order, 3, weights)
        assert y.shape == (0, 8)
        y.sum().backward(retain_graph=True)
        assert x.grad.shape == (0, 8)
        assert weights is None or weights.grad.shape == (0, 3)
    assert counts.tolist() == [0, 0, 0, 0]


def test_experts_out_of_range() -> None:
    for experts in (torch.tensor([[0, 4]]), torch.tensor([[-1, 0]])):
        with raises_naming("sort_tokens_by_expert", "experts from", "want 0 to 3"):
            sort_tokens_by_expert(torch.randn(1, 8), experts, 4)
    for experts in (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)):
        with raises_naming("sort_tokens_by_expert", str(experts.dtype), "(1, C) int64"):
            sort_tokens_by_expert(torch.randn(1, 8), experts, 4)


def test_wrong_operands_of_a_sum() -> None:
    rows, order = torch.randn(6, 8), torch.arange(6, dtype=torch.int32)
    wrong = (rows, order[:4], 2), (rows, order.long(), 2), (rows, order, 4), (rows[0], order, 2), (rows, order, 0), (rows.half(), order, 2)
    for arguments in wrong:
        with raises_naming("combine_topk", "with order", "want (T*C, D) bfloat16 or float32 with (T*C,) int32", f"C = {arguments[2]}"):
            combine_topk(*arguments)
    for weights in (torch.rand(2, 3), torch.rand(3, 2).double(), torch.rand(6)):
        with raises_naming("combine_topk", f"weights are {tuple(weights.shape)} {weights.dtype}", "want (3, 2) float32"):
            combine_topk(rows, order, 2, weights)

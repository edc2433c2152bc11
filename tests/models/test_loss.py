"""The chunked loss against the plain one: numbers, gradients, ignored labels, memory, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.operator_calls import OperatorCalls
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mxep.models.loss import CHUNK_TOKENS, IGNORE, OutputProjection, linear_cross_entropy


def case(tokens: int, dim: int, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(words, dim, generator=generator, dtype=torch.float64) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(words, (tokens,), generator=generator)
    labels[::7] = IGNORE
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_loss_and_gradients_in_float64(chunk: int) -> None:
    ours, theirs = case(64, 16, 50, torch.float64), case(64, 16, 50, torch.float64)
    got, want = linear_cross_entropy(*ours, chunk_tokens=chunk), plain(*theirs)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-12)
    (got * 0.3).backward()
    (want * 0.3).backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_the_plain_loss(dtype: torch.dtype, factor: float) -> None:
    """Against float64 on the same operands: at most 1.02 times the plain loss' own error, or float32's rounding; its scale no matter."""
    ours, theirs, truth = case(300, 64, 500, dtype), case(300, 64, 500, dtype), [t.detach() for t in case(300, 64, 500, dtype)]
    truth[0], truth[1] = truth[0].double().requires_grad_(), truth[1].double().requires_grad_()
    want = plain(*truth) * factor
    want.backward()
    losses = linear_cross_entropy(*ours, chunk_tokens=64) * factor, plain(*theirs) * factor
    errors = [abs(float(loss.detach() - want.detach())) / float(want.detach()) for loss in losses]
    assert errors[0] <= max(1.02 * errors[1], 1e-6)
    for loss in losses:
        assert loss.dtype == torch.float32
        loss.backward()
    for index in (0, 1):
        scale = float(truth[index].grad.norm())
        mine, other = (float((tensors[index].grad.double() - truth[index].grad).norm()) / scale for tensors in (ours, theirs))
        assert mine <= max(1.02 * other, 5e-7)
        assert ours[index].grad.dtype == dtype


def is_product(function: Any, args: Any, result: Any) -> bool:
    return function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.matmul, torch.ops.aten.addmm, torch.ops.aten.addmm_)


def adds_matrices(function: Any, args: Any, result: Any) -> bool:
    """In a pass of its own."""
    return function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and args[0].dim() == 2


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_only_requested_gradients_are_computed(needed: tuple[bool, bool]) -> None:
    """Three chunks: one product each for the loss and one for each gradient, all in forward; the weight's add themselves up."""
    ours, theirs = case(64, 16, 50, torch.float64), case(64, 16, 50, torch.float64)
    for operands in (ours, theirs):
        for operand, wants in zip(operands, needed, strict=False):
            operand.requires_grad_(wants)
    with OperatorCalls(is_product) as products, OperatorCalls(adds_matrices) as sums:
        got = linear_cross_entropy(*ours, chunk_tokens=30)
        assert (len(products.names), len(sums.names)) == (3 * (1 + sum(needed)), 0)
        if any(needed):
            got.backward()
        assert len(products.names) == 3 * (1 + sum(needed))
    want = plain(*theirs)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-12)
    if any(needed):
        want.backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-13)


def test_without_grad_mode_only_the_loss_is_computed() -> None:
    operands = case(64, 16, 50, torch.float32)
    want = linear_cross_entropy(*operands, chunk_tokens=30)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), OperatorCalls(is_product) as products:
            got = linear_cross_entropy(*operands, chunk_tokens=30)
        assert (len(products.names), got.requires_grad) == (3, False)
        assert torch.equal(got, want.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_of_a_retained_graph_gives_the_same(dtype: torch.dtype) -> None:
    """Saved gradients are not scaled in place, and all of them are written."""
    hidden, weight, labels = case(64, 16, 50, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda like, **options: torch.full_like(like, torch.nan, **options))
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=30) * 0.3
        first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_and_accumulated(reentrant: bool) -> None:
    ours, theirs = case(64, 16, 50, torch.float64), case(64, 16, 50, torch.float64)
    for part in (slice(0, 24), slice(24, 64)):
        (checkpoint(linear_cross_entropy, ours[0][part], ours[1], ours[2][part], 10, use_reentrant=reentrant) * 0.1).backward()
    (plain(*theirs) * 0.1).backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-13)


def test_strided_operands() -> None:
    """Every second token of a longer sequence, as a slice hands them over."""
    ours, theirs = case(64, 16, 50, torch.float64), case(64, 16, 50, torch.float64)
    got = linear_cross_entropy(ours[0][1::2], ours[1], ours[2][1::2], chunk_tokens=10)
    want = plain(theirs[0][1::2], theirs[1], theirs[2][1::2])
    got.backward()
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-12)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-13)


def test_autocast_changes_nothing() -> None:
    results = []
    for enabled in (False, True):
        hidden, weight, labels = case(64, 16, 50, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=30)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("label", [-1, 11])
def test_a_label_out_of_range_is_refused(label: int) -> None:
    hidden, weight, labels = case(9, 8, 11, torch.float32)
    labels[4] = label
    with pytest.raises(ValueError, match=f"label {label}, want 0 to 10 or -100"):
        linear_cross_entropy(hidden, weight, labels)


def test_no_valid_label_and_no_token() -> None:
    hidden, weight, labels = case(9, 8, 11, torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()
    hidden.grad, weight.grad = None, None
    loss = linear_cross_entropy(hidden[:0], weight, labels[:0])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not weight.grad.any()


def peak_bytes(loss: object, tokens: int, words: int) -> int:
    """Highest sum of live CPU bytes while `loss` runs forward and backward, operands and their gradients aside."""
    operands = case(tokens, 16, words, torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss(*operands).backward()  # type: ignore[operator]
    live = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest - 4 * (operands[0].numel() + operands[1].numel())


def test_memory_is_that_of_one_chunk() -> None:
    """8 chunks of tokens: the plain loss holds the logits of all of them several times, ours a few chunks and one more weight."""
    tokens, words = 8 * CHUNK_TOKENS, 512
    logits, weight = 4 * tokens * words, 4 * words * 16
    assert peak_bytes(plain, tokens, words) >= 2 * logits
    assert peak_bytes(linear_cross_entropy, tokens, words) <= 4 * logits / 8 + 2 * weight


def test_projection_gives_logits_or_their_loss() -> None:
    projection = OutputProjection(8, 11)
    assert [name for name, _ in projection.named_parameters()] == ["weight"]
    hidden, labels = torch.randn(2, 5, 8), torch.randint(11, (2, 5))
    logits = projection(hidden)
    assert logits.shape == (2, 5, 11)
    torch.testing.assert_close(projection(hidden, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, "want \\(T, D\\), \\(V, D\\), \\(T,\\)"),
        ({"weight": torch.zeros(5, 3)}, "want \\(T, D\\)"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "want \\(T, D\\)"),
        ({"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, "want two equal ones and int64"),
        ({"labels": torch.zeros(3, dtype=torch.int32)}, "want two equal ones and int64"),
        ({"hidden": torch.zeros(3, 4).half(), "weight": torch.zeros(5, 4).half()}, "want two equal ones and int64; of bfloat16"),
        ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, "labels on meta, want one device"),
        ({"chunk_tokens": 0}, "chunk_tokens=0, want a positive whole number"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    right = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "labels": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**right, **change})


def test_graphs_of_several_chunks_in_bf16_on_a_gpu() -> None:
    """Traced as a graph is, without a GPU: torch 2.11 does not know addmm's out_dtype there."""
    with FakeTensorMode():
        hidden, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in ((10, 64), (100, 64)))
        labels = torch.zeros(10, dtype=torch.int64, device="cuda")
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)  # computes the gradients
        assert (loss.dtype, loss.device.type) == (torch.float32, "cuda")


def test_compiled_gradients_are_the_eager_ones() -> None:
    """Traced by dynamo (torch 2.11) an autograd function like this one has wrong gradients; it enters graphs whole."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        first, projection = torch.nn.Linear(8, 8), OutputProjection(8, 11)
        parameters = [*first.parameters(), *projection.parameters()]

        def loss(x: Tensor, labels: Tensor) -> Tensor:
            return projection(first(x).tanh(), labels)  # noqa: B023

        run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        (run(torch.randn(2, 5, 8), torch.randint(11, (2, 5))) / 7).backward()
        results.append([parameter.grad for parameter in parameters])
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)

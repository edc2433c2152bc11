"""The chunked loss on a GPU: its kernel against float64, its gradients summed in float32 by the GEMMs themselves, its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.loss_cases import assert_close_to_exact, exact, labelled_rows
from tests.models.test_loss import case, plain

from mxep.models.loss import CHUNK_TOKENS, IGNORE, linear_cross_entropy
from mxep.ops import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@pytest.mark.large
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_error_is_that_of_the_plain_loss_in_bf16(factor: float) -> None:
    """Two chunks, the second one partly filled."""
    tokens, dim, words = CHUNK_TOKENS + 904, 256, 4000
    ours, theirs, truth = ([part.detach().cuda() for part in case(tokens, dim, words, torch.bfloat16)] for _ in range(3))
    truth[:2] = [part.double() for part in truth[:2]]
    for operands in (ours, theirs, truth):
        for part in operands[:2]:
            part.requires_grad_()
    losses = [loss(*operands) * factor for loss, operands in ((linear_cross_entropy, ours), (plain, theirs), (plain, truth))]
    for loss in losses:
        loss.backward()
    mine, other, want = (float(loss.detach()) for loss in losses)
    assert abs(mine - want) <= 1.02 * abs(other - want) + 1e-5 * want
    for mine, other, want in zip(ours[:2], theirs[:2], truth[:2], strict=True):
        errors = [float((part.grad.double() - want.grad).norm() / want.grad.norm()) for part in (mine, other)]
        assert errors[0] <= 1.02 * errors[1]
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(*ours) * factor, losses[0].detach())


def test_float64_and_float32() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        ours, theirs = ([part.detach().cuda() for part in case(300, 64, 500, dtype)] for _ in range(2))
        for operands in (ours, theirs):
            for part in operands[:2]:
                part.requires_grad_()
        linear_cross_entropy(*ours, chunk_tokens=64).backward()
        plain(*theirs).backward()
        for mine, other in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("words", [1, 7, 1000, 8192, 8193, 25008, 102400])
def test_kernel(words: int, dtype: torch.dtype, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    logits, labels = (part.cuda() for part in labelled_rows(50, words, dtype))
    before, again = logits.clone(), logits.clone()
    with no_sync():
        losses = kernels.cross_entropy(logits, labels)
        with_gradient = kernels.cross_entropy_to_gradient(logits, labels)
        repeated = kernels.cross_entropy_to_gradient(again, labels)
    assert_close_to_exact(losses, logits, before, labels)
    assert torch.equal(losses, with_gradient)
    assert torch.equal(losses, repeated)
    assert torch.equal(logits, again)


def test_a_label_out_of_range_is_seen() -> None:
    """Its row is NaN, and nothing outside of it is written."""
    logits, labels = (part.cuda() for part in labelled_rows(6, 1000, torch.bfloat16))
    wrong = [1, 3]
    labels[wrong] = torch.tensor([-1, 2**40], device="cuda")
    memory = torch.full((8, 1000), 7.0, dtype=torch.bfloat16, device="cuda")
    memory[1:7] = logits
    losses = kernels.cross_entropy_to_gradient(memory[1:7], labels)
    assert losses.isnan().nonzero().flatten().tolist() == wrong
    assert memory[1:7][wrong].isnan().all()
    assert (memory[[0, 7]] == 7.0).all()
    right = [0, 2, 4, 5]
    assert_close_to_exact(losses[right], memory[1:7][right], logits[right], labels[right])


@pytest.mark.large
def test_more_than_2_to_the_31_logits() -> None:
    words = 102400
    rows = 2**31 // words + 3
    logits = torch.zeros(rows, words, dtype=torch.bfloat16, device="cuda")
    labels = torch.full((rows,), IGNORE, device="cuda")
    last, some = (part.cuda() for part in labelled_rows(2, words, torch.bfloat16))
    logits[-2:], labels[-2:], labels[0] = last, some, 5
    losses = kernels.cross_entropy_to_gradient(logits, labels)
    want, want_gradient = exact(last, some)
    torch.testing.assert_close(losses[-2:].double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(logits[-2:].double(), want_gradient, rtol=2**-8, atol=1e-7)
    assert not logits[1:-2].any()
    assert float(logits[0, 5]) == pytest.approx(-1.0, abs=2**-8)


@pytest.mark.large
def test_memory_is_that_of_one_chunk() -> None:
    """In addition to the operands: a chunk's logits, the gradients in float32, and one more float32 product of the weight's shape."""
    tokens, dim, words = 4 * CHUNK_TOKENS, 256, 32000
    hidden, weight, labels = (part.detach().cuda() for part in case(tokens, dim, words, torch.bfloat16))
    hidden.requires_grad_()
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, labels).backward()  # the first call alone allocates cuBLAS's workspace of this size
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(hidden, weight, labels)
    small = 32 << 20
    gradients = 4 * (hidden.numel() + weight.numel())
    assert torch.cuda.memory_allocated() - before <= gradients + small
    assert torch.cuda.max_memory_allocated() - before <= 2 * CHUNK_TOKENS * words + gradients + 4 * weight.numel() + small
    loss.backward()
    del loss
    assert torch.cuda.memory_allocated() - before <= gradients / 2 + small


@pytest.mark.large
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8"])
@pytest.mark.parametrize("words", [4000, 3990])
def test_mxfp8_products(words: int, recipe: str, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    """Two chunks, the second one partly filled; 3990 words are no whole number of MX blocks."""
    tokens = CHUNK_TOKENS + 904
    hidden, weight, labels = (part.detach().cuda() for part in case(tokens, 256, words, torch.bfloat16))
    hidden *= 0.3
    ours = [part.clone().requires_grad_() for part in (hidden, weight)]
    truth = [part.double().requires_grad_() for part in (hidden, weight)]
    want = plain(*truth, labels)
    want.backward()
    linear_cross_entropy(*ours, labels, recipe=recipe)  # compiles its kernels
    with no_sync():
        loss = linear_cross_entropy(*ours, labels, recipe=recipe)
        loss.backward()
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=2e-3)
    for mine, other in zip(ours, truth, strict=True):
        assert 20 * float(torch.log10(other.grad.norm() / (mine.grad.double() - other.grad).norm())) > 26

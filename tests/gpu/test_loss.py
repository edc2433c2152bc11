"""The chunked loss on a GPU: its weight's gradient is summed in float32 by the GEMM itself."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_loss import case, plain

from mxep.models.loss import linear_cross_entropy

pytestmark = pytest.mark.gpu


def test_error_is_that_of_the_plain_loss_in_bf16() -> None:
    tokens, dim, words = 5000, 256, 4000
    ours, theirs, truth = ([part.detach().cuda() for part in case(tokens, dim, words, torch.bfloat16)] for _ in range(3))
    truth[:2] = [part.double() for part in truth[:2]]
    for operands in (ours, theirs, truth):
        for part in operands[:2]:
            part.requires_grad_()
    linear_cross_entropy(*ours).backward()
    plain(*theirs).backward()
    plain(*truth).backward()
    for mine, other, want in zip(ours[:2], theirs[:2], truth[:2], strict=True):
        errors = [float((part.grad.double() - want.grad).norm() / want.grad.norm()) for part in (mine, other)]
        assert errors[0] <= 1.02 * errors[1]

"""Rows of logits with labels for the tests of the cross-entropy kernel, and their float64 results."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mxep.ops.cross_entropy.reference import IGNORE


def labelled_rows(rows: int, words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (rows, words) on the CPU and labels (rows,), every third of them IGNORE."""
    generator = torch.Generator().manual_seed(rows * 1000 + words)
    logits = (torch.randn(rows, words, generator=generator, dtype=torch.float64) * 3).to(dtype)
    labels = torch.randint(words, (rows,), generator=generator)
    labels[2::3] = IGNORE
    return logits, labels


def exact(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient in float64."""
    rows = logits.double().requires_grad_()
    losses = F.cross_entropy(rows, labels, ignore_index=IGNORE, reduction="none")
    losses.sum().backward()
    return losses.detach(), rows.grad


def assert_close_to_exact(losses: torch.Tensor, gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Losses to float32's rounding; the gradient to its dtype's, once; IGNORE gives exact zeros."""
    want, want_gradient = exact(logits, labels)
    torch.testing.assert_close(losses.double(), want, rtol=2e-6, atol=2e-6)
    rounding = torch.finfo(gradient.dtype).eps / 2
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=rounding + 4e-6, atol=1e-7)
    ignored = labels == IGNORE
    assert not losses[ignored].any()
    assert not gradient[ignored].any()

"""Choices as a user's router makes them, for the tests of `sort_topk` on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

SHAPES = [(0, 4, 2), (1, 1, 1), (129, 8, 1), (130, 8, 8), (31, 24, 5), (70, 512, 6), (9, 512, 33)]  # tokens, experts, choices
INVALID = [  # choices among four experts, and whether -1 and duplicates are allowed
    ([[1, 4]], (True, True)),
    ([[-2, 0]], (True, True)),
    ([[0, 2**32]], (True, True)),
    ([[0, -1]], (False, True)),
    ([[3, 1, 2], [2, 0, 2]], (True, False)),
    ([[0, 0]], (False, False)),
]


def calls(tokens: int, experts: int, choices: int, device: str = "cpu") -> Iterator[tuple[Any, ...]]:
    """Arguments of `sort_topk`: choices in any order, with -1 and duplicates where they are allowed, of every dtype and strides."""
    best = torch.rand(tokens, experts, device=device).argsort(1)[:, :choices]  # a part of something wider
    scores = torch.randn(tokens, choices, device=device)
    yield best, scores, experts, False, False
    yield best.t().contiguous().t(), scores.bfloat16().t().contiguous().t(), experts, False, False
    none = torch.rand(tokens, choices, device=device) < 0.3
    yield best.masked_fill(none, -1), scores.half(), experts, True, False
    twice = torch.randint(0, max(experts // 2, 1), (tokens, choices), device=device)
    yield twice, scores.double(), experts, False, True
    yield twice.masked_fill(none, -1), scores.expand(tokens, choices), experts, True, True
    yield best[:1].expand(tokens, choices), scores[:, :1].expand(tokens, choices), experts, False, False

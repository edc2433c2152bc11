"""Rotary positions: the frequencies of a head's pairs, with or without YaRN, and the table of rotations that attention applies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mxep.models.presets import Yarn


def rope_frequencies(theta: float, width: int, yarn: Yarn | None = None) -> Tensor:
    """Angles per token of each rotated pair, (width / 2,) float64.

    YaRN keeps frequencies with more than `beta_fast` rotations within the original context, divides those with less than `beta_slow` by
    `factor`, and interpolates linearly in between.
    """
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if yarn is None:
        return frequencies

    def pair_with(rotations: float) -> float:
        return width * math.log(yarn.original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def rope_table(theta: float, width: int, max_seq_len: int, yarn: Yarn | None = None) -> Tensor:
    """Unit complex numbers (max_seq_len, width / 2) complex64; complex, so that FSDP does not cast them to bf16."""
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), rope_frequencies(theta, width, yarn))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

"""Rows per expert for the benchmarks: even, or by Zipf's law, the same on every machine."""

from __future__ import annotations

import torch

_SEED = 7


def even_counts(num_rows: int, num_experts: int) -> torch.Tensor:
    """(E,) int64, as even as whole rows allow.

    >>> even_counts(10, 4).tolist()
    [3, 3, 2, 2]
    """
    counts = torch.full((num_experts,), num_rows // num_experts)
    counts[: num_rows % num_experts] += 1
    return counts


def zipf_counts(num_rows: int, num_experts: int, exponent: float = 1.0, granule: int = 1) -> torch.Tensor:
    """(E,) int64: popularity 1/k^exponent, the popular experts anywhere; a fixed seed, so all ranks agree.

    All counts but one are multiples of `granule`.

    >>> sorted(zipf_counts(24, 3).tolist())
    [4, 7, 13]
    """
    weights = torch.arange(1, num_experts + 1).double() ** -exponent
    weights = weights[torch.randperm(num_experts, generator=torch.Generator().manual_seed(_SEED))]
    ends = (weights.cumsum(0) / weights.sum() * num_rows / granule).round().long() * granule
    ends[-1] = num_rows
    return torch.diff(ends, prepend=ends.new_zeros(1))


def counts_of(routing: str, num_rows: int, num_experts: int, granule: int = 1) -> torch.Tensor:
    """Counts by the routing's name, "balanced" or "zipf"."""
    if routing not in ("balanced", "zipf"):
        raise ValueError(f"routing {routing!r}, want balanced or zipf")
    return even_counts(num_rows, num_experts) if routing == "balanced" else zipf_counts(num_rows, num_experts, granule=granule)

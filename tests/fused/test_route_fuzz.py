"""A few of the random routings of tests/route_fuzz.py, which can run any number of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tests.route_fuzz import KINDS, H, check, draw

import mxep


def test_random_routings_are_as_in_float64() -> None:
    assert set(Counter(check(seed) for seed in range(40))) == set(KINDS)


@pytest.mark.usefixtures("one_rank")
def test_a_group_refuses_experts_that_a_token_names_twice() -> None:
    for seed in range(20):
        _, _, routing = draw(seed)
        if not routing.experts.numel():
            continue
        w1, w2 = torch.randn(routing.num_experts, 2 * H, 64), torch.randn(routing.num_experts, 64, H)
        for wrong in (-1, routing.num_experts):
            experts = routing.experts.clone()
            experts[-1, -1] = wrong
            with pytest.raises(ValueError, match=rf"fused_experts: experts from .* 0 to {routing.num_experts - 1}"):
                mxep.fused_experts(routing.tokens, experts, routing.scores, w1, None, w2, None, routing.num_experts, group=dist.group.WORLD)

"""Fused layers that alternate over the symmetric memory of one group and of several, on virtual ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.fused.alternating import FUNCTION_BY_HAND, Forward, Member, by_autograd, by_hand, check
from tests.virtual import VirtualGroup, run_virtual

from mxep.fused import autograd

GROUPS = pytest.mark.parametrize(
    ("world", "more"),
    [(2, []), (2, [[0, 1]]), (4, [[0, 1], [2, 3]])],
    ids=["one group", "two over the same ranks", "two apart and one of all"],
)


def over_all(me: int, world: int, name: str, more: list[VirtualGroup], device: str = "cpu", forward: Forward = by_autograd) -> None:
    if device != "cpu":
        torch.set_default_device(device)  # of this thread
    groups = [Member(name, me, world)]
    with contextlib.ExitStack() as joined:
        for number, group in enumerate(more):
            if me in group.ranks:
                other = f"{name} {number}"
                groups.append(Member(other, joined.enter_context(group.joined(me, other, device)), len(group.ranks)))
        check(groups, forward)


@GROUPS
@pytest.mark.usefixtures("poison")
def test_layers_alternate(world: int, more: list[list[int]]) -> None:
    run_virtual(over_all, world, [VirtualGroup(ranks) for ranks in more])


def test_layers_alternate_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without autograd's engine, as several ranks on one GPU need it."""
    monkeypatch.setattr(autograd, "_FusedMoE", FUNCTION_BY_HAND)
    run_virtual(over_all, 2, [VirtualGroup([0, 1])], "cpu", by_hand)

"""Fused layers that alternate over the symmetric memory of one group and of several: virtual ranks on one GPU, and GPUs of one machine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.fused.alternating import FUNCTION_BY_HAND, Member, by_hand, check
from tests.fused.test_fused_alternating import GROUPS, over_all
from tests.gpu.test_symmetric_ranks import BACKEND
from tests.ranks import run_ranks
from tests.virtual import VirtualGroup, run_virtual

from mxep.comm import close_transports, set_transport
from mxep.fused import autograd


@pytest.mark.gpu
@GROUPS
@pytest.mark.usefixtures("unchecked", "on_the_gpu", "poison")
def test_layers_alternate_on_virtual_ranks(world: int, more: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_FusedMoE", FUNCTION_BY_HAND)
    groups = [VirtualGroup(ranks) for ranks in more]
    run_virtual(over_all, world, groups, "cuda", by_hand, device="cuda")


def _alternate(rank: int, world: int, more: list[list[int]]) -> None:
    torch.set_default_device(f"cuda:{rank}")
    made = [(ranks, dist.new_group(ranks)) for ranks in (list(range(world)), *more)]  # every rank makes all of them
    groups = []
    for ranks, group in made:
        if rank in ranks:
            assert set_transport("symmetric", group, timeout_s=60) == "symmetric"
            groups.append(Member(group.group_name, ranks.index(rank), len(ranks)))
    check(groups)
    torch.cuda.synchronize()
    close_transports()


def _overlap(rank: int, world: int) -> None:
    """One of two groups sets up memory that the other does not: the group of all ranks raises, and can take the collective transport."""
    made = [dist.new_group(ranks) for ranks in (list(range(world)), [0, 1], [2, 3])]
    all_ranks, mine = made[0], made[1 + rank // 2]
    for group in (all_ranks, mine):
        assert set_transport("symmetric", group, timeout_s=60) == "symmetric"
    rows = torch.full((world, 64), float(rank), device="cuda")
    if rank < 2:
        got = torch.ops.mxep.exchange_rows(rows[:2], [1, 1], [1, 1], mine.group_name)
        assert got[:, 0].tolist() == [0, 1]
    with pytest.raises(RuntimeError, match=r"set up symmetric memory \[3, 3, 2, 2\] times"):
        torch.ops.mxep.exchange_rows(rows, [1] * world, [1] * world, all_ranks.group_name)
    assert set_transport("collective", all_ranks) == "collective"
    got = torch.ops.mxep.exchange_rows(rows, [1] * world, [1] * world, all_ranks.group_name)
    assert got[:, 0].tolist() == list(range(world))
    del got
    close_transports()


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA GPUs")
def test_groups_that_share_some_processes() -> None:
    run_ranks(_overlap, 4, backend=BACKEND, timeout=60)


@pytest.mark.multi_gpu
@GROUPS
def test_layers_alternate_on_ranks(world: int, more: list[list[int]]) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA GPUs")
    run_ranks(_alternate, world, more, backend=BACKEND, timeout=120)

"""Ranks of every mesh for every combination of degrees, without starting any rank; and degrees that do not fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.parallel import ParallelDims, build_meshes, stages_of
from mxep.parallel.pipeline_parallel import microbatches_in_flight


def meshes_of(world: int, degrees: ParallelDims, rank: int) -> dict[str, list]:
    """Ranks of every mesh as `rank` sees them, and its part of the batch."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        meshes = build_meshes(world, degrees, "cpu")
        names = [field.name for field in dataclasses.fields(meshes) if field.name != "degrees"]
        return {name: getattr(meshes, name).mesh.tolist() for name in names} | {"data": [meshes.data_rank, meshes.data_world]}
    finally:
        dist.destroy_process_group()


def test_ep_folded_out_of_data_parallelism() -> None:
    ranks = [meshes_of(4, ParallelDims(ep=2), rank) for rank in range(4)]
    assert [at["dp"] for at in ranks] == [[0, 1, 2, 3]] * 4
    assert [at["ep"] for at in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [at["dp_mod_ep"] for at in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [at["data"] for at in ranks] == [[0, 4], [1, 4], [2, 4], [3, 4]]


def test_tensor_parallel_ranks_are_ep_ranks() -> None:
    at = meshes_of(8, ParallelDims(ep=4, tp=2), 5)
    assert (at["tp"], at["ep"]) == ([4, 5], [4, 5, 6, 7])
    assert (at["dp_mod_ep"], at["dp_mod_tp"], at["dp"]) == ([1, 5], [1, 3, 5, 7], list(range(8)))
    assert at["data"] == [2, 4]


def test_stages_and_replicas() -> None:
    at = meshes_of(16, ParallelDims(ep=2, tp=2, pp=2, replicate=2), 13)
    assert (at["pp"], at["stage"], at["dp"]) == ([5, 13], list(range(8, 16)), [[8, 9, 10, 11], [12, 13, 14, 15]])
    assert at["ep"] == at["tp"] == [12, 13]
    assert at["dp_mod_ep"] == [[9, 11], [13, 15]]
    assert at["data"] == [2, 4]


@pytest.mark.parametrize("degrees", [ParallelDims(*some) for some in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))], ids=str)
def test_every_combination_covers_the_ranks_of_a_stage(degrees: ParallelDims) -> None:
    at = {name: torch.tensor(ranks) for name, ranks in meshes_of(16, degrees, 9).items()}
    here = set(at["stage"].tolist())
    assert len(here) == 16 // degrees.pp
    assert set(at["dp"].flatten().tolist()) == here
    for shared, rest, degree in ((at["ep"], at["dp_mod_ep"], degrees.ep), (at["tp"], at["dp_mod_tp"], degrees.tp)):
        assert shared.numel() == degree
        assert shared.numel() * rest.numel() == len(here)
        assert set(shared.tolist()) & set(rest.flatten().tolist()) == {9}
        assert rest.ndim == (2 if degrees.replicate > 1 else 1)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (ParallelDims(ep=3), r"= 8, which is not divisible by the EP degree 3; choose a divisor"),
        (ParallelDims(tp=3), r"8 ranks are not divisible by .* 1 \* 1 \* 3"),
        (ParallelDims(pp=3), r"8 ranks are not divisible by .* choose degrees"),
        (ParallelDims(pp=2, ep=8), r"8 ranks / \(pp 2 \* replicate 1\) = 4, which is not divisible by the EP degree 8"),
        (ParallelDims(cp=2), "no context parallelism"),
        (ParallelDims(tp=0), "tp=0, want 1 or more"),
    ],
)
def test_degrees_that_do_not_fit(degrees: ParallelDims, message: str) -> None:
    with pytest.raises(ValueError, match=f"parallelism: .*{message}"):
        degrees.shards(8)


def test_degrees_that_cross() -> None:
    with pytest.raises(ValueError, match="neither of ep=3 and tp=2 divides the other"):
        ParallelDims(ep=3, tp=2).shards(6)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_microbatches_in_flight_are_those_of_torch(pp: int, microbatches: int) -> None:
    schedule = object.__new__(ScheduleInterleaved1F1B)
    schedule.n_local_stages, schedule.pp_group_size, schedule._n_microbatches = 2, pp, microbatches
    schedule.microbatches_per_round = pp
    for rank in range(pp):
        kept, most = Counter[int](), 0
        for action in filter(None, schedule._calculate_single_rank_operations(rank)):
            kept[action.stage_index] += 1 if action.computation_type.name == "FORWARD" else -1
            most = max(most, kept.total())
        assert not kept.total()
        assert microbatches_in_flight(rank, pp, "Interleaved1F1B") == math.ceil(most / 2)


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="schedule 'GPipe' is unknown, want one of 1F1B, Interleaved1F1B"):
        stages_of(0, 2, "GPipe")  # type: ignore[arg-type]


def test_the_former_name_of_parallel_dims() -> None:
    import mxep.parallel

    with pytest.warns(DeprecationWarning, match="mxep.parallel.ParallelDims"):
        assert mxep.parallel.Degrees is ParallelDims  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_name"):
        mxep.parallel.no_such_name  # noqa: B018

"""Initial weights of sharded models: the values of the whole model, the memory of one shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.models.families import build_model
from mxep.models.presets import MODELS
from mxep.moe.init import local_shard
from mxep.parallel import ParallelDims, build_meshes
from mxep.recipe import resolve_recipe
from mxep.train.build import Build, build_stages


def most_memory(make: Callable[[], object]) -> int:
    """Bytes that were allocated at once while something was made."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = make()
    del kept
    live = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest


@pytest.mark.parametrize(
    "degrees", [ParallelDims(ep=4), ParallelDims(ep=4, tp=2), ParallelDims(ep=2, replicate=2)], ids=["ep4", "ep4_tp2", "ep2_hsdp"]
)
def test_a_rank_draws_its_part_and_holds_no_more(degrees: ParallelDims) -> None:
    """Rank 5 of 8, alone: its parameters are slices of the whole model's, and building it takes their bytes and one whole tensor's."""
    shape, build = MODELS["dsv3_debug"], Build(resolve_recipe("hp"))
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        meshes = build_meshes(8, degrees, "cpu")
        built: list[torch.nn.Module] = []
        highest = most_memory(lambda: built.extend(build_stages(shape, build, meshes, torch.device("cpu"), seed=3).values()))
    finally:
        dist.destroy_process_group()
    (model,) = built
    whole = build_model(shape, resolve_recipe("hp"))
    whole.init_weights(3)
    parts = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        local, region = parts[name]
        assert torch.equal(local, parameter[region]), name
    share = sum(local.nbytes for local, _ in parts.values())
    assert share < 1.1 * 4 * shape.parameters()[0] * degrees.replicate / 8
    largest = max((parameter.shape for parameter in whole.parameters()), key=lambda shape: shape.numel())
    drawing = most_memory(lambda: torch.nn.init.trunc_normal_(torch.empty(largest)))  # in place, or with torch's temporary tensors
    assert highest < share + max(drawing, 2 * 4 * largest.numel()) + 2**20

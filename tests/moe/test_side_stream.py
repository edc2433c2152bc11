"""start_on_side_stream without a second stream: on a CPU the work runs at once, one time, with its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.moe import side_stream
from mxep.moe.experts import SharedExperts
from mxep.moe.side_stream import start_on_side_stream
from mxep.parallel import ColumnShards, GatheredRegion, RowShards


def test_on_a_cpu():
    asked: list[str] = []

    class Work(nn.Module):
        def forward(self, x):
            asked.append("work")
            return x * 2

    x = torch.ones(3, requires_grad=True)
    result = start_on_side_stream(Work(), x)
    asked.append("exchange")
    result().sum().backward()
    assert asked == ["work", "exchange"]
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_weights_that_are_freed_or_summed_inside_stay_on_the_current_stream(monkeypatch: pytest.MonkeyPatch):
    class OnSecondStreamError(Exception):
        pass

    def second_stream(device: torch.device) -> torch.cuda.Stream:
        raise OnSecondStreamError

    def runs_beside(module: nn.Module) -> bool:
        try:
            start_on_side_stream(module, x)
        except OnSecondStreamError:
            return True
        return False

    monkeypatch.setattr(side_stream, "_second_stream", second_stream)
    monkeypatch.setattr(nn.Module, "__call__", lambda module, x: x)
    with FakeTensorMode():
        x = torch.empty(4, 64, device="cuda")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        around, part, whole, tensor = nn.Sequential(SharedExperts(64, 64)), *(SharedExperts(64, 64) for _ in range(3))
        attention = nn.Linear(64, 64)
        fully_shard(around, mesh=mesh)
        fully_shard([attention, part.w1, part.w2, part.w3], mesh=mesh)  # as apply_fsdp groups a block's tensor shards
        fully_shard(whole, mesh=mesh, reshard_after_forward=False)
        parallelize_module(tensor, mesh, {"": GatheredRegion(0), "w1": ColumnShards(), "w3": ColumnShards(), "w2": RowShards()})
        for module in (around, part.w1, whole):
            module.unshard()  # as in the forward of what FSDP wraps: weights are plain tensors
        assert runs_beside(SharedExperts(64, 64))
        assert runs_beside(around[0])
        assert [runs_beside(module) for module in (part, whole, tensor)] == [False] * 3
    finally:
        dist.destroy_process_group()

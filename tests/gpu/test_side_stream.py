"""Shared experts on a side stream: the values and gradients of a single stream, however late the side stream is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from mxep.moe import FusedMoE, MoE, MoEConfig, side_stream
from mxep.moe.side_stream import start_on_side_stream

pytestmark = pytest.mark.gpu

LATE_CYCLES = 50_000_000  # some 25 ms
GPU = torch.device("cuda", 0)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(LATE_CYCLES)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(LATE_CYCLES)
        return grad * 2


class LateLinear(nn.Module):
    """Records the streams that it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, device=GPU)
        self.streams: list[torch.cuda.Stream] = []

    def forward(self, x):
        self.streams.append(torch.cuda.current_stream())
        return Late.apply(self.linear(Late.apply(x)))


def one_pass(start) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    module = LateLinear()
    x = torch.randn(512, 64, device=GPU, requires_grad=True)
    shared = start(module, x)
    main = x * 3
    out = main + shared()
    out.square().sum().backward()
    found = out.detach().clone(), x.grad.clone(), module.linear.weight.grad.clone()
    same = module.streams[0] == torch.cuda.current_stream()
    assert same == (start is not start_on_side_stream)
    return found


def test_late_work_is_waited_for():
    for _ in range(3):  # memory of an earlier pass is used again
        for got, want in zip(one_pass(start_on_side_stream), one_pass(lambda module, x: lambda: module(x)), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("layer_class", [MoE, FusedMoE])
def test_a_layer_with_shared_experts(layer_class: type[MoE], monkeypatch: pytest.MonkeyPatch):
    def one_step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = layer_class(MoEConfig(256, 128, 8, 2, num_shared_experts=2)).to(GPU, torch.bfloat16)
        layer.init_weights(0.02)
        x = torch.randn(2048, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        out = layer(x)
        out.float().square().sum().backward()
        return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]

    got = one_step()
    monkeypatch.setattr(side_stream, "_second_stream", torch.cuda.current_stream)  # the same graph: gradients add up in the same order
    for on_two_streams, on_one in zip(got, one_step(), strict=True):
        assert torch.equal(on_two_streams, on_one)


@pytest.mark.parametrize("layer_class", [MoE, FusedMoE])
def test_a_recomputed_layer_with_shared_experts(layer_class: type[MoE]):
    """Whether or not the recomputation stops before it joins the second stream."""

    def one_step(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = layer_class(MoEConfig(256, 128, 8, 2, num_shared_experts=2)).to(GPU, torch.bfloat16)
        layer.init_weights(0.02)
        x = torch.randn(2048, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        out = x + (checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x))
        out.float().square().sum().backward()
        return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]

    for again, once in zip(one_step(True), one_step(False), strict=True):
        assert torch.equal(again, once)


def test_in_a_cuda_graph():
    module = LateLinear()
    x = torch.randn(64, 64, device=GPU)
    second = side_stream._second_stream(GPU)
    with torch.no_grad():
        want = x + module(x)
        start_on_side_stream(module, x)()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            shared = start_on_side_stream(module, x)
            out = x + shared()
        assert module.streams[-1] == second
        x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.allclose(out, 2 * want)


class LateShared(nn.Module):
    """A layer, then one that runs late, whose weight FSDP gathers and frees with the first one's; other tensors are allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(64, 64, bias=False, device=GPU), LateLinear()

    def forward(self, x):
        shared = start_on_side_stream(self.shared, self.first(x))
        allocated = [torch.full((64, 64), torch.nan, device=GPU) for _ in range(64)]
        return shared() + len(allocated)


def test_weights_that_fsdp_frees_with_others():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        module = LateShared()
        x = torch.randn(512, 64, device=GPU)
        with torch.no_grad():
            want = module(x)
            fully_shard([module.first, module.shared.linear], mesh=mesh)
            fully_shard(module, mesh=mesh)
            got = [module(x) for _ in range(2)]
        assert all(torch.equal(out, want) for out in got)
        assert module.shared.streams[0] == side_stream._second_stream(GPU)
        assert module.shared.streams[1:] == [torch.cuda.current_stream()] * 2
    finally:
        dist.destroy_process_group()

"""Tensor parallelism, with experts and FSDP or HSDP around it, on 4 gloo ranks: gradients equal those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.parallel.test_data_parallel import MXFP8, compare
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.moe import MoE, MoEConfig
from mxep.parallel import (
    ColumnShards,
    GatheredRegion,
    ParallelDims,
    RowShards,
    SlicedSequence,
    apply_ddp,
    apply_fsdp,
    apply_mxfp8_expert_parallel,
    build_meshes,
)
from mxep.recipe import Recipe

B, S, D, E = 2, 12, 64, 8
CONFIG = MoEConfig(D, 96, E, 3, num_shared_experts=1, score_function="sigmoid", renormalize=True)
REGION = {"w1": ColumnShards(), "w3": ColumnShards(), "w2": RowShards()}


class Mixer(nn.Module):
    """Something that needs whole sequences, with a norm inside: its weight is on every rank, its gradient a partial sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.w1, self.w3 = (nn.Linear(D, 80, bias=False) for _ in range(2))
        self.w2 = nn.Linear(80, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(torch.tanh(self.w1(x).cumsum(1)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, recipe: str | Recipe) -> None:
        super().__init__()
        self.norm, self.mixer, self.moe = nn.RMSNorm(D), Mixer(), MoE(CONFIG, recipe)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.moe(x)


class Net(nn.Module):
    def __init__(self, recipe: str | Recipe) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(2))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(net: Net, meshes) -> None:
    for layer in net.layers:
        apply_mxfp8_expert_parallel(layer.moe, meshes.ep)
        parallelize_module(layer.mixer, meshes.tp, {**REGION, "": GatheredRegion(1)})
        parallelize_module(layer.moe.shared_experts, meshes.tp, {**REGION, "": GatheredRegion(0)})
    parallelize_module(net.embed, meshes.tp, SlicedSequence(1))


def on_ranks(rank: int, world: int, cases: list[tuple[ParallelDims, str]]) -> None:
    batch = torch.randn(2, 4 * B, S, D, generator=torch.Generator().manual_seed(1))  # two passes accumulate
    for degrees, recipe in cases:
        meshes = build_meshes(world, degrees, "cpu")
        whole, net = Net(recipe), Net(recipe)
        shard(net, meshes)
        apply_fsdp(net, meshes)
        parts = meshes.data_world
        for index, x in enumerate(batch[:, : parts * B]):
            (whole(x).square().sum() / x.numel()).backward()
            net.set_requires_gradient_sync(index == 1)
            (net(x[meshes.data_rank * B :][:B]).square().sum() / x.numel()).backward()
        compare(net, {name: p.grad for name, p in whole.named_parameters()}, exact=recipe == "hp")


def test_gradients_equal_those_of_one_process() -> None:
    cases = [
        (ParallelDims(ep=4, tp=2), "hp"),
        (ParallelDims(ep=1, tp=2), "hp"),
        (ParallelDims(ep=2, tp=2, replicate=2), "hp"),
        (ParallelDims(ep=2, tp=4), MXFP8),
    ]
    run_ranks(on_ranks, 4, cases)


@pytest.mark.parametrize("dim", [0, 1])
def test_regions_take_and_return_plain_tensors(dim: int) -> None:
    """Not torch's AsyncCollectiveTensor, which is there before its values are: kernels and compiled functions ask for the memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        region = parallelize_module(nn.Identity(), build_meshes(2, ParallelDims(tp=2), "cpu").tp, GatheredRegion(dim))
        seen: list[tuple[type, tuple[int, ...]]] = []
        region.register_forward_pre_hook(lambda _, inputs: seen.append((type(inputs[0]), tuple(inputs[0].shape))))
        x = torch.ones(4, 4, requires_grad=True)
        out = region(x)
        out.square().sum().backward()
        assert seen == [(Tensor, (8, 4) if dim == 0 else (4, 8))]
        assert type(out) is Tensor
        assert x.grad is not None
        assert x.grad.shape == out.shape == x.shape
    finally:
        dist.destroy_process_group()


class _Tripled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def refusals(rank: int, world: int) -> None:
    meshes = build_meshes(world, ParallelDims(tp=2), "cpu")
    with pytest.raises(ValueError, match=r"\(7, 4\) has 7 values to share, not divisible by the TP degree 2"):
        parallelize_module(nn.Linear(4, 7, bias=False), meshes.tp, ColumnShards())
    with pytest.raises(ValueError, match="has 3 heads of 8 to share"):
        parallelize_module(nn.Linear(4, 24, bias=False), meshes.tp, ColumnShards(unit=8))
    with pytest.raises(ValueError, match=r"Bilinear is no torch\.nn\.Linear without bias"):
        parallelize_module(nn.Bilinear(4, 4, 4), meshes.tp, RowShards())
    own, watched = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    own.forward = lambda x: 3 * x  # type: ignore[method-assign, assignment]
    watched.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for linear, problem in ((_Tripled(4, 4, bias=False), "a forward of its own"), (own, "a forward of its own"), (watched, "has hooks")):
        with pytest.raises(ValueError, match=problem):
            parallelize_module(nn.Sequential(linear), meshes.tp, {"0": ColumnShards()})
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match=r"a parametrization makes the weight, .* want a plain parameter"):
        parallelize_module(nn.Sequential(normed), meshes.tp, {"0": ColumnShards()})
    region = parallelize_module(nn.Identity(), meshes.tp, GatheredRegion(dim=1))
    with pytest.raises(ValueError, match="GatheredRegion: Identity was called by keyword alone, want its tokens as first argument"):
        region(input=torch.zeros(1, 4, 8))
    pair = parallelize_module(_Pair(), meshes.tp, GatheredRegion(dim=1))
    with pytest.raises(ValueError, match="GatheredRegion: _Pair returned a tuple, want one tensor"):
        pair(torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match="a sequence of 5 tokens is not divisible by the TP degree 2"):
        parallelize_module(nn.Identity(), meshes.tp, SlicedSequence(1))(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="tp=2, replicate=1, want 1 of both; use apply_fsdp"):
        apply_ddp(nn.Linear(2, 2), meshes)


def test_modules_that_cannot_be_sharded() -> None:
    run_ranks(refusals, 2)

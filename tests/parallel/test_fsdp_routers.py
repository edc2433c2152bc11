"""Routers under FSDP with bf16 parameters: which gate they read, and when."""

from __future__ import annotations

import pytest
import torch
from tests.parallel.test_data_parallel import D, E, batches
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from mxep.fused.layer import FusedMoE
from mxep.moe import MoE, MoEConfig, fuse_layers
from mxep.parallel import apply_fsdp, apply_mxfp8_expert_parallel, build_meshes


class OneLayer(nn.Module):
    """A single MoE layer under a root, as FSDP takes models."""

    def __init__(self, moe: MoE, recompute: bool) -> None:
        super().__init__()
        self.layers, self.recompute = nn.ModuleList([moe]), recompute

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.layers
        return checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)


def layer_with_near_ties(router_dtype: str) -> MoE:
    """A float32 layer whose gate has rows that bf16 rounds to one."""
    torch.manual_seed(0)
    moe = MoE(MoEConfig(D, 96, E, 3, renormalize=True, balance_loss=0.1, router_dtype=router_dtype), "hp")  # type: ignore[arg-type]
    row = torch.randn(D).bfloat16().float()
    moe.router.gate.weight.data.copy_(row * (1 + torch.arange(E).roll(3)[:, None] * 2.0**-14))
    return moe


def routers_in_float32(rank: int, world: int) -> None:
    """Forward chooses by the gate's float32 values; gradients are those of one process with a float32 gate and bf16 experts."""
    steps = [[tokens.bfloat16() for tokens in step] for step in batches(world)]
    total = sum(len(tokens) for step in steps for tokens in step)
    alone = layer_with_near_ties("fp32")
    gate = alone.router.gate.weight
    alone.experts.bfloat16()
    for step in steps:
        for tokens in step:
            (alone(tokens).float().square().sum() / total + alone.router_loss).backward()
    want = {name: p.grad.float() for name, p in alone.named_parameters()}
    chosen = [torch.cat([step[r] for step in steps]).double() @ gate.detach().double().T for r in range(world)]
    load = torch.bincount(chosen[rank].topk(3).indices.flatten(), minlength=E)
    for ep in (1, 2):
        for fused in (False, True):
            for recompute in (False, True):
                moe, meshes = layer_with_near_ties("fp32"), build_meshes(world, ep, "cpu")
                net = OneLayer(moe, recompute)
                if fused:
                    fuse_layers(net)
                (layer,) = net.layers
                apply_mxfp8_expert_parallel(layer, meshes.ep)
                apply_fsdp(net, meshes, param_dtype=torch.bfloat16)
                for index, step in enumerate(steps):
                    net.set_requires_gradient_sync(index == 1)
                    (net(step[rank]).float().square().sum() / total + layer.router_loss).backward()
                assert layer.tokens_per_expert.tolist() == load.tolist(), (ep, fused, recompute)
                for name, p in layer.named_parameters():
                    assert p.dtype == torch.float32
                    error = float((p.grad.full_tensor() - want[name]).norm() / want[name].norm())
                    assert error < 2e-2, (ep, fused, recompute, name, error)


def test_a_router_in_float32_stays_out_of_mixed_precision() -> None:
    run_ranks(routers_in_float32, 2)


@pytest.mark.parametrize("fused", [False, True])
def test_the_gate_is_rounded_where_bf16_was_asked_for(fused: bool, one_rank: None) -> None:
    """All of its rows are one then, and the first experts have every token."""
    for router_dtype, ties in (("bf16", True), ("fp32", False)):
        net, meshes = OneLayer(layer_with_near_ties(router_dtype), False), build_meshes(1, 1, "cpu")
        if fused:
            fuse_layers(net)
        apply_mxfp8_expert_parallel(net.layers[0], meshes.ep)
        apply_fsdp(net, meshes, param_dtype=torch.bfloat16)
        net(torch.randn(50, D)).sum().backward()
        assert ((net.layers[0].tokens_per_expert == 50).sum() == 3) == ties


@pytest.mark.parametrize("fused", [False, True])
def test_an_evaluation_leaves_no_gate_gathered(fused: bool, one_rank: None) -> None:
    """A later forward, without a backward in between, reads the current values of the gate."""
    net, meshes = OneLayer(layer_with_near_ties("fp32"), False), build_meshes(1, 1, "cpu")
    if fused:
        fuse_layers(net)
    (layer,) = net.layers
    apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(net, meshes, param_dtype=torch.bfloat16)
    x, loads = torch.randn(50, D), []
    with torch.no_grad():
        for _ in range(2):
            layer.reset_load()
            net(x)
            loads.append(layer.tokens_per_expert.clone())
            layer.router.gate.weight.to_local().neg_()
    assert not torch.equal(*loads)


@pytest.mark.parametrize("fused", [False, True])
def test_an_evaluation_of_a_part_leaves_no_gate_gathered(fused: bool, one_rank: None) -> None:
    """As where averaged weights are swapped in for features of the inner model, and the run's own back before the next forward."""
    net, meshes = nn.Sequential(OneLayer(layer_with_near_ties("fp32"), False), nn.Linear(D, D)), build_meshes(1, 1, "cpu")
    if fused:
        fuse_layers(net)
    part = net[0]
    (layer,) = part.layers
    apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(net, meshes, blocks=[layer, part], param_dtype=torch.bfloat16)
    x, loads, gate = torch.randn(50, D), [], layer.router.gate.weight
    with torch.no_grad():
        for sign in (-1, 1):
            gate.to_local().mul_(sign)
            part(x)
            layer.reset_load()
            part(x)
            loads.append(layer.tokens_per_expert.clone())
            gate.to_local().neg_()
    assert not torch.equal(*loads)


@pytest.mark.parametrize("order", ["outer first", "twice"])
def test_blocks_in_any_order(order: str, one_rank: None) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    net, x = nn.Sequential(inner, nn.Linear(D, D)), torch.randn(8, D)
    want = net(x).detach()
    apply_fsdp(net, build_meshes(1, 1, "cpu"), blocks=[net, inner, *inner] if order == "outer first" else [*inner, inner, *inner])
    assert torch.equal(net(x).detach(), want)
    assert sum(isinstance(module, FSDPModule) for module in net.modules()) == 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = FusedMoE(MoEConfig(D, 96, E, 3), "hp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)


def steps_after_a_forward_without_a_backward(rank: int, world: int) -> list[bool]:
    """By which forward had no backward: whether the next forward has the new values."""
    meshes, found = build_meshes(world, 1, "cpu"), []
    for gradients in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(_Block(), _Block())
        for block in net:
            apply_mxfp8_expert_parallel(block.moe, meshes.ep)
        torch.optim.SGD(net.parameters(), 0.0).step()  # before the first forward, which sets FSDP up
        apply_fsdp(net, meshes, blocks=list(net), param_dtype=torch.bfloat16)
        x, optimizer = torch.randn(16, D).bfloat16(), torch.optim.AdamW(net.parameters(), 0.1, foreach=False)
        net(x).float().square().mean().backward()
        with torch.set_grad_enabled(gradients):
            (net if gradients else net[0])(x)
        optimizer.step()
        got = net(x).detach()
        for unit in net.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        found.append(torch.equal(got, net(x).detach()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_after_a_forward_without_a_backward(world: int) -> None:
    """A router's gate stays gathered until a backward frees it: the next step chose experts by the old one."""
    assert run_ranks(steps_after_a_forward_without_a_backward, world) == [[True] * 2] * world

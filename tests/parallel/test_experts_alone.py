"""Experts that no other rank shares stay out of FSDP, and have the results of FSDP over a mesh of one rank."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.parallel.test_data_parallel import CONFIG, Net, batches, objective
from tests.ranks import run_ranks
from tests.truth import saved_tensors
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mxep.moe import Experts, FusedMoE, RuntimeEPConfig, fuse_layers
from mxep.parallel import Meshes, apply_fsdp, apply_mxfp8_expert_parallel, build_meshes, cache_quantized_weights, data_parallel
from mxep.train.optimizer import build_optimizer, clip_gradients

BF16, FP32 = torch.bfloat16, torch.float32
FP8_WGRAD = "mxfp8_wgrad_with_mx"
KINDS = ("three GEMMs", "one function", "fused layer")


def build(meshes: Meshes, recipe: str, kind: str, reshard: bool = True, by_fsdp: bool = False) -> Net:
    """A net in bf16 with float32 parameters. Its experts are left out of FSDP, or under it as with shards on several ranks."""
    net = Net(recipe).to(meshes.dp.device_type)
    for layer in net.layers:
        layer.experts.fused = kind == "one function"
    if kind == "fused layer":
        fuse_layers(net)
    for layer in net.layers:
        apply_mxfp8_expert_parallel(layer, meshes.ep)
    with patch.object(data_parallel, "_ROUND_THEIR_PARAMETERS", ()) if by_fsdp else nullcontext():
        apply_fsdp(net, meshes, param_dtype=BF16, reshard_after_forward=reshard)
    assert all(isinstance(layer.experts, FSDPModule) == by_fsdp for layer in net.layers)
    return net


def tokens_of_rank(net: Net, rank: int, world: int) -> list[Tensor]:
    """This rank's tokens of two passes, on the device of the net."""
    return [ranks[rank].to(net.embed.weight.device) for ranks in batches(max(world, 2))]


def backward(net: Net, rank: int, world: int) -> Tensor:
    """Two passes of a step; FSDP reduces the gradients after the last one."""
    passes, losses = tokens_of_rank(net, rank, world), []
    for index, x in enumerate(passes):
        net.set_requires_gradient_sync(index + 1 == len(passes))
        losses.append(objective(net, x, 100))
        losses[-1].backward()
    return torch.stack(losses).detach()


def train(net: Net, rank: int, world: int) -> list[Tensor]:
    """Losses, gradients, their norm, which is clipped, and the weights after a step; this rank's part of them."""
    optimizer = build_optimizer(net, 1e-2, 0.1)
    losses = backward(net, rank, world)
    gradients = [p.grad.to_local().clone() for p in net.parameters()]
    norm = clip_gradients(net.parameters(), 0.1)
    optimizer.step()
    return [losses, *gradients, norm, *(p.detach().to_local() for p in net.parameters())]


def compare_ranks(rank: int, world: int, device: str = "cpu") -> None:
    meshes = build_meshes(world, world, device)
    for recipe, kind in itertools.product(("hp", "mxfp8_wgrad_with_hp", "mxfp8"), KINDS):
        reshard = kind != "one function"
        nets = [build(meshes, recipe, kind, reshard, by_fsdp) for by_fsdp in (False, True)]
        nets[0].recompute = kind == "three GEMMs"
        for got, want in zip(*(train(net, rank, world) for net in nets), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want), (recipe, kind)
    for kind in KINDS:
        check_unrounded(*(build(meshes, FP8_WGRAD, kind, by_fsdp=by_fsdp) for by_fsdp in (False, True)), rank, world)


def check_unrounded(alone: Net, by_fsdp: Net, rank: int, world: int) -> None:
    """dW from MX operands is in float32: that of FSDP before rounding to bf16. All other gradients are those of FSDP."""
    for net in (alone, by_fsdp):
        objective(net, tokens_of_rank(net, rank, world)[0], 100).backward()
    for (name, p), q in zip(alone.named_parameters(), by_fsdp.parameters(), strict=True):
        assert p.grad.dtype == FP32
        got, want = p.grad.to_local(), q.grad.to_local()
        weight = ".experts.w" in name
        assert torch.equal(got.to(BF16).float() if weight else got, want), name
        assert not weight or not want.any() or not torch.equal(got, want), f"{name} was rounded"


def test_experts_alone_equal_experts_under_fsdp() -> None:
    run_ranks(compare_ranks, 2, timeout=240)


@pytest.fixture
def meshes(one_rank: None) -> Meshes:
    return build_meshes(1, 1, "cpu")


def weights_of(net: Net) -> list[Tensor]:
    return [p.to_local().detach() for layer in net.layers for p in layer.experts.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("recipe", "casts"), [(FP8_WGRAD, 2), ("mxfp8_wgrad_with_hp", 3)])
def test_a_step_casts_weights_and_copies_nothing(kind: str, recipe: str, casts: int, meshes: Meshes) -> None:
    """Each weight is cast once in forward and once in backward; its gradient only where torch's GEMM makes it in bf16."""
    net = build(meshes, recipe, kind)
    weights = weights_of(net)
    shapes = {tuple(w.shape) for w in weights}

    def makes_a_tensor_of_a_weights_shape(function: Any, args: Any, made: Any) -> bool:
        return function.namespace == "aten" and not function.is_view and isinstance(made, Tensor) and tuple(made.shape) in shapes

    with OperatorCalls(makes_a_tensor_of_a_weights_shape) as results:
        loss = objective(net, tokens_of_rank(net, 0, 1)[0], 37)
        forward = results.short_names()
        loss.backward()
    made = [name for name in results.short_names() if name not in ("empty", "empty_like", "zeros", "mm", "stack")]
    assert forward.count("_to_copy") == len(weights)
    assert made.count("_to_copy") == casts * len(weights), made
    assert not {"copy_", "clone"} & set(made), made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp", FP8_WGRAD, "mxfp8"])
def test_backward_keeps_the_weights_themselves(kind: str, recipe: str, meshes: Meshes) -> None:
    net = build(meshes, recipe, kind)
    weights = weights_of(net)
    shapes, own = {tuple(sorted(w.shape)) for w in weights}, {w.data_ptr() for w in weights}
    with saved_tensors() as kept:
        objective(net, tokens_of_rank(net, 0, 1)[0], 37)
    found = [t for t in kept if tuple(sorted(t.shape)) in shapes]
    assert {t.data_ptr() for t in found} == own
    assert all(t.dtype == FP32 for t in found)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_quantised_once_a_step(kind: str, meshes: Meshes) -> None:
    results = []
    for cached in (False, True):
        net = build(meshes, "mxfp8_wgrad_with_hp", kind)
        optimizer = build_optimizer(net, 1e-2, 0.1)
        cache = cache_quantized_weights(net, optimizer) if cached else None
        seen = []
        for step in range(1, 3):
            seen.append(backward(net, 0, 1))
            optimizer.step()
            optimizer.zero_grad()
            assert cache is None or cache.fills == len(net.layers) * step * (6 if kind == "three GEMMs" else 4)
        results.append(seen + weights_of(net))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_chunks_change_no_bit(meshes: Meshes) -> None:
    """Later chunks write into the gradients of the first one, which are cast after the last chunk."""
    for recipe in ("hp", "mxfp8_wgrad_with_hp", FP8_WGRAD):
        gradients = []
        for rows in (None, 96):
            net = build(meshes, recipe, "fused layer")
            for layer in net.layers:
                assert isinstance(layer, FusedMoE)
                layer.runtime = RuntimeEPConfig(scratch_rows=rows)
            objective(net, tokens_of_rank(net, 0, 1)[0], 37).backward()
            gradients.append([p.grad.to_local() for p in net.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), recipe


def test_a_layer_fused_after_fsdp(meshes: Meshes) -> None:
    """Experts that FSDP left out may still be fused, where neither their layer nor its router is an FSDP module; they read their weights
    as before."""
    net = build(meshes, "hp", "three GEMMs")
    with pytest.raises(ValueError, match=r"FusedMoE.of: FSDPMoE with FSDPRouter and Experts, want .* fuse before FSDP wraps them"):
        fuse_layers(net)
    for router_dtype in ("fp32", "bf16"):
        config = dataclasses.replace(CONFIG, router_dtype=router_dtype)
        wrapped = torch.nn.Sequential(torch.nn.Sequential(*Net("hp", config).layers))
        for layer in wrapped[0]:
            apply_mxfp8_expert_parallel(layer, meshes.ep)
        apply_fsdp(wrapped, meshes, param_dtype=BF16)
        if router_dtype == "fp32":
            with pytest.raises(ValueError, match=r"FusedMoE.of: MoE with FSDPRouter and Experts, want .* fuse before FSDP wraps them"):
                fuse_layers(wrapped)
    fuse_layers(wrapped)
    assert wrapped(torch.randn(8, CONFIG.dim)).dtype == BF16
    assert all(layer.experts.compute_dtype == BF16 for layer in wrapped[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp", FP8_WGRAD, "mxfp8"])
def test_rounding_equals_rounded_parameters_also_in_one_graph(recipe: str, fused: bool) -> None:
    torch._dynamo.reset()  # graphs of one function are counted, those of other tests too
    torch.manual_seed(0)
    experts = Experts(64, 96, 4, recipe, bias=True)
    experts.fused = fused
    for bias in (experts.b1, experts.b2, experts.b3):
        torch.nn.init.normal_(bias)
    rounded = copy.deepcopy(experts).bfloat16()
    experts.compute_dtype = BF16
    x, counts = torch.randn(128, 64, dtype=BF16), torch.tensor([32, 0, 64, 32])
    results = []
    for f, module in ((experts, experts), (torch.compile(experts, backend="aot_eager", fullgraph=True), experts), (rounded, rounded)):
        module.zero_grad()
        out = f(x, counts)
        out.float().square().sum().backward()
        results.append([out, *(p.grad for p in module.parameters())])
    assert results[0][0].dtype == BF16
    assert all(grad.dtype == FP32 for grad in results[0][1:])
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    assert all(torch.equal(a.to(BF16), b) for a, b in zip(results[0], results[2], strict=True))
    torch._dynamo.reset()

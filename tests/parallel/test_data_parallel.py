"""Gradients under FSDP + EP and under DDP equal those of one process, without a factor of the EP degree."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from tests.truth import sqnr
from tests.user_experts import CallingExperts
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mxep.moe import MoE, MoEConfig, fuse_layers
from mxep.mx import MXTensor
from mxep.parallel import (
    ColumnShards,
    ParallelDims,
    apply_ddp,
    apply_fsdp,
    apply_mxfp8_expert_parallel,
    build_meshes,
    quantize_base,
)
from mxep.parallel.data_parallel import reshard_once
from mxep.train.optimizer import clip_gradients, gradient_norm

D, E = 64, 8
MXFP8 = "mxfp8_wgrad_with_hp"
CONFIG = MoEConfig(
    D, 96, E, 3, num_shared_experts=1, score_function="sigmoid", renormalize=True, route_scale=1.5, num_groups=4, top_groups=2
)


class Net(nn.Module):
    """A little residual model with two MoE layers."""

    def __init__(self, recipe: str, config: MoEConfig = CONFIG) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.layers = nn.ModuleList(MoE(config, recipe) for _ in range(2))
        self.head = nn.Linear(D, D)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(x)


def batches(world: int, steps: int = 2) -> list[list[Tensor]]:
    """Tokens of every rank in every accumulation step; different numbers of them, once none at all."""
    generator = torch.Generator().manual_seed(1)
    sizes = [[37, 0, 8, 50], [12, 33, 64, 5]]
    return [[torch.randn(sizes[step][rank], D, generator=generator) for rank in range(world)] for step in range(steps)]


def objective(net: nn.Module, x: Tensor, total: int) -> Tensor:
    """Summed over this rank's tokens, divided by the number of all ranks' tokens."""
    return net(x).square().sum() / total


def one_process(recipe: str, steps: list[list[Tensor]], config: MoEConfig = CONFIG) -> dict[str, Tensor]:
    net = Net(recipe, config)
    for ranks in steps:
        objective(net, torch.cat(ranks), sum(map(len, ranks))).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def compare(net: nn.Module, want: dict[str, Tensor], exact: bool) -> float:
    """Largest error over all parameters: relative (exact), or in dB SQNR (smallest)."""
    found = {}
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        reference = want[name.removeprefix("module.")]
        found[name] = ((grad - reference).norm() / reference.norm()).item() if exact else sqnr(reference, grad)
        assert (found[name] < 1e-5) if exact else (found[name] > 40), (name, found[name])
    assert len(found) == len(want)
    return max(found.values()) if exact else min(found.values())


def fsdp_ranks(rank: int, world: int) -> None:
    meshes = build_meshes(world, 2, "cpu")
    steps = batches(world)
    for recipe, recompute, reshard in (("hp", False, True), (MXFP8, True, True), (MXFP8, False, False)):
        net = Net(recipe)
        net.recompute = recompute
        for layer in net.layers:
            apply_mxfp8_expert_parallel(layer, meshes.ep)
        apply_fsdp(net, meshes, reshard_after_forward=reshard)
        rows = []
        net.layers[0].experts.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(type(inputs[0])))
        for ranks in steps:  # two steps accumulate
            objective(net, ranks[rank], sum(map(len, ranks))).backward()
        assert set(rows) == {MXTensor if recipe == MXFP8 else Tensor}, "FSDP's own hooks run first and must leave MX rows in MX"
        compare(net, one_process(recipe, steps), exact=recipe == "hp")
        load = sum(len(ranks[rank]) for ranks in steps) * CONFIG.top_k
        assert all(layer.tokens_per_expert.sum() == load for layer in net.layers)
    check_weights_are_drawn_alike(net)
    check_fewer_experts_than_ranks(rank, world)
    check_users_experts(rank, world, meshes)


def check_weights_are_drawn_alike(net: Net) -> None:
    whole = Net("hp").layers[0]
    for moe in (whole, net.layers[0]):
        moe.init_weights(0.02, torch.Generator().manual_seed(4))
    for (name, p), q in zip(net.layers[0].named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name


def check_fewer_experts_than_ranks(rank: int, world: int) -> None:
    """Two experts on EP=2: one per rank and two ranks to shard it over, so it is sharded along its width."""
    config = MoEConfig(D, 96, 2, 1)
    meshes = build_meshes(world, 2, "cpu")
    net, steps = Net("hp", config), batches(world, 1)
    for layer in net.layers:
        apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(net, meshes)
    assert net.layers[0].experts.w1.to_local().shape == (1, 48, D)
    objective(net, steps[0][rank], sum(map(len, steps[0]))).backward()
    compare(net, one_process("hp", steps, config), exact=True)


class UserLayer(nn.Module):
    """A user's layer: fixed routing, experts with our grouped GEMM in the ParallelStyle."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = CallingExperts(D, 96, E)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.full((E,), x.shape[0] // E)
        return self.experts(x, counts)


def check_users_experts(rank: int, world: int, meshes) -> None:
    x = torch.randn(world, 64, D, generator=torch.Generator().manual_seed(2))
    layer, reference = UserLayer(), UserLayer()
    apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(layer, meshes)
    layer(x[rank]).square().sum().backward()
    for part in x:  # the same rows meet the same experts, so the gradient is the sum over ranks
        reference(part).square().sum().backward()
    for p, q in zip(layer.parameters(), reference.parameters(), strict=True):
        assert sqnr(q.grad, p.grad.full_tensor()) > 22  # the reference's wgrad sees the rows before they were quantised


def ddp_ranks(rank: int, world: int) -> None:
    """DDP with accumulation: averaging DDP without EP, and our summing one with EP over all ranks."""
    steps = batches(world)
    want = {recipe: one_process(recipe, steps) for recipe in ("hp", MXFP8)}
    for recipe in ("hp", MXFP8):
        plain = DistributedDataParallel(Net(recipe), broadcast_buffers=False)
        accumulate(plain, steps, rank, world)  # DDP averages: scale by the number of ranks
        compare(plain, want[recipe], exact=recipe == "hp")
        net = Net(recipe)
        meshes = build_meshes(world, world, "cpu")
        for layer in net.layers:
            apply_mxfp8_expert_parallel(layer, meshes.ep)
        ddp = apply_ddp(net, meshes)
        accumulate(ddp, steps, rank, 1)
        compare(ddp, want[recipe], exact=recipe == "hp")
    for reduces in ((True, True, True), (True, False, True), (False, True, True)):
        check_backwards_that_reduce(net, ddp, rank, world, reduces)


def check_backwards_that_reduce(net: Net, ddp: DistributedDataParallel, rank: int, world: int, reduces: tuple[bool, ...]) -> None:
    """Some or all of a step's backwards reduce: what has been summed over the ranks must not be summed over them again."""
    parameters = list(net.parameters())
    made = []
    for step in batches(world) + batches(world, 1):
        ddp.zero_grad()
        objective(ddp, step[rank], sum(map(len, step))).backward()
        made.append([p.grad.clone() for p in parameters])
    for set_to_none in (True, False):
        ddp.zero_grad(set_to_none)
        for step, reduce in zip(batches(world) + batches(world, 1), reduces, strict=True):
            ddp.require_backward_grad_sync = reduce  # what `no_sync` sets
            objective(ddp, step[rank], sum(map(len, step))).backward()
        for p, parts in zip(parameters, zip(*made, strict=True), strict=True):
            torch.testing.assert_close(p.grad, sum(parts), rtol=1e-4, atol=1e-6)


def accumulate(ddp: DistributedDataParallel, steps: list[list[Tensor]], rank: int, factor: int) -> None:
    *first, last = steps
    for ranks in first:
        with ddp.no_sync():
            (factor * objective(ddp, ranks[rank], sum(map(len, ranks)))).backward()
    (factor * objective(ddp, last[rank], sum(map(len, last)))).backward()


def shards_of_other_ranks(rank: int, world: int) -> None:
    """Experts and a linear layer that this rank has alone, and meshes by which it shares them with the other rank."""
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "own"))["own"]
    for degrees, kind in ((ParallelDims(ep=world), "ep"), (ParallelDims(tp=world), "tp")):
        meshes, net = build_meshes(world, degrees, "cpu"), Net("hp")
        if kind == "ep":
            apply_mxfp8_expert_parallel(net.layers[1], alone)
        else:
            net.head = parallelize_module(nn.Linear(D, D, bias=False), alone, ColumnShards())
        for apply in (apply_fsdp, apply_ddp) if kind == "ep" else (apply_fsdp,):
            with pytest.raises(ValueError, match=rf"is sharded over the ranks \[{rank}\], want those of meshes.{kind}, \[0, 1\]"):
                apply(net, meshes)


def test_shards_of_other_ranks_than_those_of_the_meshes_are_refused() -> None:
    """No rank would sum their gradients with those of the ranks that hold the same shard."""
    run_ranks(shards_of_other_ranks, 2)


def ddp_refuses(rank: int, world: int) -> None:
    net, meshes = Net("hp"), build_meshes(world, 1, "cpu")
    apply_mxfp8_expert_parallel(net.layers[0], meshes.ep)
    with pytest.raises(ValueError, match="use apply_fsdp"):
        apply_ddp(net, meshes)


@pytest.mark.parametrize("fused", [False, True])
def test_the_experts_bias_stays_out_of_mixed_precision(fused: bool, one_rank: None) -> None:
    """Rounded to bf16, experts 4 and 5 would tie; a forward that is run again must choose like the first."""
    gradients = []
    for recompute in (False, True):
        net = Net("hp")
        net.recompute = recompute
        if fused:
            fuse_layers(net)
        meshes = build_meshes(1, 1, "cpu")
        for layer in net.layers:
            apply_mxfp8_expert_parallel(layer, meshes.ep)
            layer.expert_bias.copy_(1000 + 2 * torch.arange(E))
        apply_fsdp(net, meshes, param_dtype=torch.bfloat16)
        objective(net, batches(1, 1)[0][0], 37).backward()
        for layer in net.layers:
            assert layer.tokens_per_expert.tolist() == [0.0] * 5 + [37.0] * 3
        gradients.append([p.grad.full_tensor() for p in net.parameters() if p.grad is not None])
    assert len(gradients[0]) > 8
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_one_rank_divides_no_gradient(one_rank: None) -> None:
    """Experts have a mesh of one rank wherever EP spans all of them; a division by 1.0 would copy all of their gradients."""
    net, meshes = Net("hp"), build_meshes(1, 1, "cpu")
    for layer in net.layers:
        apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(net, meshes, param_dtype=torch.bfloat16)
    loss, least = objective(net, batches(1, 1)[0][0], 37), 3 * E * D * 96
    with OperatorCalls(lambda function, args, _: function.overloadpacket is torch.ops.aten.div and args[0].numel() >= least) as divisions:
        loss.backward()
    assert divisions.names == []
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.layers[0].experts.parameters() if p is not None)


def test_ep2_fsdp2_equals_one_process() -> None:
    run_ranks(fsdp_ranks, 4)


def counts_gathers(rank: int, world: int) -> None:
    """Every layer is gathered for forward and for backward, the model's own parameters once for both, and an evaluation keeps none."""
    net, plain = Net(MXFP8), Net(MXFP8)
    apply_fsdp(net, build_meshes(world, 1, "cpu"))
    x, shards = torch.randn(8, D), list(net.parameters())
    for _ in range(2):
        with CommDebugMode() as gathers:
            net(x).sum().backward()
        assert gathers.get_comm_counts()[torch.ops.c10d._allgather_base_] == 2 * len(net.layers) + 1
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))
        for parameter in (*shards, *plain.parameters()):
            parameter.mul_(0.5)
        assert torch.equal(net(x), plain(x)), "weights that changed between two evaluations are gathered again"


def test_the_models_own_parameters_are_gathered_once_a_step() -> None:
    run_ranks(counts_gathers, 2)


def test_ddp_with_no_sync_equals_one_process() -> None:
    run_ranks(ddp_ranks, 2)


@pytest.mark.usefixtures("one_rank")
def test_blocks_outside_of_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="apply_fsdp: blocks of Linear are no modules of the model"):
        apply_fsdp(nn.Sequential(nn.Linear(4, 4)), build_meshes(1, 1, "cpu"), blocks=[nn.Linear(4, 4)])


class Tail(nn.Module):
    """A layer of its own, then one that others have as well."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.own(x).relu())


def shares_a_layer(rank: int, world: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Tail(shared := nn.Linear(8, 8)), Tail(shared))
    meshes, x = build_meshes(world, 1, "cpu"), torch.randn(world, 4, 8)
    net = copy.deepcopy(plain)
    with pytest.raises(ValueError, match=r"shared\.weight is in two blocks, Tail and Tail, want it in one.*as a block as well"):
        apply_fsdp(net, meshes, blocks=list(net))
    apply_fsdp(net, meshes, blocks=[*net, net[0].shared])
    net(x[rank]).square().sum().backward()
    plain(x.flatten(0, 1)).square().sum().backward()
    want = whole_gradients(dict(plain.named_parameters()))
    for name, gradient in whole_gradients(dict(net.named_parameters())).items():
        torch.testing.assert_close(gradient, want[name], msg=name)


def test_a_layer_that_two_blocks_share_is_a_block_itself() -> None:
    run_ranks(shares_a_layer, 2)


def test_ddp_refuses_several_ep_groups() -> None:
    run_ranks(ddp_refuses, 2)


def whole_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in parameters.items()}
    assert all(grad is not None for grad in found.values()), [name for name, grad in found.items() if grad is None]
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def other_calls_of_fsdp(rank: int, world: int) -> None:
    """Forwards and backwards in addition to a plain step: a second forward before backward, one without gradients, a second backward."""
    for fused in (False, True):
        for reshard in (True, False):
            meshes = build_meshes(world, 2, "cpu")
            net = Net("hp", MoEConfig(D, 96, E, 3))
            for layer in net.layers:
                apply_mxfp8_expert_parallel(layer, meshes.ep)
            if fused:
                fuse_layers(net)
            apply_fsdp(net, meshes, param_dtype=torch.bfloat16, reshard_after_forward=reshard)
            held = dict(net.named_parameters())
            x = torch.randn(24, D, generator=torch.Generator().manual_seed(rank)).bfloat16()

            def gradients(step: Any, net: nn.Module = net, held: dict[str, nn.Parameter] = held) -> dict[str, Tensor]:
                net.zero_grad()
                step()
                return whole_gradients(held)

            def twice(net: nn.Module = net, x: Tensor = x) -> None:
                for factor in (1.0, 0.5):
                    net(factor * x).float().square().sum().backward()

            def both(net: nn.Module = net, x: Tensor = x) -> None:
                sum(net(factor * x).float().square().sum() for factor in (1.0, 0.5)).backward()

            def with_evaluation(net: nn.Module = net, x: Tensor = x) -> None:
                loss = net(x).float().square().sum()
                with torch.no_grad():
                    net(2 * x)
                loss.backward()

            def again(net: nn.Module = net, x: Tensor = x) -> None:
                loss = net(x).float().square().sum()
                loss.backward(retain_graph=True)
                loss.backward()

            def once(net: nn.Module = net, x: Tensor = x) -> None:
                net(x).float().square().sum().backward()

            plain, summed = gradients(once), gradients(twice)
            for name, grad in gradients(with_evaluation).items():
                assert torch.equal(grad, plain[name]), name
            for name, grad in gradients(both).items():
                torch.testing.assert_close(grad, summed[name], rtol=0.05, atol=float(0.02 * summed[name].abs().max()), msg=name)
            for name, grad in gradients(again).items():
                torch.testing.assert_close(grad, 2 * plain[name], rtol=0.02, atol=float(0.01 * plain[name].abs().max()), msg=name)

            # Weights that change between two evaluations, or after one, are read.
            with torch.no_grad():
                before = net(x)
                assert [*map(id, net.parameters())] == [*map(id, held.values())], "no parameter stays gathered"
                for parameter in net.parameters():
                    parameter.mul_(1.5)
                assert not torch.allclose(net(x), before)


def test_additional_forwards_and_backwards_of_a_step() -> None:
    run_ranks(other_calls_of_fsdp, 2)


def experts_add_up(rank: int, world: int) -> None:
    """bf16 gradients of 64 backward passes, against float64."""
    meshes = build_meshes(world, world, "cpu")
    for accumulates, least, most in ((True, 0.0, 0.004), (False, 0.005, 1.0)):
        moe = MoE(MoEConfig(D, 96, E, 3), "hp").bfloat16()
        net = nn.Sequential(moe)
        apply_mxfp8_expert_parallel(moe, meshes.ep)
        apply_fsdp(net, meshes, blocks=[moe], param_dtype=torch.bfloat16, accumulates=accumulates)
        moe.init_weights(0.1, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(rank)
        inputs = [1 + torch.randn(64, D, generator=generator).bfloat16() for _ in range(64)]
        exact: dict[str, Tensor] = {}
        for x in inputs:
            net.set_requires_gradient_sync(True)
            net.zero_grad()
            net(x).float().sum().backward()
            for name, grad in whole_gradients(dict(net.named_parameters())).items():
                exact[name] = exact.get(name, 0) + grad.double()
        net.zero_grad()
        for number, x in enumerate(inputs, 1):
            net.set_requires_gradient_sync(number == len(inputs))
            net(x).float().sum().backward()
        for name, grad in whole_gradients(dict(net.named_parameters())).items():
            if ".experts." in name:
                assert least <= (grad.double() - exact[name]).norm() / exact[name].norm() <= most, (name, accumulates)


@pytest.mark.parametrize("world", [1, 2])
def test_experts_of_bf16_add_up_in_float32(world: int) -> None:
    run_ranks(experts_add_up, world)


def gradients_that_are_asked_for(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 8))
    with torch.no_grad():  # where the program calls it does not matter
        ddp = apply_ddp(net, build_meshes(world, world, "cpu"))
    x = torch.randn(16, D)
    ddp(x).square().sum().backward()
    before = [parameter.grad.clone() for parameter in net.parameters()]
    torch.autograd.grad(net(x).mean(), list(net.parameters()))
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(net.parameters(), before, strict=True))
    ddp(x).square().sum().backward()  # what is added still is: reduced again, and the first sum once
    for parameter, grad in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)


def test_ddp_does_not_change_gradients_of_autograd_grad() -> None:
    run_ranks(gradients_that_are_asked_for, 2)


def frozen_experts_stay_out(rank: int, world: int) -> None:
    moe = MoE(MoEConfig(D, 96, E, 3), "hp").bfloat16()
    quantize_base(moe.experts)
    net, meshes = nn.Sequential(moe), build_meshes(world, 1, "cpu")
    apply_mxfp8_expert_parallel(moe, meshes.ep)
    apply_fsdp(net, meshes, blocks=[moe], param_dtype=torch.bfloat16, accumulates=True)
    net(torch.randn(8, D).bfloat16().requires_grad_()).float().sum().backward()
    assert moe.router.gate.weight.grad is not None
    assert not isinstance(moe.experts, FSDPModule), "no gradient of theirs adds up"


def test_frozen_experts_stay_out_of_fsdp() -> None:
    run_ranks(frozen_experts_stay_out, 1)


def test_forwards_of_one_evaluation_gather_once() -> None:
    """As with a pipeline's microbatches; afterwards no parameter stays gathered."""
    run_ranks(gathers_of_evaluations, 2)


def gathers_of_evaluations(rank: int, world: int) -> None:
    net = Net("hp", MoEConfig(D, 96, E, 3))
    meshes = build_meshes(world, 1, "cpu")
    for layer in net.layers:
        apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(net, meshes, reshard_after_forward=False)
    held, x = [*map(id, net.parameters())], torch.randn(4, D)
    with torch.no_grad():
        net(x)  # sets up

    def gathers(together: bool) -> int:
        with OperatorCalls() as calls, torch.no_grad(), reshard_once([net]) if together else contextlib.nullcontext():
            for _ in range(3):
                net(x)
        assert [*map(id, net.parameters())] == held
        return calls.names.count("c10d._allgather_base_.default")

    apart, once = gathers(False), gathers(True)
    assert apart == 3 * once > 0


def fewer_experts_than_ranks(rank: int, world: int) -> tuple[dict[str, Tensor], float]:
    """Gradients of the whole parameters and their norm; each rank has a part of the same 12 tokens."""
    moe, meshes = MoE(MoEConfig(D, 32, 2, 1, expert_biases=True), "hp"), build_meshes(world, 1, "cpu")
    moe.init_weights(0.2, torch.Generator().manual_seed(1))
    net = apply_fsdp(nn.Sequential(apply_mxfp8_expert_parallel(moe, meshes.ep)), meshes, blocks=[moe])
    x = torch.randn(12, D, generator=torch.Generator().manual_seed(2))
    net(x.chunk(world)[rank]).square().sum().backward()
    return whole_gradients(dict(net.named_parameters())), float(gradient_norm(net.parameters()))


def test_fewer_experts_than_ranks_whose_number_does_not_divide_the_width() -> None:
    """Two experts of width 32 on three ranks: torch cuts widths into equal parts alone, so one rank has no expert."""
    ((want, want_norm),) = run_ranks(fewer_experts_than_ranks, 1)
    for gradients, norm in run_ranks(fewer_experts_than_ranks, 3):
        assert norm == pytest.approx(want_norm, rel=1e-5)
        for name, gradient in want.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def accumulates_under_hsdp(rank: int, world: int) -> None:
    """Two replicas; the first backward sums nothing over the ranks.  Clipping sees each gradient once, on whatever mesh it is."""
    meshes, steps = build_meshes(world, ParallelDims(ep=2, replicate=2), "cpu"), batches(world)
    want = one_process("hp", steps)
    for fused in (False, True):
        net = Net("hp")
        for layer in net.layers:
            apply_mxfp8_expert_parallel(layer, meshes.ep)
        if fused:
            fuse_layers(net)
        apply_fsdp(net, meshes, reshard_after_forward=not fused)
        for number, ranks in enumerate(steps, 1):
            net.set_requires_gradient_sync(number == len(steps))
            objective(net, ranks[rank], sum(map(len, ranks))).backward()
        compare(net, want, exact=True)
        norm = clip_gradients(net.parameters(), 0.5)
        assert norm.item() == pytest.approx(torch.stack([grad.norm() for grad in want.values()]).norm().item(), rel=1e-5)
        assert gradient_norm(net.parameters()).item() == pytest.approx(0.5, rel=1e-5)


def test_ep2_hsdp_accumulates_and_clips_as_one_process() -> None:
    run_ranks(accumulates_under_hsdp, 4)


def steps_around_a_checkpoint(rank: int, world: int, degrees: ParallelDims, folder: Path, loads: bool) -> list[float]:
    """Losses of two steps after a checkpoint, which another step comes before unless it is loaded."""
    meshes, net = build_meshes(world, degrees, "cpu"), Net("hp", dataclasses.replace(CONFIG, bias_update_rate=0.1))
    for layer in net.layers:
        apply_mxfp8_expert_parallel(layer, meshes.ep)
    apply_fsdp(net, meshes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    if loads:
        for layer in net.layers:
            layer.init_weights(0.5)  # what is not read stays wrong

    def step(number: int) -> float:
        optimizer.zero_grad()
        x = torch.randn(16, D, generator=torch.Generator().manual_seed(number))
        loss = objective(net, x.chunk(world)[rank], len(x))
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        for layer in net.layers:
            dist.all_reduce(layer.tokens_per_expert)
            layer.update_expert_bias(layer.tokens_per_expert)
            layer.reset_load()
        return total.item()

    if not loads:
        step(0)
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    if loads:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        dcp.save(state, checkpoint_id=folder)
    return [step(1), step(2)]


def test_a_checkpoint_is_read_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Weights, and the experts' bias, which the choices of the next step depend on; AdamW's moments, which the second step depends on."""
    for source, world in ((ParallelDims(ep=2), 4), (ParallelDims(), 1)):
        folder = tmp_path / str(world)
        want = run_ranks(steps_around_a_checkpoint, world, source, folder, False)[0]
        for degrees, ranks in ((ParallelDims(), 1), (ParallelDims(ep=2), 2), (ParallelDims(ep=2, replicate=2), 4)):
            assert run_ranks(steps_around_a_checkpoint, ranks, degrees, folder, True)[0] == pytest.approx(want, rel=1e-5)

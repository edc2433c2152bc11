"""Schedule, decay groups, the gradient norm over two meshes, the experts' bias."""

from __future__ import annotations

import gc
import math
import tracemalloc

import torch
import torch.distributed as dist
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mxep.models.deepseek_v3 import DeepSeekV3
from mxep.models.presets import MODELS
from mxep.moe import MoE, MoEConfig
from mxep.parallel import apply_fsdp, apply_mxfp8_expert_parallel, build_meshes
from mxep.recipe import resolve_recipe
from mxep.train.optimizer import (
    ExpertBiasHook,
    Schedule,
    build_optimizer,
    clip_gradients,
    clipping_divisor,
    gradient_norm,
    optimizer_tensors,
)

NAMES = ("w1", "w2", "w3", "b1", "b2", "b3")
HOST_READ = "aten._local_scalar_dense.default"  # the host asks for a value, or on a GPU would copy it to its memory


def test_schedule() -> None:
    schedule = Schedule(peak=2.0, warmup=4, steps=104, floor=0.1)
    assert [schedule.at(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert math.isclose(schedule.at(54), 2.0 * 0.55)
    assert math.isclose(schedule.at(104), 0.2)
    assert schedule.at(10_000) == schedule.at(104)
    assert all(schedule.at(step) >= schedule.at(step + 1) for step in range(4, 104))
    assert Schedule(peak=1.0, warmup=0, steps=1).at(0) == 1.0


def test_decay_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    optimizer = build_optimizer(model, lr=1e-3, weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {"0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0}


def test_no_decay_on_stacked_biases() -> None:
    experts = MoE(MoEConfig(64, 96, 4, 2, expert_biases=True)).experts
    optimizer = build_optimizer(experts, lr=1e-3, weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in experts.named_parameters()} == {name: 0.1 * (name[0] == "w") for name in NAMES}
    weight = nn.Linear(4, 4, bias=False)
    plain = nn.ModuleList([MoE(MoEConfig(64, 96, 4, 2)).experts, weight])
    assert [group["weight_decay"] for group in build_optimizer(plain, 1e-3, 0.1).param_groups] == [0.1]


def sharded_linears(mesh_names: tuple[str, ...]) -> nn.ModuleList:
    """Linear layers without biases, each sharded over a mesh of its own, with gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList()
    for name in mesh_names:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))
        layer = nn.Linear(6, 6, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        layer.weight.grad = distribute_tensor(torch.randn(6, 6), mesh, [Shard(0)])
        layers.append(layer)
    return layers


def steps_over_shards(rank: int, world: int, steps: int) -> None:
    layers = sharded_linears(("a", "b"))
    plain = nn.ParameterList([nn.Parameter(layer.weight.detach().full_tensor().clone()) for layer in layers])
    for parameter, layer in zip(plain, layers, strict=True):
        parameter.grad = layer.weight.grad.full_tensor().clone()
    optimizer, whole = build_optimizer(layers, 1e-2, 0.1), build_optimizer(plain, 1e-2, 0.1)

    def live() -> int:
        gc.collect()
        return sum(type(thing).__name__ == "DTensorSpec" for thing in gc.get_objects())

    for _ in range(10):
        optimizer.step()
        whole.step()
    specs = live()
    tracemalloc.start()
    begun = tracemalloc.get_traced_memory()[0]
    for _ in range(steps):
        optimizer.step()
    assert live() == specs, "no step leaks a DTensorSpec"
    assert tracemalloc.get_traced_memory()[0] - begun < 64 * 1024, "the host's memory grows with the steps"
    for _ in range(steps):
        whole.step()
    for parameter, layer in zip(plain, layers, strict=True):
        assert torch.equal(layer.weight.full_tensor(), parameter)
        assert isinstance(optimizer.state[layer.weight]["exp_avg"], DTensor), "checkpoints want to know the whole"


def test_steps_over_shards_are_those_of_whole_tensors_and_leak_no_memory() -> None:
    run_ranks(steps_over_shards, 2, 2000)


def test_clipping_matches_torch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in model.parameters()]
    norm = clip_gradients(model.parameters(), 0.0)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.isclose(clip_gradients(model.parameters(), 0.5), norm)
    assert torch.isclose(norm, torch.cat([grad.flatten() for grad in grads]).norm())
    assert torch.isclose(torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), torch.tensor(0.5))


def test_the_step_clips() -> None:
    """As after `clip_gradients`, but without a pass of its own; gradients below the largest norm are used as they are."""
    torch.manual_seed(0)
    grads = [torch.randn(7, 5), torch.randn(7)]
    for max_norm in (0.0, 0.5, 100.0):
        ours, theirs = (nn.Linear(5, 7), nn.Linear(5, 7))
        theirs.load_state_dict(ours.state_dict())
        for model in (ours, theirs):
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad.clone()
        optimizer, other = (build_optimizer(model, 1e-2, 0.1) for model in (ours, theirs))
        with OperatorCalls() as calls:
            optimizer.grad_scale = clipping_divisor(gradient_norm(ours.parameters()), max_norm)
        assert HOST_READ not in calls.names
        assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(ours.parameters(), grads, strict=True))
        clip_gradients(theirs.parameters(), max_norm)
        optimizer.step()
        other.step()
        for ours_, theirs_ in zip(optimizer.state.values(), other.state.values(), strict=True):
            torch.testing.assert_close(ours_["exp_avg"], theirs_["exp_avg"], rtol=2e-7, atol=0.0)
            assert max_norm == 0.5 or torch.equal(ours_["exp_avg_sq"], theirs_["exp_avg_sq"])


def small_model() -> DeepSeekV3:
    model = DeepSeekV3(MODELS["dsv3_debug_cpu"], resolve_recipe("hp"))
    model.init_weights(0)
    return model


def norm_on_ranks(rank: int, world: int, ep: int) -> tuple[float, float, dict]:
    model = small_model()
    meshes = build_meshes(world, ep, "cpu")
    for moe in model.moe_layers():
        apply_mxfp8_expert_parallel(moe, meshes.ep)
    apply_fsdp(model, meshes)
    tokens = torch.arange(64).view(2, 32)[rank : rank + 1] if world == 2 else torch.arange(64).view(2, 32)
    hook = ExpertBiasHook(model.moe_layers())
    optimizer = build_optimizer(model, 1e-3, 0.1)
    optimizer.register_step_pre_hook(hook)
    torch.logsumexp(model(tokens), dim=-1).sum().backward()
    before = float(clip_gradients(model.parameters(), 0.25))
    after = float(clip_gradients(model.parameters(), 0.0))
    optimizer.step()
    biases = {str(i): moe.expert_bias.tolist() for i, moe in enumerate(model.moe_layers())}
    assert all(float(moe.tokens_per_expert.sum()) == 0 for moe in model.moe_layers())
    counts = [float(count.sum()) for count in hook.counts]
    return before, after, {"biases": biases, "counts": counts, "load": load_of(hook), "tensors": len(optimizer_tensors(model, optimizer))}


def test_norm_and_bias_over_ep_and_fsdp_equal_one_process() -> None:
    single = run_ranks(norm_on_ranks, 1, 1)[0]
    both = run_ranks(norm_on_ranks, 2, 2)
    replicated = run_ranks(norm_on_ranks, 2, 1)
    for before, after, facts in (*both, *replicated):
        assert math.isclose(before, single[0], rel_tol=1e-5)
        assert math.isclose(after, 0.25, rel_tol=1e-4)
        assert facts["counts"] == single[2]["counts"] == [64.0 * 2] * 3
        assert facts["biases"] == single[2]["biases"]
        assert facts["load"] == single[2]["load"]
    assert any(any(bias) for bias in single[2]["biases"].values())


def test_bias_moves_towards_balance() -> None:
    moe = small_model().moe_layers()[0]
    hook = ExpertBiasHook([moe])
    moe.tokens_per_expert.copy_(torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]))
    hook(None, None, None)  # type: ignore[arg-type]
    assert moe.expert_bias[0] < 0 < moe.expert_bias[1]
    assert abs(float(moe.expert_bias.sum())) < 1e-6
    assert load_of(hook) == [8.0, 7.0]
    assert not dist.is_initialized()
    assert load_of(ExpertBiasHook([])) == [0.0, 0.0]


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    """As AdamW does not change the weights if a gradient is not finite."""
    moe = small_model().moe_layers()[0]
    optimizer = torch.optim.AdamW([torch.ones(2)], fused=True)
    for nonfinite, moves in ((1.0, False), (0.0, True)):
        moe.tokens_per_expert.copy_(torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]))
        optimizer.found_inf = torch.tensor(nonfinite)  # type: ignore[attr-defined]
        ExpertBiasHook([moe])(optimizer, None, None)
        assert bool(moe.expert_bias.any()) == moves


def load_of(hook: ExpertBiasHook) -> list[float]:
    return torch.stack(hook.load(torch.device("cpu"))).tolist()


def test_the_host_does_not_wait_for_the_load_and_the_norm() -> None:
    """The GPU is idle while the host reads a value."""
    hook = ExpertBiasHook([])
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    for layers in (1, 26):
        hook.counts = [torch.tensor([2.0, 0.0, 6.0, 0.0])] * (layers - 1) + [torch.tensor([0.0, 0.0, 0.0, 5.0])]
        with OperatorCalls() as calls:
            load, norm = hook.load(torch.device("cpu")), clip_gradients(model.parameters(), 1.0)
        assert HOST_READ not in calls.names
        assert [float(value) for value in load] == [4.0, 2 * layers + 1]
        assert float(norm) > 0

"""The balance loss of a run: transformers' number, the presets' weights, and that of the global batch over ranks and stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.models.families import build_model
from mxep.models.presets import MODELS, Qwen3MoEConfig, resolve_model
from mxep.moe import MoE, fuse_layers, global_router_loss
from mxep.parallel import ParallelDims, build_meshes
from mxep.recipe import resolve_recipe
from mxep.train.build import Build, build_stages
from mxep.train.data.loader import Batch
from mxep.train.step import MicrobatchRunner

V, S, PASSES = 48, 16, 4
HP = resolve_recipe("hp")
SHAPE = Qwen3MoEConfig(
    vocab_size=V, dim=32, num_layers=4, expert_hidden=32, num_experts=8, top_k=2, max_seq_len=S, num_heads=4, num_kv_heads=2, head_dim=8,
    balance_loss=3.0, balance_loss_type="global_aux_loss", z_loss=1e-2, init_std=0.2,
)  # fmt: skip


def logits_of(layers: list[MoE]) -> list[Tensor]:
    """Router logits (T, E) of each layer's next forward, filled by it."""
    found: list[Tensor] = []
    for layer in layers:
        layer.router.gate.register_forward_hook(lambda _, __, out: found.append(out))
    return found


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_loss_is_that_of_transformers_at_the_same_coefficient(num_layers: int) -> None:
    """Of a single layer its number and gradient; of several the mean of what it says of each."""
    oracle = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe").load_balancing_loss_func
    model = build_model(dataclasses.replace(SHAPE, num_layers=num_layers, balance_loss_type="aux_loss", z_loss=0.0), HP)
    model.init_weights(0)
    found, gates = logits_of(model.moe_layers()), [layer.router.gate.weight for layer in model.moe_layers()]
    model(torch.arange(4 * S).view(4, S) * 37 % V)
    ours = model.router_loss()
    theirs = SHAPE.balance_loss * sum(oracle((logits,), SHAPE.num_experts, SHAPE.top_k) for logits in found) / num_layers
    torch.testing.assert_close(ours, theirs)
    for got, want in zip(*(torch.autograd.grad(loss, gates, retain_graph=True) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want)
    if num_layers == 1:
        torch.testing.assert_close(ours, SHAPE.balance_loss * oracle(tuple(found), SHAPE.num_experts, SHAPE.top_k))


def test_layers_of_the_presets_keep_the_weight_that_they_had() -> None:
    """Of E sum f_e P_e with f that sum to 1, once the coefficient itself; also where a preset has lost its last layers."""
    weights = {name: shape.layer_balance_loss for name, shape in MODELS.items() if shape.balance_loss}
    weights["qwen3_30b_a3b_of_24_layers"] = resolve_model("qwen3_30b_a3b_of_24_layers").layer_balance_loss
    assert weights.pop("dsv3_16b") == pytest.approx(1e-3, rel=1e-12)  # which once had none: aux_loss_alpha
    want = {"qwen3_debug_cpu": 0.05} | dict.fromkeys(("qwen3_debug", "qwen3_small", "qwen3_30b_a3b", "qwen3_30b_a3b_of_24_layers"), 1e-3)
    assert weights == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_expert_frequencies_of_the_passes_so_far(fused: bool) -> None:
    """Alone, the second pass is weighed by the loads of both; evaluation takes its own; the optimizer step begins anew."""
    model = build_model(SHAPE, HP)
    model.init_weights(0)
    if fused:
        fuse_layers(model)
    layers, tokens = model.moe_layers(), torch.arange(2 * S).view(2, S) * 37 % V
    counts, total = torch.zeros(4, 8), 0.0
    for row in tokens:
        model(row[None])
        counts = counts + torch.stack([layer._routed[0] for layer in layers])
        shares, z = (torch.stack([layer._routed[part] for layer in layers]) for part in (1, 2))
        total = 3.0 * 2 / 4 * 8 * (counts / counts.sum(1, keepdim=True) * shares).sum() + 1e-2 * z.sum()
        torch.testing.assert_close(model.router_loss(), total)
        torch.testing.assert_close(global_router_loss(layers), total)
    assert float(counts.sum()) == 4 * 2 * S * 2
    model.eval()
    torch.testing.assert_close(model.router_loss(), sum(layer.router_loss for layer in layers))
    model.train()
    for layer in layers:
        layer.reset_load()
    model(tokens[:1])
    torch.testing.assert_close(model.router_loss(), sum(layer.router_loss for layer in layers))


def batches(data_world: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels (data_world, S) of each pass."""
    tokens = torch.randint(V, (PASSES, data_world, S + 1), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def one_process(passes: list[tuple[Tensor, Tensor]], alone: Any) -> dict[str, Tensor]:
    model = build_model(SHAPE, HP)
    model.init_weights(0)
    valid = sum(labels.numel() for _, labels in passes)
    for inputs, labels in passes:
        (model(inputs, labels) / valid + model.router_loss(alone) / PASSES).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def on_ranks(rank: int, world: int, cases: list[tuple[Build, ParallelDims]]) -> None:
    alone, _ = dist.new_subgroups(1)
    for build, degrees in cases:
        meshes = build_meshes(world, degrees, "cpu")
        passes = batches(meshes.data_world)
        want = one_process(passes, alone)
        mine = slice(meshes.data_rank, meshes.data_rank + 1)
        own = [Batch(inputs[mine], labels[mine], None) for inputs, labels in passes]
        stages = build_stages(SHAPE, build, meshes, torch.device("cpu"), seed=0)
        runner = MicrobatchRunner(stages, meshes, (1, S), PASSES, torch.device("cpu"), 1, build.schedule)
        runner.backward(own, float(PASSES * meshes.data_world * S))
        for stage in stages.values():
            for name, p in stage.named_parameters():
                assert isinstance(p.grad, DTensor), name
                error = float((p.grad.full_tensor() - want[name]).norm() / want[name].norm())
                assert error < 2e-5, (build, degrees, name, error)


def test_the_global_batch_is_that_of_one_process() -> None:
    """Gradients, where the loss is a large part of them; recomputed layers count once, and a split sequence is one again."""
    cases = [
        (Build(HP), ParallelDims(ep=2)),
        (Build(HP, recompute="full", fused_layer=True), ParallelDims(ep=2)),
        (Build(HP, recompute="full"), ParallelDims(tp=2, ep=2)),
        (Build(HP, recompute="full"), ParallelDims(pp=2)),
    ]
    run_ranks(on_ranks, 2, cases)

"""Whole models under every kind of parallelism on 4 gloo ranks: loss and gradients of one process, float32 tight, MXFP8 in dB."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.steps import done, same, state_of, trainer
from tests.truth import sqnr
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.models.decoder import Decoder
from mxep.models.document_mask import PackedDocuments
from mxep.models.families import build_model
from mxep.models.presets import DeepSeekV3Config, ModelConfig, Qwen3MoEConfig
from mxep.moe.init import local_tensor
from mxep.parallel import (
    HiddenStates,
    Meshes,
    ParallelDims,
    Pipeline,
    apply_fsdp,
    apply_mxfp8_expert_parallel,
    build_meshes,
    convert_linears,
    recompute_blocks,
    slice_sequence,
)
from mxep.recipe import resolve_recipe
from mxep.train import build as build_module
from mxep.train.build import Build, Linears, build_stages, build_whole

V, S, MICROBATCHES = 48, 8, 4
COMMON = {"vocab_size": V, "dim": 32, "num_layers": 4, "expert_hidden": 32, "num_experts": 4, "top_k": 2, "max_seq_len": 16, "z_loss": 1e-2}
DEEPSEEK = DeepSeekV3Config(
    num_dense_layers=1, dense_hidden=48, num_shared_experts=1, num_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8, q_lora_rank=16, **COMMON,
)  # fmt: skip
# Every dense layer of whole MX blocks, also as half a shard.
BLOCKS = dataclasses.replace(
    DEEPSEEK, dim=64, num_layers=2, expert_hidden=64, dense_hidden=128, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32,
    v_head_dim=32, q_lora_rank=32,
)  # fmt: skip
QWEN = Qwen3MoEConfig(num_heads=4, num_kv_heads=2, head_dim=8, **COMMON)
HP, MXFP8 = resolve_recipe("hp"), resolve_recipe("mxfp8_wgrad_with_hp")


def batch() -> tuple[Tensor, Tensor]:
    """Four microbatches of one sequence for each of up to four data ranks; labels of which some are left out."""
    tokens = torch.randint(V, (4 * MICROBATCHES, S + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 3:] = -100
    return tokens[:, :-1], labels


def documents(masked: bool) -> PackedDocuments | None:
    """One or two in each sequence of `batch`."""
    if not masked:
        return None
    ends = torch.arange(4 * MICROBATCHES)[:, None] % S
    index = torch.arange(S).expand(4 * MICROBATCHES, -1)
    return PackedDocuments.of(torch.where(index < ends, index, index - ends))


def one_process(shape: ModelConfig, build: Build, sequences: int, router_parts: int, masked: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients; the router's loss is a mean over what each rank and microbatch had."""
    model = build_model(shape, build.recipe, build.force_balance)
    if build.linears is not None:
        convert_linears(model, build.linears.fqns, build.linears.recipe, build.linears.skip)
    model.init_weights(0)
    inputs, labels = (part[:sequences] for part in batch())
    found = documents(masked)
    valid = int((labels != -100).sum())
    total = 0.0
    rows = sequences // (router_parts or 1)
    for start in range(0, sequences, rows):
        part = slice(start, start + rows)
        loss = model(inputs[part], labels[part], found and found._replace(positions=found.positions[part]))
        (loss / valid + (model.router_loss() / router_parts if router_parts else 0.0)).backward()
        total += float(loss.detach())
    return total / valid, {name: p.grad for name, p in model.named_parameters()}


def gradients_of(stages: dict[int, Decoder]) -> dict[str, Tensor | None]:
    return {name: p.grad for stage in stages.values() for name, p in stage.named_parameters()}


def on_rank(
    stages: dict[int, Decoder], build: Build, meshes: Meshes, sequences: int, masked: bool
) -> tuple[float, dict[str, Tensor | None]]:
    """One step of this rank's stages on its part of the batch; the loss of all ranks, and the gradients."""
    inputs, labels = batch()
    valid = int((labels[:sequences] != -100).sum())
    mine = [index * meshes.data_world + meshes.data_rank for index in range(MICROBATCHES)]
    inputs, labels = inputs[mine], slice_sequence(labels[mine], meshes.tp, 1)
    found = documents(masked)
    found = found and found._replace(positions=found.positions[mine])
    parts = meshes.stage.size() * MICROBATCHES
    if meshes.pp.size() == 1:
        (model,) = stages.values()
        total = torch.zeros(())
        for index in range(MICROBATCHES):
            model.set_requires_gradient_sync(index == MICROBATCHES - 1)
            row = slice(index, index + 1)
            loss = model(inputs[row], labels[row], found and found._replace(positions=found.positions[row]))
            (loss / valid + model.router_loss() / parts).backward()
            total += loss.detach()
        gradients = gradients_of(stages)
    else:
        dim = next(iter(stages.values())).config.dim
        hidden = HiddenStates((1, S // meshes.tp.size(), dim), torch.float32)
        pipeline = Pipeline(
            stages, meshes.pp, MICROBATCHES, (1, S), hidden, torch.device("cpu"), build.schedule, lambda model: model.router_loss() / parts
        )
        total = pipeline.step(inputs, labels, valid, found)
        gradients = gradients_of(stages)  # later releases of torch drop them as they prepare to evaluate
        for stage in stages.values():
            stage.eval()
        assert torch.allclose(pipeline.evaluate(inputs, labels, found), total, rtol=1e-5)
    dist.all_reduce(total)
    return float(total) / valid, gradients


def check_case(world: int, shape: ModelConfig, build: Build, degrees: ParallelDims, masked: bool = False) -> None:
    meshes = build_meshes(world, degrees, "cpu")
    sequences = MICROBATCHES * meshes.data_world
    # Under tensor parallelism a rank's router sees a part of every sequence, for which one process has no counterpart.
    shape = shape if degrees.tp == 1 else dataclasses.replace(shape, z_loss=0.0, balance_loss=0.0)
    loss, want = one_process(shape, build, sequences, 0 if degrees.tp > 1 else sequences, masked)
    stages = build_stages(shape, build, meshes, torch.device("cpu"), seed=0)
    found, gradients = on_rank(stages, build, meshes, sequences, masked)
    exact = build.recipe == HP
    assert abs(found - loss) < (1e-5 if exact else 1e-2) * loss, (found, loss)
    for name, gradient in gradients.items():
        assert isinstance(gradient, DTensor), name
        grad = gradient.full_tensor()
        error = float((grad - want[name]).norm() / want[name].norm())
        assert error < 2e-5 if exact else sqnr(want[name], grad) > 24, (name, error)
    everywhere: list = [None] * world
    dist.all_gather_object(everywhere, set(gradients))
    assert set().union(*everywhere) == set(want)


def run_cases(rank: int, world: int, cases: list[tuple[ModelConfig, Build, ParallelDims]], masked: bool = False) -> None:
    for shape, build, degrees in cases:
        try:
            check_case(world, shape, build, degrees, masked)
        except Exception as error:
            raise AssertionError(f"{type(shape).__name__} {build} {degrees}: {error}") from error


def test_tensor_parallelism() -> None:
    cases = [
        (DEEPSEEK, Build(HP), ParallelDims(tp=2, ep=4)),
        (QWEN, Build(HP, recompute="full"), ParallelDims(tp=2, ep=2)),
        (DEEPSEEK, Build(MXFP8, output=MXFP8, recompute="selective"), ParallelDims(tp=2, ep=4)),
        (BLOCKS, Build(MXFP8, linears=Linears(MXFP8)), ParallelDims(tp=2, ep=4)),
    ]
    run_ranks(run_cases, 4, cases)


def test_layers_as_one_function() -> None:
    """Recomputed in backward as well, where the layer dispatches again; with shared experts, and without."""
    cases = [
        (DEEPSEEK, Build(HP, fused_layer=True, recompute="full"), ParallelDims(ep=2)),
        (QWEN, Build(HP, fused_layer=True, recompute="full"), ParallelDims(tp=2, ep=2)),
        (DEEPSEEK, Build(MXFP8, fused_layer=True, recompute="selective"), ParallelDims(ep=2)),
        (DEEPSEEK, Build(MXFP8, fused_layer=True, recompute="keep_moe"), ParallelDims(ep=2)),
    ]
    run_ranks(run_cases, 2, cases)


def test_pipeline() -> None:
    cases = [
        (DEEPSEEK, Build(HP), ParallelDims(pp=2, ep=2)),
        (QWEN, Build(HP, schedule="Interleaved1F1B", recompute="full"), ParallelDims(pp=2, ep=2)),
        (DEEPSEEK, Build(MXFP8, output=MXFP8, recompute="full"), ParallelDims(pp=2, tp=2, ep=2)),
        (DEEPSEEK, Build(HP, fused_layer=True, recompute="keep_moe"), ParallelDims(pp=2, ep=2)),
        (QWEN, Build(HP), ParallelDims(pp=4)),
    ]
    run_ranks(run_cases, 4, cases)


def test_documents_under_tensor_and_pipeline_parallelism() -> None:
    cases = [
        (DEEPSEEK, Build(HP), ParallelDims(tp=2, ep=4)),
        (QWEN, Build(HP, recompute="full"), ParallelDims(tp=2, ep=2)),
        (QWEN, Build(HP, schedule="Interleaved1F1B", recompute="selective"), ParallelDims(pp=2, ep=2)),
        (DEEPSEEK, Build(HP, recompute="full"), ParallelDims(pp=2, tp=2, ep=2)),
        (DEEPSEEK, Build(HP, fused_layer=True), ParallelDims(pp=4)),
    ]
    run_ranks(run_cases, 4, cases, True)


def test_compiled_blocks() -> None:
    shape = dataclasses.replace(DEEPSEEK, num_layers=2)
    cases = [
        (shape, Build(HP, compile_backend="aot_eager", recompute="full"), ParallelDims(tp=2, ep=2)),
        (shape, Build(HP, compile_backend="aot_eager", fused_layer=True, recompute="keep_moe"), ParallelDims(ep=2)),
    ]
    run_ranks(run_cases, 2, cases)


def refusals(rank: int, world: int) -> None:
    meshes = {degree: build_meshes(world, ParallelDims(**{degree: 4}), "cpu") for degree in ("ep", "tp", "pp")}
    few_heads = dataclasses.replace(QWEN, num_heads=4, num_kv_heads=2)
    for shape, degree, message in (
        (dataclasses.replace(QWEN, num_experts=6), "ep", "EP degree 4 does not divide the 6 experts"),
        (few_heads, "tp", r"\(16, 32\) has 2 heads of 8 to share, not divisible by the TP degree 4"),
        (dataclasses.replace(QWEN, num_layers=3), "pp", "4 stages for 3 layers, want at most one for each"),
    ):
        with pytest.raises(ValueError, match=message):
            build_stages(shape, Build(HP), meshes[degree], torch.device("cpu"), 0)
    narrow = r"layers\.0\.feed_forward\.w1: a weight \(64, 64\), of which a rank has \(16, 64\), want multiples of 32"
    shape = dataclasses.replace(BLOCKS, dense_hidden=64)
    with pytest.raises(ValueError, match=narrow):
        build_stages(shape, Build(MXFP8, linears=Linears(MXFP8, ("feed_forward",))), meshes["tp"], torch.device("cpu"), 0)
    with pytest.raises(ValueError, match=r"3 microbatches a step for 4 stages .* raise the batch"):
        Pipeline({0: torch.nn.Identity()}, meshes["pp"].pp, 3, (1, S), HiddenStates((1, S, 32), torch.float32), torch.device("cpu"))


def test_degrees_that_do_not_fit_the_model() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        refusals(0, 4)
    finally:
        dist.destroy_process_group()


COMPILED = {"compile": True, "compile_backend": "aot_eager", "activation_checkpoint": "full"}


@pytest.mark.parametrize(
    "more", [{"accumulate": 2, "fused_layer": False}, {"optimizer_in_backward": True, "max_grad_norm": 0.0, **COMPILED}], ids=str
)
def test_one_rank_without_fsdp_steps_as_with_it(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    """Weights and moments to the bit, in float32 on a CPU, also if a run resumes as the other kind."""
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text())
    figures, ends = [], []
    for name, by_fsdp in (
        ("with", (True, True)),
        ("without", (False, False)),
        ("then_without", (True, False)),
        ("then_with", (False, True)),
    ):
        records = []
        for start, wraps in enumerate(by_fsdp):
            monkeypatch.setattr(build_module, "needs_fsdp", lambda *_, wraps=wraps: wraps)
            options = {"data": (str(text),), "steps": 4, "fused_layer": True, "evaluate": False, "checkpoint_every": 100, **more}
            run = trainer(0, 1, str(tmp_path / name), resume=bool(start), **options)
            assert isinstance(run.model, FSDPModule) == wraps
            assert any(isinstance(parameter, DTensor) for parameter in run.model.parameters()) == wraps
            records += [done(run) for _ in range(2)]
            run.save()
        figures.append([figure for record in records for figure in (record.loss, record.grad_norm, record.load_max_over_mean)])
        ends.append(state_of(run))
        assert len(same(ends[0], ends[-1])) == len(ends[0]), name
    assert all(found == pytest.approx(figures[0], rel=1e-12) for found in figures[1:])  # norms are summed in another order


def gradients_in_bf16(by_fsdp: bool, shape: ModelConfig, recipe: str) -> dict[str, Tensor]:
    """Gradients of one rank's bf16 parameters, computed in bf16 as on a GPU."""
    model, meshes = build_whole(shape, Build(resolve_recipe(recipe), fused_layer=True, dtype=torch.bfloat16)), build_meshes(1, 1, "cpu")
    for moe in model.moe_layers() if by_fsdp else ():
        apply_mxfp8_expert_parallel(moe, meshes.ep)
    recompute_blocks(model.layers.values(), "full")
    if by_fsdp:
        apply_fsdp(model, meshes, param_dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    inputs, labels = batch()
    (model(inputs, labels) / 100 + model.router_loss()).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: local_tensor(grad) for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("shape", [dataclasses.replace(BLOCKS, balance_loss=1e-2), QWEN], ids=["deepseek", "qwen"])
def test_bf16_gradients_of_one_rank_are_those_of_fsdp(one_rank: None, shape: ModelConfig, recipe: str) -> None:
    with_fsdp, without = (gradients_in_bf16(by_fsdp, shape, recipe) for by_fsdp in (True, False))
    assert {grad.dtype for grad in without.values()} == {torch.bfloat16}
    assert len(same(with_fsdp, without)) == len(with_fsdp) > 10


def test_an_unknown_compile_backend_is_refused_before_the_data_is_read(tmp_path: Path, one_rank: None) -> None:
    with pytest.raises(ValueError, match=r"--compile-backend=inducter, want one of .*inductor"):
        trainer(0, 1, str(tmp_path), data=("no such text",), compile=True, compile_backend="inducter")

"""Steps as a CUDA graph against eager ones, to the bit: weights, moments, biases, step counts, and the figures of every step."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.steps import done, same, state_of

from mxep.moe.init import local_tensor
from mxep.ops.runtime.launch_graph import LaunchGraph
from mxep.ops.runtime.nvrtc import fill_bytes
from mxep.step_graph import EAGER_STEPS, capture_on_gpu
from mxep.train.checkpoint_writer import HostStaging
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked")]
STEPS, BAD = 10, 7  # a step of the graph


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text())
    common: dict[str, Any] = {"device": "cuda", "batch": 2, "seq_len": 256, "data": (str(text),), "steps": STEPS, "warmup": 6}
    return {**common, "fused_layer": True, "checkpoint_every": 100, "eval_tokens": 1024, "bias_update_rate": 1e-3}


def run_of(gpu: torch.device, out: Path, **options: Any) -> Trainer:
    return Trainer(TrainConfig(**options), Ranks(0, 1, gpu), out)


def steps_with_a_bad_one(run: Trainer) -> list[tuple[float, ...]]:
    """Figures of ten steps and three evaluations, one of them right before a graph is recorded.

    One of the steps has infinite weights, so that its gradients are not finite.
    """
    assert run.model.norm is not None
    scale = run.model.norm.weight
    local, figures = local_tensor(scale).detach(), []
    for step in range(1, STEPS + 1):
        kept = local.clone()
        if step == BAD:
            local.fill_(math.inf)
        record = done(run)
        if step == BAD:
            assert torch.isinf(local).all()
            local.copy_(kept)
        figures.append((record.loss, record.grad_norm, record.load_max_over_mean, record.dead_experts))
        if step in (EAGER_STEPS, 5, STEPS):
            figures.append(run.evaluate())
    return figures


@pytest.mark.parametrize(
    "more",
    [
        {"recipe": "bf16"},
        pytest.param({"recipe": "bf16", "compile": True}, marks=pytest.mark.slow),
        {"recipe": "mxfp8_wgrad_with_mx", "accumulate": 2},
        {"recipe": "mxfp8_wgrad_with_mx", "compile": True},
        {"recipe": "mxfp8_wgrad_with_hp", "compile": True, "accumulate": 2, "cache_weights": True},
        {"recipe": "mxfp8_wgrad_with_mx", "activation_checkpoint": "full", "output_recipe": "mxfp8_wgrad_with_mx"},
        pytest.param(
            {"recipe": "mxfp8_wgrad_with_mx", "converters": "quantize.grouped_mm.mx,quantize.linear.mx", "compile": True},
            marks=pytest.mark.slow,
        ),
        {"recipe": "mxfp8_wgrad_with_mx", "optimizer": "adamw8bit", "dtype": "bfloat16"},
        {"recipe": "mxfp8_wgrad_with_mx", "optimizer_in_backward": True, "max_grad_norm": 0.0},
        {  # shared experts step on a second stream
            **{"recipe": "mxfp8_wgrad_with_mx", "optimizer": "adamw8bit", "dtype": "bfloat16"},
            **{"optimizer_in_backward": True, "max_grad_norm": 0.0},
        },
        {
            **{"recipe": "mxfp8_wgrad_with_mx", "optimizer": "adamw8bit", "dtype": "bfloat16", "compile": True},
            **{"optimizer_in_backward": True, "max_grad_norm": 0.0, "activation_checkpoint": "full"},
        },
    ],
    ids=str,
)
def test_steps_are_those_without_a_graph(tmp_path: Path, nccl: torch.device, options: dict[str, Any], more: dict[str, Any]) -> None:
    found = []
    for graph in (False, True):
        run = run_of(nccl, tmp_path / str(graph), **options, **more, cuda_graph=graph)
        found.append((steps_with_a_bad_one(run), state_of(run)))
        del run
    (figures, state), (graph_figures, graph_state) = found
    for step, (want, got) in enumerate(zip(figures, graph_figures, strict=True)):
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(want, got, strict=True)), (step, want, got)
    assert len(same(state, graph_state)) == len(state)
    assert {float(value) for name, value in state.items() if name.endswith(".step")} == {STEPS - 1.0}


@pytest.mark.slow
def test_resumes_with_and_without_a_graph(tmp_path: Path, nccl: torch.device, options: dict[str, Any]) -> None:
    """A run of one kind resumes as the other kind, with the bits of an uninterrupted run."""
    ends = []
    for name, (before, after) in (
        ("eager", (False, False)),
        ("to_graph", (False, True)),
        ("to_eager", (True, False)),
        ("graph", (True, True)),
    ):
        for graph, more in ((before, {"stop_after": 5}), (after, {"resume": True})):
            run = run_of(nccl, tmp_path / name, **options, recipe="mxfp8_wgrad_with_mx", cuda_graph=graph, **more)
            run.train()
        ends.append(state_of(run))
        assert len(same(ends[0], ends[-1])) == len(ends[0]), name


def test_a_graphed_step_that_waits_for_the_gpu_is_an_error(tmp_path: Path, nccl: torch.device, options: dict[str, Any]) -> None:
    run = run_of(nccl, tmp_path, **options, recipe="bf16", cuda_graph=True)
    backward = run.microbatches.backward

    def waits(*arguments: Any) -> torch.Tensor:
        loss = backward(*arguments)
        return loss if loss.item() > 0 else -loss

    run.microbatches.backward = waits  # type: ignore[method-assign]
    for _ in range(EAGER_STEPS):
        done(run)
    with pytest.raises(RuntimeError, match=r"a CUDA graph cannot hold this step, run it without one \(--no-cuda-graph\): .*captur"):
        run.step()
    assert torch.rand(2, device=nccl).isfinite().all()  # random numbers go on


def launch_graph() -> list[Any]:
    memory = torch.empty(16, dtype=torch.uint8, device="cuda")
    graph = LaunchGraph(memory.device, lambda stream: fill_bytes(memory.device, memory.data_ptr(), 7, 16, stream))
    graph.run(torch.cuda.current_stream().cuda_stream)
    return [graph, memory]


def garbage_with_a_graph() -> list[Any]:
    graph, cycle = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        cycle += [torch.zeros(8, device="cuda"), graph]
    cycle.append(cycle)
    return []


@pytest.mark.parametrize("made", [launch_graph, lambda: [HostStaging({"w": torch.ones(8, device="cuda")})], garbage_with_a_graph])
def test_what_ends_while_a_step_is_recorded_leaves_the_record_alone(made: Callable[[], list[Any]]) -> None:
    """The driver refuses to destroy a graph and to unpin memory while a stream is captured, and gives the capture up."""
    stream, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    thresholds, alive = gc.get_threshold(), LaunchGraph.alive
    torch.cuda.synchronize()

    def work() -> torch.Tensor:
        y = x + 1
        held.clear()
        kept = [[] for _ in range(100)]  # more than a collection of the youngest objects waits for
        return y * 2 + len(kept[0])

    with torch.cuda.stream(stream):
        gc.collect()
        gc.set_threshold(50)
        try:
            gc.disable()
            held = made()
            gc.enable()
            replay, result = capture_on_gpu(work)
        finally:
            gc.set_threshold(*thresholds)
            gc.enable()
        replay()
        stream.synchronize()
    assert result.tolist() == [4.0] * 8
    assert LaunchGraph.alive == alive

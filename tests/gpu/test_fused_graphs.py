"""The fused layer over symmetric memory in a CUDA graph, forward and backward, on one rank with real streams and flags."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fused.test_fused_ranks import layer
from tests.moe_truth import draw, walk
from tests.truth import assert_same
from tests.virtual import alone
from torch import Tensor

from mxep.comm import ExchangeError, close_transports, register, transport_of
from mxep.moe import FusedMoE, RuntimeEPConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked", "on_the_gpu")]
REAL = {"dim": 2048, "hidden": 1408, "num_experts": 16, "top_k": 6}


def make_layer(group: str, **changes: Any) -> FusedMoE:
    moe = layer("mxfp8_wgrad_with_mx", torch.bfloat16, "random", **changes)
    moe.group = SimpleNamespace(group_name=group)  # type: ignore[assignment]
    return moe


def captured(moe: FusedMoE, x: Tensor, dy: Tensor) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """A graph of forward and backward over these tensors, and its results."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(2):
            walk(moe, x, dy)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = walk(moe, x, dy)
    return graph, found


def check_replays(moe: FusedMoE, x: Tensor, dy: Tensor, steps: int, generator: torch.Generator) -> None:
    """Replays with changing tokens and routing between eager steps, some of which are pending during a replay: the bits of eager steps."""
    graph, found = captured(moe, x, dy)
    for step in range(steps):
        for value in (x, dy):
            value.copy_(draw(generator, *value.shape))
        leaf = x.clone().requires_grad_()
        pending = moe(leaf)  # its saved tensors must outlast the replay
        graph.replay()
        got = {key: value.clone() for key, value in found.items()}
        want = walk(moe, x, dy)
        assert_same(torch.autograd.grad(pending, leaf, dy)[0], want["dx"], f"step {step}, held over a replay")
        for key, value in want.items():
            assert_same(got[key], value, f"step {step} {key}")


def test_replays() -> None:
    register("alone", alone())
    generator = torch.Generator().manual_seed(0)
    for runtime in (RuntimeEPConfig(), RuntimeEPConfig("all_to_all", "reduce_scatter", redispatch_x_in_backward=True)):
        moe = make_layer("alone", **REAL)
        moe.runtime = runtime
        x, dy = (draw(generator, 2000, 2048).bfloat16() for _ in range(2))
        check_replays(moe, x, dy, 4, generator)
    close_transports("alone")


def test_a_replay_whose_peer_never_sends(caplog: pytest.LogCaptureFixture) -> None:
    """It ends within the time limit with a log message, all results are NaN from then on, and the next eager exchange raises."""
    caplog.set_level(logging.CRITICAL, "mxep")
    register("alone", alone(timeout_s=1))
    transport: Any = transport_of("alone", torch.device("cuda", 0))
    generator = torch.Generator().manual_seed(0)
    x, dy = (draw(generator, 300, 64).bfloat16() for _ in range(2))
    moe, write = make_layer("alone"), transport.copy_streams.write
    walk(moe, x, dy)

    def never_sends(stream: int | None, flag: int, value: int) -> None:
        if stream is None or not (value and torch.cuda.is_current_stream_capturing()):
            write(stream, flag, value)

    transport.copy_streams.write = never_sends
    graph, found = captured(moe, x, dy)
    for _ in range(2):
        start = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert 0.5 < time.monotonic() - start < 15
        assert found["y"].isnan().all()
        assert found["experts.w2"].isnan().any()
    assert "replay of a CUDA graph" in caplog.text
    with pytest.raises(ExchangeError, match="replay of a CUDA graph"):
        moe(x)
    close_transports("alone")

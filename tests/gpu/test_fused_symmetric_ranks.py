"""The fused layer on two GPUs and more over symmetric memory: the bits of NCCL, no host sync, steps over the same memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fused.test_fused_ranks import KINDS, PAIRS, batch, layer
from tests.fused.test_fused_symmetric import spread
from tests.gpu.test_fused_graphs import captured
from tests.gpu.test_symmetric_ranks import BACKEND, WORLDS
from tests.moe_truth import draw, walk
from tests.ranks import run_ranks
from tests.truth import assert_same

from mxep.comm import close_transports, set_transport
from mxep.moe import FusedMoE, RuntimeEPConfig

pytestmark = pytest.mark.multi_gpu
REAL = {"dim": 2048, "hidden": 1408, "num_experts": 16, "top_k": 6}


def _over(moe: FusedMoE, group: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    moe.group = SimpleNamespace(group_name=group.group_name)  # type: ignore[assignment]
    return walk(moe, x, dy)


def _bits(rank: int, world: int) -> None:
    torch.set_default_device(f"cuda:{rank}")
    group = dist.new_group(list(range(world)))
    assert set_transport("symmetric", group, timeout_s=60) == "symmetric"
    set_transport("collective", dist.group.WORLD)
    held = []
    for at, kind in enumerate(KINDS):
        for recipe, dtype, wire in (("mxfp8_wgrad_with_mx", torch.bfloat16, "mxfp8"), ("hp", torch.float32, "hp")):
            x, dy = batch(world, kind, dtype)
            moe = spread(layer(recipe, dtype, kind, expert_biases=True), rank, world, "")
            for runtime in PAIRS if at == 0 else PAIRS[at % 4 :: 4]:
                moe.runtime = RuntimeEPConfig(
                    runtime.dispatch, runtime.combine, combine_forward=wire if at % 2 else "hp", dispatch_backward=wire
                )
                got = _over(moe, group, x[rank], dy[rank])
                held.append((got, _over(moe, dist.group.WORLD, x[rank], dy[rank]), f"{kind} {recipe} {runtime}"))
    for got, want, what in held:
        for key, value in want.items():
            assert_same(got[key], value, f"{what} {key}")
    close_transports()


@pytest.mark.parametrize("world", WORLDS)
def test_the_bits_of_nccl(world: int) -> None:
    run_ranks(_bits, world, backend=BACKEND, timeout=200)


def _steps(rank: int, world: int) -> None:
    """Different tokens in every step, hosts far ahead of the GPUs; no host sync after the first step."""
    torch.set_default_device(f"cuda:{rank}")
    group = dist.new_group(list(range(world)))
    set_transport("symmetric", group, timeout_s=60)
    set_transport("collective", dist.group.WORLD)
    moe = spread(layer("mxfp8_wgrad_with_mx", torch.bfloat16, "random", **REAL), rank, world, "")
    generator = torch.Generator().manual_seed(rank)
    data = [[draw(generator, 8192, 2048).bfloat16() for _ in range(2)] for _ in range(6)]
    want = [_over(moe, dist.group.WORLD, x, dy) for x, dy in data]
    _over(moe, group, *data[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    got = [_over(moe, group, x, dy) for x, dy in data]
    torch.cuda.set_sync_debug_mode("default")
    for step, (mine, truth) in enumerate(zip(got, want, strict=True)):
        for key, value in truth.items():
            assert_same(mine[key], value, f"step {step} {key}")
    close_transports()


@pytest.mark.parametrize("world", WORLDS)
def test_steps_without_a_host_sync(world: int) -> None:
    run_ranks(_steps, world, backend=BACKEND, timeout=120)


def _replayed(rank: int, world: int) -> None:
    """A CUDA graph of forward and backward, with different tokens and routing in every replay, without exchanges between the hosts."""
    torch.set_default_device(f"cuda:{rank}")
    group = dist.new_group(list(range(world)))
    set_transport("symmetric", group, timeout_s=60)
    set_transport("collective", dist.group.WORLD)
    moe = spread(layer("mxfp8_wgrad_with_mx", torch.bfloat16, "random", **REAL), rank, world, "")
    generator = torch.Generator().manual_seed(rank)
    data = [[draw(generator, 8192, 2048).bfloat16() for _ in range(2)] for _ in range(6)]
    want = [_over(moe, dist.group.WORLD, x, dy) for x, dy in data]
    moe.group = SimpleNamespace(group_name=group.group_name)  # type: ignore[assignment]
    static = [torch.empty_like(value) for value in data[0]]
    for value, first in zip(static, data[0], strict=True):
        value.copy_(first)
    graph, found = captured(moe, *static)
    got = []
    for step in data * 2:
        for value, now in zip(static, step, strict=True):
            value.copy_(now)
        graph.replay()
        got.append({key: value.clone() for key, value in found.items()})
    for step, mine in enumerate(got):
        for key, value in want[step % len(want)].items():
            assert_same(mine[key], value, f"step {step} {key}")
    torch.cuda.synchronize()
    del graph
    close_transports()


@pytest.mark.parametrize("world", WORLDS)
def test_replays(world: int) -> None:
    run_ranks(_replayed, world, backend=BACKEND, timeout=120)

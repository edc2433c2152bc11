"""Slot buffers of several GPUs: the bits of NCCL, many rounds, hosts far ahead; ranks that disagree, or do not call."""

from __future__ import annotations

import logging
import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import KINDS, assert_same, make_case

from mxep import to_mxfp8_a2a_dequant
from mxep.comm import ExchangeError, close_transports, set_transport, symmetric_setup
from mxep.comm.symmetric import SymmetricTransport

pytestmark = pytest.mark.multi_gpu
BACKEND = "cpu:gloo,cuda:nccl"
WORLDS = [
    pytest.param(world, marks=pytest.mark.skipif(torch.cuda.device_count() < world, reason=f"needs {world} CUDA GPUs"))
    for world in (2, 4, 8)
]


class FewRows(SymmetricTransport):
    """Slots of few rows: many rounds."""

    def __init__(self, memory, rendezvous, streams, device, timeout_s) -> None:
        super().__init__(memory, rendezvous, streams, device, timeout_s, slot_memory_bytes=2 * rendezvous.world * (200 << 10))


def both_ways(x: torch.Tensor, grad: torch.Tensor, out_splits: list[int], in_splits: list[int], group: object) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = to_mxfp8_a2a_dequant(leaf, out_splits, in_splits, group)
    return [out.detach(), *torch.autograd.grad(out, leaf, grad)]


def _bits(rank: int, world: int, check: str) -> None:
    os.environ["MXEP_CHECK"] = check
    symmetric_setup.SymmetricTransport = FewRows
    group = dist.new_group(list(range(world)))
    assert set_transport("symmetric", group, timeout_s=60) == "symmetric"
    assert set_transport("collective", dist.group.WORLD) == "collective"
    held = []
    for seed, kind in enumerate([*KINDS, *KINDS]):
        case = make_case(kind, world, 3, rows=900, seed=seed)
        for width, dtype in ((96, torch.bfloat16), (1408, torch.float32), (5120, torch.bfloat16)):
            x, grad = case.inputs(width, dtype)[rank].cuda(), case.gradients(width, dtype)[rank].cuda()
            splits = case.received(rank), case.sent(rank)
            held.append([both_ways(x, grad, *splits, ep) for ep in (group, dist.group.WORLD)])
    for got, want in held:
        for mine, truth in zip(got, want, strict=True):
            assert_same(mine, truth)
    close_transports()


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_bits_of_nccl(world: int, check: str) -> None:
    run_ranks(_bits, world, check, backend=BACKEND, timeout=200)


def _large(rank: int, world: int) -> None:
    """Messages of tens of megabytes over the same slots; hosts run far ahead of the GPUs, and not in step with each other."""
    os.environ["MXEP_CHECK"] = "0"
    group = dist.new_group(list(range(world)))
    set_transport("symmetric", group, timeout_s=60)
    set_transport("collective", dist.group.WORLD)
    generator = torch.Generator("cuda").manual_seed(rank)
    for step in range(12):
        T = (131072, 8192, 16384)[step % 3]
        splits = [T // world] * world
        x, grad = (torch.randn(T, 2048, device="cuda", generator=generator).bfloat16() for _ in range(2))
        if rank == step % world:
            time.sleep(0.05)
        got = [both_ways(x, grad, splits, splits, group) for _ in range(3)]
        want = both_ways(x, grad, splits, splits, dist.group.WORLD)
        for found in got:
            for mine, truth in zip(found, want, strict=True):
                assert_same(mine, truth, f"step {step}")
    close_transports()


@pytest.mark.parametrize("world", WORLDS)
def test_large_exchanges(world: int) -> None:
    run_ranks(_large, world, backend=BACKEND, timeout=150)


def _disagrees(rank: int, world: int, sent: int) -> None:
    """Rank 0 sends rank 1 fewer rows than expected: rank 1 gets NaN for them, all other rows are right, and its next exchange raises."""
    os.environ["MXEP_CHECK"] = "0"
    logging.getLogger("mxep").setLevel(logging.CRITICAL)
    set_transport("symmetric", timeout_s=3)
    call, name = torch.ops.mxep.exchange_dequantized, dist.group.WORLD.group_name
    rows = torch.ones(600, 64, device="cuda")
    assert torch.equal(call(rows, [300, 300], [300, 300], name, "rceil"), rows)
    in_splits = [[300, sent], [300, 300]][rank]
    out = call(torch.ones(sum(in_splits), 64, device="cuda"), [300, 300], in_splits, name, "rceil")
    torch.cuda.synchronize()
    assert torch.equal(out[300:], rows[:300])
    assert bool(out[:300].isnan().all()) == (rank == 1)
    dist.barrier()
    if rank == 1:
        with pytest.raises(ExchangeError, match=f"rank 0 sends {sent} rows to rank 1, whose output_splits await 300"):
            call(rows, [300, 300], [300, 300], name, "rceil")
    else:  # rank 0 does not know of it; the wait of its GPU ends after the time limit
        out = call(rows, [300, 300], [300, 300], name, "rceil")
        torch.cuda.synchronize()
        assert out[300:].isnan().all()
        with pytest.raises(ExchangeError, match="did not come for 3 s"):
            call(rows, [300, 300], [300, 300], name, "rceil")
    close_transports()


@pytest.mark.parametrize("sent", [0, 299])
def test_ranks_that_disagree(sent: int) -> None:
    run_ranks(_disagrees, 2, sent, backend=BACKEND, timeout=60)


def _does_not_call(rank: int, world: int) -> None:
    os.environ["MXEP_CHECK"] = "0"
    logging.getLogger("mxep").setLevel(logging.CRITICAL)
    set_transport("symmetric", timeout_s=2)
    call, name, rows = torch.ops.mxep.exchange_dequantized, dist.group.WORLD.group_name, torch.ones(4, 64, device="cuda")
    call(rows, [2, 2], [2, 2], name, "rceil")
    torch.cuda.synchronize()
    if rank == 0:
        start = time.monotonic()
        out = call(rows, [2, 2], [2, 2], name, "rceil")
        torch.cuda.synchronize()
        assert time.monotonic() - start < 10
        assert out[2:].isnan().all()
        with pytest.raises(ExchangeError, match=r"exchange 2 through slots .*did not come for 2 s"):
            call(rows, [2, 2], [2, 2], name, "rceil")
    dist.barrier()
    close_transports()


def test_a_rank_that_does_not_call() -> None:
    run_ranks(_does_not_call, 2, backend=BACKEND, timeout=60)

"""Two GPUs over symmetric memory: the bits of NCCL in every recipe, held results, released memory, a rank that dies, two groups."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import KINDS, Case, assert_same, exchange, make_case

from mxep import ep_grouped_mm
from mxep.comm import ExchangeError, close_transports, set_transport, symmetric_memory, transport_of
from mxep.ep import ep_grouped_mm_symmetric as overlapped
from mxep.recipe import RECIPES, Recipe

pytestmark = pytest.mark.multi_gpu
BACKEND = "cpu:gloo,cuda:nccl"
D, N, L = 256, 160, 3
WORLDS = [
    pytest.param(world, marks=pytest.mark.skipif(torch.cuda.device_count() < world, reason=f"needs {world} CUDA GPUs"))
    for world in (2, 4, 8)
]


def weights(rank: int, dtype: torch.dtype, shape: tuple[int, int, int] = (L, N, D)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(shape, generator=generator) / shape[2] ** 0.5).to("cuda", dtype).requires_grad_()


def one_call(case: Case, me: int, group: Any, recipe: Recipe, dtype: torch.dtype, counts_on: str = "cuda") -> list[torch.Tensor]:
    x, w = case.inputs(D, dtype)[me].cuda().requires_grad_(), weights(me, dtype)
    out = ep_grouped_mm(x, w, case.sent(me), case.received(me), case.rank_major(me).to(counts_on), group, recipe)
    return [out.detach(), *torch.autograd.grad(out, (x, w), case.inputs(N, dtype, seed=5)[me].cuda())]


def _bits(rank: int, world: int) -> None:
    overlapped.LEAST_GEMM_BYTES = 1
    group = dist.new_group(list(range(world)))
    assert set_transport("symmetric", group, timeout_s=60) == "symmetric"
    assert set_transport("collective", dist.group.WORLD) == "collective"
    held = []
    for seed, kind in enumerate([*KINDS, *KINDS]):
        overlapped.LEAST_CHUNK_BYTES = 1 if seed < len(KINDS) else 1 << 40  # several chunks, though rows are few; then one chunk
        case = make_case(kind, world, L, rows=900, seed=seed)
        inputs = [rows.cuda() for rows in case.inputs(48, torch.float32)]
        got = torch.ops.mxep.exchange_rows(inputs[rank], case.received(rank), case.sent(rank), group.group_name)
        held.append((got, exchange(inputs, case.table)[rank], kind))
        for recipe in map(RECIPES.get, ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8_gemm", "hp")):
            assert recipe is not None
            for dtype, counts_on in ((torch.bfloat16, "cpu"), (torch.float32, "cuda")):
                got = one_call(case, rank, group, recipe, dtype, counts_on)
                held.append((got, one_call(case, rank, dist.group.WORLD, recipe, dtype), f"{kind} {recipe.name} {dtype}"))
    for got, want, what in held:
        pairs = zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]
        for mine, truth in pairs:
            assert_same(mine, truth, what)
    del held, got, pairs, mine
    close_transports()


@pytest.mark.parametrize("world", WORLDS)
def test_the_bits_of_nccl(world: int) -> None:
    run_ranks(_bits, world, backend=BACKEND, timeout=200)


def _large(rank: int, world: int) -> None:
    """Copies of tens of megabytes, four chunks, twenty steps over the same memory, hosts far ahead of the GPUs."""
    overlapped.LEAST_CHUNK_BYTES = 30 << 20
    group = dist.new_group(list(range(world)))
    set_transport("symmetric", group, timeout_s=60)
    set_transport("collective", dist.group.WORLD)
    T, D, N, L = 65536, 2048, 1408, 4
    counts = torch.full((world * L,), T // (world * L))
    w = weights(rank, torch.bfloat16, (L, N, D))
    splits = [T // world] * world
    generator = torch.Generator("cuda").manual_seed(rank)
    found: dict[int, list[torch.Tensor]] = {}
    for step in range(20):
        x = torch.randn(T, D, device="cuda", generator=generator).bfloat16().requires_grad_()
        grad = torch.randn(T, N, device="cuda", generator=generator).bfloat16()
        for name, ep in (("symmetric", group), ("nccl", dist.group.WORLD)):
            out = ep_grouped_mm(x, w, splits, splits, counts, ep, "mxfp8_wgrad_with_hp")
            result = [out.detach(), *torch.autograd.grad(out, (x, w), grad)]
            if name == "symmetric":
                found[step] = result
            elif step % 6 == 0:
                for mine, truth in zip(found[step], result, strict=True):
                    assert_same(mine, truth, f"step {step}")
        if step % 6:
            found.pop(step)
    found.clear()
    del result, out, mine
    close_transports()


@pytest.mark.parametrize("world", WORLDS)
def test_large_steps(world: int) -> None:
    run_ranks(_large, world, backend=BACKEND, timeout=120)


def _own_bytes() -> int | None:
    """Bytes of the current GPU's memory that this process holds; None if nvidia-smi does not see its PID."""
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    command = ["nvidia-smi", "-i", uuid, "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    mib = {
        int(pid): int(used) for pid, used in (line.split(",") for line in shown.splitlines() if line.rpartition(",")[2].strip().isdigit())
    }
    return mib[os.getpid()] << 20 if os.getpid() in mib else None


def _other_sizes(rank: int, world: int) -> str:
    """Sizes change permanently while GPUs are behind their hosts: released memory is free on every GPU, and all rows are right."""
    symmetric_memory.LEAST_PATIENCE = 4
    name = dist.group.WORLD.group_name
    set_transport("symmetric", timeout_s=60)
    torch.ops.mxep.exchange_rows(torch.ones(world, 64, device="cuda"), [1] * world, [1] * world, name)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = _own_bytes()
    for mib in (64, 128, 256, 512, 1024):
        count = (mib << 20) // 4096 // world
        for step in range(8):
            rows = torch.full((count * world, 4096), 10 * step + rank, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(2_000_000)
            out = torch.ops.mxep.exchange_rows(rows, [count] * world, [count] * world, name)
            same = (out.view(world, -1) == torch.arange(world, device="cuda")[:, None] + 10 * step).all()
            del out, rows
            if step in (0, 7):
                assert same
    held = transport_of(name, torch.device("cuda", rank)).nbytes()
    assert 1536 << 20 <= held < 1540 << 20
    torch.cuda.empty_cache()
    after = _own_bytes()
    close_transports()
    if before is None or after is None:
        return "nvidia-smi does not show this process (another PID namespace?): its memory cannot be told from that of others"
    assert after - before < held + (64 << 20), f"{after - before} bytes more than before, {held} are held"
    return ""


@pytest.mark.parametrize("world", WORLDS)
def test_released_memory_is_free_on_every_gpu(world: int) -> None:
    unseen = set(run_ranks(_other_sizes, world, backend=BACKEND, timeout=100)) - {""}
    if unseen:
        pytest.skip(unseen.pop())


def _unset(rank: int, world: int) -> None:
    """A group without a chosen transport exchanges rows on CPUs and on GPUs, whichever come first."""
    for first in ("cuda", "cpu"):
        group = dist.new_group(list(range(world)))
        for device in (first, "cpu" if first == "cuda" else "cuda"):
            rows = torch.full((4, 64), float(rank), device=device)
            got = torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], group.group_name)
            assert got[:, 0].tolist() == [0, 0, 1, 1]
            assert transport_of(group.group_name, rows.device).name == ("symmetric" if device == "cuda" else "collective")
    del got
    close_transports()


def test_auto_takes_symmetric_memory_for_gpus_and_not_for_cpus() -> None:
    run_ranks(_unset, 2, backend=BACKEND, timeout=60)


def _does_not_call(rank: int, world: int) -> float:
    set_transport("symmetric", timeout_s=2)
    rows = torch.ones(4, 64, device="cuda")
    torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], dist.group.WORLD.group_name)
    if rank == 1:
        time.sleep(6)
        close_transports()
        return 0.0
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 2 s"):
        torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], dist.group.WORLD.group_name)
    waited = time.monotonic() - start
    close_transports()
    return waited


def test_a_rank_that_does_not_call() -> None:
    assert run_ranks(_does_not_call, 2, backend=BACKEND, timeout=60)[0] < 5


def _stops_inside(rank: int, world: int) -> None:
    """Rank 1 opens the exchange and sends nothing: the wait of rank 0's GPU ends with NaN, and its next exchange raises."""
    set_transport("symmetric", timeout_s=2)
    logging.getLogger("mxep").setLevel(logging.CRITICAL)
    name = dist.group.WORLD.group_name
    rows = torch.ones(4, 64, device="cuda")
    torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], name)
    torch.cuda.synchronize()
    transport: Any = transport_of(name, rows.device)
    if rank == 1:
        write = transport.copy_streams.write
        transport.copy_streams.write = lambda stream, flag, value: write(stream, flag, value) if stream is None else None
    start = time.monotonic()
    out = torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], name)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 20
    assert out.isnan().all()
    with pytest.raises(ExchangeError, match=r"did not come|rank 0|rank 1"):
        torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], name)
    close_transports()


def test_a_rank_that_stops_inside_an_exchange() -> None:
    run_ranks(_stops_inside, 2, backend=BACKEND, timeout=60)

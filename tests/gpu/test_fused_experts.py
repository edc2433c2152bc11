"""`fused_experts` with a plain router on GPUs: the CPU's tests with the kernels, no host sync, two ranks over both transports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests.fused import test_fused_experts as on_cpu
from tests.gpu.test_fused import BACKEND, close
from tests.moe_truth import C, D, E, draw, make
from tests.ranks import run_ranks
from torch import Tensor

from mxep.comm import TRANSPORTS, close_transports, set_transport
from mxep.device import GEMM_PATHS, resolve_gemm_path
from mxep.moe import FusedMoE, RuntimeEPConfig, fused_experts, saved_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "config", [RuntimeEPConfig(), RuntimeEPConfig("all_to_all", "all_to_all", scratch_rows=160)], ids=["one", "chunks"]
)
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_the_bits_of_the_layer_with_its_router(recipe: str, config: RuntimeEPConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu.check_bits(recipe, torch.bfloat16, config, monkeypatch, close)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("rows", ["auto", 160], ids=["one", "chunks"])
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_weights_that_are_stored_transposed(recipe: str, rows: int | str) -> None:
    on_cpu.check_transposed(recipe, RuntimeEPConfig(scratch_rows=rows), close)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_mx", "hp"])
def test_errors_with_a_plain_router(recipe: str) -> None:
    on_cpu.check_errors_with_a_plain_router(recipe)


def steps(call: Callable[[Tensor], Tensor], gate: Tensor, data: list[Tensor]) -> None:
    """A first step, which compiles kernels and allocates memory, then steps without a host sync."""
    call(data[0]).square().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in data[1:]:
            call(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gate.grad is not None
    assert bool(gate.grad.isfinite().all())


def routed(group: str | None, world: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A router in plain torch and the experts of this rank."""
    local = E // world
    w1, b1, w2, b2 = (None if w is None else w.detach()[:local].requires_grad_() for w in on_cpu.joined(make(FusedMoE, "hp")))
    gate = draw(torch.Generator().manual_seed(2), E, D).bfloat16().requires_grad_()

    def call(x: Tensor) -> Tensor:
        best = torch.nn.functional.linear(x, gate).float().topk(C)
        return fused_experts(x, best.indices, best.values.softmax(-1), w1, b1, w2, b2, E, group=group)

    return call, gate


def test_no_host_sync_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CHECK", "0")
    generator = torch.Generator().manual_seed(0)
    steps(*routed("", 1), [draw(generator, 300, D).bfloat16() for _ in range(3)])


@pytest.mark.parametrize("rows", ["auto", 160], ids=["one", "chunks"])
@pytest.mark.parametrize("modes", [("rank_dedup", "rank_dedup"), ("all_to_all", "all_to_all"), ("all_gather", "reduce_scatter")])
def test_missing_and_repeated_experts(modes: tuple[str, str], rows: int | str) -> None:
    on_cpu.check_missing_and_repeated_experts(modes, rows)


WRONG = """
import torch, mxep
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.set_default_device("cuda")
x, w1, w2 = torch.zeros(40, 64), torch.zeros(8, 128, 64), torch.zeros(8, 64, 64)
experts = torch.arange(2).repeat(40, 1)
call = lambda: mxep.fused_experts(x, experts, torch.ones(40, 2), w1, None, w2, None, 8, group={group}, recipe="hp").sum().item()
print("right", call())
experts[7] = {chosen}
print("wrong", call())
"""


@pytest.mark.parametrize(("group", "chosen"), [("None", "3"), ("None", "-1"), ("None", "8"), ("''", "-2"), ("''", "8")])
def test_wrong_choices_without_checking_end_the_process(group: str, chosen: str) -> None:
    """An expert twice, -1, and an unknown expert are asserted on the device before a row is misplaced. One rank accepts the first two."""
    command = [sys.executable, "-c", WRONG.replace("{chosen}", chosen).replace("{group}", group)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "MXEP_CHECK": "0"}, check=False)
    assert "right 0.0" in ended.stdout, ended.stderr[-2000:]
    assert "wrong" not in ended.stdout
    assert "device-side assert" in ended.stderr


def _on_two_gpus(rank: int, world: int, transport: str) -> None:
    torch.set_default_device(f"cuda:{rank}")
    assert set_transport(transport) == transport
    on_cpu.over_ranks(rank, world)
    if transport == "symmetric":
        generator = torch.Generator().manual_seed(rank)
        steps(*routed(None, world), [draw(generator, 300, D).bfloat16() for _ in range(6)])
    close_transports()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CHECK", "0")
    run_ranks(_on_two_gpus, 2, transport, backend=BACKEND, timeout=240)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_weights_are_quantised_in_one_pass(recipe: str) -> None:
    """Forward makes both forms of each weight; without `keep_dgrad_weights` backward makes dgrad's, with the same bits."""
    moe, generator = make(FusedMoE, recipe), torch.Generator().manual_seed(0)
    x, dy = (draw(generator, 160, D).bfloat16() for _ in range(2))
    if GEMM_PATHS[resolve_gemm_path("auto", x.device)].granularity is None:
        pytest.skip("no FP8 GEMM path on this GPU")

    def launches_and_gradients() -> tuple[int, list[Tensor]]:
        leaf = x.clone().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            gradients = torch.autograd.grad(moe(leaf), [leaf, *moe.experts.parameters()], dy)
        return sum(event.name == "mxep::quantize_weight" for event in profiler.events()), list(gradients)

    launches, want = launches_and_gradients()
    weights = sum(parameter.numel() for parameter in moe.experts.parameters())
    kept = saved_bytes(moe(x.clone().requires_grad_()))["weights for dgrad"]
    moe.runtime = RuntimeEPConfig(keep_dgrad_weights=False)
    more_launches, got = launches_and_gradients()
    assert (launches, more_launches) == (2, 4)
    assert weights < kept < 1.5 * weights
    assert saved_bytes(moe(x.clone().requires_grad_()))["weights for dgrad"] == 0
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))

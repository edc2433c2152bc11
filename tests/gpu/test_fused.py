"""The fused layer on GPUs: the CPU's tests of one and of two ranks with the kernels, no host sync on one rank, sizes of a real layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.fused import test_fused as on_cpu
from tests.fused import test_fused_chunks as in_chunks
from tests.fused import test_fused_ranks as on_ranks
from tests.moe import test_first_product_in_mx as in_mx
from tests.moe_truth import ACTIVATIONS, draw, error, make, truth, walk
from tests.ranks import run_ranks

from mxep.comm import set_transport
from mxep.fused import collective_dispatcher
from mxep.fused.dispatcher import ExpertRowIndex
from mxep.moe import FusedMoE, MoE, RuntimeEPConfig
from mxep.ops.routing.index_reference import MODES
from mxep.recipe import RECIPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
BACKEND = "cpu:gloo,cuda:nccl"


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """The same up to the order of a sum."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    assert error(got, want.double()) < 3e-3, what


@pytest.mark.parametrize("recipe", on_cpu.MX_RECIPES)
def test_errors_are_those_of_the_blocks(recipe: str) -> None:
    on_cpu.test_errors_are_those_of_the_blocks(recipe)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_gemm_wgrad_with_mx", "mxfp8", "hp"])
def test_activations_and_biases(recipe: str, activation: str) -> None:
    on_cpu.test_activations_and_biases(recipe, activation)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "hp"])
def test_layouts(recipe: str, layout: str) -> None:
    on_cpu.check_joined(recipe, layout, close)


@pytest.mark.usefixtures("poison")
def test_modes_on_one_rank_agree() -> None:
    on_cpu.test_modes_on_one_rank_agree()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_repeated_recomputed_checkpointed_and_cached_steps_have_the_same_bits(recipe: str) -> None:
    on_cpu.test_repeated_recomputed_checkpointed_and_cached_steps_have_the_same_bits(recipe)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_gemm_wgrad_with_mx", "hp"])
def test_frozen_parts_few_tokens_and_nan(recipe: str) -> None:
    on_cpu.check_frozen_parts(recipe, close)
    on_cpu.test_few_tokens_and_all_tokens_at_one_expert(recipe)
    on_cpu.test_nan_stays_with_its_token_and_its_experts(recipe, "auto")


def test_saved_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu.test_saved_bytes()
    in_mx.test_saved_bytes(monkeypatch)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "hp"])
def test_first_product_in_mx(recipe: str) -> None:
    in_mx.test_outputs_are_equal_and_gradients_are_close(recipe)
    in_mx.test_few_tokens_and_frozen_parts()


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "hp"])
@pytest.mark.parametrize(
    "runtime",
    [
        RuntimeEPConfig(),
        RuntimeEPConfig("all_gather", "all_to_all", keep_first_product=False),
        in_mx.IN_MX,
        RuntimeEPConfig(scratch_rows=320),
    ],
)
def test_no_host_sync_on_one_rank(recipe: str, runtime: RuntimeEPConfig, no_sync: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CHECK", "0")
    moe = make(FusedMoE, recipe)
    moe.runtime = runtime
    generator = torch.Generator().manual_seed(0)
    x, dy = (draw(generator, 300, 64).bfloat16() for _ in range(2))
    leaf = x.requires_grad_()
    moe(leaf).backward(dy)  # compiles kernels
    with no_sync():
        moe(leaf).backward(dy)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_in_chunks(recipe: str) -> None:
    in_chunks.check_recipe(recipe, close)
    in_chunks.check_skew(recipe, close)


def test_a_real_width() -> None:
    """D 2048, H 1408, 16 experts, top-6, which take other tiles on the FP8 GEMM paths. Errors of fused layer and blocks are within 1.05."""
    sizes = {"dim": 2048, "hidden": 1408, "num_experts": 16, "top_k": 6}
    blocks, fused = make(MoE, "mxfp8_wgrad_with_mx", **sizes), make(FusedMoE, "mxfp8_wgrad_with_mx", **sizes)
    generator = torch.Generator().manual_seed(1)
    x, dy = (draw(generator, 4096, 2048).bfloat16() for _ in range(2))
    want = truth(blocks, x, dy, blocks.router(x).experts)
    for (name, got), of_blocks in zip(walk(fused, x, dy).items(), walk(blocks, x, dy).values(), strict=True):
        ratio = error(got, want[name]) / error(of_blocks, want[name])
        assert 1 / 1.05 <= ratio <= 1.05, f"{name}: {ratio:.3f}"


def test_indices_are_those_of_the_cpu() -> None:
    """Index arithmetic gives the same integers on both devices."""
    generator = torch.Generator().manual_seed(2)
    for tokens, experts_in_all, choices, world in ((1000, 32, 4, 4), (0, 8, 2, 2), (3, 8, 8, 8)):
        chosen = torch.rand(tokens, experts_in_all, generator=generator, device="cpu").topk(choices, -1).indices
        local = experts_in_all // world
        results = []
        for device in ("cpu", "cuda"):
            experts = chosen.to(device)
            counts = collective_dispatcher.count_rows(experts, local, world)
            found = [counts]
            for at, mode in enumerate(MODES):
                sent = collective_dispatcher.send_index(mode, experts, local, world, int(counts[:, at].sum()))
                own, size = torch.where(experts < local, experts, -1), choices * tokens + local * 32
                index = ExpertRowIndex(*torch.ops.mxep.index_topk(own, own.float(), 0, local, 32, size))
                rows = [[tokens, int((experts < local).sum()), tokens]]
                held = collective_dispatcher.recv_index(mode, index, torch.arange(tokens, device=device), rows)
                found += [*sent, *held, *index]
            results.append([value.cpu() for value in found])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def _on_two_gpus(rank: int, world: int) -> None:
    torch.set_default_device(f"cuda:{rank}")
    set_transport("collective")
    on_ranks.run_all(rank, world)
    on_ranks.run_fsdp(rank, world)


@pytest.mark.multi_gpu
def test_two_ranks_over_nccl() -> None:
    run_ranks(_on_two_gpus, 2, backend=BACKEND, timeout=240)

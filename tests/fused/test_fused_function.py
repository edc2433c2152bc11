"""Tensors that the fused layer's autograd function saves or computes again, under autocast and activation checkpointing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fused.test_fused_chunks import bounds_known, bounds_unknown
from tests.fused.test_fused_ranks import batch, layer
from tests.fused.test_fused_symmetric import spread
from tests.moe_truth import E, error, make, tokens, walk
from tests.truth import assert_same
from tests.virtual import run_virtual
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mxep.fused import autograd
from mxep.fused.symmetric_dispatcher import SymmetricDispatcher
from mxep.moe import FusedMoE, RuntimeEPConfig, saved_bytes


def test_logits_are_saved_only_if_backward_cannot_compute_them_again() -> None:
    """Autocast computes them in bf16 in forward alone, and without the router's gradient the tokens may not be saved."""
    x, dy = tokens(64, torch.float32)
    in_bf16 = make(FusedMoE, "hp", torch.float32, score_function="sigmoid", router_dtype="bf16")
    moe = make(FusedMoE, "hp", torch.float32, score_function="sigmoid")
    want, kept = walk(moe, x, dy), saved_bytes(moe(x))["routing"]
    with torch.autocast(x.device.type, torch.bfloat16):
        assert saved_bytes(in_bf16(x))["routing"] == kept + 64 * E * 2, "in bf16"
        assert saved_bytes(moe(x))["routing"] == kept, "in float32 under any autocast of forward"
    moe.router.gate.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    y = moe(leaf)
    assert saved_bytes(y)["routing"] == kept + 64 * E * 4
    assert_same(torch.autograd.grad(y, leaf, dy)[0], want["dx"])


@pytest.mark.parametrize("router_dtype", ["fp32", "bf16"])
def test_recomputed_logits_are_those_of_forward_under_any_autocast_of_backward(router_dtype: str) -> None:
    x, dy = tokens(64, torch.float32)
    moe = make(FusedMoE, "hp", torch.float32, router_dtype=router_dtype)
    want = walk(moe, x, dy)
    x = x.clone().requires_grad_()
    y = moe(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        y.backward(dy)
    assert x.grad is not None
    assert error(x.grad, want["dx"].double()) < 1e-2, "the products around them are rounded"


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "hp"])
def test_a_recomputed_forward_has_chunk_bounds_of_its_own(recipe: str) -> None:
    """A bias that changes between forward and backward changes the routing of the second run, whose bounds are not those of the first."""

    def run() -> dict[str, Tensor]:
        moe = make(FusedMoE, recipe, top_k=2)
        moe.runtime = RuntimeEPConfig(scratch_rows=384)
        x, dy = tokens(100)
        x = x.requires_grad_()
        y = checkpoint(moe, x, use_reentrant=False, preserve_rng_state=False)
        moe.expert_bias[0] = moe.expert_bias[7] = 10
        y.backward(dy)
        return {name: parameter.grad for name, parameter in moe.named_parameters()} | {"dx": x.grad}

    with bounds_unknown():
        want = run()
    with bounds_known():
        for name, got in run().items():
            assert_same(got, want[name], name)


def runs_again(me: int, world: int, name: str) -> None:
    x, dy = batch(world, "random", torch.float32)
    moe = spread(layer("hp", torch.float32, "random"), me, world, name)
    moe.runtime = RuntimeEPConfig(
        cpu_sync_on_runtime=True, keep_first_product=False
    )  # so that no other tensor has the size of all expert rows
    leaf = x[me].clone().requires_grad_()
    y = checkpoint(moe, leaf, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    moe.expert_bias[0] = moe.expert_bias[1] = 10
    y.backward(dy[me])
    want = walk(moe, x[me], dy[me])
    for key, value in {"dx": leaf, **dict(moe.named_parameters())}.items():
        assert_same(value.grad, want[key], key)


def test_a_recomputed_forward_has_a_row_count_of_its_own() -> None:
    """The number of expert rows is that of the second run."""
    run_virtual(runs_again, 2)


def without_backward(me: int, world: int, name: str) -> list[tuple[int, ...]]:
    """Sizes of the tensors that a dispatcher keeps for backward: of a call without gradients, then of one with gradients."""
    x, _ = batch(world, "random", torch.bfloat16)
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), me, world, name)
    moe.group = SimpleNamespace(group_name=name)  # type: ignore[assignment]
    found, chunks = [], autograd.ExpertChunks.of

    def noted(dispatcher: SymmetricDispatcher, *rest: Any) -> Any:
        found.append((dispatcher.topk_ids.numel(), dispatcher.score_bits.numel()))
        return chunks(dispatcher, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd.ExpertChunks, "of", noted)
        with torch.no_grad():
            moe(x[me])
        moe(x[me])
    return found


def test_nothing_is_kept_for_backward_without_gradients() -> None:
    inference, training = run_virtual(without_backward, 1)[0]
    assert inference == (0, 0)
    assert min(training) > 0

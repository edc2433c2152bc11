"""`ep_grouped_mm` over symmetric memory, on virtual ranks: the bits of the collective path, and no saved tensor is overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.truth import KINDS, Case, assert_all_same, assert_same, make_case, raises_naming
from tests.virtual import collective_group, run_virtual, symmetric
from torch.utils.checkpoint import checkpoint

from mxep import ep_grouped_mm
from mxep.ep import ep_grouped_mm_symmetric as overlapped
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.recipe import RECIPES, Recipe, ScaleCalculationMode

D, N, L = 64, 96, 3
CPU = torch.device("cpu")
CHUNKED = [
    RECIPES["mxfp8_wgrad_with_hp"],
    RECIPES["mxfp8_wgrad_with_mx"],
    Recipe("floor, groups of 128", scaling_mode=ScaleCalculationMode.FLOOR, group_size_multiple_of=128),
]
OTHERS = [recipe for recipe in RECIPES.values() if not recipe.dispatch == recipe.combine_backward == "mxfp8"]


def weights(rank: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(L, N, D, generator=generator) / D**0.5).to(dtype).requires_grad_()


def call(x: torch.Tensor, w: torch.Tensor, case: Case, me: int, name: str, recipe: Any = None, **options: Any) -> torch.Tensor:
    return ep_grouped_mm(x, w, case.sent(me), case.received(me), case.rank_major(me), name, recipe, **options)


def results(case: Case, me: int, name: str, recipe: Any = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[torch.Tensor]:
    """(out, dx, dw) for a random gradient."""
    x, w = case.inputs(D, dtype)[me].requires_grad_(), weights(me, dtype)
    out = call(x, w, case, me, name, recipe, **options)
    return [out.detach(), *torch.autograd.grad(out, (x, w), case.inputs(N, dtype, seed=5)[me])]


def bits(me: int, world: int, name: str) -> None:
    plain = collective_group(name)
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, L, rows=70, seed=seed)
        for recipe in [*CHUNKED, *(OTHERS if seed == 0 else [])]:
            for dtype in (torch.bfloat16, torch.float32):
                got, want = (results(case, me, group, recipe, dtype) for group in (name, plain))
                assert_all_same(got, want, f"{kind} {recipe.name} {dtype}")


@pytest.mark.parametrize(("world", "least_chunk_bytes"), [(1, 1), (2, 1), (2, 8 << 20), (3, 2000), (4, 1)])
def test_the_bits_of_the_collective_path(world: int, least_chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one chunk in one GEMM and in two, with a chunk for each expert, and with numbers between."""
    monkeypatch.setattr(overlapped, "LEAST_CHUNK_BYTES", least_chunk_bytes)
    run_virtual(bits, world)
    monkeypatch.setattr(overlapped, "LEAST_GEMM_BYTES", 1)
    run_virtual(bits, world)


def test_several_parts_in_each_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MOST_CHUNKS", 2), ("MOST_GEMMS", 5), ("LEAST_CHUNK_BYTES", 1), ("LEAST_GEMM_BYTES", 1)):
        monkeypatch.setattr(overlapped, name, value)
    run_virtual(layers, 3)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "LEAST_CHUNK_BYTES", 1)


def one_gradient(me: int, world: int, name: str) -> None:
    case = make_case("random", world, L)
    _, d_x, d_w = results(case, me, name)
    grad = case.inputs(N, torch.bfloat16, seed=5)[me]
    for needs_x in (True, False):
        x, w = case.inputs(D, torch.bfloat16)[me].requires_grad_(needs_x), weights(me).requires_grad_(not needs_x)
        call(x, w, case, me, name).backward(grad)
        assert_same(*((x.grad, d_x) if needs_x else (w.grad, d_w)))
    want = results(case, me, name)[0]
    with torch.no_grad():
        assert_same(call(x, w, case, me, name), want)
    assert_same(call(x.detach(), w.detach(), case, me, name), want)


def layers(me: int, world: int, name: str) -> None:
    """Three layers of different routings are pending, with two backwards each: no call changes what another one saved."""
    cases = [
        make_case("random", world, L, rows=40, seed=1),
        make_case("uneven", world, L, rows=60),
        make_case("starved", world, L, rows=50),
    ]
    alone = [[t.clone() for t in results(case, me, name)] for case in cases]
    leaves = [(case.inputs(D, torch.bfloat16)[me].requires_grad_(), weights(me)) for case in cases]
    outs = [call(*pair, case, me, name) for pair, case in zip(leaves, cases, strict=True)]
    for _ in range(2):
        for out, pair, case, want in zip(outs, leaves, cases, alone, strict=True):
            grads = torch.autograd.grad(out, pair, case.inputs(N, torch.bfloat16, seed=5)[me], retain_graph=True)
            assert_all_same([out.detach(), *grads], want, "in flight")


def memory_comes_back(me: int, world: int, name: str) -> None:
    case, sizes = make_case("uneven", world, L), []
    for _ in range(4):
        results(case, me, name)
        sizes.append(symmetric(name).nbytes())
    assert len(set(sizes)) == 1
    assert len(symmetric(name)._pool.free()) == len(symmetric(name)._pool.buffers)


def kept_and_checkpointed(me: int, world: int, name: str) -> None:
    case = make_case("random", world, L)
    want = results(case, me, name)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weights(me).detach())
    kept = CachedWeight(WeightCache(), module, "weight")
    for _ in range(2):
        x = case.inputs(D, torch.bfloat16)[me].requires_grad_()
        out = checkpoint(lambda x, w: call(x, w, case, me, name, kept=kept), x, module.weight, use_reentrant=False)
        grads = torch.autograd.grad(out, (x, module.weight), case.inputs(N, torch.bfloat16, seed=5)[me])
        assert_all_same([out.detach(), *grads], want, "kept")
    assert kept.cache.fills == 2


def expanded_gradient(me: int, world: int, name: str) -> None:
    case = make_case("random", world, L)
    x, w = case.inputs(D, torch.bfloat16)[me].requires_grad_(), weights(me)
    out = call(x, w, case, me, name)
    got = torch.autograd.grad(out.sum(), (x, w), retain_graph=True)
    for mine, want in zip(got, torch.autograd.grad(out, (x, w), torch.ones_like(out)), strict=True):
        assert_same(mine, want)


def wrong_counts(me: int, world: int, name: str) -> None:
    """The same error on every rank, though one alone is wrong; the next call works."""
    case = make_case("balanced", world, L)
    counts = case.rank_major(me)
    if me == 1:
        counts[0] += 1
        counts[L] -= 1
    with raises_naming("rank 1 has num_tokens_per_expert", "rank-major"):
        ep_grouped_mm(case.inputs(D, torch.float32)[me], weights(me, torch.float32), case.sent(me), case.received(me), counts, name)
    results(case, me, name)


CHECKS = (one_gradient, layers, memory_comes_back, kept_and_checkpointed, expanded_gradient)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_virtual_ranks(check: Any, chunks: None) -> None:
    run_virtual(check, 2)


def test_wrong_counts_on_one_rank_raise_on_all(chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.ep.ep_grouped_mm_collective.values_checked", lambda tensor: False)  # a GPU outside of checking mode
    run_virtual(wrong_counts, 2)

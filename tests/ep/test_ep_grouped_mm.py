"""`ep_grouped_mm` on gloo ranks: the bits of the five blocks for every routing and recipe, what is saved and sent, errors, one graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import chains
from tests.chains import D, Group, L, N, by_plan, layered, leaves, run, weights
from tests.ranks import run_ranks
from tests.truth import KINDS, Case, assert_all_same, assert_same, make_case, raises_naming, saved_tensors, sent_bytes
from torch.utils.checkpoint import checkpoint

from mxep import (
    MXTensor,
    Recipe,
    ScaleCalculationMode,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    ep_grouped_mm,
    permute_mxfp8_fwd_hp_bwd,
    quantize_mx,
    to_mxfp8_then_scaled_grouped_mm,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.ep import ExchangePlan
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.recipe import RECIPES, resolve_recipe
from mxep.shapes import round_up

FLOOR = ScaleCalculationMode.FLOOR
# The presets, and every pair of exchanges with every wgrad that a recipe may combine.
ALL_RECIPES = [
    *RECIPES.values(),
    *(replace(recipe, scaling_mode=FLOOR) for recipe in RECIPES.values() if recipe.name in ("mxfp8", "mxfp8_wgrad_with_mx", "mxfp8_gemm")),
    Recipe("only dispatch", combine_backward="hp"),
    Recipe("only dispatch, mx", combine_backward="hp", wgrad="mx"),
    Recipe("only combine", dispatch="hp"),
    Recipe("only combine, mx", dispatch="hp", wgrad="mx"),
    Recipe("columns", dispatch="hp", combine_backward="hp", wgrad="mxfp8"),
    Recipe("groups of 128", group_size_multiple_of=128),
]


def one_call(x: torch.Tensor, w: torch.Tensor, case: Case, me: int, group: Any, recipe: Recipe, **options: Any) -> torch.Tensor:
    return ep_grouped_mm(x, w, case.sent(me), case.received(me), case.rank_major(me), group, recipe, **options)


def check_bits(me: int, world: int, group: Group) -> None:
    """Every routing and recipe; in both dtypes on two ranks, in one of them by turns on more."""
    dtypes = torch.bfloat16, torch.float32
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, L, rows=70, seed=seed)
        for number, recipe in enumerate(ALL_RECIPES):
            for dtype in dtypes if world == 2 else (dtypes[(seed + number) % 2],):
                got, want = (run(chain, case, me, dtype, group, recipe) for chain in (one_call, layered))
                assert_all_same(got, want, f"{kind} {recipe.name} {dtype}")


def check_public_blocks(me: int, world: int, group: Group) -> None:
    """The blocks as a user of torchao calls them; counts in int32; the default recipe by None, a preset by its name."""
    case = make_case("uneven", world, L, rows=70)
    x, w, grad = case.inputs(D, torch.bfloat16)[me].requires_grad_(), weights(me, torch.bfloat16), case.inputs(N, torch.bfloat16)[me]
    outs, ins = case.received(me), case.sent(me)
    shape, rows, row_map, _, offs = permute_mxfp8_fwd_hp_bwd(
        a2a_dispatch_mxfp8_fwd_hp_bwd(x, outs, ins, group), case.rank_major(me), world, L
    )
    y = to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, wgrad_with_hp=True)
    y = a2a_combine_hp_fwd_mxfp8_bwd(unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape), ins, outs, group)
    want = [y, *torch.autograd.grad(y, (x, w), grad)]
    for recipe in (None, "mxfp8_rceil_wgrad_with_hp"):
        y = ep_grouped_mm(x, w, ins, outs, case.rank_major(me).int(), group=group, recipe=recipe)
        assert_all_same([y, *torch.autograd.grad(y, (x, w), grad)], want, str(recipe))


def saved_bytes(case: Case, me: int, group: Group, recipe: Recipe, needs_x: bool = True, needs_w: bool = True) -> int:
    """Bytes that one forward keeps for backward, without the weight."""
    x, w = case.inputs(D, torch.bfloat16)[me].requires_grad_(needs_x), weights(me, torch.bfloat16).requires_grad_(needs_w)
    with saved_tensors() as saved:
        one_call(x, w, case, me, group, recipe)
    return sum(tensor.nbytes for tensor in saved if tensor.data_ptr() != w.data_ptr())


def check_saved(me: int, world: int, group: Group) -> None:
    """Received rows as wgrad reads them, the row map and the ends; no rows where the weight is frozen."""
    case = make_case("uneven", world, L, rows=70)
    received = sum(case.received(me))
    padded = round_up(received + L * 32, 32)
    map_and_ends = 4 * padded + 4 * L
    mx, hp = D + D // 32, 2 * D
    rows = {
        "mxfp8_wgrad_with_hp": received * mx,
        "mxfp8_wgrad_with_mx": received * mx,
        "mxfp8_gemm": received * hp,
        "mxfp8_gemm_wgrad_with_mx": received * mx,
        "mxfp8": padded * mx,
        "hp": padded * hp,
    }
    for name, want in rows.items():
        recipe = RECIPES[name]
        assert saved_bytes(case, me, group, recipe) == want + map_and_ends, name
        assert saved_bytes(case, me, group, recipe, needs_x=False) == want + map_and_ends, name
        assert saved_bytes(case, me, group, recipe, needs_w=False) == map_and_ends, name
        assert saved_bytes(case, me, group, recipe, needs_x=False, needs_w=False) == 0, name


def check_one_gradient(me: int, world: int, group: Group) -> None:
    """A weight that needs no gradient, an input that needs none: the other's bits stay."""
    case = make_case("random", world, L, rows=40)
    grad = case.inputs(N, torch.float32, seed=5)[me]
    for recipe in RECIPES.values():
        _, d_x, d_w = run(layered, case, me, torch.float32, group, recipe)
        for needs_x in (True, False):
            x, w = case.inputs(D, torch.float32)[me].requires_grad_(needs_x), weights(me, torch.float32).requires_grad_(not needs_x)
            one_call(x, w, case, me, group, recipe).backward(grad)
            assert_same(*((x.grad, d_x) if needs_x else (w.grad, d_w)), recipe.name)
            assert (w if needs_x else x).grad is None


def check_mx_gradient(me: int, world: int, group: Group) -> None:
    """The operation after the call may send an MX gradient: its values count."""
    case = make_case("random", world, L, rows=40)
    rows = sum(case.sent(me))
    grad = quantize_mx(case.inputs(N, torch.bfloat16, seed=5)[me])
    x, w = leaves(case, me, torch.bfloat16)
    for recipe in RECIPES.values():
        out = one_call(x, w, case, me, group, recipe)
        want = torch.autograd.grad(out, (x, w), grad.dequantize(), retain_graph=True)
        assert isinstance(grad, MXTensor)
        for got, truth in zip(torch.autograd.grad(out, (x, w), grad), want, strict=True):
            assert_same(got, truth, f"{recipe.name}, {rows} rows")


def check_kept_weight(me: int, world: int, group: Group) -> None:
    """Weights from a WeightCache: the same bits, quantised once per step and use."""
    case = make_case("random", world, L, rows=40)
    recipe = resolve_recipe(None)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weights(me, torch.bfloat16).detach())
    kept = CachedWeight(WeightCache(), module, "weight")
    for step in range(2):
        for _ in range(2):
            x = case.inputs(D, torch.bfloat16)[me].requires_grad_()
            out = one_call(x, module.weight, case, me, group, recipe, kept=kept)
            d_x, d_w = torch.autograd.grad(out, (x, module.weight), case.inputs(N, torch.bfloat16, seed=5)[me])
            assert_all_same([out.detach(), d_x, d_w], run(layered, case, me, torch.bfloat16, group, recipe), f"step {step}")
        assert kept.cache.fills == 2 * (step + 1), "once for forward, once for dgrad"
        kept.cache.advance()


def check_nan(me: int, world: int, group: Group) -> None:
    """A token with an Inf reaches its own output row and no other."""
    case = make_case("random", world, L, rows=40)
    inputs = case.inputs(D, torch.float32)
    inputs[0][7, 33] = torch.inf
    out = one_call(inputs[me], weights(me, torch.float32), case, me, group, resolve_recipe(None))
    assert out.isnan().any(1).nonzero().flatten().tolist() == ([7] if me == 0 else [])


def check_ranks_disagree(me: int, world: int, group: Group) -> None:
    """The same error on every rank, before anything hangs."""
    case = make_case("balanced", world, L)
    sent = case.sent(me)
    if me == 1:
        sent = [sent[0] - 1, sent[1] + 1, *sent[2:]]
    with raises_naming("rank 1 sends", "output_splits await"):
        ep_grouped_mm(case.inputs(D, torch.float32)[me], weights(me, torch.float32), sent, case.received(me), case.rank_major(me), group)


CHECKS = (
    check_public_blocks, check_saved, check_one_gradient, check_mx_gradient, check_kept_weight, check_nan, check_ranks_disagree,
)  # fmt: skip


def rank_main(rank: int, world: int) -> None:
    check_bits(rank, world, None)
    for check in CHECKS:
        check(rank, world, None)
    chains.check_wire(one_call, rank, world, None, resolve_recipe(None))
    for check_chain, recipe in itertools.product(chains.CHECKS, RECIPES.values()):
        check_chain(one_call, rank, world, None, recipe)
    if world == 4:  # two EP groups of two, one by itself and one by its name
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = halves[rank // 2]
        case = make_case("uneven", 2, L)
        want = run(layered, case, rank % 2, torch.float32, mine, resolve_recipe(None))
        for group in (mine, mine.group_name):
            assert_all_same(run(one_call, case, rank % 2, torch.float32, group, resolve_recipe(None)), want, "half")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_ranks(world: int) -> None:
    run_ranks(rank_main, world, timeout=240)


# ---- one rank ----

ROWS = 45
COUNTS = torch.tensor([5, 40])


@pytest.fixture
def group(one_rank: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def one_rank_leaves(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(ROWS, D, generator=generator), torch.randn(L, N, D, generator=generator)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()


def results(function: Callable, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    x, w = one_rank_leaves(dtype, seed)
    out = function(x, w)
    out.square().sum().backward()
    return [out.detach(), x.grad, w.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=lambda recipe: f"{recipe.name} {recipe.scaling_mode.value}")
def test_alone_without_torch_distributed(recipe: Recipe, dtype: torch.dtype) -> None:
    plan = ExchangePlan.from_counts(COUNTS, None)
    got = results(lambda x, w: ep_grouped_mm(x, w, [ROWS], [ROWS], COUNTS, "", recipe), dtype)
    assert_all_same(got, results(lambda x, w: by_plan(x, w, plan, recipe), dtype), recipe.name)


def call(x: torch.Tensor, w: torch.Tensor, recipe: str | None = None) -> torch.Tensor:
    return ep_grouped_mm(x * 1.0, w, [ROWS], [ROWS], COUNTS, recipe=recipe) * 0.5


@pytest.mark.parametrize("name", list(RECIPES))
def test_in_one_graph(name: str, group: None) -> None:
    """Compiled whole, with other values, under a checkpoint and inside of one: the bits of eager."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return call(x, w, name)

    def over(f: Callable) -> Callable:
        return lambda *args: checkpoint(f, *args, use_reentrant=False)

    whole = torch.compile(function, backend="aot_eager", fullgraph=True)
    for what, compiled in {
        "one graph": whole,
        "checkpoint over the graph": over(whole),
        "checkpoint inside the graph": torch.compile(over(function), backend="aot_eager", fullgraph=True),
        "dynamic shapes": torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True),
    }.items():
        for seed in (0, 1):
            assert_all_same(results(compiled, torch.bfloat16, seed), results(function, torch.bfloat16, seed), f"{name} {what}")


def test_graph_breaks_before_and_after_the_call(group: None) -> None:
    """The call takes and returns plain tensors, so a graph may end right before or after it."""

    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        out = ep_grouped_mm(x, w, [ROWS], [ROWS], COUNTS)
        torch._dynamo.graph_break()
        return out + 1

    assert_all_same(results(torch.compile(broken, backend="aot_eager"), torch.float32), results(broken, torch.float32), "breaks")


def compiled_on_ranks(rank: int, world: int) -> None:
    """One graph whose splits change from step to step."""
    torch._dynamo.reset()

    def step(x: torch.Tensor, w: torch.Tensor, ins: list[int], outs: list[int], counts: torch.Tensor) -> torch.Tensor:
        return ep_grouped_mm(x, w, ins, outs, counts)

    graph = torch.compile(step, backend="aot_eager", fullgraph=True)
    for seed, kind in enumerate(["random", "uneven", "starved"]):
        case = make_case(kind, world, L, rows=30 + 3 * seed, seed=seed)
        found = []
        for function in (graph, step):
            x, w = case.inputs(D, torch.float32)[rank].requires_grad_(), weights(rank, torch.float32)
            with sent_bytes() as calls:
                out = function(x, w, case.sent(rank), case.received(rank), case.rank_major(rank))
                out.square().sum().backward()
            assert len(calls) == 4
            found.append([out.detach(), x.grad, w.grad])
        assert_all_same(found[0], found[1], kind)


def test_one_graph_on_two_ranks_with_changing_splits() -> None:
    run_ranks(compiled_on_ranks, 2)

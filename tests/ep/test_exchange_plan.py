"""ExchangePlan: splits and counts that agree on every rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import run_ranks
from tests.truth import KINDS, Case, assert_same, make_case, raises_naming, sent_bytes

from mxep.ep import ExchangePlan
from mxep.ep.blocks import combine, dispatch, permute, unpermute
from mxep.mx import MXTensor
from mxep.recipe import RECIPES, resolve_recipe


def check(case: Case, me: int, group: dist.ProcessGroup) -> None:
    with sent_bytes() as calls:
        plan = ExchangePlan.from_counts(case.counts[me], group)
    assert len(calls) == 1, "one small exchange"
    assert (plan.ep_degree, plan.num_local_experts, plan.group_name) == (case.world, case.local, group.group_name)
    assert (plan.input_splits, plan.output_splits) == (case.sent(me), case.received(me))
    assert all(type(n) is int for n in plan.input_splits + plan.output_splits)
    assert plan.num_tokens_per_expert_received.tolist() == case.rank_major(me).tolist()
    assert plan.num_tokens_per_expert_received.dtype == torch.int64


def round_trip(case: Case, me: int, group: dist.ProcessGroup | None) -> None:
    """The exchange and the permutation without a GEMM return every row to its position, with the recipe's rounding alone."""
    plan = ExchangePlan.from_counts(case.counts[me], group)
    for recipe in RECIPES.values():
        x = case.inputs(64, torch.float32)[me].requires_grad_()
        permuted = permute(dispatch(x, plan, recipe), plan, recipe)
        assert permuted.padded_shape == (sum(plan.output_splits) + 1, 64)
        assert permuted.offsets.tolist() == permuted.padded_counts.cumsum(0).tolist()
        out = combine(unpermute(permuted.rows, permuted), plan, recipe)
        values = x.detach()
        if recipe.dispatch == "mxfp8" or recipe.quantizes_in_permute:
            values = torch.ops.mxep.dequantize(*torch.ops.mxep.quantize(values, recipe.scaling_mode.value), torch.float32)
        assert_same(out.detach(), values, recipe.name)
        out.backward(torch.ones_like(out))  # 1 is representable
        assert_same(x.grad, torch.ones_like(values), recipe.name)


def rank_main(rank: int, world: int) -> None:
    groups = [(rank, world, dist.group.WORLD)]
    if world == 4:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups.append((rank % 2, 2, halves[rank // 2]))
    for me, size, group in groups:
        for seed, kind in enumerate(KINDS):
            check(make_case(kind, size, 3, seed=seed), me, group)
            check(Case(make_case(kind, size, 3, seed=seed).counts.int()), me, group)
        for kind in ("uneven", "starved"):
            round_trip(make_case(kind, size, 2), me, group)
    with raises_naming("ExchangePlan", f"{world + 1} experts", f"EP group of {world}", "multiple"):
        ExchangePlan.from_counts(torch.ones(world + 1, dtype=torch.int64), dist.group.WORLD)
    with raises_naming("counts exchange", f"this is rank {rank}", str([world * (r + 1) for r in range(world)]), "want one number"):
        ExchangePlan.from_counts(torch.ones(world * (rank + 1), dtype=torch.int64), dist.group.WORLD)
    for counts in (torch.ones(world), torch.ones(world, 1, dtype=torch.int64), torch.ones(world, dtype=torch.int16), [1] * world):
        with raises_naming("ExchangePlan", "counts is", "int64", "(E,)"):
            ExchangePlan.from_counts(counts, dist.group.WORLD)


@pytest.mark.parametrize("world", [2, 4])
def test_plans_of_groups(world: int) -> None:
    run_ranks(rank_main, world)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_exchanges_nothing(recipe: str) -> None:
    """Outputs of its blocks may be changed in place: they are not the inputs."""
    with sent_bytes() as calls:
        counts = torch.tensor([3, 0, 5])
        plan = ExchangePlan.from_counts(counts, dist.group.WORLD)
        assert (plan.group_name, plan.ep_degree, plan.input_splits, plan.output_splits) == ("", 1, [8], [8])
        counts += 1
        assert plan.num_tokens_per_expert_received.tolist() == [3, 0, 5]
        for block in (dispatch, combine):
            rows = torch.randn(8, 32, requires_grad=True)
            out = block(rows, plan, resolve_recipe(recipe))
            if isinstance(out, torch.Tensor) and not isinstance(out, MXTensor):
                out.mul_(2)
                out.sum().backward()
                assert rows.grad is not None
                torch.testing.assert_close(rows.grad, torch.full_like(rows, 2.0))
    assert not calls


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_one_rank_needs_no_group(counts: list[int]) -> None:
    with sent_bytes() as calls:
        plan = ExchangePlan.from_counts(torch.tensor(counts), None)
    assert calls == []
    assert plan != dataclasses.replace(plan), "plans compare by identity, since they have a tensor"
    assert len({plan, plan}) == 1
    assert (plan.group_name, plan.ep_degree, plan.num_local_experts) == ("", 1, len(counts))
    assert plan.input_splits == plan.output_splits == [sum(counts)]
    assert plan.num_tokens_per_expert_received.tolist() == counts
    round_trip(Case(torch.tensor([counts])), 0, None)


def test_rows_that_do_not_fit_the_plan() -> None:
    plan = ExchangePlan.from_counts(torch.tensor([2, 3]), None)
    with raises_naming("4", "5", "rows"):
        permute(dispatch(torch.randn(4, 32), plan, resolve_recipe("hp")), plan, resolve_recipe("hp"))

"""Dispatch into the experts' places on virtual and gloo ranks: every byte of dispatch and permute, and who is told what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import KINDS, Case, assert_same, exchange, make_case, permutation, raises_naming
from tests.virtual import run_virtual

from mxep import MXTensor, reference
from mxep.ep import runs
from mxep.ep.placed import dispatch_placed
from mxep.ep.plan import ExchangePlan
from mxep.recipe import RECIPES, Recipe, ScaleCalculationMode

D, L = 96, 3
RECIPE = RECIPES["mxfp8_wgrad_with_hp"]


def plan_of(case: Case, me: int, name: str) -> ExchangePlan:
    return ExchangePlan(name, case.world, case.local, case.sent(me), case.received(me), case.rank_major(me))


def check_bytes(me: int, world: int, name: str) -> None:
    """Against exchange and permutation by walking, of every rank's quantised rows."""
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, L, rows=70, seed=seed)
        for multiple, mode, dtype in ((32, "rceil", torch.bfloat16), (128, "floor", torch.float32)):
            recipe = Recipe("as asked", scaling_mode=ScaleCalculationMode(mode), group_size_multiple_of=multiple)
            inputs = case.inputs(D, dtype)
            bytes_of = [torch.cat([part.view(torch.uint8) for part in reference.quantize(rows, mode)], 1) for rows in inputs]
            came = exchange(bytes_of, case.table)[me]
            num_places = -(-(came.shape[0] + L * multiple) // multiple) * multiple
            row_map, _, ends = permutation(case.rank_major(me).tolist(), world, L, multiple, num_places)
            want = came.new_zeros(num_places, came.shape[1])
            for place, row in enumerate(row_map):
                if row >= 0:
                    want[place] = came[row]
            got, offs = dispatch_placed(inputs[me], plan_of(case, me, name), recipe)
            assert isinstance(got, MXTensor)
            assert (got.dtype, offs.tolist()) == (dtype, list(ends))
            assert_same(torch.cat([part.contiguous().view(torch.uint8) for part in (got.qdata, got.scale)], 1), want, f"{kind} {multiple}")


@pytest.mark.parametrize(("world", "least_chunk_bytes"), [(1, 1), (2, 8 << 20), (3, 2000), (4, 1)])
def test_bytes_over_symmetric_memory(world: int, least_chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk, in as many as there are experts, and between; memory is full of NaN before."""
    monkeypatch.setattr(runs, "LEAST_CHUNK_BYTES", least_chunk_bytes)
    run_virtual(check_bytes, world)


def bytes_on_ranks(rank: int, world: int) -> None:
    check_bytes(rank, world, dist.group.WORLD.group_name)


def test_bytes_over_torch_distributed() -> None:
    run_ranks(bytes_on_ranks, 2)


def test_bytes_alone() -> None:
    check_bytes(0, 1, "")


def wrong_counts(me: int, world: int, name: str) -> None:
    """The same error on every rank, though one alone is wrong; the next call works."""
    case = make_case("balanced", world, L)
    plan = plan_of(case, me, name)
    rows, counts = case.inputs(D, torch.bfloat16)[me], plan.num_tokens_per_expert_received.clone()
    if me == 1:
        counts[0] += 1
        counts[L] -= 1
    with raises_naming("dispatch_placed: rank 1 has num_tokens_per_expert", "rank-major"):
        dispatch_placed(rows, replace(plan, num_tokens_per_expert_received=counts), RECIPE)
    dispatch_placed(rows, plan, RECIPE)


def test_counts_of_one_rank_that_do_not_fit() -> None:
    run_virtual(wrong_counts, 2)


def test_rows_that_do_not_fit() -> None:
    plan = plan_of(make_case("balanced", 1, L), 0, "")
    for rows in (torch.zeros(24, D, dtype=torch.float16), torch.zeros(24, 40)):
        with raises_naming("dispatch_placed"):
            dispatch_placed(rows, plan, RECIPE)

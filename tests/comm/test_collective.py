"""The collective transport: bytes of any dtype, groups, and an error on every rank when the ranks' splits disagree."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import KINDS, assert_same, exchange, make_case, raises_naming, sent_bytes

from mxep import a2a_combine_hp_fwd_mxfp8_bwd, a2a_dispatch_mxfp8_fwd_hp_bwd, to_mxfp8_a2a_dequant
from mxep.comm import close_transports, exchange_counts, exchange_rows, gather_all_rows, group_name_of, resolve_group

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64)


BLOCKS = {
    "exchange_rows": lambda x, outs, ins: exchange_rows(x, outs, ins, dist.group.WORLD.group_name),
    "dispatch": a2a_dispatch_mxfp8_fwd_hp_bwd,
    "combine": a2a_combine_hp_fwd_mxfp8_bwd,
    "combine_plain": lambda x, outs, ins: a2a_combine_hp_fwd_mxfp8_bwd(x, outs, ins, mxfp8_bwd=False),
    "dequant": to_mxfp8_a2a_dequant,
}


def check(me: int, world: int, group: dist.ProcessGroup) -> None:
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, 2, seed=seed)
        splits = case.received(me), case.sent(me)
        for dtype in DTYPES:
            inputs = [(rows * 100).to(torch.uint8).view(dtype) for rows in case.inputs(48, torch.float32)]
            want = exchange([rows.view(torch.uint8) for rows in inputs], case.table)[me].view(dtype)
            got = exchange_rows(inputs[me], *splits, group.group_name)
            assert_same(got, want, f"{kind} {dtype}")
            assert_same(torch.ops.mxep.exchange_rows(inputs[me], *splits, group.group_name), want, "the operator")
        rows = case.inputs(8, torch.float32)
        assert_same(exchange_rows(rows[me].t().contiguous().t(), *splits, group.group_name), exchange(rows, case.table)[me], "strided")
        assert exchange_counts(case.counts[me], group).tolist() == case.rank_major(me).tolist()
        assert exchange_counts(case.counts[me].repeat_interleave(2)[::2], group).tolist() == case.rank_major(me).tolist()


def never_an_alias(me: int, world: int) -> None:
    rows = torch.arange(world * 2.0)[:, None]
    splits = [2 * world if r == me else 0 for r in range(world)]
    out = exchange_rows(rows, splits, splits, dist.group.WORLD.group_name)
    assert torch.equal(out, rows)
    out.zero_()
    assert rows.sum() > 0


def no_rows_on_the_last_rank(me: int, world: int) -> None:
    """The last rank has no rows, and backward gets one expanded value: a tensor without rows is contiguous with any strides."""
    sent = [1] * (world - 1) + [0]
    splits = ([0] * world, [0] * world) if me == world - 1 else (sent, sent)
    for block, call in BLOCKS.items():
        x = torch.ones(sum(splits[1]), 64, requires_grad=True)
        out = call(torch.ones(()).expand(x.shape) if block == "exchange_rows" else x, *splits)
        if block != "exchange_rows":
            out.sum().backward()
            assert torch.equal(x.grad, x)
    assert gather_all_rows(torch.ones(()).expand(0, 64), [0] * world, dist.group.WORLD.group_name).shape == (0, 64)


def rank_main(rank: int, world: int) -> None:
    world_group = dist.group.WORLD
    check(rank, world, world_group)
    never_an_alias(rank, world)
    no_rows_on_the_last_rank(rank, world)
    x = torch.randn(2 * world, 64, requires_grad=True)
    for call in list(BLOCKS.values())[1:]:  # equal splits need no swap
        call(x, [2] * world, [2] * world).sum().backward()
    assert resolve_group("x", world_group.group_name) is world_group
    assert group_name_of("x", None) == group_name_of("x", world_group) == world_group.group_name
    if world == 4:
        halves = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        mine, me = (halves[0], rank // 3) if rank in (0, 3) else (halves[1], rank - 1)
        check(me, 2, mine)
        other = halves[1] if rank in (0, 3) else halves[0]  # new_group gives ranks outside of it a marker, not a group
        with raises_naming("here", "ProcessGroup", "WORLD"):
            group_name_of("here", other)
    with raises_naming("here", "'nobody'", "pass"):
        resolve_group("here", "nobody")


def test_a_group_of_one_sends_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with sent_bytes() as calls:
            never_an_alias(0, 1)
            for rows in (torch.randn(3, 64), torch.randn(64, 3).t()):
                for call in BLOCKS.values():
                    got, want = call(rows, [3], [3]), call(rows.clone(), [3], [3])
                    assert torch.equal(got, want) if type(got) is torch.Tensor else torch.equal(got.dequantize(), want.dequantize())
            for splits in ([2], [-1], [3, 0], []):
                with pytest.raises(ValueError, match=r"input_splits|row counts"):
                    exchange_rows(torch.randn(3, 64), [3], splits, dist.group.WORLD.group_name)
        assert not calls
    finally:
        close_transports()
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_and_groups(world: int) -> None:
    run_ranks(rank_main, world)


def disagreeing_rank(rank: int, world: int) -> dict[str, tuple[str, float]]:
    """Every rank's (message, seconds) per block and fault; the last rank alone is wrong."""
    odd = rank == world - 1
    fine = [2] * world
    faults = {
        "sends more": (2 * world + 1, fine, [*fine[:-1], 3] if odd else fine),
        "expects more": (2 * world, [3, *fine[1:]] if odd else fine, fine),
        "does not add up": (2 * world, fine, [1, *fine[1:]] if odd else fine),
        "too short": (2 * world, fine[1:] if odd else fine, fine),
        "too long": (2 * world, fine, [*fine, 0] if odd else fine),
        "negative": (2 * world, fine, [-1, 5, *fine[2:]] if odd else fine),
    }
    seen = {}
    for block, call in BLOCKS.items():
        for fault, (num_rows, outs, ins) in faults.items():
            num_rows = num_rows if odd or fault != "sends more" else 2 * world
            started = time.monotonic()
            with pytest.raises(ValueError) as caught:
                call(torch.randn(num_rows, 64), outs, ins)
            seen[f"{block}, {fault}"] = (str(caught.value), time.monotonic() - started)
        width = 96 if odd else 64
        with pytest.raises(ValueError) as caught:
            call(torch.randn(2 * world, width), fine, fine)
        seen[f"{block}, width"] = (str(caught.value), 0.0)
    x = torch.randn(2 * world, 64)
    assert len(exchange_rows(x, fine, fine, dist.group.WORLD.group_name)) == 2 * world, "the group still works"
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_disagreement_is_an_error_on_every_rank(world: int) -> None:
    ranks = run_ranks(disagreeing_rank, world)
    assert len(ranks[0]) == len(BLOCKS) * 7
    for case in ranks[0]:
        for rank, seen in enumerate(ranks):
            message, seconds = seen[case]
            assert seconds < 10, case
            assert f"this is rank {rank} of {world}" in message, case
            assert f"rank {world - 1}" in message, "the error names the rank that is wrong"
            assert "want" in message, case


def collectives_of_compiled_calls(rank: int, world: int) -> list[int]:
    """How many collectives each call made, whether torch traced it or not."""

    def received(tokens: torch.Tensor) -> torch.Tensor:
        return exchange_counts(tokens.new_full((world,), tokens.shape[0], dtype=torch.int64), dist.group.WORLD)

    compiled, made = torch.compile(received, backend="eager", dynamic=False), [0]
    for sizes in ((8, 8), (8, 16), (24, 8)):
        assert compiled(torch.zeros(sizes[rank])).tolist() == list(sizes)
        made.append(dist.group.WORLD._get_sequence_number_for_group())
    return [after - before for before, after in pairwise(made)]


def test_tracing_runs_no_collective() -> None:
    """torch runs operators of constants while it traces, also collectives: a rank that traced alone would wait for ever."""
    assert run_ranks(collectives_of_compiled_calls, 2, timeout=60) == [[2, 2, 2]] * 2  # one of the two checks the numbers of experts


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with raises_naming("here", "not initialised", "init_process_group", "torchrun"):
        group_name_of("here", None)
    with raises_naming("all-to-all", "'nobody'"):
        exchange_rows(torch.randn(2, 2), [2], [2], "nobody")

"""The fused layer over symmetric memory, on virtual ranks: the bits of the collective dispatcher, buffers, saved bytes, errors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fused.test_fused_ranks import KINDS, PAIRS, batch, layer
from tests.moe_truth import ACTIVATIONS, C, D, E, H, draw, walk
from tests.truth import assert_same, raises_naming
from tests.virtual import collective_group, run_virtual, symmetric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxep.comm import ExchangeError
from mxep.fused import collective_dispatcher, symmetric_dispatcher
from mxep.fused.dispatcher import DispatchSpec
from mxep.fused.make_dispatcher import make_dispatcher
from mxep.grouped_mm.wgrad_gemm import wgrad_gemm
from mxep.moe import FusedMoE, RuntimeEPConfig, fused_moe, saved_bytes
from mxep.ops.routing.index_reference import MODES
from mxep.recipe import RECIPES, ScaleCalculationMode
from mxep.shapes import record_bytes, round_up

FUZZED = int(os.environ.get("MXEP_FUZZED_ROUTINGS", "300")) // 4  # layers; sizes, routing and options of each are drawn


def gather_all(rows: Tensor, splits: Sequence[int], group_name: str) -> Tensor:
    """`gather_all_rows` without a process group."""
    return torch.ops.mxep.exchange_rows(rows.repeat(len(splits), 1), list(splits), [len(rows)] * len(splits), group_name)


@pytest.fixture(autouse=True)
def gather_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_dispatcher, "gather_all_rows", gather_all)


def spread(moe: FusedMoE, me: int, world: int, name: str) -> FusedMoE:
    """This rank's part of a whole layer."""
    local = moe.config.num_experts // world
    for key, parameter in list(moe.experts.named_parameters(recurse=False)):
        setattr(moe.experts, key, nn.Parameter(parameter.detach()[me * local : (me + 1) * local].clone()))
    moe.group = SimpleNamespace(group_name=name)  # type: ignore[assignment]
    return moe


def assert_bits(moe: FusedMoE, name: str, plain: str, x: Tensor, dy: Tensor, what: str) -> None:
    """y and every gradient, over symmetric memory and over the collective dispatcher."""
    results = []
    for group in (name, plain):
        moe.group = SimpleNamespace(group_name=group)  # type: ignore[assignment]
        results.append(walk(moe, x, dy))
    for key, got in results[0].items():
        assert_same(got, results[1][key], f"{what} {key}")


def every_mode(me: int, world: int, name: str) -> None:
    """Every pair of modes and every routing, with exchanges in MXFP8 and in high precision."""
    plain = ""
    for at, kind in enumerate(KINDS):
        cases = (("mxfp8_wgrad_with_hp", torch.bfloat16, "mxfp8"), ("hp", torch.float32, "hp"), ("hp", torch.bfloat16, "hp"))
        for recipe, dtype, wire in cases if at == 0 else cases[:2]:
            x, dy = batch(world, kind, dtype)
            moe = spread(layer(recipe, dtype, kind, expert_biases=True), me, world, name)
            plain = plain or collective_group(name)
            for runtime in PAIRS if at == 0 else PAIRS[at % 4 :: 4]:
                moe.runtime = RuntimeEPConfig(
                    runtime.dispatch, runtime.combine, combine_forward=wire if at % 2 else "hp", dispatch_backward=wire
                )
                assert_bits(moe, name, plain, x[me], dy[me], f"{kind} {recipe} {runtime}")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.usefixtures("poison")
def test_the_bits_of_the_collective_dispatcher(world: int) -> None:
    run_virtual(every_mode, world)


def every_recipe(me: int, world: int, name: str) -> None:
    """Recipes, options of what is saved or recomputed, calls without gradients, and `fused_moe` with a group."""
    x, dy = batch(world, "random", torch.bfloat16)
    for recipe in RECIPES:
        moe = spread(layer(recipe, torch.bfloat16, "random"), me, world, name)
        plain = collective_group(name)
        for keeps, redispatches in ((True, False), (False, True), ("mxfp8", False), (False, False), (True, True)):
            moe.runtime = RuntimeEPConfig("rank_dedup", "all_to_all", keep_first_product=keeps, redispatch_x_in_backward=redispatches)
            assert_bits(moe, name, plain, x[me], dy[me], f"{recipe} {keeps} {redispatches}")
        moe.runtime, moe.group = RuntimeEPConfig(), SimpleNamespace(group_name=name)  # type: ignore[assignment]
        want = walk(moe, x[me], dy[me])
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                y = moe(x[me])
            assert_same(y, want["y"])
        leaf = x[me].clone().requires_grad_()
        checkpoint(moe, leaf, use_reentrant=False).backward(dy[me])  # type: ignore[union-attr]
        assert_same(leaf.grad, want["dx"])
        own = {key: value.detach() for key, value in moe.named_parameters()}
        w1 = torch.cat((own["experts.w1"], own["experts.w3"]), 1)
        assert_same(fused_moe(x[me], own["router.gate.weight"], w1, None, own["experts.w2"], None, C, E, group=name, recipe=recipe), y)
        for parameter in moe.parameters():
            parameter.requires_grad_(parameter is moe.experts.w2)
        moe(x[me]).backward(dy[me])  # backward returns neither rows nor scores


def test_recipes_and_recomputation() -> None:
    run_virtual(every_recipe, 2)


def three_layers(me: int, world: int, name: str, again: bool) -> list[tuple[int, int, int]]:
    """Four steps of three layers in sequence: the number of buffers, those leased after forward, and those leased after backward."""
    layers = [spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), me, world, name) for _ in range(3)]
    for moe in layers:
        moe.group = SimpleNamespace(group_name=name)  # type: ignore[assignment]
    pool, found = symmetric(name)._pool, []

    def leased() -> int:
        return len(pool.buffers) - len(pool.free())

    for step in range(4):
        y = torch.randn(40, D, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        for moe in layers:
            out = checkpoint(moe, y, use_reentrant=False) if again else moe(y)
            assert isinstance(out, Tensor)
            y = y + out
        kept = leased()
        y.float().square().sum().backward()
        found.append((len(pool.buffers), kept, leased()))
    return found


@pytest.mark.parametrize("again", [False, True])
def test_steps_release_their_receive_buffers(again: bool) -> None:
    """Reference counts alone release them: if a buffer waited for the garbage collector, the next step would need one more."""
    gc.disable()
    try:
        found = run_virtual(three_layers, 2, again)
    finally:
        gc.enable()
    buffers = found[0][0][0]
    assert all(steps == [(buffers, 0 if again else 3, 0)] * 4 for steps in found), found


def fuzzed(me: int, world: int, name: str, seed: int) -> None:
    """Sizes, routing and options drawn from a seed; T differs between ranks, and some have no tokens."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def one_of(values: Sequence[Any]) -> Any:
        return values[integer(0, len(values) - 1)]

    local = integer(1, 4)
    count = local * world
    runtime = one_of(PAIRS)
    runtime = RuntimeEPConfig(
        runtime.dispatch,
        runtime.combine,
        combine_forward=one_of(("hp", "mxfp8")),
        dispatch_backward=one_of(("hp", "mxfp8")),
        keep_first_product=one_of((True, "mxfp8", False)),
        redispatch_x_in_backward=one_of((True, False)),
    )
    changes = {"num_experts": count, "top_k": integer(1, min(count, 5)), "hidden": 32, "dim": 32 * integer(1, 3), "renormalize": False}
    recipe, dtype = one_of([*RECIPES]), one_of((torch.bfloat16, torch.float32))
    moe = layer(recipe, dtype, "random", **one_of([*ACTIVATIONS.values()]), **changes)
    bias = draw(generator, count) * one_of((0, 1, 10))
    moe.expert_bias.copy_(bias)
    tokens = [integer(0, 30) * (integer(0, 3) > 0) for _ in range(world)]
    x, dy = ([draw(generator, n, changes["dim"]).to(dtype) for n in tokens] for _ in range(2))
    least = max(round_up(sum(tokens), 32), 32)
    scratch = one_of(("auto", None, least, least + 32 * integer(0, 4)))  # the two dispatchers get different numbers of chunks
    spread(moe, me, world, name).runtime = replace(runtime, scratch_rows=scratch, cpu_sync_on_runtime=one_of((True, False)))
    assert_bits(moe, name, collective_group(name), x[me], dy[me], f"seed {seed}, scratch {scratch}")


def test_fuzzed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(FUZZED):
        monkeypatch.setattr(
            symmetric_dispatcher, "_FILLED", (0.0, 0.5, 2.0)[seed % 3]
        )  # whole regions are copied always, by the default rule, or never
        run_virtual(fuzzed, (1, 2, 3, 5)[seed % 4], seed)


def different_numbers_of_chunks(me: int, world: int, name: str) -> None:
    """All tokens choose the first rank's experts: it has several chunks, the other ranks one, and all dispatch again in backward."""
    x, dy = batch(world, "random", torch.bfloat16)
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), me, world, name)
    moe.expert_bias[: E // world] = 10
    for key in ("w1", "w3"):
        getattr(moe.experts, key).requires_grad_(False)
    rows = max(round_up(sum(map(len, x)), 32), E // world * 32)  # the padding of experts without tokens fits into one chunk
    results = []
    for group, counted in ((name, True), (collective_group(name), False)):
        moe.group = SimpleNamespace(group_name=group)  # type: ignore[assignment]
        for scratch in (rows, None):
            moe.runtime = RuntimeEPConfig(redispatch_x_in_backward=True, scratch_rows=scratch, cpu_sync_on_runtime=counted)
            leaf = x[me].clone().requires_grad_()
            results.append(torch.autograd.grad(moe(leaf), [leaf, moe.experts.w2], dy[me]))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert_same(got, want)


def test_ranks_with_different_numbers_of_chunks() -> None:
    run_virtual(different_numbers_of_chunks, 2)


def odd_width(me: int, world: int, name: str) -> None:
    """Rows that are no multiple of 16 bytes, in high precision."""
    generator = torch.Generator().manual_seed(me)
    moe = spread(layer("hp", torch.bfloat16, "random", dim=37, hidden=11), me, world, name)
    plain = collective_group(name)
    for runtime in PAIRS[::4]:
        moe.runtime = runtime
        assert_bits(moe, name, plain, *(draw(generator, 9 + me, 37).bfloat16() for _ in range(2)), f"{runtime}")


def test_an_odd_width() -> None:
    run_virtual(odd_width, 2)


def many_in_flight(me: int, world: int, name: str) -> list[int]:
    """Layers of different sizes, several forwards before backwards in reverse order; no memory is added after the first round."""
    sizes, layers = [], []
    for at, changes in enumerate(({}, {"dim": 128}, {"top_k": 1, "num_experts": 4})):
        moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random", **changes), me, world, name)
        generator = torch.Generator().manual_seed(10 * at + me)
        x, dy = (draw(generator, 20 + 9 * me, changes.get("dim", D)).bfloat16() for _ in range(2))
        layers.append((moe, x, dy, walk(moe, x, dy)))
    for _ in range(3):
        pending = []
        for moe, x, dy, want in layers * 2:
            leaf = x.clone().requires_grad_()
            pending.append((moe, leaf, moe(leaf), dy, want))
        for moe, leaf, y, dy, want in pending[::-1]:
            grads = torch.autograd.grad(y, [leaf, *moe.parameters()], dy)
            for got, (key, value) in zip((y.detach(), *grads), want.items(), strict=True):
                assert_same(got, value, key)
        del pending, moe, leaf, y, dy, want, grads, got, value
        sizes.append(symmetric(name).nbytes())
    return sizes


def test_nothing_that_a_forward_saved_is_overwritten() -> None:
    for sizes in run_virtual(many_in_flight, 2):
        assert len(set(sizes)) == 1


def saved(me: int, world: int, name: str) -> None:
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), me, world, name)
    generator = torch.Generator().manual_seed(5)
    tokens = [draw(generator, 160, D).bfloat16() for _ in range(world)]
    rows, local = world * 160, E // world
    received = sum(int((moe.router(x).experts // local == me).sum()) for x in tokens)
    for runtime, expert_rows in (
        (RuntimeEPConfig(scratch_rows=None), rows * min(C, local) + local * 32),  # the worst case
        (RuntimeEPConfig(), rows),  # rows for all tokens at one expert, which is more than the balanced share and its spare rows
        (RuntimeEPConfig(cpu_sync_on_runtime=True), None),
    ):
        moe.runtime = runtime
        found = saved_bytes(moe(tokens[me]))
        assert found["dispatched tokens"] >= rows * record_bytes(D), "a region for the tokens of every rank"
        assert found["routing"] == rows * C * (1 + 4), "one byte for each choice of all tokens, and their scores"
        if expert_rows is None:
            assert received <= found["first product"] / (2 * H * 2) <= received + local * 32, "the rows that were received, padded"
        else:
            assert found["first product"] == expert_rows * 2 * H * 2


def test_saved_bytes() -> None:
    run_virtual(saved, 4)


_texts: dict[int, str] = {}
_both = threading.Barrier(2)


def disagree(me: int, world: int, name: str) -> None:
    """Options that differ between ranks raise the same error on every rank, and the group stays usable."""
    x, dy = batch(world, "random", torch.float32)
    moe = spread(layer("hp", torch.float32, "random"), me, world, name)
    want = walk(moe, x[me], dy[me])
    moe.runtime = RuntimeEPConfig(combine="all_to_all" if me else "rank_dedup")
    with raises_naming("fused_moe", "RuntimeEPConfig and recipe", "give every rank") as caught:
        moe(x[me])
    _texts[me] = str(caught.value)
    _both.wait(20)
    assert len(set(_texts.values())) == 1
    moe.runtime = RuntimeEPConfig()
    for option, value, word in (("scaling_mode", ScaleCalculationMode.FLOOR, "by number"), ("group_size_multiple_of", 128, "_multiple_")):
        moe.experts.recipe = replace(RECIPES["hp"], **{option: value}) if me else "hp"
        with raises_naming("fused_moe", word, "give every rank"):
            moe(x[me])
    moe.experts.recipe = "hp"
    with raises_naming("fused_moe", "top_k", "rank 1 has 1, rank 0 2"):
        weights = torch.zeros(E, D), torch.zeros(E // world, 64, D), None, torch.zeros(E // world, D, 32), None
        fused_moe(x[me], *weights, 2 - me, E, group=name, recipe="hp")
    with raises_naming("3 experts on an EP group of 2"):
        fused_moe(x[me], torch.zeros(3, D), torch.zeros(1, 64, D), None, torch.zeros(1, D, 32), None, 1, 3, group=name)
    with raises_naming("fused_moe", "rank 1 has 2, rank 0 4: bytes of a value"):
        moe(x[me].bfloat16() if me else x[me])
    for recorded, got in ((True, "scores or router"), (False, "nothing")):
        text = f"rank 1 has {got}, rank 0 tokens, scores or router: what wants a gradient"
        with raises_naming("fused_moe", text), torch.set_grad_enabled(recorded or not me):
            moe(x[me].clone().requires_grad_(not me))
    for key, got in walk(moe, x[me], dy[me]).items():
        assert_same(got, want[key], key)


def test_ranks_that_disagree() -> None:
    run_virtual(disagree, 2)


_rank, _rank_0_is_done = threading.local(), threading.Event()


def _fails_on_rank_1(*arguments: Any) -> Tensor:
    if _rank.me == 1:
        assert _rank_0_is_done.wait(20), "rank 1 had sent its rows to rank 0 before"
        raise RuntimeError("no memory")
    return wgrad_gemm(*arguments)


def fails_in_backward(me: int, world: int, name: str) -> None:
    """A rank fails after it has sent its rows in backward: the next exchange of the other ranks raises at once."""
    _rank.me = me
    x, dy = batch(world, "random", torch.float32)
    moe = spread(layer("hp", torch.float32, "random"), me, world, name)
    moe.runtime = RuntimeEPConfig(scratch_rows=None)  # one chunk: rows have been sent when the gradients of its weights are computed
    y = moe(x[me].requires_grad_())
    if me == 0:
        y.backward(dy[me])
        _rank_0_is_done.set()
    else:
        with pytest.raises(RuntimeError, match="no memory"):
            y.backward(dy[me])
        gc.collect()  # frees the frames in the traceback
    del y
    with pytest.raises(ExchangeError, match="rank 1 failed outside of an exchange"):
        moe(x[me])


def test_a_failure_in_backward_ends_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.moe.expert_mlp.wgrad_gemm", _fails_on_rank_1)
    run_virtual(fails_in_backward, 2)


def rows_off_rank(me: int, world: int, name: str) -> None:
    """Rows that a rank sends to others, as the network profiler counts them: the same for both dispatchers if they send the same rows."""
    generator = torch.Generator().manual_seed(3)
    chosen = [torch.rand(20 + 3 * rank, E, generator=generator).topk(C).indices for rank in range(world)]
    plain = collective_group(name)
    for mode in MODES:
        spec, found = DispatchSpec(E, C, D, 4, 0, (mode, mode), 32), []
        for group in (name, plain):
            dispatcher, _ = make_dispatcher(spec, chosen[me], torch.ones(len(chosen[me]), C), torch.ones(len(chosen[me]), D), "", group)
            found.append((dispatcher.dispatch.rows_off_rank("to_experts"), dispatcher.dispatch.rows_off_rank("to_tokens")))
        assert found[0][0] == found[1][0]
        assert found[0][1] == found[1][1] if mode != "all_ranks" else found[0][1] < found[1][1]  # empty sums are not sent


def test_count_of_rows_sent_to_other_ranks() -> None:
    run_virtual(rows_off_rank, 4)

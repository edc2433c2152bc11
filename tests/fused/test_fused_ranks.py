"""The fused layer on gloo ranks: modes, routings and recipes against float64 on all tokens at once, bytes sent, errors on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.moe_truth import C, D, E, draw, error, make, truth, walk
from tests.poison import poisoned_memory
from tests.ranks import run_ranks
from tests.truth import assert_same, raises_naming, sent_bytes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mxep.moe import FusedMoE, MoE, RuntimeEPConfig, fused_moe
from mxep.parallel import apply_fsdp, apply_mxfp8_expert_parallel, build_meshes
from mxep.recipe import RECIPES
from mxep.shapes import record_bytes, round_up

DISPATCH, COMBINE = ("rank_dedup", "all_to_all", "all_gather"), ("rank_dedup", "all_to_all", "reduce_scatter")
KINDS = ("random", "one expert", "starved", "empty")
PAIRS = [RuntimeEPConfig(d, c) for d in DISPATCH for c in COMBINE]


def count(rank: int, world: int, kind: str) -> int:
    """T of a rank: different on each rank; 0 on rank 0 if "starved", 0 on every rank if "empty"."""
    return 0 if kind == "empty" or (kind == "starved" and rank == 0 and world > 1) else 40 + 7 * rank


def batch(world: int, kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """x and dy of every rank."""
    generator = torch.Generator().manual_seed(seed)
    counts = [count(rank, world, kind) for rank in range(world)]
    return tuple([draw(generator, n, D).to(dtype) for n in counts] for _ in range(2))  # type: ignore[return-value]


def layer(recipe: str, dtype: torch.dtype, kind: str, **changes: Any) -> FusedMoE:
    """The whole layer; "one expert": every token chooses expert 1 (among others), "starved": no token chooses the last two."""
    moe = make(FusedMoE, recipe, dtype, **changes)
    if kind == "one expert":
        moe.expert_bias[1] = 10
    if kind == "starved":
        moe.expert_bias[-2:] = -10
    assert isinstance(moe, FusedMoE)
    return moe


def spread(moe: MoE, world: int) -> MoE:
    """Shards its experts over all ranks."""
    mesh = init_device_mesh(torch.get_default_device().type, (world,), mesh_dim_names=("ep",))
    apply_mxfp8_expert_parallel(moe, mesh)
    moe.group = mesh.get_group()
    return moe


def gathered(results: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Plain gradients: of the experts' shards here, of the router summed over ranks."""
    plain = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in results.items()}
    plain["router.gate.weight"] = plain["router.gate.weight"].clone()
    dist.all_reduce(plain["router.gate.weight"])
    return plain


def expected(whole: FusedMoE, x: list[Tensor], dy: list[Tensor], rank: int) -> dict[str, Tensor]:
    """The expected results of this rank, from all tokens at once in float64."""
    world, tokens = len(x), torch.cat(x)
    # Routed rank by rank: a product of other shape may round a logit the other way.
    experts = torch.cat([whole.router(part, whole.expert_bias).experts for part in x])
    want = truth(whole, tokens, torch.cat(dy), experts)
    local = E // world
    for name, value in want.items():
        if name.startswith("experts."):
            want[name] = value[rank * local : (rank + 1) * local]
        if name in ("y", "dx"):
            want[name] = value.split([len(part) for part in x])[rank]
    return want


def check_modes(rank: int, world: int) -> None:
    """Every pair of modes and every routing in float32, where only the order of sums differs; other routings in each mode once."""
    for kind in KINDS:
        x, dy = batch(world, kind, torch.float32)
        for activation in ("swiglu", "relu2") if kind == "random" else ("swiglu",):
            whole = layer("hp", torch.float32, kind, activation=activation, expert_biases=True)
            want = expected(whole, x, dy, rank)
            moe = spread(layer("hp", torch.float32, kind, activation=activation, expert_biases=True), world)
            for runtime in PAIRS[:1] if activation != "swiglu" else PAIRS if kind == "random" else PAIRS[::4]:
                moe.runtime = runtime
                for name, got in gathered(walk(moe, x[rank], dy[rank]), rank).items():
                    where = f"{kind} {activation} {runtime} {name}"
                    assert got.shape == want[name].shape, where
                    largest = float(want[name].abs().max()) if want[name].numel() else 0.0
                    assert ((got.double() - want[name]).abs() <= 2e-5 * largest + 1e-6).all(), where


def check_recipes(rank: int, world: int) -> None:
    """MX recipes: the error is that of the layer on one rank; all dispatch modes give the same bits."""
    x, dy = batch(world, "random", torch.bfloat16)
    for name in RECIPES:
        whole = layer(name, torch.bfloat16, "random")
        want, alone = expected(whole, x, dy, rank), walk(whole, torch.cat(x), torch.cat(dy))
        everything = truth(whole, torch.cat(x), torch.cat(dy), whole.router(torch.cat(x)).experts)
        moe = spread(layer(name, torch.bfloat16, "random"), world)
        first: dict[str, Tensor] = {}
        for runtime in (*PAIRS[::3], PAIRS[8]) if name == "mxfp8_wgrad_with_hp" else PAIRS[::8]:
            moe.runtime = runtime
            found = walk(moe, x[rank], dy[rank])
            if runtime.combine == "rank_dedup":
                first = first or found
                for part in found:
                    if part != "dx":
                        assert_same(plain(found[part]), plain(first[part]), f"{name} {runtime.dispatch} {part}")
            for part, got in gathered(found, rank).items():
                most = 1.25 * error(alone[part], everything[part]) + 1e-3  # of few tokens or few experts
                assert error(got, want[part]) < most, f"{name} {runtime} {part}"


def plain(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def check_wire(rank: int, world: int) -> None:
    """Bytes that this rank sends: each token once per rank or once per choice, and as many sums in combine."""
    x, dy = batch(world, "random", torch.bfloat16)
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), world)
    experts = [moe.router(part, moe.expert_bias).experts // (E // world) for part in x]
    once = [[int((ranks == to).any(1).sum()) for to in range(world)] for ranks in experts]
    deduplicated, choices = (
        (sum(once[rank]), sum(row[rank] for row in once)),
        (experts[rank].numel(), sum(int((e == rank).sum()) for e in experts)),
    )
    for runtime, (sent, held) in ((PAIRS[0], deduplicated), (PAIRS[4], choices)):
        moe.runtime = runtime
        leaf = x[rank].clone().requires_grad_()
        with sent_bytes() as calls:
            y = moe(leaf)
        if world == 1:
            with sent_bytes() as more:
                y.backward(dy[rank])
            assert not calls + more, "nothing is sent"
            continue
        counts, metadata, dispatched, combined = calls
        assert counts == world * (3 + 7) * 8
        assert metadata == deduplicated[0] * (2 * C + 1) * 4
        assert (dispatched, combined) == (sent * record_bytes(D), held * D * 2)
        with sent_bytes() as calls:
            y.backward(dy[rank])
        assert sorted(calls) == sorted([sent * record_bytes(D), deduplicated[1] * C * 4, held * D * 2])


def check_options(rank: int, world: int) -> None:
    """Sums in MXFP8, recomputation instead of saving, `fused_moe` with its defaults, repeated calls, and a call without gradients."""
    x, dy = batch(world, "random", torch.bfloat16)
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random", expert_biases=True), world)
    want = walk(moe, x[rank], dy[rank])
    for runtime in (RuntimeEPConfig(), RuntimeEPConfig(keep_first_product=False, redispatch_x_in_backward=True)):
        moe.runtime = runtime
        for name, got in walk(moe, x[rank], dy[rank]).items():
            assert_same(plain(got), plain(want[name]), name)
    for dispatch, combine in zip(DISPATCH, COMBINE, strict=True):
        moe.runtime = RuntimeEPConfig(dispatch, combine, combine_forward="mxfp8", dispatch_backward="mxfp8")
        for name, got in walk(moe, x[rank], dy[rank]).items():
            assert error(plain(got), plain(want[name]).double()) < 0.03, name
    moe.runtime = RuntimeEPConfig()
    with torch.no_grad():
        assert_same(moe(x[rank]), want["y"])
    own = {name: plain(value.detach()) for name, value in moe.named_parameters()}
    w1, b1 = (torch.cat((own[f"experts.{a}"], own[f"experts.{b}"]), 1) for a, b in (("w1", "w3"), ("b1", "b3")))
    y = fused_moe(x[rank], own["router.gate.weight"], w1, b1, own["experts.w2"], own["experts.b2"], C, E, RuntimeEPConfig())
    assert_same(y, want["y"])


def check_chunks(rank: int, world: int) -> None:
    """With the least `scratch_rows`, all ranks' tokens: every mode, and all tokens at one expert. With fewer, every rank raises."""
    for kind in KINDS:
        x, dy = batch(world, kind, torch.float32)
        least = max(round_up(sum(len(part) for part in x), 32), 32)
        whole = layer("hp", torch.float32, kind, expert_biases=True)
        want = expected(whole, x, dy, rank)
        moe = spread(layer("hp", torch.float32, kind, expert_biases=True), world)
        for runtime in PAIRS[::4] if kind == "random" else PAIRS[:1]:
            moe.runtime = replace(runtime, scratch_rows=least)
            for name, got in gathered(walk(moe, x[rank], dy[rank]), rank).items():
                largest = float(want[name].abs().max()) if want[name].numel() else 0.0
                assert ((got.double() - want[name]).abs() <= 2e-5 * largest + 1e-6).all(), f"{kind} {runtime} {name}"
        moe.runtime = RuntimeEPConfig(scratch_rows=least - 1)
        with raises_naming("fused_moe", f"scratch_rows={least - 1}", f"at least {least}"):
            moe(x[rank])


def check_fsdp(rank: int, world: int) -> None:
    """Under FSDP, with experts sharded over the group: the gradients of the layer without FSDP."""
    x, dy = batch(world, "random", torch.float32)
    alone, sharded = (layer("hp", torch.float32, "random") for _ in range(2))
    spread(alone, world)
    want = gathered(walk(alone, x[rank], dy[rank]), rank)
    meshes = build_meshes(world, world, torch.get_default_device().type)
    apply_mxfp8_expert_parallel(sharded, meshes.ep)
    apply_fsdp(sharded, meshes)
    leaf = x[rank].clone().requires_grad_()
    sharded(leaf).backward(dy[rank])
    torch.testing.assert_close(leaf.grad, want["dx"])
    for name, parameter in sharded.named_parameters():
        got = parameter.grad.full_tensor() if name == "router.gate.weight" else parameter.grad.to_local()
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def check_errors(rank: int, world: int) -> None:
    """Options that differ between ranks raise on every rank, and the error names the difference."""
    x, _ = batch(world, "random", torch.float32)
    moe = spread(layer("hp", torch.float32, "random"), world)
    if world > 1:
        moe.runtime = RuntimeEPConfig(combine="all_to_all" if rank == world - 1 else "rank_dedup")
        with raises_naming("fused_moe", "RuntimeEPConfig and recipe", "give every rank"):
            moe(x[rank])
        with raises_naming("fused_moe", "top_k"):
            fused_moe(
                x[rank], torch.zeros(E, D), torch.zeros(E // world, 64, D), None, torch.zeros(E // world, D, 32), None, 1 + (rank == 0), E,
                recipe="hp",
            )  # fmt: skip
        moe.runtime = RuntimeEPConfig()
        with raises_naming("fused_moe", "has 2, rank 0 4: bytes of a value"):
            moe(x[rank].bfloat16() if rank else x[rank])
        cases = (
            (False, True, "has scores or router, rank 0 tokens,"),
            (True, False, "has tokens, scores or router, products"),
            (False, False, ""),
        )
        for redispatches, experts, got in cases:
            moe.runtime = RuntimeEPConfig(redispatch_x_in_backward=redispatches)
            for weight in (moe.experts.w1, moe.experts.w3):
                weight.requires_grad_(experts or not rank)
            raises = raises_naming("fused_moe", got, "what wants a gradient") if got else nullcontext()
            with raises:
                moe(x[rank].clone().requires_grad_(not (got and experts and rank)))
        moe.experts.requires_grad_()
        with raises_naming("3 experts on an EP group"):
            fused_moe(x[rank], torch.zeros(3, D), torch.zeros(1, 64, D), None, torch.zeros(1, D, 32), None, 1, 3)
    moe.runtime = RuntimeEPConfig()
    moe(x[rank])


CHECKS: tuple[Callable[[int, int], None], ...] = (check_modes, check_wire, check_errors, check_recipes, check_options, check_chunks)


def run_all(rank: int, world: int, checks: int = len(CHECKS)) -> None:
    """Runs the first `checks` checks."""
    with poisoned_memory():
        for check in CHECKS[:checks]:
            check(rank, world)


def run_fsdp(rank: int, world: int) -> None:
    check_fsdp(rank, world)


@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_rank() -> None:
    run_all(0, 1)


@pytest.mark.parametrize(("world", "checks"), [(2, len(CHECKS)), (4, 2)])
def test_ranks(world: int, checks: int) -> None:
    run_ranks(run_all, world, checks, timeout=240)


def test_fsdp_on_two_ranks() -> None:
    run_ranks(run_fsdp, 2)

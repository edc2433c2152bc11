"""The five blocks as a chain on gloo ranks: accuracy against the same chain in bf16, ops between the blocks, checkpointing, NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import Calls, Case, Saved, assert_all_same, assert_same, make_case, sqnr
from torch.utils.checkpoint import checkpoint

from mxep import (
    MXTensor,
    Recipe,
    ScaleCalculationMode,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_then_scaled_grouped_mm,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.ep import ExchangePlan, blocks
from mxep.grouped_mm.function import expert_mm
from mxep.recipe import resolve_recipe
from mxep.shapes import record_bytes

D, N, L = 128, 96, 2
Group = dist.ProcessGroup | None


def weights(world: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """(L, N, D) of one rank, a leaf."""
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(L, N, D, generator=generator) / D**0.5).to(dtype).requires_grad_()


def five_blocks(
    x: torch.Tensor,
    w: torch.Tensor,
    case: Case,
    me: int,
    group: Group,
    *,
    alignment: int = 32,
    mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    mxfp8_bwd: bool = True,
    on_rows: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    on_outputs: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
) -> torch.Tensor:
    """A user's code: the five public blocks, optionally with operations on the activations between them."""
    outs, ins = case.received(me), case.sent(me)
    mx = on_rows(a2a_dispatch_mxfp8_fwd_hp_bwd(x, outs, ins, group, mode))
    shape, rows, row_map, _, offs = permute_mxfp8_fwd_hp_bwd(mx, case.rank_major(me), case.world, L, alignment, isinstance(mx, MXTensor))
    y = to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=x.dtype, wgrad_with_hp=True, scale_calculation_mode=mode)
    y = on_outputs(unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape))
    return a2a_combine_hp_fwd_mxfp8_bwd(y, ins, outs, group, mode, mxfp8_bwd=mxfp8_bwd)


def layered(x: torch.Tensor, w: torch.Tensor, case: Case, me: int, group: Group, recipe: Recipe) -> torch.Tensor:
    """The same chain with an ExchangePlan and a recipe."""
    plan = ExchangePlan.from_counts(case.counts[me], group or dist.group.WORLD)
    permuted = blocks.permute(blocks.dispatch(x, plan, recipe), plan, recipe)
    y = blocks.unpermute(expert_mm(permuted.rows, w, permuted.offsets, recipe), permuted)
    return blocks.combine(y, plan, recipe)


def run(chain: Callable, case: Case, me: int, dtype: torch.dtype, *args: Any, **options: Any) -> list[torch.Tensor]:
    """(out, dx, dw) for a random gradient."""
    x, w = case.inputs(D, dtype)[me].requires_grad_(), weights(case.world, me, dtype)
    out = chain(x, w, case, me, *args, **options)
    out.backward(case.inputs(N, dtype, seed=5)[me])
    return [out.detach(), x.grad, w.grad]


def check_accuracy(me: int, world: int, group: Group) -> dict[str, float]:
    """The least SQNR of all cases against the bf16 chain is at least the promised one."""
    worst: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for seed, kind in enumerate(("random", "balanced", "uneven", "starved", "one", "empty")):
            case = make_case(kind, world, L, rows=200, seed=seed)
            truth = run(layered, case, me, dtype, group, resolve_recipe("bf16"))
            got = run(five_blocks, case, me, dtype, group)
            for name, least, want, mine in zip(("out", "dx", "dw"), (28, 26, 25), truth, got, strict=True):
                assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
                if want.any():
                    worst[name] = min(worst.get(name, 99.0), sqnr(want, mine))
                    assert worst[name] >= least, f"{kind} {dtype} {name}: {worst[name]:.1f} dB, want {least}"
                else:
                    assert not mine.any(), f"{kind}: dW of starved experts is exactly zero"
            assert_all_same(run(layered, case, me, dtype, group, resolve_recipe(None)), got, f"{kind}: plan and recipe")
            for name in (
                "mxfp8_wgrad_with_mx",
                "mxfp8_gemm_wgrad_with_mx",
            ):  # one GEMM: the bytes on the wire, or made in permute, are the same
                assert_all_same(run(layered, case, me, dtype, group, resolve_recipe(name)), got, f"{kind}: {name}")
            for want, mine in zip(got, run(five_blocks, case, me, dtype, group, alignment=128), strict=True):
                assert not want.any() or sqnr(want, mine) >= 60, "padding to 128 changes nothing but the order of sums"
            floor = run(layered, case, me, dtype, group, resolve_recipe("mxfp8_wgrad_with_hp_floor"))
            assert_all_same(run(five_blocks, case, me, dtype, group, mode=ScaleCalculationMode.FLOOR), floor, f"{kind}: FLOOR")
            plain = run(five_blocks, case, me, dtype, group, mxfp8_bwd=False)
            assert_same(plain[0], got[0])
            if truth[1].any():
                assert sqnr(truth[1], plain[1]) >= 26
    return worst


def check_wire(me: int, world: int, group: Group) -> None:
    """One packed exchange per direction: MX forward and plain back at dispatch, plain forward and MX back at combine."""
    case = make_case("uneven", world, L)
    x, w = case.inputs(D, torch.bfloat16)[me].requires_grad_(), weights(world, me, torch.bfloat16)
    sent, received = sum(case.sent(me)), sum(case.received(me))
    with Calls() as calls:
        out = five_blocks(x, w, case, me, group)
    assert calls == [sent * record_bytes(D), received * N * 2]
    with Calls() as calls:
        out.sum().backward()
    assert calls == [sent * record_bytes(N), received * D * 2]


def check_two_layers(me: int, world: int, group: Group) -> None:
    """Two layers and two backwards: no call changes what another one saved."""
    case = make_case("random", world, L, rows=40)
    x, w = case.inputs(D, torch.float32)[me].requires_grad_(), weights(world, me, torch.float32)
    other = make_case("uneven", world, L, rows=60)
    grad = case.inputs(N, torch.float32, seed=5)[me]
    alone = run(five_blocks, case, me, torch.float32, group)
    out = five_blocks(x, w, case, me, group)
    second = five_blocks(other.inputs(D, torch.float32)[me], w, other, me, group)
    for _ in range(2):
        d_x, d_w = torch.autograd.grad(out, (x, w), grad, retain_graph=True)
        assert_all_same([out.detach(), d_x, d_w], alone, "again")
        torch.autograd.grad(second.sum(), w, retain_graph=True)


def check_checkpointing(me: int, world: int, group: Group) -> None:
    case = make_case("random", world, L, rows=40)
    for dtype in (torch.bfloat16, torch.float32):
        want = run(five_blocks, case, me, dtype, group)

        def whole(x: torch.Tensor, w: torch.Tensor, *args: Any) -> torch.Tensor:
            return checkpoint(lambda x, w: five_blocks(x, w, *args), x, w, use_reentrant=False)

        def part(x: torch.Tensor, w: torch.Tensor, case: Case, me: int, group: Group) -> torch.Tensor:
            """An MX activation enters a checkpoint."""
            outs, ins = case.received(me), case.sent(me)
            mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, outs, ins, group)

            def experts(mx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                shape, rows, row_map, _, offs = permute_mxfp8_fwd_hp_bwd(mx, case.rank_major(me), case.world, L)
                y = to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=x.dtype, wgrad_with_hp=True)
                return unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape)

            return a2a_combine_hp_fwd_mxfp8_bwd(checkpoint(experts, mx, w, use_reentrant=False), ins, outs, group)

        for chain in (whole, part):
            assert_all_same(run(chain, case, me, dtype, group), want, chain.__name__)


def check_ops_between(me: int, world: int, group: Group) -> None:
    """Scores, residuals, indexing, second consumers, isnan and cat on MX activations and on tensors that get MX gradients."""
    case = make_case("random", world, L, rows=200)
    received = sum(case.received(me))
    scores = torch.rand(received, 1, generator=torch.Generator().manual_seed(me)) + 0.5
    onto_outputs: dict[str, Callable] = {
        "score multiply": lambda y: y * scores.to(y.dtype),
        "residual": lambda y: y + y.detach().roll(1, 0),
        "second consumer": lambda y: y + 0.5 * y.tanh(),
        "index": lambda y: y[torch.arange(received).flip(0)].flip(0),
        "slices and cat": lambda y: torch.cat([y[: received // 2], y[received // 2 :]]),
        "where isnan": lambda y: torch.where(y.isnan(), 0, y),
    }
    onto_rows: dict[str, Callable] = {
        "score multiply": lambda mx: mx * scores.to(mx.dtype),
        "residual": lambda mx: mx + mx.detach().roll(1, 0),
        "second consumer": lambda mx: mx + 0.5 * mx.tanh(),
        "index": lambda mx: mx[torch.arange(received).flip(0)].flip(0),
        "slices and cat": lambda mx: torch.cat([mx[: received // 2], mx[received // 2 :]]),
        "where isnan": lambda mx: torch.where(mx.isnan(), 0, mx),
        "clone and detach": lambda mx: mx.clone(),
    }
    bf16 = resolve_recipe("bf16")
    for place, changes in (("on_outputs", onto_outputs), ("on_rows", onto_rows)):
        for name, change in changes.items():
            got = run(five_blocks, case, me, torch.float32, group, **{place: change})
            want = run(changed_plain, case, me, torch.float32, group, bf16, place, change)
            figures = (28, 26, 25) if place == "on_outputs" else (26, 26, 25)  # operations on MX rows quantise their results again
            for what, least, truth, mine in zip(("out", "dx", "dw"), figures, want, got, strict=True):
                assert sqnr(truth, mine) >= least, f"{place} {name} {what}: {sqnr(truth, mine):.1f} dB"


def changed_plain(
    x: torch.Tensor, w: torch.Tensor, case: Case, me: int, group: Group, recipe: Recipe, place: str, change: Callable
) -> torch.Tensor:
    plan = ExchangePlan.from_counts(case.counts[me], group or dist.group.WORLD)
    rows = blocks.dispatch(x, plan, recipe)
    permuted = blocks.permute(change(rows) if place == "on_rows" else rows, plan, recipe)
    y = blocks.unpermute(expert_mm(permuted.rows, w, permuted.offsets, recipe), permuted)
    return blocks.combine(change(y) if place == "on_outputs" else y, plan, recipe)


def check_nan(me: int, world: int, group: Group) -> None:
    """A NaN token reaches its own output row and dW of experts that received it; a NaN gradient its own dx row."""
    case = make_case("random", world, L, rows=40)
    inputs = case.inputs(D, torch.float32)
    bad_row = 7
    if me == 0:
        inputs[0][bad_row, 70] = torch.inf
    bad_expert = int(torch.searchsorted(case.counts[0].cumsum(0), bad_row, right=True))
    x, w = inputs[me].requires_grad_(), weights(world, me, torch.float32)
    out = five_blocks(x, w, case, me, group)
    assert out.isnan().any(1).nonzero().flatten().tolist() == ([bad_row] if me == 0 else [])
    d_x, d_w = torch.autograd.grad(out, (x, w), torch.ones_like(out), retain_graph=True)
    assert d_x.isfinite().all()
    assert d_w.isnan().flatten(1).any(1).tolist() == [me * L + e == bad_expert for e in range(L)]
    grad = torch.ones_like(out)
    if me == 0:
        grad[3, 1] = torch.nan
    (d_x,) = torch.autograd.grad(out, x, grad)
    assert d_x.isnan().any(1).nonzero().flatten().tolist() == ([3] if me == 0 else [])


def check_in_place_raises(me: int, world: int, group: Group) -> None:
    case = make_case("balanced", world, L)
    mx = a2a_dispatch_mxfp8_fwd_hp_bwd(case.inputs(D, torch.float32)[me], case.received(me), case.sent(me), group)
    before = mx.dequantize()

    def assign() -> None:
        mx[0] = 1.0

    for write in (lambda: mx.mul_(2), lambda: mx.zero_(), lambda: mx.copy_(before), assign, lambda: torch.add(before, 1, out=mx)):
        with pytest.raises(ValueError, match=r"(?s)MXTensor.*out-of-place"):
            write()
    assert_same(mx.dequantize(), before)


def check_inference(me: int, world: int, group: Group) -> None:
    case = make_case("uneven", world, L)
    x, w = case.inputs(D, torch.bfloat16)[me].requires_grad_(), weights(world, me, torch.bfloat16)
    with torch.no_grad(), Saved() as saved:
        out = five_blocks(x, w, case, me, group)
    assert saved == []
    assert_same(out, five_blocks(x, w, case, me, group).detach())


CHECKS = (check_wire, check_two_layers, check_checkpointing, check_ops_between, check_nan, check_in_place_raises, check_inference)


def rank_main(rank: int, world: int) -> dict[str, float]:
    worst = check_accuracy(rank, world, None)
    for check in CHECKS:
        check(rank, world, None)
    if world == 4:  # two EP groups of two
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        check_accuracy(rank % 2, 2, halves[rank // 2])
        check_wire(rank % 2, 2, halves[rank // 2])
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_chain(world: int) -> None:
    print(run_ranks(rank_main, world))

"""The five blocks as a chain on gloo ranks: accuracy against the same chain in bf16, ops between the blocks, checkpointing, NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests import chains
from tests.chains import D, Group, L, layered, run, unchanged, weights
from tests.ranks import run_ranks
from tests.truth import Case, assert_all_same, assert_same, make_case, sqnr
from torch.utils.checkpoint import checkpoint

from mxep import (
    MXTensor,
    ScaleCalculationMode,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_then_scaled_grouped_mm,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.recipe import resolve_recipe


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
    on_rows: Callable[[torch.Tensor], torch.Tensor] = unchanged,
    on_outputs: Callable[[torch.Tensor], torch.Tensor] = unchanged,
) -> torch.Tensor:
    """A user's code: the five public blocks, optionally with operations on the activations between them."""
    outs, ins = case.received(me), case.sent(me)
    mx = on_rows(a2a_dispatch_mxfp8_fwd_hp_bwd(x, outs, ins, group, mode))
    shape, rows, row_map, _, offs = permute_mxfp8_fwd_hp_bwd(mx, case.rank_major(me), case.world, L, alignment, isinstance(mx, MXTensor))
    y = to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=x.dtype, wgrad_with_hp=True, scale_calculation_mode=mode)
    y = on_outputs(unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape))
    return a2a_combine_hp_fwd_mxfp8_bwd(y, ins, outs, group, mode, mxfp8_bwd=mxfp8_bwd)


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


def part(x: torch.Tensor, w: torch.Tensor, case: Case, me: int, group: Group) -> torch.Tensor:
    """`five_blocks`, the three in the middle under a checkpoint, which an MX activation enters."""
    outs, ins = case.received(me), case.sent(me)
    mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, outs, ins, group)

    def experts(mx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shape, rows, row_map, _, offs = permute_mxfp8_fwd_hp_bwd(mx, case.rank_major(me), case.world, L)
        y = to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=x.dtype, wgrad_with_hp=True)
        return unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape)

    return a2a_combine_hp_fwd_mxfp8_bwd(checkpoint(experts, mx, w, use_reentrant=False), ins, outs, group)


def check_checkpointing_of_a_part(me: int, world: int, group: Group) -> None:
    case = make_case("random", world, L, rows=40)
    for dtype in (torch.bfloat16, torch.float32):
        assert_all_same(run(part, case, me, dtype, group), run(five_blocks, case, me, dtype, group), "part")


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
            want = run(layered, case, me, torch.float32, group, bf16, **{place: change})
            figures = (28, 26, 25) if place == "on_outputs" else (26, 26, 25)  # operations on MX rows quantise their results again
            for what, least, truth, mine in zip(("out", "dx", "dw"), figures, want, got, strict=True):
                assert sqnr(truth, mine) >= least, f"{place} {name} {what}: {sqnr(truth, mine):.1f} dB"


def check_nan(me: int, world: int, group: Group) -> None:
    """A NaN token reaches its own output row and dW of experts that received it; a NaN gradient its own dx row."""
    case = make_case("random", world, L, rows=40)
    inputs = case.inputs(D, torch.float32)
    bad_row = 7
    if me == 0:
        inputs[0][bad_row, 70] = torch.inf
    bad_expert = int(torch.searchsorted(case.counts[0].cumsum(0), bad_row, right=True))
    x, w = inputs[me].requires_grad_(), weights(me, torch.float32)
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


CHECKS = (check_checkpointing_of_a_part, check_ops_between, check_nan, check_in_place_raises)


def rank_main(rank: int, world: int) -> dict[str, float]:
    worst = check_accuracy(rank, world, None)
    for check in (chains.check_wire, *chains.CHECKS):
        check(five_blocks, rank, world, None)
    for check in CHECKS:
        check(rank, world, None)
    if world == 4:  # two EP groups of two
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        check_accuracy(rank % 2, 2, halves[rank // 2])
        chains.check_wire(five_blocks, rank % 2, 2, halves[rank // 2])
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_chain(world: int) -> None:
    print(run_ranks(rank_main, world))

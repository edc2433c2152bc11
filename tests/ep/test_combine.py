"""combine alone: plain rows forward, the gradient quantised and exchanged as MX."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import (
    KINDS,
    Case,
    assert_same,
    assert_same_mx,
    exchange,
    make_case,
    quantised_exchange,
    raises_naming,
    saved_tensors,
    sent_bytes,
    transposed,
)

from mxep import ScaleCalculationMode, a2a_combine_hp_fwd_mxfp8_bwd, quantize_mx, reference
from mxep.shapes import record_bytes

WIDTH = 96
combine = a2a_combine_hp_fwd_mxfp8_bwd


def check(case: Case, me: int, group: dist.ProcessGroup | None, dtype: torch.dtype, what: str) -> None:
    """Rows return to the ranks that dispatch sent them from: the splits are swapped."""
    rows, grads, table = case.gradients(WIDTH, dtype), case.inputs(WIDTH, dtype), transposed(case.table)
    splits = case.sent(me), case.received(me)
    leaves = [r.clone().requires_grad_() for r in rows]
    truth = exchange(leaves, table)
    torch.autograd.backward(truth, grads)
    for mode in ScaleCalculationMode:
        x = rows[me].clone().requires_grad_()
        with saved_tensors() as saved, sent_bytes() as calls:
            out = combine(x, *splits, group, mode)
        assert saved == [], "combine saves no tensor"
        assert calls == [x.numel() * dtype.itemsize], "one exchange in the rows' dtype"
        assert_same(out.detach(), truth[me].detach(), f"{what} {mode}")
        with sent_bytes() as calls:
            (grad,) = torch.autograd.grad(out, x, grads[me])
        assert calls == [len(grads[me]) * record_bytes(WIDTH)], "one packed exchange in backward"
        assert_same_mx(grad, quantised_exchange(grads, case.table, me, mode.value), dtype, f"{what} {mode} gradient")
    x = rows[me].clone().requires_grad_()
    with saved_tensors() as saved:
        out = combine(x, *splits, group, mxfp8_bwd=False)
    assert saved == []
    assert_same(out.detach(), truth[me].detach(), f"{what} without MX")
    with sent_bytes() as calls:
        out.backward(grads[me])
    assert calls == [grads[me].numel() * dtype.itemsize]
    assert_same(x.grad, leaves[me].grad, f"{what} gradient without MX")


def check_gradient_forms(case: Case, me: int, group: dist.ProcessGroup | None) -> None:
    """Representable, expanded, strided, MX and NaN gradients."""
    grads = case.inputs(WIDTH, torch.bfloat16)
    values = [reference.dequantize(*reference.quantize(grad, "rceil"), torch.bfloat16) for grad in grads]
    x = case.gradients(WIDTH, torch.bfloat16)[me].requires_grad_()
    out = combine(x, case.sent(me), case.received(me), group)

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(out, x, grad, retain_graph=True)[0]

    assert_same(gradient(values[me]).dequantize(), exchange(values, case.table)[me], "representable")
    assert_same(gradient(quantize_mx(grads[me])).dequantize(), exchange(values, case.table)[me], "MX")
    assert_same_mx(gradient(grads[me].t().contiguous().t()), quantised_exchange(grads, case.table, me, "rceil"), torch.bfloat16, "strided")
    ones = torch.ones((), dtype=torch.bfloat16)
    assert_same(gradient(ones.expand(out.shape)).dequantize(), ones.expand(x.shape), "expanded")
    grads[-1][0, 5] = torch.nan
    bad = [torch.zeros(grad.shape, dtype=torch.bool) for grad in grads]
    bad[-1][0, :32] = True
    assert torch.equal(gradient(grads[me]).dequantize().isnan(), exchange(bad, case.table)[me])


def check_other_forms(case: Case, me: int, group: dist.ProcessGroup) -> None:
    rows = case.gradients(WIDTH, torch.bfloat16)
    want = exchange(rows, transposed(case.table))[me]
    splits = case.sent(me), case.received(me)
    assert_same(combine(rows[me].t().contiguous().t(), *splits, group), want, "strided")
    assert_same(combine(rows[me], *splits, group_name=group.group_name), want, "name")
    assert_same(combine(rows[me], *splits, group=group), want, "alias")
    values = [quantize_mx(r).dequantize() for r in rows]
    assert_same(combine(quantize_mx(rows[me]), *splits, group), exchange(values, transposed(case.table))[me], "an MX input")
    odd = [r[:, :33].contiguous() for r in rows]  # no MX on the wire, any width
    assert_same(combine(odd[me], *splits, group, mxfp8_bwd=False), exchange(odd, transposed(case.table))[me], "33 columns")


def on_group(me: int, world: int, group: dist.ProcessGroup | None) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for seed, kind in enumerate(KINDS):
            check(make_case(kind, world, 2, seed=seed), me, group, dtype, f"{kind} {dtype}")
    check_gradient_forms(make_case("random", world, 2), me, group)
    check_gradient_forms(make_case("uneven", world, 2), me, group)


def rank_main(rank: int, world: int) -> None:
    on_group(rank, world, None)
    check_other_forms(make_case("random", world, 1), rank, dist.group.WORLD)
    if world == 4:
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        on_group(rank // 2, 2, halves[rank % 2])
        check_other_forms(make_case("uneven", 2, 1), rank // 2, halves[rank % 2])
    x = torch.randn(8, 64)
    splits = ([8] + [0] * (world - 1) if rank == 0 else [0] * world, [8 if r == rank == 0 else 0 for r in range(world)])
    with raises_naming("combine", "torch.float16", "bfloat16 or float32", "cast"):
        combine(x.half(), *splits)
    with raises_naming("combine", "(8, 33)", "multiples of 32"):
        combine(x[:, :33], *splits)
    with raises_naming("combine", "input_splits is Tensor", "list[int]"):
        combine(x, splits[0], torch.tensor(splits[1]))
    with raises_naming("no process group named 'nobody'"):
        combine(x, *splits, group="nobody")


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_gradients_and_groups(world: int) -> None:
    run_ranks(rank_main, world)

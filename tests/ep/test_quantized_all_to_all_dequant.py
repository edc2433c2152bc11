"""to_mxfp8_a2a_dequant alone: MXFP8 on the wire both ways, plain rows at both ends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import KINDS, Case, assert_same, exchange, make_case, raises_naming, saved_tensors, sent_bytes, sqnr, transposed

from mxep import ToMXFP8AllToAllVDequant, quantize_mx, reference, to_mxfp8_a2a_dequant
from mxep.shapes import record_bytes

WIDTH = 96


def values(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [reference.dequantize(*reference.quantize(r, "rceil"), r.dtype) for r in rows]


def check(case: Case, me: int, group: dist.ProcessGroup | None, dtype: torch.dtype, what: str) -> None:
    inputs, grads = case.inputs(WIDTH, dtype), case.gradients(WIDTH, dtype)
    splits = case.received(me), case.sent(me)
    x = inputs[me].clone().requires_grad_()
    with saved_tensors() as saved, sent_bytes() as calls:
        out = to_mxfp8_a2a_dequant(x, *splits, group)
    assert saved == [], "saves no tensor"
    assert calls == [len(x) * record_bytes(WIDTH)]
    assert_same(out.detach(), exchange(values(inputs), case.table)[me], what)
    with sent_bytes() as calls:
        out.backward(grads[me])
    assert calls == [len(grads[me]) * record_bytes(WIDTH)]
    assert_same(x.grad, exchange(values(grads), transposed(case.table))[me], f"{what} gradient")
    plain = exchange(inputs, case.table)[me]
    if plain.numel():
        assert sqnr(plain, out.detach()) >= 30
    if x.numel():
        assert sqnr(exchange(grads, transposed(case.table))[me], x.grad) >= 28
    again = ToMXFP8AllToAllVDequant.apply(values(inputs)[me], *splits, group)
    assert_same(again, exchange(values(inputs), case.table)[me], "representable values come through bit-equal")


def rank_main(rank: int, world: int) -> None:
    groups = [(rank, world, None), (rank, world, dist.group.WORLD), (rank, world, dist.group.WORLD.group_name)]
    if world == 4:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups.append((rank % 2, 2, halves[rank // 2]))
    for (me, size, group), dtype in zip(groups * 2, [torch.bfloat16] * len(groups) + [torch.float32] * len(groups), strict=True):
        for seed, kind in enumerate(KINDS):
            check(make_case(kind, size, 2, seed=seed), me, group, dtype, f"{kind} {dtype}")
    case = make_case("uneven", world, 2)
    x = case.inputs(WIDTH, torch.float32)[rank].requires_grad_()
    out = to_mxfp8_a2a_dequant(x, case.received(rank), case.sent(rank))
    (grad,) = torch.autograd.grad(out, x, quantize_mx(case.gradients(WIDTH, torch.float32)[rank]), retain_graph=True)
    assert_same(grad, exchange(values(case.gradients(WIDTH, torch.float32)), transposed(case.table))[rank], "an MX gradient")
    out.sum().backward()
    assert_same(x.grad, torch.ones_like(x).detach(), "an expanded gradient")
    with raises_naming("to_mxfp8_a2a_dequant", "(8, 48)", "multiples of 32"):
        to_mxfp8_a2a_dequant(torch.randn(8, 48), [4] * world, [4] * world)
    with raises_naming("to_mxfp8_a2a_dequant", "torch.float64", "bfloat16 or float32"):
        to_mxfp8_a2a_dequant(torch.randn(8, 64).double(), [4] * world, [4] * world)
    with raises_naming("to_mxfp8_a2a_dequant", "output_splits is Tensor", "list[int]"):
        to_mxfp8_a2a_dequant(torch.randn(8, 64), torch.tensor([4] * world), [4] * world)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_gradients_and_groups(world: int) -> None:
    run_ranks(rank_main, world)

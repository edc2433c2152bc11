"""dispatch alone: its bytes are those of quantise-then-index, its gradient is the plain exchange in reverse."""

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
    raw,
    saved_tensors,
    sent_bytes,
    transposed,
)

from mxep import (
    MXTensor,
    ScaleCalculationMode,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    reference,
    to_mxfp8_a2a_dequant,
)
from mxep.shapes import record_bytes

WIDTH = 96  # record of 96 + 3 bytes, padded to 112
dispatch = a2a_dispatch_mxfp8_fwd_hp_bwd


def check_bytes_and_gradient(case: Case, me: int, group: dist.ProcessGroup | None, dtype: torch.dtype, what: str) -> None:
    inputs, grads = case.inputs(WIDTH, dtype), case.gradients(WIDTH, dtype)
    for mode in ScaleCalculationMode:
        x = inputs[me].clone().requires_grad_()
        with saved_tensors() as saved, sent_bytes() as calls:
            out = dispatch(x, case.received(me), case.sent(me), group, mode)
        assert_same_mx(out, quantised_exchange(inputs, case.table, me, mode.value), dtype, f"{what} {mode}")
        assert out.requires_grad
        assert saved == [], "dispatch saves no tensor"
        assert calls == [len(x) * record_bytes(WIDTH)], "one packed exchange, 33/32 byte a value and the padding"
        with sent_bytes() as calls:
            out.backward(grads[me])
        assert calls == [grads[me].numel() * dtype.itemsize], "one exchange in backward, in the gradient's dtype"
        assert_same(x.grad, exchange(grads, transposed(case.table))[me], f"{what} gradient")
    leaves = [rows.clone().requires_grad_() for rows in inputs]
    torch.autograd.backward(exchange(leaves, case.table), grads)  # the truth's own autograd gives the same gradient
    assert_same(x.grad, leaves[me].grad, f"{what} against autograd")


def check_representable(case: Case, me: int, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    for mode in ScaleCalculationMode:  # each mode's own grid: FLOOR alone cannot hold 1.875 times a power of two as a block's largest
        inputs = [reference.dequantize(*reference.quantize(rows, mode.value), dtype) for rows in case.inputs(WIDTH, dtype)]
        out = dispatch(inputs[me], case.received(me), case.sent(me), group, mode)
        assert_same(out.dequantize(), exchange(inputs, case.table)[me], f"values that MX can represent, {mode}")


def check_nan_stays_in_its_block(case: Case, me: int, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    inputs = case.inputs(WIDTH, dtype)
    inputs[-1][0, 40], inputs[-1][-1, 0], inputs[-1][-1, 95] = torch.nan, torch.inf, -torch.inf
    bad = [torch.zeros(len(rows), WIDTH // 32, dtype=torch.bool) for rows in inputs]
    bad[-1][0, 1] = bad[-1][-1, 0] = bad[-1][-1, 2] = True
    out = dispatch(inputs[me], case.received(me), case.sent(me), group)
    expected = exchange(bad, case.table)[me]
    assert torch.equal(out.dequantize().isnan(), expected.repeat_interleave(32, dim=1))
    assert torch.equal(out.scale.view(torch.uint8) == 0xFF, expected)
    assert (raw(out.qdata).view(-1, WIDTH // 32, 32)[expected] == 0x7F).all()


def check_gradient_forms(case: Case, me: int, group: dist.ProcessGroup | None) -> None:
    """Expanded, strided and MX gradients are exchanged as their values."""
    grads = case.gradients(WIDTH, torch.bfloat16)
    back = transposed(case.table)
    x = case.inputs(WIDTH, torch.bfloat16)[me].requires_grad_()

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(dispatch(x, case.received(me), case.sent(me), group), x, grad)[0]

    assert_same(gradient(torch.ones((), dtype=torch.bfloat16).expand(len(grads[me]), WIDTH)), torch.ones_like(x).detach(), "expanded")
    assert_same(gradient(grads[me].t().contiguous().t()), exchange(grads, back)[me], "strided")
    values = [reference.dequantize(*reference.quantize(grad, "rceil"), torch.bfloat16) for grad in grads]
    assert_same(gradient(MXTensor.to_mx(grads[me], torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)), exchange(values, back)[me], "MX")
    out = dispatch(x, case.received(me), case.sent(me), group)
    out.dequantize(torch.float32).sum().backward()
    assert_same(x.grad, torch.ones_like(x).detach(), "through dequantize")


def check_inputs_of_other_forms(case: Case, me: int, group: dist.ProcessGroup) -> None:
    """Strided rows, and the group by name, as itself and by its alias."""
    inputs = case.inputs(WIDTH, torch.bfloat16)
    want = quantised_exchange(inputs, case.table, me, "rceil")
    splits = case.received(me), case.sent(me)
    assert_same_mx(dispatch(inputs[me].t().contiguous().t(), *splits, group), want, torch.bfloat16, "strided")
    assert_same_mx(dispatch(inputs[me], *splits, group_name=group.group_name), want, torch.bfloat16, "name")
    assert_same_mx(dispatch(inputs[me], *splits, group=group), want, torch.bfloat16, "alias")
    assert_same_mx(dispatch(inputs[me], *splits, group=group.group_name), want, torch.bfloat16, "alias by name")
    for width in (32, 160, 1056):  # scales of odd lengths, records with and without padding
        rows = case.inputs(width, torch.bfloat16)
        want = quantised_exchange(rows, case.table, me, "rceil")
        assert_same_mx(dispatch(rows[me], *splits, group), want, torch.bfloat16, f"{width} columns")
    with torch.no_grad():
        assert not dispatch(inputs[me].requires_grad_(), *splits, group).requires_grad


def on_group(me: int, world: int, group: dist.ProcessGroup | None) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for seed, kind in enumerate(KINDS):
            check_bytes_and_gradient(make_case(kind, world, 2, seed=seed), me, group, dtype, f"{kind} {dtype}")
        for kind in ("random", "starved"):
            check_representable(make_case(kind, world, 2), me, group, dtype)
            check_nan_stays_in_its_block(make_case(kind, world, 2), me, group, dtype)
    check_gradient_forms(make_case("uneven", world, 2), me, group)


def world_rank(rank: int, world: int) -> None:
    on_group(rank, world, None)
    check_inputs_of_other_forms(make_case("random", world, 1), rank, dist.group.WORLD)
    if world == 4:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        on_group(rank % 2, 2, halves[rank // 2])
        check_inputs_of_other_forms(make_case("uneven", 2, 1), rank % 2, halves[rank // 2])


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_gradients_and_groups(world: int) -> None:
    run_ranks(world_rank, world)


def bad_input_rank(rank: int, world: int) -> None:
    x = torch.randn(8, 64)
    with raises_naming("dispatch", "torch.float16", "bfloat16 or float32", "cast"):
        dispatch(x.half(), [4, 4], [4, 4])
    with raises_naming("dispatch", "torch.int64", "bfloat16 or float32"):
        dispatch(x.long(), [4, 4], [4, 4])
    with raises_naming("dispatch", "(8, 48)", "multiples of 32", "pad"):
        dispatch(x[:, :48], [4, 4], [4, 4])
    with raises_naming("dispatch", "(2, 4, 64)", "(rows, width)", "flatten"):
        dispatch(x.view(2, 4, 64), [4, 4], [4, 4])
    with raises_naming("dispatch", "block_size=16", "32"):
        dispatch(x, [4, 4], [4, 4], block_size=16)
    with raises_naming("dispatch", "scaling_mode='nearest'", "FLOOR or RCEIL"):
        dispatch(x, [4, 4], [4, 4], scaling_mode="nearest")
    for splits in (([4, 4], torch.tensor([4, 4])), (torch.tensor([4, 4]), [4, 4]), (None, [4, 4]), ([4, 4], 8)):
        with raises_naming("dispatch", "_splits is", "list[int] on the host", ".tolist()"):
            dispatch(x, *splits)
    for splits in (([4, 4], [torch.tensor(4), torch.tensor(4)]), ([4.0, 4.0], [4, 4])):
        with raises_naming("dispatch", "_splits", "list[int]"):
            dispatch(x, *splits)
    with raises_naming("no process group named 'nobody'", "pass"):
        dispatch(x, [4, 4], [4, 4], "nobody")
    with raises_naming("dispatch", "group is int", "ProcessGroup", "WORLD"):
        dispatch(x, [4, 4], [4, 4], 3)
    with raises_naming("dispatch", "both group_name and group"):
        dispatch(x, [4, 4], [4, 4], dist.group.WORLD, group="nobody")
    with raises_naming("dispatch", "input is None"):
        dispatch(None, [4, 4], [4, 4])


def test_bad_input() -> None:
    run_ranks(bad_input_rank, 2)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with raises_naming("dispatch", "not initialised", "init_process_group"):
        dispatch(torch.randn(4, 32), [4], [4])


def gradients_after_lists_change(me: int, world: int, changes: bool) -> list[torch.Tensor]:
    """dx of every differentiable exchange whose caller fills its lists of splits again before backward."""
    found, group = [], dist.group.WORLD
    table = [[1, 3], [3, 1]]
    for call in (dispatch, a2a_combine_hp_fwd_mxfp8_bwd, to_mxfp8_a2a_dequant):
        sent, received = list(table[me]), [row[me] for row in table]
        x = torch.ones(4, 32, dtype=torch.bfloat16).requires_grad_()
        out = call(x * 1, received, sent, group)
        if changes:
            sent.reverse()
            received.reverse()
        out = out.dequantize() if isinstance(out, MXTensor) else out
        (out * torch.arange(1.0, 5.0)[:, None] * (1 + 9 * me)).sum().backward()
        found.append(x.grad)
    return found


def test_lists_of_splits_may_be_changed_before_backward() -> None:
    kept, changed = (run_ranks(gradients_after_lists_change, 2, changes) for changes in (False, True))
    for one, other in zip(kept, changed, strict=True):
        assert all(map(torch.equal, one, other))
        assert len({tuple(grad[:, 0].tolist()) for grad in one}) == 1

"""mxfp8_on_device_all_to_all_v on virtual ranks and gloo: the values of an all-to-all in both forms, gradients, overflow, wrong input.

`everything` runs on the default device; tests/gpu/test_on_device.py runs it on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import KINDS, Case, assert_same, exchange, make_case, raises_naming, saved_tensors, seeded, transposed
from tests.virtual import run_virtual

from mxep import close_transports, quantize_mx, reference, to_mxfp8_a2a_dequant
from mxep import mxfp8_on_device_all_to_all_v as all_to_all
from mxep import mxfp8_on_device_all_to_all_v_overflowed as overflowed

WIDTH = 96
Ranks = Callable[[int, int, str | None], None]


def values(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [reference.dequantize(*reference.quantize(r, "rceil"), r.dtype) for r in rows]


def splits(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int64)


def padded(rows: torch.Tensor, most: int, fill: float = 0.0) -> torch.Tensor:
    return torch.cat((rows, rows.new_full((most - rows.shape[0], rows.shape[1]), fill)))


def check(case: Case, me: int, group: str | None, dtype: torch.dtype, spare: int, padding: int) -> None:
    """Both forms, forward and backward; `spare` input rows after the last split, `padding` unused output rows."""
    inputs, grads = case.inputs(WIDTH, dtype), case.gradients(WIDTH, dtype)
    rows = [torch.cat((part, part.new_full((spare, WIDTH), torch.nan))) for part in inputs]
    want, returned = exchange(values(inputs), case.table)[me], exchange(values(grads), transposed(case.table))[me]
    most = max(sum(column) for column in transposed(case.table)) + padding
    for fills in (False, True):
        x = rows[me].clone().requires_grad_()
        with saved_tensors() as saved:
            out, received = all_to_all(x, splits(case.sent(me)), most, group, out_padded=fills)
        assert sum(tensor.numel() for tensor in saved) == case.world * (case.world + 1), "saves the ranks' splits"
        assert_same(out.detach(), padded(want, most) if fills else want, f"{dtype} {fills}")
        assert_same(received, splits(case.received(me)))
        assert not received.requires_grad
        grad = padded(grads[me], most, torch.nan) if fills else grads[me]  # gradients of padding rows are dropped
        out.backward(grad)
        assert_same(x.grad, padded(returned, len(x)), f"gradient {dtype} {fills}")
    assert not overflowed(group)


def every_routing(me: int, world: int, group: str | None) -> None:
    for seed, kind in enumerate(KINDS):
        for dtype, spare, padding in ((torch.bfloat16, 0, 0), (torch.float32, 3, 5)):
            check(make_case(kind, world, 2, seed=seed), me, group, dtype, spare, padding)
    case = make_case("uneven", world, 2)
    x = case.inputs(WIDTH, torch.float32)[me].requires_grad_()
    out, _ = all_to_all(x, splits(case.sent(me)), 500, group)
    assert_same(out.detach(), to_mxfp8_a2a_dequant(x.detach(), case.received(me), case.sent(me), group))
    (grad,) = torch.autograd.grad(out, x, quantize_mx(case.gradients(WIDTH, torch.float32)[me]), retain_graph=True)
    returned = exchange(values(case.gradients(WIDTH, torch.float32)), transposed(case.table))[me]
    assert_same(grad, returned, "an MX gradient")
    out.sum().backward()
    assert_same(x.grad, torch.ones_like(x).detach(), "an expanded gradient")
    strided = case.inputs(WIDTH, torch.float32)[me].t().contiguous().t()
    assert_same(all_to_all(strided, splits(case.sent(me)), 500, group)[0], out.detach(), "rows in strides")


def overflow_of_one_rank(me: int, world: int, group: str | None) -> None:
    """The last rank alone receives too many rows: an error on every rank, or the rows that fit and a flag on every rank."""
    counts = torch.tensor([[2] * world] * world)
    counts[:, -1] = 4
    inputs = [torch.randn(int(line.sum()), WIDTH, generator=seeded(i)) for i, line in enumerate(counts)]
    most = 4 * world - 3
    with raises_naming("mxfp8_on_device_all_to_all_v", f"{4 * world}] rows", f"max_output_rows_per_rank={most}", "larger"):
        all_to_all(inputs[me], splits(counts[me].tolist()), most, group)
    assert not overflowed(group), "an error sets no flag"

    kept = counts.clone()
    kept[-1, -1] = 1
    x = inputs[me].clone().requires_grad_()
    out, received = all_to_all(x, splits(counts[me].tolist()), most, group, out_padded=True)
    sent = [
        torch.cat((rows[: sum(line[:-1]) + last[-1]],)) for rows, line, last in zip(inputs, counts.tolist(), kept.tolist(), strict=True)
    ]
    want = exchange(values(sent), kept.tolist())[me]
    assert_same(out.detach(), padded(want, most))
    assert received.tolist() == kept[:, me].tolist()
    out.backward(torch.ones_like(out))
    assert_same(x.grad, padded(torch.ones(int(kept[me].sum()), WIDTH), len(x)), "no gradient for rows that were not sent")
    all_to_all(x[:0], splits([0] * world), most, group, out_padded=True)
    assert overflowed(group), "the flag stays until it is read"
    assert not overflowed(group)


def wrong_splits(me: int, world: int, group: str | None) -> None:
    """Rank 0's splits are invalid: an error on every rank, or a flag and no write outside the output."""
    x = torch.randn(3 * world, WIDTH).requires_grad_()
    for bad in ([-1] + [3] * (world - 1), [3] * (world - 1) + [4], [2**62] * world):
        mine = splits(bad if me == 0 else [3] * world)
        with raises_naming("input_splits of rank 0", "sum(input_splits) <= its rows"):
            all_to_all(x, mine, 4 * world, group)
        out, received = all_to_all(x, mine, 4 * world, group, out_padded=True)
        assert 0 <= received.min() <= received.sum() <= 4 * world
        out.sum().backward()
        assert overflowed(group)


def other_numbers(me: int, world: int, group: str | None) -> None:
    x, counts = torch.randn(2 * world, WIDTH), splits([2] * world)
    with raises_naming("max_output_rows_per_rank is 8 on rank 0 and 9 on rank 1"):
        all_to_all(x, counts, 8 + (me == 1), group)
    with raises_naming("bytes of an input's value is 4 on rank 0 and 2 on rank 1"):
        all_to_all(x.bfloat16() if me == 1 else x, counts, 8, group)
    with raises_naming("width is 96 on rank 0 and 64 on rank 1"):
        all_to_all(x[:, :64] if me == 1 else x, counts, 8, group)
    assert all_to_all(x, counts, 2 * world, group)[0].shape == x.shape, "the group still works"


def bad_input(me: int, world: int, group: str | None) -> None:
    x, counts = torch.randn(2 * world, WIDTH), splits([2] * world)
    with raises_naming("mxfp8_on_device_all_to_all_v", "multiples of 32"):
        all_to_all(x[:, :48], counts, 8, group)
    with raises_naming("torch.float64", "bfloat16 or float32"):
        all_to_all(x.double(), counts, 8, group)
    with raises_naming("input_splits are list", f"int64 tensor on {x.device}", "to_mxfp8_a2a_dequant"):
        all_to_all(x, counts.tolist(), 8, group)
    with raises_naming(f"input_splits are torch.int32 on {x.device}"):
        all_to_all(x, counts.int(), 8, group)
    with raises_naming(f"input_splits are ({world + 1},), want ({world},)"):
        all_to_all(x, splits([1] * (world + 1)), 8, group)
    for most in (-1, 2.0, True):
        with raises_naming(f"max_output_rows_per_rank={most!r}", "int of at least 0"):
            all_to_all(x, counts, most, group)


def everything(me: int, world: int, group: str | None) -> None:
    checks: list[Ranks] = [every_routing, overflow_of_one_rank, wrong_splits, bad_input]
    for checked in [*checks, *([other_numbers] if world > 1 else [])]:
        checked(me, world, group)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_over_symmetric_memory(world: int) -> None:
    run_virtual(everything, world)


def _over_gloo(rank: int, world: int) -> None:
    everything(rank, world, None)


@pytest.mark.parametrize("world", [1, 2])
def test_over_gloo(world: int) -> None:
    run_ranks(_over_gloo, world)


def memory(me: int, world: int, group: str) -> None:
    """Results keep no buffer, so several calls need no more memory than one."""
    from mxep.comm import transport_of

    transport, sizes, held = transport_of(group, torch.device("cpu")), [], []
    for _ in range(5):
        held.append(all_to_all(torch.randn(2 * world, WIDTH), splits([2] * world), 64, group))
        sizes.append(transport.nbytes())
    assert len(set(sizes)) == 1


def test_results_keep_no_buffer() -> None:
    run_virtual(memory, 2)


def first_in_inference_mode(me: int, world: int, name: str) -> None:
    """State that a first call in inference mode creates can be used in training."""
    x, splits = torch.ones(4, 32, dtype=torch.bfloat16), torch.tensor([2, 2])
    with torch.inference_mode():
        all_to_all(x, splits, 2 * world, name, out_padded=True)
    x.requires_grad_()
    all_to_all(x, splits, 2 * world, name, out_padded=True)[0].sum().backward()
    assert x.grad is not None
    assert not overflowed(name)


def test_a_first_call_in_inference_mode() -> None:
    run_virtual(first_in_inference_mode, 2)


def flags_of_a_group_of_the_same_name(rank: int, world: int, folder: str) -> None:
    rows = torch.ones(64, 128)
    all_to_all(rows, torch.tensor([64, 0]), 48, out_padded=True)
    close_transports()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/again", world), rank=rank, world_size=world)
    all_to_all(rows, torch.tensor([10, 10]), 48, out_padded=True)
    assert not overflowed()


def test_a_flag_ends_with_its_group(tmp_path: Path) -> None:
    run_ranks(flags_of_a_group_of_the_same_name, 2, str(tmp_path))

"""mxfp8_on_device_all_to_all_v on GPUs: streams and flags, no host sync, virtual ranks; two GPUs and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from tests.by_hand import ByHand
from tests.ep.test_quantized_all_to_all import WIDTH, everything, padded, splits, values
from tests.ranks import run_ranks
from tests.truth import KINDS, assert_same, exchange, make_case, transposed
from tests.virtual import alone, run_virtual

from mxep import mxfp8_on_device_all_to_all_v
from mxep.comm import close_transports, register, set_transport
from mxep.ep.quantized_all_to_all import _OnDeviceAllToAll, _OnDeviceOptions

gpu, multi_gpu = pytest.mark.gpu, pytest.mark.multi_gpu


@gpu
def test_alone_over_streams() -> None:
    register("alone", alone())
    with torch.device("cuda"):
        everything(0, 1, "alone")
    close_transports("alone")


@gpu
def test_no_host_sync(no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    register("alone", alone())
    x = torch.randn(50, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    counts, grad = torch.tensor([40], device="cuda"), torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def both_ways() -> torch.Tensor:
        out, _ = mxfp8_on_device_all_to_all_v(x, counts, 64, "alone", out_padded=True)
        return torch.autograd.grad(out, x, grad)[0]

    both_ways()  # memory is there and kernels are loaded
    with no_sync():
        got = both_ways()
    assert_same(got, padded(values([grad[:40]])[0], 50))
    close_transports("alone")


def by_hand(me: int, world: int, name: str) -> None:
    function = ByHand(_OnDeviceAllToAll)
    with torch.device("cuda"):
        for seed, kind in enumerate(KINDS):
            case = make_case(kind, world, 2, seed=seed)
            inputs, grads = case.inputs(WIDTH, torch.bfloat16), case.gradients(WIDTH, torch.bfloat16)
            most = max(sum(column) for column in transposed(case.table))
            for fills in (False, True):
                out, received = function.apply(inputs[me], splits(case.sent(me)), _OnDeviceOptions(name, most, fills))
                want = exchange(values(inputs), case.table)[me]
                assert_same(out, padded(want, most) if fills else want, f"{kind} {fills}")
                assert received.tolist() == case.received(me)
                d_x = function.backward_of_last()(padded(grads[me], most, torch.nan) if fills else grads[me])[0]
                assert_same(d_x, exchange(values(grads), transposed(case.table))[me], f"{kind} {fills} gradient")


@gpu
@pytest.mark.parametrize("world", [2, 5])
def test_virtual_ranks(world: int) -> None:
    run_virtual(by_hand, world, device="cuda")


def _on_two_gpus(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)))
    assert set_transport("symmetric", group, timeout_s=60) == "symmetric"
    assert set_transport("collective") == "collective"
    with torch.device("cuda", rank):
        everything(rank, world, group.group_name)
        everything(rank, world, None)
    close_transports()


@multi_gpu
def test_two_gpus() -> None:
    run_ranks(_on_two_gpus, 2, backend="cpu:gloo,cuda:nccl")

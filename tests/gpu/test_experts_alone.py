"""Experts left out of FSDP on two GPUs: the bits of FSDP over a mesh of one rank, over both transports."""

from __future__ import annotations

import pytest
from tests.parallel.test_experts_alone import compare_ranks
from tests.ranks import run_ranks

from mxep.comm import TRANSPORTS, close_transports, set_transport

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def _compare(rank: int, world: int, transport: str) -> None:
    set_transport(transport)
    compare_ranks(rank, world, "cuda")
    close_transports()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_gpus(transport: str) -> None:
    run_ranks(_compare, 2, transport, backend="cpu:gloo,cuda:nccl", timeout=240)

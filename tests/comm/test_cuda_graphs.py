"""Driver calls for CUDA graphs, with a stubbed driver."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from mxep.comm import cuda_graphs

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, of cuda.h


def test_the_watchdogs_thread_uses_the_relaxed_capture_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode is still in memory when the driver reads it; the driver writes the previous mode in its place."""
    read = []

    def exchange(device: torch.device, address: int) -> None:
        gc.collect()
        junk = [ctypes.c_int(0) for _ in range(1000)]
        word = ctypes.c_int.from_address(address)
        read.append(word.value)
        word.value = 0
        del junk

    monkeypatch.setattr(cuda_graphs, "_exchange_mode", exchange)
    cuda_graphs.allow_queries_during_captures(torch.device("cuda", 0))
    assert read == [RELAXED]

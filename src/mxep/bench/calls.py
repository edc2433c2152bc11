"""Calls that are too short to time one by one: several in one CUDA graph for the device's time, many without a wait for the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mxep.bench.timing import Arm, finish

CALLS = 10  # of an arm
_BATCH, _BATCHES = 50, 7  # calls between two waits for the device

Call = Callable[[], object]


def captured(call: Call, device: torch.device) -> Arm:
    """`CALLS` calls in a row, on a GPU as one graph."""
    if device.type != "cuda":
        return {"": lambda: [call() for _ in range(CALLS)]}
    call()
    finish(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return {"": graph.replay}


def host_us(call: Call, device: torch.device, batch: int = _BATCH) -> float:
    """Microseconds of the host per call, median over batches of so many calls that the device's queue holds: the host never waits."""
    found = []
    for _ in range(_BATCHES):
        finish(device)
        start = time.perf_counter()
        for _ in range(batch):
            call()
        found.append(1e6 * (time.perf_counter() - start) / batch)
    finish(device)
    return round(statistics.median(found[1:]), 1)  # the first one warms up

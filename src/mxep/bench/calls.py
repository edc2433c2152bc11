"""Calls that are too short to time one by one: several in one CUDA graph for the device's time, many without a wait for the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mxep.bench.timing import Arm, finish

CALLS = 10  # of an arm
MOST_HOST_SPREAD = 1.25  # median over lowest batch
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


def host_facts(calls: Mapping[str, Call], device: torch.device, batch: int = _BATCH) -> dict[str, Any]:
    """For a record: `host_us`, what each call costs the host, and `host_unsteady`, those for which the host was not there all the time.

    A call's microseconds are the median over batches of `batch` calls; on a host that does nothing else the lowest batch is near it.
    """
    batches = {name: host_batches_us(call, device, batch) for name, call in calls.items()}
    median = {name: statistics.median(found) for name, found in batches.items()}
    return {
        "host_us": {name: round(us, 1) for name, us in median.items()},
        "host_unsteady": [name for name, us in median.items() if us > MOST_HOST_SPREAD * min(batches[name])],
    }


def host_batches_us(call: Call, device: torch.device, batch: int) -> list[float]:
    """Microseconds of the host per call in every batch of so many calls that the device's queue holds: the host never waits inside."""
    found = []
    for _ in range(_BATCHES):
        finish(device)
        start = time.perf_counter()
        for _ in range(batch):
            call()
        found.append(1e6 * (time.perf_counter() - start) / batch)
    finish(device)
    return found[1:]  # the first one warms up

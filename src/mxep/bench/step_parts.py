"""Where a training step's time goes: a trace of torch's profiler, as wall-clock time by what the GPU was at.

Kernels of several streams overlap; an instant counts for the first of `PARTS` that has a kernel then, so what is left for "exchange" is
exposed, and what is left for nothing at all is "idle".

>>> event = {"ph": "X", "cat": "kernel"}
>>> gemm = {**event, "name": "fp8_grouped_mm", "ts": 0.0, "dur": 60.0}
>>> sent = {**event, "name": "ncclDevKernel_SendRecv(args)", "ts": 40.0, "dur": 40.0}
>>> add = {**event, "name": "elementwise_kernel", "ts": 90.0, "dur": 10.0}
>>> {part: ms for part, ms in step_parts([gemm, sent, add]).items() if ms}
{'expert GEMMs': 0.06, 'exchange': 0.02, 'other': 0.01, 'idle': 0.01}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
PARTS: dict[str, re.Pattern[str]] = {  # the first that matches a kernel's name is its part, and the first goes before the others
    "expert GEMMs": re.compile(r"fp8_grouped_mm|fp8_wgrad|grouped_mm|grouped_wgrad|GroupProblemShape|gemm_grouped", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE),
    "dense GEMMs": re.compile(r"nvjet|gemm|cutlass|cublas|splitK|xmma", re.IGNORECASE),
    "MXFP8 passes": re.compile(r"quantize|rebase|token_(?:maxima|plan)|swiglu|place_|_zero_tail|row_map|segments", re.IGNORECASE),
    "optimizer": re.compile(r"multi_tensor|adam|lerp|foreach", re.IGNORECASE),
    "exchange": re.compile(r"nccl|^push|Memcpy PtoP|all_?gather|reduce_?scatter|SendRecv", re.IGNORECASE),
    "other": re.compile(""),
}
IDLE = "idle"


def part_of(name: str) -> str:
    """The part of a step that a kernel of this name belongs to; NCCL's kernels before whatever else their names may say."""
    if PARTS["exchange"].search(name):
        return "exchange"
    return next(part for part, pattern in PARTS.items() if pattern.search(name))


def step_parts(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds by part, from the first kernel's start to the last one's end; empty where no GPU was traced.

    Args:
        events: `traceEvents` of a chrome trace; times are in microseconds.
    """
    spans = [(event["ts"], event["ts"] + event["dur"], part_of(event["name"])) for event in events if event.get("cat") in _KINDS]
    if not spans:
        return {}
    names = [*PARTS, IDLE]
    edges = sorted([(start, 1, part) for start, _, part in spans] + [(end, -1, part) for _, end, part in spans])
    running = dict.fromkeys(PARTS, 0)
    found = dict.fromkeys(names, 0.0)
    before = edges[0][0]
    for at, change, part in edges:
        busy = next((name for name, count in running.items() if count), IDLE)
        found[busy] += at - before
        running[part] += change
        before = at
    return {name: round(us / 1e3, 4) for name, us in found.items()}

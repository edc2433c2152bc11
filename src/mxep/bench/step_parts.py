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

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mxep.bench.timing import hold
from mxep.private_folders import scratch_folder

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
PARTS: dict[str, re.Pattern[str]] = {  # the first that matches a kernel's name is its part, and the first goes before the others
    "expert GEMMs": re.compile(r"fp8_grouped_mm|fp8_wgrad|grouped_mm|grouped_wgrad|GroupProblemShape|gemm_grouped", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|sdpa|attention|cudnn", re.IGNORECASE),
    "dense GEMMs": re.compile(r"nvjet|gemm|cutlass|cublas|splitK|xmma", re.IGNORECASE),
    "MXFP8 passes": re.compile(r"quantize|rebase|token_(?:maxima|plan)|activat|place_|_zero_tail|row_map|segments", re.IGNORECASE),
    "optimizer": re.compile(r"multi_tensor|adam|lerp|foreach", re.IGNORECASE),
    "exchange": re.compile(r"nccl|^push|Memcpy PtoP|all_?gather|reduce_?scatter|SendRecv", re.IGNORECASE),
    "other": re.compile(""),
}
IDLE = "idle"


_AHEAD_MS = 30.0  # longer than the host takes for what is traced


def trace_of(work: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """`traceEvents` of what `work` runs on GPU `device`; it should have run before, so that nothing is compiled.

    The GPU waits first, so that it finds the host ahead of it, which the profiler slows down.
    """
    found = profile(activities=[ProfilerActivity.CUDA])
    found.start()
    hold(device, _AHEAD_MS)
    work()
    torch.cuda.synchronize(device)
    found.stop()
    with scratch_folder("trace") as folder:
        path = folder / "trace.json"
        found.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if "spin_kernel" not in event.get("name", "")]


def exposed_ms(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Milliseconds in which nothing ran but exchanges or waiting for them, before the first expert GEMM and behind its start.

    That is dispatch and combine of a forward, and of a backward combine's and dispatch's.  Gaps that the host leaves are in it, too.

    >>> event = {"ph": "X", "cat": "kernel"}
    >>> sent, back = ({**event, "name": "ncclDevKernel_SendRecv", "ts": ts, "dur": 30.0} for ts in (10.0, 100.0))
    >>> passed, gemm = {**event, "name": "quantize", "ts": 0.0, "dur": 15.0}, {**event, "name": "fp8_grouped_mm", "ts": 45.0, "dur": 75.0}
    >>> exposed_ms([passed, sent, gemm, back])
    (0.03, 0.01)
    """
    spans = sorted((event["ts"], event["ts"] + event["dur"], part_of(event["name"])) for event in events if event.get("cat") in _KINDS)
    first = next((start for start, _, part in spans if part == "expert GEMMs"), None)
    if first is None:
        return 0.0, 0.0
    before = behind = 0.0
    covered = spans[0][0]
    for start, end, _ in [*(span for span in spans if span[2] != "exchange"), (max(end for _, end, _ in spans),) * 2 + ("",)]:
        if start > covered:
            before += max(min(start, first) - covered, 0)
            behind += max(start - max(covered, first), 0)
        covered = max(covered, end)
    return round(before / 1e3, 4), round(behind / 1e3, 4)


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

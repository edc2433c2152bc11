"""What the memory-bound benchmarks share: kernels against a device copy that reads and writes as many bytes, byte for byte checked.

With few rows a call is mostly its launch: their records say what it costs the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mxep.bench.calls import CALLS, Call, captured, host_facts
from mxep.bench.ceilings import copy_of
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.timing import Timing

Tensors = tuple[torch.Tensor, ...]
ROWS = 131072
FEW_ROWS = (128, 1024, 8192)
WIDTHS = (1408, 2048, 4096, 7168, 8192)
_CHECKED_ROWS = 4096  # twins are slow and need float32 copies
MOST = 1.0  # of a copy's bytes per second


@dataclass(frozen=True)
class Mover:
    """One memory-bound kernel: what it does to all rows, its twin and it on a few rows, bytes read and written, the share it must reach
    (None: it is only reported)."""

    run: Callable[[], object]
    few: Callable[[], Tensors]
    twin: Callable[[], Tensors]
    moved_bytes: int
    target: float | None


def sizes(setting: Setting, few: bool = False) -> list[tuple[int, int]]:
    """(T, D) of the cases, those with few rows last and only when asked for."""
    if setting.tiny:
        return [(256, 128), *([(64, 128)] if few else [])]
    widths = (7168,) if setting.quick else WIDTHS
    return [(T, D) for T in (ROWS, *(FEW_ROWS if few else ())) for D in widths]


def checked_rows(num_rows: int) -> int:
    """How many rows the check looks at."""
    return min(num_rows, _CHECKED_ROWS)


def random_rows(setting: Setting, T: int, D: int) -> torch.Tensor:
    """(T, D) bf16, normal, rows of different size."""
    generator = torch.Generator(setting.device).manual_seed(0)
    x = torch.randn(T, D, device=setting.device, dtype=torch.bfloat16, generator=generator)
    return x * torch.exp2(torch.randint(-8, 8, (T, 1), device=setting.device, generator=generator)).bfloat16()


def _different(movers: Mapping[str, Mover]) -> str | None:
    for name, mover in movers.items():
        for got, want in zip(mover.few(), mover.twin(), strict=True):
            if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
                return f"{name} differs from its twin"
    return None


def _shares(times: Mapping[str, Timing], main: str, movers: Mapping[str, Mover], copied: int) -> dict[str, Figure]:
    """Each kernel's bytes per second as a share of the copy's."""
    rate = 2 * copied / times["copy"].median_ms
    shares = {name: Figure(mover.moved_bytes / times[name].median_ms / rate, MOST, mover.target) for name, mover in movers.items()}
    return {"fraction_of_copy": shares[main], **{f"{name}_fraction_of_copy": share for name, share in shares.items()}}


def memory_cases(setting: Setting, movers_of: Callable[[int, int], tuple[str, dict[str, Mover]]], few: bool = False) -> Iterator[Case]:
    """A case for every size: `movers_of(T, D)` gives the name of the main kernel and all of them; `few`: few rows as well.

    The records' `bytes` are what a call reads and writes.  With few rows an arm is `calls` calls in one CUDA graph, `host_us` is what
    a call costs the host, and no share of a copy is asked for.
    """
    every = sizes(setting, few)
    for T, D in every:
        if setting.device.type == "cuda":
            # Where the driver has put a tensor's pages decides up to a tenth of a transposing kernel's time, so each size gets pages of
            # its own instead of pieces of another's.
            torch.cuda.empty_cache()
        yield _case(setting, T, D, movers_of, timed_calls=every[0][0] != T)


def _case(setting: Setting, T: int, D: int, movers_of: Callable[[int, int], tuple[str, dict[str, Mover]]], timed_calls: bool) -> Case:
    main, movers = movers_of(T, D)
    copied = max(mover.moved_bytes for mover in movers.values()) // 2
    calls: dict[str, Call] = {"copy": copy_of(copied, setting.device), **{name: mover.run for name, mover in movers.items()}}
    moved = {"copy": 2 * copied, **{name: mover.moved_bytes for name, mover in movers.items()}}
    if timed_calls:
        movers = {name: replace(mover, target=None) for name, mover in movers.items()}
        arms = {name: captured(call, setting.device) for name, call in calls.items()}
        facts: Callable[[], dict[str, Any]] = partial(_facts_of_calls, moved, calls, setting.device)
    else:
        arms = {name: {"": call} for name, call in calls.items()}
        facts = partial(dict, bytes=moved)
    return Case(
        f"{T} x {D}",
        {"T": T, "D": D},
        arms,
        partial(_different, movers),
        partial(_shares, main=main, movers=movers, copied=copied),
        after=facts,
    )


def _facts_of_calls(moved: Mapping[str, int], calls: Mapping[str, Call], device: torch.device) -> dict[str, Any]:
    return {"bytes": moved, "calls": CALLS, **host_facts(calls, device)}

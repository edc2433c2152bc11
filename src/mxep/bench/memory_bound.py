"""What the memory-bound benchmarks share: kernels against a device copy that reads and writes as many bytes, byte for byte checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.timing import Arm, Timing

Tensors = tuple[torch.Tensor, ...]
ROWS = 131072
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


def sizes(setting: Setting) -> list[tuple[int, int]]:
    """(T, D) of the cases."""
    if setting.tiny:
        return [(256, 128)]
    return [(ROWS, width) for width in ((7168,) if setting.quick else WIDTHS)]


def few_rows(num_rows: int) -> int:
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


def memory_cases(setting: Setting, movers_of: Callable[[int, int], tuple[str, dict[str, Mover]]]) -> Iterator[Case]:
    """A case for every size: `movers_of(T, D)` gives the name of the main kernel and all of them."""
    for T, D in sizes(setting):
        main, movers = movers_of(T, D)
        copied = max(mover.moved_bytes for mover in movers.values()) // 2
        source = torch.randint(0, 256, (copied,), dtype=torch.uint8, device=setting.device)
        target = torch.empty_like(source)
        arms: dict[str, Arm] = {"copy": {"": partial(target.copy_, source)}, **{name: {"": mover.run} for name, mover in movers.items()}}
        moved = {"copy": 2 * copied, **{name: mover.moved_bytes for name, mover in movers.items()}}
        yield Case(
            f"{T} x {D}",
            {"T": T, "D": D},
            arms,
            partial(_different, movers),
            partial(_shares, main=main, movers=movers, copied=copied),
            after=partial(dict, bytes=moved),
        )

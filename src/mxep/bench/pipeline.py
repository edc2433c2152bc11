"""`mxep bench pipeline`: dispatch, permute, one grouped GEMM, unpermute, combine, and their backward, on every rank of a run.

Three arms over one transport (NCCL; gloo on CPUs), with the same plan, permute and data: `bf16`; `bf16_exchange`, which sends bf16 and
quantises what arrives, so that all three GEMMs run in MXFP8; `mxfp8_nccl`, the five blocks.  Forward is timed alone, backward is
`out.backward(g)` with a fixed g.  Weights are quantised once, outside the clock, as once per optimizer step; giving their bytes one
exponent per column, a pass over the weight, is still under the clock of the two MXFP8 arms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from mxep.bench.accuracy import LEAST_DB, sqnr_db
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.routing import counts_of
from mxep.bench.timing import Mark, Timing, barrier, between_ms, finish, largest, mark
from mxep.ep.journey import Permuted, combine, dispatch, permute, unpermute
from mxep.ep.plan import ExchangePlan
from mxep.grouped_mm import expert_mm
from mxep.mx.tensor import quantize_mx
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.recipe import RECIPES

ROWS, EXPERTS = 131072, 8  # a rank's
SHAPES = ((8192, 5120), (7168, 2048), (2048, 1408))  # (D, N)
ARMS = ("bf16", "bf16_exchange", "mxfp8_nccl")
STOPS = ("dispatch", "permute", "experts", "unpermute", "combine")
TARGETS = {(8192, 5120): 1.45, (7168, 2048): 1.33, (2048, 1408): 1.22}
LIMIT = 2.9  # of a whole pipeline against bf16, by the rates of the wire, the FP8 units and memory of H200
_PART_RUNS = 7
_MX = "mxfp8_wgrad_with_hp"


class _QuantizeRows(torch.autograd.Function):
    """bf16 rows to MX; their gradient stays as it is."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return quantize_mx(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _QuantizeGradient(torch.autograd.Function):
    """Rows stay as they are; their gradient goes to MX."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return quantize_mx(grads[0].contiguous())


class Weight(torch.nn.Module):
    """One expert weight (L, N, D) and its quantised forms, kept from call to call."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)
        self.kept = CachedWeight(WeightCache(), self, "weight")


def _experts(arm: str, permuted: Permuted, w: Weight) -> torch.Tensor:
    if arm == "bf16":
        return expert_mm(permuted.rows, w.weight, permuted.offsets, RECIPES["hp"])
    if arm == "bf16_exchange":
        return _QuantizeGradient.apply(expert_mm(_QuantizeRows.apply(permuted.rows), w.weight, permuted.offsets, RECIPES[_MX], w.kept))
    return expert_mm(permuted.rows, w.weight, permuted.offsets, RECIPES[_MX], w.kept)


def walk(arm: str, x: torch.Tensor, w: Weight, plan: ExchangePlan, at: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """x (T', D) and a weight (L, N, D) -> (T', N); `at` sees the rows behind every stop."""
    recipe = RECIPES[_MX if arm == "mxfp8_nccl" else "hp"]
    rows = dispatch(x, plan, recipe)
    at(rows)
    permuted = permute(rows, plan, recipe)
    at(permuted.rows)
    out = _experts(arm, permuted, w)
    at(out)
    home = unpermute(out, permuted)
    at(home)
    out = combine(home, plan, recipe)
    at(out)
    return out


class Pipeline:
    """One shape and routing on this rank: its data, and how an arm runs over them."""

    def __init__(self, setting: Setting, T: int, D: int, N: int, L: int, routing: str) -> None:
        self.setting = setting
        generator = torch.Generator(setting.device).manual_seed(100 + setting.rank)
        normal = partial(torch.randn, device=setting.device, dtype=torch.bfloat16, generator=generator)
        self.x: torch.Tensor = normal(T, D).requires_grad_()
        self.g: torch.Tensor = normal(T, N)
        self.w = Weight(normal(L, N, D) / D**0.5)
        counts = counts_of(routing, T, L * setting.world).to(setting.device)
        self.plan = ExchangePlan.from_counts(counts, setting.group)
        self.out: torch.Tensor | None = None

    def stages(self, arm: str) -> dict[str, Callable[[], object]]:
        """Forward and backward as the clock calls them."""
        return {"forward": lambda: self.forward(arm), "backward": self.backward}

    def forward(self, arm: str, at: Callable[[torch.Tensor], object] = lambda rows: None) -> None:
        self.x.grad = self.w.weight.grad = self.out = None
        self.out = walk(arm, self.x, self.w, self.plan, at)

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.g)

    def results(self, arm: str) -> list[torch.Tensor]:
        """(out, dx, dW) of one pass."""
        self.forward(arm)
        self.backward()
        assert self.out is not None
        assert self.x.grad is not None
        assert self.w.weight.grad is not None
        return [self.out.detach(), self.x.grad, self.w.weight.grad]

    def check(self) -> str | None:
        """Every arm against bf16, all ranks together: what torchao's own tests ask for, and finite."""
        reference = self.results(ARMS[0])
        for arm in ARMS[1:]:
            for (name, least), want, got in zip(LEAST_DB.items(), reference, self.results(arm), strict=True):
                value = sqnr_db(want, got, self.setting.group)
                if not value >= least:
                    return f"{arm}: {name} at {value:.1f} dB from bf16, want at least {least:.0f} dB"
        self.out = self.x.grad = self.w.weight.grad = None
        return None

    def parts(self, arm: str) -> dict[str, float]:
        """Milliseconds of every stop, forward and backward, medians, largest over ranks; hooks put marks between the stops' backwards."""
        device, group = self.setting.device, self.setting.group
        names = [f"{stop}_forward" for stop in STOPS] + [f"{stop}_backward" for stop in reversed(STOPS)]
        samples: list[list[float]] = []
        for _ in range(_PART_RUNS):
            marks: list[Mark] = []
            behind: list[Mark] = []

            def at(rows: torch.Tensor, marks: list[Mark] = marks, behind: list[Mark] = behind) -> None:
                marks.append(mark(device))
                rows.register_hook(lambda grad: behind.append(mark(device)))

            barrier(device, group)
            start = mark(device)
            self.forward(arm, at)
            self.backward()
            end = mark(device)
            finish(device)
            line = [start, *marks, *behind[1:], end]  # behind[0]: the gradient that backward starts with
            ms = [between_ms(a, b) for a, b in itertools.pairwise(line)]
            ms[len(STOPS)] = between_ms(behind[0], line[len(STOPS) + 1])
            samples.append(ms)
        middle = [Timing.of(list(column)).median_ms for column in zip(*samples, strict=True)]
        return dict(zip(names, (round(ms, 4) for ms in largest(middle, device, group)), strict=True))

    def all_parts(self) -> dict[str, Any]:
        """The record's field: every arm's parts."""
        return {"parts_ms": {arm: self.parts(arm) for arm in ARMS}}


def judge(times: Mapping[str, Timing], D: int, N: int, routing: str) -> dict[str, Figure]:
    """Ratios of totals, forward and backward."""
    ms = {name: timing.median_ms for name, timing in times.items()}
    target = TARGETS.get((D, N)) if routing == "balanced" else None
    return {
        "nccl_total_vs_bf16": Figure(ms["bf16_total"] / ms["mxfp8_nccl_total"], LIMIT, target),
        "nccl_forward_vs_bf16": Figure(ms["bf16_forward"] / ms["mxfp8_nccl_forward"], LIMIT),
        "nccl_backward_vs_bf16": Figure(ms["bf16_backward"] / ms["mxfp8_nccl_backward"], LIMIT),
        "nccl_total_vs_bf16_exchange": Figure(
            ms["bf16_exchange_total"] / ms["mxfp8_nccl_total"], LIMIT * ms["bf16_exchange_total"] / ms["bf16_total"]
        ),
    }


def cases(setting: Setting) -> Iterator[Case]:
    """Every shape, balanced and by Zipf's law."""
    T, L = (256, 4) if setting.tiny else (ROWS, EXPERTS)
    shapes = ((128, 64),) if setting.tiny else SHAPES[1:2] if setting.quick else SHAPES
    for D, N in shapes:
        for routing in ("balanced", "zipf"):
            pipeline = Pipeline(setting, T, D, N, L, routing)
            yield Case(
                f"{T} rows a rank, D {D}, N {N}, {L} experts a rank, {routing}",
                {"T": T, "D": D, "N": N, "L": L},
                {arm: pipeline.stages(arm) for arm in ARMS},
                pipeline.check,
                partial(judge, D=D, N=N, routing=routing),
                {"routing": routing},
                after=pipeline.all_parts,
            )

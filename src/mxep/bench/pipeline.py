"""`mxep bench pipeline`: dispatch, permute, one grouped GEMM, unpermute, combine, and their backward, on every rank of a run.

Arms with the same data: over NCCL (gloo on CPUs) `bf16`; `bf16_exchange`, which sends bf16, quantises in permute and runs all three GEMMs
in MXFP8; `mxfp8_nccl`, the five blocks.  If the ranks can share memory also `mxfp8_blocks`, the five blocks over symmetric memory.
`mxfp8` is the one call `ep_grouped_mm`, over symmetric memory if possible (the record's `mxfp8_over` says), with counts known to the host.
Forward is timed alone, backward is `out.backward(g)` with a fixed g.  Weights are quantised once, outside the timing, as once per optimizer
step.  GPUs wait before each run until the host is ahead, as it is inside a training step: the times are the GPUs'.

One more arm, `limit`, runs what no arrangement of separate kernels can avoid, at this machine's speed: the exchanges of the same bytes,
dense FP8 GEMMs of this rank's size, and copies of the bytes that quantising, permuting and transposing move.  Its time is the limit of
`mxfp8_nccl` and of `mxfp8`, measured in the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from mxep.bench.accuracy import LEAST_DB, db_problem, five_blocks, gradients, sqnr_db
from mxep.bench.baselines import copy_of, counts_of, dense_fp8, random_bytes, random_fp8
from mxep.bench.ranks import symmetric_group
from mxep.bench.registry import Case, Figure, Setting, speed_ups
from mxep.bench.timing import Arm, Mark, Timing, barrier, between_ms, hold, mark, max_over_ranks, synchronize, use_expandable_segments
from mxep.ep.ep_grouped_mm_collective import ep_grouped_mm
from mxep.ep.exchange_plan import ExchangePlan
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.recipe import RECIPES
from mxep.shapes import MX_BLOCK, record_bytes

ROWS, EXPERTS = 131072, 8  # a rank's
SHAPES = ((8192, 5120), (7168, 2048), (2048, 1408))  # (D, N)
ARMS = {"bf16": "hp", "bf16_exchange": "mxfp8_gemm_wgrad_with_mx", "mxfp8_nccl": "mxfp8_wgrad_with_hp"}  # arm of five stages -> recipe
ONE_CALL, ONE_CALL_RECIPE = "mxfp8", "mxfp8_wgrad_with_hp"  # has no stages, and no times of them
BLOCKS = "mxfp8_blocks"  # the stages of mxfp8_nccl, over symmetric memory
BASELINES = ("bf16", "bf16_exchange")
STAGES = ("dispatch", "permute", "experts", "unpermute", "combine")
TARGETS = {  # ratio -> (D, N) -> target
    "nccl_total_vs_bf16": {(8192, 5120): 1.45, (7168, 2048): 1.33, (2048, 1408): 1.22},
    "total_vs_bf16": {(8192, 5120): 2.0, (7168, 2048): 2.2, (2048, 1408): 1.95},
    "total_vs_bf16_exchange": {(8192, 5120): 1.3, (7168, 2048): 1.6, (2048, 1408): 1.6},
}
_PART_RUNS, _PART_HOLD_MS = 7, 10.0  # GPUs wait before each run, so that the host gets ahead


class _CachedParameter(torch.nn.Module):
    """One expert weight (L, N, D) and its quantised forms, kept between calls."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)
        self.kept = CachedWeight(WeightCache(), self, "weight")


def limit(plan: ExchangePlan, device: torch.device, D: int, N: int) -> Arm:
    """The five stages if each moves its bytes and multiplies at this machine's own rates.

    Exchanges: packed records of D and N, and rows of D and N in bf16.  GEMMs: dense `torch._scaled_mm` over this rank's rows.  Further
    bytes read and written: quantising x and g; gathering MX rows of both; scattering bf16 rows of both; reading MX rows of both and
    writing their transposes for wgrad.  A rebase for the GEMMs is not counted: a producer can fuse it.

    Its memory is allocated in its first run, when the arms have been checked.
    """
    made = cache(partial(_work_of_limit, plan, device, D, N))

    def run(stage: str) -> None:
        for work in made()[stage]:
            work()

    return {stage: partial(run, stage) for stage in ("forward", "backward")}


def _work_of_limit(plan: ExchangePlan, device: torch.device, D: int, N: int) -> dict[str, list[Callable[[], object]]]:
    """The exchanges, products and copies of each stage."""
    T, R = sum(plan.input_splits), sum(plan.output_splits)
    there = (plan.output_splits, plan.input_splits, plan.group_name)
    back = (plan.input_splits, plan.output_splits, plan.group_name)
    rows = partial(random_bytes, device=device)
    sent = {
        "forward": [(rows(T, record_bytes(D)), *there), (rows(R, 2 * N), *back)] if plan.group_name else [],
        "backward": [(rows(T, record_bytes(N)), *there), (rows(R, 2 * D), *back)] if plan.group_name else [],
    }
    mx = 1 + 1 / MX_BLOCK  # bytes of a value
    forward = T * D * (2 + mx) + R * D * 2 * mx + R * N * 4
    backward = T * N * (2 + mx) + R * N * 2 * mx + R * D * 4 + R * (D + N) * (mx + 1)
    copies = {"forward": copy_of(round(forward / 2), device), "backward": copy_of(round(backward / 2), device)}
    R = max(R // MX_BLOCK * MX_BLOCK, MX_BLOCK)
    x, g, w = (random_fp8(*shape, device) for shape in ((R, D), (R, N), (N, D)))
    x_t, g_t, w_t = (value.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn) for value in (x, g, w))
    products = {"forward": [dense_fp8(x, w)], "backward": [dense_fp8(g, w_t), dense_fp8(g_t, x_t)]}
    return {
        stage: [*(partial(torch.ops.mxep.exchange_rows, *exchange) for exchange in sent[stage]), *products[stage], copies[stage]]
        for stage in sent
    }


class PipelineProblem:
    """One shape and routing on this rank: its data and arms; `shared`: a group over symmetric memory, if any."""

    def __init__(self, setting: Setting, T: int, D: int, N: int, L: int, routing: str, shared: str | None = None) -> None:
        self.setting = setting
        generator = torch.Generator(setting.device).manual_seed(100 + setting.rank)
        normal = partial(torch.randn, device=setting.device, dtype=torch.bfloat16, generator=generator)
        self.x: torch.Tensor = normal(T, D).requires_grad_()
        self.g: torch.Tensor = normal(T, N)
        self.w = _CachedParameter(normal(L, N, D) / D**0.5)
        counts = counts_of(routing, T, L * setting.world).to(setting.device)
        self.plan = ExchangePlan.from_counts(counts, setting.group)
        self.plans = dict.fromkeys(ARMS, self.plan)
        best = self.plan
        if shared is not None:
            best = self.plans[BLOCKS] = replace(self.plan, group_name=shared)
        self.plans[ONE_CALL] = best
        self.counts = self.plan.num_tokens_per_expert_received.cpu()
        self.out: torch.Tensor | None = None

    def stages(self, arm: str) -> dict[str, Callable[[], object]]:
        """Forward and backward as they are timed."""
        return {"forward": lambda: self.forward(arm), "backward": self.backward}

    def forward(self, arm: str, after_stage: Callable[[torch.Tensor], object] = lambda rows: None) -> None:
        w, plan = self.w, self.plans[arm]
        self.x.grad = w.weight.grad = self.out = None
        if arm == ONE_CALL:
            splits = plan.input_splits, plan.output_splits
            self.out = ep_grouped_mm(self.x, w.weight, *splits, self.counts, plan.group_name, ONE_CALL_RECIPE, kept=w.kept)
        else:
            recipe = RECIPES[ARMS["mxfp8_nccl" if arm == BLOCKS else arm]]
            self.out = five_blocks(self.x, w.weight, plan, recipe, None if recipe.gemm == "hp" else w.kept, after_stage)

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.g)

    def results(self, arm: str) -> list[torch.Tensor]:
        """(out, dx, dW) of one forward and backward."""
        self.forward(arm)
        self.backward()
        assert self.out is not None
        return [self.out.detach(), *gradients((self.x, self.w.weight))]

    def check(self) -> str | None:
        """Every arm against bf16 over all ranks, with the bounds of torchao's own tests; over symmetric memory also the same bits."""
        first, *others = self.plans
        want = self.results(first)
        blocks: list[torch.Tensor] = []
        for arm in others:
            results = self.results(arm)
            db = {name: sqnr_db(a, b, self.setting.group) for name, a, b in zip(LEAST_DB, want, results, strict=True)}
            if problem := db_problem(arm, db, LEAST_DB, "bf16"):
                return problem
            blocks = blocks or (results if arm == "mxfp8_nccl" else [])
            same = not blocks or all(map(torch.equal, results, blocks))
            if max_over_ranks([float(not same)], self.setting.device, self.setting.group)[0]:
                return f"{arm}: other bits than mxfp8_nccl"
        self.out = self.x.grad = self.w.weight.grad = None
        return None

    def parts(self, arm: str) -> dict[str, float]:
        """Milliseconds of every stage, forward and backward, medians, largest over ranks; hooks mark the ends of the stages' backwards."""
        device, group = self.setting.device, self.setting.group
        names = [f"{stage}_forward" for stage in STAGES] + [f"{stage}_backward" for stage in reversed(STAGES)]
        samples: list[list[float]] = []
        for _ in range(_PART_RUNS):
            forward: list[Mark] = []
            backward: list[Mark] = []  # the first one: the gradient that backward starts with

            def after_stage(rows: torch.Tensor, forward: list[Mark] = forward, backward: list[Mark] = backward) -> None:
                forward.append(mark(device))
                rows.register_hook(lambda grad: backward.append(mark(device)))

            hold(device, _PART_HOLD_MS)
            barrier(device, group)
            start = mark(device)
            self.forward(arm, after_stage)
            self.backward()
            backward.append(mark(device))
            synchronize(device)
            samples.append([between_ms(*ends) for points in ([start, *forward], backward) for ends in itertools.pairwise(points)])
        middle = [Timing.of(list(column)).median_ms for column in zip(*samples, strict=True)]
        return dict(zip(names, (round(ms, 4) for ms in max_over_ranks(middle, device, group)), strict=True))

    def all_parts(self) -> dict[str, Any]:
        """The record's field: the parts of every arm of five stages."""
        return {"parts_ms": {arm: self.parts(arm) for arm in self.plans if arm != ONE_CALL}}


def compute_figures(ms: Mapping[str, float], D: int, N: int, routing: str) -> dict[str, Figure]:
    """Ratios of totals, forward and backward."""
    figures: dict[str, Figure] = {}
    for arm, prefix in (("mxfp8_nccl", "nccl_"), (BLOCKS, "blocks_"), (ONE_CALL, "")):
        for baseline in BASELINES if f"{arm}_total" in ms else ():
            figures |= speed_ups(ms, arm, baseline, "limit", f"{prefix}{{stage}}_vs_{baseline}")
    targets = {name: target[D, N] for name, target in TARGETS.items() if (D, N) in target and routing == "balanced"}
    return {name: replace(figure, target=targets.get(name)) for name, figure in figures.items()}


def cases(setting: Setting) -> Iterator[Case]:
    """Every shape, balanced and by Zipf's law."""
    if setting.device.type == "cuda":
        use_expandable_segments()
    shared = symmetric_group(setting.group, setting.device)
    T, L = (256, 4) if setting.tiny else (ROWS, EXPERTS)
    for D, N in setting.choose(SHAPES, tiny=[(128, 64)], quick=SHAPES[1:2]):
        for routing in ("balanced", "zipf"):
            pipeline = PipelineProblem(setting, T, D, N, L, routing, shared)
            yield Case(
                f"{T} rows a rank, D {D}, N {N}, {L} experts a rank, {routing}",
                {"T": T, "D": D, "N": N, "L": L},
                {**{arm: pipeline.stages(arm) for arm in pipeline.plans}, "limit": limit(pipeline.plan, setting.device, D, N)},
                pipeline.check,
                partial(compute_figures, D=D, N=N, routing=routing),
                {"routing": routing, "mxfp8_over": "symmetric" if shared else "collective"},
                after=pipeline.all_parts,
            )

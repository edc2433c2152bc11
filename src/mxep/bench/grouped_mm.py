"""`mxep bench grouped-mm`: an expert GEMM's three products from MX operands, against torch's grouped GEMM in bf16 and dense FP8.

Each product has two figures: from plain 1x32 MX bytes, with the rebase and its choice of granularity timed, and from rebased bytes, as a
fused producer provides them.  Weights are prepared once per step, outside the timing; the arm `operator` is the public operator on such
weights.  The limit of a figure from plain bytes is a dense FP8 GEMM after a copy that moves the rebase's bytes.  "span" forces one scale
per 128 columns on rows that do not need it; "far" rows do need it: some of their channels are far above the others.

In a round the memory-bound arms run first and then the GEMMs.  No target depends on the first GEMM, which may still run on the clock that
the copies have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mxep import reference
from mxep.bench.baselines import MAX_ERROR, FP8Functions, copy_of, counts_of, dense_fp8, fp8_functions, torch_bf16
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.timing import CALLS, Arm, Call, Rounds, captured, host_facts
from mxep.grouped_mm.function import to_mxfp8_then_scaled_grouped_mm
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD

ROWS = 131072
SHAPES = ((8192, 5120), (7168, 2048), (2048, 1408), (2048, 7168), (5120, 8192))  # (K, N) of the forward weight
_OTHERS = (  # K, N, G, routing, products
    (7168, 2048, 64, "balanced", ("forward",)),
    (7168, 2048, 32, "balanced", ("forward",)),
    (7168, 2048, 8, "zipf", ("forward", "dgrad", "wgrad")),
    (8192, 5120, 8, "zipf", ("wgrad",)),
    (2048, 1408, 8, "zipf", ("wgrad",)),
    (2048, 1536, 128, "balanced", ("wgrad",)),  # gate and up, and down, of Qwen3-30B-A3B
    (768, 2048, 128, "balanced", ("wgrad",)),
)
_WGRAD_HP_TARGET = 0.95  # of bf16 operands
_WGRAD_TARGETS = {(8192, 5120): 1.5, (7168, 2048): 1.4, (2048, 1408): 1.25}
_FAR_CHANNELS, _FAR = 6, 30000.0  # so many channels, so much larger, that every row has a wide spread
_GRANULE = 32  # rows: torch's bf16 wgrad needs groups that start at multiples of 16 bytes
_BF16 = torch.bfloat16

MX = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class GemmProblem:
    """Shape of one case: M rows over G groups, K and N of the forward weight (G, N, K)."""

    M: int
    K: int
    N: int
    G: int
    routing: str = "balanced"

    @property
    def shape(self) -> dict[str, int]:
        return {"M": self.M, "K": self.K, "N": self.N, "G": self.G}

    def title(self, what: str) -> str:
        return f"{what} {self.M} rows, K {self.K}, N {self.N}, {self.G} groups, {self.routing}"

    def ends(self, device: torch.device) -> torch.Tensor:
        """(G,) int32: the end of every group's rows."""
        return counts_of(self.routing, self.M, self.G, _GRANULE).cumsum(0).int().to(device)


def problems(setting: Setting) -> Sequence[tuple[GemmProblem, tuple[str, ...]]]:
    """Every case with many rows, and the products that it times."""
    kinds = ("forward", "dgrad", "wgrad")
    every: list[tuple[GemmProblem, tuple[str, ...]]] = [(GemmProblem(ROWS, K, N, 8), kinds) for K, N in SHAPES]
    every += [(GemmProblem(ROWS, K, N, G, routing), some) for K, N, G, routing, some in _OTHERS]
    tiny = [(GemmProblem(256, 128, 64, 4, routing), kinds) for routing in ("balanced", "zipf")]
    return setting.choose(every, tiny, quick=[(GemmProblem(ROWS, 7168, 2048, 8), kinds)])


def cases(setting: Setting) -> Iterator[Case]:
    """Forward, dgrad and wgrad of every problem, then few rows. Raises ValueError on a GPU without the FP8 path."""
    functions = fp8_functions(setting.device)
    for problem, kinds in problems(setting):
        for kind in kinds:
            yield (_wgrad_case if kind == "wgrad" else partial(_rows_case, kind))(problem, setting, functions)
    for K, N in setting.choose(FEW_SHAPES, tiny=[(128, 64)]):
        for M in setting.choose(FEW_ROWS, tiny=[64]):
            yield _few_rows_case(GemmProblem(M, K, N, _FEW_GROUPS), setting, functions)


def _normal(setting: Setting, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=setting.device, dtype=_BF16)


def _quantized(x: torch.Tensor) -> MX:
    qdata, scale = torch.ops.mxep.quantize(x, "rceil")
    return qdata, scale


def _accuracy_problem(results: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> str | None:
    """Name and error of the first (name, result, truth in float32) that is too inaccurate."""
    for name, value, truth in results:
        error = ((value.float() - truth).norm() / truth.norm()).item()
        if not error <= MAX_ERROR:
            return f"{name} is {error:.2e} from the exact product of its MX operands, want at most {MAX_ERROR:.1e}"
    return None


def _path(setting: Setting) -> str:
    return "reference" if setting.tiny else "fp8"


def _against_torch(
    kind: str, ms: Mapping[str, float], bf16: float, figures: Mapping[str, tuple[str, float, float | None]]
) -> dict[str, Figure]:
    """Speed against torch in bf16; `figures`: prefix of a figure's name -> (arm, milliseconds of the limit, target)."""
    found = {
        f"{kind}_{prefix}vs_torch_bf16": Figure(bf16 / ms[arm], bf16 / limit, target) for prefix, (arm, limit, target) in figures.items()
    }
    return {**found, f"{kind}_rebased_vs_dense_fp8": Figure(ms["dense_fp8"] / ms["rebased"], 1.0)}


def _rows_case(kind: str, problem: GemmProblem, setting: Setting, f: FP8Functions) -> Case:
    """Forward x (M, K) @ w (G, N, K), or dgrad g (M, N) @ w (G, K, N)."""
    M, K, N, G = problem.M, problem.K, problem.N, problem.G
    width, out_width = (K, N) if kind == "forward" else (N, K)
    x, w, offs = _normal(setting, M, width), _normal(setting, G, out_width, width), problem.ends(setting.device)
    a, b = _quantized(x), _quantized(w)
    weight = f.rebase_weight(*b)
    far = _quantized(torch.cat([x[:, :_FAR_CHANNELS] * _FAR, x[:, _FAR_CHANNELS:]], 1))
    auto, span = MAX_SPREAD["auto"], MAX_SPREAD["span"]
    rebased = {"": f.rebase_rows(*a, auto), "_span": f.rebase_rows(*a, span), "_far": f.rebase_rows(*far, auto)}
    w_t = w.transpose(1, 2)

    ours: dict[str, Callable[[], torch.Tensor]] = {
        "plain_far": lambda: f.grouped_mm(f.rebase_rows(*far, auto), weight, offs, _BF16),
        "plain": lambda: f.grouped_mm(f.rebase_rows(*a, auto), weight, offs, _BF16),
        **{f"rebased{suffix}": partial(f.grouped_mm, rows, weight, offs, _BF16) for suffix, rows in rebased.items()},
        "operator": lambda: torch.ops.mxep.grouped_mm_mx(*a, *weight, offs, _BF16, _path(setting)),
    }
    works: dict[str, Callable[[], object]] = {
        "rebase_alone": lambda: f.rebase_rows(*a, auto),
        "copy": copy_of(M * width, setting.device),
        **ours,
        "dense_fp8": dense_fp8(a[0], b[0][0]),
        "torch_bf16": lambda: torch_bf16(x, w_t, offs),
    }

    def check() -> str | None:
        if not bool((rebased["_far"].scale < 0).all()):
            return f"{kind}_rebased_far: not every row has a wide spread"
        for mx, names in ((a, [name for name in ours if not name.endswith("_far")]), (far, ["plain_far", "rebased_far"])):
            truth = reference.grouped_mm_mx(*mx, *b, offs, torch.float32, "reference")
            if found := _accuracy_problem((f"{kind}_{name}", ours[name](), truth) for name in names):
                return found
        return None

    def compute_figures(ms: Mapping[str, float]) -> dict[str, Figure]:
        ms = {name.removeprefix(f"{kind}_"): value for name, value in ms.items()}
        dense, plain = ms["dense_fp8"], ms["dense_fp8"] + ms["copy"]
        narrow = (width, out_width) == (7168, 2048) or (K, N) == (2048, 1408)  # of the product itself: dgrad's is the other way round
        full = problem == GemmProblem(ROWS, K, N, 8)
        ready, forced = (round(min(most, 0.93 * ms["torch_bf16"] / dense), 3) for most in (1.85 if full else 1.8, 1.8))
        figures: dict[str, tuple[str, float, float | None]] = {
            "": ("plain", plain, (1.6 if narrow else 1.75) if full else None),
            "far_": ("plain_far", plain, None),
            "operator_": ("operator", plain, None),
            "rebased_": ("rebased", dense, ready),
            "rebased_span_": ("rebased_span", dense, forced),
            "rebased_far_": ("rebased_far", dense, forced),
        }
        return _against_torch(kind, ms, ms["torch_bf16"], figures)

    return _case(kind, problem, works, check, compute_figures)


def _wgrad_case(problem: GemmProblem, setting: Setting, f: FP8Functions) -> Case:
    """g (M, N).T @ x (M, K) per group -> (G, N, K)."""
    M, K, N, G = problem.M, problem.K, problem.N, problem.G
    x, g, offs = _normal(setting, M, K), _normal(setting, M, N), problem.ends(setting.device)
    qa, qg = _quantized(x), _quantized(g)
    tokens = f.rebase_tokens(*qg, *qa, offs)
    total, path = torch.zeros(G, N, K, device=setting.device), _path(setting)
    ours = {
        "float32": lambda: f.wgrad(f.rebase_tokens(*qg, *qa, offs), torch.float32),
        "plain": lambda: f.wgrad(f.rebase_tokens(*qg, *qa, offs), _BF16),
        "rebased": lambda: f.wgrad(tokens, _BF16),
        "operator": lambda: torch.ops.mxep.grouped_wgrad_mx(*qg, *qa, offs, _BF16, path),
        "operator_add": lambda: torch.ops.mxep.grouped_wgrad_mx(*qg, *qa, offs, torch.float32, path, out=total, accumulate=True),
    }
    dense_g = qg[0].view(torch.uint8).reshape(G * N, M // G).view(torch.float8_e4m3fn)  # as many products, dense, random bytes
    dense_x = qa[0].view(torch.uint8)[: M // G].t().contiguous().view(torch.float8_e4m3fn)
    works: dict[str, Callable[[], object]] = {
        "rebase_alone": lambda: f.rebase_tokens(*qg, *qa, offs),
        "copy": copy_of(M * (K + N), setting.device),
        **ours,
        "dense_fp8": dense_fp8(dense_g, dense_x),
        "hp": lambda: torch.ops.mxep.grouped_wgrad_hp(g, x, offs, _BF16),
        "torch_bf16": lambda: torch_bf16(g.t(), x, offs),
        "torch_bf16_transposed": lambda: torch_bf16(x.t(), g, offs),
    }

    def check() -> str | None:
        truth = reference.grouped_wgrad_mx(*qg, *qa, offs, torch.float32, "reference")
        results = {name: run() for name, run in ours.items()} | {"operator_add": total}
        found = _accuracy_problem((f"wgrad_{name}", result, truth) for name, result in results.items())
        plain = reference.grouped_wgrad_hp(g.float(), x.float(), offs, torch.float32)
        return found or _accuracy_problem([("wgrad_hp", torch.ops.mxep.grouped_wgrad_hp(g, x, offs, _BF16), plain)])

    def compute_figures(ms: Mapping[str, float]) -> dict[str, Figure]:
        ms = {name.removeprefix("wgrad_"): value for name, value in ms.items()}
        bf16 = min(ms["torch_bf16"], ms["torch_bf16_transposed"])  # the faster orientation
        dense, plain = ms["dense_fp8"], ms["dense_fp8"] + ms["copy"]
        figures: dict[str, tuple[str, float, float | None]] = {
            "": ("plain", plain, _WGRAD_TARGETS.get((K, N))),
            "float32_": ("float32", plain, None),
            "operator_": ("operator", plain, None),
            "operator_add_": ("operator_add", plain, None),
            "hp_": ("hp", bf16, _WGRAD_HP_TARGET),
            "rebased_": ("rebased", dense, None),
        }
        return _against_torch("wgrad", ms, bf16, figures)

    return _case("wgrad", problem, works, check, compute_figures)


def _case(
    kind: str,
    problem: GemmProblem,
    works: Mapping[str, Callable[[], object]],
    check: Callable[[], str | None],
    compute_figures: Callable[[Mapping[str, float]], dict[str, Figure]],
) -> Case:
    arms: dict[str, Arm] = {f"{kind}_{name}": {"": work} for name, work in works.items()}
    return Case(problem.title(kind), problem.shape, arms, check, compute_figures, {"routing": problem.routing})


FEW_ROWS = (128, 512, 2048, 8192)
FEW_SHAPES = ((7168, 2048), (2048, 1408))  # (K, N) of the forward weight
HOST_LIMIT_US = 30.0  # host time accepted for the GEMM's launcher
_FEW_GROUPS = 8
_FEW_LIMIT = 2.0  # half the bytes of the weights, or of the result if weights are not the bound
_FEW_ROUNDS = Rounds(count=5, timed=6, warm_ms=40.0)  # bound by memory or latency: they do not change the GPU's clock


def _few_rows_case(problem: GemmProblem, setting: Setting, f: FP8Functions) -> Case:
    """Forward, dgrad and wgrad, `CALLS` calls as one CUDA graph."""
    device, M, K, N, G = setting.device, problem.M, problem.K, problem.N, problem.G
    x, g, w = _normal(setting, M, K), _normal(setting, M, N), _normal(setting, G, N, K)
    w_t = w.transpose(1, 2).contiguous()  # (G, K, N): the weight of dgrad
    offs, auto, path = problem.ends(device), MAX_SPREAD["auto"], _path(setting)
    qx, qg, qw, qw_t = (_quantized(value) for value in (x, g, w, w_t))
    weight, weight_t = f.rebase_weight(*qw), f.rebase_weight(*qw_t)
    ours: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: f.grouped_mm(f.rebase_rows(*qx, auto), weight, offs, _BF16),
        "dgrad": lambda: f.grouped_mm(f.rebase_rows(*qg, auto), weight_t, offs, _BF16),
        "wgrad": lambda: f.wgrad(f.rebase_tokens(*qg, *qx, offs), _BF16),
    }
    theirs: dict[str, Call] = {
        "forward": lambda: torch_bf16(x, w.transpose(1, 2), offs),
        "dgrad": lambda: torch_bf16(g, w_t.transpose(1, 2), offs),
        "wgrad": lambda: torch_bf16(g.t(), x, offs),
    }
    arms = {f"{kind}_torch_bf16": captured(call, device) for kind, call in theirs.items()}
    arms |= {f"{kind}_plain": captured(call, device) for kind, call in ours.items()}

    def check() -> str | None:
        truths = {
            "forward": reference.grouped_mm_mx(*qx, *qw, offs, torch.float32, "reference"),
            "dgrad": reference.grouped_mm_mx(*qg, *qw_t, offs, torch.float32, "reference"),
            "wgrad": reference.grouped_wgrad_mx(*qg, *qx, offs, torch.float32, "reference"),
        }
        return _accuracy_problem((kind, ours[kind](), truth) for kind, truth in truths.items())

    def compute_figures(ms: Mapping[str, float]) -> dict[str, Figure]:
        return {f"{kind}_vs_torch_bf16": Figure(ms[f"{kind}_torch_bf16"] / ms[f"{kind}_plain"], _FEW_LIMIT, 1.0) for kind in ours}

    def host_times() -> dict[str, Any]:
        if FEW_ROWS[0] != M and not setting.tiny:
            return {}
        rows, tokens = f.rebase_rows(*qx, auto), f.rebase_tokens(*qg, *qx, offs)
        calls: dict[str, Call] = {
            "torch_bf16": theirs["forward"],
            "launcher": lambda: f.grouped_mm(rows, weight, offs, _BF16),
            "wgrad_launcher": lambda: f.wgrad(tokens, _BF16),
            "grouped_mm_mx": lambda: torch.ops.mxep.grouped_mm_mx(*qx, *weight, offs, _BF16, path),
            "grouped_wgrad_mx_rows": lambda: torch.ops.mxep.grouped_wgrad_mx(*qg, *qx, offs, _BF16, path),
            "to_mxfp8_then_scaled_grouped_mm": lambda: to_mxfp8_then_scaled_grouped_mm(x, w.transpose(1, 2), offs, wgrad_with_hp=True),
        }
        return {**host_facts(calls, device), "host_us_asked": {"launcher": HOST_LIMIT_US}}

    title = f"{M} rows, K {K}, N {N}, {G} groups, {CALLS} calls a run"
    facts, rounds = {"routing": problem.routing, "calls": CALLS}, None if FEW_ROWS[-1] == M else _FEW_ROUNDS
    return Case(title, problem.shape, arms, check, compute_figures, facts, host_times, rounds)

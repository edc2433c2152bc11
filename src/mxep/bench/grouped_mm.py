"""`mxep bench grouped-mm`: an expert GEMM's three products from MX operands, against torch's grouped GEMM in bf16 and dense FP8.

Two figures each: from plain 1x32 MX bytes, with the rebase and the choice of road under the clock, and from rebased bytes, as a fused
producer hands them over.  Weights are prepared once per step, outside the clock; the arm `operator` is the public operator on such.
The limit of a figure from plain bytes is a dense FP8 GEMM behind a copy that moves the rebase's bytes.  Few rows stand in few_rows.py.
"span" forces the robust road on rows that do not need it; "far" are rows that do, with channels far above the others.

In a round the arms bound by memory come first and then the GEMMs beside each other, none of whose targets hangs on the first of them:
it may still run on the clock that the copies left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mxep import reference
from mxep.bench import few_rows
from mxep.bench.ceilings import copy_of, dense_fp8
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.roads import MOST_ERROR, FP8Functions, fp8_functions, torch_bf16
from mxep.bench.routing import counts_of
from mxep.bench.timing import Arm, Timing
from mxep.reference.rebase import WIDE_ABOVE

ROWS = 131072
SHAPES = ((8192, 5120), (7168, 2048), (2048, 1408), (2048, 7168), (5120, 8192))  # (K, N) of the forward weight
_OTHERS = (  # K, N, G, routing, products
    (7168, 2048, 64, "balanced", ("forward",)),
    (7168, 2048, 32, "balanced", ("forward",)),
    (7168, 2048, 8, "zipf", ("forward", "dgrad", "wgrad")),
    (8192, 5120, 8, "zipf", ("wgrad",)),
    (2048, 1408, 8, "zipf", ("wgrad",)),
)
_WGRAD_HP_TARGET = 0.95  # bf16 operands that are ready
_WGRAD_TARGETS = {(8192, 5120): 1.5, (7168, 2048): 1.4, (2048, 1408): 1.25}
_FAR_CHANNELS, _FAR = 6, 30000.0  # that many channels that much larger: every row takes the robust road by its spread
_GRANULE = 32  # rows: torch's bf16 wgrad wants groups that start at multiples of 16 bytes
_BF16 = torch.bfloat16

MX = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """Shape of one case: M rows over G groups, K and N of the forward weight (G, N, K)."""

    M: int
    K: int
    N: int
    G: int
    routing: str = "balanced"

    @property
    def shape(self) -> dict[str, int]:
        return {"M": self.M, "K": self.K, "N": self.N, "G": self.G}


def problems(setting: Setting) -> list[tuple[Problem, tuple[str, ...]]]:
    """Every case with the products that it times."""
    kinds = ("forward", "dgrad", "wgrad")
    if setting.tiny:
        return [(Problem(256, 128, 64, 4, routing), kinds) for routing in ("balanced", "zipf")]
    if setting.quick:
        return [(Problem(ROWS, 7168, 2048, 8), kinds)]
    found = [(Problem(ROWS, K, N, 8), kinds) for K, N in SHAPES]
    return found + [(Problem(ROWS, K, N, G, routing), some) for K, N, G, routing, some in _OTHERS]


def cases(setting: Setting) -> Iterator[Case]:
    """Forward, dgrad and wgrad of every problem. Raises ValueError on a GPU without the FP8 path."""
    functions = fp8_functions(setting.device)
    for problem, kinds in problems(setting):
        for kind in kinds:
            if kind == "wgrad":
                yield _wgrad_case(problem, setting, functions)
            else:
                yield _rows_case(kind, problem, setting, functions)
    yield from few_rows.cases(setting, functions)


def _normal(setting: Setting, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=setting.device, dtype=_BF16)


def _quantized(x: torch.Tensor) -> MX:
    qdata, scale = torch.ops.mxep.quantize(x, "rceil")
    return qdata, scale


def _ends(problem: Problem, device: torch.device) -> torch.Tensor:
    return counts_of(problem.routing, problem.M, problem.G, _GRANULE).cumsum(0).int().to(device)


def _wrong(results: Mapping[str, torch.Tensor], truth: torch.Tensor) -> str | None:
    """Name and error of the first result that is too far from the truth (float32)."""
    size = truth.norm()
    for name, value in results.items():
        error = ((value.float() - truth).norm() / size).item()
        if not error <= MOST_ERROR:
            return f"{name} is {error:.2e} from the exact product of its MX operands, want at most {MOST_ERROR:.1e}"
    return None


def _rows_case(kind: str, problem: Problem, setting: Setting, f: FP8Functions) -> Case:
    """Forward x (M, K) @ w (G, N, K), or dgrad g (M, N) @ w (G, K, N)."""
    M, K, N, G = problem.M, problem.K, problem.N, problem.G
    width, out_width = (K, N) if kind == "forward" else (N, K)
    x, w, offs = _normal(setting, M, width), _normal(setting, G, out_width, width), _ends(problem, setting.device)
    a, b = _quantized(x), _quantized(w)
    weight = f.rebase_weight(*b)
    far = _quantized(torch.cat([x[:, :_FAR_CHANNELS] * _FAR, x[:, _FAR_CHANNELS:]], 1))
    auto, span = WIDE_ABOVE["auto"], WIDE_ABOVE["span"]
    rebased = {"": f.rebase_rows(*a, auto), "_span": f.rebase_rows(*a, span), "_far": f.rebase_rows(*far, auto)}
    w_t = w.transpose(1, 2)
    path = "fp8" if x.is_cuda else "reference"

    ours = {
        "plain_far": lambda: f.grouped_mm(f.rebase_rows(*far, auto), weight, offs, _BF16),
        "plain": lambda: f.grouped_mm(f.rebase_rows(*a, auto), weight, offs, _BF16),
        "rebased": lambda: f.grouped_mm(rebased[""], weight, offs, _BF16),
        "rebased_span": lambda: f.grouped_mm(rebased["_span"], weight, offs, _BF16),
        "rebased_far": lambda: f.grouped_mm(rebased["_far"], weight, offs, _BF16),
        "operator": lambda: torch.ops.mxep.grouped_mm_mx(*a, *weight, offs, _BF16, path),
    }
    arms: dict[str, Arm] = {
        f"{kind}_rebase_alone": {"": lambda: f.rebase_rows(*a, auto)},
        f"{kind}_copy": {"": copy_of(M * width, setting.device)},
        **{f"{kind}_{name}": {"": run} for name, run in ours.items()},
        f"{kind}_dense_fp8": {"": dense_fp8(a[0], b[0][0])},
        f"{kind}_torch_bf16": {"": lambda: torch_bf16(x, w_t, offs)},
    }

    def check() -> str | None:
        if not bool((rebased["_far"].scale < 0).all()):
            return f"{kind}_rebased_far: not every row took the robust road"
        for mx, names in ((a, [name for name in ours if not name.endswith("_far")]), (far, ["plain_far", "rebased_far"])):
            truth = reference.grouped_mm_mx(*mx, *b, offs, torch.float32, "reference")
            for name in names:
                wrong = _wrong({f"{kind}_{name}": ours[name]()}, truth)
                if wrong:
                    return wrong
        return None

    def judge(times: Mapping[str, Timing]) -> dict[str, Figure]:
        ms = {name.removeprefix(f"{kind}_"): timing.median_ms for name, timing in times.items()}
        dense, plain = ms["torch_bf16"] / ms["dense_fp8"], ms["torch_bf16"] / (ms["dense_fp8"] + ms["copy"])
        narrow = (width, out_width) == (7168, 2048) or (K, N) == (2048, 1408)  # of the product itself: dgrad's is the other way round
        least = (1.6 if narrow else 1.75) if problem == Problem(ROWS, K, N, 8) else None
        most = 1.85 if problem == Problem(ROWS, K, N, 8) else 1.8
        figures = {f"{kind}_vs_torch_bf16": Figure(ms["torch_bf16"] / ms["plain"], plain, least)}
        figures[f"{kind}_far_vs_torch_bf16"] = Figure(ms["torch_bf16"] / ms["plain_far"], plain)
        figures[f"{kind}_operator_vs_torch_bf16"] = Figure(ms["torch_bf16"] / ms["operator"], plain)
        figures[f"{kind}_rebased_vs_torch_bf16"] = Figure(ms["torch_bf16"] / ms["rebased"], dense, round(min(most, 0.93 * dense), 3))
        for road in ("span", "far"):
            figures[f"{kind}_rebased_{road}_vs_torch_bf16"] = Figure(
                ms["torch_bf16"] / ms[f"rebased_{road}"], dense, round(min(1.8, 0.93 * dense), 3)
            )
        figures[f"{kind}_rebased_vs_dense_fp8"] = Figure(ms["dense_fp8"] / ms["rebased"], 1.0)
        return figures

    return Case(_title(kind, problem), problem.shape, arms, check, judge, {"routing": problem.routing})


def _wgrad_case(problem: Problem, setting: Setting, f: FP8Functions) -> Case:
    """g (M, N).T @ x (M, K) per group -> (G, N, K)."""
    M, K, N, G = problem.M, problem.K, problem.N, problem.G
    x, g, offs = _normal(setting, M, K), _normal(setting, M, N), _ends(problem, setting.device)
    qa, qg = _quantized(x), _quantized(g)
    tokens = f.rebase_tokens(*qg, *qa, offs)
    path = "fp8" if x.is_cuda else "reference"
    total = torch.zeros(G, N, K, device=setting.device)
    ours = {
        "float32": lambda: f.wgrad(f.rebase_tokens(*qg, *qa, offs), torch.float32),
        "plain": lambda: f.wgrad(f.rebase_tokens(*qg, *qa, offs), _BF16),
        "rebased": lambda: f.wgrad(tokens, _BF16),
        "operator": lambda: torch.ops.mxep.grouped_wgrad_mx_rows(*qg, *qa, offs, _BF16, path),
        "operator_add": lambda: torch.ops.mxep.grouped_wgrad_mx_rows_add(total, *qg, *qa, offs, path),
    }
    dense_g = qg[0].view(torch.uint8).reshape(G * N, M // G).view(torch.float8_e4m3fn)  # as many products, dense, random bytes
    dense_x = qa[0].view(torch.uint8)[: M // G].t().contiguous().view(torch.float8_e4m3fn)
    arms: dict[str, Arm] = {
        "wgrad_rebase_alone": {"": lambda: f.rebase_tokens(*qg, *qa, offs)},
        "wgrad_copy": {"": copy_of(M * (K + N), setting.device)},
        **{f"wgrad_{name}": {"": run} for name, run in ours.items()},
        "wgrad_dense_fp8": {"": dense_fp8(dense_g, dense_x)},
        "wgrad_hp": {"": lambda: torch.ops.mxep.grouped_wgrad_hp(g, x, offs, _BF16)},
        "wgrad_torch_bf16": {"": lambda: torch_bf16(g.t(), x, offs)},
        "wgrad_torch_bf16_transposed": {"": lambda: torch_bf16(x.t(), g, offs)},
    }

    def check() -> str | None:
        truth = reference.grouped_wgrad_mx_rows(*qg, *qa, offs, torch.float32, "reference")
        results = {name: run() for name, run in ours.items()} | {"operator_add": total}
        return _wrong({f"wgrad_{name}": result for name, result in results.items()}, truth)

    def judge(times: Mapping[str, Timing]) -> dict[str, Figure]:
        ms = {name.removeprefix("wgrad_"): timing.median_ms for name, timing in times.items()}
        bf16 = min(ms["torch_bf16"], ms["torch_bf16_transposed"])  # its better orientation
        plain = bf16 / (ms["dense_fp8"] + ms["copy"])
        return {
            "wgrad_vs_torch_bf16": Figure(bf16 / ms["plain"], plain, _WGRAD_TARGETS.get((K, N))),
            "wgrad_float32_vs_torch_bf16": Figure(bf16 / ms["float32"], plain),
            "wgrad_operator_vs_torch_bf16": Figure(bf16 / ms["operator"], plain),
            "wgrad_operator_add_vs_torch_bf16": Figure(bf16 / ms["operator_add"], plain),
            "wgrad_hp_vs_torch_bf16": Figure(bf16 / ms["hp"], 1.0, _WGRAD_HP_TARGET),
            "wgrad_rebased_vs_torch_bf16": Figure(bf16 / ms["rebased"], bf16 / ms["dense_fp8"]),
            "wgrad_rebased_vs_dense_fp8": Figure(ms["dense_fp8"] / ms["rebased"], 1.0),
        }

    return Case(_title("wgrad", problem), problem.shape, arms, check, judge, {"routing": problem.routing})


def _title(kind: str, problem: Problem) -> str:
    return f"{kind} {problem.M} rows, K {problem.K}, N {problem.N}, {problem.G} groups, {problem.routing}"

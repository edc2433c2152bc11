"""`mxep bench peers`: the experts of one GPU from given choices, forward and backward, against what a user can install.

Arms: `torch`, sort, gather, `grouped_mm`, SwiGLU, `grouped_mm`, scores and sum as transformers has them, and `torch_compiled`, the same
under torch.compile; ours (`mxep.fused_experts`) as `bf16`, `hp` and `mx` (wgrad in high precision and from MX bytes), and the last two as
`hp_kept` and `mx_kept` with weights that were quantised outside the timing, as once per optimizer step; and those of `peer_arms`.  A
package that does not import here, fails or computes something else is named and left out.

Every arm gets tokens x (T, D) and scores (T, C) in bf16, choices (T, C) int64, w1 (E, 2H, D) and w2 (E, D, H) in bf16, and returns the
weighted sums (T, D).  Backward is `y.backward(dy)` and ends in `.grad` of x, scores, w1 and w2.  Errors are those against float64, from the
same bf16 inputs: of the whole result, of its worst row and of its worst column.  The limit is one dense GEMM for every product, in FP8, in
bf16 or, for wgrad of high-precision operands, in both, and nothing else.

With few tokens every call waits for the host.  There torch's arms and ours are also timed as one CUDA graph of `MICROBATCHES` calls of
forward and backward (`<arm>_graph`), which tells what the GPU takes; weights that are quantised in every call cost more than FP8 GEMMs
gain (`Recipe.hp_below_rows`), and kept ones are quantised once in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.bench.accuracy import gradients
from mxep.bench.baselines import zipf_places
from mxep.bench.experts import dense_arms, dense_products, ffn_products, saved_bytes
from mxep.bench.peer_arms import FP8_PEERS, PEERS, Experts, load_peers, short_reason
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.timing import Arm, captured, host_facts_of, run_arm
from mxep.device import GEMM_PATHS, resolve_gemm_path
from mxep.fused.autograd import run_layer
from mxep.fused.layer import fused_experts
from mxep.fused.options import allowed_topk, check_topk, kept_config, resolve_runtime
from mxep.moe.expert_mlp import ExpertWeights
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.ops.activation.functions import SwiGLU
from mxep.recipe import resolve_recipe
from mxep.shapes import MX_BLOCK


class Shape(NamedTuple):
    """Tokens, widths, experts and choices of a token."""

    T: int
    D: int
    H: int
    E: int
    C: int


SHAPES = {
    "Qwen3-30B-A3B": Shape(16384, 2048, 768, 128, 8),
    "Qwen3-30B-A3B, twice the tokens": Shape(32768, 2048, 768, 128, 8),
    "DeepSeek-V3-16B": Shape(16384, 2048, 1408, 64, 6),
}
FEW_TOKENS, _MODELS = (128, 256, 512, 1024, 2048, 4096), ("Qwen3-30B-A3B", "DeepSeek-V3-16B")  # with random routing
_TINY = Shape(64, 64, 32, 8, 2)
ROUTINGS = ("random", "zipf")
_TARGETS = {  # with random routing
    name: {"mx_vs_compiled": mx, "hp_vs_compiled": hp, "mx_vs_best_peer": 1.15}
    for name, mx, hp in zip(SHAPES, (1.70, 1.75, 1.65), (1.38, 1.43, 1.35), strict=True)
}
EAGER, COMPILED = "torch", "torch_compiled"
OURS = {  # arm -> recipe, weights kept
    "bf16": ("hp", False),
    "hp": ("mxfp8_wgrad_with_hp", False),
    "mx": ("mxfp8_wgrad_with_mx", False),
    "hp_kept": ("mxfp8_wgrad_with_hp", True),
    "mx_kept": ("mxfp8_wgrad_with_mx", True),
}
_GRAPHED = EAGER, COMPILED, *OURS
MICROBATCHES = 4  # calls of a graph
_LIMITS = {"bf16": "dense_bf16", "hp": "dense_hp_wgrad", "hp_kept": "dense_hp_wgrad"}  # the others': dense_fp8
RESULTS = ("y", "dx", "dscores", "dw1", "dw2")
_MOST = {"bf16": 0.01, "fp8": 0.09}  # relative errors of the whole results: recorded ones are up to 0.006 and 0.069
_MOST_OF_A_ROW, _MOST_OF_SCORES = 0.5, 1.5  # a row of dscores has C numbers, which may be small; with a wrong sign it is off by 2
_LEAST_TOKENS = MX_BLOCK  # of an expert: a row of dW1 of few tokens may cancel to almost nothing, and its relative error has no bound
_CHECK = (
    f"relative errors of y, dx, dscores, dW1 and dW2 against float64: at most {_MOST['bf16']} of arms in bf16 and {_MOST['fp8']} of "
    f"others, of the worst row of each at most {_MOST_OF_A_ROW} (dscores: {_MOST_OF_SCORES}), for dW1 and dW2 of experts with at least "
    f"{_LEAST_TOKENS} tokens"
)
_HOST_BATCH = 4  # calls whose launches fit into the device's queue
_SEED = 7


def torch_experts(x: Tensor, choices: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The experts as transformers' `grouped_mm` has them: choices sorted by expert, rows gathered, summed in the tokens' order."""
    T, C = choices.shape
    ordered, order = choices.reshape(-1).sort()
    counts = torch.histc(ordered.float() if ordered.device.type == "cpu" else ordered.int(), bins=w1.shape[0], min=0, max=w1.shape[0] - 1)
    offs = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[order // C], w1.transpose(1, 2), offs=offs).chunk(2, dim=-1)  # (T*C, H)
    rows = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)  # (T*C, D)
    weighted = rows * scores.reshape(-1)[order].unsqueeze(-1)
    home = torch.empty_like(order)
    home[order] = torch.arange(T * C, device=order.device)
    return weighted[home].view(T, C, -1).sum(1)


def true_experts(x: Tensor, choices: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """`RESULTS` in float64, expert by expert."""
    found = dict(zip(RESULTS, (torch.zeros_like(like, dtype=torch.float64) for like in (x, x, scores, w1, w2)), strict=True))
    for e in range(w1.shape[0]):
        token, place = (choices == e).nonzero(as_tuple=True)  # host sync: a check
        rows, d_rows, score = x[token].double(), dy[token].double(), scores[token, place].double().unsqueeze(1)
        up_weight, down_weight = w1[e].double(), w2[e].double()
        gate, up = (rows @ up_weight.t()).chunk(2, dim=1)
        share = gate.sigmoid()
        hidden = gate * share * up
        out = hidden @ down_weight.t()
        found["y"].index_add_(0, token, out * score)
        found["dscores"][token, place] = (out * d_rows).sum(1)
        d_out = d_rows * score
        found["dw2"][e] = d_out.t() @ hidden
        d_hidden = d_out @ down_weight
        d_first = torch.cat([d_hidden * up * share * (1 + gate * (1 - share)), d_hidden * gate * share], dim=1)
        found["dw1"][e] = d_first.t() @ rows
        found["dx"].index_add_(0, token, d_first @ up_weight)
    return found


def relative_errors(want: Tensor, got: Tensor) -> dict[str, float]:
    """|want - got| / |want| of all values, of the worst row and of the worst column (of the last two dimensions).

    A row or column of zeros has no relative error; `inf` if `got` is not zero there.

    >>> relative_errors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 3.0], [0.0, 0.0]]))
    {'all': 0.2, 'row': 0.2, 'column': 0.25}
    """
    difference, want = got.double() - want.double(), want.double()

    def worst(norm: Callable[[Tensor], Tensor]) -> float:
        off, size = norm(difference), norm(want)
        share = torch.where(size > 0, off / size, torch.where(off > 0, math.inf, 0.0))
        return float(f"{share.max().item():.4g}")  # NaN stays: max propagates it

    return {"all": worst(Tensor.norm), "row": worst(partial(Tensor.norm, dim=-1)), "column": worst(partial(Tensor.norm, dim=-2))}


class _KeptWeights(torch.nn.Module):
    """w1 and w2 as parameters, and their entries in a cache of quantised weights."""

    def __init__(self, w1: torch.nn.Parameter, w2: torch.nn.Parameter) -> None:
        super().__init__()
        self.w1, self.w2, self.cache = w1, w2, WeightCache()
        self.entries = CachedWeight(self.cache, self, "w1"), CachedWeight(self.cache, self, "w2")
        self.runtime, self.swiglu = resolve_runtime("bench peers", None), SwiGLU()

    def experts(self, x: Tensor, choices: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, recipe: str) -> Tensor:
        """`mxep.fused_experts` with the caches that `FusedMoE` gives to the layer."""
        where, runtime, chosen = "bench peers", self.runtime, resolve_recipe(recipe)
        topk = check_topk(where, x, choices, scores, w1.shape[0], allowed_topk("", runtime))
        config = kept_config(x.shape[1], w2.shape[2], w1.shape[0], choices.shape[1])
        weights = ExpertWeights(w1, w2, None, None, None, None, "concatenated")
        y, *_ = run_layer(where, x, None, weights, config, chosen, runtime, self.swiglu, "", topk=topk, caches=self.entries)
        return y


class PeersProblem:
    """One shape and routing: its data and arms.

    Attributes:
        experts: what each arm calls.  errors: of every arm's results against float64.
        few: whether the shape has few tokens, and arms are timed as CUDA graphs too.
        left_out: peers that are not measured, and why.
    """

    def __init__(self, setting: Setting, name: str, shape: Shape, routing: str) -> None:
        self.setting, self.name, self.shape, self.routing, device = setting, name, shape, routing, setting.device
        T, D, H, E, C = shape
        self.few = max(FEW_TOKENS) >= T
        normal = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(_SEED))
        self.x, self.dy = normal(T, D), normal(T, D)
        self.w1, self.w2 = (torch.nn.Parameter(normal(E, *size) / size[1] ** 0.5) for size in ((2 * H, D), (D, H)))
        middle = 0.0 if routing == "random" else -zipf_places(E).log().to(device)  # of the logits, as a layer's
        best = (normal(T, E).float() + middle).topk(C)
        self.choices, self.scores = best.indices, best.values.softmax(1).to(torch.bfloat16)
        self.kept = {arm: _KeptWeights(self.w1, self.w2) for arm, (_, keeps) in OURS.items() if keeps}
        compiled: Experts = torch.compile(torch_experts, dynamic=False) if device.type == "cuda" else torch_experts
        self.experts: dict[str, Experts] = {EAGER: torch_experts, COMPILED: compiled}
        self.experts |= {arm: self._ours(arm) for arm in OURS}
        peers, self.left_out = load_peers(setting.peers or tuple(PEERS), device)
        self.experts |= peers
        self.timed = {arm: self.stages(arm) for arm in self.experts}
        self.leaves, self.y = (self.x, self.scores), self.x
        self.arms: dict[str, Arm] = {}
        self.errors: dict[str, dict[str, dict[str, float]]] = {}

    def _ours(self, arm: str) -> Experts:
        recipe, keeps = OURS[arm]
        if keeps:
            return partial(self.kept[arm].experts, recipe=recipe)
        return lambda x, choices, scores, w1, w2: fused_experts(
            x, choices, scores, w1, None, w2, None, self.shape.E, group="", recipe=recipe
        )

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm."""

        def forward() -> None:
            self.w1.grad = self.w2.grad = None
            self.y = self.x  # frees the last call's autograd nodes, which a capture on another stream would meet
            self.leaves = self.x.detach().requires_grad_(), self.scores.detach().requires_grad_()
            self.y = self.experts[arm](self.leaves[0], self.choices, self.leaves[1], self.w1, self.w2)

        return {"forward": forward, "backward": lambda: self.y.backward(self.dy)}

    def results(self, arm: str) -> dict[str, Tensor]:
        run_arm(self.stages(arm))
        return self._results()

    def _results(self) -> dict[str, Tensor]:
        return dict(zip(RESULTS, (self.y.detach(), *gradients((*self.leaves, self.w1, self.w2))), strict=True))

    def _graph_results(self, arm: str) -> dict[str, Tensor]:
        """Capture calls of an arm, add the graph to `arms`, and return what a replay writes."""
        replay = self.arms[f"{arm}_graph"] = captured(partial(run_arm, self.timed[arm]), self.setting.device, MICROBATCHES)
        run_arm(replay)
        for result in self._results().values():
            result.zero_()
        run_arm(replay)
        return self._results()

    def check(self) -> str | None:
        """Every arm against float64; keeps the errors."""
        want = true_experts(self.x, self.choices, self.scores, self.w1.detach(), self.w2.detach(), self.dy)
        for arm in list(self.experts):
            try:
                self.errors[arm] = {name: self._errors(name, want[name], value) for name, value in self.results(arm).items()}
                problem = error_problem(arm, self.errors[arm])
            except Exception as error:
                if arm not in PEERS:
                    raise
                problem = short_reason(error)
            if problem and arm not in PEERS:
                return problem
            if problem:
                self._leave_out(arm, problem)
        for arm in _GRAPHED if self.few else ():
            errors = {name: self._errors(name, want[name], value) for name, value in self._graph_results(arm).items()}
            if problem := error_problem(arm, errors):
                return f"as a CUDA graph, {problem}"
        return None

    def _errors(self, name: str, want: Tensor, got: Tensor) -> dict[str, float]:
        """Of all values, and of the worst row and column, which weights of experts that all have few tokens lack."""
        errors = relative_errors(want, got)
        if name not in ("dw1", "dw2"):
            return errors
        busy = torch.bincount(self.choices.flatten(), minlength=self.shape.E) >= _LEAST_TOKENS
        return (relative_errors(want[busy], got[busy]) if busy.any() else {}) | {"all": errors["all"]}

    def _leave_out(self, arm: str, why: str) -> None:
        self.left_out[arm] = why
        self.errors.pop(arm, None)
        del self.experts[arm], self.timed[arm], self.arms[arm]

    def after(self) -> dict[str, Any]:
        """Further fields of the record."""
        filled = {arm: kept.cache.fills for arm, kept in self.kept.items()}
        both = GEMM_PATHS[resolve_gemm_path("auto", self.setting.device)].granularity is not None  # forms of a weight in one pass
        users = 2 if self.few and self.setting.device.type == "cuda" else 1  # eager calls and a graph
        assert all(fills == users * (2 if both else 4) for fills in filled.values()), f"weights kept: {filled} fills, want each form once"
        found = host_facts_of(self.timed, self.setting.device, _HOST_BATCH)
        if self.few:
            found["microbatches"] = MICROBATCHES
        weights = [self.w1, self.w2, *(tensor for kept in self.kept.values() for tensor in kept.cache.tensors())]
        return found | {
            "errors": self.errors,
            "saved_bytes": {arm: saved_bytes(stages, weights) for arm, stages in self.timed.items()},
            "left_out": self.left_out,
        }

    def limits(self) -> dict[str, Arm]:
        """Dense products of the same sizes."""
        T, D, H, E, C = self.shape
        rows, device = T * C, self.setting.device
        forward, dgrad, wgrad = ffn_products(rows, D, H, 2 * H, E)
        stages = {"forward": forward, "backward": [*dgrad, *wgrad]}
        in_bf16 = {stage: dense_products(device, in_bf16=sizes) for stage, sizes in stages.items()}
        return dense_arms(device, forward, dgrad, wgrad) | {"dense_bf16": in_bf16}

    def case(self) -> Case:
        figures = partial(compute_figures, targets=_TARGETS.get(self.name, {}) if self.routing == "random" else {})
        facts = {"model": self.name, "routing": self.routing, "check": _CHECK}
        title = _title(self.name, self.shape, self.routing)
        self.arms = self.timed | self.limits()  # the check removes peers that fail
        return Case(title, self.shape._asdict(), self.arms, self.check, figures, facts, after=self.after)


def error_problem(arm: str, errors: Mapping[str, Mapping[str, float]]) -> str | None:
    """The first result of an arm that is too far from float64, None if none is."""
    most = _MOST["fp8" if arm in FP8_PEERS or OURS.get(arm, ("hp",))[0] != "hp" else "bf16"]
    for name, error in errors.items():
        row, most_of_a_row = error.get("row", 0.0), _MOST_OF_SCORES if name == "dscores" else _MOST_OF_A_ROW
        if not (error["all"] <= most and row <= most_of_a_row):
            return f"{arm}: {name} is off by {error['all']:.3g}, its worst row by {row:.3g}, want at most {most} and {most_of_a_row}"
    return None


def compute_figures(ms: Mapping[str, float], targets: Mapping[str, float]) -> dict[str, Figure]:
    """Forward and backward together: every arm of ours against compiled torch, the MXFP8 ones against eager torch and the fastest peer."""
    found = [ms[f"{peer}_total"] for peer in PEERS if f"{peer}_total" in ms]
    against = [(arm, "compiled", ms[f"{COMPILED}_total"]) for arm in OURS]
    against += [(arm, "eager", ms[f"{EAGER}_total"]) for arm in ("hp", "mx")]
    against += [(arm, "best_peer", min(found)) for arm in ("hp", "mx") if found]
    figures = {}
    for arm, what, base in against:
        name = f"{arm}_vs_{what}"
        figures[name] = Figure(base / ms[f"{arm}_total"], base / ms[f"{_LIMITS.get(arm, 'dense_fp8')}_total"], targets.get(name))
    if f"{COMPILED}_graph" in ms:
        base = ms[f"{COMPILED}_graph"]
        for arm in OURS:
            limit = base / (MICROBATCHES * ms[f"{_LIMITS.get(arm, 'dense_fp8')}_total"])
            figures[f"{arm}_graph_vs_compiled_graph"] = Figure(base / ms[f"{arm}_graph"], limit)
    return figures


def cases(setting: Setting) -> Iterator[Case]:
    """Every shape with each routing, then few tokens of each model; only the first of them if it is to be quick."""
    every = [(name, shape, routing) for name, shape in SHAPES.items() for routing in ROUTINGS]
    every += [(f"{name}, few tokens", SHAPES[name]._replace(T=T), "random") for name in _MODELS for T in FEW_TOKENS]
    wanted = setting.choose(every, tiny=[("tiny", _TINY, routing) for routing in ROUTINGS])
    titles = [_title(*case) for case in wanted]
    if not any(setting.only in title for title in titles):
        raise ValueError(f"peers: --only {setting.only!r}, want a part of one of these titles: {'; '.join(titles)}")
    for case, title in zip(wanted, titles, strict=True):
        if setting.only in title:
            yield PeersProblem(setting, *case).case()


def _title(name: str, shape: Shape, routing: str) -> str:
    return f"{name}, {shape.T} tokens, {routing}"

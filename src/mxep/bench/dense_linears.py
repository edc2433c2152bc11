"""`mxep bench linears`: a dense linear layer, forward and backward, against torch.nn.Linear in bf16.

Arms: `linear`, torch.nn.Linear in bf16, and `linear_compiled`, the same under torch.compile; ours (`MXLinear`) as `hp` and `mx` (wgrad in
high precision and from MX bytes), and `mx_kept` with a weight that was quantised outside the timing, as once per optimizer step.

Every arm gets x (T, K) and a weight (N, K) in bf16, without a bias, and ends in `.grad` of both.  Errors are those against float64 from the
same inputs.  The limit is one dense GEMM for every product, in FP8 or, for wgrad of high-precision operands, in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mxep.bench.accuracy import gradients
from mxep.bench.experts import dense_arms
from mxep.bench.peers import relative_errors
from mxep.bench.records import Record, median_ms
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.timing import Arm, host_facts_of, run_arm
from mxep.mx.weight_cache import WeightCache
from mxep.parallel.linear_gains import LinearTimes
from mxep.parallel.linears import MXLinear
from mxep.recipe import resolve_recipe

TOKENS, FEWER_TOKENS = 32768, 8192
_TARGETS = {  # (K, N): of `mx` against `linear`
    (2048, 10944): 1.55,
    (2048, 2816): 1.35,
    (2816, 2048): 1.35,
    (2048, 3072): 1.35,
    (2048, 4096): 1.35,
    (4096, 2048): 1.35,
    (2048, 2048): 1.2,
    (2048, 576): None,
}
LINEAR, COMPILED = "linear", "linear_compiled"
OURS = {  # arm -> recipe, weight kept, the limit
    "hp": ("mxfp8_wgrad_with_hp", False, "dense_hp_wgrad"),
    "mx": ("mxfp8_wgrad_with_mx", False, "dense_fp8"),
    "mx_kept": ("mxfp8_wgrad_with_mx", True, "dense_fp8"),
}
RESULTS = ("y", "dx", "dw")
_MOST = {"bf16": 0.02, "fp8": 0.1}  # relative errors of the whole results
_CHECK = (
    f"relative errors of y, dx and dW against float64: at most {_MOST['bf16']} of products in bf16 and {_MOST['fp8']} of others, of the "
    "worst row of each at most twice as much"
)
_HOST_BATCH = 8  # calls whose launches fit into the device's queue
_HOST_US_ASKED = 200.0  # of a forward and backward of ours
_SEED = 7


class LinearProblem:
    """One shape: its data and arms.

    Attributes:
        layers: what each arm calls.  errors: of every arm's results against float64.
    """

    def __init__(self, setting: Setting, T: int, K: int, N: int) -> None:
        self.setting, self.T, self.K, self.N, device = setting, T, K, N, setting.device
        normal = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(_SEED))
        self.x, self.dy = normal(T, K), normal(T, N)
        linear = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
        self.weight = linear.weight = nn.Parameter(normal(N, K) / K**0.5)
        self.layers: dict[str, Any] = {LINEAR: linear}
        self.layers[COMPILED] = torch.compile(linear, dynamic=False) if device.type == "cuda" else linear
        self.caches: dict[str, WeightCache] = {}
        for arm, (recipe, keeps, _) in OURS.items():
            layer = MXLinear(linear, resolve_recipe(recipe), f"bench linears, {arm}")
            if keeps:
                self.caches[arm] = WeightCache()
                layer.keep_quantized(self.caches[arm])
            self.layers[arm] = layer
        self.leaf, self.y = self.x, self.dy
        self.errors: dict[str, dict[str, dict[str, float]]] = {}

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm."""

        def forward() -> None:
            self.weight.grad = None
            self.leaf = self.x.detach().requires_grad_()
            self.y = self.layers[arm](self.leaf)

        return {"forward": forward, "backward": lambda: self.y.backward(self.dy)}

    def arms(self) -> dict[str, Arm]:
        """Every arm without the limits'."""
        return {arm: self.stages(arm) for arm in self.layers}

    def limits(self) -> dict[str, Arm]:
        """Dense products of the same sizes."""
        T, K, N = self.T, self.K, self.N
        return dense_arms(self.setting.device, [(T, K, N)], [(T, N, K)], [(N, T, K)])

    def results(self, arm: str) -> dict[str, Tensor]:
        run_arm(self.stages(arm))
        return dict(zip(RESULTS, (self.y.detach(), *gradients((self.leaf, self.weight))), strict=True))

    def check(self) -> str | None:
        """Every arm against float64; keeps the errors."""
        x, w, dy = self.x.double(), self.weight.detach().double(), self.dy.double()
        want = {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}
        for arm in self.layers:
            self.errors[arm] = {name: relative_errors(want[name], value) for name, value in self.results(arm).items()}
            for name, error in self.errors[arm].items():
                in_hp = arm not in OURS or (name == "dw" and resolve_recipe(OURS[arm][0]).wgrad == "hp")
                most = _MOST["bf16" if in_hp else "fp8"]
                if not (error["all"] <= most and error["row"] <= 2 * most):
                    return f"{arm}: {name} is off by {error['all']:.3g}, its worst row by {error['row']:.3g}, want at most {most} and twice"
        return None

    def after(self) -> dict[str, Any]:
        """Further fields of the record."""
        fills = {arm: cache.fills for arm, cache in self.caches.items()}
        assert all(count <= 2 for count in fills.values()), f"weights kept: {fills} fills, want each one's two forms once"
        found = host_facts_of(self.arms(), self.setting.device, _HOST_BATCH)
        return found | {"errors": self.errors, "host_us_asked": dict.fromkeys(OURS, _HOST_US_ASKED)}


def compute_figures(ms: Mapping[str, float], target: float | None) -> dict[str, Figure]:
    """Forward and backward together, of every arm of ours against torch.nn.Linear."""
    base = ms[f"{LINEAR}_total"]
    return {
        f"{arm}_vs_linear": Figure(base / ms[f"{arm}_total"], base / ms[f"{limit}_total"], target if arm == "mx" else None)
        for arm, (_, _, limit) in OURS.items()
    }


def gains_table(records: Sequence[Record]) -> str:
    """The text of parallel/linear_gains.json, a row for each record."""
    rows = []
    for record in records:
        ms, shape = median_ms(record), record["shape"]
        bf16 = min(ms[f"{arm}_total"] for arm in (LINEAR, COMPILED))
        rounded = (round(value, 3) for value in (bf16, ms["hp_total"], ms["mx_total"]))
        rows.append(LinearTimes(record["device"], record["commit"], shape["T"], shape["K"], shape["N"], *rounded))
    return "[\n" + ",\n".join(f" {json.dumps(row._asdict())}" for row in rows) + "\n]\n"


def cases(setting: Setting) -> Iterator[Case]:
    """Every shape with many tokens and with fewer; only the first of them if it is to be quick."""
    every = [(TOKENS, *shape, target) for shape, target in _TARGETS.items()] + [(FEWER_TOKENS, *shape, None) for shape in _TARGETS]
    for T, K, N, target in setting.choose(every, tiny=[(64, 128, 96, None)]):
        problem = LinearProblem(setting, T, K, N)
        yield Case(
            f"{T} tokens, {K} -> {N}",
            {"T": T, "K": K, "N": N},
            problem.arms() | problem.limits(),
            problem.check,
            partial(compute_figures, target=target),
            {"check": _CHECK},
            after=problem.after,
        )

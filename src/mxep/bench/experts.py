"""`mxep bench experts`: the SwiGLU FFN of every expert on its rows, forward and backward, against torch's grouped GEMMs in bf16.

Arms: `bf16`, three of torch's grouped GEMMs and torch's SwiGLU, and `bf16_compiled`, the same with a compiled SwiGLU; ours as three GEMMs
(`separate`), as one function (`fused`), and that with wgrad from MX bytes (`fused_mx`).  Weights are quantised once, outside the timing, as
once per optimizer step; in the arms `..._uncached` in every call.  Ours get x and dy in MX, as permute and unpermute provide them; the
bf16 arms get them in bf16, and so does `fused_mx_of_bf16`, which quantises them inside the timing.  Backward is `y.backward(dy)` and ends
in the parameters' `.grad`.  The limit is one dense GEMM for every product, in FP8 or, for wgrad of high-precision operands, in bf16, and a
copy of the bytes that SwiGLU has to read and write.  With few rows the host's launches bound every arm: the milliseconds are those of the
slower of host and device.  The record has what a call costs the host (`host_us`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.bench.accuracy import db_problem, gradients, sqnr_db
from mxep.bench.baselines import copy_of, counts_of, dense_fp8, random_fp8
from mxep.bench.registry import Case, Figure, Setting, speed_ups
from mxep.bench.timing import Arm, host_facts_of, run_arm
from mxep.grouped_mm.function import expert_mm
from mxep.moe.experts import Experts
from mxep.mx.tensor import quantize_mx
from mxep.mx.weight_cache import WeightCache
from mxep.recipe import RECIPES
from mxep.shapes import MX_BLOCK, round_up

ROWS, EXPERTS = (131072, 8192), 8
_HOST_BATCH = 8  # calls whose launches fit into the device's queue: one forward and backward has up to a hundred launches
SHAPES = ((7168, 2048), (2048, 1408), (4096, 1536))  # (D, H)
LEAST_DB = 22.0
_CHECK = (  # for the record
    f"y, dx and every dW of every arm at least {LEAST_DB:.0f} dB from the bf16 arm's, which is no truth either: three GEMMs in a chain, "
    "each with quantised operands, whose errors add up; a kernel's own exactness is checked by its own benchmark and tests"
)
_OURS = {  # arm -> (recipe, fused, weights kept)
    "separate": ("mxfp8_wgrad_with_hp", False, True),
    "fused": ("mxfp8_wgrad_with_hp", True, True),
    "fused_mx": ("mxfp8_wgrad_with_mx", True, True),
    "fused_mx_of_bf16": ("mxfp8_gemm_wgrad_with_mx", True, True),
    "separate_uncached": ("mxfp8_wgrad_with_hp", False, False),
    "fused_uncached": ("mxfp8_wgrad_with_hp", True, False),
    "fused_mx_uncached": ("mxfp8_wgrad_with_mx", True, False),
}
_RESULTS = ("y", "dx", "dw1", "dw2", "dw3")
Products = Sequence[tuple[int, int, int]]  # rows, inner, columns of each


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class ExpertsProblem:
    """One shape and routing: its data and arms."""

    def __init__(self, setting: Setting, T: int, D: int, H: int, L: int, routing: str) -> None:
        self.setting, self.T, self.D, self.H, self.L = setting, T, D, H, L
        normal = partial(torch.randn, device=setting.device, dtype=torch.bfloat16)
        self.x, self.dy = normal(T, D), normal(T, D)
        self.mx = quantize_mx(self.x), quantize_mx(self.dy)
        self.weights = [torch.nn.Parameter(normal(L, *shape) / shape[-1] ** 0.5) for shape in ((H, D), (D, H), (H, D))]
        self.counts = counts_of(routing, T, L, MX_BLOCK).to(setting.device)
        self.swiglu = torch.compile(_swiglu, dynamic=False) if setting.device.type == "cuda" else _swiglu
        self.modules = {arm: self._module(*how) for arm, how in _OURS.items()}
        self.leaf, self.y = self.x, self.x
        self.worst_db: dict[str, float] = {}

    def _module(self, recipe: str, fused: bool, keeps: bool) -> Experts:
        with torch.device("meta"):
            module = Experts(self.D, self.H, self.L, recipe)
        module.w1, module.w2, module.w3 = self.weights
        module.fused = fused
        module.keep_quantized(WeightCache() if keeps else None)
        return module

    def _bf16(self, x: Tensor, swiglu: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        w1, w2, w3 = self.weights
        offs, hp = self.counts.cumsum(0, dtype=torch.int32), RECIPES["hp"]
        return expert_mm(swiglu(expert_mm(x, w1, offs, hp), expert_mm(x, w3, offs, hp)), w2, offs, hp)

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm."""
        ours = arm in self.modules
        given = self.mx if ours and self.modules[arm].recipe.dispatch == "mxfp8" else (self.x, self.dy)

        def forward() -> None:
            for parameter in self.weights:
                parameter.grad = None
            self.leaf = given[0].detach().requires_grad_()
            if ours:
                self.y = self.modules[arm](self.leaf, self.counts)
            else:
                self.y = self._bf16(self.leaf, self.swiglu if arm == "bf16_compiled" else _swiglu)

        return {"forward": forward, "backward": lambda: self.y.backward(given[1])}

    def results(self, arm: str) -> list[Tensor]:
        """y, dx and the gradients of w1, w2 and w3."""
        run_arm(self.stages(arm))
        return [self.y.detach(), *gradients((self.leaf, *self.weights))]

    def check(self) -> str | None:
        """Every arm of ours against bf16; keeps each one's worst result."""
        want = self.results("bf16")
        for arm in self.modules:
            db = {name: sqnr_db(a, b, None) for name, a, b in zip(_RESULTS, want, self.results(arm), strict=True)}
            if problem := db_problem(arm, db, dict.fromkeys(_RESULTS, LEAST_DB), "bf16"):
                return problem
            self.worst_db[arm] = round(min(db.values()), 2)
        return None

    def after(self) -> dict[str, Any]:
        """Further fields of the record."""
        saved = {arm: saved_bytes(stages, self.weights) for arm, stages in self.arms().items()}
        return {"saved_bytes": saved, "worst_db": self.worst_db} | host_facts_of(self.arms(), self.setting.device, _HOST_BATCH)

    def arms(self) -> dict[str, Arm]:
        """Every arm without the limits'."""
        names = ["bf16", "bf16_compiled", *self.modules]
        return {name: self.stages(name) for name in names}

    def limits(self) -> dict[str, Arm]:
        """Dense products of the same sizes and a copy of SwiGLU's bytes."""
        rows = self.T * self.H
        products = ffn_products(self.T, self.D, self.H, 2 * self.H, self.L)
        return dense_arms(self.setting.device, *products, (rows * 5, rows * 9, rows * 14))


def saved_bytes(stages: Arm, weights: Sequence[Tensor]) -> int:
    """Bytes that an arm's forward keeps for backward, without the weights."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        stages["forward"]()
    return sum(kept.values())


def ffn_products(rows: int, D: int, H: int, first_width: int, L: int) -> tuple[Products, Products, Products]:
    """Products of an FFN's forward, dgrad and wgrad.

    Args:
        rows: of all L experts.
        D, H, first_width: width of a row, of the activation, and of the first product.
    """
    inner = round_up(rows // L, MX_BLOCK)  # few tokens, too, are multiplied as whole MX blocks
    wgrad = [(L * first_width, inner, D), (L * D, inner, H)]
    return [(rows, D, first_width), (rows, H, D)], [(rows, D, H), (rows, first_width, D)], wgrad


def dense_arms(
    device: torch.device, forward: Products, dgrad: Products, wgrad: Products, moved_bytes: tuple[int, int, int] = (0, 0, 0)
) -> dict[str, Arm]:
    """Dense GEMMs of forward and backward: all of them in FP8, and with a wgrad in bf16.

    Args:
        moved_bytes: copied after forward, backward, and backward with a wgrad in bf16.
    """
    first = dense_products(device, forward, moved_bytes=moved_bytes[0])
    return {
        "dense_fp8": {"forward": first, "backward": dense_products(device, [*dgrad, *wgrad], moved_bytes=moved_bytes[1])},
        "dense_hp_wgrad": {"forward": first, "backward": dense_products(device, dgrad, wgrad, moved_bytes[2])},
    }


def dense_products(device: torch.device, in_fp8: Products = (), in_bf16: Products = (), moved_bytes: int = 0) -> Callable[[], None]:
    """Products (rows, inner) x (columns, inner), then a copy of `moved_bytes`, read and written."""
    works = [dense_fp8(*(random_fp8(size, inner, device) for size in (rows, columns))) for rows, inner, columns in in_fp8]
    works += [_dense_bf16(*sizes, device) for sizes in in_bf16]
    works += [copy_of(moved_bytes // 2, device)] if moved_bytes else []

    def run() -> None:
        for work in works:
            work()

    return run


def _dense_bf16(rows: int, inner: int, columns: int, device: torch.device) -> Callable[[], object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, inner, device=device, dtype=dtype) for size in (rows, columns))
    return lambda: a @ b.t()


def compute_figures(ms: Mapping[str, float]) -> dict[str, Figure]:
    """Forward, backward and both together, of every arm of ours, against bf16."""
    figures: dict[str, Figure] = {}
    for arm in _OURS:
        prefix, limit = "" if arm == "fused" else f"{arm}_", "dense_fp8" if arm.startswith("fused_mx") else "dense_hp_wgrad"
        figures |= speed_ups(ms, arm, "bf16", limit, f"{prefix}{{stage}}_vs_torch_bf16")
    for baseline in ("bf16_compiled", "separate"):
        total = ms[f"{baseline}_total"]
        figures[f"total_vs_{baseline}"] = Figure(total / ms["fused_total"], total / ms["dense_hp_wgrad_total"])
    return figures


def cases(setting: Setting) -> Iterator[Case]:
    """Every shape with many rows, balanced and by Zipf's law, and with few."""
    every = [(ROWS[0], *shape, routing) for shape in SHAPES for routing in ("balanced", "zipf")]
    every += [(ROWS[1], *shape, "balanced") for shape in SHAPES]
    for T, D, H, routing in setting.choose(every, tiny=[(256, 128, 64, "balanced"), (256, 128, 64, "zipf")]):
        problem = ExpertsProblem(setting, T, D, H, 4 if setting.tiny else EXPERTS, routing)
        yield Case(
            f"{T} rows, D {D}, H {H}, {problem.L} experts, {routing}",
            {"T": T, "D": D, "H": H, "L": problem.L},
            {**problem.arms(), **problem.limits()},
            problem.check,
            compute_figures,
            {"routing": routing, "check": _CHECK},
            after=problem.after,
        )

"""`mxep bench layer`: a whole MoE layer, router to output, on every rank of a run: forward, backward, inference.

Arms: `nccl_bf16`, the layer of separate blocks in bf16; `nccl_bf16_one_function`, the fused layer in bf16 sending a row for each choice as
the blocks do (the faster of the two is the baseline); `bf16`, the fused layer in bf16 sending a token once to a rank; `mxfp8_blocks` and
`mxfp8`, the separate blocks and the fused layer in MXFP8; and without any exchange, on one GPU with all experts, the fused layer in MXFP8
over this rank's tokens (`local`) and over the tokens of all ranks (`one_gpu`). All go over torch.distributed unless the ranks can share
memory: then `bf16` and `mxfp8` go over symmetric memory (the record's `mxfp8_over` says), and `mxfp8_nccl` is `mxfp8` over NCCL. What
`mxfp8` takes longer than `local` is network time that is not hidden; `one_gpu` divided by the ranks is the reference. Where one GPU has not
enough memory to do it all there is no `one_gpu`, and `local` is the reference. Weights are quantised outside the clock, as once per
optimizer step. `router_fp32` and `router_bf16` are the router's product over this rank's tokens, forward and backward, by itself; every
layer has the first of them inside, and `router_float32_gemm` is the same by torch's float32 GEMM.

Routing: every expert as likely as every other, or by Zipf's law: the router's logits are N(0, 1) around the logarithm of 1/k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.bench.accuracy import sqnr_db
from mxep.bench.layer_tables import WAYS
from mxep.bench.ranks import share_memory
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.step_parts import exposed_ms, trace_of
from mxep.bench.timing import Arm, Timing, run_arm
from mxep.comm.collective import resolve_group
from mxep.device import memory_bytes
from mxep.moe.config import MoEConfig, RouterDtype
from mxep.moe.experts import Experts
from mxep.moe.fused import FusedMoE, saved_bytes
from mxep.moe.layer import MoE
from mxep.moe.router_product import logits_backward, logits_of
from mxep.moe.runtime import RuntimeEPConfig
from mxep.mx.weight_cache import WeightCache

_SEED = 7


class Size(NamedTuple):
    """A layer by its letters: tokens of all ranks, widths, experts, choices."""

    T_global: int
    D: int
    H: int
    E: int
    C: int


SIZES = (Size(131072, 4096, 1536, 128, 8), Size(131072, 7168, 2048, 256, 8), Size(131072, 2048, 1408, 64, 6))
_TINY = Size(128, 64, 32, 8, 2)
_FULL = 0.8  # of a GPU's memory: beyond it torch gives memory back and takes it anew inside the clock
_TARGETS = {"total_vs_nccl_bf16": 2.0, "scaling_efficiency_forward": 0.80, "scaling_efficiency_backward": 0.88}  # of SIZES[0], 4 ranks on
_FIRST_IN_MX = "mxfp8_first_product_in_mx"  # of the audit: what `mxfp8` keeps with the first product in MX
_PER_CHOICE = RuntimeEPConfig(dispatch="all_to_all", combine="all_to_all")
_DEDUP = RuntimeEPConfig()
BASELINES = ("nccl_bf16", "nccl_bf16_one_function")
RECIPE = "mxfp8_wgrad_with_mx"  # of the arms in MXFP8
_HOW: dict[str, tuple[str, RuntimeEPConfig | None]] = {  # arm -> recipe, and how the fused layer exchanges (None: separate blocks)
    "nccl_bf16": ("hp", None),
    "nccl_bf16_one_function": ("hp", _PER_CHOICE),
    "bf16": ("hp", _DEDUP),
    "mxfp8_blocks": (RECIPE, None),
    "mxfp8": (RECIPE, _DEDUP),
}
_SHARED = ("bf16", "mxfp8")  # over symmetric memory where that is there
_NOT_SHARED = "mxfp8_nccl"
_INFERENCE = ("nccl_bf16", "mxfp8")
_ROUTERS: dict[str, RouterDtype] = {"router_fp32": "fp32", "router_bf16": "bf16"}
_EXCHANGES = {"forward": WAYS[:2], "backward": WAYS[2:]}
RESULTS = ("o", "dx", "drouter", "dw1", "dw2", "dw3", "db1", "db2", "db3")
LEAST_DB = {"hp": dict.fromkeys(RESULTS, 40.0) | {"drouter": 35.0}, "mxfp8": dict.fromkeys(RESULTS, 20.0) | {"drouter": 18.0}}


def parse_size(text: str) -> Size:
    """T,H,I,E,K as the peer's `--thiek` has them: T is the tokens of all ranks, H our D, I our H, K our C.

    Raises:
        ValueError: not five positive numbers.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 5 or min(numbers) < 1:
        raise ValueError(f"layer: --thiek {text!r}, want five positive numbers T,H,I,E,K, for example 131072,4096,1536,128,8")
    return Size(*numbers)


def one_gpu_bytes(size: Size) -> int:
    """About what one GPU takes that does it all: weights, their gradients and quantised forms, and rows at their widest.

    >>> [round(one_gpu_bytes(size) / 2**30) for size in SIZES]
    [52, 124, 22]
    """
    T, D, H, E, C = size
    return 3 * E * D * H * 6 + T * C * (8 * H + 5 * D) + 6 * 2 * T * D


class Problem:
    """One size and routing on this rank: data, weights, and how an arm runs over them; `shared`: a group over symmetric memory, if any."""

    def __init__(self, setting: Setting, size: Size, routing: str, shared: str | None = None) -> None:
        if size.T_global % setting.world or size.E % setting.world:
            raise ValueError(f"layer: {size.T_global} tokens and {size.E} experts on {setting.world} ranks, want multiples of the ranks")
        self.setting, self.size = setting, size
        T, D, H, E, C = size
        self.config = MoEConfig(D, H, E, C, renormalize=True)
        device = setting.device
        if device.type == "cuda":
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # arms of all sizes take turns with the memory
            torch.cuda.empty_cache()
        everywhere = torch.Generator(device).manual_seed(_SEED)  # the same on all ranks
        normal = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=everywhere)
        whole = normal(T, D)
        whole[:, 0] = 1  # the column that carries the experts' popularity
        gate = normal(E, D) / D**0.5
        popularity = torch.zeros(E) if routing == "balanced" else -torch.arange(1, E + 1).log()
        gate[:, 0] = popularity[torch.randperm(E, generator=torch.Generator().manual_seed(_SEED))].to(device)
        self.gate = torch.nn.Parameter(gate.float())  # as training has it
        self.all_experts = [torch.nn.Parameter(normal(E, *shape) / shape[-1] ** 0.5) for shape in ((H, D), (D, H), (H, D))]
        L, first = E // setting.world, setting.rank * (E // setting.world)
        self.experts = [torch.nn.Parameter(weight[first : first + L].detach()) for weight in self.all_experts]  # the same memory
        local = slice(setting.rank * (T // setting.world), (setting.rank + 1) * (T // setting.world))
        self.tokens = {"": whole[local].clone(), "one_gpu": whole}  # what a layer keeps of a view would count as all tokens
        self.gradients = {"": normal(T, D)[local].clone(), "one_gpu": normal(T, D)}
        self.biases = [torch.nn.Parameter(normal(E, width)[first : first + L].clone()) for width in (H, D, H)]  # of the check alone
        self.modules: dict[tuple[type[MoE], str, int], Experts] = {}  # of layers that differ in their exchanges alone, once
        self.caches: dict[Experts, WeightCache] = {}
        best = setting.group if shared is None else resolve_group("bench layer", shared)
        self.how = _HOW if shared is None else {**_HOW, _NOT_SHARED: _HOW["mxfp8"]}
        self.layers = {
            arm: self._layer(recipe, runtime, self.experts, best if arm in _SHARED else setting.group)
            for arm, (recipe, runtime) in self.how.items()
        }
        alone = self._layer(*_HOW["mxfp8"], self.all_experts, None)
        self.alone = ["local", *(["one_gpu"] if one_gpu_bytes(size) <= _FULL * memory_bytes(device) else [])]
        self.layers |= dict.fromkeys(self.alone, alone)
        self.active = alone.experts
        self.leaf = self.out = self.tokens[""]
        self.found: dict[str, Any] = {}

    def _layer(self, recipe: str, runtime: RuntimeEPConfig | None, weights: list[torch.nn.Parameter], group: ProcessGroup | None) -> MoE:
        """A layer of these weights."""
        with torch.device("meta"):
            layer = MoE(self.config, recipe) if runtime is None else FusedMoE(self.config, recipe, runtime)
        layer.experts.w1, layer.experts.w2, layer.experts.w3 = weights
        key = type(layer), recipe, id(weights)
        if key not in self.modules:
            self.modules[key], self.caches[layer.experts] = layer.experts, WeightCache()
            layer.experts.keep_quantized(self.caches[layer.experts])
        layer.experts = self.modules[key]
        layer.router.gate.weight = self.gate
        for name in ("expert_bias", "tokens_per_expert"):
            setattr(layer, name, torch.zeros(self.size.E, device=self.setting.device))
        layer.group = group
        return layer

    def _take_over(self, experts: Experts) -> None:
        """Only these keep quantised weights from now on: those of all arms together are too much for one GPU."""
        if experts is not self.active:
            self.caches[self.active].advance()
            self.active = experts

    def _forget(self) -> None:
        self.leaf = self.out = self.tokens[""]
        for parameter in (self.gate, *self.experts, *self.all_experts, *self.biases):
            parameter.grad = None

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm as the clock calls them."""
        tokens, gradient = (held.get(arm, held[""]) for held in (self.tokens, self.gradients))

        def forward() -> None:
            self._take_over(self.layers[arm].experts)
            self._forget()
            self.leaf = tokens.detach().requires_grad_()
            self.out = self.layers[arm](self.leaf)

        return {"forward": forward, "backward": lambda: self.out.backward(gradient)}

    def router(self, router_dtype: RouterDtype) -> Arm:
        """The router's product and its gradients."""
        tokens, gate = self.tokens[""], self.gate.detach()
        logits = logits_of(tokens, gate, router_dtype)

        def backward() -> None:
            logits_backward(logits, tokens, gate, router_dtype, tokens.dtype, True)

        return {"forward": lambda: logits_of(tokens, gate, router_dtype), "backward": backward}

    def float32_gemm(self) -> Arm:
        """What `router("fp32")` computes, by torch's float32 GEMMs."""
        tokens, gate = self.tokens[""], self.gate.detach()
        logits = tokens.float() @ gate.t()

        def backward() -> None:
            (logits @ gate).to(tokens.dtype)
            logits.t() @ tokens.float()

        return {"forward": lambda: tokens.float() @ gate.t(), "backward": backward}

    def inference(self, arm: str) -> Arm:
        def run() -> None:
            self._take_over(self.layers[arm].experts)
            self._forget()
            with torch.no_grad():
                self.layers[arm](self.tokens[""])

        return {"": run}

    def results(self, arm: str) -> list[Tensor]:
        """What `RESULTS` names, of one pass."""
        run_arm(self.stages(arm))
        grads = [leaf.grad for leaf in (self.leaf, self.gate, *self.experts, *self.biases)]
        assert all(grad is not None for grad in grads)
        return [self.out.detach(), *(grad for grad in grads if grad is not None)]

    def check(self) -> str | None:
        """Every arm with an exchange, with biases, against the blocks in bf16: decibels asserted, differences kept for the record."""
        modules = [module for (_, _, weights), module in self.modules.items() if weights == id(self.experts)]
        for experts in modules:
            experts.b1, experts.b2, experts.b3 = self.biases
        try:
            return self._differences()
        finally:
            for experts in modules:
                experts.b1 = experts.b2 = experts.b3 = None
            self._forget()

    def _differences(self) -> str | None:
        """What is wrong, None if nothing is."""
        want = self.results("nccl_bf16")
        self.found["mean_abs"] = {name: value.float().abs().mean().item() for name, value in zip(RESULTS, want, strict=True)}
        self.found["max_abs"] = {name: value.abs().max().item() for name, value in zip(RESULTS, want, strict=True)}
        self.found["differences"] = {}
        for arm, (recipe, _) in self.how.items():
            if arm == "nccl_bf16":
                continue
            self.found["differences"][arm] = kept = {}
            for name, reference, got in zip(RESULTS, want, self.results(arm), strict=True):
                difference = (reference.float() - got.float()).abs()
                db = sqnr_db(reference, got, self.setting.group)
                mean = difference.mean().item() / max(self.found["mean_abs"][name], 1e-30)
                kept[name] = {"db": round(db, 2), "max_abs": difference.max().item(), "mean_relative": mean}
                least = LEAST_DB["hp" if recipe == "hp" else "mxfp8"][name]
                if not db >= least:
                    return f"{arm}: {name} at {db:.1f} dB from the blocks in bf16, want at least {least:.0f} dB"
        return None

    def after(self) -> dict[str, Any]:
        """Further fields of the record: what the checks found, what forward keeps, how uneven the experts' loads are."""
        kept = {}
        for arm in ("bf16", "mxfp8"):
            self.stages(arm)["forward"]()
            kept[arm] = saved_bytes(self.out)
        layer = self.layers["mxfp8"]
        assert isinstance(layer, FusedMoE)
        plain, layer.runtime = layer.runtime, replace(layer.runtime, keep_first_product="mxfp8")
        self.stages("mxfp8")["forward"]()
        kept[_FIRST_IN_MX] = saved_bytes(self.out)
        layer.runtime = plain
        self._forget()
        layer.reset_load()
        layer(self.tokens[""])
        load = layer.tokens_per_expert
        self._forget()
        facts = {"saved_bytes": kept, "load_max_over_mean": round((load.max() / load.mean()).item(), 3)}
        if self.setting.device.type == "cuda":
            facts["exposed_ms"] = {arm: self.exposed(arm) for arm in self.how}
        return {**self.found, **facts}

    def exposed(self, arm: str) -> dict[str, float]:
        """Milliseconds of each exchange beside which nothing ran, of one pass on this rank, by the profiler's trace."""
        stages = self.stages(arm)
        found: dict[str, float] = {}
        for stage, names in _EXCHANGES.items():
            if self.setting.group is not None:
                dist.barrier(self.setting.group)
            torch.cuda.synchronize(self.setting.device)
            found |= dict(zip(names, exposed_ms(trace_of(stages[stage], self.setting.device)), strict=True))
        self._forget()
        return found

    def arms(self) -> dict[str, Arm]:
        names = [*self.how, *self.alone]
        routers = {arm: self.router(router_dtype) for arm, router_dtype in _ROUTERS.items()} | {"router_float32_gemm": self.float32_gemm()}
        return {**{name: self.stages(name) for name in names}, **routers, **{f"{arm}_inference": self.inference(arm) for arm in _INFERENCE}}


def judge(times: Mapping[str, Timing], size: Size, routing: str, world: int) -> dict[str, Figure]:
    """Against bf16 over the same transport, how much of one GPU's speed the ranks keep, and the share of a layer's time that its router's
    product would take by itself (limit: in bf16)."""
    ms = {name: timing.median_ms for name, timing in times.items()}
    targets = _TARGETS if (size, routing) == (SIZES[0], "balanced") and world >= 4 else {}
    stages = ("total", "forward", "backward")
    least = {stage: ms[f"one_gpu_{stage}"] / world if f"one_gpu_{stage}" in ms else ms[f"local_{stage}"] for stage in stages}
    figures = {}
    for stage in stages:
        base = min(ms[f"{arm}_{stage}"] for arm in BASELINES)
        limit = base / least[stage]
        for arm, prefix in (("mxfp8", ""), ("mxfp8_blocks", "blocks_"), ("bf16", "bf16_"), (_NOT_SHARED, "nccl_")):
            if f"{arm}_{stage}" not in ms:
                continue
            name = f"{prefix}{stage}_vs_nccl_bf16"
            figures[name] = Figure(base / ms[f"{arm}_{stage}"], limit, targets.get(name))
        if stage != "total" and f"one_gpu_{stage}" in ms:
            name = f"scaling_efficiency_{stage}"
            figures[name] = Figure(ms[f"one_gpu_{stage}"] / (world * ms[f"mxfp8_{stage}"]), 1.0, targets.get(name))
        figures[f"router_{stage}_share"] = Figure(
            ms[f"router_fp32_{stage}"] / ms[f"mxfp8_{stage}"], ms[f"router_bf16_{stage}"] / ms[f"mxfp8_{stage}"]
        )
    base = ms["nccl_bf16_inference"]
    figures["inference_vs_nccl_bf16"] = Figure(base / ms["mxfp8_inference"], base / least["forward"])
    return figures


def cases(setting: Setting) -> Iterator[Case]:
    """Every size, balanced and by Zipf's law; or the one that was asked for."""
    sizes = (Size(*setting.size),) if setting.size is not None else (_TINY,) if setting.tiny else SIZES[:1] if setting.quick else SIZES
    shared = share_memory(setting.group, setting.device)
    for size in sizes:
        for routing in ("balanced", "zipf"):
            problem = Problem(setting, size, routing, shared)
            shape = {"T": size.T_global // setting.world, **size._asdict(), "L": size.E // setting.world}
            yield Case(
                f"{size.T_global} tokens of {setting.world} ranks, D {size.D}, H {size.H}, {size.E} experts, top {size.C}, {routing}",
                shape,
                problem.arms(),
                problem.check,
                partial(judge, size=size, routing=routing, world=setting.world),
                {"routing": routing, "recipe": RECIPE, "mxfp8_over": "symmetric" if shared else "collective"},
                after=problem.after,
            )
            del problem

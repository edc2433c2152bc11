"""`mxep bench layer`: a whole MoE layer, router to output, on every rank of a run: forward, backward, inference.

Arms: `nccl_bf16`, the layer of separate blocks in bf16; `nccl_bf16_one_function`, the fused layer in bf16 sending a row for each chosen
expert as the blocks do (the faster of the two is the baseline); `bf16`, the fused layer in bf16 sending a token once to a rank;
`mxfp8_blocks` and `mxfp8`, the separate blocks and the fused layer in MXFP8; and without any exchange, on one GPU with all experts, the
fused layer in MXFP8 over this rank's tokens (`local`) and over the tokens of all ranks (`one_gpu`).  All use torch.distributed unless the
ranks can share memory: then `bf16` and `mxfp8` use symmetric memory (the record's `mxfp8_over` says), and `mxfp8_nccl` is `mxfp8` over
NCCL.  The time of `mxfp8` beyond that of `local` is exposed network time; `one_gpu` divided by the ranks is the reference.  If one GPU has
too little memory for the whole work there is no `one_gpu`, and `local` is the reference; without memory for all experts there is neither.
Weights are quantised outside the timing, as once per optimizer step.  `router_fp32` and `router_bf16` are the router's GEMM over this
rank's tokens, forward and backward, alone; every layer contains the first of them, and `router_float32_gemm` is the same by torch's float32
GEMM.

Routing: all experts equally likely, or by Zipf's law: the router's logits are N(0, 1) around the logarithm of 1/k.
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

from mxep.bench.accuracy import db_problem, gradients, sqnr_db
from mxep.bench.baselines import zipf_places
from mxep.bench.ranks import symmetric_group
from mxep.bench.registry import Case, Figure, Setting, speed_ups
from mxep.bench.timing import Arm, host_facts_of, run_arm, use_expandable_segments
from mxep.bench.training import IDLE, exposed_ms, step_parts, trace_of
from mxep.comm.collective import gather_objects, resolve_group
from mxep.device import total_memory
from mxep.fused.layer import FusedMoE, saved_bytes
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.moe.config import MoEConfig, RouterDtype
from mxep.moe.experts import Experts
from mxep.moe.layer import MoE
from mxep.moe.router import logits_backward, logits_of, runs_in_parts
from mxep.mx.weight_cache import WeightCache
from mxep.ops.routing.router_reference import bf16_parts

_SEED = 7
_HOST_BATCH = 4  # calls whose launches fit into the device's queue


class Size(NamedTuple):
    """Dimensions of a layer: tokens of all ranks, widths, experts, top-k."""

    T_global: int
    D: int
    H: int
    E: int
    C: int


SIZES = (Size(131072, 4096, 1536, 128, 8), Size(131072, 7168, 2048, 256, 8), Size(131072, 2048, 1408, 64, 6))
_TINY = Size(128, 64, 32, 8, 2)
_FULL = 0.8  # of a GPU's memory: above it torch frees and reallocates memory inside the timing
_TARGETS = {"total_vs_nccl_bf16": 2.0, "scaling_efficiency_forward": 0.80, "scaling_efficiency_backward": 0.88}  # of SIZES[0], 4 ranks on
_FIRST_IN_MX = "mxfp8_first_product_in_mx"  # of the audit: what `mxfp8` keeps with the output of the gate and up GEMM in MX
_PER_CHOICE = RuntimeEPConfig(dispatch="all_to_all", combine="all_to_all")
_DEDUP = RuntimeEPConfig()
BASELINES = ("nccl_bf16", "nccl_bf16_one_function")
RECIPE = "mxfp8_wgrad_with_mx"  # of the arms in MXFP8
_ARMS: dict[str, tuple[str, RuntimeEPConfig | None]] = {  # arm -> recipe, and how the fused layer exchanges (None: separate blocks)
    "nccl_bf16": ("hp", None),
    "nccl_bf16_one_function": ("hp", _PER_CHOICE),
    "bf16": ("hp", _DEDUP),
    "mxfp8_blocks": (RECIPE, None),
    "mxfp8": (RECIPE, _DEDUP),
}
_SHARED = ("bf16", "mxfp8")  # over symmetric memory if possible
_NOT_SHARED = "mxfp8_nccl"
_INFERENCE = ("nccl_bf16", "mxfp8")
_ROUTERS: dict[str, RouterDtype] = {"router_fp32": "fp32", "router_bf16": "bf16"}
EXCHANGES = ("dispatch", "combine", "combine's backward", "dispatch's backward")
_EXCHANGES_OF = {"forward": EXCHANGES[:2], "backward": EXCHANGES[2:]}
RESULTS = ("o", "dx", "drouter", "dw1", "dw2", "dw3", "db1", "db2", "db3")
LEAST_DB = {"hp": dict.fromkeys(RESULTS, 40.0) | {"drouter": 35.0}, "mxfp8": dict.fromkeys(RESULTS, 20.0) | {"drouter": 18.0}}


def parse_size(text: str) -> Size:
    """T,H,I,E,K: T is the tokens of all ranks, H our D, I our H, K our C.

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


def one_gpu_bytes(size: Size, ranks: int = 1) -> int:
    """Approximate memory of one GPU that has all experts and a rank's tokens: weights, their gradients and quantised forms, and rows at
    their widest.

    >>> [round(one_gpu_bytes(size) / 2**30) for size in SIZES], round(one_gpu_bytes(SIZES[1], ranks=4) / 2**30)
    ([52, 124, 22], 78)
    """
    T, D, H, E, C = size
    T //= ranks
    return 3 * E * D * H * 6 + T * C * (8 * H + 5 * D) + 6 * 2 * T * D


def exchange_bytes(size: Size, ranks: int, busiest: float = 1.0) -> int:
    """Approximate memory of a rank for the check of the arms that exchange, as an arm in bf16 needs it.

    Its experts' weights, two sets of their gradients and quantised forms; rows of the rank that has `busiest` times its share of them, and
    those that it sends; tokens and gradients of all ranks, which `one_gpu` reads.

    >>> [round(exchange_bytes(SIZES[1], 2, busiest) / 2**30) for busiest in (1.0, 1.17)]
    [100, 106]
    """
    T, D, H, E, C = size
    rows = T // ranks * C
    return int(3 * E * D * H // ranks * 8 + rows * busiest * (8 * D + 12 * H) + rows * 4 * D + 4 * T * D)


class LayerProblem:
    """One size and routing on this rank: data, weights and arms; `shared`: a group over symmetric memory, if any."""

    def __init__(self, setting: Setting, size: Size, routing: str, shared: str | None = None) -> None:
        if size.T_global % setting.world or size.E % setting.world:
            raise ValueError(f"layer: {size.T_global} tokens and {size.E} experts on {setting.world} ranks, want multiples of the ranks")
        self.setting, self.size = setting, size
        T, D, H, E, C = size
        self.config = MoEConfig(D, H, E, C, renormalize=True)
        device = setting.device
        if device.type == "cuda":
            use_expandable_segments()
            torch.cuda.empty_cache()
        same = torch.Generator(device).manual_seed(_SEED)  # the same on all ranks
        normal = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=same)
        whole = normal(T, D)
        whole[:, 0] = 1  # the column that multiplies the experts' popularity
        gate = normal(E, D) / D**0.5
        gate[:, 0] = 0 if routing == "balanced" else -zipf_places(E).log().to(device)
        self.gate = torch.nn.Parameter(gate.float())  # as training has it
        fits = _FULL * total_memory(device)
        self.alone = [arm for arm, ranks in (("local", setting.world), ("one_gpu", 1)) if one_gpu_bytes(size, ranks) <= fits]
        beside = 6 * E * D * H * (setting.world - 1) // setting.world  # the other ranks' weights, in bf16
        if exchange_bytes(size, setting.world, self._busiest(whole)) + beside > fits:
            self.alone = []
        L, first = E // setting.world, setting.rank * (E // setting.world)
        self.experts, self.all_experts = [], []
        for shape in ((H, D), (D, H), (H, D)):
            weight = normal(E, *shape) / shape[-1] ** 0.5
            own = weight[first : first + L]  # the same memory, unless no arm needs the other experts
            self.experts.append(torch.nn.Parameter(own if self.alone else own.clone()))
            self.all_experts += [torch.nn.Parameter(weight)] if self.alone else []
        local = slice(setting.rank * (T // setting.world), (setting.rank + 1) * (T // setting.world))
        self.tokens = {"": whole[local].clone(), "one_gpu": whole}  # a layer that keeps a view would count as keeping all tokens
        self.gradients = {"": normal(T, D)[local].clone(), "one_gpu": normal(T, D)}
        self.biases = [torch.nn.Parameter(normal(E, width)[first : first + L].clone()) for width in (H, D, H)]  # of the check alone
        self.modules: dict[tuple[type[MoE], str, int], Experts] = {}  # one for all layers that differ only in their exchanges
        self.caches: dict[Experts, WeightCache] = {}
        best = setting.group if shared is None else resolve_group("bench layer", shared)
        self.exchanging = _ARMS if shared is None else {**_ARMS, _NOT_SHARED: _ARMS["mxfp8"]}
        self.layers = {
            arm: self._layer(recipe, runtime, self.experts, best if arm in _SHARED else setting.group)
            for arm, (recipe, runtime) in self.exchanging.items()
        }
        if self.alone:
            self.layers |= dict.fromkeys(self.alone, self._layer(*_ARMS["mxfp8"], self.all_experts, None))
        self.active = self.layers["mxfp8"].experts
        self.leaf = self.out = self.tokens[""]
        self.found: dict[str, Any] = {}

    def _busiest(self, whole: Tensor) -> float:
        """How many times its share of the choices of all tokens the busiest rank has; the same on all ranks."""
        counts = torch.bincount((whole.float() @ self.gate.detach().t()).topk(self.size.C).indices.flatten(), minlength=self.size.E)
        of_ranks = counts.view(self.setting.world, -1).sum(1)
        return max(gather_objects((of_ranks.max() / of_ranks.float().mean()).item(), self.setting.group))

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

    def _activate(self, arm: str) -> None:
        """Only this arm keeps quantised weights from now on (those of all arms do not fit on one GPU); drops results and gradients."""
        experts = self.layers[arm].experts
        if experts is not self.active:
            self.caches[self.active].advance()
            self.active = experts
        self._clear()

    def _clear(self) -> None:
        self.leaf = self.out = self.tokens[""]
        for parameter in (self.gate, *self.experts, *self.all_experts, *self.biases):
            parameter.grad = None

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm as they are timed."""
        tokens, gradient = (held.get(arm, held[""]) for held in (self.tokens, self.gradients))

        def forward() -> None:
            self._activate(arm)
            self.leaf = tokens.detach().requires_grad_()
            self.out = self.layers[arm](self.leaf)

        return {"forward": forward, "backward": lambda: self.out.backward(gradient)}

    def router(self, router_dtype: RouterDtype) -> Arm:
        """The router's GEMM and its gradients."""
        tokens, gate = self.tokens[""], self.gate.detach()
        logits = logits_of(tokens, gate, router_dtype)
        in_parts = router_dtype == "fp32" and runs_in_parts(logits, tokens.dtype)
        d_logits = torch.stack(bf16_parts(logits), 1) if in_parts else logits  # as `router_gradients` returns it
        return {
            "forward": lambda: logits_of(tokens, gate, router_dtype),
            "backward": lambda: logits_backward(d_logits, tokens, gate, router_dtype, tokens.dtype, True),
        }

    def float32_gemm(self) -> Arm:
        """The same as `router("fp32")`, by torch's float32 GEMMs."""
        tokens, gate = self.tokens[""], self.gate.detach()
        logits = tokens.float() @ gate.t()
        return {
            "forward": lambda: tokens.float() @ gate.t(),
            "backward": lambda: ((logits @ gate).to(tokens.dtype), logits.t() @ tokens.float()),
        }

    def inference(self, arm: str) -> Arm:
        def run() -> None:
            self._activate(arm)
            with torch.no_grad():
                self.layers[arm](self.tokens[""])

        return {"": run}

    def results(self, arm: str) -> list[Tensor]:
        """The tensors that `RESULTS` names, of one forward and backward."""
        run_arm(self.stages(arm))
        return [self.out.detach(), *gradients((self.leaf, self.gate, *self.experts, *self.biases))]

    def check(self) -> str | None:
        """Every arm with an exchange, with biases, against the blocks in bf16; keeps the differences for the record."""
        modules = [module for (_, _, weights), module in self.modules.items() if weights == id(self.experts)]
        for experts in modules:
            experts.b1, experts.b2, experts.b3 = self.biases
        try:
            return self._differences()
        finally:
            for experts in modules:
                experts.b1 = experts.b2 = experts.b3 = None
            self._clear()

    def _differences(self) -> str | None:
        want = dict(zip(RESULTS, self.results("nccl_bf16"), strict=True))
        mean_abs = {name: value.float().abs().mean().item() for name, value in want.items()}
        differences: dict[str, dict[str, dict[str, float]]] = {}
        self.found = {"mean_abs": mean_abs, "max_abs": {name: value.abs().max().item() for name, value in want.items()}}
        self.found["differences"] = differences
        for arm, (recipe, _) in [*self.exchanging.items()][1:]:
            db, differences[arm] = {}, {}
            for (name, reference), got in zip(want.items(), self.results(arm), strict=True):
                difference = (reference.float() - got.float()).abs()
                db[name] = sqnr_db(reference, got, self.setting.group)
                mean = difference.mean().item() / max(mean_abs[name], 1e-30)
                differences[arm][name] = {"db": round(db[name], 2), "max_abs": difference.max().item(), "mean_relative": mean}
            if problem := db_problem(arm, db, LEAST_DB["hp" if recipe == "hp" else "mxfp8"], "the blocks in bf16"):
                return problem
        return None

    def after(self) -> dict[str, Any]:
        """Further fields of the record: results of the checks, what forward keeps, the imbalance of the experts' loads."""
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
        self._clear()
        layer.reset_load()
        layer(self.tokens[""])
        load = layer.tokens_per_expert
        of_ranks = gather_objects(load.tolist(), self.setting.group)
        self._clear()
        facts: dict[str, Any] = {"saved_bytes": kept, "load_max_over_mean": round((load.max() / load.mean()).item(), 3)}
        facts["choices"] = [int(sum(counts)) for counts in zip(*of_ranks, strict=True)]
        facts |= host_facts_of({arm: self.stages(arm) for arm in self.layers}, self.setting.device, _HOST_BATCH)
        self._clear()
        if self.setting.device.type == "cuda":
            traced = {arm: self.traced(arm) for arm in self.exchanging}
            facts["exposed_ms"] = {arm: exposed for arm, (exposed, _) in traced.items()}
            facts["busy_ms"] = {arm: busy for arm, (_, busy) in traced.items()}
        return {**self.found, **facts}

    def traced(self, arm: str) -> tuple[dict[str, float], list[float]]:
        """Of one forward and backward, by the profiler's trace: exposed milliseconds of each exchange on this rank, and the milliseconds
        in which each rank's GPU works on something else than exchanges."""
        stages = self.stages(arm)
        found: dict[str, float] = {}
        busy = 0.0
        for stage, names in _EXCHANGES_OF.items():
            if self.setting.group is not None:
                dist.barrier(self.setting.group)
            torch.cuda.synchronize(self.setting.device)
            events = trace_of(stages[stage], self.setting.device)
            found |= dict(zip(names, exposed_ms(events), strict=True))
            busy += sum(ms for part, ms in step_parts(events).items() if part not in ("exchange", IDLE))
        self._clear()
        return found, gather_objects(round(busy, 4), self.setting.group)

    def arms(self) -> dict[str, Arm]:
        names = [*self.exchanging, *self.alone]
        routers = {arm: self.router(router_dtype) for arm, router_dtype in _ROUTERS.items()} | {"router_float32_gemm": self.float32_gemm()}
        return {**{name: self.stages(name) for name in names}, **routers, **{f"{arm}_inference": self.inference(arm) for arm in _INFERENCE}}


def compute_figures(measured_ms: Mapping[str, float], size: Size, routing: str, world: int) -> dict[str, Figure]:
    """Speed against bf16 over NCCL, the share of one GPU's speed that the ranks reach, and the router's GEMM alone as a share of a layer's
    time (limit: in bf16)."""
    ms = dict(measured_ms)
    for stage in ("forward", "backward", "total"):
        ms[f"base_{stage}"] = min(ms[f"{arm}_{stage}"] for arm in BASELINES)
        if f"local_{stage}" in ms:
            ms[f"limit_{stage}"] = ms[f"one_gpu_{stage}"] / world if f"one_gpu_{stage}" in ms else ms[f"local_{stage}"]
    limit = "limit" if "limit_total" in ms else None
    figures: dict[str, Figure] = {}
    for arm, prefix in (("mxfp8", ""), ("mxfp8_blocks", "blocks_"), ("bf16", "bf16_"), (_NOT_SHARED, "nccl_")):
        if f"{arm}_total" in ms:
            figures |= speed_ups(ms, arm, "base", limit, f"{prefix}{{stage}}_vs_nccl_bf16")
    for stage in ("forward", "backward") if "one_gpu_total" in ms else ():
        figures[f"scaling_efficiency_{stage}"] = Figure(ms[f"one_gpu_{stage}"] / (world * ms[f"mxfp8_{stage}"]), 1.0)
    for stage in ("forward", "backward", "total"):
        shares = (ms[f"{router}_{stage}"] / ms[f"mxfp8_{stage}"] for router in _ROUTERS)
        figures[f"router_{stage}_share"] = Figure(*shares)
    base = ms["nccl_bf16_inference"]
    figures["inference_vs_nccl_bf16"] = Figure(base / ms["mxfp8_inference"], base / ms["limit_forward"] if limit else None)
    targets = _TARGETS if (size, routing) == (SIZES[0], "balanced") and world >= 4 else {}
    return {name: replace(figure, target=targets.get(name)) for name, figure in figures.items()}


def cases(setting: Setting) -> Iterator[Case]:
    """Every size, balanced and by Zipf's law; or the requested one."""
    sizes = setting.choose(SIZES, tiny=[_TINY]) if setting.size is None else [Size(*setting.size)]
    shared = symmetric_group(setting.group, setting.device)
    for size in sizes:
        for routing in ("balanced", "zipf"):
            problem = LayerProblem(setting, size, routing, shared)
            shape = {"T": size.T_global // setting.world, **size._asdict(), "L": size.E // setting.world}
            yield Case(
                f"{size.T_global} tokens of {setting.world} ranks, D {size.D}, H {size.H}, {size.E} experts, top {size.C}, {routing}",
                shape,
                problem.arms(),
                problem.check,
                partial(compute_figures, size=size, routing=routing, world=setting.world),
                {"routing": routing, "recipe": RECIPE, "mxfp8_over": "symmetric" if shared else "collective"},
                after=problem.after,
            )
            del problem

"""`mxep bench transformers`: experts of Hugging Face transformers by mxep's adapter, against its own grouped GEMMs in bf16.

Arms: `grouped_mm`, transformers' default, in bf16; `grouped_mm_compiled`, the same under torch.compile; `mxep`, the adapter with its
default recipe, and `mxep_mx`, with wgrad from MX bytes.
All of them get tokens, the chosen experts and scores and return weighted sums, so the times include sorting and summing, and in every call
the quantisation of weights.  Backward is `y.backward(dy)` and ends in the parameters' `.grad`.  The limit is one dense GEMM for every
product, in FP8 or, for wgrad of high-precision operands, in bf16, and nothing else.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mxep.bench.accuracy import db_problem, sqnr_db
from mxep.bench.experts import dense_arms, ffn_products
from mxep.bench.registry import Case, Figure, Setting, speed_ups
from mxep.bench.timing import Arm, run_arm
from mxep.comm import transport_of

TOKENS = 16384
BASELINE, COMPILED = "grouped_mm", "grouped_mm_compiled"
OURS = {"mxep": "mxfp8_wgrad_with_hp", "mxep_mx": "mxfp8_wgrad_with_mx"}  # registered name -> recipe
_TARGETS = {"gpt-oss-20b": 2.45, "Mixtral-8x7B": 1.9}  # of `mxep_mx` against `grouped_mm`
LEAST_DB, LEAST_SCORES_DB = 20.0, 18.0
_CHECK = (
    f"y, dx and the gradient of every weight and bias of every arm at least {LEAST_DB:.0f} dB from those of transformers' {{0}} in bf16, "
    f"gradients of scores {LEAST_SCORES_DB:.0f} dB; what {{0}} gives is no truth either"
)


class PublishedModel(NamedTuple):
    """Experts of a published model: transformers' names of the folder and of the class, D, H, E, C of one layer, and the names of D, H, E
    in the configuration."""

    folder: str
    kind: str
    D: int
    H: int
    E: int
    C: int
    names: tuple[str, str, str] = ("hidden_size", "moe_intermediate_size", "num_experts")
    parts: int = 2  # of the first GEMM: gate and up


MODELS = {
    "Qwen3-30B-A3B": PublishedModel("qwen3_moe", "Qwen3Moe", 2048, 768, 128, 8),
    "Mixtral-8x7B": PublishedModel("mixtral", "Mixtral", 4096, 14336, 8, 2, ("hidden_size", "intermediate_size", "num_local_experts")),
    "Gemma-4-26B-A4B": PublishedModel("gemma4", "Gemma4Text", 2816, 704, 128, 8),
    "Nemotron-3-Nano-30B-A3B": PublishedModel(
        "nemotron_h", "NemotronH", 2688, 1856, 128, 6, ("hidden_size", "moe_intermediate_size", "n_routed_experts"), parts=1
    ),
    "gpt-oss-20b": PublishedModel("gpt_oss", "GptOss", 2880, 2880, 32, 4, ("hidden_size", "intermediate_size", "num_local_experts")),
}


def registered() -> ModuleType:
    """The adapter, with a name for each recipe. Raises ValueError if transformers is not installed or too old."""
    try:
        adapter = importlib.import_module("mxep.integrations.transformers_5")
    except ImportError as error:
        raise ValueError(f"transformers: {error}") from error
    for name, recipe in OURS.items():
        adapter.register(recipe, name)
    return adapter


def models(setting: Setting) -> Sequence[str]:
    """Names of the models to run."""
    return setting.choose([*MODELS], tiny=[*MODELS][:1])


class AdapterProblem:
    """The experts of one layer on this rank, its tokens, their chosen experts on all ranks, and the arms.

    Attributes:
        theirs: transformers' own arms, the first one is the baseline.
    """

    theirs: tuple[str, ...] = (BASELINE, COMPILED)

    def __init__(self, setting: Setting, name: str) -> None:
        self.setting, self.name, self.T, model, device = setting, name, 64 if setting.tiny else TOKENS, MODELS[name], setting.device
        self.D, self.H, self.E = (64, 32, 4) if setting.tiny else (model.D, model.H, model.E)
        self.L = self.E // setting.world
        sizes = dict(zip(model.names, (self.D, self.H, self.L), strict=True))
        config = getattr(importlib.import_module("transformers"), f"{model.kind}Config")(**sizes, num_experts_per_tok=model.C)
        kinds = importlib.import_module(f"transformers.models.{model.folder}.modeling_{model.folder}")
        with device:
            self.experts = getattr(kinds, f"{model.kind}Experts")(config).to(torch.bfloat16)
        for parameter in self.experts.parameters():
            torch.nn.init.normal_(parameter, std=self.D**-0.5)
        torch.compiler.reset()  # dynamo keeps a few graphs of a function that all models share, and runs it uncompiled after that
        self.compiled = torch.compile(self.experts, dynamic=False) if device.type == "cuda" else self.experts
        self.C = min(model.C, self.E)
        normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.x, self.dy = normal(self.T, self.D), normal(self.T, self.D)
        best = torch.randn(self.T, self.E, device=device).topk(self.C)
        self.choices, self.scores = best.indices, best.values.softmax(1).to(torch.bfloat16)
        self.leaves, self.y = (self.x, self.scores), self.x

    def output(self, arm: str) -> Tensor:
        """y of an arm (T, D)."""
        self.experts.config._experts_implementation = BASELINE if arm == COMPILED else arm
        y: Tensor = (self.compiled if arm == COMPILED else self.experts)(self.leaves[0], self.choices, self.leaves[1])
        return y

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm."""

        def forward() -> None:
            self.experts.zero_grad()
            self.leaves = self.x.detach().requires_grad_(), self.scores.detach().requires_grad_()
            self.y = self.output(arm)

        return {"forward": forward, "backward": lambda: self.y.backward(self.dy)}

    def results(self, arm: str) -> dict[str, Tensor]:
        run_arm(self.stages(arm))
        found = {"y": self.y.detach(), "dx": self.leaves[0].grad, "dscores": self.leaves[1].grad}
        found |= {name: parameter.grad for name, parameter in self.experts.named_parameters()}
        return {name: value for name, value in found.items() if value is not None}

    def kept_mib(self, arm: str) -> float:
        """What an arm's forward keeps for backward without its inputs and output, on a GPU; measured in its second run."""
        device = self.setting.device
        self.leaves = self.x.detach().requires_grad_(), self.scores.detach().requires_grad_()
        for _ in range(2):
            before = torch.cuda.memory_allocated(device)
            y = self.output(arm)
            kept = torch.cuda.memory_allocated(device) - before - y.nbytes
            del y
        return round(kept / 2**20, 1)

    def check(self) -> str | None:
        """Every other arm against the baseline."""
        baseline, *others = self.arm_names()
        want = self.results(baseline)
        least = dict.fromkeys(want, LEAST_DB) | {"dscores": LEAST_SCORES_DB}
        for arm in others:
            got = self.results(arm)
            db = {name: sqnr_db(value, got[name], None) if name in got else -math.inf for name, value in want.items()}
            if problem := db_problem(arm, db, least, baseline):
                return problem
        return None

    def arm_names(self) -> tuple[str, ...]:
        return *self.theirs, *OURS

    def arms(self) -> dict[str, Arm]:
        """Every arm, and dense products of a rank's share of the rows: all of them in FP8, and with a wgrad in bf16."""
        products = ffn_products(self.T * self.C, self.D, self.H, MODELS[self.name].parts * self.H, self.L)
        return {arm: self.stages(arm) for arm in self.arm_names()} | dense_arms(self.setting.device, *products)

    def case(self) -> Case:
        version: Any = importlib.import_module("transformers").__version__
        shape = {"T": self.T, "D": self.D, "H": self.H, "E": self.E, "C": self.C}
        facts: dict[str, Any] = {"model": self.name, "transformers": version, "check": _CHECK.format(self.theirs[0])}
        if self.setting.device.type == "cuda":
            facts["kept_mib"] = {arm: self.kept_mib(arm) for arm in self.arm_names()}
        target = _TARGETS.get(self.name) if self.theirs[0] == BASELINE else None
        figures = partial(compute_figures, theirs=self.theirs, target=target)
        return Case(f"{self.name}, {self.T} tokens", shape, self.arms(), self.check, figures, facts)


def compute_figures(ms: Mapping[str, float], theirs: Sequence[str], target: float | None = None) -> dict[str, Figure]:
    """Forward, backward and both together, of every arm of ours, against each of transformers' own; target: of both together of `mxep_mx`
    against the first of these."""
    figures: dict[str, Figure] = {}
    for baseline in theirs:
        for arm in OURS:
            limit = "dense_fp8" if arm == "mxep_mx" else "dense_hp_wgrad"
            figures |= speed_ups(ms, arm, baseline, limit, f"{arm}_{{stage}}_vs_{baseline}")
    total = f"mxep_mx_total_vs_{theirs[0]}"
    return figures | {total: replace(figures[total], target=target)}


def cases(setting: Setting) -> Iterator[Case]:
    """A layer of every model. Raises ValueError if the adapter's transformers is not installed."""
    registered()
    for name in models(setting):
        yield AdapterProblem(setting, name).case()


EP_BASELINE = "all_to_all"


class ExpertParallelProblem(AdapterProblem):
    """Experts of this rank, and for each arm the exchange with those of all ranks; `mesh`: EP over all ranks, TP of one."""

    theirs = (EP_BASELINE,)

    def __init__(self, setting: Setting, name: str, mesh: DeviceMesh) -> None:
        super().__init__(setting, name)
        self.experts._is_expert_parallel = True
        implementations = importlib.import_module("transformers.distributed.expert_parallel").EPImplementationInterface()
        self.exchanges = {arm: implementations[arm](self.experts, mesh["ep"], mesh["tp"]) for arm in (EP_BASELINE, *OURS)}

    def output(self, arm: str) -> Tensor:
        """y of an arm (T, D)."""
        self.experts.config._experts_implementation = BASELINE  # for transformers' own exchange; the adapter's has its own experts
        y: Tensor = self.exchanges[arm](self.leaves[0], self.choices, self.leaves[1])
        return y


def ep_cases(setting: Setting) -> Iterator[Case]:
    """A layer of every model. Raises ValueError if the adapter's transformers is not installed."""
    registered()
    mesh = init_device_mesh(setting.device.type, (setting.world, 1), mesh_dim_names=("ep", "tp"))
    transport = transport_of(mesh["ep"].get_group().group_name, setting.device).name
    for name in models(setting):
        case = ExpertParallelProblem(setting, name, mesh).case()
        yield replace(case, facts={**case.facts, "transport": transport})

"""`mxep bench transformers-step`: a training step of a model of transformers, by one call of ours and as users of bf16 run it.

The model is Qwen3-30B-A3B cut to 8 layers, with random weights in bf16; a step is forward with labels, backward and torch's fused AdamW on
16384 tokens, without recomputation.  All arms have the same parameters, and modules of their own; all but the last one share the optimizer.

| arm | what runs |
| --- | --- |
| grouped_mm | transformers as it comes, experts by torch's grouped GEMMs |
| grouped_mm_liger | with liger-kernel's norms, rotary embedding and loss in chunks; its experts are an arm of `mxep bench peers` |
| grouped_mm_compiled | every decoder layer under torch.compile |
| grouped_mm_liger_compiled | the same with liger-kernel's loss, which is outside of the layers |
| mxep_hp, mxep_mx | `transformers_5.accelerate`, wgrad in high precision and from MX bytes |
| mxep_mx_compiled | the latter with every decoder layer under torch.compile |
| mxep_mx_head_compiled | the same with the projection to the vocabulary in MXFP8 |
| mxep_mx_head_adamw_compiled | the same with `mxep.train.AdamW`, whose moments are in bf16 too and which rounds weights stochastically |

Layers are compiled one by one, since transformers makes a mask for its attention in a graph of the whole model, with which attention takes
several times as long (docs/log.md).

An arm in bf16 that does not import, fails, or changes a parameter without the optimizer, is named and left out, but for `grouped_mm`.  The
check compares every arm's first loss and gradients with those of `grouped_mm`: of the first and last layer, without the routers, of the
embedding, the final norm and the output projection; and wants a gradient for every parameter that has one there.  Compiled arms come last.
The limit is one dense GEMM for each product with weights, in FP8, and nothing else.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mxep.bench.accuracy import sqnr_db
from mxep.bench.experts import dense_products
from mxep.bench.peer_arms import short_reason
from mxep.bench.registry import Case, Figure, Rounds, Setting
from mxep.bench.timing import Arm, Stage, host_facts_of, run_arm
from mxep.bench.transformers import MODELS, registered
from mxep.train.adamw import AdamW

BASELINE = "grouped_mm"
BF16 = (BASELINE, "grouped_mm_liger", "grouped_mm_compiled", "grouped_mm_liger_compiled")
_MX = "mxfp8_wgrad_with_mx"
OURS = {  # arm -> arguments of `accelerate`
    "mxep_hp": {"recipe": "mxfp8_wgrad_with_hp"},
    "mxep_mx": {"recipe": _MX},
    "mxep_mx_compiled": {"recipe": _MX},
    "mxep_mx_head_compiled": {"recipe": _MX, "head_recipe": _MX},
    "mxep_mx_head_adamw_compiled": {"recipe": _MX, "head_recipe": _MX},
}
_MODEL, _LAYERS, _SEQUENCES, _SEQ_LEN = "Qwen3-30B-A3B", 8, 4, 4096
_SIZES: dict[str, dict[str, int]] = {
    "Qwen3-30B-A3B": {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True},
    "gpt-oss-20b": {"vocab_size": 201088, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
}
_TINY = {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TARGETS = {"mxep_mx_step_vs_grouped_mm": 1.65, "mxep_mx_step_vs_best_bf16": 1.25}
_MOST_LOSS, _LEAST_DB = 2e-2, 8.0
_CHECK = (
    f"the first loss within {_MOST_LOSS} relative of {BASELINE}'s, the gradients of the first and last layer, without the routers', and of "
    f"the embedding, the final norm and the output projection at least {_LEAST_DB:.0f} dB from its, and a gradient for every parameter "
    "that has one there; errors of all layers' quantised products add up in them"
)
_ROUNDS = Rounds(count=2, timed=10, warm_ms=1000.0)
_HOST_BATCH = 1
_LR = 1e-5


def model_config(layers: int, tiny: bool, name: str = _MODEL) -> Any:
    """transformers' configuration of a model of `_SIZES` with so many layers; `tiny`: with the widths of a test."""
    published = MODELS[name]
    widths = dict(zip(published.names, (64, 32, 4) if tiny else (published.D, published.H, published.E), strict=True))
    sizes, C = (_SIZES[name] | _TINY, 2) if tiny else (_SIZES[name], published.C)
    kind = getattr(importlib.import_module("transformers"), f"{published.kind}Config")
    return kind(**widths, **sizes, num_experts_per_tok=C, num_hidden_layers=layers, use_cache=False)


class StepProblem:
    """The model, one copy of its modules for each arm, and the step of each.

    Attributes:
        agreement: the loss and the worst gradient's distance in dB, by arm.
        left_out: arms that are not measured, and why.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.tiny, device = setting, setting.tiny, setting.device
        self.adapter, transformers = registered(), importlib.import_module("transformers")
        self.layers = 2 if self.tiny else _LAYERS
        self.batch, self.seq_len = (2, 32) if self.tiny else (_SEQUENCES, _SEQ_LEN)
        config = model_config(self.layers, self.tiny)
        self.D, self.H, self.E, self.C = config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
        self.sizes = {name: getattr(config, name) for name in _TINY}
        torch.manual_seed(0)
        with device:
            self.model: nn.Module = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()
        self.model.set_experts_implementation(BASELINE)  # type: ignore[operator]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LR, fused=device.type == "cuda")
        self.own_optimizer = AdamW(self.model.named_parameters(), lr=_LR)
        self.tokens = torch.randint(self.sizes["vocab_size"], (self.batch, self.seq_len), device=device)
        self.left_out: dict[str, str] = {}
        self.agreement: dict[str, dict[str, float]] = {}
        arms = sorted((*BF16, *OURS), key=lambda arm: arm.endswith("compiled"))
        self.forwards = {arm: forward for arm in arms if (forward := self._forward(arm)) is not None}
        self.timed: dict[str, Arm] = {arm: {"": partial(self._step, arm)} for arm in self.forwards}
        self.arms: dict[str, Arm] = {}
        self.of_limit: list[Stage] = []  # the limit's products, with their operands

    def _forward(self, arm: str) -> Callable[[], Tensor] | None:
        """What computes an arm's loss; None, with a reason in `left_out`, if it is not available."""
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        model = copy.deepcopy(self.model, shared)
        swapped: dict[str, Any] = {}
        if arm in OURS:
            self.adapter.accelerate(model, **OURS[arm])
        elif "liger" in arm:
            try:
                swapped = _with_liger(model, whole=not arm.endswith("compiled"))
            except Exception as error:
                self.left_out[arm] = short_reason(error)
                return None
        for layer in model.model.layers if arm.endswith("compiled") and not self.tiny else ():  # type: ignore[union-attr]
            layer.compile()
        modeling = vars(importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe"))

        def forward() -> Tensor:
            before = {name: modeling[name] for name in swapped}
            modeling.update(swapped)
            try:
                loss: Tensor = model(input_ids=self.tokens, labels=self.tokens).loss
            finally:
                modeling.update(before)
            return loss

        return forward

    def _optimizers(self, arm: str) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """An arm's, and the other one."""
        return (self.own_optimizer, self.optimizer) if "adamw" in arm else (self.optimizer, self.own_optimizer)

    def _step(self, arm: str) -> None:
        self.forwards[arm]().backward()
        self._optimizers(arm)[0].step()
        self.optimizer.zero_grad()

    def _results(self, arm: str) -> dict[str, Tensor]:
        """The loss, copies of the gradients that are compared by value, and of each other one whether it is more than zeros."""
        loss = self.forwards[arm]()
        loss.backward()
        others = {f"layers.{layer}." for layer in range(1, self.layers - 1)} | {".gate."}
        results = {"loss": loss.detach()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                by_value = not any(part in name for part in others)
                results[name] = parameter.grad.clone() if by_value else parameter.grad.any()
        self.optimizer.zero_grad()
        return results

    def check(self) -> str | None:
        """Every arm against `grouped_mm`; keeps the distances."""
        parameters = list(self.model.parameters())
        before, bits = [parameter.detach().to("cpu", copy=True) for parameter in parameters], _bits(parameters)
        want = self._results(BASELINE)
        for arm in list(self.forwards):
            try:
                got = self._results(arm)
                problem = self._problem(arm, want, got)
            except Exception as error:
                if arm in OURS or arm == BASELINE:
                    raise
                problem = short_reason(error)
            if not torch.equal(_bits(parameters), bits):
                problem = f"{arm} changes parameters without the optimizer"
                with torch.no_grad():
                    for parameter, values in zip(parameters, before, strict=True):
                        parameter.copy_(values)
            if problem and (arm in OURS or arm == BASELINE):
                return problem
            if problem:
                self._leave_out(arm, problem)
        return None

    def _problem(self, arm: str, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
        """How far an arm is from `grouped_mm`, kept in `agreement`; what is wrong if that is too far."""
        loss, base = float(got["loss"]), float(want["loss"])
        grads = {name: value for name, value in want.items() if name != "loss"}
        if missing := [name for name, value in grads.items() if name not in got or (value.any() and not got[name].any())]:
            return f"{arm}: no gradient of {', '.join(missing[:4])}, {len(missing)} in all; want {_CHECK}"
        db = {name: sqnr_db(value, got[name], None) for name, value in grads.items() if value.dtype != torch.bool}
        worst = min(db, key=lambda name: -math.inf if math.isnan(db[name]) else db[name])
        if not abs(loss - base) <= _MOST_LOSS * abs(base) or not db[worst] >= _LEAST_DB:
            return f"{arm}: loss {loss:.4f} of {base:.4f}, worst gradient {worst}: {db[worst]:.1f} dB; want {_CHECK}"
        self.agreement[arm] = {"loss": round(loss, 5), "worst_db": round(db[worst], 2)}
        return None

    def _leave_out(self, arm: str, why: str) -> None:
        self.left_out[arm] = why
        self.agreement.pop(arm, None)
        del self.forwards[arm], self.timed[arm], self.arms[arm]
        self.optimizer.zero_grad()

    def limit(self) -> Arm:
        """Dense products of the sizes of all products with weights, forward and backward, in FP8."""
        T, sizes, products = self.batch * self.seq_len, self.sizes, list[tuple[int, int, int]]()
        heads, kv = sizes["num_attention_heads"] * sizes["head_dim"], sizes["num_key_value_heads"] * sizes["head_dim"]
        one_layer = [(T, self.D, heads + 2 * kv), (T, heads, self.D), (T * self.C, self.D, 2 * self.H), (T * self.C, self.H, self.D)]
        for rows, inner, columns in [*one_layer, (T, self.D, sizes["vocab_size"])]:
            products += [(rows, inner, columns), (rows, columns, inner), (columns, rows, inner)]

        def run() -> None:
            if not self.of_limit:  # made at the first run, and dropped before memory is measured: operands of 7 GiB
                self.of_limit = [dense_products(self.setting.device, part) for part in (products[:-3], products[-3:])]
            in_layer, in_head = self.of_limit
            for _ in range(self.layers):
                in_layer()
            in_head()

        return {"": run}

    def after(self) -> dict[str, Any]:
        """Further fields of the record."""
        device, found = self.setting.device, dict[str, Any]()
        if device.type == "cuda":
            self.of_limit, found["peak_gib"] = [], {}
            for arm, stages in self.timed.items():
                torch.cuda.reset_peak_memory_stats(device)
                run_arm(stages)
                not_its_own = sum(value.nbytes for state in self._optimizers(arm)[1].state.values() for value in state.values())
                found["peak_gib"][arm] = round((torch.cuda.max_memory_allocated(device) - not_its_own) / 2**30, 2)
        found |= host_facts_of(self.timed, device, _HOST_BATCH)
        return found | {"agreement": self.agreement, "left_out": self.left_out}

    def case(self) -> Case:
        version: Any = importlib.import_module("transformers").__version__
        shape = {"T": self.batch * self.seq_len, "D": self.D, "H": self.H, "E": self.E, "C": self.C, "layers": self.layers}
        facts: dict[str, Any] = {"model": _MODEL, "transformers": version, "check": _CHECK}
        self.arms = self.timed | {"dense_fp8": self.limit()}
        title = f"{_MODEL} of {self.layers} layers, {shape['T']} tokens"
        return Case(title, shape, self.arms, self.check, compute_figures, facts, after=self.after, rounds=_ROUNDS)


def _bits(parameters: Sequence[Tensor]) -> Tensor:
    """A number for each parameter, of all of its bits."""
    return torch.stack([parameter.detach().view(torch.int16).sum(dtype=torch.int64) for parameter in parameters])


def _with_liger(model: nn.Module, whole: bool) -> dict[str, Any]:
    """Patch a model's modules, or the loss alone; returns what liger-kernel replaces in the module that defines the model, which is put
    back here.
    """
    patch = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen3_moe
    modeling = vars(importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe"))
    before = dict(modeling)
    patch(rope=whole, rms_norm=whole, swiglu=False, model=model)
    swapped = {name: value for name, value in modeling.items() if before.get(name) is not value}
    modeling.update({name: before[name] for name in swapped})
    return swapped


def compute_figures(ms: Mapping[str, float]) -> dict[str, Figure]:
    """A step of each arm of ours against transformers as it comes, and against the fastest arm in bf16."""
    bases = {BASELINE: ms[BASELINE], "best_bf16": min(ms[arm] for arm in BF16 if arm in ms)}
    figures = {}
    for arm in OURS:
        for what, base in bases.items():
            name = f"{arm}_step_vs_{what}"
            figures[name] = Figure(base / ms[arm], base / ms["dense_fp8"], _TARGETS.get(name))
    return figures


def cases(setting: Setting) -> Iterator[Case]:
    """The one model. Raises ValueError if the adapter's transformers is not installed."""
    yield StepProblem(setting).case()

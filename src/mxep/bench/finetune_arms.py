"""The arms of `mxep bench finetune`: each builds a model with random weights on one GPU, checks it, and takes training steps.

All arms of a model fine-tune the same one (`mxep.bench.random_models`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mxep.bench.accuracy import sqnr_db
from mxep.bench.random_models import fill, model_through_mxfp4, random_model
from mxep.bench.timing import synchronize, use_expandable_segments
from mxep.bench.training import GPU_WORK, trace_of
from mxep.bench.transformers_step import model_config
from mxep.mx.weight import MXWeight
from mxep.train.adamw import AdamW
from mxep.train.optimizer import BETAS
from mxep.train.optimizer_in_backward import OptimizerInBackward
from mxep.train.state_precision import OptimizerName, StatePrecision

RANK = 16
BASELINE = "lora_bf16_peft"
ADAPTERS_STD = 0.01
LAYERS_OF_CHECK = 2
BUDGET_STEPS, GRAPH_STEPS = 8, 5  # until a `RecomputeBudget` has settled; from then on, until a `GraphedStep` replays
MOST_LOSS, MOST_NORM, LEAST_DB, LEAST_DB_IN_MX = 5e-3, 0.05, 25.0, 9.0  # on a CPU, gpt-oss: 0.006, 29.9 and 10.4
CHECK = (
    f"the first loss and the norm of all gradients are finite; every adapter has a gradient that is finite and not 0; on {LAYERS_OF_CHECK} "
    f"layers and one sequence our arms have the adapters of {BASELINE} and its loss within {MOST_LOSS} relative; with its choices of "
    "experts and its scores, which rounding changes for some tokens, the norm of each adapter's gradient within "
    f"{MOST_NORM}, and the gradient at least {LEAST_DB:.0f} dB from its, {LEAST_DB_IN_MX:.0f} dB where the base is in MX"
)
_LORA_LR, _FULL_LR = 1e-3, 1e-5
_SHOWN_KERNELS, _NAME_LENGTH = 24, 100
_ON_ATTENTION, _ON_EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class FinetuneArm(NamedTuple):
    """How one arm trains.

    Attributes:
        recipe: of our experts; None: transformers' `grouped_mm`.
        lora: adapters on attention and experts are trained; False: all parameters.
        in_mx: the base is frozen in MXFP8.
        accelerated: by `transformers_5.accelerate`.
        sequences: of a step, at most.
        optimizer: of all parameters.
        graphed: with `--cuda-graph` its steps are CUDA graphs.
    """

    recipe: str | None
    lora: bool
    in_mx: bool
    accelerated: bool
    sequences: int
    optimizer: OptimizerName = "adamw8bit"
    graphed: bool = False


ARMS = {
    "lora_mx": FinetuneArm("mxfp8_wgrad_with_hp", lora=True, in_mx=True, accelerated=True, sequences=4, graphed=True),
    "lora_bf16_ours": FinetuneArm("hp", lora=True, in_mx=False, accelerated=True, sequences=4, graphed=True),
    BASELINE: FinetuneArm(None, lora=True, in_mx=False, accelerated=False, sequences=4),
    "full_accelerate": FinetuneArm("mxfp8_wgrad_with_mx", lora=False, in_mx=False, accelerated=True, sequences=4),
    "full_accelerate_4bit": FinetuneArm(
        "mxfp8_wgrad_with_mx", lora=False, in_mx=False, accelerated=True, sequences=4, optimizer="adamw4bit"
    ),
    "full": FinetuneArm("mxfp8_wgrad_with_mx", lora=False, in_mx=False, accelerated=False, sequences=2),  # logits of all tokens
}


class FinetuneModel(NamedTuple):
    """A model that arms train.

    Attributes:
        layers: of the whole model.
        base_gib: what is asked of its base frozen in MX, at most.
        sequences: of a step, at most.
        in_mxfp4: its weights go through files in MXFP4.
    """

    layers: int
    base_gib: float
    sequences: int
    in_mxfp4: bool


DEFAULT_MODEL = "Qwen3-30B-A3B"
MODELS = {
    DEFAULT_MODEL: FinetuneModel(48, 31.0, sequences=4, in_mxfp4=False),
    "gpt-oss-20b": FinetuneModel(24, 24.0, sequences=1, in_mxfp4=True),  # attention with sinks: the scores of a sequence take 2 GiB
}


class FinetuneSizes(NamedTuple):
    """A model and its layers, tokens of a sequence, and steps.

    `sequences`: of a step of every arm; None: as many as the arm and the model allow.  `tiny`: with the widths of a test.  `memory_gib`:
    activations of as many layers as fit are kept; None: all layers are recomputed.  `cuda_graph`: steps of LoRA on our layers are graphs.
    """

    model: str = DEFAULT_MODEL
    layers: int = MODELS[DEFAULT_MODEL].layers
    seq_len: int = 4096
    warm_up: int = 3
    timed: int = 5
    sequences: int | None = None
    tiny: bool = False
    memory_gib: float | None = None
    cuda_graph: bool = False

    def warmed_up(self) -> FinetuneSizes:
        """With as many steps before the timed ones as `memory_gib` and `cuda_graph` need."""
        needed = (self.memory_gib is not None) * BUDGET_STEPS + self.cuda_graph * GRAPH_STEPS
        return self._replace(warm_up=max(self.warm_up, needed))


TINY = FinetuneSizes(layers=2, seq_len=32, warm_up=1, timed=2, tiny=True)


class WrongResultError(RuntimeError):
    """An arm computes something else than it should."""


def _with_adapters(model: Any, device: torch.device, ours: bool) -> Any:
    """peft's model with adapters whose product is not 0, so that both factors have gradients in the first step."""
    from peft import LoraConfig, get_peft_model

    from mxep.integrations import peft_0_21

    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=_ON_ATTENTION, target_parameters=_ON_EXPERTS)
    with device:  # or the CPU would make them
        adapted = get_peft_model(model, peft_0_21.register(lora) if ours else lora)
    for name, parameter in _adapters(adapted):
        fill(name, parameter, ADAPTERS_STD)
    return adapted


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if "lora_" in name)


def _gib(count: int) -> float:
    return round(count / 2**30, 3)


def _stored_bytes(parameter: Tensor) -> int:
    return parameter.qdata.nbytes + parameter.scale.nbytes if isinstance(parameter, MXWeight) else parameter.nbytes


class FinetuneRun:
    """The model of one arm, its batch, its optimizer and its step.

    Attributes:
        converted: what `accelerate` converted and left, line by line.
    """

    def __init__(self, name: str, sizes: FinetuneSizes, device: torch.device) -> None:
        from mxep.integrations import transformers_5

        self.name, self.arm, self.device = name, ARMS[name], device
        self.graphed = sizes.cuda_graph and self.arm.graphed
        config, known = model_config(sizes.layers, sizes.tiny, sizes.model), MODELS[sizes.model]
        model = (model_through_mxfp4 if known.in_mxfp4 else random_model)(config, device, self.arm.in_mx)
        self.converted: list[str] = []
        if self.arm.accelerated:
            self.converted = str(transformers_5.accelerate(model, self.arm.recipe)).splitlines()
        elif self.arm.recipe is not None:
            transformers_5.register(self.arm.recipe)
            model.set_experts_implementation("mxep")
        else:
            model.set_experts_implementation("grouped_mm")
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": not self.graphed})
        self.model: Any = (_with_adapters(model, device, self.arm.recipe is not None) if self.arm.lora else model).train()
        generator = torch.Generator(device).manual_seed(0)
        batch = sizes.sequences or min(self.arm.sequences, known.sequences), sizes.seq_len
        self.tokens = torch.randint(config.vocab_size, batch, device=device, generator=generator)
        self.in_backward: OptimizerInBackward | None = None
        self.checked = False

    def bytes_of_weights(self) -> tuple[int, int]:
        """Of the base and of the adapters."""
        adapters = sum(_stored_bytes(parameter) for _, parameter in _adapters(self.model))
        return sum(map(_stored_bytes, self.model.parameters())) - adapters, adapters

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def make_optimizer(self) -> None:
        """As examples/finetune_lora.py and examples/finetune_full.py have it."""
        on_gpu = self.device.type == "cuda"
        if self.arm.lora:
            self.trained = [parameter for _, parameter in _adapters(self.model)]
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.trained, lr=_LORA_LR, weight_decay=0.0, fused=on_gpu, capturable=self.graphed and on_gpu
            )
            return
        bits = StatePrecision(self.arm.optimizer).state_bits
        in_bytes = AdamW(self.model.named_parameters(), _FULL_LR, BETAS, weight_decay=0.0, state_bits=bits)
        self.optimizer, self.in_backward = in_bytes, OptimizerInBackward(in_bytes)

    def step(self, tokens: Tensor) -> Tensor:
        """The loss () before the update, and the update; the first step calls `check_adapters`."""
        loss = self.loss(tokens)
        if self.in_backward is None:
            loss.backward()
            if not self.checked:
                self.check_adapters()
                self.checked = True
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()
        self.in_backward.decide(loss)
        loss.backward()  # and the updates
        norm = self.in_backward.norm()
        self.optimizer.step()
        if not (math.isfinite(norm) and norm > 0):  # host sync, as when a program prints it
            raise WrongResultError(f"{self.name}: the gradients' norm is {norm.item()}, want a finite one above 0")
        return loss.detach()

    def check_adapters(self) -> None:
        """Raises WrongResultError unless every adapter has a gradient that is finite and not 0."""
        for name, parameter in _adapters(self.model):
            norm = math.nan if parameter.grad is None else parameter.grad.norm().item()
            if not (math.isfinite(norm) and norm > 0):
                raise WrongResultError(f"{self.name}: the norm of {name}'s gradient is {norm}, want a finite one above 0")


class _Routing:
    """Each layer's choices of experts and their scores: kept from the first forward, and given to the experts in every later one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def replayed(self, model: nn.Module) -> None:
        """From here on the model's experts get what was kept, or keep it; scores get no gradient."""
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(partial(self._replay, name))

    def _replay(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows, choices, scores = inputs
        return rows, *self._kept.setdefault(name, (choices.detach(), scores.detach()))


def agreement(name: str, sizes: FinetuneSizes, device: torch.device) -> dict[str, float]:
    """The loss of a few layers, the distance of the worst adapter's gradient in dB, and of the worst norm, against `BASELINE`.

    Raises:
        WrongResultError: they differ by more than `CHECK` says.
    """
    few = sizes._replace(layers=min(sizes.layers, LAYERS_OF_CHECK), sequences=1)
    found: dict[str, tuple[float, dict[str, Tensor]]] = {}
    routing = _Routing()
    for arm in (BASELINE, name):
        run = FinetuneRun(arm, few, device)
        with torch.no_grad():
            loss = run.loss(run.tokens).item()
        routing.replayed(run.model)
        run.loss(run.tokens).backward()
        run.check_adapters()
        found[arm] = loss, {key: parameter.grad for key, parameter in _adapters(run.model) if parameter.grad is not None}
        del run
        _free(device)
    (want, of_base), (got, ours) = found[BASELINE], found[name]
    if ours.keys() != of_base.keys():
        raise WrongResultError(f"{name}: it and {BASELINE} have other adapters: {', '.join(sorted(ours.keys() ^ of_base.keys()))}")
    db = {key: sqnr_db(of_base[key], grad, None) for key, grad in ours.items()}
    off = {key: abs(grad.norm() / of_base[key].norm() - 1).item() for key, grad in ours.items()}
    worst, longest = min(db, key=lambda key: db[key]), max(off, key=lambda key: off[key])
    least_db = LEAST_DB_IN_MX if ARMS[name].in_mx else LEAST_DB
    if not (abs(got - want) <= MOST_LOSS * abs(want) and off[longest] <= MOST_NORM and db[worst] >= least_db):
        raise WrongResultError(
            f"{name}: on {few.layers} layers the loss is {got:.5f} and {BASELINE}'s {want:.5f}, the gradient of {worst} is "
            f"{db[worst]:.1f} dB from its, and the norm of {longest}'s is off by {off[longest]:.3f}; want "
            f"{MOST_LOSS}, {least_db} dB and {MOST_NORM}"
        )
    return {
        "loss": round(got, 5),
        "loss_of_baseline": round(want, 5),
        "worst_db": round(db[worst], 2),
        "worst_norm": round(off[longest], 4),
    }


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def slowest_kernels(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of the kernels of a trace that took most, and of "all" of them.

    >>> event = {"ph": "X", "cat": "kernel"}
    >>> slowest_kernels([{**event, "name": "gemm", "dur": 3000.0}, {**event, "name": "copy", "dur": 500.0}, {"ph": "i", "name": "gemm"}])
    {'all': 3.5, 'gemm': 3.0, 'copy': 0.5}
    """
    found = Counter[str]()
    for event in events:
        if event["ph"] == "X" and event.get("cat") in GPU_WORK:
            found[event["name"][:_NAME_LENGTH]] += event["dur"] / 1e3
    return {name: round(ms, 2) for name, ms in [("all", found.total()), *found.most_common(_SHOWN_KERNELS)]}


def _print(line: str) -> None:
    print(line, flush=True)


def measure_arm(name: str, sizes: FinetuneSizes, device: torch.device, say: Callable[[str], object] = _print) -> dict[str, Any]:
    """Build, check and time one arm; what `mxep bench finetune` records of it.

    Args:
        say: gets a line for each part, as soon as it is done.

    Raises:
        WrongResultError: see `CHECK`; nothing was timed.
    """
    began, arm, found, on_gpu = time.perf_counter(), ARMS[name], dict[str, Any](), device.type == "cuda"
    synchronize(device)  # the device has memory statistics from here on
    if on_gpu:
        use_expandable_segments()

    def tell(text: str) -> None:
        say(f"finetune: {name}: {time.perf_counter() - began:.0f} s: {text}")

    tell(f"imported; experts by {arm.recipe or 'grouped_mm'}")
    if arm.lora and name != BASELINE:
        found["agreement"] = agreement(name, sizes, device)
        tell(f"{LAYERS_OF_CHECK} layers agree with {BASELINE}: {found['agreement']}")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    run = FinetuneRun(name, sizes, device)
    for line in run.converted:
        tell(line)
    base, adapters = run.bytes_of_weights()
    found |= {"base_weights_gib": _gib(base), "adapters_gib": _gib(adapters), "converted": run.converted}
    weights = f"base {found['base_weights_gib']} GiB, adapters {found['adapters_gib']} GiB"
    tell(f"built: {sizes.layers} layers, {run.tokens.shape[0]} sequences of {sizes.seq_len} tokens, {weights}")
    run.make_optimizer()
    budget = None
    if sizes.memory_gib is not None:
        from mxep.integrations.transformers_recompute import RecomputeBudget

        budget = RecomputeBudget(run.model, sizes.memory_gib)
    step: Callable[[Tensor], Tensor] = run.step
    if run.graphed:
        from mxep.integrations.transformers_graph import GraphedStep

        step = GraphedStep(run.model, run.step, budget)  # which calls the budget
    synchronize(device)
    losses, seconds = list[float](), list[float]()
    for at in range(sizes.warm_up + sizes.timed):
        start = time.perf_counter()
        loss = step(run.tokens)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        if budget is not None and not run.graphed:
            budget.after_step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise WrongResultError(f"{name}: the loss of step {at + 1} is {losses[-1]}, want a finite one")
        memory = f", {_gib(torch.cuda.max_memory_allocated(device))} GiB" if on_gpu else ""
        tell(f"step {at + 1}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}{memory}")
    step_s = statistics.median(seconds[sizes.warm_up :])
    if budget is not None:
        found |= {"memory_gib": sizes.memory_gib, "kept_layers": budget.kept}
        tell(str(budget))
    if on_gpu:
        peaks = {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
        found["peak_gib"] = {what: _gib(count) for what, count in peaks.items()}
    found |= {"tokens": run.tokens.numel(), "tokens_per_s": round(run.tokens.numel() / step_s, 1), "step_s": round(step_s, 4)}
    found["cuda_graph"] = run.graphed
    found |= {"steps_s": [round(one, 4) for one in seconds], "loss_first": round(losses[0], 5), "loss_last": round(losses[-1], 5)}
    tell(f"{found['tokens_per_s']:,.0f} tokens/s")
    if on_gpu:
        events = trace_of(partial(step, run.tokens), device)
        found["kernels_ms"] = slowest_kernels(events)
        tell(f"one more step by kernel, ms: {found['kernels_ms']}")
    del run, step
    _free(device)
    return found

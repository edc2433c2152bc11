"""`mxep bench finetune`: fine-tuning of Qwen3-30B-A3B or gpt-oss-20b through transformers on one GPU, with random weights.

A step is forward with labels, backward and the optimizer, on sequences of 4096 tokens, with each decoder layer recomputed in backward.

| arm | what is trained | with |
| --- | --- | --- |
| lora_mx | adapters of rank 16 on attention and experts | base frozen in MXFP8, experts by mxep, `transformers_5.accelerate` |
| lora_bf16_ours | the same | base in bf16, experts by mxep in bf16, `accelerate` |
| lora_bf16_peft | the same | base in bf16, peft as it comes, experts by transformers' `grouped_mm` |
| full_accelerate | all parameters | bf16 rounded stochastically, 8-bit AdamW in backward, experts and linears in MXFP8, `accelerate` |
| full_accelerate_4bit | all parameters | the same with 4-bit AdamW |
| full | all parameters | as full_accelerate, but without `accelerate`: experts in MXFP8, logits of all tokens; half of the tokens |

gpt-oss-20b is loaded from files in the published MXFP4 layout, which every arm writes into a temporary folder.

The whole memory of a GPU belongs to one arm at a time, which runs in a process of its own.  An arm that fails, also for lack of memory, is
left out and named, and the others run.  With `--cuda-graph` lora_mx and lora_bf16_ours replay each step as a CUDA graph.  Each arm warms up
and then takes few steps, since one lasts seconds: a time is the median of these.  Arms of one run do not take turns, so `steps_s` of the
record has every step.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from mxep.bench import transformers
from mxep.bench.finetune_arms import ARMS, BASELINE, CHECK, DEFAULT_MODEL, MODELS, RANK, TINY, FinetuneSizes, measure_arm
from mxep.bench.peer_arms import short_reason
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.transformers_step import model_config

_QUICK_LAYERS = 4
RATIOS = {"lora_mx_vs_peft": (BASELINE, 1.5), "lora_mx_vs_ours_bf16": ("lora_bf16_ours", 1.15)}  # baseline, target of all layers of Qwen3
_PACKAGES = ("transformers", "peft", "liger_kernel", "torchao")


def in_own_process(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns in a process that ends with it. Raises what it raises, and BrokenProcessPool if the process dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


class FinetuneProblem:
    """The sizes of a run, and the results of its arms so far.

    Attributes:
        results: what `measure_arm` returned, by arm.  left_out: arms that are not measured, and why.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        model = setting.model or DEFAULT_MODEL
        layers = TINY.layers if setting.tiny else _QUICK_LAYERS if setting.quick else MODELS[model].layers
        sizes = TINY if setting.tiny else FinetuneSizes()
        sizes = sizes._replace(model=model, layers=setting.layers or layers, sequences=setting.sequences)
        self.sizes = sizes._replace(memory_gib=setting.memory_gib, cuda_graph=setting.cuda_graph).warmed_up()
        self.whole = not setting.tiny and self.sizes.layers == MODELS[model].layers
        self.arms = setting.arms or tuple(ARMS)
        self.results: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}

    def check(self, arm: str) -> str | None:
        """Run one arm; None, unless it is the last one and none has run."""
        run = measure_arm if self.setting.tiny else partial(in_own_process, measure_arm)
        try:
            self.results[arm] = run(arm, self.sizes, self.setting.device)
        except Exception as error:
            self.left_out[arm] = short_reason(error)
        if arm == self.arms[-1] and not self.results:
            return f"no arm has run: {self.left_out}"
        return None

    def compute_figures(self, ms: Mapping[str, float]) -> dict[str, Figure]:
        """Tokens per second of LoRA on the base in MX against those on bf16, once both have run."""
        asked = self.whole and self.sizes.model == DEFAULT_MODEL
        rates = {arm: found["tokens_per_s"] for arm, found in self.results.items()}
        return {
            name: Figure(rates["lora_mx"] / rates[base], None, target if asked else None)
            for name, (base, target) in RATIOS.items()
            if {"lora_mx", base} <= set(rates)
        }

    def after(self, arm: str) -> dict[str, Any]:
        """Further fields of the record."""
        if arm in self.left_out:
            return {"left_out": {arm: self.left_out[arm]}}
        asked = {"lora_mx_base_gib": MODELS[self.sizes.model].base_gib} if arm == "lora_mx" and self.whole else {}
        return {"left_out": {}, "results": {arm: self.results[arm]}, "target": asked}

    def cases(self) -> Iterator[Case]:
        name = self.sizes.model
        config = model_config(self.sizes.layers, self.sizes.tiny, name)
        D, H, E = (getattr(config, width) for width in transformers.MODELS[name].names)
        widths = {"D": D, "H": H, "E": E, "C": config.num_experts_per_tok}
        shape = {"seq_len": self.sizes.seq_len, **widths, "layers": self.sizes.layers}
        facts = {"model": name, "rank": RANK, "packages": {name: _version(name) for name in _PACKAGES}, "check": CHECK}
        for arm in self.arms:
            check, after = partial(self.check, arm), partial(self.after, arm)
            yield Case(f"{arm}, {self.sizes.layers} layers", shape, {}, check, self.compute_figures, facts, after)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cases(setting: Setting) -> Iterator[Case]:
    """An arm each. Raises ValueError if transformers is not installed."""
    try:
        yield from FinetuneProblem(setting).cases()
    except ImportError as error:
        raise ValueError(f"finetune: {error}") from error

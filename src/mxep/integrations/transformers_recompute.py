"""Recomputation by budget for models of transformers: only as many decoder layers are recomputed as the GPU's memory needs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from mxep.device import total_memory

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger(__name__)
_WHERE = f"{__name__}.RecomputeBudget"
_SHARE = 0.9  # of the GPU's memory, if no limit is given: the rest is for fragments and what others allocate
_FIRST = 2  # layers kept in addition to the last one to find what a layer takes


class RecomputeBudget(TrainerCallback):
    """Keeps the activations of as many decoder layers as a memory limit allows; the others are recomputed in backward.

    The first steps measure.  Step 1 makes the optimizer's state.  Steps 2 and 3 keep one and three layers; from their peaks of allocated
    memory follows how many fit, and the next steps correct it.  Keeping the last layer is free: a layer that is recomputed exists whole,
    too.  A later step above the limit lets more layers be recomputed.  Batches should be of one size, or the largest come first.

    Args:
        model: a model of transformers, or a wrapper such as peft's, on one GPU and trained by one process.  Its activation checkpointing is
            on before the first step ends (`model.activation_checkpointing_enable()`, or the Trainer's `activation_checkpointing=True`).
        gib: how much memory a step may allocate, in GiB; None: 90% of the GPU's.
        measure: returns the bytes that are allocated after a step and the step's peak; None: those of torch's allocator, whose peak is
            reset at each change of `kept`.

    Attributes:
        kept: how many layers are kept now, the last ones of the model.
        settled: the number changes no more unless a step exceeds the limit.

    Raises:
        ValueError: no decoder layers, no GPU and no `measure`, or several processes, whose exchanges would no longer match.

    Examples:
        >>> from mxep.integrations.transformers_recompute import RecomputeBudget
        >>> # model.activation_checkpointing_enable({"use_reentrant": False})
        >>> # budget = RecomputeBudget(model, gib=60)
        >>> # for batch in batches:
        >>> #     train_step(model, batch)
        >>> #     budget.after_step()
        >>> # or Trainer(model, arguments, callbacks=[RecomputeBudget(model)], ...)
    """

    def __init__(self, model: nn.Module, gib: float | None = None, measure: Callable[[], tuple[int, int]] | None = None) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not self._layers:
            raise ValueError(
                f"{_WHERE}: {type(model).__name__} has no layers that transformers can recompute, want a model of transformers"
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(f"{_WHERE}: {dist.get_world_size()} processes, want one: each would recompute other layers; recompute all")
        device = next(model.parameters()).device
        if measure is None and device.type != "cuda":
            raise ValueError(f"{_WHERE}: a model on {device}, want it on a GPU, whose allocator counts; move it there first")
        if gib is not None and not gib > 0:
            raise ValueError(f"{_WHERE}: gib={gib}, want more than 0, or None for 90% of the GPU's memory")
        self._limit = _SHARE * total_memory(device) if gib is None else gib * 2**30
        self._gpu = device if measure is None else None
        self._measure = measure or partial(_allocated, device)
        self._steps, self._before = 0, (0, 0)  # a number of kept layers, and its peak
        self.kept, self.settled = 0, False

    def after_step(self) -> None:
        """Call this after each step of the optimizer. Raises ValueError if no layer is recomputed in the first one."""
        self._steps += 1
        if self._steps == 1 and not any(layer.gradient_checkpointing for layer in self._layers):
            raise ValueError(f"{_WHERE}: no layer is recomputed; call model.activation_checkpointing_enable() before the first step")
        (always, peak), was_settled = self._measure(), self.settled
        kept = 1 if self._steps == 1 else self._next(always, peak)
        if self.settled and not was_settled:
            _log.info(
                "%d of %d layers are kept; the last step took %.1f of %.1f GiB", kept, len(self._layers), peak / 2**30, self._limit / 2**30
            )
        if kept != self.kept:
            self.kept = kept
            for index, layer in enumerate(self._layers):
                layer.gradient_checkpointing = index < len(self._layers) - kept
            if self._gpu is not None:
                torch.cuda.reset_peak_memory_stats(self._gpu)

    def _next(self, always: int, peak: int) -> int:
        """How many layers the next step keeps, after one with that peak; `always`: what is allocated after it, too."""
        kept, (kept_before, peak_before) = self.kept, self._before
        if self._steps == 2:
            self._before = kept, peak
            return min(kept + _FIRST, len(self._layers))
        of_a_layer = (peak - peak_before) / (kept - kept_before) if kept != kept_before else 0.0
        if peak > self._limit:
            self.settled = True
            return max(0, kept - math.ceil((peak - self._limit) / of_a_layer)) if of_a_layer > 0 else 0
        if self.settled:
            return kept
        # As long as something else makes the peak, it has hardly grown; a layer cannot take more than its share of what comes and goes.
        at_most = (peak - always) / kept
        grown = kept + int((self._limit - peak) / (of_a_layer if of_a_layer > at_most / 4 else at_most))
        self._before = kept, peak
        self.settled = min(grown, len(self._layers)) == kept
        return min(grown, len(self._layers))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """`after_step`, called by a Trainer."""
        self.after_step()

    def __str__(self) -> str:
        """What is recomputed."""
        return f"{len(self._layers) - self.kept} of {len(self._layers)} layers are recomputed"


def _allocated(gpu: torch.device) -> tuple[int, int]:
    return torch.cuda.memory_allocated(gpu), torch.cuda.max_memory_allocated(gpu)

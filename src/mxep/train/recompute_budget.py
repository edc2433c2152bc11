"""`--activation-checkpoint auto`: keep as much for backward as the GPUs' memory allows, layer by layer.

The choice is made once, before anything is allocated, from `mxep.train.memory`'s arithmetic and the size of the memory.  The candidates
are in rising order of what they keep.  The first one recomputes every layer ("full").  Each next one keeps more in one more layer: first
what its MoE saves ("keep_moe"), from the last MoE layer to the first; then everything ("none"), in the same order, dense layers at the end.
Late layers come first, because backward frees what they keep before most gradients exist.  The last candidate that fits is taken.

A candidate fits if it needs at most 90% of the memory: the other 10% are for CUDA's context, NCCL's buffers and the estimate's error.
Where rows come from other ranks, a quarter of what its layers keep of them is added to the estimated peak, since the estimate gives every
expert the same number of rows, which --force-balance does too.  If no candidate fits, the first is taken.

>>> [" ".join(modes) for modes in candidates(dense_layers=1, moe_layers=2)]
['full full full', 'full full keep_moe', 'full keep_moe keep_moe', 'full keep_moe none', 'full none none', 'none none none']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mxep.comm.collective import gather_objects
from mxep.device import total_memory
from mxep.models.presets import ModelConfig
from mxep.parallel import Meshes, Recompute
from mxep.parallel.pipeline_parallel import microbatches_in_flight, stages_per_rank
from mxep.parallel_dims import ParallelDims
from mxep.recipe import Recipe, resolve_recipe
from mxep.train.build import state_precision
from mxep.train.config import TrainConfig
from mxep.train.linear_choice import converts_attention, linear_recipe
from mxep.train.memory import PEAK_OPTIONS, PeakMemory, RankMemory, memory_of_rank, stage_peak
from mxep.train.resolved_config import ResolvedConfig

MARGIN = 0.1  # of the memory
MORE_ROWS = 0.25  # of what layers keep of rows, where experts have the rows of several ranks
_GIB = 2**30
_KEEPS: dict[Recompute, str] = {"none": "everything", "keep_moe": "what their MoE saves", "full": "their inputs"}


class RecomputeChoice(NamedTuple):
    """A candidate on one rank.

    Attributes:
        modes: of `mxep.parallel.recompute_blocks`, for each layer of the rank.
        peak: the estimate.
        needed: bytes, the estimated peak and the allowance for uneven routing.
    """

    modes: tuple[Recompute, ...]
    peak: PeakMemory
    needed: int

    def fits(self, capacity: int) -> bool:
        """Whether it leaves the margin of `capacity` bytes free."""
        return self.needed <= (1 - MARGIN) * capacity

    def in_words(self, capacity: int) -> str:
        """What the layers keep, and the memory that this needs of `capacity` bytes."""
        counts = ((self.modes.count(mode), kept) for mode, kept in _KEEPS.items())
        listed = ", ".join(f"{count} keep {kept}" for count, kept in counts if count)
        if self.needed > capacity:
            beyond = "; more than there is, it will probably run out of memory"
        else:
            beyond = "" if self.fits(capacity) else "; the margin of 10% is not free, it may run out of memory"
        return f"of {len(self.modes)} layers {listed} (at most {self.needed / _GIB:,.1f} of {capacity / _GIB:,.1f} GiB{beyond})"


def candidates(dense_layers: int, moe_layers: int) -> list[tuple[Recompute, ...]]:
    """The candidates for layers of which the dense ones come first, each as the mode of every layer; from "full" to "none"."""
    modes: list[Recompute] = ["full"] * (dense_layers + moe_layers)
    found, moe, dense = [tuple(modes)], range(dense_layers, len(modes))[::-1], range(dense_layers)[::-1]
    steps: list[tuple[Recompute, Sequence[int]]] = [("keep_moe", moe), ("none", moe), ("none", dense)]
    for mode, layers in steps:
        for layer in layers:
            modes[layer] = mode
            found.append(tuple(modes))
    return found


def recompute_choices(
    rank: RankMemory,
    shape: ModelConfig,
    recipe: Recipe,
    dims: ParallelDims,
    tokens: int,
    in_flight: int,
    force_balance: bool = False,
    **options: Any,
) -> list[RecomputeChoice]:
    """All candidates, from "full" to "none".

    Args:
        force_balance: as in `mxep train`; without it uneven routing is allowed for.
        rank, shape, recipe, dims, tokens, in_flight, options: of `stage_peak`, without recompute.
    """
    more = MORE_ROWS if dims.ep > 1 and not force_balance else 0.0
    choices = []
    for modes in candidates(rank.dense_layers, rank.moe_layers):
        peak = stage_peak(rank, shape, recipe, dims, tokens, in_flight, recompute=modes, **options)
        choices.append(RecomputeChoice(modes, peak, peak.total + round(more * peak.received)))
    return choices


def last_that_fits(choices: Sequence[RecomputeChoice], capacity: int) -> int:
    """The number of the last candidate that fits in `capacity` bytes; 0 if none does."""
    return max((number for number, choice in enumerate(choices) if choice.fits(capacity)), default=0)


def agree_on_recompute(
    config: TrainConfig, settings: ResolvedConfig, shape: ModelConfig, recipe: Recipe, meshes: Meshes, device: torch.device
) -> RecomputeChoice:
    """The choice of this rank's pipeline stage: the one of its ranks' choices that keeps least. Every rank of the run must call this."""
    dims, stage = settings.degrees, meshes.pp.get_local_rank()
    options: dict[str, Any] = {name: getattr(config, name) for name in PEAK_OPTIONS}
    linears = linear_recipe(config)
    options["mx_linears"] = linears is not None and linears.wgrad == "mx" and converts_attention(config, shape)
    rank = memory_of_rank(shape, recipe, meshes, state_precision(config), config.pp_schedule)
    # Experts GEMM by GEMM, and experts that are not converted, keep what they keep in high precision.
    as_one = (config.fused_layer or config.fused_experts) and config.mx_fqns == TrainConfig.mx_fqns
    recipe = recipe if as_one else resolve_recipe("hp")
    in_flight = microbatches_in_flight(stage, dims.pp, config.pp_schedule)
    choices = recompute_choices(rank, shape, recipe, dims, settings.forward_tokens, in_flight, config.force_balance, **options)
    capacity = total_memory(device)
    if dims.pp > 1:  # torch keeps what each stage receives, hidden states and their gradients, for every microbatch of a step
        microbatches = config.accumulate * settings.batch // config.microbatch * stages_per_rank(config.pp_schedule)
        capacity -= microbatches * 2 * torch.bfloat16.itemsize * settings.forward_tokens // dims.tp * shape.dim
    found = gather_objects((stage, last_that_fits(choices, capacity)))
    return choices[min(number for of, number in found if of == stage)]

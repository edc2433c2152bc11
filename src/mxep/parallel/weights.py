"""Weights of experts and MXFP8 linear layers quantised once per optimizer step."""

from __future__ import annotations

import torch
from torch import nn

from mxep.moe.experts import Experts
from mxep.mx.weight_cache import WeightCache
from mxep.parallel.linears import MXLinear


def cache_quantized_weights(model: nn.Module, *optimizers: torch.optim.Optimizer) -> WeightCache:
    """Quantise the weights of every `mxep.moe.Experts` and `MXLinear` once per optimizer step, for forward and dgrad; numbers stay.

    To be called when the model is sharded (its parameters are then the ones that the optimizers step). A step of any of the
    optimizers and a load_state_dict of these modules empty the cache, in-place edits of the parameters are noticed. Every other way to
    change a weight (`parameter.data`, a kernel of one's own) must be followed by `advance()` of what is returned; in checking mode
    (`MXEP_CHECK=1`, always on a CPU) a forgotten one is an error.

    Both forms of each weight stay in memory from their first use on, about 2 bytes for every such weight of this rank; where
    FSDP shards these over several ranks, that is the gathered size. Compiled graphs quantise in every call.

    Raises:
        ValueError: no optimizer, or none of them in the model.
    """
    multiplying = [module for module in model.modules() if isinstance(module, Experts | MXLinear)]
    if not optimizers or not multiplying:
        raise ValueError(
            f"cache_quantized_weights: {len(optimizers)} optimizers and {len(multiplying)} mxep.moe.Experts or MXLinear in "
            f"{type(model).__name__}, want at least one of each: whoever steps the weights empties the cache"
        )
    cache = WeightCache()
    for module in multiplying:
        module.keep_quantized(cache)
        module.register_load_state_dict_post_hook(cache.advance)
    for optimizer in optimizers:
        optimizer.register_step_post_hook(cache.advance)
    return cache

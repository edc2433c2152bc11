"""Weights that MXFP8 GEMMs read, quantised once per optimizer step."""

from __future__ import annotations

import torch
from torch import nn

from mxep.mx.weight_cache import KeepsQuantized, WeightCache, share_versions, storage_id


def cache_quantized_weights(model: nn.Module, *optimizers: torch.optim.Optimizer) -> WeightCache:
    """Quantise weights that MXFP8 GEMMs read once per optimizer step, for forward and dgrad; results stay the same.

    They are those of every `mxep.moe.Experts`, `MXLinear` and `mxep.models.loss.OutputProjection`.

    Call it after the model was sharded, with all optimizers that step these weights.  Every step of any `torch.optim.Optimizer` of the
    process empties the cache, and so does a load_state_dict of these modules.  Edits in place are noticed, and so are new tensors as
    parameters.  Edits that change no version are not: through `parameter.data`, by a custom kernel, by
    `torch.distributed.broadcast(parameter, ...)` and other collectives in place, by `torch._foreach_*` on DTensors.
    Call `advance()` of what is returned after one of these; in checking mode (`MXEP_CHECK=1`, always on a CPU) a forgotten one is an error.

    Both forms of each weight stay in memory from their first use on, about 2 bytes for every such weight of this rank; where
    FSDP shards these over several ranks, that is the gathered size. Compiled graphs quantise in every call, a CUDA graph once for all calls
    in it. After an optimizer step inside a CUDA graph, eager calls quantise in every call too, and a warning says so.

    Args:
        model: already sharded.
        *optimizers: all that step these weights.

    Returns:
        the cache; `advance()` empties it.

    Raises:
        ValueError: no optimizer, or something else as one; none of these modules in the model; a weight that requires a gradient and
            belongs to none of the optimizers; a parameter that was made in inference mode.

    Examples:
        >>> model = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> cache = mxep.parallel.cache_quantized_weights(model, optimizer)
        >>> model(torch.randn(16, 64)).sum().backward()
        >>> optimizer.step()  # empties the cache
    """
    multiplying = [module for module in model.modules() if isinstance(module, KeepsQuantized)]
    if not optimizers or not multiplying:
        raise ValueError(
            f"cache_quantized_weights: {len(optimizers)} optimizers and {len(multiplying)} mxep.moe.Experts or MXLinear in "
            f"{type(model).__name__}, want at least one of each: a step of the weights empties the cache"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            got = f"a {type(optimizer).__name__} as optimizer"
            raise ValueError(f"cache_quantized_weights: {got}, want a torch.optim.Optimizer: nothing else reports its steps")
    made_in_inference = [name for name, parameter in model.named_parameters() if parameter.is_inference()]
    if made_in_inference:
        raise ValueError(
            f"cache_quantized_weights: {made_in_inference[0]} was made in inference mode, whose edits nothing counts, "
            "want a parameter that counts its edits; build the model outside of torch.inference_mode(), or clone its parameters there"
        )
    cache = WeightCache()
    for module in multiplying:
        module.keep_quantized(cache)
    stepped = {storage_id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    kept = {id(parameter) for weight in cache.weights for parameter in weight.parameters.values()}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in kept and parameter.requires_grad]
    missing = [name for name, parameter in trained if storage_id(parameter) not in stepped]
    if missing:
        for module in multiplying:
            module.keep_quantized(None)
        others = f" and {len(missing) - 1} more weights belong" if len(missing) > 1 else " belongs"
        raise ValueError(
            f"cache_quantized_weights: {missing[0]}{others} to none of the {len(optimizers)} optimizers, want every weight that is "
            "trained; pass all optimizers, created after the model was sharded, or freeze the weights (requires_grad=False)"
        )
    for module in multiplying:
        module.register_load_state_dict_post_hook(cache.advance)
        module.register_state_dict_post_hook(share_versions)
    return cache

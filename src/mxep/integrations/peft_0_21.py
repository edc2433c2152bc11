"""peft 0.21: LoRA on a base that is frozen in MX, and on experts of transformers without a matrix of their weights' size.

peft adds an adapter of stacked experts to the weight itself: a copy of all experts in each forward, and their whole gradient in backward.
`register` gives a configuration layers that hand the two factors to `experts_implementation="mxep"`, which multiplies them with the rows
next to the base's GEMMs.  Names of adapters, their files and every option are peft's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from mxep.integrations.transformers_5 import computes, lora_factors
from mxep.mx.weight import MXWeight
from mxep.parallel.frozen_base import dequantize_weight

_RANK_MULTIPLE = 8  # what the grouped GEMMs want


def register(config: LoraConfig) -> LoraConfig:
    """Give a configuration the layers of this module; before `get_peft_model`, and where an adapter is loaded.

    Stacked experts that are named in `target_parameters` get adapters that are never multiplied out while they run by
    `experts_implementation="mxep"`; by other implementations they run as peft runs them, which raises a ValueError in forward for experts
    that are frozen in MX (`mxep.quantize_base`).  Such linear layers and experts become plain weights when an adapter is merged into them.

    Args:
        config: changed in place; what is saved of it stays the same.

    Returns:
        the configuration.

    Examples:
        >>> from peft import LoraConfig
        >>> from mxep.integrations import peft_0_21
        >>> config = peft_0_21.register(LoraConfig(r=16, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        >>> # model = get_peft_model(model, config), or PeftModel.from_pretrained(model, folder, config=config)
    """
    config._register_custom_module({nn.Module: _layer_of})  # type: ignore[dict-item]  # a function that makes the layer
    return config


def _layer_of(target: nn.Module, adapter_name: str, *, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any) -> Any:
    """The layer around a module that an adapter names; None for one that peft makes itself."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if parameter_name is not None:
        return ParamWrapper(target, adapter_name, parameter_name=parameter_name, config=config, **kwargs)
    if isinstance(base, nn.Linear) and isinstance(base.weight, MXWeight):
        return MXLoraLinear(target, adapter_name, config=config, **kwargs)
    return None


class MXLoraLinear(lora.Linear):
    """`peft.tuners.lora.Linear` around a linear layer that is frozen in MX."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, which is plain from then on."""
        names = check_adapters_to_merge(self, adapter_names)
        if names:
            dequantize_weight(self.get_base_layer(), "weight")
            super().merge(safe_merge, names)


class ParamWrapper(lora.ParamWrapper):  # type: ignore[misc]  # peft finds wrappers by this name of their class
    """`peft.tuners.lora.ParamWrapper` that adds no adapter to the weight of experts which mxep computes."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts, adapters = self.get_base_layer(), [name for name in active_adapters if name in self.lora_A]
        if not adapters or not computes(experts):
            if adapters and isinstance(self.get_param(), MXWeight):
                raise ValueError(
                    f"{__name__}: {self.parameter_name} of {type(experts).__name__} is frozen in MX, and peft would add an adapter to it; "
                    "want experts that mxep computes: set_experts_implementation('mxep'), or mxep.dequantize_base"
                )
            with super()._activate_lora(active_adapters):
                yield
            return
        factors = lora_factors(experts)
        factors[self.parameter_name] = self.factors(adapters)
        try:
            yield
        finally:
            del factors[self.parameter_name]

    def factors(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        """a (E, R, K) and b (E, N, R) in the weight's dtype, of all `adapters` joined along R, which is padded with zeros."""
        dtype, E = self.get_param().dtype, self.num_experts
        a, b = list[Tensor](), list[Tensor]()
        for name in adapters:
            down, up = (cast(Tensor, factors[name].weight) for factors in (self.lora_A, self.lora_B))
            a.append(down.reshape(E, -1, down.shape[-1]))
            b.append(up.reshape(up.shape[0], -1, E).permute(2, 0, 1) * self.scaling[name])
        padding = -sum(part.shape[1] for part in a) % _RANK_MULTIPLE
        return F.pad(torch.cat(a, 1), (0, 0, 0, padding)).to(dtype), F.pad(torch.cat(b, 2), (0, padding)).to(dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, which is plain from then on."""
        names = check_adapters_to_merge(self, adapter_names)
        if names:
            dequantize_weight(self.get_base_layer(), self.parameter_name)
            super().merge(safe_merge, names)

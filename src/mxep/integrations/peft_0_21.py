"""peft 0.21: LoRA on a base that is frozen in MX, on dense layers in their own dtype, and on experts without a matrix of the weights' size.

peft adds an adapter of stacked experts to the weight itself: a copy of all experts in each forward, and their whole gradient in backward.
`register` gives a configuration layers that hand the two factors to `experts_implementation="mxep"`, which multiplies them with the rows
next to the base's GEMMs.  For dense layers peft casts the rows to the adapter's float32, multiplies, scales, and adds; here GEMMs in the
rows' dtype add to the base's results, and no other pass reads or writes them.  Names of adapters, their files and every option are peft's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from mxep.grouped_mm.dense import DenseLora, dense_mm
from mxep.integrations.transformers_5 import computes, lora_factors, weight_names
from mxep.moe.router import is_patched
from mxep.mx.compile import in_graph
from mxep.mx.weight import MXWeight
from mxep.parallel.frozen_base import dequantize_weight
from mxep.parallel.linears import MXLinear
from mxep.recipe import Recipe

_HIGH_PRECISION = Recipe.named("hp")  # of torch.nn.Linear
_RANK_MULTIPLE = 8  # what the grouped GEMMs want


def register(config: LoraConfig) -> LoraConfig:
    """Give a configuration the layers of this module; before `get_peft_model`, and where an adapter is loaded.

    Stacked experts that are named in `target_parameters` get adapters that are never multiplied out while they run by
    `experts_implementation="mxep"`; by other implementations they run as peft runs them, which raises a ValueError in forward for experts
    that are frozen in MX (`mxep.quantize_base`).  Linear layers become `LoraLinear`, unless another library has quantised or sharded
    them.  Layers and experts in MX become plain weights when an adapter is merged into them.

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
    if _is_dense(base):
        if config.fan_in_fan_out:
            warnings.warn(f"{__name__}: fan_in_fan_out=True, want False for torch.nn.Linear; it is False from here on", stacklevel=2)
            config.fan_in_fan_out = False
        return LoraLinear(target, adapter_name, config=config, **kwargs)
    return None


def _is_dense(base: nn.Module) -> bool:
    """Whether a layer is linear, and neither sharded nor quantised by another library."""
    return (type(base) is nn.Linear or isinstance(base, MXLinear)) and type(base.weight) in (nn.Parameter, MXWeight)


@in_graph
class _ExpertFactors(torch.autograd.Function):
    """peft's factors (E * R, K) and (N, R * E) -> scaling * a (E, R, K) and b (E, N, R) in `dtype`, contiguous, by one pass each."""

    @staticmethod
    def forward(ctx: Any, down: Tensor, up: Tensor, scaling: float, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        E, R, N = num_experts, down.shape[0] // num_experts, up.shape[0]
        a = torch.mul(down, scaling, out=torch.empty_like(down, dtype=dtype)).reshape(E, R, -1)
        b = _contiguous(up.reshape(N, R, E).permute(2, 0, 1), dtype)
        ctx.scaling, ctx.dtypes = scaling, (down.dtype, up.dtype)
        ctx.mark_non_differentiable(*(made for made, learns in zip((a, b), ctx.needs_input_grad[:2], strict=True) if not learns))
        return a, b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (d_a, d_b), (learns_a, learns_b, *_) = grads, ctx.needs_input_grad
        d_down = _contiguous(d_a, ctx.dtypes[0]).mul_(ctx.scaling).flatten(0, 1) if learns_a else None
        d_up = _contiguous(d_b.permute(1, 2, 0), ctx.dtypes[1]).flatten(1) if learns_b else None
        return d_down, d_up, None, None, None


def _contiguous(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype`."""
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


class _MergesIntoPlain(BaseTunerLayer):
    """Merging into a weight that may be frozen in MX: it is plain from then on."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight."""
        names = check_adapters_to_merge(self, adapter_names)
        if names:
            dequantize_weight(self.get_base_layer(), self._weight_name())
            super().merge(safe_merge, names)
            self._count_change()

    def unmerge(self) -> None:
        """Takes merged adapters out of the weight."""
        super().unmerge()
        self._count_change()

    def _weight_name(self) -> str:
        return getattr(self, "parameter_name", "weight")  # an attribute of a ParamWrapper

    def _count_change(self) -> None:
        """peft writes to the weight's `.data`, of which a `WeightCache` would not know."""
        increment_version(getattr(self.get_base_layer(), self._weight_name()))


class LoraLinear(_MergesIntoPlain, lora.Linear):
    """`peft.tuners.lora.Linear` that computes in the dtype of the rows, around a linear layer of torch or `mxep.parallel.MXLinear`.

    The layer and its adapters are one autograd function (`mxep.grouped_mm.dense.DenseLora`); several adapters are joined along the rank.
    Calls run as peft runs them while an active adapter is a variant (DoRA, aLoRA and the like), has a bias, or is sharded or wrapped by
    itself, while the layer is sharded, while one of these has hooks or a forward of its own, with dropout and several adapters, and with
    arguments of peft's (`adapter_names`).
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., K) -> (..., N)."""
        names, base = [name for name in self.active_adapters if name in self.lora_A], self.base_layer
        dropouts = [self.lora_dropout[name] for name in names]
        drops = any(dropout.training and not isinstance(dropout, nn.Identity) for dropout in dropouts)
        plain = _is_dense(base) and not is_patched(base) and all(map(self._is_plain, names)) and not (drops and len(names) > 1)
        if not names or not plain or args or kwargs or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x  # as autocast would in the base layer
        a, b = ([cast(Tensor, factors[name].weight) for name in names] for factors in (self.lora_A, self.lora_B))
        if len(names) == 1:
            adapter = DenseLora(a[0], b[0], self.scaling[names[0]], dropouts[0](x) if drops else None)
        else:
            scaled = [factor * self.scaling[name] for factor, name in zip(b, names, strict=True)]
            adapter = DenseLora(torch.cat(a), torch.cat(scaled, 1))
        if isinstance(base, MXLinear):
            return base(x, adapter)  # type: ignore[no-any-return]
        return dense_mm(x, cast(Tensor, base.weight), cast(Tensor | None, base.bias), _HIGH_PRECISION, lora=adapter)

    def _is_plain(self, name: str) -> bool:
        factors = self.lora_A[name], self.lora_B[name]
        whole = all(type(factor) is nn.Linear and not is_patched(factor) and not isinstance(factor.weight, DTensor) for factor in factors)
        return whole and name not in self.lora_variant and not self.lora_bias[name] and self.cast_input_dtype_enabled


class ParamWrapper(_MergesIntoPlain, lora.ParamWrapper):  # type: ignore[misc]  # peft finds wrappers by this name of their class
    """`peft.tuners.lora.ParamWrapper` that adds no adapter to the weight of experts which mxep computes."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts, adapters = self.get_base_layer(), [name for name in active_adapters if name in self.lora_A]
        if not adapters or not computes(experts) or self.parameter_name not in weight_names(experts):  # a bias, say
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
        options = self.num_experts, self.get_param().dtype
        made = [_ExpertFactors.apply(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name], *options) for name in adapters]
        a, b = made[0] if len(made) == 1 else (torch.cat([pair[side] for pair in made], 1 + side) for side in (0, 1))
        padding = -a.shape[1] % _RANK_MULTIPLE
        return (F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))) if padding else (a, b)

"""peft 0.21: LoRA on a base that is frozen in MX, on dense layers in their own dtype, and on experts without a matrix of the weights' size.

peft adds an adapter of stacked experts to the weight itself: a copy of all experts in each forward, and their whole gradient in backward.
`register` gives a configuration layers that hand the two factors to `experts_implementation="mxep"`, which multiplies them with the rows
next to the base's GEMMs.  Beside dense layers peft casts the rows to the adapter's float32, multiplies, scales, and adds; here GEMMs in the
rows' dtype add to the base's results, and no other pass reads or writes them.  Names of adapters, their files and every option are peft's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.integrations.transformers_5 import computes, lora_factors
from mxep.mx.compile import in_graph
from mxep.mx.tensor import dequantize_data
from mxep.mx.weight import MXWeight
from mxep.parallel.frozen_base import dequantize_weight
from mxep.parallel.linears import MXLinear

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
    if (type(base) is nn.Linear or isinstance(base, MXLinear)) and type(base.weight) in (nn.Parameter, MXWeight):
        if config.fan_in_fan_out:
            warnings.warn(f"{__name__}: fan_in_fan_out=True, want False for torch.nn.Linear; it is False from here on", stacklevel=2)
            config.fan_in_fan_out = False
        return LoraLinear(target, adapter_name, config=config, **kwargs)
    return None


@in_graph
class _LoraInner(torch.autograd.Function):
    """x (..., K) and a (R, K) -> x for the base layer alone, and x @ a.T (..., R).

    Backward adds the adapter's part to the gradient that the base layer made of x, in the GEMM that computes it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a)
        return x.view_as(x), F.linear(x, a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        (x, a), d_x, d_inner = ctx.saved_tensors, dequantize_data(grads[0]).contiguous(), _rows(grads[1])
        _rows(d_x).addmm_(d_inner, a)
        return d_x, d_inner.t() @ _rows(x) if ctx.needs_input_grad[1] else None


@in_graph
class _LoraOuter(torch.autograd.Function):
    """y (..., N), of a base layer, becomes y + inner (..., R) @ b.T (N, R) in place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, inner: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(inner, b)
        ctx.mark_dirty(y)
        _rows(y).addmm_(_rows(inner), b.t())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (inner, b), d_y = ctx.saved_tensors, dequantize_data(grads[0]).contiguous()
        return d_y, d_y @ b, _rows(d_y).t() @ _rows(inner) if ctx.needs_input_grad[2] else None


def _rows(x: Tensor) -> Tensor:
    """x (..., K), contiguous or to be read alone -> (M, K)."""
    return x.reshape(-1, x.shape[-1])


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class LoraLinear(lora.Linear):
    """`peft.tuners.lora.Linear` that computes in the dtype of the rows, around a linear layer of torch or `mxep.parallel.MXLinear`.

    The factors of the active adapters are joined along the rank and cast, the scaling is part of the second one, and both products are
    GEMMs that add to the base's result and to its gradient.  Gradients of adapters in float32 are bf16 GEMMs, which sum in float32, and are
    added up in float32.  Calls run as peft runs them while an active adapter is a variant (DoRA, aLoRA and the like), has a bias, or is
    sharded or wrapped by itself, and with arguments of peft's (`adapter_names`).
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (..., K) -> (..., N)."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if not names or args or kwargs or self.disable_adapters or self.merged or not all(map(self._is_plain, names)):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x = x.to(dtype)  # as autocast would in the base layer
        a = [cast(Tensor, self.lora_A[name].weight).to(dtype) for name in names]
        b = _joined([cast(Tensor, self.lora_B[name].weight) * self.scaling[name] for name in names], 1).to(dtype)
        dropouts = [self.lora_dropout[name] for name in names]
        if x.requires_grad and all(isinstance(dropout, nn.Identity) or not dropout.training for dropout in dropouts):
            x, inner = _LoraInner.apply(x, _joined(a, 0))
        else:
            inner = _joined([F.linear(dropout(x), factor) for dropout, factor in zip(dropouts, a, strict=True)], -1)
        y: Tensor = _LoraOuter.apply(self.base_layer(x).contiguous(), inner, b)
        return y

    def _is_plain(self, name: str) -> bool:
        factors = self.lora_A[name], self.lora_B[name]
        whole = all(type(factor) is nn.Linear and not isinstance(factor.weight, DTensor) for factor in factors)
        return whole and name not in self.lora_variant and not self.lora_bias[name] and self.cast_input_dtype_enabled

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
            a.append(down.reshape(E, -1, down.shape[-1]).to(dtype))
            by_expert = up.reshape(up.shape[0], -1, E).permute(2, 0, 1)
            b.append((by_expert * self.scaling[name]).to(dtype, memory_format=torch.contiguous_format))
        joined = _joined(a, 1), _joined(b, 2)
        padding = -joined[0].shape[1] % _RANK_MULTIPLE
        return (F.pad(joined[0], (0, 0, 0, padding)), F.pad(joined[1], (0, padding))) if padding else joined

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, which is plain from then on."""
        names = check_adapters_to_merge(self, adapter_names)
        if names:
            dequantize_weight(self.get_base_layer(), self.parameter_name)
            super().merge(safe_merge, names)

"""transformers 5: `from_pretrained(..., quantization_config=MXFP8Config())` freezes weights in MX while it loads them.

Each weight is quantised as soon as it has been read, and experts as soon as a layer's are stacked: the bf16 model never exists as a whole.
Parameters keep their names.  `save_pretrained` writes bf16, or the MX bytes if the configuration says so; a file of them is loaded without
being quantised again.

files of MX bytes   NAME_qdata float8_e4m3fn and NAME_scale uint8 (e8m0) in the place of each frozen NAME; `quant_method` "mxep" in
                    config.json
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from mxep.mx.tensor import MXTensor
from mxep.mx.weight import KeptForms, MXWeight
from mxep.parallel.frozen_base import chosen_weights, freeze_weight, stored_transposed

_METHOD = "mxep"
_SAVE_AS = ("bf16", "mxfp8")
_log = logging.getLogger(__name__)


@register_quantization_config(_METHOD)
class MXFP8Config(QuantizationConfigMixin):
    """Which weights are frozen in MX, and what `save_pretrained` writes.

    Args:
        fqns: as in `mxep.quantize_base`; None: linear layers and experts, without routers and the projection to logits.
        skip: as there.
        keep_dgrad_form: as there.
        save_as: "bf16" writes an ordinary model of transformers, in the dtype of the model; "mxfp8" the MX bytes, which transformers reads
            only where this module is imported.

    Raises:
        ValueError: another `save_as`.

    Examples:
        >>> from mxep.integrations.transformers_quantizer import MXFP8Config
        >>> config = MXFP8Config(skip=["self_attn"])
        >>> # model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    """

    def __init__(
        self,
        fqns: str | list[str] | None = None,
        skip: str | list[str] = (),  # type: ignore[assignment]
        keep_dgrad_form: bool = False,
        save_as: str = "bf16",
        **_: Any,
    ) -> None:
        if save_as not in _SAVE_AS:
            raise ValueError(f"MXFP8Config: save_as={save_as!r}, want one of {', '.join(map(repr, _SAVE_AS))}")
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.fqns, self.skip, self.keep_dgrad_form, self.save_as = (
            fqns,
            list(skip) if not isinstance(skip, str) else skip,
            keep_dgrad_form,
            save_as,
        )


@register_quantizer(_METHOD)
class MXFP8Quantizer(HfQuantizer):
    """What transformers asks while it loads, trains and saves a model with `MXFP8Config`."""

    quantization_config: MXFP8Config
    is_trainable = True  # adapters
    is_compileable = True
    quantized_element_size = 33 / 32

    def __init__(self, quantization_config: MXFP8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._chosen: set[str] = set()

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._chosen = set(chosen_weights(model, self.quantization_config.fqns, self.quantization_config.skip))
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._chosen

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        last = {name.rpartition(".")[2] for name in self._chosen}
        return {name: [f"{name}_qdata", f"{name}_scale"] for name in sorted(last)} if self.pre_quantized else {}

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": _Deserialize}

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """As transformers', but config.json of a model that is saved in bf16 names no quantisation."""
        made = super().postprocess_model(model, **kwargs)
        if self.quantization_config.save_as == "bf16":
            del model.config.quantization_config
        return made

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes; in bf16 the host's memory has all of it at once."""
        as_mx, state = self.quantization_config.save_as == "mxfp8", dict[str, Tensor]()
        for name, value in model.state_dict().items():
            if not isinstance(value, MXWeight):
                state[name] = value
            elif as_mx:
                state |= {f"{name}_qdata": value.qdata, f"{name}_scale": value.scale.view(torch.uint8)}
            else:
                state[name] = value.to("cpu").dequantize().contiguous()
        _log.warning(
            "save_pretrained writes %s", "MX bytes (MXFP8Config(save_as='mxfp8'))" if as_mx else f"{model.dtype}, dequantised from MX"
        )
        return state, {}


class _Quantize(ConversionOps):
    """Freezes a parameter as soon as its values have been read."""

    def __init__(self, quantizer: MXFP8Quantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *args: Any, model: Any = None, missing_keys: Any = None, **kwargs: Any) -> dict[str, Any]:
        left = dict[str, Any]()
        for fqn, value in input_dict.items():
            if not self.hf_quantizer.param_needs_quantization(model, fqn):
                left[fqn] = value
                continue
            module, name = get_module_from_name(model, fqn)
            values = value[0] if isinstance(value, list) else value
            freeze_weight(module, name, values, fqn, keep_dgrad_form=self.hf_quantizer.quantization_config.keep_dgrad_form)
            _mark_loaded(module, name, fqn, missing_keys)
        return left


class _Deserialize(ConversionOps):
    """A parameter of its MX bytes in a file."""

    def __init__(self, quantizer: MXFP8Quantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", missing_keys: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        parts = {key.rpartition("_")[2]: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        if set(parts) != {"qdata", "scale"}:
            raise ValueError(f"{__name__}: {full_layer_name} has {', '.join(input_dict)} in the file, want its qdata and its scale")
        module, name = get_module_from_name(model, full_layer_name)
        mx = MXTensor.from_qdata_and_scales(parts["qdata"], parts["scale"].view(torch.uint8), model.dtype)
        keeps = KeptForms() if self.hf_quantizer.quantization_config.keep_dgrad_form else None
        weight = MXWeight(mx.qdata, mx.scale, mx.orig_dtype, stored_transposed(module, mx), keeps)
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        _mark_loaded(module, name, full_layer_name, missing_keys)
        return {}


def _mark_loaded(module: Any, name: str, fqn: str, missing_keys: set[str] | None) -> None:
    if missing_keys is not None:
        missing_keys.discard(fqn)
    module._is_hf_initialized = module._parameters[name]._is_hf_initialized = True

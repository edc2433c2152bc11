"""transformers 5: `from_pretrained(..., quantization_config=MXFP8Config())` freezes weights in MX while it loads them.

Each weight is quantised as soon as it has been read, and experts as soon as a layer's are stacked: the bf16 model never exists as a whole.
Parameters keep their names.  `save_pretrained` writes bf16, or the MX bytes if the configuration says so; a file of them is loaded without
being quantised again.

files of MX bytes   NAME_qdata float8_e4m3fn and NAME_scale uint8 (e8m0) in the place of each frozen NAME; `quant_method` "mxep" in
                    config.json
files of MXFP4      NAME_blocks and NAME_scales uint8 in the place of experts' weights (gpt-oss), which are read without loss; with
                    `config=config_without_mxfp4(folder)`
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from mxep.models.huggingface_files import holds_nan
from mxep.mx.mxfp4 import mxfp4_to_mxfp8
from mxep.mx.tensor import MXTensor
from mxep.mx.weight import KeptForms, MXWeight
from mxep.parallel.frozen_base import base_weights, chosen_weights, freeze_weight, stored_transposed
from mxep.parallel.module_names import shown_names
from mxep.placements import to_local

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
        ValueError: another `save_as`.  `from_pretrained` raises one for "mxfp8" and weights that a model's files hold joined with others.

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
        quant_method: str = _METHOD,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(f"MXFP8Config: {', '.join(unknown)} is unknown, want fqns, skip, keep_dgrad_form or save_as")
        if save_as not in _SAVE_AS:
            raise ValueError(f"MXFP8Config: save_as={save_as!r}, want one of {', '.join(map(repr, _SAVE_AS))}")
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.fqns, self.skip = fqns, skip if isinstance(skip, str) else list(skip)
        self.keep_dgrad_form, self.save_as = keep_dgrad_form, save_as


def config_without_mxfp4(folder: str | os.PathLike[str], **options: Any) -> PreTrainedConfig:
    """The configuration of a published model as `from_pretrained(..., quantization_config=MXFP8Config())` takes it in `config=`.

    transformers refuses another quantisation than the one that config.json names.  MXFP4 is left out here, since `MXFP8Config` reads such
    files; other configurations are as transformers reads them.

    Args:
        folder: as `AutoConfig.from_pretrained` takes it, and `options` too.

    Raises:
        ValueError: a model that is quantised in another format.

    Examples:
        >>> from mxep.integrations.transformers_quantizer import MXFP8Config, config_without_mxfp4
        >>> # config = config_without_mxfp4("gpt-oss-20b")
        >>> # AutoModelForCausalLM.from_pretrained("gpt-oss-20b", config=config, dtype=torch.bfloat16, quantization_config=MXFP8Config())
    """
    config = AutoConfig.from_pretrained(folder, **options)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method", _METHOD)
    if method not in ("mxfp4", _METHOD):
        raise ValueError(f"{__name__}: {folder}: quant_method is {method!r}, want mxfp4 or none; take the bf16 files of this model")
    if method == "mxfp4":
        del config.quantization_config
    return config


@register_quantizer(_METHOD)
class MXFP8Quantizer(HfQuantizer):
    """The quantizer that transformers calls while it loads, trains and saves a model with `MXFP8Config`."""

    quantization_config: MXFP8Config
    is_trainable = True  # adapters
    is_compileable = True
    quantized_element_size = 33 / 32

    def __init__(self, quantization_config: MXFP8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._chosen: set[str] = set()
        self._stacked: set[str] = set()

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for a part of the model that accelerate would offload: it makes parameters of its own of what it loads."""
        places = {name: str(device) for name, device in device_map.items()} if isinstance(device_map, dict) else {}
        offloaded = [name for name, device in places.items() if device in ("cpu", "disk")]
        if offloaded and set(places.values()) != {"cpu"}:
            raise ValueError(
                f"{__name__}: device_map offloads {shown_names(offloaded)}, which weights in MX do not support, want it all on GPUs, "
                "or on the CPU alone; give device_map a device, or take more GPUs"
            )

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._chosen = set(chosen_weights(model, self.quantization_config.fqns, self.quantization_config.skip))
        self._stacked = {name for module, name in base_weights(model).values() if module.get_parameter(name).dim() == 3}
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

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Conversions of two tensors of a file into one parameter: of MX bytes, or in other files of MXFP4 of experts."""
        if self.pre_quantized:
            found: list[WeightConverter] = super().get_weight_conversions()
            return found
        return [WeightConverter([f"{name}_{end}" for end in _FromMXFP4.ends], name, [_FromMXFP4(self)]) for name in sorted(self._stacked)]

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """The base class's, but config.json of a model saved in bf16 names no quantisation, and saving undoes no conversion of ours."""
        made = super().postprocess_model(model, **kwargs)
        for used in list(getattr(model, "_weight_conversions", ())):
            if any(isinstance(operation, _FromBytes) for operation in getattr(used, "operations", ())):
                model._weight_conversions.remove(used)
        if self.quantization_config.save_as == "bf16":
            del model.config.quantization_config
        elif rewritten := _rewritten_in_files(model):
            raise ValueError(
                f"{__name__}: save_as='mxfp8' with {shown_names(rewritten)}, which files of {type(model).__name__} hold joined with "
                "others and which would not be found again as MX bytes, want save_as='bf16'; or leave them out with skip="
            )
        return made

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors that `save_pretrained` writes; in bf16 all of them are in the host's memory at once."""
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


def _rewritten_in_files(model: Any) -> list[str]:
    """Frozen weights whose MX bytes `save_pretrained` would write under other names than their own."""
    writers = [used.reverse_transform() for used in getattr(model, "_weight_conversions", ()) if isinstance(used, WeightConverter)]
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, MXWeight)]
    return [name for name in names if any(writer.rename_source_key(f"{name}_qdata")[1] is not None for writer in writers)]


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
            _check_shape(values.shape, module, name, fqn)
            freeze_weight(module, name, values, fqn, keep_dgrad_form=self.hf_quantizer.quantization_config.keep_dgrad_form)
            _mark_loaded(module, name, fqn, missing_keys)
        return left


class _FromBytes(ConversionOps):
    """A parameter of two tensors of a file, whose names end in `ends`: frozen in MX, or dequantised if it is not to be frozen."""

    ends: tuple[str, str]

    def __init__(self, quantizer: MXFP8Quantizer) -> None:
        self.hf_quantizer = quantizer

    def as_mx(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> MXTensor:
        raise NotImplementedError

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", missing_keys: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        where = f"{__name__}: {full_layer_name}"
        parts = {key.rpartition("_")[2]: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        if set(parts) != set(self.ends):
            raise ValueError(f"{where} has {', '.join(input_dict)} in the file, want its {' and its '.join(self.ends)}")
        module, name = get_module_from_name(model, full_layer_name)
        values, scales = (parts[end] for end in self.ends)
        mx = self.as_mx(values, scales, model.dtype)
        keeps = KeptForms() if self.hf_quantizer.quantization_config.keep_dgrad_form else None
        weight = MXWeight(mx.qdata, mx.scale, mx.orig_dtype, stored_transposed(module, mx), keeps)
        _check_shape(weight.shape, module, name, full_layer_name)
        if holds_nan(mx):
            raise ValueError(f"{where} has values or scales that are no finite numbers; download the file again")
        if not self.hf_quantizer.param_needs_quantization(model, full_layer_name):
            return {full_layer_name: weight.dequantize().contiguous()}
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        _mark_loaded(module, name, full_layer_name, missing_keys)
        return {}


class _Deserialize(_FromBytes):
    """Reads MX bytes."""

    ends = ("qdata", "scale")

    def as_mx(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> MXTensor:
        return MXTensor.from_qdata_and_scales(values, scales.view(torch.uint8), dtype)


class _FromMXFP4(_FromBytes):
    """Reads MXFP4, whose bytes transformers has cast to the model's dtype: bf16 represents all integers up to 256."""

    ends = ("blocks", "scales")

    def as_mx(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> MXTensor:
        as_bytes = scales.to(torch.uint8)
        if not torch.equal(as_bytes.to(scales.dtype), scales):
            raise ValueError(f"{__name__}: scales of MXFP4 are other numbers than bytes in the file, want uint8")
        return mxfp4_to_mxfp8(values.to(torch.uint8), as_bytes, dtype)


def _check_shape(found: torch.Size, module: Any, name: str, fqn: str) -> None:
    """Raises ValueError for values of another shape than the parameter's: transformers does not check weights of quantizers."""
    wanted = to_local(module._parameters[name]).shape
    if found != wanted:
        raise ValueError(f"{__name__}: {fqn} is {tuple(found)} in the file, want {tuple(wanted)}; load another model or another folder")


def _mark_loaded(module: Any, name: str, fqn: str, missing_keys: set[str] | None) -> None:
    if missing_keys is not None:
        missing_keys.discard(fqn)
    module._parameters[name]._is_hf_initialized = True  # not the module: the file may lack its bias, which transformers fills then

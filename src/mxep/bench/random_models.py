"""Models of transformers with random weights, made on a GPU one parameter after the other: from a configuration, or through files in MXFP4.

The numbers depend on a parameter's name alone, so all models of one configuration are the same one.  A base in MX never exists in bf16.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxep.models.huggingface_writer import WeightFiles
from mxep.parallel.frozen_base import quantize_base
from mxep.shapes import MX_BLOCK

WEIGHTS_STD = 0.02
_SCALES = 119, 121  # e8m0 bytes: with 2^-8 and 2^-7 random e2m1 codes have a standard deviation of 0.018
_FILE_BYTES = 10**9  # of which the host's memory has one at a time
_PUBLISHED = {  # what gpt-oss' config.json says
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def random_model(config: Any, device: torch.device, in_mx: bool) -> Any:
    """transformers' model of a configuration in bf16 or frozen in MX, with random weights made on the device one after the other."""
    model = _without_weights(config)
    if in_mx:
        quantize_base(model)
    model.to_empty(device=device)
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:  # rotary embeddings: transformers computes their frequencies
            model._init_weights(module)
    for name, parameter in model.named_parameters():
        fill(name, parameter, WEIGHTS_STD)
    return model


def _without_weights(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


@torch.no_grad()
def fill(name: str, parameter: Tensor, std: float) -> None:
    """Ones for norms, else random numbers; of a weight in MX they are quantised."""
    if parameter.dim() == 1 and "norm" in name:
        parameter.fill_(1.0)
        return
    values = torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device, generator=_generator(name, parameter.device))
    parameter.copy_(values.mul_(std))


def model_through_mxfp4(config: Any, device: torch.device, in_mx: bool) -> Any:
    """transformers' model of random weights that are written in the layout of the published gpt-oss, and read again as a user reads them.

    The folder is a temporary one, which is deleted in the end.  In bf16 the experts are dequantised by transformers.
    """
    with tempfile.TemporaryDirectory(prefix="mxep-mxfp4-") as folder:
        write_mxfp4(config, Path(folder), device)
        return load_mxfp4(Path(folder), device, in_mx)


def write_mxfp4(config: Any, folder: Path, device: torch.device) -> None:
    """Write experts (E, K, N) as `_blocks` (E, N, K/32, 16) and `_scales` (E, N, K/32), uint8, and other parameters in bf16."""
    described = copy.deepcopy(config)
    described.quantization_config = _PUBLISHED
    described.save_pretrained(folder)
    files = WeightFiles(folder, _FILE_BYTES)
    for name, parameter in _without_weights(config).named_parameters():
        if parameter.dim() == 3:
            E, K, N = parameter.shape
            random = functools.partial(torch.randint, dtype=torch.uint8, device=device, generator=_generator(name, device))
            files.add(f"{name}_blocks", random(0, 256, (E, N, K // MX_BLOCK, MX_BLOCK // 2)))
            files.add(f"{name}_scales", random(*_SCALES, (E, N, K // MX_BLOCK)))
        else:
            values = torch.empty_like(parameter, device=device)
            fill(name, values, WEIGHTS_STD)
            files.add(name, values)
    files.finish()


def load_mxfp4(folder: Path, device: torch.device, in_mx: bool) -> Any:
    """The model of such a folder, frozen in MX as docs/howto/lora.md loads it, or in bf16."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    from mxep.integrations.transformers_quantizer import MXFP8Config, config_without_mxfp4

    if in_mx:
        how = {"config": config_without_mxfp4(folder), "quantization_config": MXFP8Config()}
    else:
        how = {"quantization_config": Mxfp4Config(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device, **how)

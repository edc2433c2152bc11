"""Builds the model of a configuration."""

from __future__ import annotations

from mxep.models.decoder import Decoder
from mxep.models.deepseek_v3 import DeepSeekV3
from mxep.models.presets import DecoderConfig, DeepSeekV3Config, Qwen3MoEConfig
from mxep.models.qwen3_moe import Qwen3MoE
from mxep.recipe import Recipe

FAMILIES: dict[type[DecoderConfig], type[Decoder]] = {DeepSeekV3Config: DeepSeekV3, Qwen3MoEConfig: Qwen3MoE}


def build_model(config: DecoderConfig, recipe: Recipe, force_balance: bool = False) -> Decoder:
    """The model of this configuration, on the current default device, not initialised; see `Decoder`."""
    return FAMILIES[type(config)](config, recipe, force_balance)

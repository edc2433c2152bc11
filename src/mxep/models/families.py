"""From a configuration to the model that has its shape."""

from __future__ import annotations

from mxep.models.decoder import Decoder
from mxep.models.deepseek_v3 import DeepSeekV3
from mxep.models.presets import ModelConfig, Qwen3MoEConfig
from mxep.models.qwen3_moe import Qwen3MoE
from mxep.recipe import Recipe


def build_model(config: ModelConfig, recipe: Recipe, force_balance: bool = False) -> Decoder:
    """The model of this configuration, its weights on the current default device and not yet initialised; see `Decoder`."""
    family = Qwen3MoE if isinstance(config, Qwen3MoEConfig) else DeepSeekV3
    return family(config, recipe, force_balance)

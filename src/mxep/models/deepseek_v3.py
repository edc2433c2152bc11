"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, dense FFN layers, then MoE layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mxep.models.decoder import Attention, Decoder
from mxep.models.document_mask import DocumentMask, attend
from mxep.models.presets import DeepSeekV3Config

_LATENT_NORM_EPS = 1e-6  # as in DeepSeek's published code; config.json's epsilon is for the other norms


def attention_scale(config: DeepSeekV3Config) -> float:
    """Factor of the scores before the softmax: 1/sqrt(head width), corrected for YaRN if the shape has it."""
    scale = config.qk_head_dim**-0.5
    if config.yarn is not None:
        scale *= (0.1 * config.yarn.mscale * math.log(config.yarn.factor) + 1.0) ** 2
    return scale


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x (B, S, heads, width) by `table` (S, width / 2) or (B, S, width / 2), in float32; returns x's dtype.

    Only the table is complex: torch.compile generates no code for complex products.
    """
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table.real.unsqueeze(-2), table.imag.unsqueeze(-2)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)


class LatentAttention(Attention):
    """Multi-head latent attention: keys and values are projected from one narrow latent per token; a separate key part has the position."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__(config)
        self.config = config
        self.scale = attention_scale(config)
        query_width = config.num_heads * config.qk_head_dim
        if config.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=_LATENT_NORM_EPS)
            self.wq_b = nn.Linear(config.q_lora_rank, query_width, bias=False)
        else:
            self.wq = nn.Linear(config.dim, query_width, bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, eps=_LATENT_NORM_EPS)
        self.wkv_b = nn.Linear(config.kv_lora_rank, config.num_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.wo = nn.Linear(config.num_heads * config.v_head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """x (B, S, D), table (S or more, rope / 2) or (B, S, rope / 2) complex64 -> (B, S, D)."""
        c, table = self.config, table[..., : x.shape[1], :]
        queries = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.wq(x)
        q_nope, q_rope = queries.unflatten(-1, (-1, c.qk_head_dim)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.wkv_a(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        keys_values = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, c.qk_nope_head_dim + c.v_head_dim))
        k_nope, v = keys_values.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), table).expand(-1, -1, k_nope.shape[2], -1)  # one rotated key for all heads
        q = torch.cat([q_nope, rotate(q_rope, table)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        return self.wo(attend(q, k, v, mask, self.scale).flatten(2))


class DeepSeekV3(Decoder):
    """A decoder with latent attention; see `Decoder`."""

    config: DeepSeekV3Config

    attention = LatentAttention

"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with normed queries and keys, a MoE in every layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxep.models.decoder import Attention, Decoder
from mxep.models.document_mask import DocumentMask, attend
from mxep.models.presets import Qwen3MoEConfig


def rotate_halves(x: Tensor, table: Tensor) -> Tensor:
    """Rotate value i of x (B, S, heads, width) with value i + width / 2, by `table` (S, width / 2) or (B, S, width / 2), in float32.

    Returns x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = table.real.unsqueeze(-2), table.imag.unsqueeze(-2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GroupedQueryAttention(Attention):
    """Several query heads share one head of keys and values; each query and key head is normed before it is rotated."""

    def __init__(self, config: Qwen3MoEConfig) -> None:
        super().__init__(config)
        self.config = config
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """x (B, S, D), table (S or more, head / 2) or (B, S, head / 2) complex64 -> (B, S, D)."""
        table = table[..., : x.shape[1], :]
        q, k, v = (linear(x).unflatten(-1, (-1, self.config.head_dim)) for linear in (self.wq, self.wk, self.wv))  # (B, S, heads, head)
        q, k = rotate_halves(self.q_norm(q), table), rotate_halves(self.k_norm(k), table)
        return self.wo(attend(q, k, v, mask).flatten(2))


class Qwen3MoE(Decoder):
    """A decoder with grouped-query attention; see `Decoder`."""

    config: Qwen3MoEConfig

    attention = GroupedQueryAttention

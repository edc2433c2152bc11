"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, dense FFN layers, then MoE layers on `mxep.moe`.

One letter more than the legend: B sequences, S tokens of a sequence (T = B * S), V words of the vocabulary.  Attention is causal
within a sequence.  Parameters are float32 when built; FSDP2's mixed precision computes in bf16 on GPUs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxep.models.presets import DeepSeekV3Config, YarnRope
from mxep.moe import MoE, MoEConfig
from mxep.recipe import Recipe


def rope_frequencies(rope: YarnRope, width: int, max_seq_len: int) -> Tensor:
    """Angles per token of each rotated pair, (width / 2,) float64; with YaRN where the model sees more than the original context.

    YaRN keeps frequencies that turn more than `beta_fast` times within the original context, divides those that turn less than
    `beta_slow` times by `factor`, and goes linearly from one to the other between.
    """
    frequencies = rope.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if max_seq_len <= rope.original_seq_len:
        return frequencies

    def pair_that_turns(rotations: float) -> float:
        return width * math.log(rope.original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / rope.factor * ramp


def rope_table(rope: YarnRope, width: int, max_seq_len: int) -> Tensor:
    """Unit complex numbers (max_seq_len, width / 2) complex64; complex so that FSDP's casts to bf16 leave them alone."""
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), rope_frequencies(rope, width, max_seq_len))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def attention_scale(config: DeepSeekV3Config) -> float:
    """Factor of the scores before the softmax: 1/sqrt(head width), corrected by YaRN where YaRN is on."""
    scale = config.qk_head_dim**-0.5
    if config.max_seq_len > config.rope.original_seq_len:
        scale *= (0.1 * config.rope.mscale * math.log(config.rope.factor) + 1.0) ** 2
    return scale


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn neighbouring pairs of x (B, S, heads, width) by `table` (S, width / 2), in float32; returns x's dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values come out of one narrow latent per token, positions travel beside it."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        self.config = config
        self.scale = attention_scale(config)
        query_width = config.num_heads * config.qk_head_dim
        if config.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=config.norm_eps)
            self.wq_b = nn.Linear(config.q_lora_rank, query_width, bias=False)
        else:
            self.wq = nn.Linear(config.dim, query_width, bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.wkv_b = nn.Linear(config.kv_lora_rank, config.num_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.wo = nn.Linear(config.num_heads * config.v_head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, S, D), table (S, rope / 2) complex64 -> (B, S, D)."""
        c = self.config
        queries = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.wq(x)
        q_nope, q_rope = queries.unflatten(-1, (c.num_heads, c.qk_head_dim)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.wkv_a(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        keys_values = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (c.num_heads, -1))
        k_nope, v = keys_values.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), table).expand(-1, -1, c.num_heads, -1)  # one rotated key for all heads
        q = torch.cat([q_nope, rotate(q_rope, table)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.scale)
        return self.wo(out.transpose(1, 2).flatten(2))

    def init_weights(self, std: float, out_std: float, generator: torch.Generator | None = None) -> None:
        """Truncated normal: `std` for what reads the stream, `out_std` for what adds to it; norms to one."""
        for name, module in self.named_children():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear):
                _truncated_normal(module.weight, out_std if name == "wo" else std, generator)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D), same dtype."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def init_weights(self, std: float, out_std: float, generator: torch.Generator | None = None) -> None:
        """Truncated normal: `std` for w1 and w3, `out_std` for w2."""
        for linear, linear_std in ((self.w1, std), (self.w3, std), (self.w2, out_std)):
            _truncated_normal(linear.weight, linear_std, generator)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + FFN(norm(x)), where the FFN is dense in the first layers and an MoE after them."""

    def __init__(self, config: DeepSeekV3Config, index: int, recipe: Recipe, force_balance: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = LatentAttention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe_enabled = index >= config.num_dense_layers
        if self.moe_enabled:
            self.moe = MoE(moe_config(config, force_balance), recipe)
        else:
            self.feed_forward = FeedForward(config.dim, config.dense_hidden)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, S, D), table (S, rope / 2) complex64 -> (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), table)
        ffn = self.moe if self.moe_enabled else self.feed_forward
        return x + ffn(self.ffn_norm(x))

    def init_weights(self, std: float, out_std: float, generator: torch.Generator | None = None) -> None:
        """Initialise every parameter of the layer; see `DeepSeekV3.init_weights`."""
        nn.init.ones_(self.attention_norm.weight)
        nn.init.ones_(self.ffn_norm.weight)
        self.attention.init_weights(std, out_std, generator)
        if self.moe_enabled:
            self.moe.init_weights(std, generator)
        else:
            self.feed_forward.init_weights(std, out_std, generator)


class DeepSeekV3(nn.Module):
    """Token ids in, logits out; embedding and output projection are not tied.

    Args:
        config: the shape, see `mxep.models.presets`.
        recipe: precision of the MoE layers' exchanges and GEMMs.
        force_balance: route every expert the same number of tokens (for measurements of speed).
    """

    def __init__(self, config: DeepSeekV3Config, recipe: Recipe, force_balance: bool = False) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(DecoderLayer(config, index, recipe, force_balance) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._rope: Tensor | None = None  # no buffer, so that neither `.to(bfloat16)` nor `to_empty` can harm it

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) int64 -> logits (B, S, V). Raises ValueError when S exceeds config.max_seq_len."""
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(f"DeepSeekV3: {tokens.shape[1]} tokens in a sequence, want at most max_seq_len={self.config.max_seq_len}")
        table = self.rope(tokens.device)[: tokens.shape[1]]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))

    def rope(self, device: torch.device) -> Tensor:
        """The table of rotations (max_seq_len, rope / 2) complex64, made at the first call."""
        if self._rope is None or self._rope.device != device:
            self._rope = rope_table(self.config.rope, self.config.qk_rope_head_dim, self.config.max_seq_len).to(device)
        return self._rope

    def moe_layers(self) -> list[MoE]:
        """The MoE modules, first layer first."""
        return [layer.moe for layer in self.layers if isinstance(layer, DecoderLayer) and layer.moe_enabled]

    def router_loss(self) -> Tensor:
        """Sum of the routers' auxiliary losses of the last forward, 0-dim, differentiable."""
        losses = [moe.router_loss for moe in self.moe_layers()]
        return torch.stack([loss.float() for loss in losses]).sum() if losses else torch.zeros((), device=self.norm.weight.device)

    def init_weights(self, seed: int) -> None:
        """Initialise in place, the same numbers for the same seed and device type whatever runs around it.

        Truncated normal of `init_std` (the published configurations' initializer_range), what adds to the residual stream divided
        by sqrt(2 * layers); the output projection with 1/sqrt(D).  Every layer draws from a generator of its own, so that layers
        may be built one at a time.
        """
        c = self.config
        device = self.tok_embeddings.weight.device
        generator = torch.Generator(device=device)
        out_std = c.init_std / math.sqrt(2 * c.num_layers)
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, DecoderLayer)
                layer.init_weights(c.init_std, out_std, generator.manual_seed(seed * 1_000_003 + index + 1))
            generator.manual_seed(seed * 1_000_003)
            _truncated_normal(self.tok_embeddings.weight, c.init_std, generator)
            _truncated_normal(self.output.weight, c.dim**-0.5, generator)
            nn.init.ones_(self.norm.weight)


def moe_config(config: DeepSeekV3Config, force_balance: bool = False) -> MoEConfig:
    """The MoE layer's part of a model configuration."""
    return MoEConfig(
        dim=config.dim,
        hidden=config.expert_hidden,
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_shared_experts=config.num_shared_experts,
        score_function=config.score_function,
        renormalize=config.renormalize,
        route_scale=config.route_scale,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        bias_update_rate=config.bias_update_rate,
        balance_loss=config.balance_loss,
        z_loss=config.z_loss,
        force_balance=force_balance,
    )


def _truncated_normal(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Normal of `std`, cut at three of them."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)

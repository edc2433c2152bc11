"""The decoder that both model families share: embedding, layers of attention and FFN (dense or `mxep.moe`), norm, output projection.

Letters besides the legend's: B sequences, S tokens per sequence (T = B * S), V words of the vocabulary.  Attention is causal within a
sequence, or within each of its documents (`mxep.models.document_mask`).  Parameters are float32; FSDP2's mixed precision computes in bf16
on GPUs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mxep.models.document_mask import DocumentMask, PackedDocuments, document_mask
from mxep.models.loss import OutputProjection
from mxep.models.presets import AttnImplementation, DecoderConfig
from mxep.models.rope import rope_table
from mxep.moe import MoE, MoEConfig, global_router_loss
from mxep.moe.init import draw
from mxep.recipe import Recipe


def truncated_normal(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill in place from a normal distribution, truncated at three standard deviations; see `mxep.moe.init.draw`."""
    draw(weight, lambda whole: nn.init.trunc_normal_(whole, std=std, a=-3 * std, b=3 * std, generator=generator))


class Attention(nn.Module, ABC):
    """Causal attention: (B, S, D) and the table of rotations -> (B, S, D).  `wo` is the output projection.

    The number of heads follows from the projections' output, not from the configuration: under tensor parallelism a rank has some of them.
    """

    wo: nn.Linear

    @abstractmethod
    def __init__(self, config: Any) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """x (B, S, D), table (S or more, rope / 2) or (B, S, rope / 2) complex64 -> (B, S, D)."""

    def init_weights(self, std: float, out_std: float, generator: torch.Generator | None = None) -> None:
        """Truncated normal: `std` for input projections, `out_std` for `wo`; norms to one."""
        for name, module in self.named_children():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear):
                truncated_normal(module.weight, out_std if name == "wo" else std, generator)


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
            truncated_normal(linear.weight, linear_std, generator)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + FFN(norm(x)), where the FFN is dense in the first layers and an MoE after them."""

    def __init__(self, config: DecoderConfig, attention: Attention, index: int, recipe: Recipe, force_balance: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe_enabled = index >= config.num_dense_layers
        if self.moe_enabled:
            self.moe = MoE(moe_config(config, force_balance), recipe)
        else:
            self.feed_forward = FeedForward(config.dim, config.dense_hidden)

    def forward(self, x: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """x (B, S, D), table (S or more, rope / 2) or (B, S, rope / 2) complex64 -> (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), table, mask)
        ffn = self.moe if self.moe_enabled else self.feed_forward
        return x + ffn(self.ffn_norm(x))

    def init_weights(self, std: float, out_std: float, generator: torch.Generator | None = None) -> None:
        """Initialise every parameter of the layer; see `Decoder.init_weights`."""
        nn.init.ones_(self.attention_norm.weight)
        nn.init.ones_(self.ffn_norm.weight)
        self.attention.init_weights(std, out_std, generator)
        if self.moe_enabled:
            self.moe.init_weights(std, generator)
        else:
            self.feed_forward.init_weights(std, out_std, generator)


class Decoder(nn.Module):
    """Token ids in, logits or a loss out; embedding and output projection are not tied.

    Args:
        config: the shape, see `mxep.models.presets`.
        recipe: precision of the MoE layers' exchanges and GEMMs.
        force_balance: route the same number of tokens to every expert (for speed measurements).

    Attributes:
        attention: of every layer; a model family is a subclass that sets it.
        attn_implementation: of every layer; see `mxep.models.document_mask`.
        tok_embeddings, norm, output: None if `keep_stage` removed them.
        layers: by index as a string.
    """

    attention: type[Attention]
    attn_implementation: AttnImplementation = "sdpa"
    tok_embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: OutputProjection | None

    def __init__(self, config: DecoderConfig, recipe: Recipe, force_balance: bool = False) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(index): DecoderLayer(config, self.attention(config), index, recipe, force_balance) for index in range(config.num_layers)}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = OutputProjection(config.dim, config.vocab_size)
        self._rope: Tensor | None = None  # not a buffer, so that `.to(bfloat16)` and `to_empty` leave it alone

    def forward(self, tokens: Tensor, labels: Tensor | None = None, documents: PackedDocuments | None = None) -> Tensor:
        """tokens (B, S) int64 -> logits (B, S, V), or with labels (B, S) int64 their summed cross-entropy () float32 in nats.

        A label is the next token, or IGNORE (-100) for no loss; with labels, the logits of all tokens never exist at once
        (`mxep.models.loss`).  With documents, a token attends only to earlier tokens of its own document, and positions restart at each
        document.  A pipeline stage takes hidden states (B, S, D) unless it is the first, and returns them unless it is the last.
        Raises ValueError if S exceeds config.max_seq_len.
        """
        if tokens.shape[1] > self.config.max_seq_len:
            where = type(self).__name__
            raise ValueError(f"{where}: {tokens.shape[1]} tokens in a sequence, want at most max_seq_len={self.config.max_seq_len}")
        table = self.rope(tokens.device)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        if documents is not None:
            table = table[documents.positions]
        mask = document_mask(documents, x.dtype, self.attn_implementation)
        for layer in self.layers.values():
            x = layer(x, table, mask)
        if self.norm is None or self.output is None:
            return x
        out: Tensor = self.output(self.norm(x), labels)
        if labels is not None and out.dim() > 0:
            raise ValueError(
                f"{type(self).__name__}: with labels {type(self.output).__name__} returned {tuple(out.shape)}, want a loss (); what wraps "
                "the output projection (an adapter of peft) does not know its labels: leave it out (exclude_modules='output')"
            )
        return out

    def keep_stage(self, stage: int, stages: int) -> None:
        """Become one of `stages` pipeline stages, with equal numbers of layers if possible; parameter names stay the same.

        Raises:
            ValueError: more stages than layers.
        """
        layers = self.config.num_layers
        if stages > layers:
            advice = "lower the pipeline degree (Interleaved1F1B has two stages on each rank)"
            raise ValueError(f"pipeline: {stages} stages for {layers} layers, want at most one for each; {advice}")
        kept = range(stage * layers // stages, (stage + 1) * layers // stages)
        for name in list(self.layers):
            if int(name) not in kept:
                del self.layers[name]
        if stage > 0:
            self.tok_embeddings = None
        if stage < stages - 1:
            self.norm = self.output = None

    def rope(self, device: torch.device) -> Tensor:
        """The table of rotations (max_seq_len, rope / 2) complex64, computed at the first call."""
        if self._rope is None or self._rope.device != device:
            c = self.config
            with torch.inference_mode(False):  # training saves it for backward, wherever the first call was
                self._rope = rope_table(c.rope_theta, c.rope_width, c.max_seq_len, c.yarn).to(device)
        return self._rope

    def moe_layers(self) -> list[MoE]:
        """The MoE modules, first layer first."""
        return [layer.moe for layer in self.layers.values() if isinstance(layer, DecoderLayer) and layer.moe_enabled]

    def router_loss(self, group: ProcessGroup | None = None) -> Tensor:
        """Sum of the routers' auxiliary losses of the last forward, 0-dim float32, differentiable; of a pipeline stage, of its layers.

        With `balance_loss_type` "global_aux_loss", in training, it is `mxep.moe.global_router_loss` over the ranks of `group` (None: all).
        That is a collective.
        """
        layers = self.moe_layers()
        if not layers:
            return torch.zeros((), device=next(self.parameters()).device)
        if self.training and self.config.balance_loss and self.config.balance_loss_type == "global_aux_loss":
            return global_router_loss(layers, group)
        return torch.stack([moe.router_loss for moe in layers]).sum()

    def init_weights(self, seed: int) -> None:
        """Initialise in place. The numbers depend on the seed and the device type only.

        Normal of `init_std`, outside of the experts truncated at three standard deviations; `init_by_depth` and `output_init_std` of the
        configuration change it for some matrices.  Each layer, the embedding and the output projection have generators of their own, so a
        pipeline stage gets the same numbers as the whole model.
        """
        c = self.config
        device = next(self.parameters()).device
        generator = torch.Generator(device=device)
        out_std = c.init_std / math.sqrt(2 * c.num_layers) if c.init_by_depth else c.init_std
        first = seed * 1_000_003 % 2**63  # generators take no more than 64 bits
        with torch.no_grad():
            for index, layer in self.layers.items():
                assert isinstance(layer, DecoderLayer)
                layer.init_weights(c.init_std, out_std, generator.manual_seed(first + int(index) + 1))
            if self.tok_embeddings is not None:
                truncated_normal(self.tok_embeddings.weight, c.init_std, generator.manual_seed(first))
            if self.norm is not None and self.output is not None:
                nn.init.ones_(self.norm.weight)
                output_std = c.init_std if c.output_init_std is None else c.output_init_std
                truncated_normal(self.output.weight, output_std, generator.manual_seed(first + c.num_layers + 1))


def moe_config(config: DecoderConfig, force_balance: bool = False) -> MoEConfig:
    """The MoE layer's part of a model configuration: the fields of equal names, and three that are not."""
    equal = {field.name for field in fields(MoEConfig)} & {field.name for field in fields(config)}
    values = {name: getattr(config, name) for name in equal}
    values |= {"hidden": config.expert_hidden, "balance_loss": config.layer_balance_loss, "force_balance": force_balance}
    return MoEConfig(**values)

"""FLOPs of a training step per token, for model and hardware utilisation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mxep.models.presets import DecoderConfig

if TYPE_CHECKING:
    from mxep.parallel import Recompute


class TokenFlops(NamedTuple):
    """FLOPs of forward and backward per token, a multiplication and an addition each counted. Only products count, of any precision.

    Attributes:
        products: of all weights that multiply the token: attention, dense FFN, router, `top_k` experts, shared experts, output projection.
        attention: of attention's two products over the whole sequence, as if attention were not causal (arXiv 2204.02311, appendix B).
        recomputed: of what activation checkpointing runs twice, with causal attention halved.
    """

    products: int
    attention: int
    recomputed: int

    @property
    def model(self) -> int:
        """The model's FLOPs with attention counted whole: `tflops` and `mfu` of a run, and torchtitan's."""
        return self.products + self.attention

    @property
    def model_causal(self) -> int:
        """The model's FLOPs with attention halved, since a causal kernel skips what the mask discards: Megatron's count."""
        return self.products + self.attention // 2

    @property
    def hardware(self) -> int:
        """What the hardware computes: `model_causal` and what is recomputed."""
        return self.model_causal + self.recomputed


def flops_per_token(
    shape: DecoderConfig, attended: float, recompute: Recompute | Sequence[Recompute] = "none", fused_layer: bool = False
) -> TokenFlops:
    """FLOPs of one training step per token.

    A product of a token with a matrix of n values is 2 n in forward and 4 n in backward. Not counted: elementwise operations, attention's
    softmax, and the product of queries and keys that FlashAttention's backward repeats.

    Args:
        shape: of the model.
        attended: tokens that attention spans if it is not causal: the sequence's, or with a document mask the mean of
            `PackedDocuments.attended_tokens`.
        recompute: see `mxep.parallel.recompute_blocks`, of all layers or of each, dense ones first. "full" repeats a layer's forward,
            without the down projection of a dense FFN, whose result no backward reads. "selective" repeats the routed experts' products; it
            also repeats those of dense layers in MXFP8, which are not counted.
        fused_layer: MoE layers are `mxep.FusedMoE`, which repeat no down projection of routed experts, and the router's product in every
            backward.

    Returns:
        the three parts; multiply by tokens per second for FLOP/s.

    Examples:
        >>> from mxep.models.presets import MODELS
        >>> flops = flops_per_token(MODELS["qwen3_30b_a3b"], 4096, "full")
        >>> [round(count / 1e9, 1) for count in (flops.model, flops.model_causal, flops.hardware)]
        [27.9, 23.1, 30.2]
    """
    c, before_ffn, attention = shape, shape.attention_matrices(), 2 * round(shape.scores_width * attended)  # attention: of one forward
    router, routed, shared = (
        c.num_experts * c.dim,
        c.top_k * 3 * c.dim * c.expert_hidden,
        3 * c.dim * c.num_shared_experts * c.expert_hidden,
    )
    dense = 3 * c.dim * c.dense_hidden
    matrices = c.num_layers * before_ffn + c.num_dense_layers * dense + c.num_moe_layers * (router + routed + shared) + c.vocab_size * c.dim
    again, attended_again = routed * 2 // 3 if fused_layer else routed, 2 * before_ffn + attention // 2
    of_layer: dict[Recompute, tuple[int, int]] = {  # of a dense layer, of a MoE layer
        "none": (0, 0),
        "keep_moe": (attended_again + 2 * (dense * 2 // 3), attended_again),
        "selective": (0, 2 * again),
        "full": (attended_again + 2 * (dense * 2 // 3), attended_again + 2 * (router + again + shared)),
    }
    modes: Sequence[Recompute] = [recompute] * c.num_layers if isinstance(recompute, str) else recompute
    recomputed = sum(of_layer[mode][layer >= c.num_dense_layers] for layer, mode in enumerate(modes))
    recomputed += 2 * c.num_moe_layers * router if fused_layer else 0
    return TokenFlops(6 * matrices, 3 * c.num_layers * attention, recomputed)

"""FLOPs of a training step per token, for model and hardware utilisation. Imports no torch."""

from __future__ import annotations

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


def flops_per_token(shape: DecoderConfig, attended: float, recompute: Recompute = "none") -> TokenFlops:
    """FLOPs of one training step per token.

    A product of a token with a matrix of n values is 2 n in forward and 4 n in backward. Not counted: elementwise operations, attention's
    softmax, and the product of queries and keys that FlashAttention's backward repeats.

    Args:
        shape: of the model.
        attended: tokens that attention spans if it is not causal: the sequence's, or with a document mask the mean of
            `PackedDocuments.attended_tokens`.
        recompute: see `mxep.parallel.recompute_blocks`. "full" repeats the layers' forward, without the down projections of dense FFNs and
            shared experts, whose results no backward reads. "selective" repeats the routed experts' products; it also repeats those of
            dense layers in MXFP8, which are not counted.

    Returns:
        the three parts; multiply by tokens per second for FLOP/s.

    Examples:
        >>> from mxep.models.presets import MODELS
        >>> flops = flops_per_token(MODELS["qwen3_30b_a3b"], 4096, "full")
        >>> [round(count / 1e9, 1) for count in (flops.model, flops.model_causal, flops.hardware)]
        [27.9, 23.1, 30.2]
    """
    c = shape
    experts = c.num_moe_layers * c.top_k * 3 * c.dim * c.expert_hidden
    before_ffn = c.num_layers * c.attention_matrices() + c.num_moe_layers * c.num_experts * c.dim
    dense = 3 * c.dim * (c.num_dense_layers * c.dense_hidden + c.num_moe_layers * c.num_shared_experts * c.expert_hidden)
    attention = 2 * c.num_layers * round(c.scores_width * attended)  # of forward
    recomputed = {
        "none": 0,
        "selective": 2 * experts,
        "full": 2 * (experts + before_ffn + dense * 2 // 3) + attention // 2,
    }[recompute]
    return TokenFlops(6 * (experts + before_ffn + dense + c.vocab_size * c.dim), 3 * attention, recomputed)

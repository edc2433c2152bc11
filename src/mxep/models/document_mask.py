"""Causal attention, also within documents: a sequence holds several documents, and a token attends to earlier tokens of its own document.

Two implementations.  "sdpa" is torch's: within documents on GPUs, in bf16 and float16, its variable-length FlashAttention-2, which skips
the products between documents; otherwise SDPA takes a boolean mask (B, 1, S, S), which discards them.  "flash_attention_4" is the package
flash-attn-4, which skips them too (its reference on a CPU).  What they need is derived from one tensor, the position of each token in its
document; a pipeline passes only that tensor to its stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import mxep.operators  # noqa: F401
from mxep.models.presets import AttnImplementation
from mxep.mx.first_order import first_order

_WIDTH_MULTIPLE = 8  # of a head, what FlashAttention takes


class PackedDocuments(NamedTuple):
    """The documents in a batch of sequences. The two bounds are host values, so that a forward on a GPU needs no sync.

    Attributes:
        positions: of each token in its document, (B, S) int64: 0 at the start of every document and sequence, else one more than the
            token before it.
        most: documents in one sequence, at most.
        longest: tokens in one document, at most.
    """

    positions: Tensor
    most: int
    longest: int

    @staticmethod
    def of(positions: Tensor) -> PackedDocuments:
        """From positions (B, S) on the CPU, the bounds as close as can be."""
        return PackedDocuments(positions, int((positions == 0).sum(1).max()), int(positions.max()) + 1)

    def attended_tokens(self) -> float:
        """Mean length of a token's document, which replaces S in a count of attention's FLOPs; reads `positions` on the host."""
        return float((2 * self.positions + 1).double().mean())  # the sum of 2 i + 1 over a document's tokens is its length squared


class DocumentMask(NamedTuple):
    """What all layers of a forward attend to, and by which implementation; without documents neither tensor is set, else exactly one.

    Attributes:
        allowed: (B, 1, S, S) bool, True where a token attends to another.
        starts: index of each document's first token in the concatenated sequences, int32 (B * most + 1,), padded with B * S.
        longest: tokens in one document, at most.
    """

    allowed: Tensor | None
    starts: Tensor | None
    longest: int
    implementation: AttnImplementation = "sdpa"


def document_mask(
    documents: PackedDocuments | None, dtype: torch.dtype, implementation: AttnImplementation = "sdpa"
) -> DocumentMask | None:
    """The mask for queries of this dtype, on the device of the positions; None where attention needs none. No host sync."""
    if documents is None:
        return None if implementation == "sdpa" else DocumentMask(None, None, 0, implementation)
    if implementation == "flash_attention_4" or (documents.positions.is_cuda and dtype in (torch.bfloat16, torch.float16)):
        return DocumentMask(None, document_starts(documents), documents.longest, implementation)
    document = (documents.positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return DocumentMask(same.tril()[:, None], None, documents.longest)


def document_starts(documents: PackedDocuments) -> Tensor:
    """`DocumentMask.starts`, on the device of the positions.

    >>> document_starts(PackedDocuments(torch.tensor([[0, 1, 2, 0], [0, 1, 2, 3]]), most=2, longest=4)).tolist()
    [0, 3, 4, 8, 8]
    """
    begins, slots = (documents.positions == 0).flatten(), len(documents.positions) * documents.most + 1
    index = torch.arange(len(begins), dtype=torch.int32, device=begins.device)
    slot = torch.where(begins, begins.cumsum(0) - 1, slots)  # tokens that begin no document share a last slot, which is dropped
    return torch.full((slots + 1,), len(begins), dtype=torch.int32, device=begins.device).scatter(0, slot, index)[:slots]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None, scale: float | None = None) -> Tensor:
    """Causal attention; with a mask, within its documents and by its implementation.

    Args:
        q, k, v: (B, S, heads, width). The heads of k and v divide those of q; v may have another width.
        scale: of the scores; None: 1/sqrt(width of q).

    Returns:
        (B, S, heads of q, width of v).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None and mask.implementation == "flash_attention_4":
        widest = max(q.shape[-1], v.shape[-1]) if q.shape[2] != k.shape[2] else 0  # the package's backward of grouped heads wants one width
        out, _ = _FlashAttention4.apply(*(_padded(x, widest) for x in (q, k, v)), scale, mask.starts, mask.longest)
        return out[..., : v.shape[-1]]
    if mask is not None and mask.starts is not None:
        return _attend_by_length(q, k, v, mask.starts, mask.longest, scale)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask.allowed,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _padded(x: Tensor, width: int = 0) -> Tensor:
    """x with zeros up to `width`, or to the next width that FlashAttention takes."""
    wanted = max(width, x.shape[-1])
    wanted += -wanted % _WIDTH_MULTIPLE
    return x if x.shape[-1] == wanted else F.pad(x, (0, wanted - x.shape[-1]))


def _attend_by_length(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """Attention over the documents of all sequences as variable-length sequences; narrow heads are padded with zeros."""
    widest = max(q.shape[-1], v.shape[-1])
    queries, keys, values = (_padded(x, widest).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(queries, keys, values, starts, starts, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]].unflatten(0, (q.shape[0], -1))


@first_order
class _FlashAttention4(torch.autograd.Function):
    """`torch.ops.mxep.causal_attention`, whose log-sum-exp has no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
        out, log_sums = torch.ops.mxep.causal_attention(q, k, v, scale, starts, longest)
        ctx.save_for_backward(q, k, v, out, log_sums, starts)
        ctx.mark_non_differentiable(log_sums)
        ctx.scale, ctx.longest = scale, longest
        return out, log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, starts = ctx.saved_tensors
        grads = torch.ops.mxep.causal_attention_backward(grad, q, k, v, out, log_sums, ctx.scale, starts, ctx.longest)
        return *grads, None, None, None

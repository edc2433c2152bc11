"""Attention within documents: a sequence holds several documents, and a token attends to earlier tokens of its own document.

On GPUs, in bf16 and float16, torch's variable-length FlashAttention skips the products between documents.  Otherwise SDPA takes a boolean
mask (B, 1, S, S), which discards them.  Both are derived from one tensor, the position of each token in its document; a pipeline passes
only that tensor to its stages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

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
    """The mask of all layers of a forward; exactly one of the two tensors is set.

    Attributes:
        allowed: (B, 1, S, S) bool, True where a token attends to another.
        starts: index of each document's first token in the concatenated sequences, int32 (B * most + 1,), padded with B * S.
        longest: tokens in one document, at most.
    """

    allowed: Tensor | None
    starts: Tensor | None
    longest: int


def document_mask(documents: PackedDocuments, dtype: torch.dtype) -> DocumentMask:
    """The mask for queries of this dtype, on the device of the positions. No host sync."""
    if documents.positions.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return DocumentMask(None, document_starts(documents), documents.longest)
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
    """Causal attention; with a mask, within documents.

    Args:
        q, k, v: (B, S, heads, width). The heads of k and v divide those of q; v may have another width.
        scale: of the scores; None: 1/sqrt(width of q).

    Returns:
        (B, S, heads of q, width of v).
    """
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


def _attend_by_length(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    """Attention over the documents of all sequences as variable-length sequences; narrow heads are padded with zeros."""
    widest = max(q.shape[-1], v.shape[-1])
    widest += -widest % _WIDTH_MULTIPLE
    queries, keys, values = ((x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1]))).flatten(0, 1) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = varlen_attn(queries, keys, values, starts, starts, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]].unflatten(0, (q.shape[0], -1))

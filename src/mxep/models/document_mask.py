"""Attention within documents: several of them lie in one sequence, and a token attends to earlier tokens of its own.

torch's variable-length FlashAttention computes it in bf16 and float16 on GPUs, without the products of tokens of different documents and
without torch.compile; everywhere else SDPA takes a boolean mask (B, 1, S, S), and computes and discards them.  Both come out of one tensor,
the position of every token in its document, so a pipeline needs nothing else to hand each stage its microbatch's mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_WIDTH_MULTIPLE = 8  # of a head, what FlashAttention takes


class PackedDocuments(NamedTuple):
    """Where documents lie in a batch of sequences; two bounds that the host knows spare a GPU's forward a wait for the host.

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
        """Mean length of the document that a token lies in: what stands for S in a count of attention's products; reads `positions`."""
        return float((2 * self.positions + 1).double().mean())  # the sum of 2 i + 1 over a document's tokens is its length squared


class DocumentMask(NamedTuple):
    """What attention needs, built once for all layers of a forward; one of the two tensors is there.

    Attributes:
        allowed: (B, 1, S, S) bool, True where a token attends to another.
        starts: tokens before each document, of all sequences one after the other, int32 (B * most + 1,): its last entries are B * S.
        longest: tokens in one document, at most.
    """

    allowed: Tensor | None
    starts: Tensor | None
    longest: int


def document_mask(documents: PackedDocuments, dtype: torch.dtype) -> DocumentMask:
    """The mask for queries of this dtype on the device of the positions; nothing waits for a GPU."""
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
    slot = torch.where(begins, begins.cumsum(0) - 1, slots)  # tokens that begin nothing share a last slot, which is cut off
    return torch.full((slots + 1,), len(begins), dtype=torch.int32, device=begins.device).scatter(0, slot, index)[:slots]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None, scale: float | None = None) -> Tensor:
    """Causal attention, within documents where there is a mask.

    Args:
        q, k, v: (B, S, heads, width), heads of k and v a divisor of those of q, width of v another one where it likes.
        scale: of the scores, 1/sqrt(width of q) unless given.

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
    """All sequences as one, whose documents are variable-length sequences; narrower heads are padded with zeros to the widest."""
    widest = max(q.shape[-1], v.shape[-1])
    widest += -widest % _WIDTH_MULTIPLE
    queries, keys, values = ((x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1]))).flatten(0, 1) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = varlen_attn(queries, keys, values, starts, starts, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[..., : v.shape[-1]].unflatten(0, (q.shape[0], -1))

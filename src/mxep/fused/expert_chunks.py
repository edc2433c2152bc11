"""The experts' rows in chunks, so that what the experts compute on at a time has a bounded size.

before  rows of all experts (P,), P a capacity that the host knows; where the experts' groups end, on the device alone
after   chunks of whole experts, at most `capacity` rows each; sums over the chunks, one per row of an exchange

The device decides which experts a chunk holds.  The host knows how many chunks there can be, so some are empty.  Empty chunks come first,
so the final reduction never waits for one.  The chunks' bounds are copied to the host without a sync: a chunk is skipped once the host
knows that it is empty.  A host that runs far ahead does not know, and launches kernels that find no rows; the bits are the same.
host syncs  none

Experts of 4, 8, 4, 4 and 12 rows in chunks of 12, where no expert gets more than 12 of the 36 rows; two of five chunks stay empty:

>>> ends = torch.tensor([4, 12, 16, 20, 32], dtype=torch.int32)
>>> count_chunks(36, 12, 12, 5, 4)
5
>>> torch.ops.mxep.chunk_bounds(ends, 12, 5).tolist()
[0, 0, 0, 12, 20, 32]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from mxep.device import is_capturing
from mxep.fused.dispatcher import WHERE, PartialSums, RowExchange, TokenDispatcher
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.moe.expert_mlp import ExpertRows
from mxep.operators import direct
from mxep.shapes import round_up

# Standard deviations of a rank's load by which "auto" exceeds the balanced share and its padding: a load is a sum of many choices, so one
# is about the share's root.  Experts that differ a little in how likely they are need more than two, which are left where memory is short.
# What does not fit costs the experts at its edge a chunk of their own, and in backward their gate and up again: 1% of a layer's time.
_SPARE, _SHORT_SPARE = 4, 2
_MANY = 16  # rows for each row of padding, from which on half of the padding is enough
_UNKNOWN = -1


def count_chunks(num_rows: int, largest: int, capacity: int, num_experts: int, alignment: int) -> int:
    """How many chunks `chunk_bounds` can need, whatever the experts' sizes.

    Args:
        num_rows: P, at least the last end.
        largest: the most rows that an expert can have.
        capacity: rows of a chunk, at least `largest`.
        num_experts: L.
        alignment: of all sizes.
    """
    # An expert did not fit: two neighbouring chunks hold more than one capacity, and every chunk but the first more than the capacity
    # without the largest expert.
    by_pairs = 2 * (num_rows // (capacity + alignment)) + 1
    by_largest = num_rows // (capacity - largest + alignment) + 1
    return min(by_pairs, by_largest, num_experts)


def chunk_capacity(dispatcher: TokenDispatcher, runtime: RuntimeEPConfig, alignment: int) -> int | None:
    """Rows of a chunk by `RuntimeEPConfig.scratch_rows`; None for all rows at once."""
    if not isinstance(runtime.scratch_rows, str):
        return runtime.scratch_rows
    expected = dispatcher.expected_rows
    if expected is None:
        return None
    padding = dispatcher.offs.shape[0] * alignment  # the most; about half of it where experts have many rows
    deviations = _SHORT_SPARE if runtime.keep_first_product == "mxfp8" else _SPARE
    balanced = expected + deviations * math.isqrt(expected) + (padding if expected < _MANY * padding else padding // 2)
    return max(round_up(balanced, alignment), round_up(max(dispatcher.tokens, 1), alignment))


class ChunkBounds:
    """Bounds of chunks, and which chunks the host knows to be empty. The bounds are copied to the host without a sync.

    Attributes:
        on_device: (chunks + 1,) int32, as `chunk_bounds` made them.
        on_host: the same in pinned memory; -1 until they have arrived, and for good in a CUDA graph.  Autograd saves both with the rows
            that they describe: where a forward is recomputed, the later forward has bounds of its own.
    """

    def __init__(self, on_device: Tensor, on_host: Tensor) -> None:
        self.on_device, self.on_host = on_device, on_host
        self._empty: list[bool] | None = None

    @classmethod
    def of(cls, bounds: Tensor) -> ChunkBounds:
        """Starts the copy to the host."""
        captured = bounds.is_cuda and is_capturing()  # every replay has bounds of its own
        on_host = torch.full(bounds.shape, _UNKNOWN, dtype=torch.int32, device="cpu", pin_memory=bounds.is_cuda and not captured)
        if not captured:
            on_host.copy_(bounds, non_blocking=True)
        return cls(bounds, on_host)

    def empty(self, chunk: int) -> bool:
        """Whether the chunk is known to have no row; False as long as nothing is known."""
        if self._empty is None:
            bounds = self.on_host.tolist()
            if _UNKNOWN in bounds:
                return False
            self._empty = [first == end for first, end in pairwise(bounds)]
        return self._empty[chunk]


class ExpertChunks:
    """The experts' rows in chunks of whole experts, in one where they fit: iterate over them.

    Args:
        rows: all rows.
        capacity: of a chunk, in rows; None for all rows at once.
        tokens: the most rows that an expert can get.
        alignment: rows that every expert's group is padded to.
        bounds: of other chunks of the same rows, to use again.

    Attributes:
        bounds: None for a single chunk.

    Raises:
        ValueError: capacity is below what a single expert can get.
    """

    def __init__(self, rows: ExpertRows, capacity: int | None, tokens: int, alignment: int, bounds: ChunkBounds | None = None) -> None:
        self._all, self._count, self.bounds = rows, 1, bounds
        if capacity is None:
            return
        assert rows.token_map is not None
        num_rows, largest = rows.token_map.shape[0], round_up(max(tokens, 1), alignment)
        if capacity < largest:
            raise ValueError(
                f"{WHERE}: RuntimeEPConfig.scratch_rows={capacity}, want at least {largest}: all {tokens} tokens of the group may choose "
                "one expert, whose rows are worked on at once; give more, or None for no bound"
            )
        if num_rows <= capacity:
            return
        self._capacity = capacity // alignment * alignment
        self._count = count_chunks(num_rows, largest, self._capacity, rows.offs.shape[0], alignment)
        self.bounds = bounds or ChunkBounds.of(direct.chunk_bounds(rows.offs, self._capacity, self._count))
        first = self.bounds.on_device
        assert first.is_cuda or first[0] == 0, f"{self._count} chunks of {self._capacity} do not hold {rows.offs.tolist()}"

    @classmethod
    def of(cls, dispatcher: TokenDispatcher, runtime: RuntimeEPConfig, alignment: int, bounds: ChunkBounds | None = None) -> ExpertChunks:
        """The chunks of a dispatcher's expert rows, by `RuntimeEPConfig.scratch_rows`."""
        rows = ExpertRows(dispatcher.offs, dispatcher.scores, dispatcher.dispatch.row_map, dispatcher.combine.row_map)
        return cls(rows, chunk_capacity(dispatcher, runtime, alignment), dispatcher.tokens, alignment, bounds)

    def __len__(self) -> int:
        """How many there can be."""
        return self._count

    def single(self) -> bool:
        """Whether one chunk is known to have all rows."""
        return self.bounds is None or all(map(self.bounds.empty, range(self._count - 1)))

    def __iter__(self) -> Iterator[ExpertRows]:
        """The chunks in their order, without those that are known to be empty; the last one always."""
        if self.bounds is not None:
            yield from (self._chunk(number) for number in range(self._count - 1) if not self.bounds.empty(number))
        yield self.last

    @cached_property
    def last(self) -> ExpertRows:
        """The last chunk."""
        return self._all if self.bounds is None else self._chunk(self._count - 1)

    def _chunk(self, number: int) -> ExpertRows:
        rows, bounds = self._all, self.bounds
        assert bounds is not None
        assert rows.grad_map is not None
        assert rows.token_map is not None
        grad_map = None if rows.grad_map.data_ptr() == rows.token_map.data_ptr() else rows.grad_map
        chunk = bounds.on_device[number : number + 2]
        offs, scores, tokens_of, grads_of = direct.chunk_rows(rows.offs, rows.scores, rows.token_map, grad_map, chunk, self._capacity)
        return ExpertRows(offs, scores, tokens_of, tokens_of if grad_map is None else grads_of, chunk, number == self._count - 1)


def concat_chunks(chunks: list[ExpertRows], values: list[Tensor], num_rows: int) -> Tensor:
    """Values of the chunks' rows, without those of empty chunks -> of all rows (P,); undefined past the last expert's end."""
    if len(chunks) == 1:  # all rows, or the last chunk after empty ones
        return values[0]
    bounds = torch.stack([chunk.chunk for chunk in chunks if chunk.chunk is not None])  # (chunks, 2)
    row = torch.arange(num_rows, dtype=torch.int32, device=bounds.device)
    chunk = torch.searchsorted(bounds[:, 1].contiguous(), row, right=True).clamp(max=len(chunks) - 1)
    local = (row - bounds[:, 0][chunk]).clamp(max=values[0].shape[0] - 1)
    return torch.stack(values)[chunk, local.long()]


class ChunkedReduction:
    """Sums over the expert rows of several chunks, one for each row of an exchange: float32, rounded once."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._sums: tuple[Tensor, Tensor | None] | None = None

    def add(self, expert_rows: Tensor, row_map: Tensor, chunk: Tensor) -> None:
        """Adds expert rows (P, D) of a chunk that is not the last; `row_map`: the exchange's row of each, `token_map` or `grad_map`."""
        direct.reduce_rows_chunk(expert_rows, self._exchange.row_slots, row_map, chunk, *self._buffers(expert_rows))

    def finish(self, expert_rows: Tensor, row_map: Tensor, chunk: Tensor) -> PartialSums:
        """The sums of earlier chunks, for the exchange that completes them with the rows of the last chunk."""
        sums = PartialSums(row_map, chunk, *self._buffers(expert_rows))
        self._sums = None
        return sums

    def _buffers(self, expert_rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._sums is None:
            shape = (self._exchange.row_slots.shape[0], expert_rows.shape[1])
            sums = torch.empty(shape, dtype=expert_rows.dtype, device=expert_rows.device)
            carry = torch.empty(shape, dtype=torch.int16, device=expert_rows.device) if expert_rows.dtype == torch.bfloat16 else None
            self._sums = sums, carry
        return self._sums

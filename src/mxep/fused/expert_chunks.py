"""The experts' places in passes, so that what follows the expansion of the received rows works in a scratch of bounded size.

before  places of all experts (P,), P a capacity that the host knows; where the experts' groups end, on the device alone
after   passes over windows of whole experts, at most `capacity` places each; sums over the passes, one per row of an exchange
Which experts a window holds is decided on the device, how many windows there are by capacities on the host: the first ones may be empty.
So the last one is full, and what follows the last pass, sums on their way home beside wgrad, does not wait for passes without rows.
What the device decided travels to the host beside the work: a pass is left out once the host knows that its window is empty.  Where the
host is far ahead it does not know, and has the time to launch what finds nothing to do; the bits are the same.
host syncs  none

Experts of 4, 8, 4, 4 and 12 places in windows of 12, where no expert gets more than 12 of the 36 places; two of five windows stay empty:

>>> ends = torch.tensor([4, 12, 16, 20, 32], dtype=torch.int32)
>>> count_windows(36, 12, 12, 5, 4)
5
>>> torch.ops.mxep.chunk_bounds(ends, 12, 5).tolist()
[0, 0, 0, 12, 20, 32]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.device import is_capturing
from mxep.fused.dispatcher import WHERE, PartialSums, RowExchange, TokenDispatcher
from mxep.shapes import round_up

# Deviations of a rank's load more than the balanced share and what padding takes of it: a load is a sum of many choices, so one is about
# the share's root. What does not fit costs the experts at its edge a pass of their own, and in backward their first product again.
_SPARE = 2
_MANY = 16  # rows for each that padding takes at most
_UNKNOWN = -1


class Places(NamedTuple):
    """Where the experts' rows stand, all of them or those of one window.

    Attributes:
        offs: (L,) int32 END places of the experts, from the window's start; as many as the one before for an expert that is elsewhere.
        scores: (P,) float32, 0 in padding.
        token_map, grad_map: (P,) int32, the dispatched row and the row of the output's gradient in each place, -1 in padding.
        window: (2,) int32, first place and end of the window among all; None for all of them.
        last: whether no pass follows.
    """

    offs: Tensor
    scores: Tensor
    token_map: Tensor
    grad_map: Tensor
    window: Tensor | None = None
    last: bool = True


def count_windows(num_places: int, largest: int, capacity: int, num_experts: int, alignment: int) -> int:
    """How many windows `chunk_bounds` can need, whatever the experts' sizes.

    Args:
        num_places: P, at least the last end.  largest: the most places that an expert can have.  capacity: of a window, at least that.
        num_experts: L.  alignment: of all sizes.
    """
    # An expert did not fit: two neighbouring windows hold more than one capacity, and every window but the first more than
    # the capacity without the largest expert.
    by_pairs = 2 * (num_places // (capacity + alignment)) + 1
    by_largest = num_places // (capacity - largest + alignment) + 1
    return min(by_pairs, by_largest, num_experts)


def places_of(dispatcher: TokenDispatcher) -> Places:
    """All places of a dispatcher."""
    return Places(dispatcher.offs, dispatcher.scores, dispatcher.dispatch.row_map, dispatcher.combine.row_map)


def capacity_of(dispatcher: TokenDispatcher, scratch_rows: int | str | None, alignment: int) -> int | None:
    """Of a window, in places, by `RuntimeEPConfig.scratch_rows`; None for all places at once."""
    if not isinstance(scratch_rows, str):
        return scratch_rows
    if dispatcher.expected_rows is None:
        return None
    padding = dispatcher.offs.shape[0] * alignment  # at most; half of that where loads are any, which is enough where rows are many
    balanced = (
        dispatcher.expected_rows
        + _SPARE * math.isqrt(dispatcher.expected_rows)
        + (padding if dispatcher.expected_rows < _MANY * padding else padding // 2)
    )
    return max(round_up(balanced, alignment), round_up(max(dispatcher.tokens, 1), alignment))


class News:
    """Windows of places, and which of them the host knows to be empty: their bounds travel to it beside the work, and nobody waits.

    Attributes:
        bounds: (windows + 1,) int32 on the device, as `chunk_bounds` made them.
        told: the same on the host, in pinned memory; -1 where nothing has come yet, and in a CUDA graph for good.  Autograd saves both
            beside the places that they tell of: where a forward runs again, all are the later one's, with windows of its own.
    """

    def __init__(self, bounds: Tensor, told: Tensor) -> None:
        self.bounds, self.told = bounds, told
        self._empty: list[bool] | None = None

    @classmethod
    def of(cls, bounds: Tensor) -> News:
        """News of windows that the device knows."""
        captured = bounds.is_cuda and is_capturing()  # every replay has bounds of its own
        told = torch.full(bounds.shape, _UNKNOWN, dtype=torch.int32, device="cpu", pin_memory=bounds.is_cuda and not captured)
        if not captured:
            told.copy_(bounds, non_blocking=True)
        return cls(bounds, told)

    def empty(self, window: int) -> bool:
        """Whether it is known that no place is in that window; False too as long as nothing is known."""
        if self._empty is None:
            told = self.told.tolist()
            if _UNKNOWN in told:
                return False
            self._empty = [first == end for first, end in pairwise(told)]
        return self._empty[window]


class Passes:
    """The places in passes over windows of experts, all in one where they fit: iterate over them.

    Args:
        whole: all places.
        capacity: of a window, in places; None for all places at once.
        tokens: the most rows that an expert can get.  alignment: rows that every expert's group is padded to.
        news: of other passes over the same places, whose windows are these.

    Attributes:
        news: of the windows, None for a single pass.

    Raises:
        ValueError: capacity is below what a single expert can get.
    """

    def __init__(self, whole: Places, capacity: int | None, tokens: int, alignment: int, news: News | None = None) -> None:
        num_places = whole.scores.shape[0]
        largest = round_up(max(tokens, 1), alignment)
        if capacity is not None and capacity < largest:
            raise ValueError(
                f"{WHERE}: RuntimeEPConfig.scratch_rows={capacity}, want at least {largest}: all {tokens} tokens of the group may choose "
                "one expert, whose rows are worked on at once; give more, or None for no bound"
            )
        self._whole, self._count, self.news = whole, 1, news
        if capacity is None or num_places <= capacity:
            return
        self._capacity = capacity // alignment * alignment
        self._count = count_windows(num_places, largest, self._capacity, whole.offs.shape[0], alignment)
        self.news = news or News.of(torch.ops.mxep.chunk_bounds(whole.offs, self._capacity, self._count))
        bounds = self.news.bounds
        assert bounds.is_cuda or bounds[0] == 0, f"{self._count} windows of {self._capacity} do not hold {whole.offs.tolist()}"

    def __len__(self) -> int:
        """How many there can be."""
        return self._count

    def single(self) -> bool:
        """Whether it is known that one pass has all places."""
        return self.news is None or all(map(self.news.empty, range(self._count - 1)))

    def __iter__(self) -> Iterator[Places]:
        """The passes in their order, without those that are known to find no rows; the last one always."""
        if self.news is None:
            yield self._whole
            return
        for number in range(self._count):
            if number == self._count - 1 or not self.news.empty(number):
                yield self._window(self.news.bounds[number : number + 2], number == self._count - 1)

    def _window(self, window: Tensor, last: bool) -> Places:
        whole = self._whole
        grad_map = None if whole.grad_map.data_ptr() == whole.token_map.data_ptr() else whole.grad_map
        offs, scores, tokens_of, grads_of = torch.ops.mxep.chunk_rows(
            whole.offs, whole.scores, whole.token_map, grad_map, window, self._capacity
        )
        return Places(offs, scores, tokens_of, tokens_of if grad_map is None else grads_of, window, last)


def joined_scores(parts: list[Places], scores: list[Tensor], num_places: int) -> Tensor:
    """Values of the windows' places, without those of empty windows -> of all places (P,); past the last expert's end not defined."""
    if len(parts) == 1:  # all places, or a window behind empty ones
        return scores[0]
    windows = torch.stack([part.window for part in parts if part.window is not None])  # (windows, 2)
    place = torch.arange(num_places, dtype=torch.int32, device=windows.device)
    window = torch.searchsorted(windows[:, 1].contiguous(), place, right=True).clamp(max=len(parts) - 1)
    local = (place - windows[:, 0][window]).clamp(max=scores[0].shape[0] - 1)
    return torch.stack(scores)[window, local.long()]


class Sums:
    """The experts' rows of one pass after the other, and their sums' way home over an exchange.

    Over several passes a sum adds up window by window, in float32 and rounded once; in one pass it is the wire's own.
    """

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._begun: tuple[Tensor, Tensor | None] | None = None

    def add(self, placed: Tensor, row_map: Tensor, window: Tensor | None) -> None:
        """Rows (P, D) of the next window, which is not the last; row_map: the wire's row of each, `Places.token_map` or `grad_map`."""
        assert window is not None
        torch.ops.mxep.reduce_rows_chunk(placed, self._exchange.row_slots, row_map, window, *self._sums(placed))

    def to_tokens(self, placed: Tensor, row_map: Tensor, window: Tensor | None, scaling_mode: str) -> Tensor:
        """As `RowExchange.to_tokens`, once, with the rows of the last window or of all places."""
        return self._exchange.to_tokens(placed, scaling_mode, earlier=self._end(placed, row_map, window))

    def start_to_tokens(
        self, placed: Tensor, row_map: Tensor, window: Tensor | None, scaling_mode: str
    ) -> Callable[[Tensor | None], Tensor]:
        """As `RowExchange.start_to_tokens`, once, with the rows of the last window or of all places."""
        return self._exchange.start_to_tokens(placed, scaling_mode, self._end(placed, row_map, window))

    def _sums(self, placed: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._begun is None:
            shape = (self._exchange.row_slots.shape[0], placed.shape[1])
            sums = torch.empty(shape, dtype=placed.dtype, device=placed.device)
            carry = torch.empty(shape, dtype=torch.int16, device=placed.device) if placed.dtype == torch.bfloat16 else None
            self._begun = sums, carry
        return self._begun

    def _end(self, placed: Tensor, row_map: Tensor, window: Tensor | None) -> PartialSums | None:
        earlier = None if window is None else PartialSums(row_map, window, *self._sums(placed))
        self._begun = None
        return earlier

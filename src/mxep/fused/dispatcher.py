"""The token dispatcher of the fused layer: how tokens reach their experts and how the experts' outputs return, whatever the transport.

before  the router's top-k experts (T, C) and their scores
after   rows at the experts, read through a row map; per token the sum of its experts' outputs
rows    `RowExchange.to_experts` sends tokens (T, D) to the experts.  `RowExchange.to_tokens` sends the experts' rows (P, D) to their
        tokens; both ends sum in float32 and round once each.  Dispatch and combine have a row exchange each: dispatch uses `to_experts`
        forward and `to_tokens` backward, combine the other way round
implementations  `collective_dispatcher` over any transport's `exchange`, `symmetric_dispatcher` over symmetric memory, with the same bits;
        `make_dispatcher` chooses by the transport's name

The mode of a row exchange says what a row is:

    rank_dedup       one row for each (token, rank) pair in which the rank has one of the token's experts
    all_to_all       one row for each (token, expert) pair
    all_ranks        one row for each (token, rank) pair: an all-gather to the experts, a reduce-scatter to the tokens

Rows are ordered by rank, then by token, then by top-k column.  Dispatch and combine may have different modes.  The order of the expert rows
is the same in every mode: by expert, then by token; every expert's group is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

WHERE = "fused_moe, fused_experts"
_NUMBERS = (
    "num_experts",
    "top_k",
    "the tokens' width",
    "bytes of a value, by the tokens' dtype",
    "RuntimeEPConfig and recipe, by number",
    "Recipe.group_size_multiple_of",
    "what wants a gradient",
)


class ExpertRowIndex(NamedTuple):
    """The expert rows of the top-k ids (R, C) of some rows, as `torch.ops.mxep.index_topk` returns them.

    Attributes:
        expert_rows: (R, C) int32, -1 for an expert of another rank.
        offs: (L,) int32 END offsets of the local experts' rows.
        topk_ids: (P,) int32, the id of each expert row as row * C + column, -1 in padding.
        row_map: (P,) int32, the row of R of each expert row, -1 in padding.
        scores: (P,) float32, the score of each expert row, 0 in padding.
    """

    expert_rows: Tensor
    offs: Tensor
    topk_ids: Tensor
    row_map: Tensor
    scores: Tensor


class RecvIndex(NamedTuple):
    """The rows of an exchange on the rank of the experts.

    Attributes:
        row_map: (P,) int32, the row that each expert row reads, -1 in padding.
        slots: (R, C) or, in all_to_all, (R, 1) int32, the expert rows that read each row, -1 for none.
    """

    row_map: Tensor
    slots: Tensor


def pick(index: Tensor, values: Tensor) -> Tensor:
    """values[index], -1 where index is -1; index of any shape, values (N,) integers, which may be empty."""
    return torch.cat((values, values.new_full((1,), -1)))[index.long()]


class PartialSums(NamedTuple):
    """Partial sums from earlier chunks, and the chunk that completes them: arguments of `reduce_rows_chunk`.

    Attributes:
        row_map: (P,) int32, the sum that each expert row of the chunk belongs to, -1 in padding.
        chunk: (2,) int32, first expert row and end of the chunk.
        sums: (R, D) in the rows' dtype; a sum without any expert row is uninitialised.  carry: (R, D) int16 for bf16 sums, else None.
    """

    row_map: Tensor
    chunk: Tensor
    sums: Tensor
    carry: Tensor | None


class RowExchange(Protocol):
    """An exchange of rows between this rank's tokens and the experts of all ranks."""

    @property
    def row_map(self) -> Tensor:
        """(P,) int32, the row of `to_experts` that each expert row reads, -1 in padding."""

    @property
    def row_slots(self) -> Tensor:
        """(R, J) int32, the expert rows that read each row, -1 for none."""

    def to_experts(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        """Tokens (T, D) -> rows (R, D) at their experts: MX with a scaling mode, quantised once per token, else as they are.

        Rows that `row_map` does not name are uninitialised.
        """

    def start_to_experts(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """`to_experts`, asynchronous if the transport allows: sends now; the returned function waits for the rows and is called once."""

    def start_to_tokens(self, rows: Tensor, scaling_mode: str, earlier: PartialSums | None = None) -> Callable[[Tensor | None], Tensor]:
        """`to_tokens`, asynchronous if the transport allows: sends now; the returned function waits for the sums.

        Returns:
            a function to be called once, with the last term (T, D) of the sums, or None for no such term.
        """

    def to_tokens(self, rows: Tensor, scaling_mode: str, earlier: PartialSums | None = None) -> Tensor:
        """Expert rows (P, D) -> sums per token (T, D); sent in MX with a scaling mode.

        `earlier`: partial sums of earlier chunks; then `rows` has the rows of the last chunk only.
        """

    def rows_off_rank(self, way: str) -> int:
        """Rows that this rank sends to other ranks, "to_experts" or "to_tokens"; may be a host sync: for measurements."""


class TokenDispatcher(Protocol):
    """The row exchanges of dispatch and combine, and the index of the expert rows."""

    @property
    def dispatch(self) -> RowExchange: ...

    @property
    def combine(self) -> RowExchange: ...

    @property
    def offs(self) -> Tensor:
        """(L,) int32 END offsets of the local experts' rows."""

    @property
    def scores(self) -> Tensor:
        """(P,) float32, the score of each expert row, 0 in padding."""

    @property
    def experts(self) -> Tensor:
        """(T, C) integers, the top-k experts of this rank's tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of all ranks: the most rows that one expert can get."""

    @property
    def expected_rows(self) -> int | None:
        """The balanced number of rows per rank if P is a worst case; None if P is the received number, padded."""

    def for_backward(self, reads_experts: bool) -> tuple[TokenDispatcher, tuple[Tensor | None, ...]]:
        """The dispatcher without its tensors, and the tensors that backward needs, for `refilled`; `experts` only if it reads them."""

    def refilled(self, tensors: tuple[Tensor, ...]) -> TokenDispatcher:
        """The dispatcher with its tensors, from those that `for_backward` returned."""

    def start_scores_to_tokens(self, d_scores: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Gradients of the expert rows' scores (P,) -> of the tokens' scores (T, C) in `dtype`; asynchronous as `start_to_tokens`.

        `columns` (T, C): where those of top-k id (t, c) go in row t; None leaves them there.
        """


class DispatchSpec(NamedTuple):
    """What must be the same on every rank.

    Attributes:
        experts, top_k, width: E, C, D.  value_bytes: of a token's values.  options: a number that encodes modes and precisions.
        modes: of the row exchanges of dispatch and combine.
        alignment: rows that every expert's group is padded to.
        gradients: a number that encodes what backward sends, 0 without a backward.
        sync_row_count: the host waits for the number of received rows although the transport does not need it.
    """

    experts: int
    top_k: int
    width: int
    value_bytes: int
    options: int
    modes: tuple[str, str]
    alignment: int
    gradients: int = 0
    sync_row_count: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """What `check_numbers` compares."""
        return *self[:5], self.alignment, self.gradients


def _gradients_in_words(number: int) -> str:
    """`DispatchSpec.gradients` in words.

    >>> _gradients_in_words(0), _gradients_in_words(1), _gradients_in_words(1 + 0b0011), _gradients_in_words(1 + 0b1010)
    ('nothing', 'experts alone', 'tokens, scores or router', 'scores or router, products made again')
    """
    words = ("tokens", "scores or router", "gate and up", "products made again")  # the last two if tokens are dispatched again for them
    return ("nothing", "experts alone")[number] if number < 2 else ", ".join(w for bit, w in enumerate(words) if number - 1 >> bit & 1)


def check_numbers(of_ranks: list[list[int]]) -> None:
    """Raise the same ValueError on every rank unless `DispatchSpec.numbers` is the same on all."""
    for rank, theirs in enumerate(of_ranks):
        for name, *both in zip(_NUMBERS, of_ranks[0], theirs, strict=True):
            if both[0] != both[1]:
                first, other = map(_gradients_in_words, both) if name == _NUMBERS[-1] else both
                raise ValueError(f"{WHERE}: rank {rank} has {other}, rank 0 {first}: {name}; give every rank of the group the same")

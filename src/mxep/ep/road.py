"""What the fused layer asks of its exchanges, whatever carries them: two wires and where the experts' rows stand.

before  the router's choice (T, C) and scores
after   rows at the experts, read through a map; sums of the experts' rows at home
wires   `Wire.out` carries tokens (T, D) to the experts, `Wire.home` the experts' rows (P, D) to their tokens, summed on both ends in
        float32 and rounded once on each.  Dispatch is one wire: out forward, home backward; combine another: home forward, out backward
roads   over the collective transport (ep/collective_road.py) and over symmetric memory (ep/symmetric_road.py), with the same bits;
        `mxep.ep.plan_road.plan_road` takes the one of the group's transport
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


class Begun(NamedTuple):
    """Sums that earlier windows of places began, and the window whose rows end them, as `sum_rows_within` has them.

    Attributes:
        row_map: (P,) int32, the sum of each place of the window, -1 in padding.  window: (2,) int32, its first place and end.
        sums: (R, D) in the rows' dtype; one without any place was never written.  carry: (R, D) int16 beside bf16, else None.
    """

    row_map: Tensor
    window: Tensor
    sums: Tensor
    carry: Tensor | None


class Wire(Protocol):
    """One wire between this rank's tokens and the experts of all ranks."""

    @property
    def row_map(self) -> Tensor:
        """(P,) int32, the row of `out` that stands in each place, -1 in padding."""

    @property
    def held_slots(self) -> Tensor:
        """(R, J) int32, the places of each row at the experts, -1 for none."""

    def out(self, tokens: Tensor, scaling_mode: str) -> Tensor:
        """Tokens (T, D) -> rows (R, D) at their experts: MX with a scale rule, quantised once per token, else as they are.

        Rows that no place points to may hold anything.
        """

    def send_out_again(self, tokens: Tensor, scaling_mode: str) -> Callable[[], Tensor]:
        """`out` in two steps: tokens leave, beside what follows where the transport can; the call, once, waits for those that come."""

    def send_home(self, placed: Tensor, scaling_mode: str, begun: Begun | None = None) -> Callable[[Tensor | None], Tensor]:
        """`home` in two steps: the rows leave, beside what follows where the transport can; the call waits for those that come.

        Returns:
            a function of added (T, D) or None, to be called once.
        """

    def home(self, placed: Tensor, scaling_mode: str, added: Tensor | None = None, begun: Begun | None = None) -> Tensor:
        """Experts' rows (P, D) -> their sums at home (T, D), with added (T, D) as last term; in MX on the wire with a scale rule.

        `begun`: the rows are those of a last window alone, and this is what the windows before have made of the sums.
        """

    def leaving(self, way: str) -> int:
        """Rows that leave this rank, "out" to the experts or "home"; may be a host sync: for measurements."""


class Road(Protocol):
    """Both wires and where the experts' rows stand."""

    @property
    def dispatch(self) -> Wire: ...

    @property
    def combine(self) -> Wire: ...

    @property
    def offs(self) -> Tensor:
        """(L,) int32 END places of the experts."""

    @property
    def scores(self) -> Tensor:
        """(P,) float32, the score of each place, 0 in padding."""

    @property
    def experts(self) -> Tensor:
        """(T, C) int64, the choices that the road was planned for."""

    @property
    def tokens(self) -> int:
        """Of all ranks, the most rows that an expert can get."""

    @property
    def share(self) -> int | None:
        """Choices of all ranks over the ranks, where P is a worst case; None where P is what came, padded."""

    def for_backward(self) -> tuple[Road, tuple[Tensor | None, ...]]:
        """The road without its tensors, and those of them that backward reads, for `refilled`."""

    def refilled(self, tensors: tuple[Tensor, ...]) -> Road:
        """The road again."""

    def send_scores_home(self, d_scores: Tensor) -> Callable[[], Tensor]:
        """Gradients of the places' scores (P,) -> of the choices' scores at home (T, C), float32; in two steps as `Wire.send_home`."""


class Facts(NamedTuple):
    """What every rank must bring alike.

    Attributes:
        experts, choices, width: E, C, D.  value_bytes: of a token's values.  options: a number that stands for modes and precisions.
        modes: of dispatch's wire and of combine's, of ep/routes.py.
        alignment: rows that every expert's group is padded to.
        gradients: a number that stands for what travels in backward, 0 without one.
        counted: the host waits for the number of rows that came, where it could do without.
    """

    experts: int
    choices: int
    width: int
    value_bytes: int
    options: int
    modes: tuple[str, str]
    alignment: int
    gradients: int = 0
    counted: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """What `check_numbers` compares."""
        return *self[:5], self.alignment, self.gradients


def choices_dtype(num_experts: int) -> torch.dtype:
    """The smallest that holds the numbers of so many experts and -1: choices are kept for backward.

    >>> choices_dtype(128), choices_dtype(256)
    (torch.int8, torch.int16)
    """
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(dtype).max)


def _wanting(number: int) -> str:
    """`Facts.gradients` in words.

    >>> _wanting(0), _wanting(1), _wanting(1 + 0b0011), _wanting(1 + 0b1010)
    ('nothing', 'experts alone', 'tokens, scores or router', 'scores or router, products made again')
    """
    words = ("tokens", "scores or router", "gate and up", "products made again")  # the last two where tokens travel again for them
    return ("nothing", "experts alone")[number] if number < 2 else ", ".join(w for bit, w in enumerate(words) if number - 1 >> bit & 1)


def check_numbers(of_ranks: list[list[int]]) -> None:
    """Raise the same ValueError on every rank unless all ranks showed the same `Facts.numbers`."""
    for rank, theirs in enumerate(of_ranks):
        for name, *both in zip(_NUMBERS, of_ranks[0], theirs, strict=True):
            if both[0] != both[1]:
                first, other = map(_wanting, both) if name == _NUMBERS[-1] else both
                raise ValueError(f"{WHERE}: rank {rank} has {other}, rank 0 {first}: {name}; give every rank of the group the same")

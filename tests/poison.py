"""Uninitialised memory full of NaN, in which a result that nothing has written shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.utils._device

POISON_FLOAT, POISON_INT = 0xFF, 0xA5  # bytes: NaN in every float format, no likely value of an integer


def _poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: object, **options: object) -> torch.Tensor:
        out = empty(*args, **options)
        if out.numel():
            out.view(-1).view(torch.uint8).fill_(POISON_FLOAT if out.dtype.is_floating_point else POISON_INT)
        return out

    return make


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What `torch.empty` and `new_empty` return is full of NaN, in integers of 0xA5 bytes."""
    torch.utils._device._device_constructors()  # cached by torch: without `empty` in it the default device would be ignored from then on
    with (
        mock.patch.object(torch, "empty", _poisoned(torch.empty)),
        mock.patch.object(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty)),
    ):
        yield

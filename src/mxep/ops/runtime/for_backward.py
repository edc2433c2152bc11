"""What a forward saves for its backward: tensors, which autograd saves, and other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Memory = tuple[int, int]  # first address, and number of bytes


def memory_of(tensor: Tensor | None) -> Memory | None:
    """The memory of a tensor's storage."""
    return None if tensor is None else (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())


class PackedView(NamedTuple):
    """A tensor inside a packed one: where its bytes are, its dtype, shape and strides; `storage_offset` counts values from `byte` on."""

    byte: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int

    def of(self, packed: Tensor) -> Tensor:
        values = packed[self.byte : self.byte + self.nbytes // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return values.as_strided(self.shape, self.strides, values.storage_offset() + self.storage_offset)


class Packing:
    """How the tensors of a replayed call are kept: views of one tensor of bytes, or the number of a tensor of its own, or None.

    The key of a replayed backward contains this object in the place of all that and of `ForBackward.rest`.  It equals no other object.
    """

    def __init__(self, parts: Sequence[PackedView | int | None]) -> None:
        self.parts = tuple(parts)


class ForBackward(NamedTuple):
    """What a backward reads: tensors, some of them None, and values without tensors.

    A replayed call (`mxep.ops.runtime.replay`) keeps its small tensors in one of bytes: one allocation, one tensor to save and one
    address for the replayed backward.

    Attributes:
        kept: plain tensors that autograd saves, in the order in which `with_saved` takes them.
        rest: values without tensors.
        packing: how the tensors are packed in `kept`; None if these are the tensors themselves.
    """

    kept: Sequence[Tensor | None]
    rest: Any = None
    packing: Packing | None = None

    def with_saved(self, kept: Sequence[Tensor | None]) -> ForBackward:
        """The same with the tensors that autograd has saved in the place of `kept`."""
        return ForBackward(kept, self.rest, self.packing)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors as the forward gave them."""
        if self.packing is None:
            return tuple(self.kept)
        packed, *own = self.kept
        assert packed is not None
        parts = self.packing.parts
        return tuple([part.of(packed) if isinstance(part, PackedView) else None if part is None else own[part] for part in parts])

    def memory(self) -> tuple[Memory | None, ...]:
        """The memory of each tensor; tensors with the same memory are views of one."""
        if self.packing is None:
            return tuple(memory_of(tensor) for tensor in self.kept)
        packed, *own = self.kept
        assert packed is not None
        start, parts = packed.data_ptr(), self.packing.parts
        apart = [memory_of(tensor) for tensor in own]
        return tuple(
            (start + part.byte, part.nbytes) if isinstance(part, PackedView) else None if part is None else apart[part] for part in parts
        )

    def has(self, number: int) -> bool:
        """Whether the tensor of this number is not None."""
        return (self.kept if self.packing is None else self.packing.parts)[number] is not None

"""What a function leaves to its backward: tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Memory = tuple[int, int]  # its first address and bytes


def memory_of(tensor: Tensor | None) -> Memory | None:
    """A tensor's storage."""
    return None if tensor is None else (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())


class PackedView(NamedTuple):
    """A tensor in a packed one: where its memory is there, dtype, shape and strides; `storage_offset` counts values from `byte` on."""

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

    In the key of a replayed backward the object itself stands for all of that and for `ForBackward.rest`; it has no other equality.
    """

    def __init__(self, parts: Sequence[PackedView | int | None]) -> None:
        self.parts = tuple(parts)


class ForBackward(NamedTuple):
    """Tensors, some of them None, and the rest of what a backward reads, which has none.

    A replayed call (`mxep.ops.runtime.replay`) keeps its small tensors in one of bytes: one allocation, one tensor to save and one
    address for the replayed backward.

    Attributes:
        kept: what autograd is to save, in the order that `again` wants: plain tensors.
        rest: all that is no tensor; it is not replaced.
        packing: None if these are the tensors themselves.
    """

    kept: Sequence[Tensor | None]
    rest: Any = None
    packing: Packing | None = None

    def again(self, kept: Sequence[Tensor | None]) -> ForBackward:
        """With the tensors that autograd has saved."""
        return ForBackward(kept, self.rest, self.packing)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """As they were given."""
        if self.packing is None:
            return tuple(self.kept)
        packed, *own = self.kept
        assert packed is not None
        parts = self.packing.parts
        return tuple([part.of(packed) if isinstance(part, PackedView) else None if part is None else own[part] for part in parts])

    def memory(self) -> tuple[Memory | None, ...]:
        """Of each tensor; tensors of the same memory are views of one."""
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

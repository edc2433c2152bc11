"""Repairs of Triton's interpreter.

That of Triton 3.6 loses the carry when it rounds to e4m3 or bf16 and gets subnormals wrong, so torch's conversions take the place of its
own; and it needs values of one element as loop bounds. It also looks through the whole language at every call of a device function, and
makes shapes and NumPy's dtypes anew for every value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

_FLOATS = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _convert_float(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    """Float bits to the bits of another format, by torch: round to nearest even, subnormals and carries right."""
    bits = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1))
    floats = bits.view(_FLOATS[source]).float()
    floats[floats.isnan()] = torch.nan  # the hardware drops a NaN's sign
    out = floats.to(_FLOATS[target]).view(torch.uint8).numpy()
    return out.view(_UNSIGNED[_FLOATS[target].itemsize]).reshape(values.shape)


def _patch_tensor(tensor: type, scope: object, original: Callable = interpreter._patch_lang_tensor) -> None:
    """Loop bounds that are device values: NumPy 2.4 converts only 0-dimensional arrays to an int."""
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_lang(fn: Callable, original: Callable = interpreter._patch_lang) -> interpreter._LangPatchScope:
    """Patches the language once per kernel launch instead of once per call of a device function, which took a fifth of all time."""
    languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if languages and not any(tl.core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()
    return original(fn)


@functools.cache
def _shape(*sizes: int) -> tuple[tl.tuple, tl.tuple, int]:
    """(the shape of a block's type, that of its values, number of elements)."""
    return tl.tuple(sizes), tl.tuple([tl.constexpr(size) for size in sizes]), validate_block_shape(sizes)


def _make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
    """Of equal sizes all share a shape, which nothing changes: making them took a third of all time."""
    self.element_ty = element_ty
    self.shape, _, self.numel = _shape(*(getattr(size, "value", size) for size in shape))
    assert len(self.shape) > 0, "0d block_type is forbidden"


def _make_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, self.shape, numel = _shape(*type.shape) if type.is_block() else _shape()
    self.numel = tl.constexpr(numel)


_np_scalar = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: tl.dtype) -> np.dtype:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _np_scalar(dtype.scalar)


def apply() -> None:
    """Put them in place, for this process."""
    tl.block_type.__init__ = _make_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = _make_tensor
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = _patch_lang
    interpreter._convert_float = _convert_float
    interpreter._patch_lang_tensor = _patch_tensor

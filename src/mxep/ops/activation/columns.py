"""What the launchers of the activations' CUDA kernels share: the constants in front of columns.cuh, and the inputs as it reads them."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch

from mxep.ops.activation.arguments import as_rows
from mxep.ops.activation.functions import ACTIVATIONS, SwiGLU, is_gated
from mxep.recipe import SCALING_MODES

_LOAD_BYTES = 16  # what a lane loads at a time where every row starts at a multiple of it


def _bits(value: float) -> int:
    """The bits of a float32 as a C int, which may be negative: constants in front of a kernel are bools and ints.

    >>> _bits(1.0) == 0x3F800000, _bits(0.0), _bits(float("inf")) == 0x7F800000
    (True, 0, True)
    """
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class Variant(NamedTuple):
    """What a compiled kernel depends on.

    Attributes:
        width: H.  layout, scaling_mode, exact, activation: as the operators have them.  swiglu: their `form`.
        x, dh: dtypes; x is that of results in high precision where x_mx says that x itself is MX.
        scores, num_valid_rows: whether they are given.
        forms: of dx and of h.
        wide: 16-byte loads.
        sums: whether the kernel adds the rows of dx in each group (rebased.cu).
    """

    width: int
    layout: str
    scaling_mode: str
    exact: bool = False
    x: torch.dtype = torch.bfloat16
    dh: torch.dtype = torch.bfloat16
    scores: bool = False
    forms: tuple[str, str] = ("mx", "mx")
    wide: bool = True
    x_mx: bool = False
    num_valid_rows: bool = False
    activation: str = "swiglu"
    swiglu: SwiGLU = SwiGLU()
    sums: bool = False

    def options(self) -> dict[str, bool | int]:
        """The constants in front of columns.cuh and of what follows it."""
        interleaved = self.layout == "interleaved" and is_gated(self.activation)
        kind = {"H": self.width, "ACTIVATION": ACTIVATIONS.index(self.activation), "INTERLEAVED": interleaved}
        numbers = {"SCALING": SCALING_MODES.index(self.scaling_mode), "EXACT": self.exact, "SCORES": self.scores}
        inputs = {"X_FLOAT": self.x == torch.float32, "DH_FLOAT": self.dh == torch.float32, "X_MX": self.x_mx, "WIDE": self.wide}
        form = {name.upper(): _bits(value) for name, value in self.swiglu._asdict().items()}
        names = zip(("DX", "H"), self.forms, strict=True)
        outputs = {f"{name}_{what.upper()}": what in forms.split("+") for name, forms in names for what in ("mx", "hp")}
        return {**kind, **numbers, **inputs, "NUM_VALID": self.num_valid_rows, **form, **outputs}


def inputs_of(
    dh: torch.Tensor | None, x: torch.Tensor, x_scale: torch.Tensor | None, scores: torch.Tensor | None
) -> tuple[bool, tuple[Any, ...]]:
    """Whether every row starts at a multiple of 16 bytes, and what the kernels take first: dh, x and their bytes between rows, and so on.

    Copies only rows that have other strides, and codes that do not start there: these are read 8 at a time at least.
    """
    rows, grads = as_rows(x, "concatenated"), None if dh is None else as_rows(dh, "concatenated")
    row_bytes = rows.stride(0) * rows.element_size()
    grad_bytes = 0 if grads is None else grads.stride(0) * grads.element_size()
    wide = (rows.data_ptr() | row_bytes | grad_bytes | (0 if grads is None else grads.data_ptr())) % _LOAD_BYTES == 0
    if x_scale is not None:
        x_scale = x_scale.contiguous()
        if not wide:
            rows, row_bytes = rows.clone(memory_format=torch.contiguous_format), rows.shape[1]
    return wide, (grads, grad_bytes, rows, row_bytes, x_scale, scores)

"""What the launchers of the activations are given, checked, and memory for what they return."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxep.ops.activation.functions import function_of, is_gated
from mxep.ops.activation.reference import LAYOUTS
from mxep.ops.quantize.reference import check_scaling_mode, empty_mx
from mxep.shapes import MX_BLOCK

INPUTS = (torch.bfloat16, torch.float32)
_WORD_BYTES = 4


def _check_mx_rows(where: str, x: torch.Tensor, scale: torch.Tensor, width: str, multiple: int) -> None:
    codes = x.dim() == 2 and not x.shape[1] % multiple and x.dtype == torch.float8_e4m3fn
    if not codes or scale.shape != (x.shape[0], x.shape[1] // MX_BLOCK) or scale.dtype != torch.float8_e8m0fnu:
        raise ValueError(
            f"{where}: x is {tuple(x.shape)} {x.dtype} with x_scale {tuple(scale.shape)} {scale.dtype}, want (T, {width}) float8_e4m3fn "
            f"with (T, {width}/{MX_BLOCK}) float8_e8m0fnu, H a multiple of {MX_BLOCK}"
        )


def check_activation(
    where: str,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    scores: torch.Tensor | None,
    activation: str,
    form: Sequence[float],
    x_scale: torch.Tensor | None = None,
) -> None:
    """Raise ValueError for arguments that do not fit together."""
    function_of(activation, form)
    width, multiple = ("2H", 2 * MX_BLOCK) if is_gated(activation) else ("H", MX_BLOCK)
    if x_scale is not None:
        _check_mx_rows(where, x, x_scale, width, multiple)
    elif x.dim() != 2 or x.shape[1] % multiple or x.dtype not in INPUTS:
        raise ValueError(f"{where}: x is {tuple(x.shape)} {x.dtype}, want (T, {width}) bfloat16 or float32, H a multiple of {MX_BLOCK}")
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: layout={layout!r}, want one of {', '.join(LAYOUTS)}")
    check_scaling_mode(where, scaling_mode)
    if scores is not None and (scores.shape != x.shape[:1] or scores.dtype != torch.float32 or not scores.is_contiguous()):
        raise ValueError(f"{where}: scores are {tuple(scores.shape)} {scores.dtype}, want ({x.shape[0]},) float32, contiguous")


def empty_forms(forms: str, like: torch.Tensor, rows: int, width: int) -> list[torch.Tensor | None]:
    """MX data, MX scales and high-precision values (like's dtype) of a result, None for what is not wanted."""
    mx = empty_mx(like, rows, width) if "mx" in forms else (None, None)
    return [*mx, like.new_empty((rows, width)) if "hp" in forms else None]


def as_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(T, D) with unit stride along D, and in pairs of bf16 that start at whole words; a copy only where it is not so already."""
    words = layout == "concatenated" or x.dtype != torch.bfloat16 or not (x.stride(0) % 2 or x.data_ptr() % _WORD_BYTES)
    return x if x.stride(1) == 1 and words else x.clone(memory_format=torch.contiguous_format)

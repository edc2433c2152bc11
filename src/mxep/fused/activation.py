"""An expert's activation with the score of its row, in the forms that its readers want.

before  the first product (P, 2H) in high precision, or (P, H) without a gate
after   h times the row's score (P, H), MX or in high precision: the second product is linear, so its rows come out weighted, and the sum
        over a token's choices is a plain one
On GPUs each runs in one pass (ops/activation/forward.py) where H is a multiple of 32, else as plain torch operations in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep import reference
from mxep.grouped_mm.products import Forms, quantized
from mxep.moe.ffn import by_form
from mxep.mx.tensor import MXTensor
from mxep.ops.activation.functions import SwiGLU, is_gated
from mxep.shapes import MX_BLOCK


class Rows(NamedTuple):
    """What the activation reads beside the first product.

    Attributes:
        bias: (L, 2H) or (L, H) of the first product, None for none.
        offs: (L,) int32 END offsets; rows behind the last are not looked at, and results there not defined.
        scores: (P,) float32, 0 in padding.
    """

    bias: Tensor | None
    offs: Tensor
    scores: Tensor


class Activation(NamedTuple):
    """Which activation, and how gate and up lie; hashable.

    Attributes:
        name: one of `ACTIVATIONS`.  layout: "concatenated" or "interleaved".  mode: scale rule of MX results, "" for no MX.
        swiglu: its form, where it is SwiGLU.
    """

    name: str
    layout: str
    mode: str
    swiglu: SwiGLU = SwiGLU()


class Gradients(NamedTuple):
    """Gradients of the first product, h times its score, and the gradients of the scores (P,)."""

    first: Forms
    h: Forms
    scores: Tensor


def _options(rows: Rows, how: Activation) -> dict[str, Any]:
    num_valid_rows = rows.offs[-1:]  # behind it stands nobody's row
    ends = None if rows.bias is None else rows.offs
    return {
        "bias": rows.bias,
        "offs": ends,
        "scores": rows.scores,
        "num_valid_rows": num_valid_rows,
        "activation": how.name,
        "form": how.swiglu,
    }


def _home(first: Tensor | MXTensor, how: Activation) -> Any:
    """Where the operators are: those of every device, or plain torch where a width is none of theirs; in MX the layer has checked H."""
    return torch.ops.mxep if first.shape[1] % (MX_BLOCK * (1 + is_gated(how.name))) == 0 else reference


def forward(first: Tensor, rows: Rows, how: Activation) -> Tensor:
    """h times its score (P, H): MX with a scale rule, else in first's dtype; rounded once."""
    if how.mode:
        qdata, scale = torch.ops.mxep.activate_quantize(first, how.layout, how.mode, False, **_options(rows, how))
        return MXTensor(qdata, scale, first.dtype)
    return _home(first, how).activate(first, how.layout, False, **_options(rows, how))


def forward_and_keep(first: Tensor, rows: Rows, how: Activation, scaling_mode: str) -> tuple[Tensor, MXTensor]:
    """`forward`, and the first product in MX for `backward`: where h is in MX too, both are quantised from one read."""
    if how.mode == scaling_mode:
        parts = torch.ops.mxep.activate_quantize_both(first, how.layout, how.mode, False, **_options(rows, how))
        return MXTensor(parts[0], parts[1], first.dtype), MXTensor(parts[2], parts[3], first.dtype)
    return forward(first, rows, how), MXTensor(*quantized(first, scaling_mode), first.dtype)


def backward(dh: Tensor, first: Tensor | MXTensor, rows: Rows, how: Activation, first_forms: str, h_forms: str) -> Gradients:
    """Gradients from that of h times its score (P, H), and h again; forms as in `activate_backward`, MX only with a scale rule.

    A first product in MX is read as its values.
    """
    x, x_scale = (first.qdata, first.scale) if isinstance(first, MXTensor) else (first, None)
    forms, options = (how.layout, how.mode or "rceil", False, first_forms, h_forms), _options(rows, how)
    *parts, d_scores = _home(first, how).activate_backward(dh, x, *forms, **options, x_scale=x_scale)
    return Gradients(*by_form(parts, first_forms, h_forms, first.dtype), d_scores)

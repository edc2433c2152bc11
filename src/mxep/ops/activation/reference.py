"""The activation between an expert's two GEMMs, with its rows' scores and the MX quantiser: the definition of the numbers.

Float32 throughout, by the functions of functions.py; the results go to MX, or to x's dtype, from float32.  With a score p of
the row, whose gradient sums over the columns,

    h = p * h'      dp = sum(d * h')      for the h' of the function, and p * d in place of d, the gradient of h

x is (T, 2H), gate and up, or (T, H) where there is no gate ("relu2"; the layout has no effect there).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxep.ops.activation.functions import function_of
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, rebase_rows
from mxep.ops.quantize.reference import dequantize, quantize

LAYOUTS = ("concatenated", "interleaved")
FORMS = ("none", "mx", "hp", "mx+hp")
REBASED_FORMS = ("rebased", "rebased+hp", "mx+rebased", "mx+rebased+hp")  # of what an FP8 GEMM reads next; the first two also of h


def check_forms(where: str, forms: str, allowed: Sequence[str], granularity: str = "auto") -> None:
    """Raise ValueError for forms of a result that are not allowed, or rebased rows of an unknown granularity."""
    if forms not in allowed:
        raise ValueError(f"{where}={forms!r}, want one of {', '.join(allowed)}")
    if "rebased" in forms and granularity not in MAX_SPREAD:
        raise ValueError(f"{where}={forms!r}: granularity={granularity!r}, want one of {', '.join(MAX_SPREAD)}")


def check_activate(h: str, quantize_x: bool, granularity: str) -> None:
    """Raise ValueError for results that `activate` does not make together."""
    check_forms("activate: h", h, (*FORMS, *REBASED_FORMS[:2]), granularity)
    if "rebased" in h and quantize_x:
        raise ValueError(f"activate: h={h!r} with quantize_x=True, want one of the two; h='mx' comes with x in MX from one read")


def check_activate_backward(dx: str, h: str, granularity: str, offs: torch.Tensor | None) -> None:
    """Raise ValueError for forms that `activate_backward` does not make, and ends of groups that it does not take."""
    check_forms("activate_backward: dx", dx, (*FORMS, *REBASED_FORMS), granularity)
    check_forms("activate_backward: h", h, FORMS)
    if offs is not None and (offs.dim() != 1 or offs.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"activate_backward: offs are {tuple(offs.shape)} {offs.dtype}, want (G,) int32 or int64, END rows of groups")


def gate_and_up(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up (T, H) of x (T, 2H), its halves or its even and its odd columns."""
    return x.chunk(2, -1) if layout == "concatenated" else (x[..., 0::2], x[..., 1::2])  # type: ignore[return-value]


def concat_gate_up(gate: torch.Tensor, up: torch.Tensor | None, layout: str) -> torch.Tensor:
    """(T, 2H) from two (T, H), the inverse of `gate_and_up`; without an up the other itself."""
    if up is None:
        return gate
    return torch.cat((gate, up), -1) if layout == "concatenated" else torch.stack((gate, up), -1).flatten(-2)


def _parts(x: torch.Tensor, layout: str, gated: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if layout not in LAYOUTS:
        raise ValueError(f"activation: layout={layout!r}, want one of {', '.join(LAYOUTS)}")
    return gate_and_up(x.float(), layout) if gated else (x.float(), None)


def _in_forms(value: torch.Tensor, forms: str, dtype: torch.dtype, scaling_mode: str, granularity: str) -> list[torch.Tensor]:
    """Float32 values as MX, rebased, as `dtype`, in this order."""
    out = list(quantize(value, scaling_mode)) if "mx" in forms else []
    if "rebased" in forms:
        rows = rebase_rows(*quantize(value, scaling_mode), MAX_SPREAD[granularity])
        out += [part for part in rows[:3] if part is not None]
    return [*out, value.to(dtype).contiguous()] if "hp" in forms else out


def activate(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    scores: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
    h: str = "mx",
    quantize_x: bool = False,
    granularity: str = "auto",
) -> list[torch.Tensor]:
    """h of gate and up, in the forms that its readers want, and x itself in MX.

    Args:
        x: (T, 2H) bf16 or float32, (T, H) for "relu2", any strides; H a multiple of 32 where something is wanted in MX.
        layout: "concatenated" (gate in columns 0..H-1, then up) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: a scaling mode's name.
        exact: with IEEE's division and the library's exp and erf. Here always so; a GPU takes the faster instructions unless it is set.
        scores: (T,) float32, factors of h's rows.
        num_valid_rows: (1,) int32, 0 or a multiple of 32: how many rows are wanted; the others are not defined. Without effect here.
        activation: one of `ACTIVATIONS`.
        form: limit, alpha and offset as in `SwiGLU`; those that are not given are plain SwiGLU's.
        h: its forms, "none", "mx" (1x32 along H), "hp" (x's dtype, rounded once), "mx+hp", "rebased", which is `rebase_rows` of "mx", or
            "rebased+hp".
        quantize_x: whether x itself is wanted in MX, for a backward that reads it from there. Not with "rebased".
        granularity: of rebased rows' scales, a key of `MAX_SPREAD`.

    Returns:
        what was asked for, in this order, contiguous: h's qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu; data, scale and,
        unless the granularity is "row", block_scale of `RebasedRows`; h (T, H) in x's dtype; x's qdata and scale, of x's width and in its
        layout.
    """
    check_activate(h, quantize_x, granularity)
    function = function_of(activation, form)
    value = function.hidden(*_parts(x, layout, function.gated))
    value = value if scores is None else scores[:, None] * value
    return _in_forms(value, h, x.dtype, scaling_mode, granularity) + (list(quantize(x, scaling_mode)) if quantize_x else [])


def activate_backward(
    dh: torch.Tensor,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    dx: str = "mx",
    h: str = "mx",
    scores: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
    granularity: str = "auto",
    offs: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradient of x, and h once more, so that forward need not save it; each as its readers want it.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides.
        x, layout, scaling_mode, exact, scores: as in `activate`; without MX among the results H may be any number.
        dx, h: forms of the two results: "none", or some of "mx" (1x32 along the columns), "rebased" (of dx: `rebase_rows` of "mx") and
            "hp" (x's dtype) in this order, joined by "+".
        x_scale: float8_e8m0fnu, a scale for 32 columns, if x is the qdata of MX rows: x has their values, and "hp" is
            dh's dtype.
        num_valid_rows, activation, form, granularity: as in `activate`.
        offs: (G,) int32 or int64 END rows of groups, the last one num_valid_rows where that is given: the sums of dx's rows in each group
            are wanted too.

    Returns:
        what was asked for, in this order, contiguous: dx's qdata float8_e4m3fn and scale float8_e8m0fnu, of x's width and in its layout;
        its `RebasedRows` as in `activate`; dx in x's dtype; h's qdata (T, H) and scale (T, H/32); h (T, H) in x's dtype; with scores at
        last their gradient (T,) float32; with offs then the sums (G, x's width) float32, of values before they are rounded.
    """
    check_activate_backward(dx, h, granularity, offs)
    dtype = x.dtype if x_scale is None else dh.dtype
    values = x if x_scale is None else dequantize(x, x_scale, torch.float32)
    function, grad = function_of(activation, form), dh.float()
    parts = _parts(values, layout, function.gated)
    d_gate, d_up, h_values = function.backward(grad if scores is None else scores[:, None] * grad, *parts)
    if scores is not None:
        d_scores, h_values = (grad * h_values).sum(-1), scores[:, None] * h_values
    d_x = concat_gate_up(d_gate, d_up, layout)
    made = _in_forms(d_x, dx, dtype, scaling_mode, granularity) + _in_forms(h_values, h, dtype, scaling_mode, granularity)
    made += [] if scores is None else [d_scores]
    if offs is None:
        return made
    from mxep.operators import direct  # it imports this module first

    # An operator: experts of widths that activate_backward does not take run this on a GPU, where a reference would wait for the device.
    return [*made, *direct.group_bias_grads(d_x, offs)]

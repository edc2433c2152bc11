"""SwiGLU with the MX quantiser behind it, forward and backward: the definition of the numbers.

Float32 throughout, one rounding per operation, in this order (g gate, u up, each plus its bias where there is one, d gradient of h):

    s = 1 / (1 + exp(-g))      h = (g * s) * u
    dgate = (d * u) * (s * (1 + g * (1 - s)))      dup = d * (g * s)

with a score p of the row, whose gradient sums over the columns,

    h = p * ((g * s) * u)      dp = sum(d * ((g * s) * u)), and d is p * d in the formulas above

and the results go to MX, or to x's dtype, from float32.  Beyond |g| = 88, where exp overflows, s is 0 and h is zero.

In other forms (`SwiGLU`: DeepSeek-V4 has a limit of 10, gpt-oss a limit of 7, alpha 1.702 and an offset of 1) g is the smaller of gate and
limit, u is up clamped to the limit on both sides plus the offset, alpha g stands for g in s and inside of dgate's bracket, and what was
clamped has no gradient:

    s = 1 / (1 + exp(-(alpha * g)))      h = (g * s) * u
    dgate = (d * u) * (s * (1 + (alpha * g) * (1 - s))) where gate <= limit      dup = d * (g * s) where |up| <= limit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mxep.reference.quantize import dequantize, quantize

LAYOUTS = ("concatenated", "interleaved")
FORMS = ("none", "mx", "hp", "mx+hp")
_LEAST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class _Form(NamedTuple):
    limit: float
    alpha: float
    offset: float


class SwiGLU(_Form):
    """A form of SwiGLU: h = g sigmoid(alpha g) (u + offset), of a gate g and an up u that are clamped first.

    Attributes:
        limit: the most that a gate may be, and the largest magnitude of an up; None, which becomes infinity, clamps nothing.
        alpha: factor of the gate in the sigmoid.
        offset: added to up, after it was clamped.

    Raises:
        ValueError: a limit that is not above 0, or what is no number of float32.
    """

    __slots__ = ()

    def __new__(cls, limit: float | None = None, alpha: float = 1.0, offset: float = 0.0) -> SwiGLU:
        most = math.inf if limit is None else limit
        if not (_LEAST <= most <= _LARGEST or most == math.inf) or not abs(alpha) <= _LARGEST or not abs(offset) <= _LARGEST:
            raise ValueError(
                f"SwiGLU: limit={limit}, alpha={alpha}, offset={offset}, want a limit above 0 (None: none), and all of them within float32"
            )
        return super().__new__(cls, float(most), float(alpha), float(offset))

    def clamp(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up as the product has them: clamped, the offset added. Differentiable; at the limit the gradient is 1.

        Not torch.clamp, whose gradient there is 1 up to torch 2.11 and 0 in 2.15.
        """
        if self.limit < math.inf:
            gate = torch.where(gate > self.limit, self.limit, gate)
            up = torch.where(up > self.limit, self.limit, torch.where(up < -self.limit, -self.limit, up))
        return gate, up + self.offset if self.offset else up  # 0 would make -0 another zero

    def _inside(self, gate: torch.Tensor) -> torch.Tensor:
        """What the sigmoid is taken of."""
        return gate if self.alpha == 1.0 else self.alpha * gate

    def hidden(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """h of gate and up, float32."""
        gate, up = self.clamp(gate, up)
        return gate * sigmoid(self._inside(gate)) * up

    def backward(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of gate and up, from that of h, and h once more, all float32."""
        g, u = self.clamp(gate, up)
        inside = self._inside(g)
        share = sigmoid(inside)
        silu = g * share
        d_gate, d_up = grad * u * (share * (1.0 + inside * (1.0 - share))), grad * silu
        if self.limit < math.inf:
            d_gate, d_up = d_gate.masked_fill(gate > self.limit, 0.0), d_up.masked_fill(up.abs() > self.limit, 0.0)
        return d_gate, d_up, silu * u


def with_bias(x: torch.Tensor, bias: torch.Tensor | None, offs: torch.Tensor | None) -> torch.Tensor:
    """x (T, N) in float32 plus the bias (G, N) of each row's group, if there is one; rows behind the last group get none."""
    x = x.float()
    if bias is None:
        return x
    assert offs is not None, "an activation with a bias, but without the groups' ends"
    groups = torch.searchsorted(offs.long(), torch.arange(x.shape[0], device=x.device), right=True)  # (T,), G behind the last end
    rows = torch.cat((bias.float(), bias.new_zeros(1, bias.shape[1], dtype=torch.float32)))[groups]
    return torch.where((groups < offs.shape[0])[:, None], x + rows, x)


def gate_and_up(x: torch.Tensor, layout: str, bias: torch.Tensor | None, offs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up (T, H) float32 of x (T, 2H), its halves or its even and its odd columns, plus their group's bias."""
    if layout not in LAYOUTS:
        raise ValueError(f"swiglu: layout={layout!r}, want one of {', '.join(LAYOUTS)}")
    x = with_bias(x, bias, offs)
    return x.chunk(2, -1) if layout == "concatenated" else (x[..., 0::2], x[..., 1::2])  # type: ignore[return-value]


def joined(gate: torch.Tensor, up: torch.Tensor, layout: str) -> torch.Tensor:
    """(T, 2H) from two (T, H), the inverse of `gate_and_up`."""
    return torch.cat((gate, up), -1) if layout == "concatenated" else torch.stack((gate, up), -1).flatten(-2)


def sigmoid(gate: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-gate))


def _in_forms(value: torch.Tensor, forms: str, dtype: torch.dtype, scaling_mode: str) -> list[torch.Tensor]:
    """Float32 values as MX, as `dtype`, or both."""
    if forms not in FORMS:
        raise ValueError(f"swiglu_backward_quantize: forms {forms!r}, want one of {', '.join(FORMS)}")
    out = list(quantize(value, scaling_mode)) if "mx" in forms else []
    return [*out, value.to(dtype)] if "hp" in forms else out


def swiglu(
    x: torch.Tensor,
    layout: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> torch.Tensor:
    """h = silu(gate) * up in x's dtype, rounded once from float32.

    Args:
        x, layout, exact, bias, offs, scores, live, form: as in `swiglu_quantize`.

    Returns:
        (T, H), contiguous.
    """
    h = SwiGLU(*form).hidden(*gate_and_up(x, layout, bias, offs))
    return (h if scores is None else scores[:, None] * h).to(x.dtype)


def swiglu_quantize(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = silu(gate) * up, quantised 1x32 along H.

    Args:
        x: (T, 2H) bf16 or float32, H a multiple of 32, any strides.
        layout: "concatenated" (gate in columns 0..H-1, up behind) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: "rceil" or "floor".
        exact: with IEEE's division and the exact exp. Here always so; a GPU takes the faster instructions unless it is set.
        bias: (G, 2H) bf16 or float32 in x's layout, added to the rows of each group; rows behind the last group get none.
        offs: (G,) int32 or int64 END rows of the groups, needed with a bias.
        scores: (T,) float32, factors of h's rows.
        live: (1,) int32, 0 or a multiple of 32: how many rows are wanted; the others are not defined. Without effect here.
        form: limit, alpha and offset as in `SwiGLU`; those that are not given are plain SwiGLU's.

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    h = SwiGLU(*form).hidden(*gate_and_up(x, layout, bias, offs))
    return quantize(h if scores is None else scores[:, None] * h, scaling_mode)


def swiglu_quantize_both(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`swiglu_quantize`, and x as it came (without its bias) in MX, for a backward that reads it from there.

    Returns:
        h's qdata (T, H) and scale (T, H/32); x's qdata (T, 2H) float8_e4m3fn and scale (T, 2H/32) float8_e8m0fnu in x's layout.
    """
    return (*swiglu_quantize(x, layout, scaling_mode, exact, bias, offs, scores, form=form), *quantize(x, scaling_mode))


def swiglu_backward_quantize(
    dh: torch.Tensor,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    dx: str = "mx",
    h: str = "mx",
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> list[torch.Tensor]:
    """Gradient of x, and h once more, so that forward need not save it; each as its readers want it.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides.
        x, layout, scaling_mode, exact, bias, offs, scores: as in `swiglu_quantize`.
        dx, h: forms of the two results: "none", "mx" (1x32 along the columns), "hp" (x's dtype) or "mx+hp".
        x_scale: (T, 2H/32) float8_e8m0fnu where x is the qdata of MX rows: their values take x's place, and dh's dtype is "hp".
        live, form: as in `swiglu_quantize`.

    Returns:
        what was asked for, in this order, contiguous: dx's qdata (T, 2H) float8_e4m3fn and scale (T, 2H/32) float8_e8m0fnu in x's
        layout; dx (T, 2H) in x's dtype; h's qdata (T, H) and scale (T, H/32); h (T, H) in x's dtype; with scores at last their gradient
        (T,) float32.
    """
    dtype = x.dtype if x_scale is None else dh.dtype
    values = x if x_scale is None else dequantize(x, x_scale, torch.float32)
    how, (gate, up), grad = SwiGLU(*form), gate_and_up(values, layout, bias, offs), dh.float()
    d_gate, d_up, h_values = how.backward(grad if scores is None else scores[:, None] * grad, gate, up)
    if scores is not None:
        d_scores, h_values = (grad * h_values).sum(-1), scores[:, None] * h_values
    d_x = _in_forms(joined(d_gate, d_up, layout), dx, dtype, scaling_mode)
    return d_x + _in_forms(h_values, h, dtype, scaling_mode) + ([] if scores is None else [d_scores])

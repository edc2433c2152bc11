"""The activations between an expert's two products, in float32: the definition of the numbers, in plain torch on every device.

    swiglu   h = g s(g) u      with s(g) = 1 / (1 + exp(-g))      reference/swiglu.py, with its other forms
    geglu    h = g F(g) u      with F the normal distribution's cumulative function (the exact GELU, not its tanh form)
    relu2    h = max(a, 0)^2   of one projection a, no gate

>>> import torch
>>> activate(torch.tensor([[-1.0, 0.0, 3.0]]), "relu2").tolist()
[[0.0, 0.0, 9.0]]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mxep.reference.swiglu import SwiGLU, gate_and_up, joined, with_bias

ACTIVATIONS = ("swiglu", "geglu", "relu2")


def is_gated(activation: str) -> bool:
    """Whether the first product has a gate beside it, 2H columns for H. Raises ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is unknown, want one of {', '.join(ACTIVATIONS)}")
    return activation != "relu2"


def _normal(gate: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution's cumulative function and its density."""
    return 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5))), torch.exp(-0.5 * gate * gate) * (1.0 / math.sqrt(2.0 * math.pi))


def activate(
    x: Tensor,
    activation: str,
    layout: str = "concatenated",
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    swiglu: SwiGLU = SwiGLU(),  # noqa: B008  immutable
) -> Tensor:
    """h (T, H) float32 of x (T, 2H), or (T, H) for relu2; layout, bias and offs as in `swiglu_quantize`."""
    if not is_gated(activation):
        return with_bias(x, bias, offs).relu().square()
    gate, up = gate_and_up(x, layout, bias, offs)
    if activation == "swiglu":
        return swiglu.hidden(gate, up)
    return gate * _normal(gate)[0] * up


def activate_backward(
    dh: Tensor,
    x: Tensor,
    activation: str,
    layout: str = "concatenated",
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    swiglu: SwiGLU = SwiGLU(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """Gradient of x, of x's shape, and h once more, both float32, from dh (T, H), the gradient of h."""
    grad = dh.float()
    if not is_gated(activation):
        positive = with_bias(x, bias, offs).relu()
        return 2.0 * grad * positive, positive.square()
    gate, up = gate_and_up(x, layout, bias, offs)
    if activation == "swiglu":
        d_gate, d_up, h = swiglu.backward(grad, gate, up)
        return joined(d_gate, d_up, layout), h
    share, density = _normal(gate)
    slope = share + gate * density
    return joined(grad * up * slope, grad * (gate * share), layout), gate * share * up

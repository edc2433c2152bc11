"""SwiGLU with the MX quantiser behind it, forward and backward: the definition of the numbers.

Float32 throughout, one rounding per operation, in this order (g gate, u up, d gradient of h):

    s = 1 / (1 + exp(-g))      h = (g * s) * u
    dgate = (d * u) * (s * (1 + g * (1 - s)))      dup = d * (g * s)

and the results go to MX from float32, without a rounding to bf16 between.  Beyond |g| = 88, where exp overflows, s is 0 and h is zero.
"""

from __future__ import annotations

import torch

from mxep.reference.quantize import quantize

LAYOUTS = ("concatenated", "interleaved")


def _gate_up(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up (T, H) float32 of x (T, 2H): its halves, or its even and its odd columns."""
    if layout not in LAYOUTS:
        raise ValueError(f"swiglu: layout={layout!r}, want one of {', '.join(LAYOUTS)}")
    gate, up = x.chunk(2, -1) if layout == "concatenated" else (x[..., 0::2], x[..., 1::2])
    return gate.float(), up.float()


def _joined(gate: torch.Tensor, up: torch.Tensor, layout: str) -> torch.Tensor:
    """(T, 2H) from two (T, H), the inverse of `_gate_up`."""
    return torch.cat((gate, up), -1) if layout == "concatenated" else torch.stack((gate, up), -1).flatten(-2)


def _sigmoid(gate: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-gate))


def swiglu_quantize(x: torch.Tensor, layout: str, scaling_mode: str, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """h = silu(gate) * up, quantised 1x32 along H.

    Args:
        x: (T, 2H) bf16 or float32, H a multiple of 32, any strides.
        layout: "concatenated" (gate in columns 0..H-1, up behind) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: "rceil" or "floor".
        exact: with IEEE's division and the exact exp. Here always so; a GPU takes the faster instructions unless it is set.

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    gate, up = _gate_up(x, layout)
    return quantize(gate * _sigmoid(gate) * up, scaling_mode)


def swiglu_backward_quantize(
    dh: torch.Tensor, x: torch.Tensor, layout: str, scaling_mode: str, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of x, quantised 1x32 along 2H, and h once more, so that forward need not save it.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides.
        x, layout, scaling_mode, exact: as in `swiglu_quantize`.

    Returns:
        dx's qdata (T, 2H) and scale (T, 2H/32) in x's layout, h's qdata (T, H) and scale (T, H/32): float8_e4m3fn and float8_e8m0fnu,
        contiguous.
    """
    gate, up = _gate_up(x, layout)
    grad, sigmoid = dh.float(), _sigmoid(gate)
    silu = gate * sigmoid
    d_gate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return (*quantize(_joined(d_gate, grad * silu, layout), scaling_mode), *quantize(silu * up, scaling_mode))

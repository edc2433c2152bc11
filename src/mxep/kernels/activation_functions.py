"""The functions between an expert's two products, as Triton's kernels compute them. Twin: `reference.activation_functions`."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from mxep.reference.activation_functions import TANH_CUBIC, TANH_LINEAR

_LINEAR, _CUBIC, _HALF_ROOT = tl.constexpr(TANH_LINEAR), tl.constexpr(TANH_CUBIC), tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(-0.5 * math.log2(math.e))  # exp(-0.5 g^2) is 2 to this times g^2
# Abramowitz and Stegun, 7.1.26: 1 - erf(z) is nearly the polynomial t (A1 + t (A2 + ...)) exp(-z^2) of t = 1 / (1 + P z), z >= 0; here
# of z = |g| / sqrt(2), and half of it, which is the normal distribution's part beyond |g|.
_P = tl.constexpr(0.3275911 * math.sqrt(0.5))
_A1, _A2, _A3 = tl.constexpr(0.254829592 / 2), tl.constexpr(-0.284496736 / 2), tl.constexpr(1.421413741 / 2)
_A4, _A5 = tl.constexpr(-1.453152027 / 2), tl.constexpr(1.061405429 / 2)


@triton.jit
def _approx(value, INSTRUCTION: tl.constexpr):
    return tl.inline_asm_elementwise(INSTRUCTION + " $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _normal_share(gate, SIGMOID: tl.constexpr):
    """The normal distribution's cumulative function."""
    if SIGMOID == "exact":
        share = 0.5 * (1.0 + libdevice.erf(gate * _HALF_ROOT))
    elif SIGMOID == "fast":
        near = _approx(1.0 + _P * tl.abs(gate), "rcp.approx.ftz.f32")
        bell = _approx(_DENSITY * gate * gate, "ex2.approx.ftz.f32")
        beyond = near * (_A1 + near * (_A2 + near * (_A3 + near * (_A4 + near * _A5)))) * bell
        share = tl.where(gate < 0, beyond, 1.0 - beyond)
    else:
        share = 0.5 * (1.0 + tl.erf(gate * _HALF_ROOT))
    return share


@triton.jit
def _sigmoid(gate, SIGMOID: tl.constexpr):
    if SIGMOID == "exact":  # the device library's rcp_rn would flush subnormals
        total = 1.0 + libdevice.exp(-gate)
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    elif SIGMOID == "fast":  # 1 / (1 + 2^(-gate log2(e))) in four instructions; Triton's own exp and division take eleven
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [gate],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # Triton's interpreter has no device library
        return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def hidden(gate, up, SIGMOID: tl.constexpr, ACTIVATION: tl.constexpr, FORM: tl.constexpr):
    """h of gate and up, float32; FORM is SwiGLU's: limit or None, alpha, offset. SIGMOID: "exact", "fast" or "plain"."""
    if ACTIVATION == "swiglu":
        if FORM[0] is not None:
            gate = tl.minimum(gate, FORM[0], tl.PropagateNan.ALL)
            up = tl.clamp(up, -FORM[0], FORM[0], tl.PropagateNan.ALL)
        inside = gate
        if FORM[1] != 1:
            inside = FORM[1] * gate
        if FORM[2] != 0:
            up += FORM[2]
        h = gate * _sigmoid(inside, SIGMOID) * up
    elif ACTIVATION == "geglu":
        h = gate * _normal_share(gate, SIGMOID) * up
    elif ACTIVATION == "geglu_tanh":
        h = gate * _sigmoid(gate * (_LINEAR + _CUBIC * (gate * gate)), SIGMOID) * up
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(gate <= 0, 0.0, gate)
        h = positive * positive
    return h

"""The functions between an expert's two products: the definition of their numbers, in float32.

One rounding per operation, in this order (g gate, u up, a the one projection where there is no gate, d the gradient of h):

    swiglu       s = 1 / (1 + exp(-g))                      h = (g * s) * u
                 dgate = (d * u) * (s * (1 + g * (1 - s)))  dup = d * (g * s)
    geglu        s = 0.5 * (1 + erf(g * sqrt(1/2)))         h and dup as above, dgate = (d * u) * (s + g * p), with the density
                 p = exp(-0.5 * g * g) * (1 / sqrt(2 pi)): the exact GELU
    geglu_tanh   s = 1 / (1 + exp(-(g * (A + B * (g * g)))))     with A = sqrt(8 / pi), B = 0.044715 A: GELU's tanh form, by a sigmoid;
                 dgate = (d * u) * (s * (1 + (n * (A + 3 B * (n * n))) * (1 - s))), with n = g clamped to +-64
    relu2        p = a where a > 0, else 0                  h = p * p      da = 2 * (d * p)
    reglu        p = g where g > 0, else 0                  h = p * u      dgate = d * u where g > 0, else 0      dup = d * p

Below g = -88, where exp overflows, SwiGLU's s is 0 and h is zero.  Beyond 64 the s of geglu_tanh is 0 or 1, and nothing but the clamp
keeps an overflow from meeting that zero.

In other forms (`SwiGLU`: DeepSeek-V4 has a limit of 10, gpt-oss a limit of 7, alpha 1.702 and an offset of 1) g is the smaller of gate and
limit, u is up clamped to the limit on both sides plus the offset, alpha g replaces g in s and inside of dgate's bracket, and what was
clamped has no gradient:

    s = 1 / (1 + exp(-(alpha * g)))      h = (g * s) * u
    dgate = (d * u) * (s * (1 + (alpha * g) * (1 - s))) where gate <= limit      dup = d * (g * s) where |up| <= limit

alpha * g is clamped to float32's finite values in that bracket.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

ActivationName = Literal["swiglu", "geglu", "geglu_tanh", "relu2", "reglu"]
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)  # the index of a name is its number in functions.cuh
NORMAL_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)  # of the normal distribution at 0
TANH_LINEAR = math.sqrt(8.0 / math.pi)  # the sigmoid's argument in GELU's tanh form: g (this + the next g^2)
TANH_CUBIC = 0.044715 * TANH_LINEAR
TANH_REACH = 64.0  # beyond, the sigmoid of GELU's tanh form is 0 or 1
_LEAST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Function(Protocol):
    """An activation; `up` is None, and has no gradient, where the activation is not gated.

    Attributes:
        gated: whether it has a gate and an up, 2H columns for H of h.
    """

    gated: bool

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """h of gate and up, float32."""

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of gate and up, from that of h, and h once more, all float32."""

    def differentiable(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """h by torch's differentiable operations, in gate's dtype."""


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

    Examples:
        >>> gpt_oss = mxep.SwiGLU(limit=7.0, alpha=1.702, offset=1.0)
        >>> [value.item() for value in gpt_oss.clamp(torch.tensor(9.0), torch.tensor(-8.0))]  # gate 9, up -8
        [7.0, -6.0]
    """

    __slots__ = ()
    gated = True

    def __new__(cls, limit: float | None = None, alpha: float = 1.0, offset: float = 0.0) -> SwiGLU:
        most = math.inf if limit is None else limit
        if not all(isinstance(number, Real) and type(number) is not bool for number in (most, alpha, offset)):
            raise ValueError(f"SwiGLU: limit={limit!r}, alpha={alpha!r}, offset={offset!r}, want numbers, or None as the limit")
        if not (_LEAST <= most <= _LARGEST or most == math.inf) or not abs(alpha) <= _LARGEST or not abs(offset) <= _LARGEST:
            raise ValueError(
                f"SwiGLU: limit={limit}, alpha={alpha}, offset={offset}, want a limit above 0 (None: none), and all of them within float32"
            )
        return super().__new__(cls, float(most), float(alpha), float(offset))

    def clamp(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up as the product has them: clamped, the offset added. Differentiable; at the limit the gradient is 1.

        Not torch.clamp, whose gradient there is 1 up to torch 2.11 and 0 in 2.15.
        """
        if self.limit < math.inf:
            gate = torch.where(gate > self.limit, self.limit, gate)
            up = torch.where(up > self.limit, self.limit, torch.where(up < -self.limit, -self.limit, up))
        return gate, up + self.offset if self.offset else up  # 0 would make -0 another zero

    def _inside(self, gate: Tensor) -> Tensor:
        """The sigmoid's argument."""
        return gate if self.alpha == 1.0 else self.alpha * gate

    def _slope(self, inside: Tensor, share: Tensor) -> Tensor:
        """The derivative of gate times its share."""
        inside = inside if self.alpha == 1.0 else inside.clamp(-_LARGEST, _LARGEST)  # infinity times 1 - share, which is 0
        return share * (1.0 + inside * (1.0 - share))

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        gate, up = self.clamp(gate, up)
        return gate * _sigmoid(self._inside(gate)) * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        assert up is not None
        g, u = self.clamp(gate, up)
        inside = self._inside(g)
        share = _sigmoid(inside)
        silu = g * share
        d_gate, d_up = grad * u * self._slope(inside, share), grad * silu
        if self.limit < math.inf:
            d_gate, d_up = d_gate.masked_fill(gate > self.limit, 0.0), d_up.masked_fill(up.abs() > self.limit, 0.0)
        return d_gate, d_up, silu * u

    def differentiable(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        gate, up = self.clamp(gate, up)
        return (F.silu(gate) if self.alpha == 1.0 else gate * torch.sigmoid(self.alpha * gate)) * up


class _GEGLU:
    gated = True

    def _share(self, gate: Tensor) -> Tensor:
        """The factor of the gate, from 0 to 1."""
        return 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))

    def _slope(self, gate: Tensor, share: Tensor) -> Tensor:
        """The derivative of gate times its share."""
        return share + gate * (torch.exp(-0.5 * gate * gate) * NORMAL_DENSITY)

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        return gate * self._share(gate) * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        assert up is not None
        share = self._share(gate)
        gelu = gate * share
        return grad * up * self._slope(gate, share), grad * gelu, gelu * up

    def differentiable(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        return F.gelu(gate) * up


class _TanhGEGLU(_GEGLU):
    def _share(self, gate: Tensor) -> Tensor:
        return _sigmoid(gate * (TANH_LINEAR + TANH_CUBIC * (gate * gate)))

    def _slope(self, gate: Tensor, share: Tensor) -> Tensor:
        gate = gate.clamp(-TANH_REACH, TANH_REACH)
        return share * (1.0 + gate * (TANH_LINEAR + 3.0 * TANH_CUBIC * (gate * gate)) * (1.0 - share))

    def differentiable(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        # Beyond TANH_REACH GELU is gate or 0, and torch's own gradient is NaN from 1e20 on.
        inside = F.gelu(gate.clamp(-2 * TANH_REACH, 2 * TANH_REACH), approximate="tanh")
        return torch.where(gate.abs() > TANH_REACH, F.relu(gate), inside) * up


class _ReLU2:
    gated = False

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        return gate.masked_fill(gate <= 0, 0.0).square()

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        positive = gate.masked_fill(gate <= 0, 0.0)
        return 2.0 * (grad * positive), None, positive.square()

    def differentiable(self, gate: Tensor, up: Tensor | None) -> Tensor:
        return F.relu(gate).square()


class _ReGLU:
    gated = True

    def hidden(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        return gate.masked_fill(gate <= 0, 0.0) * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        assert up is not None
        positive = gate.masked_fill(gate <= 0, 0.0)
        return (grad * up).masked_fill(gate <= 0, 0.0), grad * positive, positive * up

    def differentiable(self, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        return F.relu(gate) * up


_OTHERS: dict[str, Function] = {"geglu": _GEGLU(), "geglu_tanh": _TanhGEGLU(), "relu2": _ReLU2(), "reglu": _ReGLU()}


def is_gated(activation: str) -> bool:
    """Whether the gate_up product has a gate: 2H columns for H. Raises ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is unknown, want one of {', '.join(ACTIVATIONS)}")
    return activation == "swiglu" or _OTHERS[activation].gated


@functools.lru_cache(maxsize=256)
def swiglu_of(form: tuple[float, ...]) -> SwiGLU:
    """The SwiGLU of these numbers; kept, since its checks cost the host as much as a launch."""
    return SwiGLU(*form)


def function_of(activation: str, form: Sequence[float] = ()) -> Function:
    """The function of that name; form: limit, alpha and offset of `SwiGLU`, those that are not given are plain SwiGLU's.

    Raises:
        ValueError: an unknown activation, no form of SwiGLU, or a form of it with another activation.
    """
    is_gated(activation)
    swiglu = swiglu_of(tuple(form))
    if activation == "swiglu":
        return swiglu
    if swiglu != SwiGLU():
        raise ValueError(f"activation: {activation!r} with {swiglu!r}, want 'swiglu' with a form of it")
    return _OTHERS[activation]


def differentiable(gate: Tensor, up: Tensor | None, activation: ActivationName, swiglu: SwiGLU) -> Tensor:
    """h (P, H) by torch's differentiable operations, in the dtype of gate and up (P, H); up is None where there is no gate."""
    return (swiglu if activation == "swiglu" else _OTHERS[activation]).differentiable(gate, up)


def _sigmoid(gate: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-gate))

"""Which of mxep's activations transformers' experts apply between their two GEMMs.

Where a model leaves its gate to transformers, its function says which.  But models write gates of their own: DeepSeek-V4 and GLM-5-Next
clamp gate and up, gpt-oss and MiniMax-M3 also scale what the sigmoid is taken of and add 1 to up.  The names of their constants say little
(Step-3.7 clamps after its sigmoid).  Such a gate is therefore run once, on both sides of its limits, and its values and gradients are
compared with the forms of SwiGLU that its constants would give.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from mxep.ops.activation.functions import ActivationName, SwiGLU, is_gated
from mxep.ops.activation.reference import LAYOUTS, concat_gate_up, gate_and_up

_CONSTANTS = {"limit": ("limit", "swiglu_limit"), "alpha": ("alpha", "swiglu_alpha")}
_OFFSETS = (0.0, 1.0)  # of up, which no constant tells
_PLAIN = (bool, int, float, str)
_NAMED: dict[str, ActivationName] = {  # by transformers
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
    "relu2": "relu2",
}
_ACTIVATIONS: dict[type, ActivationName] = {nn.SiLU: "swiglu", **{type(ACT2FN[key]): name for key, name in _NAMED.items()}}


class ExpertActivation(NamedTuple):
    """One of mxep's activations: how the first GEMM's output stores gate and up, and the form where it is SwiGLU."""

    activation: ActivationName
    layout: str
    swiglu: SwiGLU


def activation_of(experts: Any) -> ExpertActivation | None:
    """The activation between these experts' GEMMs if it is one of mxep's, else None; in a compiled graph a constant.

    A graph can read attributes of a module but not list them.  There a gate of their own is run with those that its code names, and is
    none of mxep's if it asks for more.
    """
    act_fn = getattr(experts, "act_fn", None)  # a gate of its own may have none
    name = _name_of(act_fn)
    if not experts.has_gate:
        return ExpertActivation(name, "concatenated", SwiGLU()) if name is not None and not is_gated(name) else None
    if "_apply_gate" in vars(experts):
        return None
    apply_gate = type(experts)._apply_gate
    if apply_gate is _default_apply_gate:
        return ExpertActivation(name, "concatenated", SwiGLU()) if name is not None and is_gated(name) else None
    if name != "swiglu" and act_fn is not None:
        return None
    if torch.compiler.is_compiling():
        read = ((name, getattr(experts, name, None)) for name in _names_in(apply_gate))
        found = _known(apply_gate, tuple((name, _specialized(value)) for name, value in read if isinstance(value, _PLAIN)))
        return None if found is None else ExpertActivation(found[0], found[1], SwiGLU(*map(float, found[2])))
    plain = tuple((name, value) for name, value in vars(experts).items() if isinstance(value, _PLAIN))
    others = tuple(name for name, value in vars(experts).items() if not isinstance(value, _PLAIN))
    others += (*experts._parameters, *experts._buffers, *experts._modules)
    return _find(apply_gate, plain, others)


def _name_of(act_fn: Any) -> ActivationName | None:
    """The activation with this function of a gate, or of the one projection."""
    if type(act_fn) is nn.GELU:
        return "geglu" if act_fn.approximate == "none" else "geglu_tanh"
    return "swiglu" if act_fn is F.silu else _ACTIVATIONS.get(type(act_fn))


@torch._dynamo.assume_constant_result
def _names_in(function: Any) -> tuple[str, ...]:
    """Names that the code of a Python function uses, and its strings, which may be names for getattr."""
    code = getattr(function, "__code__", None)
    strings = () if code is None else (name for name in code.co_consts if isinstance(name, str) and name.isidentifier())
    return () if code is None else (*code.co_names, *strings)


def _specialized(value: Any) -> Any:
    """The value as a constant, for which the graph is then made; a graph with dynamic sizes may have it as a symbol."""
    return next(iter({value: None}))


@torch._dynamo.assume_constant_result
def _known(apply_gate: Any, plain: tuple) -> tuple[ActivationName, str, tuple[float, ...]] | None:
    """`_find` without names of others, in plain tuples, of which a compiler can make constants."""
    found = _find(apply_gate, plain, None)
    return None if found is None else (found.activation, found.layout, tuple(found.swiglu))


@functools.cache
def _find(apply_gate: Any, plain: tuple, others: tuple | None) -> ExpertActivation | None:
    """The gate that has the values and gradients of this method of experts with such attributes; others: names of further ones that are no
    plain values, None: any name.
    """
    # A thread of its own has nothing that may be active around this forward: modes that count, fake or recompute operations, hooks on
    # saved tensors, autocast, a default device.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compare, apply_gate, dict(plain), others).result()


class _Experts:
    """Experts with nothing but plain attributes."""

    def __init__(self, plain: dict[str, Any], others: tuple[str, ...] | None) -> None:
        self.__dict__.update(plain, act_fn=F.silu)
        self._others = others

    def __getattr__(self, name: str) -> Any:
        if self._others is None or name in self._others:
            raise TypeError(f"{name} is no plain number, or not known here")
        raise AttributeError(name)


def _compare(apply_gate: Any, plain: dict[str, Any], others: tuple[str, ...] | None) -> ExpertActivation | None:
    given = {name: value for name, value in plain.items() if isinstance(value, (int, float))}
    numbers = {field: float(given[name]) for field, names in _CONSTANTS.items() for name in names if name in given}
    values = _values(numbers.get("limit", math.inf))
    at_limits = values.abs() == numbers.get("limit", math.inf)  # there either gradient is right, and torch's depends on its version
    known = ~(at_limits[:, None] | at_limits[None, :])
    forms, (gate, up) = _forms(numbers), torch.meshgrid(values, values, indexing="ij")
    for layout in LAYOUTS:
        gate_up = concat_gate_up(gate, up, layout).requires_grad_()
        try:
            found = apply_gate(_Experts(plain, others), gate_up)
            (gradient,) = torch.autograd.grad(found.sum(), gate_up)
        except Exception:  # it asks for more than these attributes: none of the forms
            return None
        for form in forms:
            d_gate, d_up, h = form.backward(torch.ones_like(gate), gate, up)
            assert d_up is not None
            pairs = [(h, found)]
            pairs += [(a[known], b[known]) for a, b in zip((d_gate, d_up), gate_and_up(gradient, layout), strict=True)]
            if all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs):
                return ExpertActivation("swiglu", layout, form)
    return None


def _forms(numbers: dict[str, float]) -> list[SwiGLU]:
    """The forms that such constants may stand for, and plain ones."""
    forms = []
    for offset, constants in itertools.product(_OFFSETS, (numbers, {})):
        with contextlib.suppress(ValueError):  # a limit of 0, say, which is that of no form
            forms.append(SwiGLU(**constants, offset=offset))
    return forms


def _values(limit: float) -> Tensor:
    """(N,) float32, for gate and for up: around zero, around the limit, and far beyond it."""
    near, far = torch.linspace(-3.0, 3.0, 25, dtype=torch.float32), torch.tensor([-80.0, -20.0, 20.0, 80.0, 1e3], dtype=torch.float32)
    return torch.cat((near, far) if limit == math.inf else (near, near * limit, near.sign()[::24] * limit, far))

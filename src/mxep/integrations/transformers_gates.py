"""Which form of SwiGLU the gate of transformers' experts is, found by what it computes.

Models write gates of their own: DeepSeek-V4 and GLM-5-Next clamp gate and up, gpt-oss and MiniMax-M3 also scale what the sigmoid is taken
of and add 1 to up.  The names of their constants say little (Step-3.7 clamps behind its sigmoid), so a gate is run, on values on both sides
of its limits, beside the form that its constants would give.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from mxep.reference.activation import activate
from mxep.reference.swiglu import SwiGLU, joined

_CONSTANTS = {"limit": ("limit", "swiglu_limit"), "alpha": ("alpha", "swiglu_alpha")}
_OFFSETS = (0.0, 1.0)  # of up, which no constant tells


def layout_of(experts: Any) -> str:
    """How the experts' first product joins gate and up."""
    return "concatenated" if experts.is_concatenated else "interleaved"


def swiglu_of(experts: Any) -> SwiGLU | None:
    """The form of SwiGLU that these experts' gate is, None for another one; in a compiled graph a constant."""
    if not experts.has_gate:
        return None
    act_fn = getattr(experts, "act_fn", None)  # a gate of its own may have none
    silu = act_fn is F.silu or isinstance(act_fn, (SiLUActivation, nn.SiLU))
    if type(experts)._apply_gate is _default_apply_gate:
        return SwiGLU() if silu else None
    if act_fn is not None and not silu:
        return None
    given = {name: getattr(experts, name) for names in _CONSTANTS.values() for name in names if hasattr(experts, name)}
    if not all(isinstance(value, (int, float)) for value in given.values()):
        return None
    return _swiglu_of_gate(type(experts), layout_of(experts), tuple(given.items()))


@torch._dynamo.assume_constant_result
def _swiglu_of_gate(kind: type, layout: str, given: tuple[tuple[str, float], ...]) -> SwiGLU | None:
    return _find(kind, layout, given)


@functools.cache
def _find(kind: type, layout: str, given: tuple[tuple[str, float], ...]) -> SwiGLU | None:
    """The form that has the values of this class' `_apply_gate`, with constants of these names."""
    numbers = {field: value for field, names in _CONSTANTS.items() for name, value in given if name in names}
    gate_up = _gate_up(numbers.get("limit", 1.0), layout)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            found = kind._apply_gate(types.SimpleNamespace(act_fn=F.silu, **dict(given)), gate_up)  # type: ignore[attr-defined]
        except Exception:  # it asks for more than these constants: not one of the forms
            return None
        for offset, (limit, alpha) in itertools.product(_OFFSETS, {(numbers.get("limit"), numbers.get("alpha")), (None, None)}):
            form = SwiGLU(math.inf if limit is None else float(limit), 1.0 if alpha is None else float(alpha), offset)
            want = activate(gate_up, "swiglu", layout, swiglu=form)
            if form.limit > 0 and found.shape == want.shape and torch.allclose(found, want, rtol=1e-5, atol=1e-6):
                return form
    return None


def _gate_up(limit: float, layout: str) -> torch.Tensor:
    """(N, 2N) float32: each pair of values around zero, around the limit and far beyond it; a row has one gate and every up."""
    near = torch.linspace(-3.0, 3.0, 25)
    size = limit if limit < 1e4 else 1.0
    values = torch.cat((near, near * size, torch.tensor([-1.0, 1.0]) * size, torch.tensor([-80.0, -20.0, 20.0, 80.0, 1e3])))
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return joined(gate, up, layout)

"""`mxep bench swiglu`: SwiGLU and the other activations with the quantiser in the same pass, forward and backward, at memory's speed.

Timed in the fast form, which training takes, and SwiGLU in the exact form beside it.  The exact form is compared with the twin byte by
byte, the fast form with the exact one: every value within one step of e4m3, the high-precision ones within one of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mxep import reference
from mxep.bench.memory_bound import Mover, Tensors, checked_rows, memory_cases
from mxep.bench.registry import Case, Setting
from mxep.reference.activation_functions import ACTIVATIONS, SwiGLU, is_gated
from mxep.shapes import MX_BLOCK

_MODE = "rceil"
_TARGET = 0.90
_MX = 1 + 1 / MX_BLOCK  # bytes of a value
# what stands behind a function's name -> (forms of dx, forms of h): what backward writes for a wgrad from MX bytes, and for one from bf16
_BACKWARD = {"backward_quantize": ("mx", "mx"), "backward_hp_wgrad": ("mx+hp", "hp")}


class _Function(NamedTuple):
    """An activation as it is timed: how gate and up lie, and the form of SwiGLU."""

    activation: str
    layout: str = "concatenated"
    form: SwiGLU = SwiGLU()

    @property
    def options(self) -> dict[str, Any]:
        return {"activation": self.activation, "form": self.form}

    @property
    def parts(self) -> int:
        """Columns of x for one of h."""
        return 1 + is_gated(self.activation)

    @property
    def share(self) -> float:
        """How far the fast form may be from the exact one, beside a rounding step: of a row's largest value, where erf is a polynomial."""
        return 2.0**-20 if self.activation == "geglu" else 0.0


_SWIGLU = _Function("swiglu")
# (name, suffix) of its arms -> the function
_FUNCTIONS = {
    ("swiglu", ""): _SWIGLU,
    ("swiglu", "_interleaved"): _Function("swiglu", "interleaved"),
    ("swiglu", "_gpt_oss"): _Function("swiglu", "interleaved", SwiGLU(7.0, 1.702, 1.0)),
    **{(name, ""): _Function(name) for name in ACTIVATIONS[1:]},
}


def cases(setting: Setting) -> Iterator[Case]:
    """(T, 2H) bf16 in, (T, H) in MX out; (T, H) and (T, 2H) in, (T, 2H) and (T, H) out; without a gate H for 2H."""

    def movers_of(T: int, H: int) -> tuple[str, dict[str, Mover]]:
        generator = torch.Generator(setting.device).manual_seed(0)
        both = torch.randn(T, 2 * H, device=setting.device, dtype=torch.bfloat16, generator=generator)
        dh = torch.randn(T, H, device=setting.device, dtype=torch.bfloat16, generator=generator)
        movers = {}
        for (name, suffix), how in _FUNCTIONS.items():
            x = both if how.parts == 2 else both.view(2 * T, H)[:T]
            movers[f"{name}_quantize{suffix}"] = _forward(x, how, False)
            movers |= {f"{name}_{stage}{suffix}": _backward(dh, x, how, forms, False) for stage, forms in _BACKWARD.items()}
        movers["swiglu_quantize_exact"] = _forward(both, _SWIGLU, True)
        movers |= {f"swiglu_{stage}_exact": _backward(dh, both, _SWIGLU, forms, True) for stage, forms in _BACKWARD.items()}
        return "swiglu_quantize", movers

    for case in memory_cases(setting, movers_of, few=True):
        yield replace(case, shape={"T": case.shape["T"], "H": case.shape["D"]})


def _forward(x: torch.Tensor, how: _Function, exact: bool) -> Mover:
    T, H, few = x.shape[0], x.shape[1] // how.parts, x[: checked_rows(x.shape[0])]

    def run(exact: bool, rows: torch.Tensor) -> Tensors:
        return torch.ops.mxep.activate_quantize(rows, how.layout, _MODE, exact, **how.options)

    def twin() -> Tensors:
        return reference.activate_quantize(few, how.layout, _MODE, **how.options)

    return _mover(run, x, few, twin, exact, T * H * (2 * how.parts + _MX), how.share)


def _backward(dh: torch.Tensor, x: torch.Tensor, how: _Function, forms: tuple[str, str], exact: bool) -> Mover:
    T, H = dh.shape
    few = x[: checked_rows(T)]

    def run(exact: bool, rows: torch.Tensor) -> Tensors:
        return tuple(torch.ops.mxep.activate_backward(dh[: rows.shape[0]], rows, how.layout, _MODE, exact, *forms, **how.options))

    def twin() -> Tensors:
        return tuple(reference.activate_backward(dh[: few.shape[0]], few, how.layout, _MODE, True, *forms, **how.options))

    written = sum(columns * (_MX * ("mx" in kind) + 2 * ("hp" in kind)) for columns, kind in zip((how.parts, 1), forms, strict=True))
    return _mover(run, x, few, twin, exact, T * H * (2 + 2 * how.parts + written), how.share)


def _mover(
    run: Callable[[bool, torch.Tensor], Tensors],
    x: torch.Tensor,
    few: torch.Tensor,
    twin: Callable[[], Tensors],
    exact: bool,
    moved_bytes: float,
    share: float,
) -> Mover:
    """`run(exact, rows)` over all rows. Its check: the exact form has the twin's bytes, the fast form lies beside the exact one."""
    if exact:
        return Mover(lambda: run(True, x), lambda: run(True, few), twin, round(moved_bytes), None)
    return Mover(
        lambda: run(False, x),
        lambda: (_beside(run(False, few), run(True, few), share),),
        lambda: (torch.ones((), dtype=torch.bool, device=few.device),),
        round(moved_bytes),
        _TARGET,
    )


def _beside(fast: Tensors, exact: Tensors, share: float = 0.0) -> torch.Tensor:
    """Whether every value of the fast form is within a rounding step of the exact one, and a share of its row's largest: () bool."""
    good = torch.ones((), dtype=torch.bool, device=fast[0].device)
    pairs = iter(zip(fast, exact, strict=True))
    for got, want in pairs:
        if got.dtype == torch.float8_e4m3fn:
            got_scale, want_scale = next(pairs)
            got, want = (reference.dequantize(q, s, torch.float32) for q, s in ((got, got_scale), (want, want_scale)))
            least = want.unflatten(-1, (-1, MX_BLOCK)).abs().amax(-1, keepdim=True) * 2**-15
            step = torch.maximum(want.abs() * 0.15, least.expand(*least.shape[:-1], MX_BLOCK).flatten(-2))
        else:
            got, want = got.float(), want.float()
            step = want.abs() * 2**-7 + 2.0**-90 + share * want.abs().amax(-1, keepdim=True)
        good &= ((got - want).abs() <= step).all()
    return good

"""`mxep bench swiglu`: SwiGLU with the quantiser in the same pass, forward and backward, at the speed of memory.

Timed in the fast form, which training takes, and in the exact form beside it.  The exact form is compared with the twin byte by byte,
the fast form with the exact one: every value within one step of e4m3, the high-precision ones within one of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from mxep import reference
from mxep.bench.memory_bound import Mover, Tensors, checked_rows, memory_cases
from mxep.bench.registry import Case, Setting
from mxep.reference.swiglu import SwiGLU
from mxep.shapes import MX_BLOCK

_MODE = "rceil"
_TARGET = 0.90
_MX = 1 + 1 / MX_BLOCK  # bytes of a value
# name -> (forms of dx, forms of h): what backward writes for a wgrad from MX bytes, and for one from bf16
_BACKWARD = {"swiglu_backward_quantize": ("mx", "mx"), "swiglu_backward_hp_wgrad": ("mx+hp", "hp")}

# suffix -> (how gate and up lie, the form of SwiGLU)
_KINDS = {"": ("concatenated", SwiGLU()), "_interleaved": ("interleaved", SwiGLU()), "_gpt_oss": ("interleaved", SwiGLU(7.0, 1.702, 1.0))}


def cases(setting: Setting) -> Iterator[Case]:
    """(T, 2H) bf16 in, (T, H) in MX out; (T, H) and (T, 2H) in, (T, 2H) and (T, H) out."""

    def movers_of(T: int, H: int) -> tuple[str, dict[str, Mover]]:
        generator = torch.Generator(setting.device).manual_seed(0)
        x = torch.randn(T, 2 * H, device=setting.device, dtype=torch.bfloat16, generator=generator)
        dh = torch.randn(T, H, device=setting.device, dtype=torch.bfloat16, generator=generator)
        movers = {}
        for suffix, (layout, form) in _KINDS.items():
            movers[f"swiglu_quantize{suffix}"] = _forward(x, layout, False, form)
            movers |= {f"{name}{suffix}": _backward(dh, x, layout, forms, False, form) for name, forms in _BACKWARD.items()}
        movers["swiglu_quantize_exact"] = _forward(x, "concatenated", True)
        movers |= {f"{name}_exact": _backward(dh, x, "concatenated", forms, True) for name, forms in _BACKWARD.items()}
        return "swiglu_quantize", movers

    for case in memory_cases(setting, movers_of, few=True):
        yield replace(case, shape={"T": case.shape["T"], "H": case.shape["D"]})


def _forward(x: torch.Tensor, layout: str, exact: bool, form: SwiGLU = _KINDS[""][1]) -> Mover:
    T, H, few = x.shape[0], x.shape[1] // 2, x[: checked_rows(x.shape[0])]

    def run(exact: bool, rows: torch.Tensor) -> Tensors:
        return torch.ops.mxep.swiglu_quantize(rows, layout, _MODE, exact, form=form)

    def twin() -> Tensors:
        return reference.swiglu_quantize(few, layout, _MODE, form=form)

    return _mover(run, x, few, twin, exact, T * H * (4 + _MX))


def _backward(dh: torch.Tensor, x: torch.Tensor, layout: str, forms: tuple[str, str], exact: bool, form: SwiGLU = _KINDS[""][1]) -> Mover:
    T, H = dh.shape
    few = x[: checked_rows(T)]

    def run(exact: bool, rows: torch.Tensor) -> Tensors:
        return tuple(torch.ops.mxep.swiglu_backward_quantize(dh[: rows.shape[0]], rows, layout, _MODE, exact, *forms, form=form))

    def twin() -> Tensors:
        return tuple(reference.swiglu_backward_quantize(dh[: few.shape[0]], few, layout, _MODE, True, *forms, form=form))

    written = sum(columns * (_MX * ("mx" in kind) + 2 * ("hp" in kind)) for columns, kind in zip((2, 1), forms, strict=True))
    return _mover(run, x, few, twin, exact, T * H * (6 + written))


def _mover(
    run: Callable[[bool, torch.Tensor], Tensors],
    x: torch.Tensor,
    few: torch.Tensor,
    twin: Callable[[], Tensors],
    exact: bool,
    moved_bytes: float,
) -> Mover:
    """`run(exact, rows)` over all rows. Its check: the exact form has the twin's bytes, the fast form lies beside the exact one."""
    if exact:
        return Mover(lambda: run(True, x), lambda: run(True, few), twin, round(moved_bytes), None)
    return Mover(
        lambda: run(False, x),
        lambda: (_beside(run(False, few), run(True, few)),),
        lambda: (torch.ones((), dtype=torch.bool, device=few.device),),
        round(moved_bytes),
        _TARGET,
    )


def _beside(fast: Tensors, exact: Tensors) -> torch.Tensor:
    """Whether every value of the fast form is within a rounding step of the exact one: () bool."""
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
            step = want.abs() * 2**-7 + 2.0**-90
        good &= ((got - want).abs() <= step).all()
    return good

"""Launches of Triton kernels whose compiled variant is found at once: Triton's own search costs the host several times its launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime import driver

_INT32 = 2**31  # the first number that it does not hold
_CONSTANT, _PLAIN, _SPECIALISED = "constant", "plain", "specialised"

# Products are contracted with sums unless a kernel says no: it changes bits, and Triton changes its default (on to 3.9, off from 3.10).
_DEFAULTS = {"enable_fp_fusion": True}
# Compiled variants by kernel, GPU, options and what they know about their arguments.
_variants: dict[tuple[Any, ...], Any] = {}
# By kernel, which lives as long as its module; by its number, since Triton's hash of a kernel is one of its text.
_parameters: dict[int, tuple[tuple[str, str], ...]] = {}


def launch(kernel: Any, programs: int | tuple[int, int], arguments: dict[str, Any], **options: Any) -> None:
    """Run a kernel on the current stream of the current GPU, or under Triton's interpreter.

    Args:
        kernel: what `triton.jit` made.
        programs: how many, along one or two axes.
        arguments: all that it has by name, constants too; no floats but as constants.  options: `num_warps` and what else the compiler
            takes.
    """
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if not isinstance(kernel, triton.JITFunction):  # the interpreter
        kernel[grid](**arguments, **options)
        return
    # What a variant knows about an argument: a constant itself; a pointer's type and whether it is a multiple of 16, or that it is None; a
    # whole number's width, and unless it is a plain one whether it is a multiple of 16, or 1.  In place: a function costs as much again.
    values, known = [], [id(kernel), driver.active.get_current_device(), *options.values()]
    for name, kind in _parameters.get(id(kernel)) or _read_parameters(kernel):
        value = arguments[name]
        values.append(value)
        if kind is _CONSTANT or value is None:
            known.append(value)
        elif isinstance(value, torch.Tensor):
            known.append((value.dtype, value.data_ptr() % 16 == 0))
        else:
            wide = not -_INT32 <= value < _INT32
            known.append(wide if kind is _PLAIN else "1" if value == 1 else wide + 2 * (value % 16 == 0))
    key = tuple(known)
    variant = _variants.get(key)
    if variant is None:
        _variants[key] = kernel[grid](*values, **{**_DEFAULTS, **options})
    else:
        variant[grid](*values)


def _read_parameters(kernel: Any) -> tuple[tuple[str, str], ...]:
    """Names, and how much a variant knows about each."""
    kinds = (_CONSTANT if p.is_constexpr else _PLAIN if p.do_not_specialize else _SPECIALISED for p in kernel.params)
    _parameters[id(kernel)] = found = tuple(zip((p.name for p in kernel.params), kinds, strict=True))
    return found

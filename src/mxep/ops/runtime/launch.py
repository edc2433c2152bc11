"""Launches of Triton kernels whose compiled variant is found at once: Triton's own search costs the host several times its launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime import driver

_INT32 = range(-(2**31), 2**31)

# Products are contracted with sums unless a kernel says no: it changes bits, and Triton changes its default (on to 3.9, off from 3.10).
_DEFAULTS = {"enable_fp_fusion": True}
# Compiled variants by kernel, GPU, options and what they know about their arguments.
_variants: dict[tuple[Any, ...], Any] = {}


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
    names, facts = _parameters(kernel)
    values = [arguments[name] for name in names]
    known = tuple([fact(value) for fact, value in zip(facts, values, strict=True)])
    key = (id(kernel), driver.active.get_current_device(), *options.values(), known)
    variant = _variants.get(key)
    if variant is None:
        _variants[key] = kernel[grid](*values, **{**_DEFAULTS, **options})
    else:
        variant[grid](*values)


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], tuple[Callable[[Any], Any], ...]]:
    """Names, and what a compiled variant knows about each."""
    facts = (_same if p.is_constexpr else _plain if p.do_not_specialize else specialised for p in kernel.params)
    return tuple(p.name for p in kernel.params), tuple(facts)


def _same(value: Any) -> Any:
    return value


def _plain(value: int) -> bool:
    return value in _INT32


def specialised(value: torch.Tensor | int | None) -> Any:
    """What a variant knows about an argument that is no constant.

    A pointer's type and whether it is a multiple of 16; that it is None; a whole number's width, whether it is a multiple of 16, and 1.

    >>> specialised(48) == specialised(1024), specialised(48) == specialised(24), specialised(48) == specialised(48 << 32)
    (True, False, False)
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return value if value is None else (value in _INT32, value % 16 == 0, value == 1)

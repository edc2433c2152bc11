"""CUDA launchers of the operators (Triton and CUDA C++): the same names and signatures as `mxep.reference`.

They know no autograd and no ranks, and launch on the GPU of their first tensor, whichever is the current one.  Importing this module
imports no Triton: the file of a launcher is loaded on its first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from mxep.operators import LAUNCHERS

__all__ = [*LAUNCHERS]


def __getattr__(name: str) -> Callable:
    if name not in LAUNCHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(LAUNCHERS[name]), name)
    return found

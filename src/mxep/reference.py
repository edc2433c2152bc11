"""The PyTorch reference of every operator by name: the definition of the numbers, and the CPU path.

Slow and obvious on purpose.  `mxep.ops.kernels` has a launcher of the same name and signature for each of them; data movement and
quantisation agree byte for byte, GEMMs up to summation order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from mxep.operators import REFERENCES

__all__ = [*REFERENCES]


def __getattr__(name: str) -> Callable:
    if name not in REFERENCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(REFERENCES[name]), name)

"""Whole models, their presets, and the loss of their output projection."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxep.models.loss import linear_cross_entropy

__all__ = ["linear_cross_entropy"]


if not TYPE_CHECKING:  # a type checker that saw this function would take every name for one of the package's

    def __getattr__(name: str) -> Any:  # presets are read without torch
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("mxep.models.loss"), name)

"""The trainer, and `load_model`: from a run's checkpoint to its model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxep.train.loaded_model import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]


if not TYPE_CHECKING:  # a type checker that saw this function would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("mxep.train.loaded_model"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

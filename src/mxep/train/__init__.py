"""The trainer, `load_model`: from a run's checkpoint to its model, and the optimizer, for trainers of one's own too."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxep.train.adamw import AdamW
    from mxep.train.loaded_model import LoadedModel, load_model
    from mxep.train.optimizer_in_backward import OptimizerInBackward

__all__ = ["AdamW", "LoadedModel", "OptimizerInBackward", "load_model"]

_MODULES = {"AdamW": "adamw", "OptimizerInBackward": "optimizer_in_backward", "LoadedModel": "loaded_model", "load_model": "loaded_model"}


if not TYPE_CHECKING:  # a type checker that saw this function would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"mxep.train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Old names of public things: they work for two minor versions and warn. CONTRIBUTING.md has the policy."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn_deprecated(old: str, new: str, since: str) -> None:
    """Warn the caller of the function that calls this one: `old` is deprecated since version `since`, and `new` takes its place."""
    warnings.warn(f"{old}: deprecated since mxep {since}, renamed to {new}; use that", DeprecationWarning, stacklevel=3)


def renamed_attributes(module: str, names: Mapping[str, str], since: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module that keeps old names: `__getattr__ = renamed_attributes(__name__, {"Old": "New"}, "0.2")`.

    Raises:
        AttributeError: from the returned function, for a name that is not one of the old ones.
    """

    def getattr_of_module(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_deprecated(f"{module}.{name}", f"{module}.{names[name]}", since)
        return getattr(importlib.import_module(module), names[name])

    return getattr_of_module

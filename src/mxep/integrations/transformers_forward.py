"""Forwards of single modules, replaced so that torch.compile makes one graph for modules that are alike."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, function: Callable[..., Any], *options: Hashable) -> Callable[[], None]:
    """Let a module compute by `function(module, *options, *args, **kwargs)`; returns what undoes it.

    torch.compile looks at the function of a method, and modules that are alike have the same one here.  A `functools.partial` would be
    another object in each module: another graph for each layer, and after 8 of them none.
    """
    module.forward = types.MethodType(_method(function, *options), module)  # type: ignore[method-assign]
    return functools.partial(delattr, module, "forward")


@functools.cache
def _method(function: Callable[..., Any], *options: Hashable) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *options, *args, **kwargs)

    return forward

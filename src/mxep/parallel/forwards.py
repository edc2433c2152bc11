"""Replaces forwards of single modules: torch.compile makes one graph for modules that are alike, and they are pickled with the modules."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

_REPLACEMENT = "_mxep_replacement"  # attribute of a module


def replace_forward(module: nn.Module, function: Callable[..., Any], *options: Hashable) -> Callable[[], None]:
    """Let a module compute by `function(module, *options, *args, **kwargs)`; returns a function that undoes it.

    torch.compile looks at the function of a method, and modules that are alike have the same one here.  A `functools.partial` would be
    another object in each module: another graph for each layer, and after 8 of them none.
    """
    _Replacement(module, function, *options)
    return functools.partial(restore_forward, module)


def replaced_by(module: nn.Module) -> Callable[..., Any] | None:
    """The function of `replace_forward` that a module, or the one which it is a copy of, computes by; None without one."""
    replacement = vars(module).get(_REPLACEMENT)
    return None if replacement is None else replacement.function


def is_forward_wrapped(module: nn.Module) -> bool:
    """Whether something else has replaced the forward since `replace_forward`."""
    replacement = vars(module)[_REPLACEMENT]
    return getattr(vars(module).get("forward"), "__func__", None) is not _method(replacement.function, *replacement.options)


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`."""
    del module.forward, module._mxep_replacement


class _Replacement:
    """Replaces a module's forward, and does so again where the module is read from a pickle.

    A method is pickled as the attribute of its name, and there that would be the class's forward.  This object comes before it among the
    module's attributes, so it is read first.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], *options: Hashable) -> None:
        self.module, self.function, self.options = module, function, options
        for name in ("forward", _REPLACEMENT):  # earlier ones, since the order counts
            vars(module).pop(name, None)
        vars(module)[_REPLACEMENT] = self
        vars(module)["forward"] = types.MethodType(_method(function, *options), module)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return _Replacement, (self.module, self.function, *self.options)


@functools.cache
def _method(function: Callable[..., Any], *options: Hashable) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *options, *args, **kwargs)

    return forward

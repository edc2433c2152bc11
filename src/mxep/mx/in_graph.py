"""How the autograd functions of this package get into a compiled graph whole."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch._dynamo

_Function = TypeVar("_Function", bound=type[torch.autograd.Function])


def in_graph(function: _Function) -> _Function:
    """Class decorator: dynamo writes the autograd function into its graph instead of tracing into it.

    Its backward then meets MX gradients as they are.  Traced by dynamo, it would be compiled for plain gradients.
    """
    torch._dynamo.allow_in_graph(function)
    return function

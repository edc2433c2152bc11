"""How the autograd functions of this package get into a compiled graph whole."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch._dynamo
from torch._subclasses.functional_tensor import FunctionalTensor

from mxep.mx.tensor import dequantize_data

_Function = TypeVar("_Function", bound=type[torch.autograd.Function])


def in_graph(function: _Function) -> _Function:
    """Class decorator: dynamo writes the autograd function into its graph instead of tracing into it.

    Its backward then meets MX gradients as they are.  Traced by dynamo, it would be compiled for plain gradients.
    """
    torch._dynamo.allow_in_graph(function)
    return function


def enters_graph(rows: torch.Tensor) -> bool:
    """Whether `rows` is an input of the graph that is being compiled, seen from an autograd function's forward.

    A compiled backward must return a plain gradient for a plain graph input, so a function that makes or passes on MX gradients
    asks here, keeps the answer and calls `leave_graph`.
    """
    # The tracer gives an input that is no leaf outside a node named "Error", which nothing may run through.
    return isinstance(rows, FunctionalTensor) and (rows.grad_fn is None or type(rows.grad_fn).__name__ == "Error")


def leave_graph(grad: torch.Tensor, entered: bool) -> torch.Tensor:
    """The gradient for an input of a compiled graph: its values. Quantising them again gives the same values, so no result changes."""
    return dequantize_data(grad) if entered else grad

"""How the autograd functions of this package get into a compiled graph whole."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch._dynamo
from torch._subclasses.functional_tensor import FunctionalTensor

from mxep.mx.first_order import first_order
from mxep.mx.tensor import dequantize_data

_Function = TypeVar("_Function", bound=type[torch.autograd.Function])
_NODES: set[str] = set()  # autograd nodes whose backward takes an MX gradient as it is


def in_graph(function: _Function) -> _Function:
    """Class decorator: dynamo writes the autograd function into its graph instead of tracing into it.

    Its backward then gets MX gradients as they are.  Traced by dynamo, it would be compiled for plain gradients.  It is `first_order`.
    """
    torch._dynamo.allow_in_graph(first_order(function))
    _NODES.add(f"{function.__name__}Backward")
    return function


def enters_graph(rows: torch.Tensor) -> bool:
    """Whether the gradient of `rows` may reach an input of the graph that is being compiled, seen from an autograd function's forward.

    A compiled backward must return a plain gradient for a plain graph input.  An MX one surely gets no further than the function that
    made `rows` when that is one of ours; torch's own operators may hand it on as it is (add, clone), and inputs have no function at
    all.  So a function that creates or forwards MX gradients asks here, keeps the answer and calls `leave_graph`.
    """
    return isinstance(rows, FunctionalTensor) and type(rows.grad_fn).__name__ not in _NODES


def leave_graph(grad: torch.Tensor, entered: bool) -> torch.Tensor:
    """A gradient that may reach an input of a compiled graph: its values. Quantising them again changes no number."""
    return dequantize_data(grad) if entered else grad

"""Puts each autograd function of this package into compiled graphs as a whole."""

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

    Its backward then gets MX gradients as they are.  Traced by dynamo, it would be compiled for plain gradients.  The function also becomes
    `first_order`.
    """
    torch._dynamo.allow_in_graph(first_order(function))
    _NODES.add(f"{function.__name__}Backward")
    return function


def enters_graph(rows: torch.Tensor) -> bool:
    """Whether the gradient of `rows` may reach an input of the graph that is being compiled, seen from an autograd function's forward.

    A compiled backward must return a plain gradient for a plain graph input.  If a function of this package made `rows`, it takes the MX
    gradient, which goes no further.  Torch's own operators may pass it on as it is (add, clone), and graph inputs have no function at all.
    So a function that creates or passes on MX gradients calls this in forward, and `leave_graph` with the answer in backward.
    """
    return isinstance(rows, FunctionalTensor) and type(rows.grad_fn).__name__ not in _NODES


def leave_graph(grad: torch.Tensor, entered: bool) -> torch.Tensor:
    """The gradient, as a plain tensor if it may reach an input of a compiled graph. Quantising its values again changes no number."""
    return dequantize_data(grad) if entered else grad

"""The autograd functions of this package have a first derivative and no second one: asking for a second one is an error.

With `create_graph=True`, a backward of opaque operators returns gradients that no graph connects to the function's inputs.
`torch.autograd.once_differentiable` makes a second `.backward()` through them fail.  But `torch.autograd.grad(first, x)` runs only the
graph between `first` and x, and the function is not in it.  Where x is also reached in another way (a residual, a router), the second
derivative would lack the function's part without an error.
"""

from __future__ import annotations

import functools
from itertools import compress
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

_Function = TypeVar("_Function", bound=type[torch.autograd.Function])


def _problem(name: str) -> str:
    return (
        f"{name}: mxep was asked to differentiate this function twice, but it has a first derivative alone (in torch's words it is "
        "once_differentiable), and rounding to MXFP8 has no second one; compute what is differentiated twice in plain torch "
        "(torch.nn.Linear, torch.nn.functional.grouped_mm), or take differences of first gradients"
    )


def first_order(function: _Function) -> _Function:
    """Class decorator for an autograd function without a second derivative.

    In forward, an empty tensor is connected to the inputs that need a gradient, and holds none of their memory.  Under `create_graph=True`
    the gradients that backward returns are functions of that tensor and of the incoming gradients.  So every path of a second derivative,
    to any of the inputs, ends in the error.  A first derivative that nothing differentiates again is unchanged.  Forward-mode AD through
    backward, which the operators inside would drop, is an error at once.
    """
    forward, backward, problem = function.forward, function.backward, _problem(function.__name__.lstrip("_"))
    message = problem.encode()

    @functools.wraps(forward)
    def linked(ctx: Any, *args: Any) -> Any:
        sources = [*compress(args, ctx.needs_input_grad)]
        if sources:
            torch._C._set_grad_enabled(True)  # torch has switched it off for forward; a context manager would take four more calls
            try:
                ctx.first_order_inputs = torch._C._functions.DelayedError(message, 1 + len(sources))(torch.empty(0), *sources)[0]
            finally:
                torch._C._set_grad_enabled(False)
        return forward(ctx, *args)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        in_dual_level = forward_ad._current_level >= 0  # without one no tensor has a tangent
        if in_dual_level and any(isinstance(grad, torch.Tensor) and unpack_dual(grad).tangent is not None for grad in grads):
            raise RuntimeError(problem)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        came = [grad for grad in grads if isinstance(grad, torch.Tensor) and grad.requires_grad]
        made = [*(d for d in results if d is not None), ctx.first_order_inputs, *came]
        marked = iter(torch._C._functions.DelayedError(message, len(made))(*made))
        return tuple(None if d is None else next(marked) for d in results)

    function.forward, function.backward = staticmethod(linked), staticmethod(checked)  # type: ignore[assignment, method-assign]
    return function

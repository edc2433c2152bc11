"""An autograd function's forward and backward without autograd's engine, whose one thread per GPU cannot run the backwards of several ranks
at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """The context of forward and backward: torch's own methods, and the attributes that only the engine's node has."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self.to_save


class ByHand:
    """Replaces the function where `apply` is called. Each thread has calls of its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self._function: Any = function
        self._last = threading.local()

    def apply(self, *arguments: Any) -> Any:
        ctx = Context(tuple(isinstance(value, Tensor) and value.requires_grad for value in arguments))
        with torch.no_grad():
            outputs = self._function.forward(ctx, *arguments)
        self._last.ctx = ctx
        return outputs

    def backward_of_last(self) -> Callable[..., tuple]:
        """Backward of this thread's last `apply`, from gradients to gradients. It can be called once, and frees the saved tensors."""
        ctx = self._last.ctx
        del self._last.ctx

        def backward(*grads: Tensor | None) -> tuple:
            with torch.no_grad():
                found = self._function.backward(ctx, *grads)
            ctx.__dict__.clear()
            return found

        return backward

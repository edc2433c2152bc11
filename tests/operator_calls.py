"""Operators that run in a block of code, and the largest tensor that they return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCalls(TorchDispatchMode):
    """Context: records the operators that run in it.

    Args:
        wanted: whether a call is recorded, by its operator, arguments and result; None: every call.

    Attributes:
        names: in sequence, as "aten.mm.default".
    """

    def __init__(self, wanted: Callable[[Any, Sequence[Any], Any], object] | None = None) -> None:
        super().__init__()
        self.names, self._wanted = list[str](), wanted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if self._wanted is None or self._wanted(function, args, result):
            self.names.append(str(function))
        return result

    @property
    def counts(self) -> Counter[str]:
        """How often each of `short_names` ran."""
        return Counter(self.short_names())

    def short_names(self, namespace: str = "") -> list[str]:
        """Names without namespace and overload, of all operators or those of a namespace."""
        return [name.split(".")[1] for name in self.names if namespace in ("", name.split(".")[0])]


class LargestTensor(TorchDispatchMode):
    """Context: `size` is the number of values of the largest tensor that an operator returns, among those that are `wanted`."""

    def __init__(self, wanted: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.size, self._wanted = 0, wanted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **kwargs or {})
        for tensor in results if isinstance(results, tuple | list) else (results,):
            if isinstance(tensor, Tensor) and self._wanted(tensor):
                self.size = max(self.size, tensor.numel())
        return results

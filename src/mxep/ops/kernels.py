"""CUDA launchers of the operators (Triton and CUDA C++): the same names and signatures as `mxep.reference`.

They know no autograd and no ranks.  Importing this module imports no Triton: the file of a launcher is loaded on its first use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from mxep.operators import LAUNCHERS

__all__ = [*LAUNCHERS]


@functools.cache
def launcher(name: str) -> Callable:
    """The launcher of that name; loads its file, and with it Triton, on first use.

    It runs under the device of its first tensor: Triton launches on the current device, wherever the pointers point to.
    """
    launch = getattr(importlib.import_module(LAUNCHERS[name]), name)

    @functools.wraps(launch)
    def on_its_gpu(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if not first.is_cuda or first.device.index == torch._C._cuda_getDevice():  # without the checks of torch.cuda.current_device
            return launch(first, *rest, **options)
        with torch.cuda.device(first.device):
            return launch(first, *rest, **options)

    return on_its_gpu


def __getattr__(name: str) -> Callable:
    if name not in LAUNCHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return launcher(name)

"""Plans of launches: what a launcher checks and makes once for each combination of shapes, layouts, dtypes and devices.

A launcher looks up its plan (`functools.lru_cache`) by the `Like` of its operands and by facts about their strides.  A call then adds
addresses.  For narrow layers the host's time is most of a call, and a call of a Python function takes up to 3 microseconds of it.  So
`like` is a function in C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

Like = tuple[torch.Size, torch.dtype, torch.device]
KEPT_PLANS = 1024

like: Callable[[torch.Tensor], Any] = operator.attrgetter("shape", "dtype", "device")  # a tensor's `Like`

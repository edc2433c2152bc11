"""Weights quantised once per optimizer step instead of once per forward and backward.

Who steps says so: `WeightCache.advance` drops every byte that is kept.  Nothing about a weight itself can tell that its values are
others: FSDP's gathered parameter keeps its object, its `_version` and its memory from step to step.  So there is no cache unless a
trainer asks for one, `mxep.parallel.cache_quantized_weights` ties it to the optimizer and to load_state_dict, in-place edits of the
parameters themselves are noticed by their version, and in checking mode (always on a CPU) every use is compared with the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mxep.device import checking
from mxep.mx.weight_forms import Bytes, for_path, quantize_weight, quantize_weights

_Form = tuple[str, str, str, torch.dtype | None]  # mode, which, path, dtype


class _Kept(NamedTuple):
    """One quantised form of a weight, and what the weight was then."""

    qdata: torch.Tensor
    scale: torch.Tensor
    facts: tuple
    weights: tuple[torch.Tensor, ...]  # held where their addresses are facts: no other ones can come to lie there


def _local(parameter: torch.Tensor) -> torch.Tensor | None:
    """A DTensor's local tensor, None of a plain one."""
    return getattr(parameter, "_local_tensor", None)


def _versions(parameter: torch.Tensor) -> tuple[int, ...]:
    """Counts in-place edits of a parameter: a DTensor's own and those of its local tensor. FSDP's gathering is none."""
    local = _local(parameter)
    return (parameter._version,) if local is None else (parameter._version, local._version)


class WeightCache:
    """The quantised weights of one optimizer step.

    Attributes:
        step: how often `advance` was called.
        fills: how many times a weight was quantised for keeping, since the cache exists.
    """

    def __init__(self) -> None:
        self.step = 0
        self.fills = 0
        self._kept: dict[tuple[CachedWeight, _Form], _Kept] = {}

    def advance(self, *hook_arguments: Any) -> None:
        """Forget everything. To be called whenever weights have changed: after a step, after loading, after edits by hand.

        Takes and ignores what optimizers and modules hand to their hooks.
        """
        self.step += 1
        self._kept.clear()

    def nbytes(self) -> int:
        """Bytes of memory that the kept weights take now."""
        return sum(kept.qdata.nbytes + kept.scale.nbytes for kept in self._kept.values())

    def __reduce__(self) -> tuple:
        return WeightCache, ()  # a copy is empty, and nobody's weights have a place in it


class CachedWeight:
    """The place of one weight, or of several as one operand, in a `WeightCache`.

    A copy or a pickle of it is None: copied modules quantise their weights anew.

    Args:
        cache: where the bytes are kept.
        owner: the module that has the weight.
        names: of the parameters there.  In-place edits are noticed on those that are there now, sharded or whole, and on those that
            are there in use, gathered under FSDP.
    """

    def __init__(self, cache: WeightCache, owner: torch.nn.Module, *names: str) -> None:
        self.cache, self.owner, self.names = cache, owner, names
        self._between = [getattr(owner, name) for name in names]  # what they are outside of FSDP's forward and backward

    def quantized(self, weight: torch.Tensor, mode: str, which: str, path: str, dtype: torch.dtype | None = None) -> Bytes:
        """(qdata, scale) of `weight` (G, N, K) 1x32 along its last dimension, as a GEMM path reads it: kept or from now on kept.

        Args:
            weight: the values, in the layout of that use, any strides.
            mode: "rceil" or "floor".
            which: tells the layouts in which the weight is used apart.
            path: GEMM path, see `for_path`.
            dtype: to which the values are rounded before, as in `quantize_weight`; only where nothing is kept yet.

        Raises:
            ValueError: in checking mode, when the weight has other values than the kept bytes.
        """
        return self._find((weight,), (mode, which, path, dtype), lambda: for_path(quantize_weight(weight, mode, dtype), path))

    def joined(self, weights: tuple[torch.Tensor, ...], mode: str, which: str, path: str, dtype: torch.dtype | None = None) -> Bytes:
        """The same of what `quantize_weights` makes of one weight or of two. Raises ValueError as `quantized`."""
        return self._find(weights, (mode, which, path, dtype), lambda: for_path(quantize_weights(weights, mode, which, dtype), path))

    def _find(self, weights: tuple[torch.Tensor, ...], form: _Form, make: Callable[[], Bytes]) -> Bytes:
        if any(type(weight) not in (torch.Tensor, torch.nn.Parameter) for weight in weights):
            return make()  # a compiler's stand-in: nothing of it may stay
        # Another tensor may stand in a parameter's place (functional_call, a parametrization). FSDP's gathered ones change addresses.
        placed = () if any(_local(parameter) is not None for parameter in self._between) else weights
        facts = (
            *(weight.data_ptr() for weight in placed),
            *((weight.shape, weight.dtype, weight.device) for weight in weights),
            *(_versions(parameter) for parameter in self._between),
            *(_versions(getattr(self.owner, name)) for name in self.names),
        )
        kept = self.cache._kept.get((self, form))
        if kept is None or kept.facts != facts:
            # What evaluation keeps serves training too; leaving inference mode alone would switch gradients on.
            with torch.inference_mode(False), torch.no_grad():
                kept = _Kept(*make(), facts, tuple(weight.detach() for weight in placed))
            self.cache._kept[self, form] = kept
            self.cache.fills += 1
        elif checking(weights[0].device):
            self._check(kept, make())
        return kept.qdata, kept.scale

    def _check(self, kept: _Kept, now: Bytes) -> None:
        for old, new in zip((kept.qdata, kept.scale), now, strict=True):
            if not torch.equal(old.view(torch.uint8), new.view(torch.uint8)):
                where = f"{type(self.owner).__name__}.{' or '.join(self.names)}"
                raise ValueError(
                    f"WeightCache: {where} has other values than the bytes kept in step {self.cache.step}; "
                    "call WeightCache.advance() after every change of weights that is no optimizer step and no load_state_dict"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()

"""Weights quantised once per optimizer step instead of once per forward and backward.

A weight does not show that its values have changed: FSDP's gathered parameter keeps its object, its `_version` and its storage from step
to step, and fused optimizers change values without a new version.  So a cache exists only if a trainer creates one.  It is emptied

- after every step of every `torch.optim.Optimizer` of this process;
- after a load_state_dict, if `mxep.parallel.cache_quantized_weights` created it;
- when `WeightCache.advance` is called.

A weight is also quantised again if its versions or its storage show that it was edited or replaced.  In checking mode (always on a CPU)
every use is compared with the weight.

CUDA graphs: a capture has quantised forms of its own, apart from those of eager calls.  The graph quantises a weight at its first use, from
the weight's own address, and later uses in the same graph read these bytes.  So a replay reads the values that the weight has then.  A
graph does not read the forms of eager calls, whose addresses change after every step.  Eager calls do not read those of a graph, since the
kernels that a capture records do not run.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxep.device import capture_number, checking, is_capturing

Forms = tuple[torch.Tensor, ...]  # data and scales of a weight in one form or in both
FormKey = tuple[str, str, str, torch.dtype | None]  # scaling mode, names of the forms, GEMM path, dtype to which the values are rounded


PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}


class _CachedForm(NamedTuple):
    """One quantised form of a weight, and facts about the weight when it was made."""

    form: Forms
    facts: tuple
    storages: tuple[torch.UntypedStorage, ...]  # held, since their addresses are facts: no other storage gets one of these
    stream: int  # the handle of the stream that filled it
    filled: torch.cuda.Event | None  # None on a CPU

    def wait(self, device: torch.device) -> None:
        """Let the current stream, another one than `stream`, read the bytes after they were written, and before their memory is reused."""
        assert self.filled is not None
        here = torch.cuda.current_stream(device)
        here.wait_event(self.filled)
        for tensor in self.form:
            tensor.record_stream(here)


def _stream_handle(device: torch.device) -> int:
    """The current stream's handle; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor, without a view of it; a plain tensor itself."""
    return getattr(parameter, "_local_tensor", parameter)


def storage_id(parameter: torch.Tensor) -> int:
    """Identifies the storage of a parameter, or of a DTensor's local tensor: the address of torch's storage object, not of the values."""
    return _local(parameter).untyped_storage()._cdata


def _edits(parameter: torch.Tensor) -> tuple[int, int, int]:
    """What an in-place edit or a new storage of a parameter changes: its version, its local tensor's version, its storage.

    FSDP's gathering changes none of them.
    """
    return parameter._version, _local(parameter)._version, storage_id(parameter)


def share_versions(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: dict[str, Any]) -> None:
    """A hook of `state_dict()`: edits of the local tensors in a state dict, as `dcp.load` makes them, count as edits of the parameters'.

    The detached DTensors of a state dict share memory with the parameters, but their local tensors do not share versions.
    """
    for name, parameter in module.named_parameters(recurse=False):
        alias, local = state_dict.get(prefix + name), _local(parameter)
        if alias is None or local is parameter or _local(alias) is local:
            continue
        if storage_id(alias) == storage_id(local):  # not a copy, as on a CPU
            alias._local_tensor = local.detach()


class WeightCache:
    """The quantised weights of one optimizer step.

    Attributes:
        step: how often it was emptied.
        fills: how many quantised forms it has stored so far.
        captured: whether a CUDA graph has recorded a change of weights.  Its replays report nothing, so eager calls store nothing then.
    """

    def __init__(self) -> None:
        self.step = 0
        self.fills = 0
        self.captured = False
        self.weights: weakref.WeakSet[CachedWeight] = weakref.WeakSet()
        self._kept: dict[tuple[CachedWeight, FormKey], _CachedForm] = {}
        self._in_graph: dict[tuple[CachedWeight, FormKey], _CachedForm] = {}  # of capture number `_capture`
        self._capture = 0
        _watch_optimizers()
        _CACHES.add(self)

    def advance(self, *hook_arguments: Any) -> None:
        """Empty the cache. Call it after every change of weights that the cache does not notice (docs/training/parallelism.md).

        Takes and ignores the arguments that modules pass to their hooks.  During a capture, replays will repeat the change: from then on
        eager calls store nothing, and a warning says so.
        """
        self.step += 1
        self._kept.clear()
        self._in_graph.clear()
        for weight in self.weights:
            weight.find_parameters()
        if is_capturing() and not self.captured:
            self.captured = True
            warnings.warn(
                "WeightCache: a CUDA graph records an optimizer step (or a load_state_dict, or an advance()). Its replays change weights "
                "and do not report it, so weights are quantised in every eager call from now on, and kept inside of graphs alone; leave "
                "the step out of the graph, or set the cache's `captured` to True before the capture, if the graph is meant to train",
                stacklevel=2,
            )

    def serves(self) -> bool:
        """Whether forms may be read and stored now: in a capture, which has its own, and in eager calls unless a graph changes weights."""
        return not self.captured or is_capturing()

    def kept_on(self, device: torch.device) -> dict[tuple[CachedWeight, FormKey], _CachedForm]:
        """The forms that calls on the current stream share: those of the capture that it is in, else those of eager calls."""
        number = capture_number(device)
        if number != self._capture:  # nothing reads what another capture has kept
            self._in_graph.clear()
            self._capture = number
        return self._in_graph if number else self._kept

    def tensors(self) -> list[torch.Tensor]:
        """Data and scales of the weights that are kept now."""
        return [tensor for kept in (*self._kept.values(), *self._in_graph.values()) for tensor in kept.form]

    def nbytes(self) -> int:
        """Bytes of memory that the kept weights take now."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def __reduce__(self) -> tuple:
        return WeightCache, ()  # a copy is empty and has no weights


@runtime_checkable
class KeepsQuantized(Protocol):
    """A module that has weights which MXFP8 GEMMs read."""

    def keep_quantized(self, cache: WeightCache | None) -> None:
        """Quantise the weights once per step of `cache`; None: in every call."""


_CACHES: weakref.WeakSet[WeightCache] = weakref.WeakSet()


@torch.compiler.disable
def _after_optimizer_step(*_: Any) -> None:
    for cache in _CACHES:
        cache.advance()


@functools.cache
def _watch_optimizers() -> None:
    """Register one hook for all caches of the process. It sees every optimizer, also those that update the weights through copies."""
    register_optimizer_step_post_hook(_after_optimizer_step)


class CachedWeight:
    """The entry of one weight, or of several as one operand, in a `WeightCache`.

    A copy or a pickle of it is None: copied modules quantise their weights anew.

    Args:
        cache: where the bytes are stored.
        owner: the module that has the weight.
        names: of its parameters.  Edits of the parameters in use are noticed, and under FSDP edits of their shards too.

    Attributes:
        parameters: by name; under FSDP the sharded ones, which optimizers step.
    """

    def __init__(self, cache: WeightCache, owner: torch.nn.Module, *names: str) -> None:
        self.cache, self.owner = cache, owner
        self.parameters: dict[str, torch.Tensor] = {name: getattr(owner, name) for name in names}
        cache.weights.add(self)

    def find_parameters(self) -> list[torch.Tensor | None]:
        """Update `parameters` from the module, without FSDP's gathered parameters, which have no mesh or a smaller one.

        Returns the parameters in use; None for one that a parametrization makes, since reading it would make it.
        """
        used: list[torch.Tensor | None] = [self.owner._parameters.get(name) for name in self.parameters]
        for (name, known), now in zip(self.parameters.items(), used, strict=True):
            if now is not None and now is not known and getattr(known, "device_mesh", None) in (None, getattr(now, "device_mesh", None)):
                self.parameters[name] = now
        return used

    def _facts(self, weights: tuple[torch.Tensor, ...]) -> tuple:
        """Facts about the weights, which are equal as long as the weights show no change.

        They have storages and not addresses: another tensor in a parameter's place (functional_call, swap_tensors, a new Parameter) has
        another storage, while FSDP gathers into the same storage at changing addresses.
        """
        used = self.find_parameters()
        facts: list[tuple | None] = [(storage_id(w), w.storage_offset(), w.shape, w.stride(), w.dtype, w.device) for w in weights]
        for (name, parameter), now in zip(self.parameters.items(), used, strict=True):
            in_use = getattr(self.owner, name) if now is None else now
            facts += [_edits(parameter), None if in_use is parameter else _edits(in_use)]
        return tuple(facts)

    def find(self, weights: tuple[torch.Tensor, ...], key: FormKey, make: Callable[[], Forms]) -> Forms | None:
        """The weights' form for a key, from the cache.  A form that is not there is made and stored.

        Args:
            weights: as they are used, in any layout; one, or the parts of one operand.
            key: distinguishes the forms in which the weights are used.
            make: quantises the weights.

        Returns:
            what `make` returns; None if the cache does not serve, and for a compiler's fake tensors.

        Raises:
            ValueError: in checking mode, if the weights have other values than the kept form.
        """
        if not {type(weight) for weight in weights} <= PLAIN_TENSORS or not self.cache.serves():
            return None
        facts, device = self._facts(weights), weights[0].device
        shared = self.cache.kept_on(device)
        kept, stream = shared.get((self, key)), _stream_handle(device)
        if kept is None or kept.facts != facts:
            # What evaluation keeps serves training too; leaving inference mode alone would switch gradients on.
            with torch.inference_mode(False), torch.no_grad():
                form = make()
            held = tuple(tensor.untyped_storage() for tensor in (*weights, *map(_local, self.parameters.values())))
            filled = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            shared[self, key] = _CachedForm(form, facts, held, stream, filled)
            self.cache.fills += 1
            return form
        if kept.stream != stream:
            kept.wait(device)
        if checking(device) and shared is self.cache._kept:  # a capture computes nothing
            self._check(kept, make())
        return kept.form

    def _check(self, kept: _CachedForm, now: Forms) -> None:
        for old, new in zip(kept.form, now, strict=True):
            if not torch.equal(old.view(torch.uint8), new.view(torch.uint8)):
                where = f"{type(self.owner).__name__}.{' or '.join(self.parameters)}"
                raise ValueError(
                    f"WeightCache: {where} has other values than the bytes kept in step {self.cache.step}; "
                    "call WeightCache.advance() after every change of weights that is no optimizer step and no load_state_dict"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()

"""Replays calls that do the same on the device every time: their allocations and launches, without the Python code that decided on them.

For small layers the host's time is most of a call, and most of that is Python: checks, plans, choices of kernels.  All of it depends on
shapes, layouts and options alone.  `replayed` runs a function of tensors as it is at first, then records twice what it does on the device:
its allocations, its launches with their addresses, and its operators of torch.  If both recordings agree, later calls with tensors of the
same shapes and layouts repeat them on new memory.  A CUDA graph does the same with fixed addresses; here each call allocates its memory
from torch.

What a recording cannot repeat is noticed, and such calls run as they are: reads by the host, memory that the function was not given, work
on another stream, anything that differs from call to call.  So do calls that allocate much: the device takes longer than the host there.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mxep.device import checking, is_capturing
from mxep.mx.tensor import MXTensor
from mxep.mx.weight_cache import PLAIN_TENSORS
from mxep.ops.runtime import nvrtc
from mxep.ops.runtime.for_backward import ForBackward, PackedView, Packing
from mxep.ops.runtime.launch_graph import LaunchGraph
from mxep.ops.runtime.nvrtc import fill_bytes
from mxep.ops.runtime.recording import (
    VALUES,
    Allocation,
    CallRecorder,
    ForBackwardView,
    KernelLaunch,
    NotReplayableError,
    Operator,
    Step,
    TritonLaunch,
    View,
    maker,
    slots_of,
)
from mxep.shapes import round_up

_PLAIN_CALLS = 4  # calls before the first recording, which pays after some ten replays: rare shapes are never recorded
_RECORDINGS = 4  # at most, until two in a row agree
_MOST_BYTES = 4 << 30  # the most that a recorded call may allocate
_SPARE = 2  # memory that must be free for a recording, as a multiple of what the call allocates
_KEPT = 1024  # calls that are remembered, at most
_LARGE = 16 << 20  # bytes from which on memory is allocated at its first use and freed after its last one
_GRAPHS = 256  # of a run of launches, one for each set of addresses
_ALL_GRAPHS = 4096  # of this process; their memory is the driver's
_ALIGNED = 16  # bytes; kernels have variants for addresses that are multiples of it
_PART_BYTES = 512  # to which torch aligns memory
_TRITON_LAUNCH = "mxep.ops.runtime.launch"  # loads Triton, so only launchers import it
_log = logging.getLogger(__name__)
# Selective checkpointing's modes, of forward and of the recomputation; in a torch that names them otherwise, any mode.
_KEEPS_RESULTS = tuple(
    getattr(torch.utils.checkpoint, name, TorchDispatchMode) for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)
_like: Callable[[Tensor], tuple] = attrgetter("shape", "dtype", "device", "requires_grad")


# ---------------------------------------------------------------- sequences


class _Fill:
    """Fills the memory of a slot with zeros."""

    def __init__(self, allocation: Allocation) -> None:
        self.slots, self._of = {allocation.slot}, allocation

    def run(self, addresses: list[int], stream: int) -> None:
        fill_bytes(self._of.device, addresses[self._of.slot], 0, self._of.nbytes, stream)


_Launch = KernelLaunch | TritonLaunch | _Fill


class _Run:
    """Consecutive launches.  With the addresses of an earlier call they run as one CUDA graph.

    Torch's allocator gives a training step the addresses of the step before, so this is the rule.
    """

    def __init__(self, launches: list[_Launch], device: torch.device, placed: dict[int, tuple[int, int]]) -> None:
        self.slots = {slot for launch in launches for slot in launch.slots}
        self._launches, self._device = launches, device
        self._placed = {slot: placed[slot] for slot in self.slots if slot in placed}
        bases = sorted({placed.get(slot, (slot, 0))[0] for slot in self.slots})
        self._at: Callable[[list[int]], Any] = itemgetter(*bases) if bases else lambda addresses: ()
        self._graphs: dict[Any, LaunchGraph | None] = {}
        self._graphable = len(launches) > 1

    def run(self, addresses: list[int], held: list[Any], stream: int) -> None:
        at = self._at(addresses)
        graph = self._graphs.get(at)
        if graph is None:
            for slot, (base, offset) in self._placed.items():
                addresses[slot] = addresses[base] + offset
            launch = partial(self._launch, addresses)
            if at not in self._graphs:
                if len(self._graphs) >= _GRAPHS:
                    self._graphs.pop(next(iter(self._graphs)), None)
                self._graphs[at] = None  # seen once
            elif self._graphable and LaunchGraph.alive < _ALL_GRAPHS:
                try:
                    self._graphs[at] = graph = LaunchGraph(self._device, launch)
                except RuntimeError as problem:
                    self._graphable = False
                    _log.warning("replayed launches run one by one, and not as a CUDA graph: %s", problem)
            if graph is None:
                return launch(stream)
        graph.run(stream)

    def _launch(self, addresses: list[int], stream: int) -> None:
        for launch in self._launches:
            launch.run(addresses, stream)


class _OperatorCall:
    """Calls an operator of torch."""

    def __init__(self, operator: Operator) -> None:
        self.slots, self._of, self._arguments = operator.slots, operator, maker(operator.arguments)

    def run(self, addresses: list[int], held: list[Any], stream: int) -> None:
        again, named = self._arguments(held)
        results = self._of.function(*again, **named)
        for slot, result in zip(self._of.results, results if self._of.several else (results,), strict=True):
            if slot is not None:
                held[slot], addresses[slot] = result, result.data_ptr()


def _place(steps: Sequence[Step], temporaries: dict[int, int]) -> tuple[dict[int, int], int]:
    """Offsets of slots (with their bytes) in one allocation, such that slots in use at the same time do not overlap; and its size."""
    first = {step.slot: i for i, step in enumerate(steps) if isinstance(step, Allocation)}
    last = {slot: i for i, step in enumerate(steps) for slot in step.slots}
    placed: dict[int, int] = {}
    for slot in sorted(temporaries, key=lambda slot: -temporaries[slot]):
        at_the_same_time = [other for other in placed if first[other] <= last[slot] and first[slot] <= last[other]]
        offset = 0
        for other in sorted(at_the_same_time, key=placed.__getitem__):
            if offset + temporaries[slot] <= placed[other]:
                break
            offset = max(offset, placed[other] + temporaries[other])
        placed[slot] = offset
    return placed, max((placed[slot] + temporaries[slot] for slot in placed), default=0)


class _Allocate:
    """Allocates a slot's own memory."""

    def __init__(self, allocation: Allocation) -> None:
        self.slots, self._slot = {allocation.slot}, allocation.slot
        self._of = partial(torch.empty_strided, allocation.shape, allocation.strides, dtype=allocation.dtype, device=allocation.device)

    def run(self, addresses: list[int], held: list[Any], stream: int) -> None:
        held[self._slot] = tensor = self._of()
        addresses[self._slot] = tensor.data_ptr()


def _packed(template: Any, slot: int, placed: dict[int, int], allocations: dict[int, Allocation]) -> Any:
    """A template of results whose tensors for backward are views of `slot`, as far as their slots are `placed` there."""
    if isinstance(template, ForBackwardView):
        parts, own = list[PackedView | int | None](), [View(slot)]
        for view in template.tensors:
            if view is not None and view.slot in placed:
                of = allocations[view.slot]
                dtype, shape, strides, offset = view.layout or (of.dtype, of.shape, of.strides, 0)
                parts.append(PackedView(placed[view.slot], of.nbytes, dtype, shape, strides, offset))
            else:
                parts.append(view if view is None else len(own) - 1)
                own += [] if view is None else [view]
        return ForBackwardView(tuple(own), template.rest, Packing(parts))
    if type(template) is dict:
        return {name: _packed(part, slot, placed, allocations) for name, part in template.items()}
    if isinstance(template, (tuple, list)) and slots_of(template):
        again = [_packed(part, slot, placed, allocations) for part in template]
        return type(template)(*again) if hasattr(template, "_fields") else type(template)(again)
    return template


class _Sequence:
    """A recorded call that can be replayed.

    Memory that only launches use is one allocation; with `packs`, what only backward reads is another.  Results, what operators of torch
    use, and everything large have memory of their own.  Large memory exists from its first use to its last one, as in the recorded call.
    """

    def __init__(self, recorder: CallRecorder, num_given: int, results: Any, packs: bool) -> None:
        template, steps = recorder.template(results, is_result=True), recorder.steps
        self.notes: Any = steps, template  # what two recordings must have in common
        self._new, self._device = len(recorder.slots) - num_given, recorder.device
        allocations = [step for step in steps if isinstance(step, Allocation)]
        used = set[int]().union(*(step.slots for step in steps if not isinstance(step, Allocation)))
        if any(a.nbytes and not a.zeros and a.slot not in used for a in allocations):
            raise NotReplayableError("it allocates memory that no launch or operator of the recording uses")
        large, kept = {a.slot for a in allocations if a.nbytes >= _LARGE}, slots_of(template)
        apart = large | {slot for step in steps if isinstance(step, Operator) for slot in step.slots}
        sizes = {a.slot: round_up(a.nbytes, _PART_BYTES) for a in allocations if a.slot not in apart}
        temporary = {slot: nbytes for slot, nbytes in sizes.items() if slot not in kept}
        only_saved = kept - slots_of(template, for_backward=False)
        packed = [slot for slot, nbytes in sizes.items() if nbytes and slot in only_saved] if packs else []
        offsets, self._bytes = _place(steps, temporary)
        ends = list(accumulate((sizes[slot] for slot in packed), initial=0))
        self._packed_bytes, offsets_packed = ends[-1], dict(zip(packed, ends, strict=False))
        of_packed, of_temporary = len(recorder.slots), len(recorder.slots) + 1  # their addresses come last
        placed = {slot: (of_temporary, offset) for slot, offset in offsets.items()}
        placed |= {slot: (of_packed, offset) for slot, offset in offsets_packed.items()}
        results = _packed(template, of_packed, offsets_packed, {a.slot: a for a in allocations}) if packed else template
        self._results, own = maker(results), (kept | apart) - set(packed)
        last = {slot: i for i, step in enumerate(steps) for slot in step.slots}
        first = [_Allocate(a) for a in allocations if a.slot in own - large]
        parts, launches = list[_Run | _OperatorCall | _Allocate](first), list[_Launch]()

        def end_run() -> None:
            if launches:
                parts.append(_Run(launches.copy(), self._device, placed))
                launches.clear()

        for i, step in enumerate(steps):
            if isinstance(step, Operator):
                end_run()
                parts.append(_OperatorCall(step))
            elif isinstance(step, Allocation):
                if step.slot in large:
                    end_run()
                    parts.append(_Allocate(step))
                if step.zeros and step.nbytes:
                    launches.append(_Fill(step))
            else:
                launches.append(step)
            if any(last[slot] == i for slot in step.slots & large - kept):
                end_run()
        end_run()
        stay = kept | set(temporary) | set(range(num_given))
        unused = {slot: i for i, part in enumerate(parts) for slot in part.slots if slot not in stay}
        self._parts = [(part, [slot for slot, at in unused.items() if at == i]) for i, part in enumerate(parts)]

    def run(self, given: _Given, stream: int) -> Any:
        packed = torch.empty(self._packed_bytes, dtype=torch.uint8, device=self._device) if self._packed_bytes else None
        held: list[Any] = [*given.tensors, *(None,) * self._new, packed]
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        addresses = [*given.addresses, *(0,) * self._new, 0 if packed is None else packed.data_ptr(), memory.data_ptr()]
        for part, unused in self._parts:
            part.run(addresses, held, stream)
            for slot in unused:
                held[slot] = None
        return self._results(held)


# ---------------------------------------------------------------- calls


class _Calls:
    """Calls of one function with like tensors: how often it ran, and what was recorded."""

    def __init__(self, packs: bool) -> None:
        self._packs = packs  # whether what only backward reads becomes one tensor
        self.plain, self.recordings, self._bytes = 0, 0, 0
        self.last: _Sequence | None = None
        self.sequence: _Sequence | None = None  # once two recordings agree
        self.problem: str | None = None  # of the last recording

    def run(self, function: Callable[[], Any], given: _Given, device: torch.device) -> Any:
        """Run it as it is; after a few calls, also record what it does."""
        if self.recordings >= _RECORDINGS:
            return function()
        if self.plain < _PLAIN_CALLS:
            self.plain += 1
            if self.plain < _PLAIN_CALLS:
                return function()
            before = _allocated(device)
            results = function()
            self._bytes = _allocated(device) - before
            return results
        self.recordings += 1
        # A recording holds all that the call allocates: it must not need more memory than there is.
        if self._bytes > _MOST_BYTES or self._bytes * _SPARE > _free(device):
            self.recordings = _RECORDINGS if self._bytes > _MOST_BYTES else self.recordings
            self.problem = f"it allocates {self._bytes} bytes"
            return function()
        return self._record(function, given)

    def _record(self, function: Callable[[], Any], given: _Given) -> Any:
        recorder = CallRecorder(given.tensors, _MOST_BYTES)
        nvrtc.recorders.append(recorder)
        try:
            with recorder:
                results = function()
        finally:
            nvrtc.recorders.remove(recorder)
        self.problem = recorder.problem
        last, self.last = self.last, None
        if recorder.problem is None:
            try:
                sequence = _Sequence(recorder, len(given.tensors), results, self._packs)
                agrees = last is not None and last.notes == sequence.notes
            except Exception as problem:  # the call itself is done
                self.problem = str(problem) if isinstance(problem, NotReplayableError) else repr(problem)
            else:
                if agrees:
                    sequence.notes, self.sequence = None, sequence
                else:
                    self.last = sequence
        return results


_calls: dict[tuple, _Calls] = {}


def _allocated(device: torch.device) -> int:
    """Bytes that were allocated since the process began, whether they are free again or not."""
    return torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0) if device.type == "cuda" else 0


def _free(device: torch.device) -> int:
    """Bytes of memory that can be allocated; without a bound for a CPU."""
    if device.type != "cuda":
        return 1 << 62
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class _Given:
    """The tensors of a call, and the facts about its arguments that its function may depend on: all but their values.

    Raises KeyError for an argument that cannot be replayed.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []
        self._first: dict[int, int] = {}  # for each storage, which of them is the first there
        self._facts: list[Any] = []
        self._add(arguments)
        self.facts = tuple(self._facts)

    def _add(self, parts: Sequence[Any]) -> None:
        tensors, addresses, add = self.tensors, self.addresses, self._facts.append
        for part in parts:
            kind = type(part)
            if part is None:
                add(None)
            elif kind in PLAIN_TENSORS:
                address, number = part.data_ptr(), len(tensors)
                first = self._first.setdefault(part.untyped_storage()._cdata, number) if address else number  # 0: it is empty
                tensors.append(part)
                addresses.append(address)
                # Tensors in one storage: how far they are from each other.
                place = address % _ALIGNED if first == number else (first, address - addresses[first])
                add((_like(part), part.stride(), part.storage_offset() == 0, place))
            elif kind in VALUES:
                add((kind, part, math.copysign(1.0, part)) if kind is float else (kind, part))  # True is no 1
            elif kind is ForBackward:
                add((kind, part.packing))
                self._add((part.kept, part.rest) if part.packing is None else part.kept)
            elif kind is MXTensor:
                add((kind, part.orig_dtype))
                self._add((part.qdata, part.scale))
            elif isinstance(part, (tuple, list)):
                add((kind, len(part)))
                self._add(part)
            else:
                raise KeyError(kind)


def _runs_on(device: torch.device) -> bool:
    """Whether a device is the current GPU."""
    return device.type == "cuda" and device.index == nvrtc.current_gpu()


def _cannot_replay_now(device: torch.device) -> bool:
    """Whether a mode, a profiler or a hook has to see each operator, gradients or a graph are recorded, or values are checked."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()))
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or torch.is_grad_enabled()
        or is_capturing()
        or checking(device)
        or ((triton := sys.modules.get(_TRITON_LAUNCH)) is not None and triton.has_launch_hooks())
    )


def writable(result: Tensor) -> Tensor:
    """What an operator has returned, for writes in place: a copy under selective checkpointing, else the tensor itself.

    Selective checkpointing holds the results that its policy keeps.  Backward would read from them what is written here.
    """
    if not torch._C._len_torch_dispatch_stack() or type(result) is not Tensor:
        return result
    return result.clone() if any(isinstance(mode, _KEEPS_RESULTS) for mode in _get_current_dispatch_mode_stack()) else result


def replayed(function: Callable[..., Any], options: Hashable, *arguments: Any) -> Any:
    """`function(options, *arguments)`, replayed if earlier calls with tensors of the same shapes and layouts were recorded.

    Args:
        function: works on the device alone, on the current stream, without gradients; what it does and returns depends on its options and
            on `_Given.facts` of its tensors.  It launches by `Kernel.run`, `mxep.ops.runtime.launch.launch` or operators of torch, or
            calls `nvrtc.unrecorded`.  It writes into no argument that another argument's memory overlaps.  It is the same object
            in every call.  A forward may return a `ForBackward`, which its backward takes.
        options: what else it reads; options that are equal are of the same types too.
        arguments: tensors, MX tensors, numbers, and tuples and lists of them; the first is a tensor.

    Returns:
        the function's results: the same types, and other objects that depend on the options alone.
    """
    device = arguments[0].device
    if torch.compiler.is_compiling() or not _runs_on(device) or _cannot_replay_now(device):
        return function(options, *arguments)
    packs = torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # hooks want the same tensors in every call
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    try:
        given = _Given(arguments)
    except KeyError:
        return function(options, *arguments)
    key = function, options, autocast, packs, given.facts
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _KEPT:  # rare shapes first
            for old in [k for k, known in [*_calls.items()] if known.sequence is None] or [next(iter(_calls))]:
                _calls.pop(old, None)
        call = _calls[key] = _Calls(packs)
    if call.sequence is not None:
        if not autocast:
            return call.sequence.run(given, torch._C._cuda_getCurrentRawStream(device.index))
        with torch.autocast(device.type, enabled=False):  # casts were recorded as operators
            return call.sequence.run(given, torch._C._cuda_getCurrentRawStream(device.index))
    return call.run(partial(function, options, *arguments), given, device)

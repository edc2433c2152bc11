"""Records what a call does on the device: allocations, launches and operators of torch, with slots in the place of memory."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.mx.tensor import MXTensor
from mxep.mx.weight_cache import PLAIN_TENSORS
from mxep.operators import forms_of
from mxep.ops.runtime import nvrtc
from mxep.ops.runtime.for_backward import ForBackward, Packing
from mxep.ops.runtime.nvrtc import Arguments, Kernel, PackedStructure, TensorMap

Where = tuple[int, int]  # a slot, which is the memory of one tensor, and bytes from that tensor's first one on

_KEPT = 64  # combinations of addresses whose arguments a launch keeps; launches with addresses that recur are in graphs
_LEAST_ADDRESS = 1 << 32  # of a GPU's memory; the other numbers that kernels are given are smaller
VALUES = {type(None), bool, int, float, str, torch.dtype, torch.Size, torch.device}
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}


class NotReplayableError(Exception):
    """A call does something that a recording cannot repeat."""


class View:
    """A tensor of a call: a slot's own one, or a view of it, given by dtype, shape, strides, and offset in values of that dtype."""

    def __init__(self, slot: int, *layout: Any) -> None:
        self.slot, self.layout = slot, layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and (self.slot, self.layout) == (other.slot, other.layout)

    __hash__ = None  # type: ignore[assignment]

    def of(self, held: list[Any]) -> Tensor:
        base: Tensor = held[self.slot]
        if not self.layout:
            return base
        dtype, shape, strides, offset = self.layout
        if base.dtype.itemsize != dtype.itemsize:  # as bytes, whole values of them
            flat = base.as_strided((base.numel(),), (1,)).view(torch.uint8)
            base = flat[: flat.numel() // dtype.itemsize * dtype.itemsize]
        base = base if base.dtype == dtype else base.view(dtype)
        return base.as_strided(shape, strides, base.storage_offset() + offset)


class _MXView(NamedTuple):
    """An `MXTensor` of a call."""

    dtype: torch.dtype
    qdata: View
    scale: View


class ForBackwardView(NamedTuple):
    """A `ForBackward` that a call returns: its tensors, and the rest."""

    tensors: tuple[View | None, ...]
    rest: Any
    packing: Packing | None = None


def slots_of(template: Any, for_backward: bool = True) -> set[int]:
    """The slots of a template's views; `for_backward` False leaves out those that only a backward reads."""
    if isinstance(template, View):
        return {template.slot}
    parts = template.values() if type(template) is dict else template if isinstance(template, (tuple, list)) else ()
    if isinstance(template, ForBackwardView) and not for_backward:
        return set()
    return set().union(*(slots_of(part, for_backward) for part in parts))


def _is_constant(template: Any) -> bool:
    """Whether every call may use the same object: it has no tensors, and it is immutable."""
    if isinstance(template, tuple):
        return all(map(_is_constant, template))
    return not isinstance(template, (View, list, dict))


def maker(template: Any) -> Callable[[list[Any]], Any]:
    """A function that makes a template's value from the slots' tensors: one Python expression, since a call for each part costs more."""
    known: dict[str, Any] = {"new_tuple": tuple.__new__, "MXTensor": MXTensor}

    def name_of(value: Any) -> str:
        name = f"known_{len(known)}"
        known[name] = value
        return name

    def expression(part: Any) -> str:
        kind = type(part)
        if kind is View:
            return f"{name_of(part.of)}(held)" if part.layout else f"held[{part.slot}]"
        if kind is _MXView:
            return f"MXTensor({expression(part.qdata)}, {expression(part.scale)}, {name_of(part.dtype)})"
        if kind is ForBackwardView:
            return f"new_tuple({name_of(ForBackward)}, ({expression(part.tensors)}, {name_of(part.rest)}, {name_of(part.packing)}))"
        if _is_constant(part):
            return name_of(part)
        if kind is dict:
            return "{" + "".join(f"{name_of(name)}: {expression(value)}, " for name, value in part.items()) + "}"
        parts = "".join(f"{expression(value)}, " for value in part)
        if kind is list:
            return f"[{parts}]"
        return f"({parts})" if kind is tuple else f"new_tuple({name_of(kind)}, ({parts}))"

    made: Callable[[list[Any]], Any] = eval(f"lambda held: {expression(template)}", known)
    return made


# ---------------------------------------------------------------- what a call does


class Allocation(NamedTuple):
    """An allocation, which is a slot of its own: zeros, or uninitialised."""

    slot: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    zeros: bool

    @property
    def slots(self) -> set[int]:
        return {self.slot}


class Operator(NamedTuple):
    """An operator of torch, its arguments as a template, and the slots of those of its results that have memory of their own."""

    function: Any
    arguments: Any
    results: list[int | None]
    several: bool

    @property
    def slots(self) -> set[int]:
        return slots_of(self.arguments) | {slot for slot in self.results if slot is not None}


class _LaunchArgument(NamedTuple):
    """An argument of a launch: its fixed part, how it is made from addresses, and where these are."""

    fixed: Hashable
    make: Callable[[list[int]], Any]
    places: tuple[Where, ...] = ()


class KernelLaunch:
    """A launch of a kernel that NVRTC compiled."""

    def __init__(self, kernel: Kernel, function: Any, device: int, blocks: int, parts: list[_LaunchArgument]) -> None:
        self._kernel, self._function, self._device, self._blocks, self._parts = kernel, function, device, blocks, parts
        self.slots = {slot for part in parts for slot, _ in part.places}
        self._kept: dict[tuple[int, ...], Arguments] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelLaunch) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> tuple:
        return id(self._kernel), self._device, self._blocks, [(part.fixed, part.places) for part in self._parts]

    def run(self, addresses: list[int], stream: int) -> None:
        at = tuple([addresses[slot] for slot in self.slots])
        arguments = self._kept.get(at)
        if arguments is None:
            if len(self._kept) == _KEPT:
                self._kept.clear()
            made = [part.make([addresses[slot] + offset for slot, offset in part.places]) for part in self._parts]
            arguments = self._kept[at] = Arguments(*made)
        config = nvrtc.launch_config(self._blocks, self._kernel.threads, self._kernel.shared_bytes, stream)
        self._kernel.launch_as(config, self._device, self._function, arguments.pointers)


class TritonLaunch:
    """A launch of a Triton kernel by its C function: the values, with 0 in the place of addresses, and where these are."""

    def __init__(
        self, function: Callable[..., None], grid: tuple[int, int], fixed: tuple, values: list[Any], places: list[tuple[int, Where]]
    ) -> None:
        self._function, self._grid, self._fixed, self._values, self._places = function, grid, fixed, values, places
        self.slots = {slot for _, (slot, _) in places}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TritonLaunch) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> tuple:
        return id(self._function), self._fixed[:1], self._grid, self._values, self._places

    def run(self, addresses: list[int], stream: int) -> None:
        values = self._values.copy()
        for i, (slot, offset) in self._places:
            values[i] = addresses[slot] + offset
        self._function(*self._grid, 1, stream, *self._fixed, *values)


Step = Allocation | Operator | KernelLaunch | TritonLaunch


# ---------------------------------------------------------------- recorder


class _Slot:
    """A tensor, and the range of addresses of its storage."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self.address, self.storage = tensor, tensor.data_ptr(), storage._cdata
        self.first = self.address - tensor.storage_offset() * tensor.element_size()
        self.end = self.first + storage.nbytes()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values are neighbours in memory, in any order of its dimensions."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() in (0, 1 + last)


def _layout(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class CallRecorder(TorchDispatchMode):
    """Records what a function does on the device, while it runs."""

    def __init__(self, tensors: Sequence[Tensor], most_bytes: int) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.problem: str | None = None
        self.steps: list[Step] = []
        self._left = most_bytes
        self.device = tensors[0].device
        self.slots = [_Slot(tensor) for tensor in tensors]  # held, so that no address is used twice
        self._num_given = len(tensors)
        self._own_results = set[int]()  # slots whose own tensors are results

    def unknown(self, what: str) -> None:
        """Ends the recording because of `what`, which cannot be repeated, and releases the memory that it holds."""
        self.problem = self.problem or what
        self.steps, self.slots = [], []

    def _add(self, tensor: Tensor) -> int:
        if tensor.device != self.device:
            raise NotReplayableError(f"memory of {tensor.device}")
        self.slots.append(_Slot(tensor))
        self._left -= tensor.untyped_storage().nbytes()
        if self._left < 0:
            raise NotReplayableError("it allocates much")
        return len(self.slots) - 1

    def where(self, address: int) -> Where | None:
        """The slot and offset of a device address; None for a number. Raises NotReplayableError for memory that no slot has."""
        if -_LEAST_ADDRESS < address < _LEAST_ADDRESS:
            return None
        found = [number for number, slot in enumerate(self.slots) if slot.first <= address < slot.end]
        if not found:
            raise NotReplayableError(f"memory at {address:#x}, which it was not given")
        if len({self.slots[number].storage for number in found}) > 1:  # as of DLPack: the next call may have them apart
            raise NotReplayableError(f"memory at {address:#x}, which several storages have")
        return found[0], address - self.slots[found[0]].address

    def view(self, tensor: Tensor, is_result: bool = False) -> View:
        """The tensor as a view of a slot.  A result that is another object than an argument, or than another result, stays another one."""
        storage, layout = tensor.untyped_storage()._cdata, _layout(tensor)
        of_storage = [number for number, slot in enumerate(self.slots) if slot.storage == storage]
        for number in of_storage:
            own = self.slots[number].tensor
            if layout == _layout(own) and (not is_result or tensor is own):
                self._own_results |= {number} if is_result else set()
                return View(number)
        if is_result and self._allocates_as(tensor, of_storage):
            return View(of_storage[0])
        for number in of_storage:
            base = self.slots[number].tensor
            first, same_size = base.storage_offset(), tensor.element_size() == base.element_size()
            if (same_size and layout[-1] >= first) or (_is_dense(base) and not first):
                return View(number, *layout[:-1], layout[-1] - first)
        raise NotReplayableError(f"a {tuple(tensor.shape)} {tensor.dtype} that is no view of what it was given or has made")

    def _allocates_as(self, result: Tensor, slots: list[int]) -> bool:
        """Give the memory of a result the result's own layout, so that no call makes a view of it; returns whether it has that now.

        It has if `slots`, those of its storage, are one allocation that the result fills, that no operator of torch uses, and that is not
        returned in its first layout.
        """
        of_operators = set[int]().union(*(step.slots for step in self.steps if isinstance(step, Operator)))
        if result.storage_offset() or not _is_dense(result) or self._own_results | of_operators >= set(slots):
            return False
        for i, step in enumerate(self.steps):
            if isinstance(step, Allocation) and [step.slot] == slots and step.nbytes == result.nbytes:
                self.steps[i] = step._replace(shape=result.shape, strides=result.stride(), dtype=result.dtype)
                self.slots[step.slot].tensor = result
                self._own_results.add(step.slot)
                return True
        return False

    # ---- operators of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not set(types) <= PLAIN_TENSORS:  # what it makes of its parts comes here too
            return NotImplemented
        if func.namespace == "mxep":  # its launcher: what that does is noted
            launcher = forms_of(func._schema.name.removeprefix("mxep::"))[args[0].device.type]
            with self:
                made = launcher(*args, **kwargs)
            return made if func._schema.returns else None
        made = func(*args, **kwargs)
        self._try(lambda: self._operator(func, args, kwargs, made))
        return made

    def _try(self, note: Callable[[], None]) -> None:
        """Run `note`, unless the recording has ended.  An error ends the recording, and not the call."""
        if self.problem is None:
            try:
                note()
            except NotReplayableError as problem:
                self.unknown(str(problem))
            except Exception as problem:
                self.unknown(repr(problem))

    def _operator(self, func: Any, args: tuple, kwargs: dict[str, Any], made: Any) -> None:
        if _reads_values(func, args):
            raise NotReplayableError(f"{func}, which reads values")
        name, several = func._schema.name.removeprefix("aten::"), isinstance(made, (tuple, list))
        results = made if several else (made,)
        if not all(isinstance(result, Tensor) for result in results):
            raise NotReplayableError(f"{name} returns no tensor")
        storages = {slot.storage for slot in self.slots}
        new = [result.untyped_storage()._cdata not in storages for result in results]
        if not any(new) and not func._schema.is_mutable:
            return  # views
        if not func._schema.is_mutable and (name in _ALLOCATIONS or (name in _ZEROS and made.is_contiguous())):
            return self._allocation(made, name in _ZEROS)
        given = self.template((args, kwargs))
        slots = [self._add(result) if is_new else None for result, is_new in zip(results, new, strict=True)]
        self.steps.append(Operator(func, given, slots, several))

    def _allocation(self, made: Tensor, zeros: bool) -> None:
        nbytes = made.untyped_storage().nbytes()
        self.steps.append(Allocation(self._add(made), made.shape, made.stride(), made.dtype, made.device, nbytes, zeros))

    def template(self, value: Any, is_result: bool = False) -> Any:
        """Arguments of an operator, or the function's results, with a `View` in place of each tensor."""
        kind = type(value)
        if isinstance(value, MXTensor):
            return _MXView(value.orig_dtype, *(self.view(part, is_result) for part in (value.qdata, value.scale)))
        if isinstance(value, Tensor):
            return self.view(value, is_result)
        if kind is ForBackward:
            assert not _has_tensors(value.rest)
            return ForBackwardView(tuple([self.template(part, is_result) for part in value.tensors()]), self.template(value.rest))
        if isinstance(value, (tuple, list)):
            parts = [self.template(part, is_result) for part in value]
            if kind is tuple and all(part is old for part, old in zip(parts, value, strict=True)):
                return value
            return kind(*parts) if hasattr(value, "_fields") else kind(parts)
        if kind is dict:
            return {name: self.template(part, is_result) for name, part in value.items()}
        if kind in VALUES or isinstance(value, (torch.layout, torch.memory_format)):
            return value
        if is_dataclass(kind) and kind.__dataclass_params__.frozen and not _has_tensors(value):  # type: ignore[attr-defined]
            return value
        raise NotReplayableError(f"a {kind.__name__}, which may differ from call to call")

    # ---- launches

    def kernel(self, kernel: Kernel, function: Any, blocks: int, arguments: Arguments | PackedStructure, own_stream: bool) -> None:
        """Records a launch by `Kernel.run`."""

        def note() -> None:
            if own_stream or isinstance(arguments, PackedStructure):
                raise NotReplayableError(f"{kernel.entry} on a stream of its own, or of a packed structure")
            parts = [self._part(argument) for argument in arguments.given]
            self.steps.append(KernelLaunch(kernel, function, self.device.index or 0, blocks, parts))

        self._try(note)

    def _part(self, argument: Any) -> _LaunchArgument:
        if isinstance(argument, Tensor):
            argument = argument.data_ptr()
        if argument is None or isinstance(argument, int):
            at = None if argument is None else self.where(argument)
            return _LaunchArgument(argument, lambda addresses: argument) if at is None else _LaunchArgument("address", itemgetter(0), (at,))
        if isinstance(argument, TensorMap):
            box, address, *layout = argument.made_of
            at = self.where(address)
            assert at is not None
            return _LaunchArgument((box, *layout), lambda addresses: nvrtc.tensor_map(box, addresses[0], *layout), (at,))
        found = [(byte, at) for byte, value in _words_of(argument) if (at := self.where(value)) is not None]
        kind, fixed = type(argument), bytearray(argument)
        for byte, _ in found:
            struct.pack_into("<Q", fixed, byte, 0)

        def make(addresses: list[int]) -> Any:
            content = bytearray(fixed)
            for (byte, _), address in zip(found, addresses, strict=True):
                struct.pack_into("<Q", content, byte, address)
            return kind.from_buffer_copy(content)

        return _LaunchArgument((bytes(fixed), *(byte for byte, _ in found)), make, tuple(at for _, at in found))

    def triton(self, function: Callable[..., None], grid: tuple[int, int], fixed: tuple, values: list[Any], tensors: list[int]) -> None:
        """Records a launch of a Triton kernel by its C function; `tensors`: which of its values are addresses."""

        def note() -> None:
            places = [(i, at) for i in tensors if (at := self.where(values[i])) is not None]
            template = list(values)
            for i, _ in places:
                template[i] = 0
            self.steps.append(TritonLaunch(function, grid, fixed, template, places))

        self._try(note)


def _has_tensors(value: Any) -> bool:
    if is_dataclass(value) and not isinstance(value, type):
        return any(_has_tensors(getattr(value, field.name)) for field in fields(value))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return isinstance(value, Tensor) or any(map(_has_tensors, parts))


def _reads_values(func: Any, args: tuple) -> bool:
    """Whether the host reads values in an operator, as for a result whose shape depends on them."""
    if func is torch.ops.aten.index.Tensor:  # by numbers it does not, by a mask it does
        return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _words_of(structure: Any, start: int = 0) -> Iterator[tuple[int, int]]:
    """Byte and value of every field of a ctypes structure that can hold an address."""
    for name, kind in structure._fields_:
        value, byte = getattr(structure, name), start + getattr(type(structure), name).offset
        if isinstance(value, ctypes.Structure):
            yield from _words_of(value, byte)
        elif isinstance(value, ctypes.Array):
            raise NotReplayableError("an array in a structure")
        elif isinstance(value, int) and ctypes.sizeof(kind) == ctypes.sizeof(ctypes.c_void_p):
            yield byte, value

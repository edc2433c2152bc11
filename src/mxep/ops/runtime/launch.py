"""Launches of Triton kernels whose compiled variant is found at once: Triton's own search costs the host several times its launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from mxep.device import is_capturing
from mxep.ops.runtime.nvrtc import current_gpu, recorder_here, recorders, relaxed_capture, unrecorded

_INT32 = 2**31  # the first number that an int32 does not hold
_BYTES = (torch.float8_e4m3fn, torch.float8_e8m0fnu)

# Products are contracted with sums unless a kernel says no: it changes bits, and Triton changes its default (on to 3.9, off from 3.10).
_DEFAULTS = {"enable_fp_fusion": True}
# How the C function that launches a compiled kernel takes the kernel's own arguments in the versions of Triton that are known: one by one
# at the end, or all as one tuple.
_VERSION = triton.__version__.rpartition(".")[0]
_EACH, _AS_ONE = _VERSION == "3.6", _VERSION == "3.9"
_NOTHING = (None,) * 5  # of launch metadata, two hooks, and two kinds of scratch memory


class _Parameters(NamedTuple):
    """A kernel's parameters.

    Attributes:
        values, constants: from arguments by name, the values of all parameters, and those of constants.
        variable: (position, whether compiled variants are specialised for it) of each parameter that is no constant.
    """

    values: Callable[[dict[str, Any]], tuple]
    constants: Callable[[dict[str, Any]], tuple]
    variable: list[tuple[int, bool]]


class _CompiledKernel(NamedTuple):
    """What Triton compiled; its C function, None where only Triton's runner can launch it; what that takes after grid and stream."""

    compiled: Any
    function: Callable[..., None] | None
    fixed: tuple


# Compiled kernels by kernel, options, and the facts about arguments for which each is specialised.
_variants: dict[tuple[Any, ...], _CompiledKernel] = {}
# Parameters by a kernel's id, since Triton hashes a kernel by its text.  A kernel exists as long as its module.
_parameters: dict[int, _Parameters] = {}


def launch(kernel: Any, programs: int | tuple[int, int], arguments: dict[str, Any], **options: Any) -> None:
    """Run a kernel on torch's current stream of its first argument's GPU, or under Triton's interpreter.

    Args:
        kernel: a function of `triton.jit`; its first parameter is a tensor.  It gets MX data and scales as bytes (uint8).
        programs: number of programs, along one or two axes.
        arguments: all arguments by name, constants too; floats are constants.
        options: `num_warps` and other options of Triton's compiler.
    """
    x, y = (programs, 1) if isinstance(programs, int) else programs
    if not isinstance(kernel, triton.JITFunction):  # the interpreter
        kernel[x, y, 1](**dict(zip(arguments, _as_bytes(arguments.values()), strict=True)), **options)
        return
    parameters = _parameters.get(id(kernel)) or _read_parameters(kernel)
    values = list(parameters.values(arguments))
    device = values[0].get_device()
    if device >= 0 and device != current_gpu():  # below 0 for a tensor of the host, which Triton refuses
        with torch.cuda.device(device):
            return launch(kernel, programs, arguments, **options)
    # A variant is specialised for: a constant's value; a pointer's type and device and whether it is a multiple of 16, or that it is None;
    # an integer's width, and unless it is in `do_not_specialize` whether it is a multiple of 16, or 1.  No function does this, since a call
    # would cost as much again.
    known = [id(kernel), *options.values(), *parameters.constants(arguments)]
    for i, specialised in parameters.variable:
        value = values[i]
        if value is None:
            known.append(None)
        elif isinstance(value, int):
            wide = not -_INT32 <= value < _INT32
            known.append(("1" if value == 1 else wide + 2 * (value % 16 == 0)) if specialised else wide)
        else:
            values[i] = address = value.data_ptr()
            known += value.dtype, value.get_device(), address % 16 == 0
    key = tuple(known)
    variant = _variants.get(key)
    if variant is None:
        unrecorded("a first launch")
        values = _as_bytes(parameters.values(arguments))
        with relaxed_capture() if is_capturing() else nullcontext():  # Triton loads it
            _variants[key] = _compiled_kernel(kernel[x, y, 1](*values, **{**_DEFAULTS, **options}))
        return
    if variant.function is None or has_launch_hooks():
        unrecorded("a launch by Triton's runner")
        variant.compiled[x, y, 1](*values)
    else:
        if recorders and (recorder := recorder_here()) is not None:
            given = parameters.values(arguments)
            recorder.triton(
                variant.function, (x, y), variant.fixed, values, [i for i, v in enumerate(given) if isinstance(v, torch.Tensor)]
            )
        variant.function(x, y, 1, torch._C._cuda_getCurrentRawStream(device), *variant.fixed, *values)


def has_launch_hooks() -> bool:
    """Whether a profiler has put hooks on Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _as_bytes(values: Any) -> list[Any]:
    """MX data and scales as uint8, which Triton's kernels take."""
    return [value.view(torch.uint8) if isinstance(value, torch.Tensor) and value.dtype in _BYTES else value for value in values]


def _compiled_kernel(compiled: Any) -> _CompiledKernel:
    run = compiled.run
    if (
        not isinstance(run, nvidia.CudaLauncher)
        or run.global_scratch_size
        or run.profile_scratch_size
        or getattr(run, "gsan_enabled", False)
    ):
        return _CompiledKernel(compiled, None, ())
    how, metadata = (compiled.function, run.launch_cooperative_grid, run.launch_pdl), compiled.packed_metadata
    if _EACH:
        return _CompiledKernel(compiled, run.launch, (*how, *_NOTHING[:2], metadata, *_NOTHING[2:]))
    if _AS_ONE:
        fixed = *how, metadata, *_NOTHING, run.arg_annotations, run.kernel_signature
        return _CompiledKernel(compiled, partial(_launch_of_tuple, run.launch, 4 + len(fixed)), fixed)  # 4: grid and stream
    return _CompiledKernel(compiled, None, ())


def _launch_of_tuple(launch: Callable[..., None], own: int, *given: Any) -> None:
    """Calls a function that takes the kernel's arguments, those from `own` on, as one tuple."""
    launch(*given[:own], given[own:])


def _read_parameters(kernel: Any) -> _Parameters:
    names, constants = ([p.name for p in kernel.params if p.is_constexpr >= only] for only in (False, True))
    variable = [(i, not p.do_not_specialize) for i, p in enumerate(kernel.params) if not p.is_constexpr]
    _parameters[id(kernel)] = found = _Parameters(_several(names), _several(constants), variable)
    return found


def _several(names: list[str]) -> Callable[[dict[str, Any]], tuple]:
    """The values of these names as a tuple; `itemgetter` gives a single one as it is, and takes no empty list."""
    return itemgetter(*names) if len(names) > 1 else lambda arguments: tuple(arguments[name] for name in names)

"""One parameter's AdamW step on the GPU: one pass over parameter, gradient and moments, in CUDA C++."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.device import chip_of, compiler_problem, compute_capability, multiprocessors
from mxep.ops.optimizer import reference
from mxep.ops.optimizer.codes import CELLS, code_tables
from mxep.ops.optimizer.reference import bits_of, check_adamw_step
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Arguments, Kernel

FILES = ("runtime/hopper.cuh", "optimizer/adamw_step.cu")
_LANE = 8  # values that a lane of the kernel takes at a time
_COUNT = "adamw_count_step"  # the entry that one warp runs
_LEAST_MAJOR = 8  # compute capability: bf16 conversions, reductions over a warp
ONE_RUN, WHOLE_LANES, ANY = range(3)  # how a shard lies in the whole parameter: constants of the kernel


class _Runs(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("run", ctypes.c_uint64), ("skip", ctypes.c_uint32)]


class _Hyperparameters(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("beta1", "beta2", "weight1", "weight2", "weight_decay", "eps")]


def options_of(bits: int, floats: tuple[bool, bool], vectors: bool, runs: int) -> dict[str, int]:
    """The kernel's constants; floats: whether parameter and gradient are float32."""
    options = {"BITS": bits, "CODE_VALUES": 1 << bits if bits else 0, "PARAMETER_FLOAT": floats[0], "GRADIENT_FLOAT": floats[1]}
    return options | {"VECTORS": vectors, "RUNS": runs, "THREADS": tiles.ADAMW_THREADS, "MIN_BLOCKS": tiles.ADAMW_MIN_BLOCKS}


@functools.cache
def _kernel(device: int, entry: str, *variant: Any) -> Kernel:
    """`variant`: the arguments of `options_of`."""
    options = options_of(*variant)
    words = 3 * CELLS + 2 * options["CODE_VALUES"] if options["BITS"] else 0
    threads, shared = (32, 0) if entry == _COUNT else (tiles.ADAMW_THREADS, 4 * words)
    return Kernel(entry, FILES, options, threads, shared, chip=chip_of(device))


@functools.cache
def _problem(device: int) -> str | None:
    """Why the kernel cannot run there, None if it can. float32 then takes torch's fused step."""
    major, minor = compute_capability(device)
    return compiler_problem() if major >= _LEAST_MAJOR else f"a GPU of SM{major}{minor}, want SM{_LEAST_MAJOR}0 or later"


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    step: Tensor,
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    key: int,
    runs: Sequence[int],
    hyperparameters: Sequence[float],
    squares: Tensor | None = None,
) -> None:
    """As `mxep.ops.optimizer.reference.adamw_step`, which runs where the kernel cannot."""
    check_adamw_step(parameter, gradient, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, (step, lr, grad_scale, found_inf), squares)
    n, device, bits = parameter.numel(), parameter.device, bits_of(parameter, exp_avg, exp_avg_scale)
    if not n:
        return
    if problem := _problem(device.index):
        if bits or parameter.dtype != torch.float32:
            raise ValueError(f"adamw_step: {problem}; or use --optimizer adamw --dtype float32")
        plain = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, step, lr, grad_scale, found_inf
        reference.adamw_step(parameter, gradient, *plain, key, runs, hyperparameters, squares)
        return
    if bits and (exp_avg.data_ptr() | exp_avg_sq.data_ptr()) % 8:
        raise ValueError("adamw_step: codes at an address that is no multiple of 8, want one that is; make them a tensor of their own")
    tables = code_tables(bits, device) if bits else (None, None)
    (run, stride, first), (beta1, beta2, weight_decay, eps) = runs, hyperparameters
    skip = 0 if run == n else stride - run
    kind = ANY if first % _LANE or (skip and (run % _LANE or skip % _LANE)) else WHOLE_LANES if skip else ONE_RUN
    vectors = not any(tensor.data_ptr() % 16 for tensor in (parameter, gradient, exp_avg, exp_avg_sq))
    floats = (parameter.dtype == torch.float32, gradient.dtype == torch.float32)
    kernels = [_kernel(device.index, entry, bits, floats, vectors, kind) for entry in ("adamw_step", _COUNT)]
    blocks = min(-(-n // (_LANE * tiles.ADAMW_THREADS)), tiles.ADAMW_MIN_BLOCKS * multiprocessors(device.index))
    partial_squares = None if squares is None else torch.empty(blocks, dtype=torch.float32, device=device)
    arguments = Arguments(
        parameter,
        gradient,
        exp_avg,
        exp_avg_sq,
        exp_avg_scale,
        exp_avg_sq_scale,
        step,
        lr,
        grad_scale,
        found_inf,
        *tables,
        n,
        _Runs(first, run, skip),
        key,
        _Hyperparameters(beta1, beta2, 1 - beta1, 1 - beta2, weight_decay, eps),
        partial_squares,
    )
    kernels[0].run(device.index, blocks, arguments)
    kernels[1].launch(device.index, 1, step, found_inf, partial_squares, squares, blocks)

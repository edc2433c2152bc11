"""Grouped bf16 weight gradients on Hopper's tensor cores, one persistent kernel in CUDA C++, without a host sync.

wgmma reads both operands token by token as they lie in memory.  A group may have any number of tokens.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from mxep.device import compiler_problem, compute_capability, multiprocessors
from mxep.ops.runtime.nvrtc import BF16, SWIZZLE_128, Arguments, Box, Kernel, tensor_map

FILES = ("runtime/hopper.cuh", "grouped_gemm/hopper/bf16_wgrad.cu")
_THREADS = 384  # a producer warpgroup, two consumer warpgroups
_TUNING = {"STAGES": 4, "MOST_GROUPS": 1024}  # for NVIDIA H200, measured 2026-11
_LEAST_COLUMNS = 64  # of either operand, a box of the copy engine
_ALIGNMENT_BYTES = 16  # of what the copy engine reads and writes
_KEPT = 2048  # packed arguments, by what they are made of

_OPERAND = Box(*BF16, columns=64, rows=64, swizzle=SWIZZLE_128)
_OUT = Box(*BF16, columns=64, rows=16, swizzle=SWIZZLE_128)


class _WgradProblem(ctypes.Structure):  # struct Problem of bf16_wgrad.cu
    _fields_ = [*((name, ctypes.c_void_p) for name in ("ends", "out")), *((name, ctypes.c_int) for name in ("groups", "tokens", "N", "K"))]


def options_of(*, out_dtype: torch.dtype, accumulate: bool, skip: bool) -> dict[str, bool | int]:
    """The constants in front of bf16_wgrad.cu for one variant."""
    return {"FLOAT_OUT": out_dtype == torch.float32, "ACCUMULATE": accumulate, "SKIP": skip, **_TUNING}


def shared_bytes(options: dict[str, bool | int]) -> int:
    """Bytes of shared memory that bf16_wgrad.cu lays out: stages, output buffers, the order of the groups, barriers."""
    return int(options["STAGES"]) * (3 * 128 * 128 + 16) + 8 * 4096 + 2 * int(options["MOST_GROUPS"])


@functools.cache
def _kernel(out_dtype: torch.dtype, accumulate: bool, skip: bool) -> Kernel:
    options = options_of(out_dtype=out_dtype, accumulate=accumulate, skip=skip)
    return Kernel("grouped_wgrad", FILES, options, _THREADS, shared_bytes(options))


@functools.lru_cache(maxsize=_KEPT)
def _arguments(
    T: int, N: int, K: int, G: int, grad: int, grad_row: int, a: int, a_row: int, ends: int, out: int, is_bf16: bool
) -> Arguments:
    """Packed arguments, from addresses and row strides."""
    grad_map = tensor_map(_OPERAND, grad, T, N, grad_row)
    out_map = tensor_map(_OUT, out, G * N, K, K) if is_bf16 else grad_map  # grad_map: not used
    return Arguments(grad_map, tensor_map(_OPERAND, a, T, K, a_row), out_map, _WgradProblem(ends, out, G, T, N, K))


def bf16_wgrad_takes(grad: torch.Tensor, a: torch.Tensor, groups: int, out_dtype: torch.dtype, out: torch.Tensor | None) -> bool:
    """Whether `bf16_wgrad` runs these operands on this GPU; `out` None is a new tensor."""
    return (
        grad.is_cuda
        and grad.dtype == a.dtype == torch.bfloat16
        and out_dtype in (torch.bfloat16, torch.float32)
        and (out is None or out.data_ptr() % _ALIGNMENT_BYTES == 0)
        and min(grad.shape[1], a.shape[1]) >= _LEAST_COLUMNS
        and grad.shape[1] % 16 == 0  # a warp's rows of the gradient
        and a.shape[1] % 8 == 0  # 16 bytes of one
        and groups <= _TUNING["MOST_GROUPS"]
        and compute_capability(grad.device.index)[0] == 9
        and compiler_problem() is None
    )


def bf16_wgrad(
    grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out: torch.Tensor, accumulate: bool = False, empty: str = "zero"
) -> None:
    """out[g] (+)= grad[tokens of g].T @ a[tokens of g].

    Args:
        grad: (T, N) bf16, rows 16-byte aligned.  a: (T, K), the same.  `bf16_wgrad_takes` says yes to them, and T > 0.
        offs: (G,) int32 END offsets on the device, contiguous.
        out: (G, N, K) bf16 or float32, contiguous, 16-byte aligned.  accumulate: add to what it holds (float32 only).
        empty: of the groups without tokens: "zero", or "skip" to leave what `out` holds.
    """
    (T, N), K, G, device = grad.shape, a.shape[1], offs.shape[0], grad.device.index
    addresses = grad.data_ptr(), grad.stride(0), a.data_ptr(), a.stride(0), offs.data_ptr(), out.data_ptr()
    kernel = _kernel(out.dtype, accumulate, empty == "skip" or accumulate)
    kernel.run(device, multiprocessors(device), _arguments(T, N, K, G, *addresses, out.dtype == torch.bfloat16))

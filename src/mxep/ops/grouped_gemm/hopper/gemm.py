"""Grouped GEMMs on Hopper's FP8 tensor cores from rebased operands: forward, dgrad and wgrad, one kernel in CUDA C++.

Group ends stay on the device; no host sync; a call can be captured in a CUDA graph and replayed with other ends.
Accumulation: the tensor cores' sums keep about 14 bits and are promoted to float32 every 128 of the summed dimension.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from mxep.device import multiprocessors
from mxep.ops.grouped_gemm.hopper.rebase import check_device
from mxep.ops.grouped_gemm.hopper.rebase_reference import BLOCK_128, RebasedRows, RebasedTokens, RebasedWeight
from mxep.ops.grouped_gemm.reference import FUSED_RANK, check_lora, check_padding_rows
from mxep.ops.runtime.nvrtc import BF16, FLOAT32, SWIZZLE_128, SWIZZLE_NONE, U8, Arguments, Box, Kernel, tensor_map
from mxep.shapes import MX_BLOCK

_ALIGNMENT_BYTES = 16  # of what the copy engine reads and writes
_THREADS = 384  # a producer warpgroup, two consumer warpgroups
FILES = ("runtime/hopper.cuh", "grouped_gemm/hopper/tiles.cuh", "grouped_gemm/hopper/gemm.cu")
_TUNING = {"STAGES": 3, "STAGING": 2, "PRODUCER_REGS": 40, "CONSUMER_REGS": 232}  # for NVIDIA H200, measured 2026-11
_LORA_TUNING = {"PRODUCER_REGS": 24, "CONSUMER_REGS": 240}  # consumers hold four more; all threads together have as many as before
_BAND = {False: 8, True: 16}  # of wgrad or not: bands of 16 cost forward 3% where 32 groups have one band each

_OPERAND = Box(*U8, columns=128, rows=128, swizzle=SWIZZLE_128)
_OUT = Box(*BF16, columns=64, rows=16, swizzle=SWIZZLE_128)
_LORA_B = Box(*BF16, columns=FUSED_RANK, rows=256, swizzle=SWIZZLE_NONE)
_ROW_SCALES = Box(*FLOAT32, columns=132, rows=1, swizzle=SWIZZLE_NONE)  # 128 rows from any start, aligned down to 4
_COLUMN_SCALES = Box(*FLOAT32, columns=256, rows=1, swizzle=SWIZZLE_NONE)


class _Problem(ctypes.Structure):  # struct Problem of gemm.cu
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a_scale", "ends", "order", "out", "inner")),
        *((name, ctypes.c_int) for name in ("groups", "rows", "N", "K")),
    ]


def shared_bytes(options: dict[str, bool | int]) -> int:
    """Bytes of shared memory that gemm.cu lays out: stages, output buffers, column scales, row scales, an adapter, notes, barriers."""
    stage, adapter = 3 * 128 * 128 + 1280 * bool(options["BLOCK_SCALES"]) + 16, 512 * FUSED_RANK * bool(options["LORA"])
    return int(options["STAGES"]) * stage + 8 * int(options["STAGING"]) * 4096 + 2 * 1024 + adapter + 48


def options_of(
    *, wgrad: bool, block_scales: bool, out_dtype: torch.dtype, accumulate: bool, skip: bool, lora: bool = False
) -> dict[str, bool | int]:
    """The constants in front of gemm.cu for one variant."""
    kind: dict[str, bool | int] = {"WGRAD": wgrad, "BLOCK_SCALES": block_scales, "FLOAT_OUT": out_dtype == torch.float32, "LORA": lora}
    return {**kind, "ACCUMULATE": accumulate, "SKIP": skip, **_TUNING, **(_LORA_TUNING if lora else {}), "BAND": _BAND[wgrad]}


@functools.cache
def kernel_of(wgrad: bool, block_scales: bool, out_dtype: torch.dtype, accumulate: bool, skip: bool, lora: bool = False) -> Kernel:
    options = options_of(wgrad=wgrad, block_scales=block_scales, out_dtype=out_dtype, accumulate=accumulate, skip=skip, lora=lora)
    return Kernel("grouped_mm", FILES, options, _THREADS, shared_bytes(options))


# Packed arguments are kept by what they are made of, addresses and sizes: torch's allocator gives the same memory again and again, and
# making five tensor maps costs more than a launch.
_KEPT = 2048


@functools.lru_cache(maxsize=_KEPT)
def forward_arguments(
    M: int, N: int, K: int, G: int, a: int, a_row: int, a_scale: int, block_scale: int, block_scale_row: int, b: int, b_scale: int,
    ends: int, out: int, is_bf16: bool, inner: int, lora_b: int,
) -> Arguments:  # fmt: skip
    """Packed arguments, from addresses: block_scale 0 for rows without any, inner and lora_b 0 without an adapter.

    `a_row` and `block_scale_row` are strides.
    """
    a_map = tensor_map(_OPERAND, a, M, K, a_row)
    return Arguments(
        a_map,
        tensor_map(_OPERAND, b, G * N, K, K),
        tensor_map(_OUT, out, M, N, N) if is_bf16 else a_map,  # a_map: not used
        tensor_map(_ROW_SCALES, block_scale, -(-K // BLOCK_128), M, block_scale_row) if block_scale else a_map,
        tensor_map(_COLUMN_SCALES, b_scale, G, N, N),
        tensor_map(_LORA_B, lora_b, G * N, FUSED_RANK, FUSED_RANK) if lora_b else a_map,
        _Problem(a_scale, ends, 0, out, inner, G, M, N, K),
    )


@functools.lru_cache(maxsize=_KEPT)
def wgrad_arguments(
    T: int, N: int, K: int, G: int, grad: int, grad_row: int, grad_scale: int, a: int, a_row: int, a_scale: int, ends: int, order: int,
    out: int, is_bf16: bool,
) -> Arguments:  # fmt: skip
    """Packed arguments, from addresses; `grad_row` and `a_row` are strides."""
    grad_map = tensor_map(_OPERAND, grad, N, T, grad_row)
    return Arguments(
        grad_map,
        tensor_map(_OPERAND, a, K, T, a_row),
        tensor_map(_OUT, out, G * N, K, K) if is_bf16 else grad_map,  # grad_map: not used
        grad_map,
        tensor_map(_COLUMN_SCALES, a_scale, G, K, K),
        grad_map,
        _Problem(grad_scale, ends, order, out, 0, G, N, K, T),
    )


def _check(where: str, out_dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{where}: out_dtype={out_dtype}, want bfloat16 or float32")
    if math.gcd(MX_BLOCK, *widths) != MX_BLOCK:
        raise ValueError(f"{where}: widths {widths}, want multiples of {MX_BLOCK} (one MX block); pad the weights")


def fp8_grouped_mm(
    rows: RebasedRows,
    weight: RebasedWeight,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    padding_rows: str = "zero",
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[rows of g] = rows[rows of g] @ weight[g].T. Reference: `grouped_gemm.reference.fp8_grouped_mm`.

    Args:
        rows: M rows of K from `rebase_rows`.  The device decides tile by tile whether block scales have to be applied.
        weight: (G, N, K) from `rebase_weight`.
        offs: (G,) int32 or int64 END offsets on the device, not decreasing, the last at most M.
        padding_rows: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.
        inner, lora_b: of adapters, (M, 16) and (G, N, 16) bf16: inner[rows of g] @ lora_b[g].T is added before a bf16 result is rounded.

    Returns:
        (M, N) `out_dtype`, bf16 or float32; rows past offs[-1] are zero, or not defined.
    """
    (M, K), (G, N, _) = rows.data.shape, weight.data.shape
    _check("fp8_grouped_mm", out_dtype, (K, N))
    scales = ((tuple(scale.shape), scale.dtype) for scale in (rows.scale, weight.scale))
    if weight.data.shape[2] != K or offs.shape != (G,) or tuple(scales) != (((M,), torch.float32), ((G, N), torch.float32)):
        got = f"rows ({M}, {K}), weight {tuple(weight.data.shape)}, offs {tuple(offs.shape)}"
        got += f", scales {tuple(rows.scale.shape)} {rows.scale.dtype} and {tuple(weight.scale.shape)} {weight.scale.dtype}"
        raise ValueError(
            f"fp8_grouped_mm: {got}; want (M, K), (G, N, K), (G,), and float32 scales (M,) and (G, N), as `rebase_rows` and "
            "`quantize_weight` make them"
        )
    also = {"weight": weight.data, "scale": rows.scale, "weight_scale": weight.scale}
    check_device("fp8_grouped_mm", rows.data, **also, offs=offs, inner=inner, lora_b=lora_b)
    if inner is not None or lora_b is not None:
        check_lora("fp8_grouped_mm", inner, lora_b, (M, G, N), out_dtype)

    device = rows.data.device
    if not (G and K):
        return torch.zeros((M, N), dtype=out_dtype, device=device)
    out = rows.data.new_empty((M, N), dtype=out_dtype)
    if not out.numel():
        return out
    if offs.dtype != torch.int32 or not offs.is_contiguous():
        offs = offs.to(torch.int32).contiguous()

    a = rows.data if rows.data.stride(1) == 1 and rows.data.stride(0) % 16 == 0 else rows.data.contiguous()
    scale, block_scale, b, b_scale = rows.scale.contiguous(), rows.block_scale, weight.data.contiguous(), weight.scale.contiguous()
    block_scale = block_scale if block_scale is None or block_scale.stride(1) == 1 else block_scale.contiguous()
    addresses = (
        a.data_ptr(),
        a.stride(0),
        scale.data_ptr(),
        *((0, 0) if block_scale is None else (block_scale.data_ptr(), block_scale.stride(0))),
    )
    factor_addresses = 0, 0
    if inner is not None and lora_b is not None:
        inner, lora_b = inner.contiguous(), lora_b.contiguous()
        factor_addresses = inner.data_ptr(), lora_b.data_ptr()
    more = b.data_ptr(), b_scale.data_ptr(), offs.data_ptr(), out.data_ptr(), out_dtype == torch.bfloat16, *factor_addresses
    skip = check_padding_rows("fp8_grouped_mm", padding_rows)
    kernel = kernel_of(False, block_scale is not None, out_dtype, False, skip, inner is not None)
    kernel.run(device.index, multiprocessors(device.index), forward_arguments(M, N, K, G, *addresses, *more))
    return out


def fp8_wgrad(
    tokens: RebasedTokens,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    empty: str = "zero",
) -> torch.Tensor:
    """out[g] (+)= grad[:, tokens of g] @ a[:, tokens of g].T. Reference: `grouped_gemm.reference.fp8_wgrad`.

    Args:
        tokens: both operands, from `rebase_tokens`.
        out: (G, N, K) contiguous `out_dtype` to write into, None for a new one.  accumulate: add to what `out` holds (float32 only).
        empty: of the groups without tokens: "zero", or "skip" to leave what `out` holds.

    Returns:
        (G, N, K) `out_dtype`, bf16 or float32; exactly zero (unchanged when accumulating or skipping) for an empty group.
    """
    G, N, K = tokens.ends.shape[0], tokens.grad.shape[0], tokens.a.shape[0]
    _check("fp8_wgrad", out_dtype, (N, K))
    if accumulate and (out is None or out_dtype != torch.float32):
        raise ValueError(f"fp8_wgrad: accumulate=True with out_dtype={out_dtype}, want a float32 `out` to add to")
    if out is None:
        out = tokens.a.new_empty((G, N, K), dtype=out_dtype)
    if out.shape != (G, N, K) or out.dtype != out_dtype or not out.is_contiguous() or out.data_ptr() % _ALIGNMENT_BYTES:
        got = f"{tuple(out.shape)} {out.dtype}"
        raise ValueError(
            f"fp8_wgrad: out is {got}, want {(G, N, K)} {out_dtype}, contiguous, from a multiple of {_ALIGNMENT_BYTES} bytes on"
        )
    check_device("fp8_wgrad", tokens.a, out=out)
    if not out.numel():
        return out

    grad, a, device = tokens.grad, tokens.a, tokens.a.device.index
    addresses = grad.data_ptr(), grad.stride(0), tokens.grad_scale.data_ptr(), a.data_ptr(), a.stride(0), tokens.a_scale.data_ptr()
    more = tokens.ends.data_ptr(), tokens.order.data_ptr(), out.data_ptr(), out_dtype == torch.bfloat16
    kernel = kernel_of(True, False, out_dtype, accumulate, check_padding_rows("fp8_wgrad", empty))
    kernel.run(device, multiprocessors(device), wgrad_arguments(grad.shape[1], N, K, G, *addresses, *more))
    return out

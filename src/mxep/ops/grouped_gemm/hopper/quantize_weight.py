"""Weights straight to what the FP8 GEMMs read: one pass from bf16, float32 or MX to e4m3 with one exponent per output column."""

from __future__ import annotations

import ctypes
import functools

import torch

from mxep.device import multiprocessors
from mxep.ops.grouped_gemm.hopper.rebase_reference import check_weight
from mxep.ops.quantize.columnwise import aligned
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Arguments, Kernel
from mxep.recipe import SCALING_MODES

_Parts = tuple[tuple[int, int, int], tuple[int, int, int]]  # addresses and strides in bytes of two weights, or of their scales
_KEPT = 1024  # packed arguments, by what they are made of
_NO_SCALES = (0, 0, 0), (0, 0, 0)
FILES = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "quantize/tile.cuh", "grouped_gemm/hopper/quantize_weight.cu")


class _Part(ctypes.Structure):  # struct Part of quantize_weight.cu
    _fields_ = [("x", ctypes.c_void_p), ("group_bytes", ctypes.c_longlong), ("row_bytes", ctypes.c_longlong)]


class _Weight(ctypes.Structure):  # struct Weight
    _fields_ = [("first", _Part), ("second", _Part), *((name, ctypes.c_int) for name in ("split", "R", "C", "G"))]


class _WeightScales(ctypes.Structure):  # struct WeightScales
    _fields_ = [("first", _Part), ("second", _Part)]


class _Results(ctypes.Structure):  # struct Results
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "qt", "scale", "scale_t", "turn", "seen")]


def options_of(item_bytes: int, rowwise: bool, columnwise: bool, rounds: bool, scaling_mode: str) -> dict[str, bool | int]:
    """The constants in front of quantize_weight.cu for one variant."""
    tile = tiles.WEIGHT[item_bytes]
    return {
        "ROWS_TOO": rowwise,
        "COLUMNS_TOO": columnwise,
        "FLOAT": item_bytes == 4,
        "ROUND": rounds,
        "MX": item_bytes == 1,
        "SCALING": SCALING_MODES.index(scaling_mode),
        "ROW_WARPS": tile.row_warps,
        "COLUMN_WARPS": tile.column_warps,
        "MIN_BLOCKS": tile.min_blocks,
        "LAG": tile.lag,
    }


@functools.cache
def _kernel(item_bytes: int, rowwise: bool, columnwise: bool, rounds: bool, scaling_mode: str) -> Kernel:
    tile = tiles.WEIGHT[item_bytes]
    options = options_of(item_bytes, rowwise, columnwise, rounds, scaling_mode)
    return Kernel("quantize_weight", FILES, options, tile.threads, tile.shared_bytes(rowwise + columnwise))


@functools.lru_cache(maxsize=_KEPT)
def _arguments(
    weights: _Parts, scales: _Parts, split: int, R: int, C: int, G: int, q: int, qt: int, words: int, scale_words: tuple[int, int]
) -> Arguments:
    """Packed arguments, from the weights and their scales; the words after the results' scales are `seen` (G,) and `turn`."""
    scale_t, seen = words + 4 * scale_words[0], words + 4 * sum(scale_words)
    results = _Results(q or None, qt or None, words, scale_t, seen + 4 * G, seen)
    weight = _Weight(*(_Part(*part) for part in weights), split, R, C, G)
    return Arguments(weight, results, _WeightScales(*(_Part(*part) for part in scales)))


def _part(x: torch.Tensor) -> tuple[int, int, int]:
    size = x.element_size()
    return x.data_ptr(), x.stride(0) * size, x.stride(1) * size


def quantize_weight(
    first: torch.Tensor,
    second: torch.Tensor | None,
    scaling_mode: str,
    rowwise: bool,
    columnwise: bool,
    round_to_bf16: bool = False,
    scale: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """A grouped weight (G, R, C) as the FP8 GEMMs read it: e4m3 with one power of two per row of each group.

    Args:
        first: (G, R, C) bf16, float32, or float8_e4m3fn with a scale, R and C multiples of 32, any strides (copied first unless the last
            is 1 and rows are aligned).
        second: None, or a weight (G, S, C) of the same dtype that follows it along R.
        scaling_mode: a scaling mode's name.
        rowwise: whether the form along C, which forward reads, is wanted.  columnwise: that of the transpose, which dgrad reads.
        round_to_bf16: float32 is rounded to bf16 before it is quantised.
        scale: None, or the scale (G, R, C/32) float8_e8m0fnu of `first`, which then is MX and represents its values in bf16, as
            `dequantize` gives them.  second_scale: the same of `second`.

    Returns:
        rowwise: data (G, R + S, C) float8_e4m3fn and scale (G, R + S) float32.  columnwise: data (G, C, R + S) and scale (G, C).

    Raises:
        ValueError: weights or scales of other shapes or dtypes, scales on another device, an unknown scaling mode, or no form.
    """
    check_weight("quantize_weight", first, second, scaling_mode, rowwise, columnwise, scale, second_scale)
    (G, split, C), item_bytes = first.shape, 1 if scale is not None else 2 if first.dtype == torch.bfloat16 else 4
    one = aligned(first.float() if first.dtype == torch.float16 else first)
    other = None if second is None else aligned(second.float() if second.dtype == torch.float16 else second)
    one_scale = None if scale is None else scale.view(torch.uint8).contiguous()
    other_scale = None if second_scale is None else second_scale.view(torch.uint8).contiguous()
    R, device = split + (0 if second is None else second.shape[1]), first.device
    scale_words = G * R * rowwise, G * C * columnwise
    words = first.new_zeros(sum(scale_words) + G + 1, dtype=torch.float32)  # zeros of integers too
    q = first.new_empty((G, R, C), dtype=torch.float8_e4m3fn) if rowwise else None
    qt = first.new_empty((G, C, R), dtype=torch.float8_e4m3fn) if columnwise else None
    if G * R * C:
        kernel = _kernel(item_bytes, rowwise, columnwise, round_to_bf16 and item_bytes == 4, scaling_mode)
        addresses = 0 if q is None else q.data_ptr(), 0 if qt is None else qt.data_ptr(), words.data_ptr()
        part = _part(one)  # and, as nothing reads it then, in place of a second one
        parts = part, part if other is None else _part(other)
        scales = _NO_SCALES if one_scale is None else (_part(one_scale), _part(one_scale if other_scale is None else other_scale))
        arguments = _arguments(parts, scales, split, R, C, G, *addresses, scale_words)
        kernel.run(device.index, multiprocessors(device) * tiles.WEIGHT[item_bytes].min_blocks, arguments)
    results = list[torch.Tensor]()
    if q is not None:
        results += [q, words.as_strided((G, R), (R, 1), 0)]
    if qt is not None:
        results += [qt, words.as_strided((G, C), (C, 1), scale_words[0])]
    return results

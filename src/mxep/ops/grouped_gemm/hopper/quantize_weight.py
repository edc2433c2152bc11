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

_KEPT = 1024  # packed arguments, by what they are made of
FILES = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "quantize/tile.cuh", "grouped_gemm/hopper/quantize_weight.cu")


class _Part(ctypes.Structure):  # struct Part of quantize_weight.cu
    _fields_ = [("x", ctypes.c_void_p), ("group_bytes", ctypes.c_longlong), ("row_bytes", ctypes.c_longlong)]


class _Weight(ctypes.Structure):  # struct Weight
    _fields_ = [("first", _Part), ("second", _Part), *((name, ctypes.c_int) for name in ("split", "R", "C", "G"))]


class _Scales(ctypes.Structure):  # struct Scales
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
    first: tuple[int, int, int], second: tuple[int, int, int], split: int, R: int, C: int, G: int, q: int, qt: int, words: int,
    scale_words: tuple[int, int],
) -> Arguments:  # fmt: skip
    """Of addresses and strides in bytes, the fields of `_Part`; the words behind the scales are `seen` (G,) and `turn`."""
    scale_t, seen = words + 4 * scale_words[0], words + 4 * sum(scale_words)
    results = _Results(q or None, qt or None, words, scale_t, seen + 4 * G, seen)
    return Arguments(_Weight(_Part(*first), _Part(*second), split, R, C, G), results)


def _part(x: torch.Tensor, item_bytes: int) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0) * item_bytes, x.stride(1) * item_bytes


def quantize_weight(
    first: torch.Tensor, second: torch.Tensor | None, scaling_mode: str, rowwise: bool, columnwise: bool, round_to_bf16: bool = False
) -> list[torch.Tensor]:
    """A grouped weight (G, R, C) as the FP8 GEMMs read it: e4m3 with one power of two per row of each group.

    Args:
        first: (G, R, C) bf16 or float32, R and C multiples of 32, any strides (copied first unless the last is 1 and rows are aligned).
        second: None, or a weight (G, S, C) of the same dtype that follows it along R.
        scaling_mode: a scale rule's name.
        rowwise: whether the form along C, which forward reads, is wanted.  columnwise: that of the transpose, which dgrad reads.
        round_to_bf16: float32 is rounded to bf16 before it is quantised.

    Returns:
        rowwise: data (G, R + S, C) float8_e4m3fn and scale (G, R + S) float32.  columnwise: data (G, C, R + S) and scale (G, C).

    Raises:
        ValueError: weights of other shapes or dtypes, an unknown scale rule, or no form.
    """
    check_weight("quantize_weight", first, second, scaling_mode, rowwise, columnwise)
    (G, split, C), item_bytes = first.shape, 2 if first.dtype == torch.bfloat16 else 4
    one = aligned(first.float() if first.dtype == torch.float16 else first)
    other = one if second is None else aligned(second.float() if second.dtype == torch.float16 else second)
    R, device = split + (0 if second is None else other.shape[1]), first.device
    scale_words = G * R * rowwise, G * C * columnwise
    words = first.new_zeros(sum(scale_words) + G + 1, dtype=torch.float32)  # zeros of integers too
    q = first.new_empty((G, R, C), dtype=torch.float8_e4m3fn) if rowwise else None
    qt = first.new_empty((G, C, R), dtype=torch.float8_e4m3fn) if columnwise else None
    if G * R * C:
        kernel = _kernel(item_bytes, rowwise, columnwise, round_to_bf16 and item_bytes == 4, scaling_mode)
        addresses = 0 if q is None else q.data_ptr(), 0 if qt is None else qt.data_ptr(), words.data_ptr()
        part = _part(one, item_bytes)
        arguments = _arguments(part, part if other is one else _part(other, item_bytes), split, R, C, G, *addresses, scale_words)
        kernel.run(device.index, multiprocessors(device) * tiles.WEIGHT[item_bytes].min_blocks, arguments)
    results = list[torch.Tensor]()
    if q is not None:
        results += [q, words.as_strided((G, R), (R, 1), 0)]
    if qt is not None:
        results += [qt, words.as_strided((G, C), (C, 1), scale_words[0])]
    return results

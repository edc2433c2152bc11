"""Weights straight to what the FP8 GEMMs read: one pass from bf16 or float32 to e4m3 with one exponent per output column."""

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

FILES = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "quantize/tile.cuh", "grouped_gemm/hopper/quantize_weight.cu")


class _Part(ctypes.Structure):  # struct Part of quantize_weight.cu
    _fields_ = [("x", ctypes.c_void_p), ("group_bytes", ctypes.c_longlong), ("row_bytes", ctypes.c_longlong)]


class _Weight(ctypes.Structure):  # struct Weight
    _fields_ = [("first", _Part), ("second", _Part), *((name, ctypes.c_int) for name in ("split", "R", "C", "G"))]


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


def _part(x: torch.Tensor) -> _Part:
    return _Part(x.data_ptr(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size())


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
    parts = [aligned(part.float() if part.dtype == torch.float16 else part) for part in (first, second) if part is not None]
    (G, split, C), R, device = first.shape, sum(part.shape[1] for part in parts), first.device
    sizes = [G * R * rowwise, G * C * columnwise]
    words = torch.zeros(sum(sizes) + G + 1, dtype=torch.int32, device=device)
    scale, scale_t, seen, turn = words.split([*sizes, G, 1])
    results, q, qt = list[torch.Tensor](), None, None
    if rowwise:
        q = torch.empty((G, R, C), dtype=torch.float8_e4m3fn, device=device)
        results += [q, scale.view(torch.float32).view(G, R)]
    if columnwise:
        qt = torch.empty((G, C, R), dtype=torch.float8_e4m3fn, device=device)
        results += [qt, scale_t.view(torch.float32).view(G, C)]
    if G * R * C:
        item_bytes = parts[0].element_size()
        kernel = _kernel(item_bytes, rowwise, columnwise, round_to_bf16 and item_bytes == 4, scaling_mode)
        weight = _Weight(_part(parts[0]), _part(parts[-1]), split, R, C, G)
        out = _Results(*(None if t is None else t.data_ptr() for t in (q, qt)), *(t.data_ptr() for t in (scale, scale_t, turn, seen)))
        kernel.run(device.index, multiprocessors(device) * tiles.WEIGHT[item_bytes].min_blocks, Arguments(weight, out))
    return results

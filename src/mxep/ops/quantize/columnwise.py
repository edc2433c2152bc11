"""Quantise along the rows of a matrix (32x1, transposed), and in both directions from one read: CUDA C++ on Hopper, Triton elsewhere."""

from __future__ import annotations

import functools
import warnings

import torch

from mxep.device import compiler_problem, compute_capability, multiprocessors
from mxep.ops.quantize.reference import check_input, empty_mx
from mxep.ops.quantize.triton import quantize, triton_quantize_columnwise
from mxep.ops.runtime.nvrtc import Kernel
from mxep.ops.runtime.tiles import TRANSPOSE, TransposingTile
from mxep.recipe import SCALING_MODES
from mxep.shapes import round_up

_LOAD_BYTES = 16  # what a lane loads at a time: rows start at multiples of it
_HOPPER = 9
_WAVES = 3  # of regions at least, where the matrix is large enough
_WASTE = 1.05  # of a tile's columns past the edge at most


@functools.cache
def _kernel(tile: TransposingTile, scaling_mode: str) -> Kernel:
    return Kernel(
        "quantize_rowwise_columnwise",
        ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "quantize/tile.cuh", "quantize/columnwise.cu"),
        tile.options(SCALING_MODES.index(scaling_mode)),
        tile.threads,
        tile.shared_bytes,
    )


@functools.cache
def _runs(device: torch.device) -> bool:
    """Whether the CUDA kernel runs there; a Hopper GPU that cannot compile it says so once."""
    if device.type != "cuda" or compute_capability(device.index)[0] != _HOPPER:
        return False
    problem = compiler_problem()
    if problem is not None:
        warnings.warn(f"quantize_rowwise_columnwise, quantize_columnwise: Triton instead of CUDA C++ on this GPU, half as fast: {problem}")
    return problem is None


@functools.lru_cache(maxsize=1024)
def _cut(both: bool, item_bytes: int, batches: int, height: int, width: int, device: int) -> tuple[TransposingTile, int, int, int]:
    """(tile, tiles of a region down, across, regions): the widest tile whose regions keep the GPU busy, else single narrow tiles."""
    candidates = TRANSPOSE[both, item_bytes]
    for tile in candidates:
        down, across = tile.steps
        regions = batches * -(-height // (tile.rows * down)) * -(-width // (tile.columns * across))
        fits = tile is candidates[-1] or round_up(width, tile.columns) <= _WASTE * width
        if fits and regions >= _WAVES * tile.min_blocks * multiprocessors(device):
            return tile, down, across, regions
    return tile, 1, 1, batches * -(-height // tile.rows) * -(-width // tile.columns)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x (B, R, C) with unit stride along C and rows that start at multiples of 16 bytes: itself, or a copy."""
    size = x.element_size()
    if x.stride(2) == 1 and not (x.stride(0) * size | x.stride(1) * size | x.data_ptr()) % _LOAD_BYTES:
        return x
    batches, height, width = x.shape
    return x.new_empty((batches, height, round_up(width, _LOAD_BYTES // size)))[..., :width].copy_(x)


def _launch(x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor] | None, columns: tuple[torch.Tensor, torch.Tensor], mode: str) -> None:
    height, width = x.shape[-2:]
    x = x.float() if x.dtype == torch.float16 else x
    x = aligned(x.unsqueeze(0) if x.dim() == 2 else x.reshape(-1, height, width))
    size, device = x.element_size(), x.device.index
    tile, down, across, regions = _cut(rows is not None, size, x.shape[0], height, width, device)
    _kernel(tile, mode).launch(
        device, regions, x, x.stride(0) * size, x.stride(1) * size, *(rows or (None, None)), *columns, height, width, down, across
    )


def quantize_columnwise(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 32x1 along the second-last dimension: the MX form of the transpose.

    Args:
        x: (..., R, C) bf16 or float32, R a multiple of 32, any strides (copied first unless the last is 1 and rows are 16-byte aligned).
        scaling_mode: a scaling mode's name.

    Returns:
        qdata (..., C, R) float8_e4m3fn and scale (..., C, R/32) float8_e8m0fnu, both contiguous.
    """
    check_input("quantize_columnwise", x, -2, scaling_mode)
    if x.stride(-2) == 1 and x.stride(-1) != 1:  # a transposed matrix: its rows are the output's rows
        return quantize(x.transpose(-2, -1), scaling_mode)
    if not _runs(x.device):
        return triton_quantize_columnwise(x, scaling_mode)

    *lead, height, width = x.shape
    columns = empty_mx(x, *lead, width, height)
    if x.numel():
        _launch(x, None, columns, scaling_mode)
    return columns


def quantize_rowwise_columnwise(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise 1x32 along the last dimension and 32x1 along the second-last, from one read.

    Args:
        x: (..., R, C) bf16 or float32, R and C multiples of 32, any strides (copied first unless the last is 1 and rows are aligned).
        scaling_mode: a scaling mode's name.

    Returns:
        qdata (..., R, C) and qdata_t (..., C, R) float8_e4m3fn, scale (..., R, C/32) and scale_t (..., C, R/32) float8_e8m0fnu, in the
        order qdata, scale, qdata_t, scale_t; all contiguous.
    """
    check_input("quantize_rowwise_columnwise", x, -1, scaling_mode)
    check_input("quantize_rowwise_columnwise", x, -2, scaling_mode)
    if not _runs(x.device):
        return (*quantize(x, scaling_mode), *triton_quantize_columnwise(x, scaling_mode))

    *lead, height, width = x.shape
    rows, columns = empty_mx(x, *x.shape), empty_mx(x, *lead, width, height)
    if x.numel():
        _launch(x, rows, columns, scaling_mode)
    return (*rows, *columns)

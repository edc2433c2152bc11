"""Quantise to MX and back: the definition of the bytes.

Source: OCP Microscaling Formats v1.0, section 6.3 (FLOOR), and cuBLAS's 1x32 block scaling (RCEIL).  docs/mx_format.md has the
special cases with their bytes.
"""

from __future__ import annotations

import torch

from mxep.recipe import SCALING_MODES
from mxep.shapes import E4M3_MAX, MX_BLOCK, record_bytes

E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
QUANTISABLE = torch.bfloat16, torch.float32, torch.float16
_MANTISSA = 0x007FFFFF


def _rceil_exponent(amax: torch.Tensor) -> torch.Tensor:
    """Biased e8m0 exponent ceil(log2(amax / 448)) of finite float32 amax, from the bits: exact, without a logarithm.

    A full mantissa is added, which carries into the exponent unless the quotient's mantissa is empty: that is a power of two already. In
    the subnormals the steps are 2^-127 (0x00400000 -> 0) and up.
    """
    bits = (amax / E4M3_MAX).view(torch.int32)
    return torch.where(bits > 0x00400000, (bits + _MANTISSA) >> 23, 0)


def _floor_exponent(amax: torch.Tensor) -> torch.Tensor:
    """Biased e8m0 exponent floor(log2(amax)) - 8 of finite float32 amax, at least 0."""
    return ((amax.view(torch.int32) >> 23) - 8).clamp(min=0)


# By scaling mode: the biased exponent of a block's largest magnitude, and the multiplier of blocks whose exponent is 0.
_EXPONENT = {"floor": _floor_exponent, "rceil": _rceil_exponent}
_LEAST_MULTIPLIER = {"floor": 2.0**126, "rceil": 1.0}


def _multiplier(exponent: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    """Float32 factor that brings a block to e4m3 range: 2^(127 - exponent).

    Exponent 0 (blocks below 2^-118) follows torchao's bytes: 1 under RCEIL, 2^126 under FLOOR, so data that small becomes zero, or
    half of itself.
    """
    factor = ((254 - exponent) << 23).view(torch.float32)
    return torch.where(exponent == 0, _LEAST_MULTIPLIER[scaling_mode], factor)


def check_input(where: str, x: torch.Tensor, dim: int, scaling_mode: str, dtypes: tuple[torch.dtype, ...] = QUANTISABLE) -> None:
    """Raise ValueError unless x can be quantised along `dim`; references and launchers ask alike."""
    if x.dtype not in dtypes:
        raise ValueError(f"{where}: x is {x.dtype}, want bfloat16 or float32; convert it first")
    if x.shape[dim] % MX_BLOCK:
        raise ValueError(f"{where}: dimension {dim} of {tuple(x.shape)} is not a multiple of {MX_BLOCK} (one MX block); pad it")
    if scaling_mode not in SCALING_MODES:
        check_scaling_mode(where, scaling_mode)


def empty_mx(like: torch.Tensor, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of an MX matrix (..., D) on the device of `like`: float8_e4m3fn data and float8_e8m0fnu scales (..., D/32)."""
    qdata = like.new_empty(shape, dtype=torch.float8_e4m3fn)
    return qdata, like.new_empty((*shape[:-1], shape[-1] // MX_BLOCK), dtype=torch.float8_e8m0fnu)


def check_scaling_mode(where: str, scaling_mode: str) -> None:
    """Raise ValueError unless operators know the scaling mode."""
    if scaling_mode not in SCALING_MODES:
        raise ValueError(f"{where}: scaling_mode={scaling_mode!r}, want {' or '.join(map(repr, SCALING_MODES))}")


def quantize(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 1x32 along the last dimension.

    Args:
        x: (..., D) bf16 or float32, D a multiple of 32, any strides.
        scaling_mode: a scaling mode's name.

    Returns:
        qdata (..., D) float8_e4m3fn and scale (..., D/32) float8_e8m0fnu, both contiguous.  A block with a NaN or an Inf is all
        NaN (0x7F) with scale 0xFF.
    """
    check_input("quantize", x, -1, scaling_mode)
    blocks = x.float().contiguous().unflatten(-1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(-1)
    bad = ~amax.isfinite()
    amax = torch.where(bad, 0.0, amax)
    exponent = _EXPONENT[scaling_mode](amax)
    scaled = (blocks * _multiplier(exponent, scaling_mode)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    data = torch.where(bad[..., None], E4M3_NAN, data)
    scale = torch.where(bad, E8M0_NAN, exponent).to(torch.uint8)
    return data.flatten(-2).view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def quantize_columnwise(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 32x1 along the second-last dimension: the MX form of the transpose.

    Args:
        x: (..., R, C) bf16 or float32, R a multiple of 32.

    Returns:
        qdata (..., C, R) float8_e4m3fn and scale (..., C, R/32) float8_e8m0fnu, both contiguous.
    """
    check_input("quantize_columnwise", x, -2, scaling_mode)
    return quantize(x.transpose(-2, -1), scaling_mode)


def quantize_rowwise_columnwise(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise 1x32 along the last dimension and 32x1 along the second-last: a matrix and its transpose.

    Args:
        x: (..., R, C) bf16 or float32, R and C multiples of 32.

    Returns:
        qdata (..., R, C) and qdata_t (..., C, R) float8_e4m3fn, scale (..., R, C/32) and scale_t (..., C, R/32) float8_e8m0fnu, in the
        order qdata, scale, qdata_t, scale_t; all contiguous.
    """
    return (*quantize(x, scaling_mode), *quantize_columnwise(x, scaling_mode))


def quantize_packed(x: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    """Quantise 1x32 into packed records, the form in which rows are exchanged.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32.

    Returns:
        (T, record_bytes(D)) uint8: D bytes of e4m3, D/32 bytes of e8m0, zeros up to a multiple of 16.
    """
    qdata, scale = quantize(x, scaling_mode)
    rows, width = x.shape
    records = torch.zeros(rows, record_bytes(width), dtype=torch.uint8, device=x.device)
    records[:, :width] = qdata.view(torch.uint8)
    records[:, width : width + width // MX_BLOCK] = scale.view(torch.uint8)
    return records


def quantize_packed_into(x: torch.Tensor, records: torch.Tensor, scaling_mode: str) -> None:
    """`quantize_packed` into memory that exists.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32.  records: (T, record_bytes(D)) uint8, contiguous.

    Raises:
        ValueError: records of another shape or dtype, not contiguous, or on another device.
    """
    check_records("quantize_packed_into", x, records)
    records.copy_(quantize_packed(x, scaling_mode))


def check_records(where: str, x: torch.Tensor, records: torch.Tensor) -> None:
    """Raise ValueError unless `records` can hold the packed records of `x`."""
    want = (x.shape[0], record_bytes(x.shape[-1]))
    if records.dtype != torch.uint8 or tuple(records.shape) != want or not records.is_contiguous() or records.device != x.device:
        got = f"{tuple(records.shape)} {records.dtype} on {records.device}"
        raise ValueError(f"{where}: records are {got}, want {want} uint8, contiguous, on {x.device}")


def scale_to_float32(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes to float32, exactly: 2^(b - 127); 0 is the subnormal 2^-127, 0xFF is NaN."""
    bits = scale.view(torch.uint8).int()
    value = (bits << 23).clamp(min=0x00400000).view(torch.float32)
    return torch.where(bits == E8M0_NAN, torch.nan, value)


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    row_map: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """e4m3 times its block's scale in float32, rounded once to `dtype`.

    Args:
        qdata: (..., D) float8_e4m3fn.  scale: (..., D/32) float8_e8m0fnu.  dtype: bf16, float16 or float32.
        row_map: (P,) int32, the row of qdata (R, D) that is row p of the result, -1 for zeros.
        num_valid_rows: (1,) int32, how many rows are wanted; the others are not defined.  Without effect here.

    Returns:
        (..., D) `dtype`, or (P, D) with a row map, contiguous.  Exact in bf16 between 2^-133 and bf16's largest value.
    """
    blocks = qdata.float().unflatten(-1, (-1, MX_BLOCK)) * scale_to_float32(scale)[..., None]
    values = blocks.flatten(-2).to(dtype)
    if row_map is None:
        return values.contiguous()
    return torch.cat((values, values.new_zeros(1, values.shape[1])))[row_map.long()]  # -1 reads the last row, zeros


def dequantize_packed_into(records: torch.Tensor, values: torch.Tensor) -> None:
    """`dequantize` of packed records into memory that exists.

    Args:
        records: (T, record_bytes(D)) uint8, contiguous.  values: (T, D) bf16, float16 or float32, contiguous.

    Raises:
        ValueError: records of another shape or dtype, not contiguous, or on another device.
    """
    check_records("dequantize_packed_into", values, records)
    width = values.shape[1]
    scale = records[:, width : width + width // MX_BLOCK].view(torch.float8_e8m0fnu)
    values.copy_(dequantize(records[:, :width].view(torch.float8_e4m3fn), scale, values.dtype))

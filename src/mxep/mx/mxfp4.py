"""MXFP4 to MXFP8 without loss: e2m1 values are e4m3 values, and a power of two moves from each block's scale to its data.

An e2m1 code has a sign, 2 exponent bits and 1 mantissa bit; its values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.  2^6 is the largest power of two
that keeps 6 within e4m3's 448.  The smallest value is then 2^5, which stays exact down to 2^-9: a GEMM that rebases block exponents to the
largest of a span may lower a block by 14 binades, where unmoved data would allow 8.
"""

from __future__ import annotations

import torch

from mxep.mx.tensor import MXTensor
from mxep.shapes import MX_BLOCK

_MOVED = 6  # the exponent that moves from the scale to the data


def mxfp4_to_mxfp8(blocks: torch.Tensor, scales: torch.Tensor, orig_dtype: torch.dtype = torch.bfloat16) -> MXTensor:
    """The values of MXFP4 blocks, as MXFP8.

    2^6 moves from a block's scale to its data.  A smaller power of two moves if the scale would fall below byte 1, because byte 0 means a
    block of zeros.

    Args:
        blocks: (..., D/32, 16) uint8, two e2m1 codes a byte, the first of them in the low four bits.
        scales: (..., D/32) uint8, e8m0.
        orig_dtype: dtype of the values that the result represents, bf16 or float32.

    Returns:
        MXTensor (..., D).

    Raises:
        ValueError: shapes or dtypes that are not MXFP4.

    Examples:
        >>> blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
        >>> blocks[0, 0, 0] = 0xF1  # 0.5, then -6
        >>> mx = mxep.mx.mxfp4_to_mxfp8(blocks, torch.full((1, 1), 127, dtype=torch.uint8))
        >>> mx.dequantize()[0, :2].tolist(), mx.qdata[0, :2].float().tolist(), mx.scale.float().item()
        ([0.5, -6.0], [32.0, -384.0], 0.015625)
    """
    where = "mxfp4_to_mxfp8"
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"{where}: blocks are {blocks.dtype} and scales {scales.dtype}, want torch.uint8 bytes of both")
    if blocks.shape != (*scales.shape, MX_BLOCK // 2):
        raise ValueError(f"{where}: blocks {tuple(blocks.shape)} with scales {tuple(scales.shape)}, want blocks (..., D/32, 16)")
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)  # (..., D/32, 32)
    magnitude = codes & 7  # 2 * exponent + mantissa
    # e4m3 bytes of the values times 2^6: exponent field 12 and up, the mantissa bit above two zeros; 0.5 is e2m1's subnormal.
    moved = torch.where(magnitude > 1, 96 + 4 * magnitude, 96 * magnitude)
    moves = torch.where(scales == 255, _MOVED, scales.clamp(1, _MOVED + 1) - 1)
    lowered = torch.where(magnitude > 0, moved - 8 * (_MOVED - moves)[..., None], 0)
    qdata = (lowered | (codes & 8) << 4).flatten(-2).view(torch.float8_e4m3fn)
    return MXTensor.from_qdata_and_scales(qdata, torch.where(scales == 255, scales, scales - moves), orig_dtype)

"""torchao's codes of quantised moments: from codes to values and back, and both as tables for the kernel. Calling them needs torchao."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCKS = {8: 256, 4: 128}  # values that share a scale, by bits of a code: torchao's defaults
LOWEST_CELL = 0x3400  # upper 16 bits of 2^-23: smaller numbers have the code of 0
CELLS = 0x3F80 - LOWEST_CELL + 1  # on to those of 1
_CELL_BITS = 16  # below those that name the cell


@functools.cache
def code_tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values (2, 2**bits) float32 of the codes of exp_avg and of exp_avg_sq, rising; cells (3 * CELLS,) int32, see `_cells`."""
    return _values(bits).to(device), _cells(bits).to(device)


def dequantize(codes: Tensor, scale: Tensor, values: Tensor, bits: int) -> Tensor:
    """(n * bits / 8,) codes and (n / block,) scales -> (n,) float32."""
    from torchao.optim.quant_utils import dequant_with_qmap

    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    return dequant_with_qmap(codes.view(-1, BLOCKS[bits]), values, scale).flatten()


def quantize(moment: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The inverse of `dequantize`, to the nearest code; that of NaN, which infinity divided by its own scale is too, is 0."""
    from torchao.optim.quant_utils import scale_tensor

    scaled, scale = scale_tensor(moment, BLOCKS[bits])
    codes = nearest_codes(scaled, values, bits)
    return (codes if bits == 8 else (codes[0::2] << 4) | codes[1::2]), scale


def nearest_codes(numbers: Tensor, values: Tensor, bits: int) -> Tensor:
    """Numbers from -1 to 1, of any shape -> their codes, uint8 of that shape."""
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap

    return {8: quantize_8bit_with_qmap, 4: quantize_4bit_with_qmap}[bits](numbers, values)


def _values(bits: int) -> Tensor:
    from torchao.optim import subclass_4bit, subclass_8bit

    module = {8: subclass_8bit, 4: subclass_4bit}[bits]
    return torch.tensor([module.get_qmap_signed(), module.get_qmap_unsigned()])


def _cells(bits: int) -> Tensor:
    """(3 * CELLS,) int32: what the kernel adds to a number's bits to get its code in bits 16 to 23, see adamw_step.cu.

    Of exp_avg for each cell's positive and negative numbers by turns, the code of negative ones counted from the highest; of exp_avg_sq.
    torchao's own function says in which code a cell begins, and where in it the next one does.
    """
    size, most = 1 << _CELL_BITS, (1 << bits) - 1
    magnitudes = torch.arange(LOWEST_CELL, LOWEST_CELL + CELLS) * size
    entries = []
    for values, signs in zip(_values(bits), (torch.tensor([0, 1]), torch.tensor([0])), strict=True):

        def code(offset: Tensor | int, values: Tensor = values, signs: Tensor = signs) -> Tensor:
            numbers = ((magnitudes[:, None] + offset) - (signs << 31)).int().view(torch.float32)
            codes = nearest_codes(numbers, values, bits).long()
            return torch.where(signs == 0, codes, most - codes)

        first, border, step = code(0), torch.zeros(CELLS, len(signs), dtype=torch.int64), size
        while step > 1:  # the last number of the first code
            step //= 2
            border += torch.where(code(border + step) == first, step, 0)
        assert bool((code(size - 1) - first == (border < size - 1))[:-1].all()), "no cell has more than one border"
        entries.append((first * size + size - 1 - border - magnitudes[:, None]).flatten())
    return torch.cat(entries).int()

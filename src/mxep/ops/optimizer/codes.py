"""torchao's codes of quantised moments as tables: the value of each code, and the code of each number."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LOWEST_CELL = 0x3400  # upper 16 bits of 2^-23: smaller numbers have the code of 0
CELLS = 0x3F80 - LOWEST_CELL + 1  # on to those of 1
_CELL_BITS = 16  # below those that name the cell


@functools.cache
def code_tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values (2, 2**bits) float32 of the codes of exp_avg and of exp_avg_sq, rising; cells (3 * CELLS,) int32, see `_cells`. Needs torchao."""
    return _values(bits).to(device), _cells(bits).to(device)


def _values(bits: int) -> Tensor:
    from torchao.optim import subclass_4bit, subclass_8bit

    module = {8: subclass_8bit, 4: subclass_4bit}[bits]
    return torch.tensor([module.get_qmap_signed(), module.get_qmap_unsigned()])


def _cells(bits: int) -> Tensor:
    """(3 * CELLS,) int32: what the kernel adds to a number's bits to get its code in bits 16 to 23, see adamw_step.cu.

    Of exp_avg for each cell's positive and negative numbers by turns, the code of negative ones counted from the highest; of exp_avg_sq.
    torchao's own function says in which code a cell begins, and where in it the next one does.
    """
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap

    quantize = {8: quantize_8bit_with_qmap, 4: quantize_4bit_with_qmap}[bits]
    size, most = 1 << _CELL_BITS, (1 << bits) - 1
    magnitudes = torch.arange(LOWEST_CELL, LOWEST_CELL + CELLS) * size
    entries = []
    for values, signs in zip(_values(bits), (torch.tensor([0, 1]), torch.tensor([0])), strict=True):

        def code(offset: Tensor | int, values: Tensor = values, signs: Tensor = signs) -> Tensor:
            numbers = ((magnitudes[:, None] + offset) - (signs << 31)).int().view(torch.float32)
            codes = quantize(numbers, values).long()
            return torch.where(signs == 0, codes, most - codes)

        first, border, step = code(0), torch.zeros(CELLS, len(signs), dtype=torch.int64), size
        while step > 1:  # the last number of the first code
            step //= 2
            border += torch.where(code(border + step) == first, step, 0)
        assert bool((code(size - 1) - first == (border < size - 1))[:-1].all()), "no cell has more than one border"
        entries.append((first * size + size - 1 - border - magnitudes[:, None]).flatten())
    return torch.cat(entries).int()

"""torchao's codes by the kernel's table, and the random bits of stochastic rounding: values, averages and distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mxep.ops.optimizer.codes import BLOCKS, CELLS, LOWEST_CELL, code_tables, nearest_codes, quantize
from mxep.ops.optimizer.reference import check_adamw_step, random_bits, round_stochastically

CPU = torch.device("cpu")


def codes_by_table(numbers: Tensor, bits: int, signed: bool) -> Tensor:
    """Codes by the kernel's lookup: a number's upper half selects a cell, whose entry is added to the number's bits."""
    cells = code_tables(bits, CPU)[1].long()
    magnitudes = numbers.abs().clamp(min=2.0**-23).view(torch.int32).long()
    cell, negative = (magnitudes >> 16) - LOWEST_CELL, (numbers.view(torch.int32) < 0).long()
    codes = (magnitudes + (cells[2 * cell + negative] if signed else cells[2 * CELLS :][cell])) >> 16 & 255
    return torch.where(negative == 1, (1 << bits) - 1 - codes, codes).to(torch.uint8)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", BLOCKS)
def test_the_table_has_torchaos_codes(bits: int, signed: bool) -> None:
    """Around every border, at every code's value, around the powers of two, at the ends, and at every 4093rd float32 up to 1."""
    values = code_tables(bits, CPU)[0][0 if signed else 1]
    near = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.exp2(torch.arange(-30.0, 0.0))]).abs()
    around = near.view(torch.int32)[:, None] + torch.arange(-8, 9)
    magnitudes = torch.cat([around.flatten().clamp(min=0), torch.arange(0, 0x3F800001, 4093), torch.tensor([1, 0x3F7FFFFF, 0x3F800000])])
    numbers = magnitudes.int().view(torch.float32)
    numbers = torch.cat([numbers, -numbers])[: len(numbers) * (2 if signed else 1)]
    numbers = numbers[numbers.abs() <= 1]
    assert torch.equal(codes_by_table(numbers, bits, signed), nearest_codes(numbers, values, bits))


@pytest.mark.parametrize("bits", BLOCKS)
def test_values_that_are_not_finite_have_code_0(bits: int) -> None:
    """A NaN gives its whole block code 0, infinities only themselves. The kernel relies on 0 being the code of -1, or of 0 unsigned."""
    moment = torch.zeros(3, BLOCKS[bits])
    moment[0, 4], moment[1, 6], moment[1, 9], moment[2, 3] = torch.nan, torch.inf, -torch.inf, 1.0
    for values, least in zip(code_tables(bits, CPU)[0], (-1.0, 0.0), strict=True):
        codes, scale = quantize(moment.flatten(), values, bits)
        if bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1)
        codes = codes.view(3, -1)
        zero = int(nearest_codes(torch.zeros(1), values, bits))
        assert scale[0].isnan()
        assert scale[1:].tolist() == [torch.inf, 1.0]
        assert codes[0].unique().tolist() == [0]
        assert (codes[1] != zero).nonzero().flatten().tolist() == ([6, 9] if zero else [])
        assert codes[1, 6] == codes[1, 9] == nearest_codes(torch.full((1,), least), values, bits)
        assert (codes[2] != zero).nonzero().flatten().tolist() == [3]


def wrong_arguments() -> dict[str, list[Tensor | None]]:
    """Parameter, gradient, moments and scales."""
    values, codes, scale = torch.zeros(512, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.uint8), torch.zeros(2)
    return {
        "dtype": [values.half(), values.half(), values.half(), values.half(), None, None],
        "gradient of another shape": [values, values[1:], codes, codes, scale, scale],
        "moments in another dtype": [values, values, values.float(), values.float(), None, None],
        "codes of 2 bits": [values, values, codes[:128], codes[:128], scale, scale],
        "too few scales": [values, values, codes, codes, scale[:1], scale],
        "half a block": [values[:384], values[:384], codes[:384], codes[:384], scale[:1], scale[:1]],
        "one scale": [values, values, codes, codes, scale, None],
        "no values": [values[:0], values[:0], codes[:0], codes[:0], scale, scale],
    }


@pytest.mark.parametrize("what", wrong_arguments())
def test_wrong_arguments(what: str) -> None:
    with pytest.raises(ValueError, match=r"adamw_step: parameter .*, want \(n,\) bfloat16 or float32 and moments in the parameter's dtype"):
        check_adamw_step(*wrong_arguments()[what], ())  # type: ignore[arg-type]


def test_tensors_are_contiguous() -> None:
    values = torch.zeros(512)
    with pytest.raises(ValueError, match="adamw_step: a tensor that is not contiguous, want contiguous ones"):
        check_adamw_step(values, torch.zeros(1024)[::2], values, values, None, None, ())


def test_rounding_is_right_on_average() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(0)), exact])
    every = torch.stack([round_stochastically(values, torch.full(values.shape, bits)) for bits in range(128, 65536, 256)])
    torch.testing.assert_close(every[:, 2000:].float(), exact.expand(len(every), -1), rtol=0, atol=0, equal_nan=True)
    below, above = every[:, :2000].float().aminmax(dim=0)
    spacing = torch.exp2(values[:2000].abs().log2().floor() - 7)
    assert ((above - below == 0) | (above - below == spacing)).all()
    assert ((every[:, :2000].double().mean(0) - values[:2000]).abs() <= spacing / 200).all()


def test_random_bits() -> None:
    """Uniform; neighbours, which share a hash, and other keys have other bits."""
    drawn = [random_bits(torch.arange(1 << 18), torch.tensor(key)) for key in (7, 8)]
    for bits in drawn:
        assert 0 <= int(bits.min()) < 8
        assert 65528 < int(bits.max()) <= 65535
        counts = torch.bincount(bits >> 8, minlength=256)
        assert (counts - 1024).abs().max() < 6 * 32, "five standard deviations"
        for distance in (1, 2):
            pairs = torch.corrcoef(torch.stack([bits[:-distance].double(), bits[distance:].double()]))[0, 1]
            assert abs(float(pairs)) < 0.01
    assert abs(float(torch.corrcoef(torch.stack(drawn).double())[0, 1])) < 0.01

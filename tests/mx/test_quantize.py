"""Quantisation: bytes against torchao on a CPU, the special cases of the contract, and what dequantising gives back."""

from __future__ import annotations

import warnings

import pytest
import torch

from mxep import reference
from mxep.mx import MXTensor, ScaleCalculationMode, quantize_mx, to_mx
from mxep.shapes import record_bytes

pytest.importorskip("torchao", reason="torchao is the oracle of bytes; it is in the dev group")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode as OracleMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx as oracle_to_mx

MODES = {"rceil": OracleMode.RCEIL, "floor": OracleMode.FLOOR}


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def distributions() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(300, 256, generator=g)
    zeros = normal.clone()
    zeros[:, :64] = 0
    zeros[::7] = -0.0
    return {
        "normal": normal,
        "heavy-tailed": normal.exp() ** 4 * normal.sign(),
        "lognormal channels": normal * torch.randn(256, generator=g).mul(3).exp(),
        "float32 subnormals": normal * 1e-39,
        "scale near zero": normal * 1e-36,
        "blocks of subnormal codes": normal * torch.rand(300, 256, generator=g) ** 20,
        "near the largest": (normal * 1e38).clamp(-3.4e38, 3.4e38),
        "with zeros": zeros,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", distributions())
def test_bytes_equal_torchao(name: str, dtype: torch.dtype, mode: str) -> None:
    x = distributions()[name].to(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    scale, qdata = oracle_to_mx(x, torch.float8_e4m3fn, 32, MODES[mode])
    ours_q, ours_s = reference.quantize(x, mode)
    assert torch.equal(as_bytes(ours_s), as_bytes(scale))
    assert torch.equal(as_bytes(ours_q), as_bytes(qdata))


def block(value: float, others: float = 0.0) -> torch.Tensor:
    x = torch.full((1, 32), others)
    x[0, 5] = value
    return x


MAX = torch.finfo(torch.float32).max
SPECIAL = [  # value, mode, scale byte, data byte at the value
    (0.0, "rceil", 0, 0x00),
    (0.0, "floor", 0, 0x00),
    (448.0, "rceil", 127, 0x7E),
    (448.0, "floor", 127, 0x7E),
    (449.0, "rceil", 128, 0x76),
    (449.0, "floor", 127, 0x7E),
    (511.0, "rceil", 128, 0x78),
    (511.0, "floor", 127, 0x7E),
    (MAX, "rceil", 247, 0x78),
    (MAX, "floor", 246, 0x7E),
    (float("nan"), "rceil", 255, 0x7F),
    (float("nan"), "floor", 255, 0x7F),
    (float("inf"), "rceil", 255, 0x7F),
    (float("-inf"), "floor", 255, 0x7F),
]


@pytest.mark.parametrize(("value", "mode", "scale_byte", "data_byte"), SPECIAL)
def test_special_values(value: float, mode: str, scale_byte: int, data_byte: int) -> None:
    qdata, scale = reference.quantize(block(value), mode)
    assert as_bytes(scale).item() == scale_byte
    assert as_bytes(qdata)[0, 5].item() == data_byte


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_value_poisons_its_block_and_no_other(value: float, mode: str) -> None:
    x = torch.ones(3, 96)
    x[1, 40] = value
    qdata, scale = reference.quantize(x, mode)
    want = torch.zeros(3, 3, dtype=torch.bool)
    want[1, 1] = True
    assert torch.equal(as_bytes(scale) == 0xFF, want)
    assert torch.equal(as_bytes(qdata) == 0x7F, want.repeat_interleave(32, 1))


def test_rceil_rounds_up_on_the_bits_of_the_quotient() -> None:
    from mxep.ops.quantize.reference import _rceil_exponent

    def exponent(bits: int) -> int:  # an amax whose quotient by 448 has these bits, when one exists
        quotient = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        amax = quotient * 448
        assert torch.equal(amax / 448, quotient)
        return _rceil_exponent(amax).item()

    assert exponent(0x00400000) == 0
    assert exponent(0x00400001) == 1
    assert exponent(0x3F800000) == 127
    assert exponent(0x3F800001) == 128
    # where a float32 logarithm rounds to the integer: torchao's eager path says 227 here
    assert exponent(0x71800001) == 228


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_scale_codes_dequantise(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None]
    codes = torch.tensor([0x00, 0x80, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE] * 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    qdata = codes.repeat(256, 1)
    got = reference.dequantize(qdata, scale, dtype)
    exact = codes.double()[None] * torch.exp2(torch.arange(256).double() - 127)[:, None]
    want = exact.float().to(dtype)  # one rounding from float32, in which products are exact unless they over- or underflow
    assert got[255].isnan().all()
    assert torch.equal(got[:255], want[:255])


def test_every_e4m3_code_survives_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    data = torch.zeros(codes.numel(), 32)
    data[:, 0] = codes.view(torch.float8_e4m3fn).float()
    data[:, 1] = 448.0  # holds the block's scale at 1
    qdata, scale = reference.quantize(data, "rceil")
    assert (as_bytes(scale) == 127).all()
    assert torch.equal(as_bytes(qdata)[:, 0], codes)


@pytest.mark.parametrize("mode", MODES)
def test_quantising_dequantised_values_gives_the_same_values(mode: str) -> None:
    x = torch.randn(64, 256)
    first = quantize_mx(x, ScaleCalculationMode(mode)).dequantize()
    again = quantize_mx(first, ScaleCalculationMode(mode)).dequantize()
    assert torch.equal(first, again)


def test_transposed_is_the_mx_form_of_the_transpose() -> None:
    x = torch.randn(2, 64, 96)
    qdata, scale = reference.quantize_columnwise(x, "rceil")
    want_q, want_s = reference.quantize(x.transpose(1, 2).contiguous(), "rceil")
    assert qdata.shape == (2, 96, 64)
    assert scale.shape == (2, 96, 2)
    assert torch.equal(as_bytes(qdata), as_bytes(want_q))
    assert torch.equal(as_bytes(scale), as_bytes(want_s))


@pytest.mark.parametrize("mode", MODES)
def test_both_forms_from_one_call(mode: str) -> None:
    x = torch.randn(3, 64, 96)
    got = reference.quantize_rowwise_columnwise(x, mode)
    for a, b in zip(got, (*reference.quantize(x, mode), *reference.quantize_columnwise(x, mode)), strict=True):
        assert a.is_contiguous()
        assert torch.equal(as_bytes(a), as_bytes(b))
    assert [tuple(part.shape) for part in got] == [(3, 64, 96), (3, 64, 3), (3, 96, 64), (3, 96, 2)]


@pytest.mark.parametrize("width", [32, 96, 512])
def test_packed_records(width: int) -> None:
    x = torch.randn(7, width)
    records = reference.quantize_packed(x, "rceil")
    into = torch.full((x.shape[0] + 2, records.shape[1]), 0xA5, dtype=torch.uint8)
    torch.ops.mxep.quantize_packed_into(x, into[1:-1], "rceil")
    assert torch.equal(into[1:-1], records)
    assert (into[[0, -1]] == 0xA5).all(), "no byte after the record is written"
    for wrong in (into, into[1:-1, :-16], into[1:-1].float(), into[1:-1].to("meta")):
        with pytest.raises(ValueError, match=r"quantize_packed_into: records are .*, want .* uint8, contiguous"):
            reference.quantize_packed_into(x, wrong, "rceil")
    qdata, scale = reference.quantize(x, "rceil")
    values = torch.full((x.shape[0] + 2, width), torch.nan)
    torch.ops.mxep.dequantize_packed_into(records, values[1:-1])
    assert torch.equal(values[1:-1], reference.dequantize(qdata, scale, torch.float32))
    assert values[[0, -1]].isnan().all(), "no byte after the record is written"
    with pytest.raises(ValueError, match=r"dequantize_packed_into: records are .*, want .* uint8, contiguous"):
        reference.dequantize_packed_into(records[:, :-16], values[1:-1])
    assert records.shape == (7, record_bytes(width))
    assert record_bytes(width) % 16 == 0
    assert torch.equal(records[:, :width], as_bytes(qdata))
    assert torch.equal(records[:, width : width + width // 32], as_bytes(scale))
    assert (records[:, width + width // 32 :] == 0).all()


@pytest.mark.parametrize(("mode", "least_db"), [("rceil", 31.2), ("floor", 30.4)])
def test_sqnr_of_normal_data(mode: str, least_db: float) -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    back = quantize_mx(x, ScaleCalculationMode(mode)).dequantize()
    assert 20 * torch.log10(x.norm() / (x - back).norm()) > least_db


def test_to_mx_returns_scale_first_and_floors_by_default() -> None:
    x = torch.full((1, 32), 500.0)
    scale, qdata = to_mx(x)
    assert (scale.dtype, qdata.dtype) == (torch.float8_e8m0fnu, torch.float8_e4m3fn)
    assert as_bytes(scale).item() == 127
    assert as_bytes(MXTensor.to_mx(x, torch.float8_e4m3fn).scale).item() == 127
    assert as_bytes(quantize_mx(x).scale).item() == 128


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: to_mx(torch.ones(4, 32, dtype=torch.float16)), "float16"),
        (lambda: to_mx(torch.ones(4, 33)), "multiple of 32"),
        (lambda: to_mx(torch.ones(4, 32), elem_dtype=torch.float8_e5m2), "float8_e4m3fn"),
        (lambda: to_mx(torch.ones(4, 32), block_size=16), "block_size=16"),
        (lambda: to_mx(torch.ones(4, 32), scaling_mode="even"), "FLOOR or RCEIL"),
    ],
)
def test_bad_input_is_named(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()

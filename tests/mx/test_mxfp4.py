"""MXFP4 becomes MXFP8 without loss for every code and scale, and rebasing stays exact over the promised spread of exponents."""

from __future__ import annotations

import pytest
import torch

from mxep.mx import mxfp4_to_mxfp8
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, changed_rows, rebase_rows

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes (..., D) -> blocks (..., D/32, 16): the first of two in the low four bits."""
    pairs = codes.unflatten(-1, (-1, 16, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def exact(mx: torch.Tensor) -> torch.Tensor:
    return mx.qdata.double() * torch.exp2(mx.scale.view(torch.uint8).double() - 127).repeat_interleave(32, -1)  # type: ignore[attr-defined]


def test_every_code_with_every_scale() -> None:
    codes = torch.arange(32).remainder(16).expand(255, 32)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    mx = mxfp4_to_mxfp8(pack(codes), scales)
    want = E2M1[codes] * torch.exp2(scales.double() - 127)
    assert torch.equal(exact(mx), want)
    assert torch.equal(torch.signbit(mx.qdata.float()), torch.signbit(want))
    assert mx.dtype == torch.bfloat16
    moved = scales[:, 0].int() - mx.scale.view(torch.uint8)[:, 0].int()
    assert moved.tolist() == [0, 0, 1, 2, 3, 4, 5, *[6] * 248]  # byte 0 stays that of zeros


def test_as_transformers_reads_them() -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4", reason="the oracle is a development tool")
    blocks, scales = torch.randint(256, (3, 64, 4, 16), dtype=torch.uint8), torch.randint(100, 140, (3, 64, 4), dtype=torch.uint8)
    theirs = integration.convert_moe_packed_tensors(blocks, scales)  # (E, K, N)
    assert torch.equal(mxfp4_to_mxfp8(blocks, scales).dequantize().transpose(1, 2), theirs)


@pytest.mark.parametrize(("spread", "moved", "inexact"), [(14, True, 0), (15, True, 1), (8, False, 0), (9, False, 1)])
def test_rebasing_is_exact_over_14_binades(spread: int, moved: bool, inexact: int) -> None:
    """A row of every code at two scales. Data that keeps 2^0 has room for 8 binades, which is why 2^6 moves."""
    codes = torch.arange(64).remainder(16)[None]
    scales = torch.tensor([[120, 120 - spread]], dtype=torch.uint8)
    if moved:
        mx = mxfp4_to_mxfp8(pack(codes), scales)
        qdata, scale = mx.qdata, mx.scale
    else:
        qdata, scale = E2M1[codes].to(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
    assert changed_rows(qdata, scale, rebase_rows(qdata, scale, MAX_SPREAD["row"])) == inexact


def test_rows_that_a_rebase_changes_are_counted() -> None:
    """Exponents of a row spread by 0 to 39: exact up to 14, and beyond it where no value is left to lose."""
    codes = torch.full((40, 64), 7)
    scales = torch.stack((torch.full((40,), 127), 127 - torch.arange(40)), 1).to(torch.uint8)
    codes[30:, 32:] = 0  # a block of zeros loses nothing
    mx = mxfp4_to_mxfp8(pack(codes), scales)
    rows = rebase_rows(mx.qdata, mx.scale, MAX_SPREAD["row"])
    assert changed_rows(mx.qdata, mx.scale, rows) == 30 - 17  # 6 is stored as 3 * 2^7, and 16 halvings leave a multiple of 2^-9


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(2, 4, 16), torch.zeros(2, 4, dtype=torch.uint8), "want torch.uint8 bytes of both"),
        (torch.zeros(2, 4, 32, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8), r"\(2, 4, 32\) with scales \(2, 4\)"),
        (torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), r"want blocks \(..., D/32, 16\)"),
    ],
)
def test_invalid_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mxfp4_to_mxfp8(blocks, scales)

"""Rows that are quantised and rebased by one kernel: the bytes of a quantiser and a rebase after it, for any size and values."""

from __future__ import annotations

import pytest
import torch
from tests.activation_cases import far_apart
from tests.gpu.test_fp8_rebase import same
from tests.mx_cases import MODES, quantizer_inputs

from mxep.grouped_mm import products
from mxep.ops.grouped_gemm.hopper import quantize_rows as kernel
from mxep.ops.grouped_gemm.hopper import rebase_reference as reference
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD
from mxep.ops.runtime import tiles
from mxep.parallel import MXLinear
from mxep.recipe import Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper", "poison")]
BF16, FLOAT32 = torch.bfloat16, torch.float32
WIDTHS = (32, 64, 96, 160, 512, 576, 1376, 2048, 2816, 4096, 7168, 10944, 14336)


def check(x: torch.Tensor, what: str, mode: str = "rceil", granularity: str = "auto") -> None:
    """Every defined byte of both forms, and of the rebased one alone."""
    want = reference.quantize_rows(x, mode, granularity, True)
    for mx in (True, False):
        got, of_forms = kernel.quantize_rows(x, mode, granularity, mx), want if mx else want[2:]
        assert len(got) == len(of_forms)
        defined = 2 * mx + 2
        for name, a, b in zip(("qdata", "scale", "data", "row scale")[-defined:], got, of_forms, strict=False):
            same(a, b, f"{what} {name}, mx={mx}")
        if granularity != "row":
            wide = want[3] < 0
            assert (got[-1].shape, got[-1].stride()) == (want[-1].shape, want[-1].stride())
            same(got[-1][:, wide], want[-1][:, wide], f"{what} block scales, mx={mx}")


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 31, *(pytest.param(rows, marks=pytest.mark.large) for rows in (129, 257))])
def test_every_size(rows: int, width: int, dtype: torch.dtype) -> None:
    """Some rows are wide, some are zero, some have blocks of zeros, NaN or Inf."""
    x = far_apart(dtype, rows, width)[1][:, width:].cuda()
    x[::4, -32:] = 0
    for granularity in MAX_SPREAD:
        check(x, f"{rows} x {width} {granularity}", granularity=granularity)


@pytest.mark.parametrize("granularity", MAX_SPREAD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_every_value(dtype: torch.dtype, mode: str, granularity: str) -> None:
    for name, x in quantizer_inputs(dtype).items():
        check(x.cuda(), name, mode, granularity)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_strided_rows(dtype: torch.dtype) -> None:
    x = torch.randn(67, 1032, device="cuda", dtype=dtype)
    check(x[:, :512], "rows far apart")
    check(x[:, 1:513], "rows that start anywhere")
    check(x[:64, :64].t(), "transposed")
    check(x[:1, :96].expand(50, 96), "one row again and again")


def test_no_rows() -> None:
    made = kernel.quantize_rows(torch.empty(0, 192, device="cuda", dtype=BF16), "rceil", "auto", True)
    assert [tuple(part.shape) for part in made] == [(0, 192), (0, 6), (0, 192), (0,), (2, 0)]


def test_rows_that_take_two_kernels() -> None:
    check(far_apart(BF16, 9, tiles.QUANTIZE_ROWS_WIDEST + 32)[0].cuda(), "two kernels")
    check(far_apart(BF16, 9, tiles.QUANTIZE_ROWS_WIDEST)[0].cuda(), "one kernel")


def test_past_two_billion_elements() -> None:
    """x has 2^31 + 2^20 elements: the last rows are where they belong."""
    x = torch.zeros((1 << 17) + 64, 16384, device="cuda", dtype=BF16)
    x[-65:] = torch.randn(65, 16384, device="cuda", dtype=BF16)
    got, want = kernel.quantize_rows(x, "rceil", "row", True), reference.quantize_rows(x[-65:], "rceil", "row", True)
    for a, b in zip(got, want, strict=True):
        same(a[-65:], b, "last rows")


def test_no_host_sync(no_sync) -> None:
    x = torch.randn(64, 96, device="cuda", dtype=BF16)
    with no_sync():
        for _ in range(2):
            kernel.quantize_rows(x, "rceil", "auto", True)


@pytest.mark.parametrize("name", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_a_linear_has_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, by one kernel and by two."""
    torch.manual_seed(0)
    layer = MXLinear(torch.nn.Linear(512, 416, device="cuda", dtype=dtype), Recipe.named(name))
    x, dy = (torch.randn(3, 320, width, device="cuda", dtype=dtype) for width in (512, 416))
    x[:, ::9, :64] *= 2.0**12

    def run() -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        return [y.detach(), *torch.autograd.grad(y, (leaf, *layer.parameters()), dy)]

    one_pass = run()
    monkeypatch.setattr(products, "_rebases", lambda *_: False)
    for got, want in zip(one_pass, run(), strict=True):
        assert torch.equal(got, want)

"""The MXFP8 grouped GEMM: every case of the contract, against float64 products of the values that enter it."""

from __future__ import annotations

import pytest
import torch
from tests.truth import assert_same, saved_tensors, seeded, sqnr

from mxep import MXTensor, ScaleCalculationMode, quantize_mx, reference, to_mxfp8_then_scaled_grouped_mm
from mxep import _to_mxfp8_then_scaled_grouped_mm as under_its_old_name
from mxep.grouped_mm.function import expert_mm, recipe_grouped_mm
from mxep.recipe import RECIPES, Recipe

pytestmark = pytest.mark.usefixtures("every_device")
BF16, F32 = torch.bfloat16, torch.float32
K, N = 96, 64
ALIGNED = [64, 96, 96, 192]  # an empty group in the middle
RAGGED = [1, 32, 32, 63, 190]


def offsets(ends: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


def operands(ends: list[int], rows: int | None = None, dtype: torch.dtype = F32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A (M, K) and w (G, N, K), leaves."""
    generator = seeded(seed)
    rows = (ends[-1] if ends else 0) if rows is None else rows
    a, w = torch.randn(rows, K, generator=generator), torch.randn(len(ends), N, K, generator=generator) / K**0.5
    return a.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()


def values(x: torch.Tensor, mode: str = "rceil") -> torch.Tensor:
    """Float64 values after quantising 1x32 along the last dimension."""
    return reference.dequantize(*reference.quantize(x.detach(), mode), F32).double()


def product(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """(M, K) x (G, N, K) -> (M, N), zero past the last end; float64."""
    out, start = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64), 0
    for group, end in enumerate(ends):
        out[start:end] = a[start:end].double() @ b[group].double().t()
        start = end
    return out


def wgrad(grad: torch.Tensor, a: torch.Tensor, ends: list[int], quantised: bool = False, mode: str = "rceil") -> torch.Tensor:
    """dW (G, N, K); quantised: each group's operands 32x1 along its own rows, padded with zeros to whole blocks."""
    out, start = torch.zeros(len(ends), grad.shape[1], a.shape[1], dtype=torch.float64), 0
    for group, end in enumerate(ends):
        if end > start:
            g, x = grad[start:end], a[start:end]
            if quantised:
                pad = torch.zeros(-(end - start) % 32, 1)
                g, x = (values(torch.cat([t, pad.to(t.dtype).expand(-1, t.shape[1])]).t(), mode).t() for t in (g, x))
            out[group] = g.double().t() @ x.double()
        start = end
    return out


def assert_close(got: torch.Tensor, truth: torch.Tensor, what: str) -> None:
    """`got` differs from the float64 truth only by the rounding to the output's dtype and the summation.

    FP8 tensor cores, which bf16 results may come from on a GPU, keep about 14 bits while they sum (docs/numerics.md): up to 6e-4, an
    error of its own beside the rounding's, so that their squares add up.
    """
    assert got.shape == truth.shape, what
    size = truth.norm()
    best = (truth.to(got.dtype).double() - truth).norm()  # what an exact product loses when it is rounded
    error = (got.double() - truth).norm()
    summed_in_14_bits = got.is_cuda and got.dtype == BF16
    allowed = torch.hypot(1.02 * best, 6e-4 * size) if summed_in_14_bits else 1.02 * best + 5e-6 * size
    assert error <= allowed, f"{what}: error {error / size:.3e}, rounding alone {best / size:.3e}"


def check(
    ends: list[int], rows: int | None = None, dtype: torch.dtype = F32, out_dtype: torch.dtype = F32, mode: str = "rceil", hp: bool = True,
    **options: object,
) -> None:  # fmt: skip
    """Forward, dgrad and wgrad against float64 products of the quantised operands."""
    a, w = operands(ends, rows, dtype)
    out = to_mxfp8_then_scaled_grouped_mm(
        a,
        w.transpose(-2, -1),
        offsets(ends),
        out_dtype=out_dtype,
        wgrad_with_hp=hp,
        scale_calculation_mode=ScaleCalculationMode(mode),
        **options,
    )
    grad = torch.randn(out.shape, generator=seeded(7)).to(out_dtype)
    out.backward(grad)
    assert (out.dtype, a.grad.dtype, w.grad.dtype) == (out_dtype, dtype, dtype)
    last = ends[-1] if ends else 0
    assert not out[last:].any()
    assert not a.grad[last:].any()
    assert_close(out.detach(), product(values(a, mode), values(w, mode), ends), "out")
    assert_close(a.grad, product(values(grad, mode), values(w.transpose(-2, -1), mode), ends), "dX")
    assert_close(w.grad, wgrad(grad, a.detach(), ends, quantised=not hp, mode=mode), "dW")
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            assert not w.grad[group].any(), "an empty group's dW is exactly zero"


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("hp", [True, False])
@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_against_float64(dtype: torch.dtype, out_dtype: torch.dtype, hp: bool, mode: str) -> None:
    check(ALIGNED, None, dtype, out_dtype, mode, hp)
    check(ALIGNED, 224, dtype, out_dtype, mode, hp)  # rows past the last end


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("padded", [True, False])
def test_groups_that_are_no_multiples_of_32(dtype: torch.dtype, padded: bool) -> None:
    for ends in (RAGGED, [0, 0, 1], [31, 64, 193], [127, 256], [5]):
        check(ends, None, dtype, BF16, hp=True, pad_token_groups_for_grouped_mm=padded)
        check(ends, ends[-1] + 13, dtype, F32, hp=True, pad_token_groups_for_grouped_mm=padded)
    if padded:
        for ends in (RAGGED, [0, 0, 1], [31, 64, 193]):
            check(ends, None, dtype, F32, hp=False, pad_token_groups_for_grouped_mm=True)
            check(ends, ends[-1] + 13, dtype, F32, hp=False, pad_token_groups_for_grouped_mm=True)
        check(ALIGNED, 230, dtype, F32, hp=False, pad_token_groups_for_grouped_mm=True)


@pytest.mark.parametrize("hp", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_no_rows(hp: bool, padded: bool) -> None:
    check([0, 0], 0, hp=hp, pad_token_groups_for_grouped_mm=padded)
    check([0, 0], 64, hp=hp, pad_token_groups_for_grouped_mm=padded)
    check([0], 0, BF16, BF16, hp=hp, pad_token_groups_for_grouped_mm=padded)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_mx_input(dtype: torch.dtype) -> None:
    """Forward multiplies its bytes and wgrad its values: the results of a plain input that is quantised inside."""
    a, w = operands(RAGGED, 200, dtype)
    mx = quantize_mx(a.detach()).requires_grad_()
    out = to_mxfp8_then_scaled_grouped_mm(mx, w.transpose(-2, -1), offsets(RAGGED), out_dtype=F32, wgrad_with_hp=True)
    plain = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(RAGGED), out_dtype=F32, wgrad_with_hp=True)
    assert_same(out.detach(), plain.detach())
    grad = torch.randn(out.shape)
    d_mx, d_w = torch.autograd.grad(out, (mx, w), grad)
    (d_a,) = torch.autograd.grad(plain, a, grad)
    assert d_mx.dtype == dtype
    assert_same(d_mx, d_a, "dX")
    assert_close(d_w, wgrad(grad, values(a), RAGGED), "dW of the dequantised values")


def test_mx_gradient() -> None:
    """dgrad multiplies the bytes of an MX gradient, and wgrad its values."""
    a, w = operands(RAGGED, 200)
    out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(RAGGED), out_dtype=F32, wgrad_with_hp=True)
    grad = torch.randn(out.shape)
    d_a, d_w = torch.autograd.grad(out, (a, w), quantize_mx(grad), retain_graph=True)
    assert_close(d_a, product(values(grad), values(w.transpose(-2, -1)), RAGGED), "dX")
    assert_close(d_w, wgrad(values(grad), a.detach(), RAGGED), "dW")
    again = torch.autograd.grad(out, (a, w), quantize_mx(grad).dequantize())
    assert_same(again[0], d_a)
    assert_same(again[1], d_w)
    floor = quantize_mx(grad, ScaleCalculationMode.FLOOR)  # bytes of another mode than the GEMM's
    out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(RAGGED), out_dtype=F32, wgrad_with_hp=True)
    (d_a,) = torch.autograd.grad(out, a, floor)
    assert_close(d_a, product(values(grad, "floor"), values(w.transpose(-2, -1)), RAGGED), "dX of FLOOR bytes")


@pytest.mark.parametrize("hp", [True, False])
def test_gradients_of_other_strides(hp: bool) -> None:
    for dtype in (BF16, F32):
        a, w = operands(ALIGNED, 224, dtype)
        out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED), out_dtype=dtype, wgrad_with_hp=hp)
        ones = torch.autograd.grad(out, (a, w), torch.ones_like(out), retain_graph=True)
        for got, want in zip(torch.autograd.grad(out.sum(), (a, w), retain_graph=True), ones, strict=True):
            assert_same(got, want, "expanded")
        grad = torch.randn(out.shape).to(dtype)
        wanted = torch.autograd.grad(out, (a, w), grad, retain_graph=True)
        for strided in (grad.t().contiguous().t(), torch.stack([grad, grad], 1)[:, 0]):
            for got, want in zip(torch.autograd.grad(out, (a, w), strided, retain_graph=True), wanted, strict=True):
                assert_same(got, want, "strided")


def test_operands_of_other_strides() -> None:
    a, w = operands(ALIGNED)
    want = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED))
    strided = a.detach().t().contiguous().t()
    b_t = w.detach().transpose(-2, -1).contiguous()  # row-major (G, K, N)
    assert_same(to_mxfp8_then_scaled_grouped_mm(strided, b_t, offsets(ALIGNED)), want.detach())
    b_t.requires_grad_()
    grad = torch.randn(want.shape).bfloat16()
    to_mxfp8_then_scaled_grouped_mm(a, b_t, offsets(ALIGNED)).backward(grad)
    want.backward(grad)
    assert_same(b_t.grad.transpose(-2, -1).contiguous(), w.grad)


def test_mx_input_of_strided_records() -> None:
    a, w = operands(ALIGNED)
    records = reference.quantize_packed(a.detach(), "rceil")
    mx = MXTensor.from_qdata_and_scales(records[:, :K].view(torch.float8_e4m3fn), records[:, K : K + K // 32], F32)
    got = to_mxfp8_then_scaled_grouped_mm(mx, w.transpose(-2, -1), offsets(ALIGNED), wgrad_with_hp=True)
    assert_same(got, to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED)))


def test_offsets_of_either_width_and_defaults() -> None:
    a, w = operands(ALIGNED)
    want = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED))
    assert want.dtype == BF16, "the default output"
    assert_same(to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED, torch.int64)), want)
    assert_same(under_its_old_name(a, w.transpose(-2, -1), offs=offsets(ALIGNED)), want)
    want.sum().backward()


def test_mixed_dtypes() -> None:
    """A bf16 activation with a float32 master weight, and the other way round."""
    for a_dtype, w_dtype in ((BF16, F32), (F32, BF16)):
        a, w = operands(RAGGED)
        a, w = a.detach().to(a_dtype).requires_grad_(), w.detach().to(w_dtype).requires_grad_()
        out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(RAGGED), out_dtype=F32, wgrad_with_hp=True)
        grad = torch.randn(out.shape)
        out.backward(grad)
        assert (a.grad.dtype, w.grad.dtype) == (a_dtype, w_dtype)
        assert_close(w.grad, wgrad(grad, a.detach(), RAGGED), "each operand enters wgrad as it was given: float32 as float32")


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(N,), (len(ALIGNED), N)])
@pytest.mark.parametrize("bias_dtype", [BF16, F32])
def test_bias(shape: tuple[int, ...], bias_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, w = operands(ALIGNED, 224)
    bias = torch.randn(shape).to(bias_dtype).requires_grad_()
    call = (a, w.transpose(-2, -1), offsets(ALIGNED))
    without = to_mxfp8_then_scaled_grouped_mm(*call, out_dtype=out_dtype, wgrad_with_hp=True)
    out = to_mxfp8_then_scaled_grouped_mm(*call, bias=bias, out_dtype=out_dtype, wgrad_with_hp=True)
    want, start = without.detach().clone(), 0
    grad = torch.randn(out.shape).to(out_dtype)
    want_grad = torch.zeros(len(ALIGNED), N, dtype=torch.float64)
    for group, end in enumerate(ALIGNED):
        want[start:end] += (bias if len(shape) == 1 else bias[group]).detach().to(out_dtype)
        want_grad[group] = grad[start:end].double().sum(0)
        start = end
    assert_same(out.detach(), want, "the rows past the last end stay zero")
    d_a, d_w, d_bias = torch.autograd.grad(out, (a, w, bias), grad)
    assert d_bias.dtype == bias_dtype
    torch.testing.assert_close(
        d_bias.double(), (want_grad if len(shape) == 2 else want_grad.sum(0)).to(bias_dtype).double(), rtol=8e-3, atol=1e-5
    )
    if bias_dtype == F32:
        torch.testing.assert_close(d_bias.double(), want_grad if len(shape) == 2 else want_grad.sum(0), rtol=1e-5, atol=1e-5)
    for got, same in zip((d_a, d_w), torch.autograd.grad(without, (a, w), grad), strict=True):
        assert_same(got, same, "bias changes no other gradient")


def test_bias_gradient_is_exact_on_integers() -> None:
    a, w = operands(RAGGED)
    for shape in ((N,), (len(RAGGED), N)):
        bias = torch.zeros(shape, requires_grad=True)
        out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(RAGGED), bias=bias, out_dtype=F32, wgrad_with_hp=True)
        out.sum().backward()
        sizes = torch.diff(offsets(RAGGED), prepend=offsets([0])).float()
        assert torch.equal(bias.grad, sizes[:, None].expand(-1, N) if len(shape) == 2 else sizes.sum().expand(N))


def test_nan_reaches_only_its_row_and_its_group() -> None:
    a, w = operands(RAGGED, 200)
    bias = torch.zeros(len(RAGGED), N, requires_grad=True)
    with torch.no_grad():
        a[40, 5] = torch.nan  # a row of group 3
    for rows in (a, quantize_mx(a.detach()).requires_grad_()):
        out = to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offsets(RAGGED), bias=bias, out_dtype=F32, wgrad_with_hp=True)
        assert out.isnan().any(1).nonzero().flatten().tolist() == [40]
        assert out[40].isnan().all()
        grad = torch.randn(out.shape)
        d_rows, d_w = torch.autograd.grad(out, (rows, w), grad, retain_graph=True)
        assert not d_rows.isnan().any()
        assert d_w.isnan().flatten(1).any(1).tolist() == [False, False, False, True, False]
        grad[100, 3] = torch.inf  # a row of group 4
        d_rows, d_w, d_bias = torch.autograd.grad(out, (rows, w, bias), grad)
        assert (~d_rows.isfinite()).any(1).nonzero().flatten().tolist() == [100]
        assert d_w.isfinite().flatten(1).all(1).tolist() == [True, True, True, False, False]
        assert d_bias.isfinite().all(1).tolist() == [True, True, True, True, False], "another group's NaN reaches no bias"


def test_nan_past_the_last_end_reaches_nothing() -> None:
    a, w = operands(ALIGNED, 224)
    with torch.no_grad():
        a[192:] = torch.nan
    bias = torch.zeros(len(ALIGNED), N, requires_grad=True)
    for hp, padded in ((True, False), (True, True), (False, False), (False, True)):
        out = to_mxfp8_then_scaled_grouped_mm(
            a, w.transpose(-2, -1), offsets(ALIGNED), bias, F32, wgrad_with_hp=hp, pad_token_groups_for_grouped_mm=padded
        )
        grad = torch.ones_like(out)
        grad[192:] = torch.nan
        for tensor in (out, *torch.autograd.grad(out, (a, w, bias), grad)):
            assert tensor.isfinite().all()


def test_saved_tensors() -> None:
    a, w = operands(ALIGNED)
    with saved_tensors() as saved:
        to_mxfp8_then_scaled_grouped_mm(quantize_mx(a.detach()), w.transpose(-2, -1), offsets(ALIGNED), wgrad_with_hp=True)
    sizes = sorted(t.numel() * t.element_size() for t in saved)
    assert sizes == sorted([192 * K, 192 * K // 32, w.numel() * 4, 4 * len(ALIGNED)]), "MX bytes, the weight and the ends, no copy"
    with saved_tensors() as saved, torch.no_grad():
        to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED))
    assert saved == []


def test_only_the_gradients_that_are_asked_for() -> None:
    a, w = operands(ALIGNED)
    for leaf, frozen in ((a, w), (w, a)):
        both = (leaf, frozen.detach()) if leaf is a else (frozen.detach(), leaf)
        to_mxfp8_then_scaled_grouped_mm(both[0], both[1].transpose(-2, -1), offsets(ALIGNED)).sum().backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("hp", [True, False])
def test_sqnr_of_the_contract(hp: bool) -> None:
    """The GEMM alone against the bf16 one: out 27, dx 25, dW 24 dB; pre-quantised A against dynamic at least 60."""
    ends, rows = [128, 128, 416, 512], 512
    torch.manual_seed(0)
    a, w = torch.randn(rows, 256, dtype=BF16, requires_grad=True), torch.randn(4, 192, 256, dtype=BF16, requires_grad=True)
    grad = torch.randn(rows, 192, dtype=BF16)
    out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ends), wgrad_with_hp=hp)
    got = (out.detach(), *torch.autograd.grad(out, (a, w), grad))
    plain = expert_mm(a, w, offsets(ends), RECIPES["bf16" if "bf16" in RECIPES else "hp"])
    want = (plain.detach(), *torch.autograd.grad(plain, (a, w), grad))
    for name, least, mine, truth in zip(("out", "dX", "dW"), (27, 25, 24), got, want, strict=True):
        assert sqnr(truth, mine) >= least, f"{name}: {sqnr(truth, mine):.1f} dB"
    if hp:
        assert sqnr(want[2], got[2]) >= 60, "wgrad in high precision multiplies plain operands unquantised"
        pre = to_mxfp8_then_scaled_grouped_mm(quantize_mx(a.detach()), w.transpose(-2, -1), offsets(ends), wgrad_with_hp=True)
        assert sqnr(out.detach(), pre.detach()) >= 60


def test_autocast_changes_nothing() -> None:
    """The recipe decides the precision of the GEMM, not autocast, which would cast float32 products to bf16."""
    for recipe in RECIPES.values():
        a, w = operands(ALIGNED)
        want = expert_mm(a, w, offsets(ALIGNED), recipe)
        grad = torch.randn(want.shape)
        wanted = torch.autograd.grad(want, (a, w), grad)
        with torch.autocast(a.device.type, torch.bfloat16):
            got = expert_mm(a, w, offsets(ALIGNED), recipe)
            grads = torch.autograd.grad(got, (a, w), grad)
        for mine, truth in zip((got.detach(), *grads), (want.detach(), *wanted), strict=True):
            assert_same(mine, truth, recipe.name)


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_expert_mm_follows_its_recipe(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES[name]
    a, w = operands(ALIGNED, 224, dtype)
    out = expert_mm(a, w, offsets(ALIGNED), recipe)
    assert out.dtype == dtype
    grad = torch.randn(out.shape).to(dtype)
    d_a, d_w = torch.autograd.grad(out, (a, w), grad)
    assert (d_a.dtype, d_w.dtype) == (dtype, dtype)
    assert not out[192:].any()
    assert not d_a[192:].any()
    if recipe.gemm == "hp":
        assert_close(out.detach(), product(a.detach(), w.detach(), ALIGNED), "out")
        assert_close(d_a, product(grad, w.detach().transpose(-2, -1), ALIGNED), "dX")
    else:
        mode = recipe.scaling_mode.value
        assert_close(out.detach(), product(values(a, mode), values(w, mode), ALIGNED), "out")
        assert_close(d_a, product(values(grad, mode), values(w.transpose(-2, -1), mode), ALIGNED), "dX")
    a = a.detach()
    if recipe.wgrad == "mx":
        grad, a = values(grad, mode), values(a, mode)
    assert_close(d_w, wgrad(grad, a, ALIGNED, recipe.wgrad == "mxfp8", recipe.scaling_mode.value), "dW")


def test_wgrad_from_mx_quantises_once_and_saves_mx() -> None:
    a, w = operands(ALIGNED, 224, BF16)
    recipe = RECIPES["mxfp8_wgrad_with_mx"]
    with saved_tensors() as saved:
        out = expert_mm(a, w, offsets(ALIGNED), recipe)
    assert not [t for t in saved if t.shape == a.shape and t.dtype == BF16]
    quantised = MXTensor(*reference.quantize(a.detach(), recipe.scaling_mode.value), BF16)
    grad = torch.randn(out.shape).to(BF16)
    got = torch.autograd.grad(out, (a, w), grad)
    leaf = quantised.requires_grad_()
    want = torch.autograd.grad(expert_mm(leaf, w, offsets(ALIGNED), RECIPES["mxfp8_wgrad_with_hp"]), (leaf, w), grad)
    assert_same(got[0], want[0], "dX")
    mx_grad = MXTensor(*reference.quantize(grad, recipe.scaling_mode.value), BF16)
    out = expert_mm(leaf, w, offsets(ALIGNED), RECIPES["mxfp8_wgrad_with_hp"])
    assert_same(got[1], torch.autograd.grad(out, w, mx_grad)[0], "dW, as from an MX gradient")


def test_high_precision_by_recipe_and_by_number_of_rows() -> None:
    """By name, and below `hp_below_rows`; also where dW is added to a gradient of float32."""
    a, weight, offs = torch.randn(64, 128), torch.randn(2, 96, 128), torch.tensor([32, 64], dtype=torch.int32)
    want = product(a, weight, [32, 64])
    for recipe in (Recipe.named("hp"), Recipe("few", hp_below_rows=1000)):
        assert_close(recipe_grouped_mm(a, weight.transpose(-2, -1), offs, None, torch.float32, recipe), want, recipe.name)
        leaf, total = weight.clone().requires_grad_(), torch.ones(2, 96, 128)
        recipe_grouped_mm(a, leaf.transpose(-2, -1), offs, None, torch.float32, recipe, main_grad=total).sum().backward()
        torch.testing.assert_close(total, 1 + torch.stack([part.sum(0).expand(96, 128) for part in a.split(32)]))

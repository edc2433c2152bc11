"""The GEMM path "fp8" of the public functions: chosen by "auto" on Hopper or by name, as exact as "exact" up to bf16's rounding."""

from __future__ import annotations

import pytest
import torch
from tests.fp8_cases import quantized
from tests.mx_cases import packed_views
from tests.truth import relative_error

from mxep.device import FP8_PATHS, compute_capability, resolve_gemm_path
from mxep.grouped_mm.function import to_mxfp8_then_scaled_grouped_mm
from mxep.mx import MXTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or compute_capability(0)[0] != 9, reason="needs a Hopper GPU"),
]
ENDS = [0, 33, 300, 300, 480]
M, K, N = 512, 352, 160


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(M, K, device="cuda", generator=generator, dtype=torch.bfloat16)
    w = torch.randn(len(ENDS), N, K, device="cuda", generator=generator, dtype=torch.bfloat16) * 0.1
    return a, w, torch.tensor(ENDS, dtype=torch.int32, device="cuda")


def gradients(path: str, mx: bool, **options: object) -> tuple[torch.Tensor, ...]:
    a, w, offs = operands()
    w.requires_grad_()
    if mx:
        x: torch.Tensor = MXTensor(*packed_views(*quantized(a)), torch.bfloat16)
    else:
        x = a.requires_grad_()
    out = to_mxfp8_then_scaled_grouped_mm(x, w.transpose(-2, -1), offs, kernel_preference=path, wgrad_with_hp=True, **options)
    out.backward(torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype))
    return (out, w.grad) if mx else (out, w.grad, a.grad)  # type: ignore[return-value]


def test_auto_is_fp8():
    assert resolve_gemm_path("auto", torch.device("cuda", 0)) == "fp8"
    assert resolve_gemm_path("emulated", torch.device("cuda", 0)) == "exact"


@pytest.mark.parametrize("path", FP8_PATHS)
@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_as_exact_as_exact(path: str, mx: bool, padded: bool):
    exact, fp8 = (gradients(name, mx, pad_token_groups_for_grouped_mm=padded) for name in ("exact", path))
    for got, want in zip(fp8, exact, strict=True):
        assert relative_error(got, want.double()) <= 3.4e-3  # two bf16 roundings
    assert not fp8[0][ENDS[-1] :].any()
    assert not fp8[1][0].any()
    assert not fp8[1][3].any()


def test_sums_are_promoted():
    """On operands of one sign the tensor cores' 14-bit sums lose most: promoted every 128 products, they stay below 1.5e-3.

    Half tiles and whole ones are compiled apart, and where whole ones would leave half of the SMs without work all are halves: 96 tiles of
    128 x 256 are whole.
    """
    generator = torch.Generator("cuda").manual_seed(2)
    a, w = (torch.rand(*shape, device="cuda", generator=generator) for shape in ((2048, 8192), (2, 1536, 8192)))
    g = torch.rand(8192, 1536, device="cuda", generator=generator)
    offs, ends = (torch.tensor(e, dtype=torch.int32, device="cuda") for e in ([1000, 2048], [8192]))
    assert 96 <= torch.cuda.get_device_properties(0).multi_processor_count < 192
    x, b = quantized(a), quantized(w)
    exact = torch.ops.mxep.grouped_mm_mx(*x, *b, offs, torch.float32, "exact").double()
    tokens = quantized(g), quantized(a.view(8192, 2048))
    dw = torch.ops.mxep.grouped_wgrad_mx(*tokens[0], *tokens[1], ends, torch.float32, "exact").double()
    assert relative_error(torch.ops.mxep.grouped_mm_mx(*x, *b, offs, torch.float32, "fp8_row"), exact) < 1.5e-3
    assert relative_error(torch.ops.mxep.grouped_wgrad_mx(*tokens[0], *tokens[1], ends, torch.float32, "fp8_row"), dw) < 1.5e-3


def test_float32_out():
    exact, auto, fp8 = (gradients(name, False, out_dtype=torch.float32) for name in ("exact", "auto", "fp8"))
    assert fp8[0].dtype == torch.float32
    assert torch.equal(auto[0], exact[0])  # float32 asked for, float32 sums given
    assert 1e-6 < relative_error(fp8[0], exact[0].double()) <= 8e-4


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_wgrad_of_two_mx_operands(out_dtype: torch.dtype):
    a, _, offs = operands()
    g = quantized(torch.randn(M, N, device="cuda"))
    x = quantized(a)
    exact = torch.ops.mxep.grouped_wgrad_mx(*g, *x, offs, torch.float32, "exact")
    for operands_of in (lambda mx: mx, lambda mx: packed_views(*mx)):
        for path in FP8_PATHS:
            dw = torch.ops.mxep.grouped_wgrad_mx(*operands_of(g), *operands_of(x), offs, out_dtype, path)
            assert relative_error(dw, exact.double()) <= 2.0e-3
            assert not dw[0].any()
            assert not dw[3].any()


def test_fakes():
    a, w, offs = operands()
    x, g, b = quantized(a), quantized(torch.randn(M, N, device="cuda")), quantized(w)
    for operator, given in ((torch.ops.mxep.grouped_wgrad_mx.default, (*g, *x)), (torch.ops.mxep.grouped_mm_mx.default, (*x, *b))):
        torch.library.opcheck(operator, (*given, offs, torch.bfloat16, "fp8"), test_utils="test_faketensor")


@pytest.mark.parametrize("path", ["exact", *FP8_PATHS])
def test_sums_added_to_a_gradient(path: str):
    """Equal to the float32 result added on; an empty group's part keeps its bytes."""
    a, _, offs = operands()
    g, x = quantized(torch.randn(M, N, device="cuda")), quantized(a)
    before = torch.randn(len(ENDS), N, K, device="cuda")
    into = before.clone()
    torch.ops.mxep.grouped_wgrad_mx(*packed_views(*g), *packed_views(*x), offs, torch.float32, path, out=into, accumulate=True)
    assert torch.equal(into, before + torch.ops.mxep.grouped_wgrad_mx(*g, *x, offs, torch.float32, path))
    for group in (0, 3):
        assert torch.equal(into[group], before[group])
    grad = torch.randn(M, N, device="cuda")
    for left, right in ((grad, a.float()), (grad.bfloat16(), a)):
        into = before.clone()
        torch.ops.mxep.grouped_wgrad_hp(left, right, offs, torch.float32, out=into, accumulate=True)
        torch.testing.assert_close(into, before + torch.ops.mxep.grouped_wgrad_hp(left, right, offs, torch.float32))


def test_captured_in_a_graph_and_replayed_with_other_data_and_ends():
    """Forward, dgrad and wgrad as a training step runs them: quantised and rebased inside, weights prepared inside."""
    a, w, offs = operands()
    g = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        ops = torch.ops.mxep
        qa, qg = ops.quantize(a, "rceil"), ops.quantize(g, "rceil")
        out = ops.grouped_mm_mx(*qa, *ops.quantize(w, "rceil"), offs, torch.bfloat16, "fp8")
        w_t = ops.rebase_weight(*ops.quantize(w.transpose(1, 2).contiguous(), "rceil"))
        dx = ops.grouped_mm_mx(*qg, *w_t, offs, torch.bfloat16, "fp8")
        total.zero_()
        ops.grouped_wgrad_mx(*qg, *qa, offs, torch.float32, "fp8", out=total, accumulate=True)
        return out, dx, ops.grouped_wgrad_mx(*qg, *qa, offs, torch.bfloat16, "fp8"), total

    total = torch.zeros(len(ENDS), N, K, device="cuda")
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for ends in (ENDS, [512] * 5, [1, 2, 130, 400, 401]):
        offs.copy_(torch.tensor(ends))
        a.normal_(), g.normal_(), w.normal_()
        a[:7] *= 2.0**20  # rows with block scales come and go
        graph.replay()
        got = [result.clone() for result in captured]
        for replayed, eager in zip(got, step(), strict=True):
            assert torch.equal(replayed, eager)

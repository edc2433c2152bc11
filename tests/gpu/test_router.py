"""The router's choice and the gradient of its logits on the GPU, against their references and without a sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests import route_cases

from mxep import reference
from mxep.moe.router import RouterProduct
from mxep.ops import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(0, 8, 2), (1, 1, 1), (4097, 64, 6), (3000, 256, 8), (500, 100, 7)])
def test_gradients_are_those_of_the_reference(tokens: int, experts: int, choices: int, score_function: str, no_sync: Callable) -> None:
    logits, d_weights = torch.randn(tokens, experts, device="cuda") * 4, torch.randn(tokens, choices, device="cuda")
    chosen = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :choices]
    d_shares, d_z = torch.randn(experts, device="cuda"), torch.tensor(0.5, device="cuda")
    for renormalize, losses in ((True, (d_shares, None)), (False, (None, d_z)), (True, (d_shares, d_z))):
        given = logits, chosen if renormalize else chosen.short(), d_weights, *losses  # saved in fewer bits
        for dtype, near in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
            how = score_function, renormalize, 2.5, dtype
            with no_sync():
                got = kernels.router_backward(*given, *how)
                parts = kernels.router_backward(*given, *how, in_parts=True)
            want = reference.router_backward(*given, *how)
            route_cases.check_gradient(given, how, got, want, near)
            if dtype == torch.float32:
                route_cases.check_parts(parts, given, how, want)


def test_underflow_and_nan() -> None:
    chosen = torch.tensor([[0, 3], [1, 2], [3, 0]], device="cuda")
    logits = torch.full((3, 4), -300.0, device="cuda")
    logits[2, 1] = torch.nan
    given = logits, chosen, *(torch.ones(shape, device="cuda") for shape in ((3, 2), (4,), ()))
    got = kernels.router_backward(*given, "sigmoid", True, 1.0, torch.float32)
    assert got[:2].isfinite().all()
    assert got[2].isnan().any()


@pytest.mark.parametrize(
    "shape", [*route_cases.SHAPES, *(pytest.param(shape, marks=pytest.mark.large) for shape in ((8192, 128, 8, 1), (4097, 256, 8, 8)))]
)
def test_choice(shape: tuple[int, int, int, int], no_sync: Callable) -> None:
    for call in route_cases.calls(shape, "cuda"):
        with no_sync():
            got = kernels.route_tokens(*call)
        route_cases.check(call, got)
        assert all(map(torch.equal, got, kernels.route_tokens(*call))), "the same again"


def test_choice_of_nan() -> None:
    for call in route_cases.calls((70, 24, 5, 3), "cuda"):
        call[0][4] = torch.nan
        if not call[6]:
            route_cases.check_nan(call, kernels.route_tokens(*call), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "experts"), [(0, 64, 8), (1, 64, 8), (4097, 2048, 64), (2048, 7168, 256), (500, 96, 100)])
def test_the_float32_product(tokens: int, width: int, experts: int, dtype: torch.dtype, no_sync: Callable) -> None:
    """Of bf16 tokens: logits and the gate's gradient near float32's precision, TF32 switched on or not, and no float32 copy of the tokens.

    Tensor cores add 16 products at a time to a float32 accumulator and cut what is beyond its last bit, half of that bit on average.
    """
    x, weight = torch.randn(tokens, width, device="cuda").bfloat16(), (torch.randn(experts, width, device="cuda") / width**0.5).to(dtype)
    d_logits = torch.randn(tokens, experts, device="cuda")
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            with no_sync():
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                logits = RouterProduct.apply(*leaves)
                most = torch.cuda.max_memory_allocated() - before
                found.append([logits, *torch.autograd.grad(logits, leaves, d_logits)])
        finally:
            torch.set_float32_matmul_precision("highest")
    assert most < 4 * x.numel() or x.numel() < 2**22
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = exact[0] @ exact[1].T
    want = [want.detach(), *torch.autograd.grad(want, exact, d_logits.double())]
    for got, again, exactly, summed in zip(*found, want, (width, experts, tokens), strict=True):
        assert torch.equal(got, again), "TF32 has no part in it"
        near = 1e-6 + summed / 16 * 2**-25 if got.dtype == torch.float32 else 4e-3
        assert (got.double() - exactly).norm() <= near * exactly.norm()

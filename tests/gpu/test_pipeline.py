"""The blocks and the layer on one GPU: the CPU's bytes and numbers, under the compiler, without host syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import mxep
import mxep.grouped_mm.function
import mxep.moe

pytestmark = pytest.mark.gpu

L, D, N = 4, 256, 160
COUNTS = [70, 0, 33, 200]
SPLITS = [sum(COUNTS)]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaves(device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(SPLITS[0], D, generator=g), torch.randn(L, N, D, generator=g) / 16
    grad = torch.randn(SPLITS[0], N, generator=g)
    x, w = (t.to(device, dtype).requires_grad_() for t in (x, w))
    return [x, w, grad.to(device, dtype), torch.tensor(COUNTS, device=device)]


def dispatch(x: torch.Tensor) -> torch.Tensor:
    return mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, SPLITS, SPLITS)


def combine(y: torch.Tensor) -> torch.Tensor:
    return mxep.a2a_combine_hp_fwd_mxfp8_bwd(y, SPLITS, SPLITS)


def gemm(rows: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return mxep.to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=w.dtype, wgrad_with_hp=True)


def chain(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = mxep.permute_mxfp8_fwd_hp_bwd(dispatch(x), counts, 1, L)
    return combine(mxep.unpermute_hp_fwd_mxfp8_bwd(gemm(rows, w, offs), row_map, shape))


def run(f: Callable, device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    x, w, grad, counts = leaves(device, dtype)
    out = f(x, w, counts)
    out.backward(grad)
    return [t.detach() for t in (out, x.grad, w.grad)]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    for name, got, want in zip(("out", "dx", "dw"), run(chain, "cuda", dtype), run(chain, "cpu", dtype), strict=True):
        assert relative(got, want) < (3e-3 if dtype == torch.bfloat16 else 2e-6), name


def test_bytes_between_the_blocks() -> None:
    made = []
    for device in ("cpu", "cuda"):
        x, _, _, counts = leaves(device)
        mx = dispatch(x)
        _, rows, row_map, padded, offs = mxep.permute_mxfp8_fwd_hp_bwd(mx, counts, 1, L)
        made.append([mx.qdata, mx.scale, rows.qdata, rows.scale, row_map, padded, offs])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().cpu().view(torch.uint8))


def test_no_host_sync_in_the_blocks(unchecked: None, no_sync: Callable) -> None:
    run(chain, "cuda")  # compiles kernels
    x, w, grad, counts = leaves("cuda")
    with no_sync():
        chain(x, w, counts).backward(grad)


def break_after_gemm(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = mxep.permute_mxfp8_fwd_hp_bwd(dispatch(x), counts, 1, L)
    y = gemm(rows, w, offs)
    torch._dynamo.graph_break()
    return combine(mxep.unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape))


# made before tracing: making one inside a traced function breaks the graph there
eager_dispatch, eager_combine = torch.compiler.disable(dispatch), torch.compiler.disable(combine)


def exchanges_eager(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = mxep.permute_mxfp8_fwd_hp_bwd(eager_dispatch(x), counts, 1, L)
    return eager_combine(mxep.unpermute_hp_fwd_mxfp8_bwd(gemm(rows, w, offs), row_map, shape))


def only_the_gemm(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = mxep.permute_mxfp8_fwd_hp_bwd(dispatch(x), counts, 1, L)
    return combine(mxep.unpermute_hp_fwd_mxfp8_bwd(torch.compile(gemm, fullgraph=True)(rows, w, offs), row_map, shape))


def checkpointed(f: Callable) -> Callable:
    return lambda *args: checkpoint(f, *args, use_reentrant=False)


COMPILED = {
    "one graph": lambda: torch.compile(chain, fullgraph=True),
    "checkpoint over the graph": lambda: checkpointed(torch.compile(chain, fullgraph=True)),
    "checkpoint inside the graph": lambda: torch.compile(checkpointed(chain), fullgraph=True),
    "break after the GEMM": lambda: torch.compile(break_after_gemm),
    "exchanges eager": lambda: torch.compile(exchanges_eager),
    "only the GEMM": lambda: only_the_gemm,
}


@pytest.mark.parametrize("name", COMPILED)
def test_inductor(name: str, unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    saw = []
    function = mxep.grouped_mm.function
    wgrad_gemm = function.wgrad_gemm
    monkeypatch.setattr(function, "wgrad_gemm", lambda grad, *rest: (saw.append(type(grad).__name__), wgrad_gemm(grad, *rest))[1])
    want = run(chain, "cuda")
    saw.clear()
    for a, b in zip(run(COMPILED[name](), "cuda"), want, strict=True):
        assert relative(a, b) < 1e-3
    if "graph" in name:
        assert saw[-1] == "MXTensor"  # the MX gradient is kept inside the graph


def test_layer_forward_and_backward() -> None:
    torch.manual_seed(0)
    moe = mxep.MoE(mxep.MoEConfig(dim=256, hidden=128, num_experts=8, top_k=2, num_shared_experts=1))
    moe.init_weights(0.05)
    x = torch.randn(2, 64, 256)
    results = []
    for device in ("cpu", "cuda"):
        here = moe.to(device)
        here.zero_grad()
        tokens = x.to(device, copy=True).requires_grad_()
        y = here(tokens)
        y.square().sum().backward()
        results.append([y.detach(), tokens.grad, here.experts.w1.grad.clone(), here.experts.w2.grad.clone()])
    for name, a, b in zip(("y", "dx", "dw1", "dw2"), *results, strict=True):
        assert relative(b, a) < 1e-3, name  # float32; a value at a rounding boundary may fall either way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_experts_follow_the_cpu(dtype: torch.dtype) -> None:
    """`Experts.fused` on a GPU against itself on the CPU; a value at a rounding boundary may fall either way."""
    torch.manual_seed(0)
    experts = mxep.moe.Experts(256, 128, 4).to(dtype)
    experts.fused = True
    x, counts = torch.randn(320, 256).to(dtype), torch.tensor([96, 32, 160, 32])
    results = []
    for device in ("cpu", "cuda"):
        here = experts.to(device)
        here.zero_grad()
        rows = x.to(device, copy=True).requires_grad_()
        out = here(rows, counts.to(device))
        out.float().square().sum().backward()
        results.append([out.detach(), rows.grad, here.w1.grad.clone(), here.w2.grad.clone(), here.w3.grad.clone()])
    for name, a, b in zip(("out", "dx", "dw1", "dw2", "dw3"), *results, strict=True):
        assert relative(b, a) < (3e-3 if dtype == torch.float32 else 1e-2), name

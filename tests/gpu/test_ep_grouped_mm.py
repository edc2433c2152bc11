"""`ep_grouped_mm` on GPUs: operators with row maps against gather and their plain forms, the call against the five blocks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.chains import by_plan
from tests.fp8_cases import mx_bytes
from tests.mx_cases import packed_views
from tests.ranks import run_ranks
from tests.truth import KINDS, assert_same, make_case

from mxep import ep_grouped_mm
from mxep.comm import set_transport
from mxep.device import FP8_PATHS, compute_capability
from mxep.ep import ExchangePlan
from mxep.recipe import RECIPES, Recipe

pytestmark = pytest.mark.gpu
hopper = pytest.mark.skipif(not torch.cuda.is_available() or compute_capability(0)[0] != 9, reason="needs a Hopper GPU")
PATHS = ["exact", *(pytest.param(path, marks=hopper) for path in FP8_PATHS)]
BACKEND = "cpu:gloo,cuda:nccl"
M, K, N = 1500, 352, 160
ENDS = [0, 130, 131, 700, 700, 1490]
ops = torch.ops.mxep


def row_map(rows: int, seed: int) -> torch.Tensor:
    """(M,) int32 into so many rows: any order, rows left out and used twice, padding."""
    generator = torch.Generator("cuda").manual_seed(seed)
    picked = torch.randint(-1, rows, (M,), device="cuda", dtype=torch.int32, generator=generator)
    picked[40:90] = -1
    return picked


def offs() -> torch.Tensor:
    return torch.tensor(ENDS, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [0, 1, 1001])
@pytest.mark.usefixtures("poison")
def test_product_through_a_row_map(rows: int, path: str, out_dtype: torch.dtype):
    q, s = mx_bytes(rows, K, "cuda", seed=1)
    b = mx_bytes(len(ENDS) * N, K, "cuda", seed=2, wild=False)
    b = b[0].view(len(ENDS), N, K), b[1].view(len(ENDS), N, K // 32)
    order = row_map(rows, 3)
    want = ops.grouped_mm_mx(*ops.gather_mx_rows(q, s, order), *b, offs(), out_dtype, path)
    for source in ((q, s), packed_views(q, s)):
        got = ops.grouped_mm_mx(*source, *b, offs(), out_dtype, path, order)
        assert_same(got, want, f"{path}, {rows} rows")
        assert not got[ENDS[-1] :].any()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("maps", ["g", "a", "both"])
@pytest.mark.usefixtures("poison")
def test_wgrad_through_row_maps(maps: str, path: str, out_dtype: torch.dtype):
    rows = {name: 1001 if maps in (name, "both") else M for name in ("g", "a")}
    g, a = mx_bytes(rows["g"], N, "cuda", seed=4), mx_bytes(rows["a"], K, "cuda", seed=5)
    order = {name: row_map(1001, seed) if maps in (name, "both") else None for seed, name in enumerate(rows)}
    gathered = [part if at is None else ops.gather_mx_rows(*part, at) for part, at in ((g, order["g"]), (a, order["a"]))]
    want = ops.grouped_wgrad_mx(*gathered[0], *gathered[1], offs(), out_dtype, path)
    for form in (lambda mx: mx, lambda mx: packed_views(*mx)):
        got = ops.grouped_wgrad_mx(*form(g), *form(a), offs(), out_dtype, path, order["g"], order["a"])
        assert_same(got, want, f"{path} {maps}")


@pytest.mark.parametrize("path", PATHS)
def test_wgrad_of_no_rows(path: str):
    """A rank that received nothing: all tokens are padding."""
    g, a = mx_bytes(0, N, "cuda"), mx_bytes(0, K, "cuda")
    order = torch.full((192,), -1, dtype=torch.int32, device="cuda")
    dw = ops.grouped_wgrad_mx(*g, *a, torch.tensor([32, 64], device="cuda"), torch.bfloat16, path, order, order)
    assert dw.shape == (2, N, K)
    assert not dw.any()


def one_call(x: torch.Tensor, w: torch.Tensor, plan: ExchangePlan, recipe: Recipe) -> torch.Tensor:
    counts = plan.num_tokens_per_expert_received
    return ep_grouped_mm(x, w, plan.input_splits, plan.output_splits, counts, plan.group_name, recipe)


def check_bits(plan: ExchangePlan, dtype: torch.dtype, what: str) -> None:
    """Every preset: out, dx and dW of the call are those of the blocks."""
    rows, device = sum(plan.input_splits), plan.num_tokens_per_expert_received.device
    normal = torch.Generator(device).manual_seed(7)
    x, grad = (torch.randn(rows, width, device=device, generator=normal).to(dtype) for width in (256, N))
    w = (torch.randn(plan.num_local_experts, N, 256, device=device, generator=normal) / 16).to(dtype)
    for recipe in RECIPES.values():
        found = []
        for chain in (one_call, by_plan):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            out = chain(*leaves, plan, recipe)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        for name, got, want in zip(("out", "dx", "dw"), *found, strict=True):
            assert_same(got, want, f"{what} {recipe.name} {dtype} {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("poison")
def test_the_bits_of_the_blocks(dtype: torch.dtype):
    for counts in ([70, 0, 33, 200], [0, 0, 0, 0], [0, 513, 0, 0]):
        check_bits(ExchangePlan.from_counts(torch.tensor(counts, device="cuda"), None), dtype, str(counts))


def test_no_host_sync(no_sync: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MXEP_CHECK", "0")
    plan = ExchangePlan.from_counts(torch.tensor([70, 0, 33, 200], device="cuda"), None)
    x = torch.randn(303, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, N, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(303, N, device="cuda", dtype=torch.bfloat16)
    for recipe in RECIPES.values():
        one_call(x, w, plan, recipe).backward(grad)  # compiles kernels
        with no_sync():
            one_call(x, w, plan, recipe).backward(grad)


def test_inductor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MXEP_CHECK", "0")
    torch._dynamo.reset()
    plan = ExchangePlan.from_counts(torch.tensor([70, 0, 33, 200], device="cuda"), None)
    recipe = RECIPES["mxfp8_wgrad_with_hp"]
    x = torch.randn(303, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, N, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for function in (one_call, torch.compile(one_call, fullgraph=True)):
        out = function(x, w, plan, recipe)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, w))])
    for eager, compiled in zip(*found, strict=True):
        assert ((eager - compiled).norm() / eager.norm()).item() < 1e-3


def _bits_over_nccl(rank: int, world: int) -> None:
    set_transport("collective")
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, 3, rows=300, seed=seed)
        plan = ExchangePlan.from_counts(case.counts[rank].cuda(), dist.group.WORLD)
        for dtype in (torch.bfloat16, torch.float32):
            check_bits(plan, dtype, kind)


@pytest.mark.multi_gpu
def test_the_bits_of_the_blocks_over_nccl():
    run_ranks(_bits_over_nccl, 2, backend=BACKEND, timeout=240)

"""The launchers that take row maps, their kernels replaced by the references: every path has the bits of gather and its plain form.

The kernels themselves, and `ep_grouped_mm`, are compared on a GPU (tests/gpu/test_ep_grouped_mm.py).
"""

from __future__ import annotations

import pytest
import torch
from tests.fp8_cases import mx_bytes, quantized
from tests.mx_cases import packed_views
from tests.truth import assert_same

from mxep import reference
from mxep.device import FP8_PATHS
from mxep.ops.grouped_gemm import reference as gemm_reference
from mxep.ops.grouped_gemm.hopper import rebase_reference

pytest.importorskip("triton")

from mxep.ops.grouped_gemm import exact, paths
from mxep.ops.grouped_gemm.hopper import fp8, rows_gemm, rows_wgrad

PATHS = ["exact", *FP8_PATHS]
M, K, N = 192, 160, 96
OFFS = torch.tensor([0, 33, 130, 130, 180], dtype=torch.int32)


@pytest.fixture(autouse=True)
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Replaces kernels by references; records the rows that were gathered and dequantised."""
    made: list[torch.Size] = []

    def dequantize(qdata, scale, dtype, row_map=None, num_valid_rows=None) -> torch.Tensor:
        out = reference.dequantize(qdata, scale, dtype, row_map, num_valid_rows)
        if row_map is not None:
            made.append(out.shape)
        return out

    monkeypatch.setattr(paths, "path_of", lambda path, device: paths.PATHS[path])
    monkeypatch.setattr(exact, "dequantize", dequantize)
    for name in ("grouped_mm_hp", "grouped_wgrad_hp"):
        monkeypatch.setattr(exact, name, getattr(reference, name))
    for module, name in ((rows_gemm, "rebase_rows"), (rows_wgrad, "rebase_tokens"), (fp8, "rebase_tokens"), (fp8, "rebase_weight")):
        monkeypatch.setattr(module, name, getattr(rebase_reference, name))
    for module, name in ((rows_gemm.gemm, "fp8_grouped_mm"), (rows_wgrad.gemm, "fp8_wgrad"), (fp8, "fp8_wgrad")):
        monkeypatch.setattr(module, name, getattr(gemm_reference, name))
    for module in (rows_gemm, rows_wgrad):  # no launch of several kernels by one call
        monkeypatch.setattr(module, "_plan", lambda *_: None)
    return made


def row_map(rows: int, seed: int) -> torch.Tensor:
    picked = torch.randint(-1, rows, (M,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    picked[40:60] = -1
    return picked


@pytest.mark.parametrize("rows", [0, 1, 301])
@pytest.mark.parametrize("path", PATHS)
def test_product(path: str, rows: int, gathers: list):
    a, order = packed_views(*mx_bytes(rows, K, seed=1)), row_map(rows, 2)
    b = quantized(torch.randn(len(OFFS), N, K, generator=torch.Generator().manual_seed(3)))
    got = paths.grouped_mm_mx(*a, *b, OFFS, torch.bfloat16, path, order)
    assert_same(got, paths.grouped_mm_mx(*reference.gather_mx_rows(*a, order), *b, OFFS, torch.bfloat16, path), path)
    assert len(gathers) == (path == "exact"), "the FP8 paths gather and rebase in one kernel"
    assert not got[180:].any()


@pytest.mark.parametrize("maps", ["g", "a", "both"])
@pytest.mark.parametrize("path", PATHS)
def test_wgrad(path: str, maps: str, gathers: list):
    rows = {name: 301 if maps in (name, "both") else M for name in ("g", "a")}
    g, a = packed_views(*mx_bytes(rows["g"], N, seed=4)), packed_views(*mx_bytes(rows["a"], K, seed=5))
    g_map, a_map = (row_map(301, seed) if maps in (name, "both") else None for seed, name in enumerate(rows))
    got = paths.grouped_wgrad_mx(*g, *a, OFFS, torch.float32, path, g_map, a_map)
    assert len(gathers) == (path == "exact") * (2 if maps == "both" else 1)
    g, a = (mx if order is None else reference.gather_mx_rows(*mx, order) for mx, order in ((g, g_map), (a, a_map)))
    assert_same(got, paths.grouped_wgrad_mx(*g, *a, OFFS, torch.float32, path), path)


@pytest.mark.parametrize("path", PATHS)
def test_wgrad_of_halves(path: str, gathers: list):
    g, a, order = packed_views(*mx_bytes(M, 2 * K, seed=6)), packed_views(*mx_bytes(301, K, seed=7)), row_map(301, 8)
    got = paths.grouped_wgrad_mx_gate_up(*g, *a, OFFS, torch.float32, path, order)
    assert len(gathers) == (path == "exact"), "once for both halves"
    want = paths.grouped_wgrad_mx_gate_up(*g, *reference.gather_mx_rows(*a, order), OFFS, torch.float32, path)
    for half, other in zip(got, want, strict=True):
        assert_same(half, other, path)


@pytest.mark.parametrize("path", PATHS)
def test_wgrad_of_no_rows(path: str):
    """A rank that received nothing: all tokens are padding."""
    order = torch.full((64,), -1, dtype=torch.int32)
    dw = paths.grouped_wgrad_mx(*mx_bytes(0, N), *mx_bytes(0, K), torch.tensor([32, 64]), torch.float32, path, order, order)
    assert not dw.any()

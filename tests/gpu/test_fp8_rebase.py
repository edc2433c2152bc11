"""Rebased operands on a GPU: every byte like the reference's, whatever the width, the stride, the order of rows and the groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.fp8_cases import mx_bytes, quantized, ragged
from tests.mx_cases import packed_views

from mxep.ops.grouped_gemm.hopper import rebase as kernels
from mxep.ops.grouped_gemm.hopper import rebase_reference as reference
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD

pytestmark = pytest.mark.gpu


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal bytes."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, want {tuple(want.shape)}"
    got, want = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    bad = (got != want).nonzero()
    assert not len(bad), f"{what}: {len(bad)} of {got.numel()} bytes differ, first at {bad[0].tolist()}"


def same_rows(got: reference.RebasedRows, want: reference.RebasedRows, what: str) -> None:
    same(got.data, want.data, f"{what} data")
    same(got.scale, want.scale, f"{what} scale")
    same(got.spread, want.spread, f"{what} spread")
    assert (got.block_scale is None) == (want.block_scale is None)
    if got.block_scale is not None and want.block_scale is not None:
        wide = want.scale < 0
        same(got.block_scale[:, wide], want.block_scale[:, wide], f"{what} block scales")


@pytest.mark.parametrize("width", [32, 96, 128, 1376, 4096, 7168, 16416])
@pytest.mark.usefixtures("poison")
def test_rows(width: int):
    qdata, scale = mx_bytes(1001, width, "cuda", seed=width)
    row_map = torch.randint(-1, 1001, (777,), device="cuda", dtype=torch.int32)
    row_map[5:40] = -1
    middle = int(reference.rebase_rows(qdata, scale, 8).spread.float().median())  # about half of the rows are wide
    for granularity, max_spread in {**MAX_SPREAD, "some": middle}.items():
        for operands in ((qdata, scale), packed_views(qdata, scale)):
            same_rows(kernels.rebase_rows(*operands, max_spread), reference.rebase_rows(qdata, scale, max_spread), f"{width} {granularity}")
        got, want = (impl.rebase_rows(qdata, scale, max_spread, row_map) for impl in (kernels, reference))
        same_rows(got, want, f"{width} {granularity} mapped")


def test_rows_that_need_a_copy():
    qdata, scale = mx_bytes(65, 96, "cuda")
    padded = torch.zeros(65, 100, dtype=torch.uint8, device="cuda")  # rows start at multiples of 4 bytes
    padded[:, :96] = qdata.view(torch.uint8)
    same_rows(kernels.rebase_rows(padded[:, :96].view(qdata.dtype), scale, 8), reference.rebase_rows(qdata, scale, 8), "unaligned")


def test_no_rows():
    qdata, scale = mx_bytes(0, 64, "cuda")
    rows = kernels.rebase_rows(qdata, scale, 8)
    assert rows.data.shape == (0, 64)
    assert rows.block_scale is not None
    assert rows.block_scale.shape == (1, 0)


def test_weight():
    qdata, scale = quantized(torch.randn(3, 64, 160, device="cuda"))
    got, want = kernels.rebase_weight(qdata, scale), reference.rebase_weight(qdata, scale)
    same(got.data, want.data, "data")
    same(got.scale, want.scale, "scale")


def test_changed_values_counts_on_the_gpu():
    qdata, scale = mx_bytes(64, 256, "cuda")
    rows = kernels.rebase_rows(qdata, scale, MAX_SPREAD["row"])
    changed = reference.changed_values(qdata, scale, rows)
    assert changed.is_cuda
    assert (
        changed
        == reference.changed_values(qdata.cpu(), scale.cpu(), reference.rebase_rows(qdata.cpu(), scale.cpu(), MAX_SPREAD["row"]))
        > 0
    )


def test_changed_token_values_counts_on_the_gpu():
    g, a = mx_bytes(300, 96, "cuda", seed=1), mx_bytes(300, 64, "cuda", seed=2)
    offs = torch.tensor([100, 300], dtype=torch.int32, device="cuda")
    counts = [reference.changed_token_values(*g, *a, offs, impl.rebase_tokens(*g, *a, offs)) for impl in (kernels, reference)]
    assert counts[0].is_cuda
    assert counts[0] == counts[1] > 0


def same_tokens(got: reference.RebasedTokens, want: reference.RebasedTokens, what: str) -> None:
    same(got.ends, want.ends, f"{what} ends")
    same(got.order, want.order, f"{what} order")
    num_valid_rows = torch.diff(want.ends, prepend=want.ends.new_zeros(1)) > 0
    total = int(want.ends[-1])
    for name in ("grad", "a"):
        same(getattr(got, name)[:, :total], getattr(want, name)[:, :total], f"{what} {name}")
        same(getattr(got, f"{name}_scale")[num_valid_rows], getattr(want, f"{name}_scale")[num_valid_rows], f"{what} {name}_scale")


def check_tokens(num_rows: int, N: int, K: int, ends: list[int], records: bool = False) -> None:
    g, a = mx_bytes(num_rows, N, "cuda", seed=1), mx_bytes(num_rows, K, "cuda", seed=2)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    got = kernels.rebase_tokens(*(packed_views(*g) if records else g), *(packed_views(*a) if records else a), offs)
    same_tokens(got, reference.rebase_tokens(*g, *a, offs), f"N={N} K={K} groups={len(ends)}")


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(("N", "K"), [(128, 256), (160, 96), (2048, 1408), (32, 9312)])
@pytest.mark.usefixtures("poison")
def test_tokens(N: int, K: int, records: bool):
    check_tokens(3000, N, K, [0, 1, 129, 129, 1000, 1567, 2990], records)


@pytest.mark.parametrize(("N", "K"), [(160, 96), (1408, 2048), (9312, 64)])
@pytest.mark.usefixtures("poison")
def test_tokens_of_groups_in_which_the_gradient_gives_its_exponents(N: int, K: int):
    (qg, sg), a = mx_bytes(2000, N, "cuda", seed=1), mx_bytes(2000, K, "cuda", seed=2, wild=False)
    far = torch.randint(90, 140, (900, N // 32), device="cuda", dtype=torch.uint8)  # wide apart inside a token, unlike a's
    sg.view(torch.uint8)[300:1200] = torch.where(sg.view(torch.uint8)[300:1200] == 0, 0, far)
    qg.view(torch.uint8)[310], sg.view(torch.uint8)[310] = 0, 0  # a token without any exponent to move
    a[1].view(torch.uint8)[310, 0] = 255
    for ends in ([300, 1200, 2000], [2000], [20, 20, 31, 1000]):
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        same_tokens(kernels.rebase_tokens(qg, sg, *a, offs), reference.rebase_tokens(qg, sg, *a, offs), f"N={N} K={K} ends {ends}")


@pytest.mark.parametrize("maps", ["g", "a", "both"])
@pytest.mark.parametrize(("N", "K"), [(160, 96), (1408, 2048)])
@pytest.mark.usefixtures("poison")
def test_tokens_gathered_by_the_same_kernel(N: int, K: int, maps: str):
    generator = torch.Generator("cuda").manual_seed(3)
    tokens = 1500
    offs = torch.tensor([0, 130, 131, 700, 1490], dtype=torch.int32, device="cuda")
    chosen = {name: maps in (name, "both") for name in ("g", "a")}
    g, a = (mx_bytes(900 if chosen[name] else tokens, width, "cuda", seed=width) for name, width in (("g", N), ("a", K)))
    drawn = torch.randint(-1, 900, (2, tokens), device="cuda", dtype=torch.int32, generator=generator)
    drawn[:, 200:330] = -1  # a tile of padding only
    row_maps = [row_map if chosen[name] else None for name, row_map in zip(("g", "a"), drawn, strict=True)]
    want = reference.rebase_tokens(*g, *a, offs, *row_maps)
    same_tokens(kernels.rebase_tokens(*g, *a, offs, *row_maps), want, f"N={N} K={K} {maps}")


@pytest.mark.parametrize("columns", [128, 384])
@pytest.mark.usefixtures("poison")
def test_rows_that_several_tokens_read_are_walked_in_slabs(columns: int, monkeypatch: pytest.MonkeyPatch):
    num_rows, tokens = 300, 2500
    monkeypatch.setattr(kernels, "_PANEL_BYTES", num_rows * columns)
    offs = torch.tensor([0, 130, 131, 700, 2490], dtype=torch.int32, device="cuda")
    for N, K in ((160, 96), (1408, 2048)):
        g, a = mx_bytes(num_rows, N, "cuda", seed=1), mx_bytes(num_rows, K, "cuda", seed=2)
        row_maps = torch.randint(-1, num_rows, (2, tokens), device="cuda", dtype=torch.int32).unbind()
        want = reference.rebase_tokens(*g, *a, offs, *row_maps)
        same_tokens(kernels.rebase_tokens(*g, *a, offs, *row_maps), want, f"N={N} K={K}")
        same_tokens(kernels.rebase_tokens(*g, *a, offs, *row_maps, mostly_padding=True), want, f"N={N} K={K}, no panels")


@pytest.mark.usefixtures("poison")
def test_tokens_of_many_groups_and_of_none():
    check_tokens(5000, 128, 256, ragged(1500, 5000, seed=1))
    check_tokens(700, 128, 256, [0, 0, 0])
    check_tokens(0, 128, 256, [0, 0])
    check_tokens(640, 128, 256, [640])


@pytest.mark.parametrize("granularity", MAX_SPREAD)
def test_repeats_are_bit_equal(granularity: str):
    qdata, scale = mx_bytes(999, 1408, "cuda")
    first = kernels.rebase_rows(qdata, scale, MAX_SPREAD[granularity])
    for _ in range(5):
        same_rows(kernels.rebase_rows(qdata, scale, MAX_SPREAD[granularity]), first, granularity)


def test_no_host_sync(no_sync: Callable[[], AbstractContextManager[None]]):
    qdata, scale = mx_bytes(300, 128, "cuda")
    offs, row_map = torch.full((2,), 150, dtype=torch.int32, device="cuda"), torch.arange(300, dtype=torch.int32, device="cuda")
    with no_sync():
        kernels.rebase_rows(qdata, scale, 8, row_map)
        kernels.rebase_tokens(qdata, scale, qdata, scale, offs, None, row_map)


def test_captured_in_a_graph_and_replayed_with_other_ends():
    g, a = mx_bytes(1000, 96, "cuda", seed=1), mx_bytes(1000, 352, "cuda", seed=2)
    offs = torch.tensor([200, 300, 700, 1000], dtype=torch.int32, device="cuda")
    kernels.rebase_tokens(*g, *a, offs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernels.rebase_tokens(*g, *a, offs)
    for ends in ([200, 300, 700, 1000], [0, 513, 514, 900]):
        offs.copy_(torch.tensor(ends))
        graph.replay()
        same_tokens(got, reference.rebase_tokens(*g, *a, offs), f"ends {ends}")

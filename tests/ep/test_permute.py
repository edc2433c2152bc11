"""permute alone: index, bytes, padding, gradients of every form; no ranks are needed, rank-major counts are enough."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.truth import KINDS, assert_same, assert_same_mx, make_case, permutation, pick, raises_naming, raw, saved_tensors, seeded

from mxep import MXTensor, generate_permute_indices, permute_and_pad, permute_mxfp8_fwd_hp_bwd, quantize_mx, reference
from mxep.mx import MXWeight
from mxep.shapes import record_bytes, round_up

pytestmark = pytest.mark.usefixtures("every_device")
WIDTH = 64


def packed(rows: torch.Tensor) -> MXTensor:
    """MX rows as dispatch returns them: strided views into records, whose padding is random."""
    qdata, scale = reference.quantize(rows, "rceil")
    records = torch.full((len(rows), record_bytes(rows.shape[1])), 0x7F, dtype=torch.uint8)
    width = rows.shape[1]
    data, scales = records[:, :width].view(torch.float8_e4m3fn), records[:, width : width + width // 32].view(torch.float8_e8m0fnu)
    data.view(torch.uint8).copy_(qdata.view(torch.uint8))
    scales.view(torch.uint8).copy_(scale.view(torch.uint8))
    return MXTensor.from_qdata_and_scales(data, scales, rows.dtype)


def check(counts: torch.Tensor, world: int, local: int, alignment: int, dtype: torch.dtype) -> None:
    num_rows = int(counts.sum())
    generator = seeded(num_rows)
    rows = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
    padded_rows = round_up(num_rows + local * alignment, alignment)
    want_map, want_padded, want_ends = permutation(counts, world, local, alignment, padded_rows)
    gradient = torch.randn(padded_rows, WIDTH, generator=generator).to(dtype)
    leaf = rows.clone().requires_grad_()
    (want_gradient,) = torch.autograd.grad(pick(leaf, want_map), leaf, gradient)  # the reference's autograd
    for triton in (True, False):
        mx = packed(rows).requires_grad_()
        with saved_tensors() as saved:
            result = permute_mxfp8_fwd_hp_bwd(mx, counts, world, local, alignment, use_triton_for_bwd=triton)
        assert isinstance(result, tuple)
        shape, out, row_map, padded, ends = result
        assert isinstance(shape, torch.Size)
        assert shape == (num_rows + 1, WIDTH)
        assert (row_map.tolist(), padded.tolist(), ends.tolist()) == (want_map, want_padded, want_ends)
        assert row_map.dtype == padded.dtype == ends.dtype == torch.int32
        assert out.shape == (padded_rows, WIDTH)
        assert_same_mx(out, (pick(mx.qdata, want_map), pick(mx.scale, want_map)), dtype)
        assert [(t.dtype, t.numel()) for t in saved] == [(torch.int32, padded_rows)], "saves the row map alone"
        assert_same(torch.autograd.grad(out, mx, gradient)[0], want_gradient, "gradient")
    plain = rows.clone().requires_grad_()
    shape, out, row_map, padded, ends = permute_and_pad(plain, counts, world, local, alignment)
    assert shape == (num_rows + 1, WIDTH)
    assert (row_map.tolist(), padded.tolist(), ends.tolist()) == (want_map, want_padded, want_ends)
    assert_same(out.detach(), pick(rows, want_map), "plain")
    assert_same(torch.autograd.grad(out, plain, gradient)[0], want_gradient, "plain gradient")
    found = generate_permute_indices(counts, local, world, padded_rows, alignment)
    on_cpu = generate_permute_indices(counts, local, world, padded_rows, alignment, use_cpu=True)
    for got, same, want in zip(found, on_cpu, (want_map, want_padded, want_ends), strict=True):
        assert got.tolist() == same.tolist() == want
        assert got.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_gradients(kind: str, alignment: int, dtype: torch.dtype) -> None:
    for world, local in ((1, 3), (2, 2), (4, 2)):
        case = make_case(kind, world, local)
        check(case.rank_major(world - 1), world, local, alignment, dtype)
        check(case.rank_major(0).int(), world, local, alignment, dtype)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    alignment=st.sampled_from([32, 64, 96, 128]),
    data=st.data(),
)
def test_any_counts(shape: tuple[int, int], alignment: int, data: st.DataObject) -> None:
    world, local = shape
    sizes = st.sampled_from([0, 1, 2, 31, 32, 33]) | st.integers(0, 70)
    counts = torch.tensor(data.draw(st.lists(sizes, min_size=world * local, max_size=world * local)))
    check(counts, world, local, alignment, torch.bfloat16)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), alignment=st.integers(1, 40), slack=st.integers(0, 50))
def test_permute_indices_invariants(counts: list[int], alignment: int, slack: int) -> None:
    """The row map is a permutation of all rows, grouped and padded; gather then scatter is the identity, bytes of fp8 too."""
    local = next(n for n in (4, 3, 2, 1) if len(counts) % n == 0)
    world = len(counts) // local
    num_rows, padded_rows = sum(counts), sum(counts) + local * alignment + slack
    row_map, padded, ends = torch.ops.mxep.permute_indices(torch.tensor(counts), world, local, alignment, padded_rows)
    want = permutation(torch.tensor(counts), world, local, alignment, padded_rows)
    assert (row_map.tolist(), padded.tolist(), ends.tolist()) == want
    assert sorted(row_map[row_map >= 0].tolist()) == list(range(num_rows))
    assert ends.tolist() == padded.cumsum(0).tolist()
    assert all(n % alignment == 0 and n >= alignment for n in padded.tolist())
    assert (row_map[ends[-1] :] == -1).all()
    rows = torch.randint(0, 256, (num_rows, 32), dtype=torch.uint8)
    there = torch.ops.mxep.gather_rows(rows.view(torch.float8_e4m3fn), row_map)
    assert there.dtype == torch.float8_e4m3fn
    assert not there.view(torch.uint8)[row_map < 0].any()
    assert torch.equal(torch.ops.mxep.scatter_rows(there, row_map, num_rows).view(torch.uint8), rows)
    values = torch.randn(padded_rows, 3)
    back = torch.ops.mxep.gather_rows(torch.ops.mxep.scatter_rows(values, row_map, num_rows), row_map)
    assert torch.equal(back, torch.where(row_map[:, None] >= 0, values, 0))


def counts_2x2() -> torch.Tensor:
    return torch.tensor([3, 0, 5, 33])  # W = 2, L = 2, R = 41


def test_mx_gradient_stays_mx() -> None:
    mx = packed(torch.randn(41, WIDTH)).requires_grad_()
    _, out, row_map, _, _ = permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2)
    grad = quantize_mx(torch.randn(out.shape))
    (got,) = torch.autograd.grad(out, mx, grad)
    live = row_map >= 0
    want = [torch.empty(41, n, dtype=torch.uint8) for n in (WIDTH, WIDTH // 32)]
    for target, source in zip(want, (grad.qdata, grad.scale), strict=True):
        target[row_map[live].long()] = source.view(torch.uint8)[live]
    assert_same_mx(got, (want[0].view(torch.float8_e4m3fn), want[1].view(torch.float8_e8m0fnu)), torch.float32)


def test_use_mxfp8_false_permutes_values() -> None:
    rows = torch.randn(41, WIDTH)
    for given_rows in (rows.clone().requires_grad_(), quantize_mx(rows).requires_grad_()):
        values = given_rows.dequantize().detach() if isinstance(given_rows, MXTensor) else rows
        _, out, row_map, _, _ = permute_mxfp8_fwd_hp_bwd(given_rows, counts_2x2(), 2, 2, 32, False)
        assert_same(out.detach(), pick(values, row_map))
        (grad,) = torch.autograd.grad(out, given_rows, torch.ones_like(out))
        assert_same(grad, torch.ones(41, WIDTH))


def test_expanded_gradient() -> None:
    mx = packed(torch.randn(41, WIDTH).bfloat16()).requires_grad_()
    out = permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2)[1]
    (grad,) = torch.autograd.grad(out, mx, torch.ones((), dtype=torch.bfloat16).expand(out.shape))
    assert_same(grad, torch.ones(41, WIDTH, dtype=torch.bfloat16))


def test_values_in_padding_rows_reach_no_gradient() -> None:
    mx = packed(torch.randn(41, WIDTH)).requires_grad_()
    _, out, row_map, _, _ = permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2)
    poison = torch.where(row_map[:, None] < 0, torch.nan, 1.0).expand(out.shape)
    assert_same(torch.autograd.grad(out, mx, poison)[0], torch.ones(41, WIDTH))


def test_nan_stays_in_its_block() -> None:
    rows = torch.randn(41, WIDTH)
    rows[7, 33] = torch.inf
    _, out, row_map, _, _ = permute_mxfp8_fwd_hp_bwd(packed(rows), counts_2x2(), 2, 2)
    want = torch.zeros(out.shape, dtype=torch.bool)
    want[row_map.tolist().index(7), 32:] = True
    assert torch.equal(out.dequantize().isnan(), want)


def test_rows_that_no_count_covers_are_refused() -> None:
    """A receive buffer with unused rows has to be cut to the received rows: otherwise a missing count would lose rows silently."""
    rows = torch.randn(60, WIDTH)
    with raises_naming("permute_and_pad", "add up to 41", "60 rows", "cut off"):
        permute_and_pad(rows, counts_2x2(), 2, 2, 32)
    assert permute_and_pad(rows[:41], counts_2x2(), 2, 2, 32)[0] == (42, WIDTH)


def test_saves_nothing_without_grad() -> None:
    with torch.no_grad(), saved_tensors() as saved:
        out = permute_mxfp8_fwd_hp_bwd(packed(torch.randn(41, WIDTH)).requires_grad_(), counts_2x2(), 2, 2)[1]
    assert saved == []
    assert not out.requires_grad


def test_bad_input() -> None:
    mx = packed(torch.randn(41, WIDTH))
    with raises_naming("permute", "plain torch.float32", "MXTensor", "use_mxfp8=False"):
        permute_mxfp8_fwd_hp_bwd(torch.randn(41, WIDTH), counts_2x2(), 2, 2)
    for counts in (counts_2x2()[:3], counts_2x2().view(2, 2), counts_2x2().float(), counts_2x2().short()):
        for call in (permute_mxfp8_fwd_hp_bwd, permute_and_pad):
            with raises_naming("permute", "num_tokens_per_expert", str(counts.dtype), "(4,)", "rank-major"):
                call(mx, counts, 2, 2, 32)
    with raises_naming("generate_permute_indices", "(4,)"):
        generate_permute_indices(counts_2x2(), 3, 2, 128, 32)
    for alignment in (0, -32, 16, 33):
        with raises_naming("permute", f"={alignment}", "multiple of 32", "use 32 or 128"):
            permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2, alignment)
    with raises_naming("permute_and_pad", "alignment=0", "positive"):
        permute_and_pad(torch.randn(41, WIDTH), counts_2x2(), 2, 2, 0)
    assert permute_and_pad(torch.randn(41, WIDTH), counts_2x2(), 2, 2, 8)[3].tolist() == [8, 40]  # plain rows need no MX block
    with raises_naming("permute", "(41,)", "(rows, width)"):
        permute_and_pad(torch.randn(41), counts_2x2(), 2, 2, 32)
    with raises_naming("permute", f"MXWeight (41, {WIDTH})", "(rows, width)"):
        permute_mxfp8_fwd_hp_bwd(MXWeight.of(torch.randn(41, WIDTH)), counts_2x2(), 2, 2)


def test_counts_that_do_not_fit_the_rows() -> None:
    mx = packed(torch.randn(40, WIDTH))
    with raises_naming("permute", "41", "40 rows", "counts"):
        permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2)
    with raises_naming("permute_and_pad", "-1", "counts"):
        permute_and_pad(torch.randn(41, WIDTH), torch.tensor([3, -1, 5, 33]), 2, 2, 32)
    with raises_naming("generate_permute_indices", "max_len=64", "96"):
        generate_permute_indices(counts_2x2(), 2, 2, 64, 32)


def test_bytes_are_not_shared() -> None:
    mx = packed(torch.randn(41, WIDTH))
    before = raw(mx.qdata)
    out = permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2)[1]
    out.qdata.view(torch.uint8).zero_()
    assert torch.equal(raw(mx.qdata), before)

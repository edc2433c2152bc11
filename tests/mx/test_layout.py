"""The 128x4 blocked layout of scales, byte for byte against torchao's plain PyTorch forms."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxep.mx import (
    blocked_shape,
    from_blocked,
    to_blocked,
    to_blocked_3d,
    to_blocked_groups_along_columns,
    to_blocked_groups_along_rows,
)

pytest.importorskip("torchao", reason="torchao is the oracle of bytes; it is in the dev group")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from torchao.prototype.moe_training.kernels.mxfp8 import quant as oracle
        from torchao.prototype.mx_formats.utils import to_blocked as oracle_to_blocked
    except ValueError as error:  # torchao 0.18 defines its kernels where there is a GPU, and Triton 3.9 takes one of them for wrong
        pytest.skip(f"torchao, the oracle, cannot be imported with this Triton: {error}", allow_module_level=True)


def scales(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (129, 5), (300, 28), (64, 224)])
def test_2d(rows: int, columns: int) -> None:
    plain = scales(rows, columns)
    blocked = to_blocked(plain)
    assert blocked.shape == blocked_shape(rows, columns)
    assert torch.equal(blocked.flatten(), oracle_to_blocked(plain).flatten())
    assert torch.equal(from_blocked(blocked, rows, columns), plain)


def test_e8m0_stays_e8m0() -> None:
    plain = scales(130, 6).view(torch.float8_e8m0fnu)
    blocked = to_blocked(plain)
    assert blocked.dtype == torch.float8_e8m0fnu
    assert torch.equal(from_blocked(blocked, 130, 6).view(torch.uint8), plain.view(torch.uint8))


def test_3d() -> None:
    plain = scales(3, 200, 60)
    assert torch.equal(to_blocked_3d(plain), oracle.torch_to_blocked_per_group_3d(plain))


ENDS = [[40, 40, 170, 300], [0, 0, 128, 128], [1, 2, 3, 4], [300, 300, 300, 300], [128, 256, 256, 300]]


@pytest.mark.parametrize("ends", ENDS)
def test_groups_along_rows(ends: list[int]) -> None:
    plain, offs = scales(ends[-1], 28), torch.tensor(ends, dtype=torch.int32)
    want, want_starts = oracle.torch_to_blocked_2d_M_groups(plain, offs)
    got, starts = to_blocked_groups_along_rows(plain, offs)
    used = int(want_starts[-1]) * 28
    assert torch.equal(got.flatten()[:used], want.flatten()[:used])
    assert (got.flatten()[used:] == 0).all()
    assert torch.equal(starts, want_starts[:-1])


@pytest.mark.parametrize("ends", [[5, 5, 33, 60], [4, 8, 12, 60], [1, 2, 3, 4], [0, 0, 0, 7]])
def test_groups_along_columns(ends: list[int]) -> None:
    plain, offs = scales(200, ends[-1]), torch.tensor(ends, dtype=torch.int32)
    want, want_starts = oracle.torch_to_blocked_2d_K_groups(plain, offs)
    got, starts = to_blocked_groups_along_columns(plain, offs)
    used = int(want_starts[-1]) * 256
    assert torch.equal(got.flatten()[:used], want.flatten()[:used])
    assert (got.flatten()[used:] == 0).all()
    assert torch.equal(starts, want_starts[:-1])


def test_rows_past_the_last_group_are_dropped() -> None:
    plain, offs = scales(300, 4), torch.tensor([100, 200], dtype=torch.int32)
    got, _ = to_blocked_groups_along_rows(plain, offs)
    want, _ = to_blocked_groups_along_rows(plain[:200], offs)
    assert torch.equal(got.flatten()[: 256 * 4], want.flatten()[: 256 * 4])
    assert (got.flatten()[256 * 4 :] == 0).all()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6), columns=st.integers(1, 9))
def test_each_group_reads_back(sizes: list[int], columns: int) -> None:
    ends = torch.tensor(sizes).cumsum(0).int()
    plain = scales(max(int(ends[-1]), 1), columns)
    blocked, starts = to_blocked_groups_along_rows(plain, ends)
    width = blocked_shape(1, columns)[1]
    for start, end, size in zip(starts.tolist(), ends.tolist(), sizes, strict=True):
        rows = blocked_shape(size, columns)[0] if size else 0
        group = blocked.flatten()[start * width : (start + rows) * width]
        assert torch.equal(from_blocked(group, size, columns), plain[end - size : end])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        to_blocked(scales(2, 3, 4))
    with pytest.raises(ValueError, match="want 512"):
        from_blocked(scales(100), 4, 4)

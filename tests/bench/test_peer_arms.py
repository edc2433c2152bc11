"""Other packages' experts: the operations around their grouped GEMMs, and packages that are missing."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

from mxep.bench import peer_arms, peers
from mxep.cli import main

ALIGNMENT = 16


def by_group(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """A grouped GEMM that insists on groups of whole multiples, as FP8 ones do."""
    ends = offs.tolist()
    assert all(end % ALIGNMENT == 0 for end in ends)
    out = rows.new_zeros(rows.shape[0], weight.shape[-1])
    parts = [rows[start:end] @ w for start, end, w in zip([0, *ends], ends, weight, strict=False)]
    return torch.cat([*parts, out[ends[-1] :]])


@pytest.mark.parametrize("E", [3, 8])
def test_padded_groups_give_what_torch_gives(E: int) -> None:
    T, D, H, C = 37, 32, 64, 2
    generator = torch.Generator().manual_seed(E)
    choices = torch.rand(T, E, generator=generator)
    choices[:, 1] = 0  # an expert without tokens
    given = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((T, D), (T, C), (E, 2 * H, D), (E, D, H))]
    x, scores, w1, w2 = given
    results = []
    for experts in (peers.torch_experts, lambda *args: peer_arms.grouped_experts(by_group, ALIGNMENT, *args)):
        y = experts(x, choices.topk(C).indices, scores, w1, w2)
        results.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


def test_gathered_rows() -> None:
    x = torch.arange(3.0).unsqueeze(1) + 1
    rows, place, ends = peer_arms.gather_padded(x, torch.tensor([[2], [0], [2]]), 3, 4)
    assert ends.tolist() == [4, 4, 8]
    assert place.tolist() == [4, 0, 5]
    assert rows.squeeze(1).tolist() == [2, 0, 0, 0, 1, 3] + [0] * 9


def test_a_package_that_is_missing_is_named() -> None:
    with mock.patch.dict(sys.modules, {"liger_kernel": None, "liger_kernel.ops": None, "sonicmoe": None, "deep_gemm": None}):
        found, left_out = peer_arms.load_peers(("liger", "sonicmoe", "torchao_blockwise"), torch.device("cuda"))
    assert not found
    assert all(why.startswith("ModuleNotFoundError: ") for why in left_out.values())


def test_an_unknown_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--device", "cpu", "--quick", "--peers", "liger,nobody"]) == 2
    assert "--peers nobody, want liger" in capsys.readouterr().err
    assert main(["bench", "experts", "--device", "cpu", "--quick", "--peers", "liger"]) == 2

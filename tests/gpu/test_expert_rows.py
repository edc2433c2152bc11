"""Expert rows of top-k ids on the GPU: the reference's numbers for every number of tiles and any distribution of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests import topk_cases

from mxep import reference
from mxep.ops import kernels
from mxep.ops.routing.index_reference import MODES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("R", [0, 1, 511, 512, 513, 70001])
@pytest.mark.parametrize(("L", "C", "alignment"), [(1, 1, 32), (32, 8, 32), (7, 3, 0), (300, 8, 128), (768, 2, 1), (2048, 6, 1)])
def test_expert_rows_are_those_of_the_reference(R: int, L: int, C: int, alignment: int) -> None:
    generator = torch.Generator("cuda").manual_seed(R + L)
    for kind in ("random", "one expert", "nowhere", "sorted"):
        experts = torch.randint(-L, L, (R, C), device="cuda", generator=generator)
        if kind == "one expert":
            experts.fill_(L - 1)
        elif kind == "nowhere":
            experts.fill_(2**32)  # not 0 of 32 bits
        elif kind == "sorted":
            experts = experts.flatten().sort().values.view(R, C)
        num_expert_rows = R * C + L * max(alignment, 1) + 5
        for chosen in (experts, experts.int() if kind != "nowhere" else experts.clamp(max=L).int()):
            want = reference.index_expert_rows(chosen, L, alignment, num_expert_rows)
            for got, expected in zip(kernels.index_expert_rows(chosen, L, alignment, num_expert_rows), want, strict=True):
                assert torch.equal(got, expected), f"{kind} {chosen.dtype}"


def test_strided_choices_and_repeated_calls() -> None:
    table = torch.randint(-1, 8, (4097, 10), dtype=torch.int32, device="cuda")
    want = reference.index_expert_rows(table[:, :4].contiguous(), 8, 4, 20000)
    for _ in range(5):
        for got, expected in zip(kernels.index_expert_rows(table[:, :4], 8, 4, 20000), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("R", [0, 1, 513, 70001])
@pytest.mark.parametrize(("L", "C", "alignment"), [(1, 1, 32), (32, 8, 32), (7, 3, 0), (300, 8, 128)])
def test_expert_rows_with_scores(R: int, L: int, C: int, alignment: int) -> None:
    """Expert rows of the second of three ranks; ids and scores may be parts of a table, and ids may have 64 bits."""
    generator = torch.Generator("cuda").manual_seed(R + L)
    experts = torch.randint(-1, 3 * L, (R, C), device="cuda", generator=generator).int()
    scores = torch.randn(R, C, device="cuda", generator=generator)
    table = torch.cat((experts, scores.view(torch.int32), experts), 1)
    sizes = 1, L, alignment, R * C + L * max(alignment, 1) + 5
    want = reference.index_topk(experts, scores, *sizes)
    assert_equal(kernels.index_topk(table[:, :C], table[:, C : 2 * C].view(torch.float32), *sizes), want)
    assert_equal(kernels.index_topk(experts.long(), scores, *sizes), want)
    assert_equal(kernels.index_topk(experts.t().contiguous().t(), scores.t().contiguous().t(), *sizes), want)


@pytest.mark.parametrize(("tokens", "experts", "choices"), [*topk_cases.SHAPES, (16384, 128, 8), (40001, 64, 6)])
def test_sorted_choices(tokens: int, experts: int, choices: int, no_sync: Callable) -> None:
    for call in topk_cases.calls(tokens, experts, choices, "cuda"):
        with no_sync():
            found = kernels.sort_topk(*call)
        assert_equal(found, reference.sort_topk(*call))
        ordered, scores, columns = found
        index, values = torch.where(ordered < 0, -1, torch.arange(ordered.numel(), device="cuda").view_as(ordered)), scores.flatten()
        with no_sync():
            back = [kernels.gather_or_zero(index, values, columns, dtype) for dtype in (torch.float32, torch.bfloat16)]
        assert_equal(back, [reference.gather_or_zero(index, values, columns, dtype) for dtype in (torch.float32, torch.bfloat16)])


@pytest.mark.parametrize("tokens", [0, 1, 127, 40001])
@pytest.mark.parametrize(("world", "local", "topk"), [(1, 1, 1), (4, 32, 8), (8, 3, 6), (2, 7, 5)])
def test_send_indices(tokens: int, world: int, local: int, topk: int, no_sync: Callable) -> None:
    experts = torch.rand(tokens, world * local, device="cuda").argsort(1)[:, :topk]
    scores, most = torch.randn(tokens, topk, device="cuda"), tokens + 70
    with no_sync():
        packed = kernels.pack_topk(experts, scores, most)
        sent = [kernels.send_index(experts, mode, local, world, most) for mode in MODES]
    assert_equal([packed], [reference.pack_topk(experts, scores, most)])
    for mode, found in zip(MODES, sent, strict=True):
        assert_equal(found, reference.send_index(experts, mode, local, world, most))


@pytest.mark.parametrize("count", [1, 5, 300, 2048])
def test_chunk_bounds_and_chunk_rows(count: int, no_sync: Callable) -> None:
    ends = (torch.randint(1, 40, (count,), device="cuda") * 32).cumsum(0).int()
    num_expert_rows, capacity = int(ends[-1]) + 77, 32 * max(39, count)
    bounds = reference.chunk_bounds(ends, capacity, count)
    scores = torch.randn(num_expert_rows, device="cuda")
    first, second = (torch.randint(-1, 2**20, (num_expert_rows,), dtype=torch.int32, device="cuda") for _ in range(2))
    index = torch.randint(-1, num_expert_rows, (777, 8), dtype=torch.int32, device="cuda")
    with no_sync():
        found, picked = kernels.chunk_bounds(ends, capacity, count), kernels.gather_or_zero(index, scores)
    assert_equal([found, picked], [bounds, reference.gather_or_zero(index, scores)])
    for number in (0, count // 2, count - 1):
        for other in (None, second):
            given = ends, scores, first, other, bounds[number : number + 2], capacity
            assert_equal(kernels.chunk_rows(*given), reference.chunk_rows(*given))


def assert_equal(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for made, expected in zip(got, want, strict=True):
        assert made.dtype == expected.dtype
        assert torch.equal(made, expected)


def test_too_many_experts() -> None:
    with pytest.raises(ValueError, match="index_expert_rows: 2049 experts on one GPU, want at most 2048"):
        kernels.index_expert_rows(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), 2049, 0, 1)

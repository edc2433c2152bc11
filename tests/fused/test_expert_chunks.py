"""Windows of experts: every expert whole in one of them whatever the sizes, no more windows than the host says, and the way back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.truth import raises_naming

from mxep.fused.expert_chunks import ChunkBounds, ExpertChunks, chunk_capacity, concat_chunks, count_chunks
from mxep.moe.expert_mlp import ExpertRows


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_expert_is_in_one_window(data: st.DataObject) -> None:
    alignment, most = data.draw(st.sampled_from([1, 4, 32])), data.draw(st.integers(1, 12))
    sizes = [alignment * n for n in data.draw(st.lists(st.integers(1, most), min_size=1, max_size=20))]
    capacity = alignment * data.draw(st.integers(most, 3 * most))
    slack = alignment * data.draw(st.integers(0, 30))
    ends = torch.tensor(sizes).cumsum(0).int()
    count = count_chunks(int(ends[-1]) + slack, alignment * most, capacity, len(sizes), alignment)
    bounds = torch.ops.mxep.chunk_bounds(ends, capacity, count)
    assert bounds.dtype == torch.int32
    widths = bounds.diff().tolist()
    assert all(0 <= width <= capacity for width in widths)
    assert (bounds[0], bounds[-1]) == (0, ends[-1])
    assert set(bounds.tolist()) <= {0, *ends.tolist()}, "windows end where experts end"
    filled = [width > 0 for width in widths]
    assert filled == sorted(filled), "windows without places come first: what the last pass sends does not wait for them"


@pytest.mark.parametrize(("experts", "choices", "world"), [(128, 8, 4), (64, 6, 4), (128, 8, 2)])
@pytest.mark.parametrize("alignment", [32, 128])
def test_a_window_holds_what_balanced_choices_bring(experts: int, choices: int, world: int, alignment: int) -> None:
    """A second pass costs the layer; loads of one rank of the group or another were above a 1024th to spare in nine steps of ten."""
    tokens, local, passes = 1 << 16, experts // world, 0
    dispatcher = SimpleNamespace(expected_rows=tokens * choices // world, offs=torch.zeros(local), tokens=tokens)
    capacity = chunk_capacity(dispatcher, "auto", alignment)  # type: ignore[arg-type]
    assert capacity is not None
    assert capacity <= dispatcher.expected_rows * 1.02 + local * alignment
    for seed in range(6):
        chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(choices).indices
        sizes = torch.bincount(chosen.flatten(), minlength=experts)
        padded = (sizes + alignment - 1) // alignment * alignment
        passes += int((padded.view(world, local).sum(1) > capacity).any())
    assert passes <= 1


def places(ends: list[int], num_places: int) -> ExpertRows:
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randint(-1, 50, (num_places,), generator=generator, dtype=torch.int32) for _ in range(2)]
    return ExpertRows(torch.tensor(ends, dtype=torch.int32), torch.rand(num_places, generator=generator), *maps)


@pytest.mark.parametrize("capacity", [96, 128, 100, 160])
def test_windows_hold_what_the_places_hold(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    whole = places([32, 128, 160, 224, 256, 288], 384)
    monkeypatch.setattr(ChunkBounds, "empty", lambda *_: False)
    parts = list(ExpertChunks(whole, capacity, 70, 32))
    held = capacity // 32 * 32
    assert len(parts) > 2
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    found = torch.zeros(6, dtype=torch.int64)
    for part in parts:
        assert part.chunk is not None
        first, end = part.chunk.tolist()
        size = end - first
        assert part.offs[-1] == size
        assert part.scores.shape == part.token_map.shape == part.grad_map.shape == (held,)
        for got, want, fill in zip(part[1:4], whole[1:4], (0, -1, -1), strict=True):
            assert torch.equal(got[:size], want[first:end])
            assert (got[size:] == fill).all()
        sizes = part.offs.diff(prepend=part.offs.new_zeros(1))
        found += sizes
        for expert in sizes.nonzero().flatten().tolist():
            assert sizes[expert] == whole.offs.diff(prepend=whole.offs.new_zeros(1))[expert], "an expert is whole"
    assert torch.equal(found, whole.offs.diff(prepend=whole.offs.new_zeros(1)).long())
    scores = concat_chunks(parts, [part.scores for part in parts], 384)
    assert torch.equal(scores[:288], whole.scores[:288])


def test_one_pass_where_all_fits() -> None:
    whole = places([32, 64], 96)
    for capacity in (None, 96, 1000):
        passes = ExpertChunks(whole, capacity, 40, 32)
        (part,) = passes
        assert part is whole
        assert part.last
        assert passes.bounds is None
        assert concat_chunks([part], [whole.scores], 96) is whole.scores
    for capacity, tokens in ((63, 40), (31, 0)):
        with raises_naming("fused_moe", f"scratch_rows={capacity}", f"want at least {64 if tokens else 32}", "None for no bound"):
            ExpertChunks(whole, capacity, tokens, 32)


def test_passes_that_would_find_nothing_are_left_out_once_that_is_known() -> None:
    whole = places([32, 128, 160, 192, 192, 192], 384)
    passes = ExpertChunks(whole, 128, 90, 32)
    assert len(passes) == 5
    bounds = [part.chunk.tolist() for part in passes if part.chunk is not None]
    assert bounds == [[0, 128], [128, 192]]
    scores = concat_chunks(list(passes), [part.scores for part in passes], 384)
    assert torch.equal(scores[:192], whole.scores[:192])
    assert passes.single() is False
    assert passes.bounds is not None
    on_host = torch.full((6,), -1, dtype=torch.int32)
    early = ExpertChunks(whole, 128, 90, 32, ChunkBounds(passes.bounds.on_device, on_host))
    assert len(list(early)) == 5, "nothing is known"
    on_host[:3] = passes.bounds.on_host[:3]
    assert len(list(early)) == 5, "a part of it is not enough"
    on_host.copy_(passes.bounds.on_host)
    assert len(list(early)) == 2
    assert len(list(ExpertChunks(whole, 128, 90, 32, passes.bounds))) == 2, "what an earlier one has heard"


def test_the_last_pass_is_never_left_out() -> None:
    passes = ExpertChunks(places([0, 0, 0], 384), 128, 90, 32)
    (part,) = passes
    assert part.last
    assert passes.single()

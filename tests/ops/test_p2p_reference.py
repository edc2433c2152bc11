"""p2p_scatter_rows and p2p_reduce_rows on the CPU: every byte as a loop over the rows writes it, no other byte written; errors."""

from __future__ import annotations

import pytest
import torch
from tests.p2p_cases import Memory, Scatter, expect_rows, expect_sums, sums, sums_in_chunks, to_named_ranks, to_some_ranks

from mxep import reference
from mxep.ops.peer_write.reference import sent_bytes

BF16, FLOAT32, INT32 = torch.bfloat16, torch.float32, torch.int32


def scattered(scatter: Scatter, mode: str, pitch: int) -> Memory:
    memory = Memory(scatter.world, scatter.num_slots, pitch)
    torch.ops.mxep.p2p_scatter_rows(scatter.rows, scatter.slots, scatter.ranks, memory.addresses, pitch, mode)
    return memory


@pytest.mark.parametrize(
    ("dtype", "mode", "width"),
    [
        (INT32, "", 5),
        (torch.uint8, "", 7),
        (BF16, "", 96),
        (FLOAT32, "", 33),
        (BF16, "rceil", 96),
        (FLOAT32, "floor", 32),
        (BF16, "floor", 512),
    ],
)
@pytest.mark.parametrize("spare", [0, 48])
def test_rows(dtype: torch.dtype, mode: str, width: int, spare: int) -> None:
    for world in (1, 3):
        for scatter in (to_some_ranks(17, width, world, dtype), to_named_ranks(13, width, world, 4, dtype)):
            pitch = sent_bytes("test", scatter.rows, mode) + spare
            assert scattered(scatter, mode, pitch).same_as(expect_rows(scatter, mode, pitch))


def test_rows_in_strides() -> None:
    scatter = to_some_ranks(9, 64, 2, BF16)
    wide = torch.zeros(9, 200, dtype=BF16)
    wide[:, 3:67] = scatter.rows
    for rows in (wide[:, 3:67], scatter.rows.t().contiguous().t()):
        for mode, size in (("", 128), ("rceil", 80)):
            assert scattered(scatter._replace(rows=rows), mode, size).same_as(expect_rows(scatter, mode, size))


def test_nothing_to_send() -> None:
    none = Scatter(torch.zeros(0, 64), torch.zeros(0, 2, dtype=INT32), None, 2, 4)
    nowhere = Scatter(torch.zeros(3, 64), torch.full((3, 2), -1, dtype=INT32), torch.full((3, 2), 77, dtype=INT32), 2, 4)
    for scatter in (none, nowhere):
        for mode in ("", "floor"):
            assert scattered(scatter, mode, 256).same_as(Memory(2, 4, 256))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("mode", ["", "rceil", "floor"])
def test_sums(dtype: torch.dtype, mode: str) -> None:
    for world, region, choices in ((1, 11, 1), (3, 6, 4), (2, 0, 2)):
        expert_rows, slots = sums(world, region, choices, 20, 64, dtype, bad=True)
        pitch = sent_bytes("test", expert_rows, mode) + 16
        memory = Memory(world, region, pitch)
        torch.ops.mxep.p2p_reduce_rows(expert_rows, slots, region, memory.addresses, pitch, mode)
        assert memory.same_as(expect_sums(expert_rows, slots, region, world, mode, pitch))
        packed = reference.reduce_rows(expert_rows, slots)
        packed = reference.quantize_packed(packed, mode) if mode else packed.view(torch.uint8)
        got = torch.cat([whole[128:-128].view(region, pitch)[:, : packed.shape[1]] for whole in memory.whole])
        assert torch.equal(got[(slots >= 0).any(1)], packed[(slots >= 0).any(1)])


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("mode", ["", "rceil"])
@pytest.mark.parametrize("cuts", [[0], [0, 0], [0, 8], [0, 5, 5, 19], [0, 20]])
def test_sums_of_a_last_chunk(dtype: torch.dtype, mode: str, cuts: list[int]) -> None:
    """The partial sums of earlier chunks give the bits of all rows at once, and are not changed."""
    expert_rows, slots = sums(3, 6, 4, 20, 64, dtype, bad=False)
    slots = slots.sort(1).values
    last, chunk, partial_sums, carry = sums_in_chunks(expert_rows, slots, cuts)
    pitch = sent_bytes("test", expert_rows, mode)
    memory, before = Memory(3, 6, pitch), partial_sums.clone()
    torch.ops.mxep.p2p_reduce_rows(last, slots, 6, memory.addresses, pitch, mode, chunk, partial_sums, carry)
    assert memory.same_as(expect_sums(expert_rows, slots, 6, 3, mode, pitch))
    assert torch.equal(partial_sums.view(torch.uint8), before.view(torch.uint8))


def test_compilers_keep_the_operator() -> None:
    """A graph with this operator alone is not empty."""
    scatter = to_some_ranks(5, 32, 2, BF16)
    memory = Memory(2, scatter.num_slots, 64)

    def function(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        torch.ops.mxep.p2p_scatter_rows(rows * 2, slots, None, memory.addresses, 64, "")
        return rows + 1

    torch.compile(function, backend="aot_eager", fullgraph=True)(scatter.rows, scatter.slots)
    assert memory.same_as(expect_rows(scatter._replace(rows=scatter.rows * 2), "", 64))


ROWS, SLOTS, CHUNK = torch.zeros(4, 64), torch.zeros(4, 2, dtype=INT32), torch.zeros(2, dtype=INT32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": torch.zeros(4, 2, 32)}, r"p2p_scatter_rows: rows are \(4, 2, 32\), want \(N, D\)"),
        ({"rows": torch.zeros(4, 48), "mode": "rceil"}, "multiple of 32"),
        ({"rows": torch.zeros(4, 64, dtype=INT32), "mode": "rceil"}, "bfloat16 or float32"),
        ({"mode": "nearest"}, "want 'floor' or 'rceil'"),
        ({"pitch": 255}, "pitch=255 bytes from row to row, want at least 256"),
        ({"pitch": 79, "mode": "floor"}, "want at least 80"),
        ({"pitch": 100, "mode": "floor"}, "pitch=100 with addresses .* want multiples of 16"),
        ({"slots": SLOTS.long()}, "slots are .*int64.*want a matrix of int32"),
        ({"slots": SLOTS[:3]}, r"slots \(3, 2\) for 4 rows"),
        ({"slots": SLOTS[:, :1]}, "1 slots of a row for 2 addresses"),
        ({"ranks": SLOTS[:, :1]}, r"ranks \(4, 1\) with slots \(4, 2\)"),
        ({"ranks": SLOTS + 2}, "ranks from 2 to 2, want 0 to 1"),
        ({"ranks": SLOTS - 1}, "ranks from -1 to -1, want 0 to 1"),
    ],
)
def test_bad_rows(change: dict, text: str) -> None:
    memory = Memory(2, 4, 256)
    arguments = {"rows": ROWS, "slots": SLOTS, "ranks": None, "addresses": memory.addresses, "pitch": 256, "mode": "", **change}
    with pytest.raises(ValueError, match=text):
        torch.ops.mxep.p2p_scatter_rows(*arguments.values())
    assert memory.same_as(Memory(2, 4, 256))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"expert_rows": torch.zeros(4, 64, dtype=INT32)}, "rows are torch.int32, want bfloat16 or float32, which can be summed"),
        ({"region": 3}, r"slots \(4, 2\) for 2 addresses with 3 sums each, want 6 lines"),
        ({"pitch": 128}, "p2p_reduce_rows: pitch=128"),
        ({"slots": SLOTS[0]}, "want a matrix of int32"),
        ({"mode": "none"}, "want 'floor' or 'rceil'"),
        ({"chunk": CHUNK}, "p2p_reduce_rows: chunk without partial_sums"),
        ({"chunk": None, "partial_sums": ROWS}, "p2p_reduce_rows: partial_sums without chunk"),
        ({"chunk": None, "partial_sums": None, "carry": ROWS.short()}, "p2p_reduce_rows: carry without chunk and partial_sums"),
        ({"chunk": CHUNK, "partial_sums": ROWS[:3]}, r"p2p_reduce_rows: partial_sums is \(3, 64\) torch.float32, want \(4, 64\)"),
        ({"chunk": CHUNK, "partial_sums": ROWS, "carry": ROWS.short()}, "p2p_reduce_rows: carry is"),
        ({"chunk": CHUNK.repeat_interleave(2)[::2], "partial_sums": ROWS}, "p2p_reduce_rows: chunk is .*contiguous"),
        (
            {
                "expert_rows": ROWS.bfloat16(),
                "chunk": CHUNK,
                "partial_sums": ROWS.bfloat16(),
                "carry": torch.zeros(4, 128, dtype=torch.int16)[:, ::2],
            },
            "p2p_reduce_rows: carry is .*contiguous",
        ),
    ],
)
def test_bad_sums(change: dict, text: str) -> None:
    memory = Memory(2, 2, 256)
    arguments = {"expert_rows": ROWS, "slots": SLOTS, "region": 2, "addresses": memory.addresses, "pitch": 256, "mode": "", **change}
    with pytest.raises(ValueError, match=text):
        torch.ops.mxep.p2p_reduce_rows(*arguments.values())
    assert memory.same_as(Memory(2, 2, 256))


def test_the_reference_writes_no_memory_of_a_gpu() -> None:
    on_meta = torch.zeros(4, 64, device="meta"), torch.zeros(4, 2, dtype=INT32, device="meta")
    with pytest.raises(ValueError, match=r"p2p_scatter_rows: rows on meta.*torch\.ops\.mxep\.p2p_scatter_rows"):
        reference.p2p_scatter_rows(*on_meta, None, [0, 0], 256, "")
    with pytest.raises(ValueError, match=r"p2p_reduce_rows: rows on meta"):
        reference.p2p_reduce_rows(*on_meta, 2, [0, 0], 256, "")


def test_no_rows() -> None:
    """Of any strides: backward gets them expanded."""
    for dtype in (BF16, FLOAT32):
        rows = torch.ones((), dtype=dtype).expand(0, 64)
        torch.ops.mxep.p2p_scatter_rows(rows, torch.zeros(0, 1, dtype=INT32), None, [0], 256, "")

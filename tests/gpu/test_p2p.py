"""p2p_scatter_rows and p2p_reduce_rows on a GPU, whose own memory stands for the ranks: exactly the reference's bytes are written."""

from __future__ import annotations

import pytest
import torch
from tests.p2p_cases import Memory, Scatter, expect_rows, expect_sums, sums, sums_in_chunks, to_named_ranks, to_some_ranks, values

from mxep import reference
from mxep.ops.peer_write.reference import sent_bytes

pytestmark = pytest.mark.gpu

BF16, FLOAT32, INT32 = torch.bfloat16, torch.float32, torch.int32


class GpuMemory(Memory):
    """`Memory` of one GPU."""

    def __init__(self, world: int, num_slots: int, pitch: int, skew: int = 0) -> None:
        with torch.device("cuda"):
            super().__init__(world, num_slots, pitch, skew)


def scattered(scatter: Scatter, mode: str, pitch: int, skew: int = 0, offset: int = 0) -> GpuMemory:
    """`offset`: columns before the rows in memory, which change their alignment."""
    memory = GpuMemory(scatter.world, scatter.num_slots, pitch, skew)
    wide = torch.zeros(scatter.rows.shape[0], scatter.rows.shape[1] + offset, dtype=scatter.rows.dtype, device="cuda")
    wide[:, offset:] = scatter.rows.cuda()
    ranks = None if scatter.ranks is None else scatter.ranks.cuda()
    torch.ops.mxep.p2p_scatter_rows(wide[:, offset:], scatter.slots.cuda(), ranks, memory.addresses, pitch, mode)
    return memory


def both_ways(width: int, dtype: torch.dtype, rows: int = 61) -> list[Scatter]:
    some = [to_some_ranks(rows, width, world, dtype) for world in (1, 8)]
    return [*some, to_named_ranks(rows, width, 4, 8, dtype), to_some_ranks(rows, width, 32, dtype)]


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("width", [32, 64, 96, 160, 480, 512, 544, 1408, 2048, 7168, 8224])
def test_records(width: int, dtype: torch.dtype) -> None:
    for mode in ("rceil", "floor"):
        for scatter in both_ways(width, dtype):
            pitch = sent_bytes("test", scatter.rows, mode)
            for spare, offset in ((0, 0), (48, 3)):
                assert scattered(scatter, mode, pitch + spare, offset=offset).same_as(expect_rows(scatter, mode, pitch + spare))


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(INT32, 1), (INT32, 3), (INT32, 4), (INT32, 17), (INT32, 64), (BF16, 33), (BF16, 7168), (torch.uint8, 1025), (FLOAT32, 2048)],
)
def test_plain_rows(dtype: torch.dtype, width: int) -> None:
    for scatter in both_ways(width, dtype):
        pitch = sent_bytes("test", scatter.rows, "")
        for spare, skew, offset in ((0, 0, 0), (20, 4, 0), (64, 0, 1), (1, 1, 0)):
            assert scattered(scatter, "", pitch + spare, skew, offset).same_as(expect_rows(scatter, "", pitch + spare, skew))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("width", [32, 96, 1408, 7168])
@pytest.mark.parametrize("mode", ["", "rceil", "floor"])
def test_sums(width: int, dtype: torch.dtype, mode: str) -> None:
    for world, region, choices in ((1, 37, 1), (4, 19, 8), (8, 5, 41)):
        expert_rows, slots = sums(world, region, choices, 100, width, dtype, bad=bool(mode))
        for spare in (0, 16):
            pitch = sent_bytes("test", expert_rows, mode) + spare
            memory = GpuMemory(world, region, pitch)
            torch.ops.mxep.p2p_reduce_rows(expert_rows.cuda(), slots.cuda(), region, memory.addresses, pitch, mode)
            assert memory.same_as(expect_sums(expert_rows, slots, region, world, mode, pitch))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("width", [32, 96, 1408, 7168])
@pytest.mark.parametrize("mode", ["", "rceil"])
def test_sums_of_a_last_chunk(width: int, dtype: torch.dtype, mode: str) -> None:
    """Sums that begin in earlier chunks, that end there, and that have rows in the last chunk only."""
    for world, region, choices in ((1, 37, 1), (4, 19, 8), (8, 5, 41)):
        expert_rows, slots = sums(world, region, choices, 100, width, dtype, bad=False)
        slots = slots.sort(1).values
        pitch = sent_bytes("test", expert_rows, mode)
        for cuts in ([0, 0], [0, 30], [0, 20, 20, 71], [0, 100]):
            last, chunk, partial_sums, carry = sums_in_chunks(expert_rows, slots, cuts)
            memory = GpuMemory(world, region, pitch)
            earlier = chunk.cuda(), partial_sums.cuda(), None if carry is None else carry.cuda()
            torch.ops.mxep.p2p_reduce_rows(last.cuda(), slots.cuda(), region, memory.addresses, pitch, mode, *earlier)
            assert memory.same_as(expect_sums(expert_rows, slots, region, world, mode, pitch)), cuts


def test_odd_sums_of_a_last_chunk() -> None:
    for width, dtype, skew in ((33, BF16, 2), (7, FLOAT32, 4), (1, BF16, 0), (100, BF16, 8)):
        expert_rows, slots = sums(3, 11, 6, 50, width, dtype, bad=False)
        slots, pitch = slots.sort(1).values, sent_bytes("test", expert_rows, "")
        last, chunk, partial_sums, carry = sums_in_chunks(expert_rows, slots, [0, 17, 30])
        memory = GpuMemory(3, 11, pitch, skew)
        earlier = chunk.cuda(), partial_sums.cuda(), None if carry is None else carry.cuda()
        torch.ops.mxep.p2p_reduce_rows(last.cuda(), slots.cuda(), 11, memory.addresses, pitch, "", *earlier)
        assert memory.same_as(expect_sums(expert_rows, slots, 11, 3, "", pitch, skew))


def test_odd_sums() -> None:
    """Widths and slots that are aligned to single values only."""
    for width, dtype, skew in ((33, BF16, 2), (7, FLOAT32, 4), (1, BF16, 0), (100, BF16, 8)):
        expert_rows, slots = sums(3, 11, 6, 50, width, dtype, bad=False)
        pitch = sent_bytes("test", expert_rows, "")
        memory = GpuMemory(3, 11, pitch, skew)
        torch.ops.mxep.p2p_reduce_rows(expert_rows.cuda(), slots.cuda(), 11, memory.addresses, pitch, "")
        assert memory.same_as(expect_sums(expert_rows, slots, 11, 3, "", pitch, skew))


def test_nothing_to_send() -> None:
    nothing = torch.full((5, 3), -1, dtype=INT32, device="cuda")
    for mode in ("", "rceil"):
        memory = GpuMemory(3, 5, 256)
        torch.ops.mxep.p2p_scatter_rows(torch.zeros(5, 64, device="cuda"), nothing, None, memory.addresses, 256, mode)
        torch.ops.mxep.p2p_scatter_rows(torch.zeros(0, 64, device="cuda"), nothing[:0], None, memory.addresses, 256, mode)
        torch.ops.mxep.p2p_reduce_rows(torch.zeros(0, 64, device="cuda"), nothing[:3], 1, memory.addresses, 256, mode)
        assert memory.same_as(Memory(3, 5, 256))


@pytest.mark.parametrize("mode", ["", "rceil"])
def test_beyond_two_gib(mode: str) -> None:
    """Rows, slots and sums whose bytes lie past 2^31, and past 2^32."""
    width, count = 8192, 300_000
    pitch = 2 * width if not mode else 8448
    rows = torch.zeros(count, width, dtype=BF16, device="cuda")
    picked = torch.tensor([0, 1, 131_071, 131_072, 262_144, count - 1])
    rows[picked.cuda()] = (values(len(picked), width, BF16, bad=False) + 0.0).cuda()  # a sum of one row is that row, except for -0
    slots = torch.full((count, 1), -1, dtype=INT32, device="cuda")
    slots[picked.cuda(), 0] = picked.flip(0).int().cuda()
    memory = torch.full((count, pitch), 0xFF, dtype=torch.uint8, device="cuda")
    torch.ops.mxep.p2p_scatter_rows(rows, slots, None, [memory.data_ptr()], pitch, mode)
    sent = rows[picked.cuda()].cpu()
    sent = reference.quantize_packed(sent, mode) if mode else sent.view(torch.uint8)
    assert torch.equal(memory[picked.flip(0).cuda()].cpu(), sent)
    memory[picked.cuda()] = 0xFF
    assert (memory.view(-1).view(torch.int64) == -1).all()

    lines = torch.full((count, 1), -1, dtype=INT32, device="cuda")
    lines[picked.flip(0).cuda(), 0] = picked.int().cuda()
    torch.ops.mxep.p2p_reduce_rows(rows, lines, count, [memory.data_ptr()], pitch, mode)
    assert torch.equal(memory[picked.flip(0).cuda()].cpu(), sent)
    memory[picked.cuda()] = 0xFF
    assert (memory.view(-1).view(torch.int64) == -1).all()


def test_no_host_sync(no_sync) -> None:
    scatter = to_named_ranks(50, 256, 4, 4, BF16)
    memory, rows, slots, ranks = GpuMemory(4, scatter.num_slots, 288), scatter.rows.cuda(), scatter.slots.cuda(), scatter.ranks.cuda()
    torch.ops.mxep.p2p_scatter_rows(rows, slots, ranks, memory.addresses, 288, "rceil")  # compiled and loaded
    with no_sync():
        torch.ops.mxep.p2p_scatter_rows(rows, slots, ranks, memory.addresses, 288, "rceil")
        torch.ops.mxep.p2p_reduce_rows(rows, slots, 10, memory.addresses + memory.addresses[:1], 544, "")


def test_in_a_graph() -> None:
    scatter = to_some_ranks(50, 256, 4, BF16)
    memory, rows, slots = GpuMemory(4, scatter.num_slots, 288), scatter.rows.cuda(), scatter.slots.cuda()
    torch.ops.mxep.p2p_scatter_rows(rows, slots, None, memory.addresses, 288, "rceil")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mxep.p2p_scatter_rows(rows, slots, None, memory.addresses, 288, "rceil")
    later = scatter._replace(rows=scatter.rows.flip(0), slots=scatter.slots.flip(0).contiguous())
    for whole in memory.whole:
        whole.fill_(0xFF)
    rows.copy_(later.rows)
    slots.copy_(later.slots)
    graph.replay()
    assert memory.same_as(expect_rows(later, "rceil", 288))


def test_too_many_ranks() -> None:
    rows, slots = torch.zeros(2, 64, device="cuda"), torch.zeros(2, 33, dtype=INT32, device="cuda")
    with pytest.raises(ValueError, match="33 addresses, want at most 32"):
        torch.ops.mxep.p2p_scatter_rows(rows, slots, None, [0] * 33, 256, "")


def test_sums_at_odd_addresses() -> None:
    rows, slots = torch.zeros(2, 64, device="cuda"), torch.zeros(2, 1, dtype=INT32, device="cuda")
    with pytest.raises(ValueError, match="no multiple of 4"):
        torch.ops.mxep.p2p_reduce_rows(rows, slots, 2, [2], 256, "")

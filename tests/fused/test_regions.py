"""Regions of symmetric memory on virtual ranks: the expert rows and sums are those of the collective dispatcher for any routing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from tests.fused.test_collective_dispatcher import FUZZED, Ranks, draw, exchange_indices
from torch import Tensor

from mxep.fused import symmetric_dispatcher
from mxep.fused.dispatcher import ExpertRowIndex
from mxep.fused.make_dispatcher import saved_dtype
from mxep.fused.symmetric_dispatcher import SymmetricDispatcher, SymmetricRowExchange, _Layout
from mxep.ops.routing.index_reference import MODES
from mxep.reference import reduce_rows
from mxep.shapes import round_up

GARBAGE = float("nan")  # content of region rows that were not written


def scattered(rows: list[Tensor], slots: list[Tensor], ranks: list[Tensor | None], region: int) -> list[Tensor]:
    """What every rank receives when rows (T, width) are written to their slots."""
    world = len(rows)
    memory = [torch.full((world, region, rows[0].shape[1]), GARBAGE) for _ in range(world)]
    for sender in range(world):
        owner = ranks[sender]
        for to in range(world):
            mine = torch.arange(world) == to if owner is None else owner == to
            token, column = ((slots[sender] >= 0) & mine).nonzero(as_tuple=True)
            slot = slots[sender][token, column].long()
            assert len(slot.unique()) == len(slot), "every row has a slot of its own"
            memory[to][sender, slot] = rows[sender][token]
    return [part.flatten(0, 1) for part in memory]


def halves(table: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the top-k ids and scores of a table (R, 2C)."""
    return table[:, : table.shape[1] // 2], table[:, table.shape[1] // 2 :].view(torch.float32)


def check(ranks: Ranks, alignment: int, seed: int) -> None:
    world, local = ranks.world, ranks.local
    choices = ranks.experts[0].shape[1]
    most, kept = max(map(len, ranks.experts)), min(choices, local)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 9, (len(experts), 2), generator=generator).float() for experts in ranks.experts]
    exchanges, _, packed_scores, packed_ends = exchange_indices(ranks, alignment)
    del packed_scores
    table = torch.cat([torch.ops.mxep.pack_topk(*pair, most) for pair in zip(ranks.experts, ranks.scores, strict=True)])
    size = round_up(sum(map(len, ranks.experts)) * kept + local * alignment, alignment)
    placed = []
    for rank in range(world):
        found = ExpertRowIndex(*torch.ops.mxep.index_topk(*halves(table), rank, local, alignment, size))
        assert torch.equal(found.offs, packed_ends[rank])
        placed.append(found)
        scores = halves(table)[1]
        of_ids = torch.ops.mxep.gather_or_zero(found.expert_rows, found.scores)
        assert torch.equal(of_ids, torch.where(found.expert_rows >= 0, scores, 0.0))
    for experts in ranks.experts:
        slots = symmetric_dispatcher.score_slots(experts, local, most)
        assert torch.equal(slots // (most * choices), experts // local), "in the region of the expert's rank"
        of_token = torch.arange(experts.numel()).view_as(experts)
        assert torch.equal(slots % (most * choices), of_token), "in the row of the token and the column of the expert"
    want = [x * torch.exp2(experts.float()).sum(1, keepdim=True) for x, experts in zip(tokens, ranks.experts, strict=True)]
    for mode, exchange in zip(MODES, exchanges, strict=True):
        region = symmetric_dispatcher.rows_of_region(mode, most, kept)
        sent = [symmetric_dispatcher.send_index(mode, experts, local, world, most) for experts in ranks.experts]
        arrived = scattered(tokens, [part.slots for part in sent], [part.ranks for part in sent], region)
        returned = [torch.full((world, region, 2), GARBAGE) for _ in range(world)]
        for rank in range(world):
            held = symmetric_dispatcher.recv_index(mode, placed[rank], kept)
            row_map = held.row_map.long()
            count = exchange.held[rank].row_map.shape[0]
            assert torch.equal(row_map[:count] >= 0, exchange.held[rank].row_map >= 0), "the expert rows of the packed exchange"
            assert (row_map[count:] < 0).all()
            rows = torch.where(row_map[:, None] < 0, 0.0, arrived[rank][row_map.clamp(min=0)] if len(arrived[rank]) else 0.0)
            assert not rows.isnan().any(), f"seed {seed} {mode}: an expert row reads a row that did not arrive"
            group = torch.searchsorted(packed_ends[rank], torch.arange(size), right=True)
            made = rows * torch.exp2(group + rank * local)[:, None]
            sums = reduce_rows(made, held.slots).view(world, region, 2)
            some = (held.slots >= 0).any(1).view(world, region)
            for to in range(world):
                returned[to][rank][some[to]] = sums[to][some[to]]
        for rank in range(world):
            assert torch.equal(reduce_rows(returned[rank].flatten(0, 1), sent[rank].return_slots), want[rank]), (
                f"seed {seed}, {mode}, rank {rank}"
            )


def test_fuzzed_routings_in_every_mode() -> None:
    for seed in range(FUZZED // 3):
        check(*draw(seed), seed)


def test_a_dispatcher_for_backward_is_computed_from_topk_ids_and_scores() -> None:
    """It saves no tensor of the size of all expert rows."""
    for seed, modes in itertools.product(range(12), itertools.product(MODES, MODES)):
        ranks, alignment = draw(seed)
        world, local, choices = ranks.world, ranks.local, ranks.experts[0].shape[1]
        most, kept = max(map(len, ranks.experts)), min(choices, local)
        table = torch.cat([torch.ops.mxep.pack_topk(*pair, most) for pair in zip(ranks.experts, ranks.scores, strict=True)])
        size = round_up(sum(map(len, ranks.experts)) * kept + local * alignment, alignment)
        for rank, experts in enumerate(ranks.experts):
            placed = ExpertRowIndex(*torch.ops.mxep.index_topk(*halves(table), rank, local, alignment, size))
            transport, exchanges = SimpleNamespace(world=world, rank=rank, or_nan=lambda values: values), []
            for mode in modes:
                sent = symmetric_dispatcher.send_index(mode, experts, local, world, most)
                held = symmetric_dispatcher.recv_index(mode, placed, kept)
                exchanges.append(SymmetricRowExchange(transport, mode, symmetric_dispatcher.rows_of_region(mode, most, kept), sent, *held))  # type: ignore[arg-type]
            chosen, bits = table[:, :choices].to(saved_dtype(world * local)), table[:, choices:].contiguous()
            layout = _Layout(len(experts), local, alignment, size)
            dispatcher = SymmetricDispatcher(
                *exchanges, placed.offs, placed.scores, placed.expert_rows, experts, chosen, bits, layout, 7, 5
            )
            bare, tensors = dispatcher.for_backward(reads_experts=True)
            assert tensors[:2] == (chosen, bits)
            assert not tensors[2].numel()
            assert not any(part.numel() for exchange in bare[:2] for part in (*exchange.sent, *exchange[-2:]) if part is not None)
            assert not any(part.numel() for part in bare[2:] if isinstance(part, torch.Tensor))
            again = bare.refilled(tensors)
            for exchange, want in zip(again[:2], exchanges, strict=True):
                assert exchange[1:3] == want[1:3]
                assert torch.equal(exchange.row_map, want.row_map), f"seed {seed}, {modes}"
                assert torch.equal(exchange.row_slots, want.row_slots), f"seed {seed}, {modes}"
                for made, part in zip(exchange.sent, want.sent, strict=True):
                    assert (made is None and part is None) or torch.equal(made, part)
            for made, part in zip(again[2:8], dispatcher[2:8], strict=True):
                assert torch.equal(made, part)
                assert made.dtype == part.dtype
            assert again[8:] == dispatcher[8:]

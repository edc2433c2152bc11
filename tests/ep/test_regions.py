"""Regions of symmetric memory on virtual ranks: the places and sums of the packed wires (ep/routes.py), whatever the routing."""

from __future__ import annotations

import doctest
import itertools
from types import SimpleNamespace

import torch
from tests.ep.test_routes import FUZZED, Ranks, draw, walk
from torch import Tensor

from mxep.ep import regions, routes
from mxep.ep.road import choices_dtype
from mxep.ep.routes import MODES
from mxep.ep.symmetric_road import SymmetricRoad, SymmetricWire, _Layout
from mxep.reference import sum_rows
from mxep.shapes import round_up

GARBAGE = float("nan")  # what regions hold where nothing came


def pushed(rows: list[Tensor], slots: list[Tensor], ranks: list[Tensor | None], region: int) -> list[Tensor]:
    """What every rank receives when rows (T, width) go to their slots."""
    world = len(rows)
    memory = [torch.full((world, region, rows[0].shape[1]), GARBAGE) for _ in range(world)]
    for sender in range(world):
        owner = ranks[sender]
        for to in range(world):
            mine = torch.arange(world) == to if owner is None else owner == to
            token, column = ((slots[sender] >= 0) & mine).nonzero(as_tuple=True)
            slot = slots[sender][token, column].long()
            assert len(slot.unique()) == len(slot), "a row of its own for each"
            memory[to][sender, slot] = rows[sender][token]
    return [part.flatten(0, 1) for part in memory]


def check(ranks: Ranks, alignment: int, seed: int) -> None:
    world, local = ranks.world, ranks.local
    choices = ranks.experts[0].shape[1]
    most, kept = max(map(len, ranks.experts)), min(choices, local)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 9, (len(experts), 2), generator=generator).float() for experts in ranks.experts]
    wires, _, packed_scores, packed_ends = walk(ranks, alignment)
    del packed_scores
    table = torch.cat([torch.ops.mxep.pack_choices(*pair, most) for pair in zip(ranks.experts, ranks.scores, strict=True)])
    size = round_up(sum(map(len, ranks.experts)) * kept + local * alignment, alignment)
    placed = []
    for rank in range(world):
        *found, row_map, of_places = torch.ops.mxep.place_table(table, rank, local, alignment, size)
        found = routes.Placed(*found)
        assert torch.equal(found.offs, packed_ends[rank])
        placed.append((found, row_map, of_places))
        scores = table[:, choices:].contiguous().view(torch.float32)
        assert torch.equal(routes.scores_of_choices(found.places, of_places), torch.where(found.places >= 0, scores, 0.0))
    for experts in ranks.experts:
        homes = regions.home_lines(experts, local, most)
        assert torch.equal(homes // most, experts // local), "what comes from the rank of the expert"
        assert torch.equal(homes % most, torch.arange(len(experts))[:, None].expand_as(homes)), "in the line of the token"
    want = [x * torch.exp2(experts.float()).sum(1, keepdim=True) for x, experts in zip(tokens, ranks.experts, strict=True)]
    for mode, wire in zip(MODES, wires, strict=True):
        region = regions.rows_of_region(mode, most, kept)
        sent = [regions.sent_regions(mode, experts, local, world, most) for experts in ranks.experts]
        arrived = pushed(tokens, [part.slots for part in sent], [part.ranks for part in sent], region)
        home = [torch.full((world, region, 2), GARBAGE) for _ in range(world)]
        for rank in range(world):
            found, of_row, _ = placed[rank]
            held = regions.held_regions(mode, found, of_row, kept)
            row_map = held.row_map.long()
            count = wire.held[rank].row_map.shape[0]
            assert torch.equal(row_map[:count] >= 0, wire.held[rank].row_map >= 0), "the places of the packed wire"
            assert (row_map[count:] < 0).all()
            rows = torch.where(row_map[:, None] < 0, 0.0, arrived[rank][row_map.clamp(min=0)] if len(arrived[rank]) else 0.0)
            assert not rows.isnan().any(), f"seed {seed} {mode}: a place reads what did not come"
            group = torch.searchsorted(packed_ends[rank], torch.arange(size), right=True)
            made = rows * torch.exp2(group + rank * local)[:, None]
            sums = sum_rows(made, held.slots).view(world, region, 2)
            some = (held.slots >= 0).any(1).view(world, region)
            for to in range(world):
                home[to][rank][some[to]] = sums[to][some[to]]
        for rank in range(world):
            assert torch.equal(sum_rows(home[rank].flatten(0, 1), sent[rank].home), want[rank]), f"seed {seed}, {mode}, rank {rank}"


def test_fuzzed_routings_in_every_mode() -> None:
    for seed in range(FUZZED // 3):
        check(*draw(seed), seed)


def test_a_road_for_backward_is_made_again_from_choices_and_scores() -> None:
    """And keeps nothing of the size of all places."""
    for seed, modes in itertools.product(range(12), itertools.product(MODES, MODES)):
        ranks, alignment = draw(seed)
        world, local, choices = ranks.world, ranks.local, ranks.experts[0].shape[1]
        most, kept = max(map(len, ranks.experts)), min(choices, local)
        table = torch.cat([torch.ops.mxep.pack_choices(*pair, most) for pair in zip(ranks.experts, ranks.scores, strict=True)])
        size = round_up(sum(map(len, ranks.experts)) * kept + local * alignment, alignment)
        for rank, experts in enumerate(ranks.experts):
            *found, row_map, scores = torch.ops.mxep.place_table(table, rank, local, alignment, size)
            placed = routes.Placed(*found)
            transport, wires = SimpleNamespace(world=world, rank=rank, or_nan=lambda values: values), []
            for mode in modes:
                sent = regions.sent_regions(mode, experts, local, world, most)
                held = regions.held_regions(mode, placed, row_map, kept)
                wires.append(SymmetricWire(transport, mode, regions.rows_of_region(mode, most, kept), sent, *held))  # type: ignore[arg-type]
            chosen, bits = table[:, :choices].to(choices_dtype(world * local)), table[:, choices:].contiguous()
            layout = _Layout(len(experts), local, alignment, size)
            road = SymmetricRoad(*wires, placed.offs, scores, placed.places, experts, chosen, bits, layout, 7, 5)
            bare, tensors = road.for_backward()
            assert tensors[:2] == (chosen, bits)
            assert not tensors[2].numel()
            assert not any(part.numel() for wire in bare[:2] for part in (*wire.sent, *wire[-2:]) if part is not None)
            assert not any(part.numel() for part in bare[2:] if isinstance(part, torch.Tensor))
            again = bare.refilled(tensors)
            for wire, want in zip(again[:2], wires, strict=True):
                assert wire[1:3] == want[1:3]
                assert torch.equal(wire.row_map, want.row_map), f"seed {seed}, {modes}"
                assert torch.equal(wire.held_slots, want.held_slots), f"seed {seed}, {modes}"
                for made, part in zip(wire.sent, want.sent, strict=True):
                    assert (made is None and part is None) or torch.equal(made, part)
            for made, part in zip(again[2:8], road[2:8], strict=True):
                assert torch.equal(made, part)
                assert made.dtype == part.dtype
            assert again[8:] == road[8:]


def test_the_example() -> None:
    assert doctest.testmod(regions, extraglobs={"torch": torch}).failed == 0

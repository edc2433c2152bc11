"""Row exchanges of the collective dispatcher on virtual ranks: in every mode tokens reach their experts, and their sums return."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from tests.truth import exchange, pick, transposed
from torch import Tensor

from mxep.fused import collective_dispatcher
from mxep.fused.collective_dispatcher import CollectiveSendIndex, count_rows, pack_metadata, send_index, unpack_metadata
from mxep.fused.dispatcher import ExpertRowIndex, RecvIndex
from mxep.ops.routing.index_reference import MODES
from mxep.reference import reduce_rows
from mxep.shapes import round_up

FUZZED = int(os.environ.get("MXEP_FUZZED_ROUTINGS", "300"))  # routings; each is exchanged in every mode
KINDS = ("random", "one expert", "one rank", "round robin", "starved", "few")


class Ranks(NamedTuple):
    """Choices of every rank's tokens: [rank] (T, C) int64 and float32; L experts on each."""

    experts: list[Tensor]
    scores: list[Tensor]
    local: int

    @property
    def world(self) -> int:
        return len(self.experts)


def draw(seed: int) -> tuple[Ranks, int]:
    """A routing and an alignment: W from 1 to 5, T from 0 to 20 on each rank, distinct choices of a token."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    world, local = integer(1, 5), integer(1, 4)
    count = world * local
    choices, kind = integer(1, min(4, count)), KINDS[integer(0, len(KINDS) - 1)]
    experts, scores = [], []
    for rank in range(world):
        tokens = integer(0, 20) if integer(0, 4) else 0
        if kind == "few":
            tokens = min(tokens, 1)
        ranking = torch.rand(tokens, count, generator=generator)
        if kind == "one expert":
            ranking[:, 0] += 1
        elif kind == "one rank":
            ranking[:, :local] += 1
        elif kind == "starved":
            ranking[:, -local:] -= 1
        elif kind == "round robin":
            ranking = -((torch.arange(count)[None] - torch.arange(tokens)[:, None] * choices - rank) % count).float()
        experts.append(ranking.topk(choices, -1).indices)
        scores.append(torch.rand(tokens, choices, generator=generator))
    return Ranks(experts, scores, local), (1, 4, 32)[integer(0, 2)]


class ModeRows(NamedTuple):
    """One mode: send and receive indices of every rank, and how many rows are exchanged, [from][to]."""

    sent: list[CollectiveSendIndex]
    held: list[RecvIndex]
    table: list[list[int]]


def exchange_indices(ranks: Ranks, alignment: int) -> tuple[list[ModeRows], list[Tensor], list[Tensor], list[Tensor]]:
    """The indices of each of MODES, and of every rank the expert rows of the choices, their scores and the ends of the groups."""
    world, local = ranks.world, ranks.local
    counts = [count_rows(experts, local, world) for experts in ranks.experts]
    sent = [
        [send_index(mode, ranks.experts[rank], local, world, int(counts[rank][:, at].sum())) for rank in range(world)]
        for at, mode in enumerate(MODES)
    ]
    tables = [[count[:, at].tolist() for count in counts] for at in range(len(MODES))]
    packed = [pack_metadata(ranks.experts[rank], ranks.scores[rank], sent[0][rank], counts[rank][:, 0], local) for rank in range(world)]
    held: list[list[RecvIndex]] = [[] for _ in MODES]
    expert_rows, scores, ends = [], [], []
    for rank, metadata in enumerate(exchange(packed, tables[0])):
        chosen, weight, tokens = unpack_metadata(metadata)
        received = [count[rank].tolist() for count in counts]
        size = round_up(sum(row[1] for row in received) + local * alignment, alignment)
        placed = ExpertRowIndex(*torch.ops.mxep.index_topk(chosen, weight, 0, local, alignment, size))
        for at, mode in enumerate(MODES):
            held[at].append(collective_dispatcher.recv_index(mode, placed, tokens, received))
        expert_rows.append(placed.expert_rows)
        scores.append(weight)
        ends.append(placed.offs)
    return [ModeRows(*parts) for parts in zip(sent, held, tables, strict=True)], expert_rows, scores, ends


def check(ranks: Ranks, alignment: int, seed: int) -> None:
    """In every mode expert e turns a row x into 2^e x. Values are small integers, so that sums are exact in any order."""
    world, local = ranks.world, ranks.local
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 9, (len(experts), 2), generator=generator).float() for experts in ranks.experts]
    modes, expert_rows, scores, ends = exchange_indices(ranks, alignment)
    for rank, end in enumerate(ends):
        sizes = torch.diff(end, prepend=end.new_zeros(1))
        chosen = torch.stack([(torch.cat(ranks.experts) == rank * local + e).sum() for e in range(local)])
        assert torch.equal(sizes, ((chosen.clamp(min=1) + alignment - 1) // alignment * alignment).int())
        score = scores[rank][expert_rows[rank] >= 0]
        assert torch.equal(score.sort().values, torch.cat(ranks.scores)[torch.cat(ranks.experts) // local == rank].sort().values)
    made = []  # outputs of the experts, by the mode of dispatch
    for rows_of_mode in modes:
        arrived = exchange([x[s.tokens.long()] for x, s in zip(tokens, rows_of_mode.sent, strict=True)], rows_of_mode.table)
        placed = [pick(rows, held.row_map) for rows, held in zip(arrived, rows_of_mode.held, strict=True)]
        groups = [torch.searchsorted(end, torch.arange(len(rows)), right=True) for rows, end in zip(placed, ends, strict=True)]
        made.append(
            [rows * torch.exp2(group + rank * local)[:, None] for rank, (rows, group) in enumerate(zip(placed, groups, strict=True))]
        )
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True):
            assert torch.equal(a, b), "every mode fills the same expert rows"
    want = [x * torch.exp2(experts.float()).sum(1, keepdim=True) for x, experts in zip(tokens, ranks.experts, strict=True)]
    for mode, rows_of_mode in zip(MODES, modes, strict=True):
        partial = [reduce_rows(rows, held.slots) for rows, held in zip(made[0], rows_of_mode.held, strict=True)]
        returned = exchange(partial, transposed(rows_of_mode.table))
        for rank in range(world):
            assert torch.equal(reduce_rows(returned[rank], rows_of_mode.sent[rank].slots), want[rank]), f"seed {seed}, {mode}, rank {rank}"
            picked = pick(returned[rank], rows_of_mode.sent[rank].slots.flatten())
            assert len(picked) == rows_of_mode.sent[rank].slots.numel()


def test_fuzzed_routings_in_every_mode() -> None:
    for seed in range(FUZZED):
        check(*draw(seed), seed)


def test_rows_that_each_mode_sends() -> None:
    """A token is sent once per rank in rank_dedup, once per choice in all_to_all, to every rank in all_ranks; in token order."""
    for seed in range(40):
        ranks, alignment = draw(seed)
        modes, *_ = exchange_indices(ranks, alignment)
        for rank, experts in enumerate(ranks.experts):
            wanted = [[t for t, row in enumerate(experts.tolist()) if to in [e // ranks.local for e in row]] for to in range(ranks.world)]
            every = [[t for t, row in enumerate(experts.tolist()) for e in row if e // ranks.local == to] for to in range(ranks.world)]
            for rows_of_mode, rows in zip(modes, (wanted, every, [list(range(len(experts)))] * ranks.world), strict=True):
                assert rows_of_mode.table[rank] == [len(part) for part in rows]
                assert rows_of_mode.sent[rank].tokens.tolist() == [token for part in rows for token in part]


@pytest.mark.parametrize("mode", MODES)
def test_a_default_device_changes_nothing(mode: str) -> None:
    """Tensors that are made on the host stay there under `torch.set_default_device("cuda")`."""
    placed = ExpertRowIndex(*torch.ops.mxep.index_topk(torch.tensor([[0, -1], [0, 1]]), torch.rand(2, 2), 0, 2, 0, 4))
    received = [[1, 1, 2], [1, 2, 2]]
    tokens = torch.tensor([1, 0], dtype=torch.int32)
    plain = collective_dispatcher.recv_index(mode, placed, tokens, received)
    with torch.device("meta"):
        again = collective_dispatcher.recv_index(mode, placed, tokens, received)
    assert torch.equal(plain.row_map, again.row_map)
    assert torch.equal(plain.slots, again.slots)

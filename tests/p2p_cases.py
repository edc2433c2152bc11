"""Rows scattered into memory of virtual ranks: inputs, poisoned memory, and the expected bytes by a loop over rows."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

import mxep.operators  # noqa: F401, registers torch.ops.mxep
from mxep import reference
from mxep.ops.rows.reference import add_chunk_rows

_POISON = 0xFF
_MARGIN = 128  # bytes before and after a rank's memory that must not be written


class Memory:
    """Memory of `world` virtual ranks, `num_slots` rows of `pitch` bytes each, poisoned, `skew` bytes off the allocator's alignment."""

    def __init__(self, world: int, num_slots: int, pitch: int, skew: int = 0) -> None:
        self.pitch = pitch
        self.whole = [torch.full((2 * _MARGIN + num_slots * pitch,), _POISON, dtype=torch.uint8) for _ in range(world)]
        self.skew = skew
        self.addresses = [memory.data_ptr() + _MARGIN + skew for memory in self.whole]

    def put(self, rank: int, slot: int, row: torch.Tensor) -> None:
        """Writes the expected bytes of one row."""
        first = _MARGIN + self.skew + slot * self.pitch
        self.whole[rank][first : first + row.numel()] = row.to(self.whole[rank].device)

    def same_as(self, other: Memory) -> bool:
        return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in zip(self.whole, other.whole, strict=True))


class Scatter(NamedTuple):
    """Arguments of `p2p_scatter_rows`, on the CPU, and how many slots each of the `world` ranks has."""

    rows: torch.Tensor
    slots: torch.Tensor
    ranks: torch.Tensor | None
    world: int
    num_slots: int


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(count: int, width: int, dtype: torch.dtype, seed: int = 0, bad: bool = True) -> torch.Tensor:
    """Rows of a wide range, with a block of zeros, subnormals, values at the edges of the scaling modes, and `bad` ones: a NaN, an Inf."""
    if not dtype.is_floating_point:
        return torch.randint(-(2**31), 2**31, (count, width), generator=generator(seed)).to(dtype)
    rows = torch.randn(count, width, generator=generator(seed)) * 2.0 ** torch.randint(-20, 20, (count, 1), generator=generator(seed))
    special = [[0.0], [1e-39, 3e-38], [448.0], [449.0, -0.0], [3.3e38, 1.0]]
    for i, some in enumerate([*special, *([[float("nan")], [float("inf")]] if bad else [])][:count]):
        start = i * 32 % max(width // 32 * 32, 1)
        rows[i, start : start + 32] = torch.tensor(some).repeat(32)[: rows[i, start : start + 32].numel()]
    return rows.to(dtype)


def to_some_ranks(count: int, width: int, world: int, dtype: torch.dtype, seed: int = 0) -> Scatter:
    """A slot or none on every rank: column j belongs to rank j."""
    num_slots = count + 3
    slots = torch.stack([torch.randperm(num_slots, generator=generator(seed + j))[:count] for j in range(world)], 1).int()
    slots[torch.rand(count, world, generator=generator(seed)) < 0.4] = -1
    return Scatter(values(count, width, dtype, seed), slots, None, world, num_slots)


def to_named_ranks(count: int, width: int, world: int, choices: int, dtype: torch.dtype, seed: int = 0) -> Scatter:
    """`choices` slots of each row on any ranks, also several on one rank; some rows have none."""
    num_slots = count * choices
    slots = torch.randperm(num_slots, generator=generator(seed)).view(count, choices).int()
    slots[torch.rand(count, choices, generator=generator(seed)) < 0.2] = -1
    slots[count // 2] = -1
    ranks = torch.randint(0, world, (count, choices), generator=generator(seed + 1), dtype=torch.int32)
    ranks[0] = world - 1
    return Scatter(values(count, width, dtype, seed), slots, ranks, world, num_slots)


def expect_rows(scatter: Scatter, mode: str, pitch: int, skew: int = 0) -> Memory:
    """What `p2p_scatter_rows` must leave in the ranks' memory."""
    memory = Memory(scatter.world, scatter.num_slots, pitch, skew)
    sent = reference.quantize_packed(scatter.rows, mode) if mode else scatter.rows.contiguous().view(torch.uint8)
    for t, line in enumerate(scatter.slots.tolist()):
        for j, slot in enumerate(line):
            if slot >= 0:
                memory.put(j if scatter.ranks is None else int(scatter.ranks[t, j]), slot, sent[t])
    return memory


def sums(
    world: int, region: int, choices: int, num_slots: int, width: int, dtype: torch.dtype, bad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """expert_rows (P, D) and slots (W * region, J), a third of which is -1; every fifth line is -1 throughout.

    `bad`: with NaN and Inf, for records only: the bits of a NaN sum differ between machines.
    """
    slots = torch.randint(0, max(num_slots, 1), (world * region, choices), generator=generator(3), dtype=torch.int32)
    slots[torch.rand(slots.shape, generator=generator(4)) < 0.33] = -1
    slots[::5] = -1
    return values(num_slots, width, dtype, seed=5, bad=bad), slots


def sums_of_expert_rows(count: int, choices: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots (count, choices), and the sum that each expert row belongs to (P,), -1 for a fifth of them.

    Every seventh sum has no slot; the others' slots are in random order.
    """
    sums = torch.arange(count)[torch.arange(count) % 7 != 3].repeat_interleave(choices)
    slot_of_choice = torch.arange(count * choices)[(torch.arange(count) % 7 != 3).repeat_interleave(choices)]
    chosen = torch.randperm(len(sums), generator=generator(6))[: num_slots * 4 // 5]
    rows = torch.randperm(num_slots, generator=generator(7))[: len(chosen)]
    slots = torch.full((count * choices,), -1, dtype=torch.int32)
    row_map = torch.full((num_slots,), -1, dtype=torch.int32)
    slots[slot_of_choice[chosen]], row_map[rows] = rows.int(), sums[chosen].int()
    return slots.view(count, choices), row_map


def sums_in_chunks(
    expert_rows: torch.Tensor, slots: torch.Tensor, cuts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The last chunk's rows, its bounds, and the partial sums of the chunks before it; cuts: where chunks begin."""
    partial_sums = torch.full((slots.shape[0], expert_rows.shape[1]), torch.nan, dtype=expert_rows.dtype)
    carry = torch.full(partial_sums.shape, 77, dtype=torch.int16) if expert_rows.dtype == torch.bfloat16 else None
    bounds = [*cuts, expert_rows.shape[0]]
    for first, end in itertools.pairwise(bounds[:-1]):
        mine = ((slots >= first) & (slots < end)).any(1)
        add_chunk_rows(expert_rows[first:end], slots, mine, first, end, partial_sums, carry)
    return expert_rows[bounds[-2] :], torch.tensor(bounds[-2:], dtype=torch.int32), partial_sums, carry


def expect_sums(expert_rows: torch.Tensor, slots: torch.Tensor, region: int, world: int, mode: str, pitch: int, skew: int = 0) -> Memory:
    """What `p2p_reduce_rows` must leave in the ranks' memory."""
    memory = Memory(world, region, pitch, skew)
    for r, line in enumerate(slots.tolist()):
        terms = [expert_rows[slot].float() for slot in line if slot >= 0]
        if terms:
            total = torch.zeros_like(terms[0])
            for term in terms:
                total = total + term
            row = total.to(expert_rows.dtype)[None]
            memory.put(r // region, r % region, (reference.quantize_packed(row, mode) if mode else row.view(torch.uint8))[0])
    return memory

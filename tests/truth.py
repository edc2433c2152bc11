"""Truths in plain torch that the block tests compare with: exchanges and permutations as indexing, splits that starve, SQNR."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from mxep import reference
from mxep.mx import MXTensor

KINDS = ("random", "balanced", "uneven", "one", "starved", "empty")


def seeded(seed: int) -> torch.Generator:
    """A generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def sqnr(truth: torch.Tensor, got: torch.Tensor) -> float:
    """20 log10(|truth| / |truth - got|), dB; infinite when equal."""
    truth, got = truth.double(), got.double()
    noise = (truth - got).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(truth.norm().item() / noise)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| of float64 `want`, Frobenius."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-300)).item()


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals NaN and -0 differs from 0."""
    return torch.atleast_1d(x.detach()).contiguous().view(torch.uint8)


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Equal dtype, shape and bytes of two plain tensors."""
    assert type(got) is torch.Tensor or type(got) is torch.nn.Parameter, f"{what}: {type(got)}"
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{what}: {got.dtype} {got.shape}, want {want.dtype} {want.shape}"
    assert torch.equal(raw(got), raw(want)), f"{what}: {(raw(got) != raw(want)).sum()} of {raw(want).numel()} bytes differ"


def assert_all_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    """The same for the results of a pipeline: its output, the gradient of its rows and that of its weight."""
    for name, mine, truth in zip(("out", "dx", "dw"), got, want, strict=True):
        assert_same(mine, truth, f"{what} {name}")


def assert_same_mx(got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, what: str = "") -> None:
    """An MXTensor standing for `dtype`, of exactly these (qdata, scale) bytes."""
    assert isinstance(got, MXTensor), f"{what}: {type(got)}"
    assert got.dtype == got.orig_dtype == dtype, f"{what}: stands for {got.dtype}, want {dtype}"
    assert_same(got.qdata, want[0], f"{what} qdata")
    assert_same(got.scale, want[1], f"{what} scale")


def raises_naming(*words: str) -> Any:
    """`pytest.raises(ValueError)` for a text that has every one of `words`: where, got, want, do."""
    return pytest.raises(ValueError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


@dataclass(frozen=True)
class Case:
    """Who sends how many rows to which expert: counts (W, E) int64, experts L*r .. L*r+L-1 on rank r."""

    counts: torch.Tensor

    @property
    def world(self) -> int:
        return self.counts.shape[0]

    @property
    def local(self) -> int:
        return self.counts.shape[1] // self.world

    @property
    def table(self) -> list[list[int]]:
        """(W, W): rows that each rank sends to each rank."""
        return self.counts.view(self.world, self.world, self.local).sum(-1).tolist()

    def sent(self, rank: int) -> list[int]:
        return self.table[rank]

    def received(self, rank: int) -> list[int]:
        return [row[rank] for row in self.table]

    def rank_major(self, rank: int) -> torch.Tensor:
        """(W*L,): what the counts exchange gives `rank`."""
        return self.counts.view(self.world, self.world, self.local)[:, rank].flatten()

    def inputs(self, width: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """Every rank's rows (T', width), the same on every rank that asks."""
        generator = seeded(seed)
        return [torch.randn(sum(row), width, generator=generator).to(dtype) for row in self.table]

    def gradients(self, width: int, dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
        """Every rank's gradient of the rows it receives (R, width)."""
        generator = seeded(seed)
        return [torch.randn(sum(self.received(r)), width, generator=generator).to(dtype) for r in range(self.world)]


def make_case(kind: str, world: int, local: int, rows: int = 24, seed: int = 0) -> Case:
    """Counts of one kind; T differs between the ranks in all but "balanced".

    "starved": the last rank's experts get nothing and rank 0 sends nothing; "one": everything goes to one expert; "empty": no rows.
    """
    experts = world * local
    generator = seeded(seed)
    if kind == "balanced":
        return Case(torch.full((world, experts), max(1, rows // experts), dtype=torch.int64))
    if kind == "empty":
        return Case(torch.zeros(world, experts, dtype=torch.int64))
    weights = torch.ones(experts)
    if kind == "uneven":
        weights = 1.0 / torch.arange(1, experts + 1).float() ** 2
    elif kind == "one":
        weights = (torch.arange(experts) == 1).float()
    elif kind == "starved":
        weights[-local:] = 0 if world > 1 else 1
    counts = torch.zeros(world, experts, dtype=torch.int64)
    for rank in range(world):
        choices = torch.multinomial(weights, rows + 5 * rank, replacement=True, generator=generator)
        counts[rank] = torch.bincount(choices, minlength=experts)
    if kind == "starved" and world > 1:
        counts[0] = 0
    return Case(counts)


def exchange(inputs: list[torch.Tensor], table: list[list[int]]) -> list[torch.Tensor]:
    """What every rank receives when rank s sends table[s][r] rows to rank r: splits and cats, differentiable."""
    parts = [rows.split(splits) for rows, splits in zip(inputs, table, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(table))]


def transposed(table: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*table, strict=True)]


def quantised_exchange(inputs: list[torch.Tensor], table: list[list[int]], rank: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(qdata, scale) that `rank` receives: quantise, then index."""
    parts = [reference.quantize(rows, mode) for rows in inputs]
    data, scale = ([part[i].view(torch.uint8) for part in parts] for i in (0, 1))
    return exchange(data, table)[rank].view(torch.float8_e4m3fn), exchange(scale, table)[rank].view(torch.float8_e8m0fnu)


def permutation(counts: torch.Tensor, world: int, local: int, alignment: int, padded_rows: int) -> tuple[list[int], list[int], list[int]]:
    """(row map, padded counts, END offsets) as lists, by walking experts and ranks."""
    starts, position = {}, 0
    for rank in range(world):
        for expert in range(local):
            starts[rank, expert] = position
            position += int(counts[rank * local + expert])
    row_map, padded, ends = [], [], []
    for expert in range(local):
        rows = [starts[rank, expert] + i for rank in range(world) for i in range(int(counts[rank * local + expert]))]
        padded.append(-(-max(len(rows), alignment) // alignment) * alignment)
        row_map += rows + [-1] * (padded[-1] - len(rows))
        ends.append(len(row_map))
    return row_map + [-1] * (padded_rows - len(row_map)), padded, ends


def pick(rows: torch.Tensor, row_map: list[int] | torch.Tensor) -> torch.Tensor:
    """rows[row_map], zero where the map is -1: index a copy with a zero row appended; differentiable."""
    index = torch.as_tensor(row_map, dtype=torch.int64)
    source = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    padded = torch.cat([source, source.new_zeros(1, *rows.shape[1:])])
    picked = padded[torch.where(index < 0, rows.shape[0], index)]
    return picked.view(rows.dtype) if rows.element_size() == 1 else picked


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """The tensors that autograd saves inside."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        yield saved


@contextlib.contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """The bytes that each call of `torch.distributed.all_to_all_single` inside has sent."""
    calls, exchange = list[int](), torch.distributed.all_to_all_single

    def counted(output: torch.Tensor, input: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(input.numel() * input.element_size())
        return exchange(output, input, *args, **kwargs)

    with mock.patch.object(torch.distributed, "all_to_all_single", counted):
        yield calls

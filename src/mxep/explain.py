"""`mxep explain`: shapes, bytes and FLOPs of a configuration, stop by stop, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mxep.models.presets import resolve_model
from mxep.recipe import Recipe, resolve_recipe
from mxep.shapes import LEGEND, MX_BLOCK, record_bytes, round_up

_BF16 = 2


@dataclass(frozen=True)
class ExplainConfig:
    """Shapes, bytes and FLOPs of one MoE layer, stop by stop, and of the whole model. Balanced routing is assumed."""

    model: str = "dsv3_16b"
    """A preset of `mxep train`: dsv3_debug, dsv3_16b, dsv3_671b, qwen3_debug, qwen3_30b_a3b, or a debug model of CPU size."""
    ep: int = 8
    """W, ranks of the EP group."""
    tokens: int = 16384
    """T, tokens per rank and layer (batch * seq_len)."""
    recipe: str = "mxfp8_wgrad_with_hp"
    """Precision of exchanges and GEMMs."""
    against: Literal["hp"] = "hp"
    """The recipe that the totals are compared with, in bf16."""


@dataclass(frozen=True)
class Stop:
    """One stop of the layer on one rank: shape that leaves it, precision, bytes sent and FLOPs, each forward and backward."""

    name: str
    out: tuple[int, int]
    forward: str
    backward: str
    wire_bytes: tuple[int, int]
    flops: tuple[int, int]


def _row_bytes(width: int, precision: str) -> int:
    return record_bytes(width) if precision == "mxfp8" else width * _BF16


def layer_stops(T: int, D: int, H: int, E: int, C: int, W: int, recipe: Recipe) -> list[Stop]:
    """The stops of one MoE layer with balanced routing.

    Args:
        T, D, H, E, C, W: see `mxep.shapes.LEGEND`.  recipe: precision of each wire and GEMM.

    Returns:
        stops in the order of forward; wire bytes are those that leave this rank for other ranks.

    Raises:
        ValueError: E is not a multiple of W.
    """
    if E % W:
        raise ValueError(f"explain: {E} experts on {W} ranks, want a multiple; change --ep")
    L, rows = E // W, T * C
    P = round_up(rows + L * recipe.group_size_multiple_of, recipe.group_size_multiple_of)
    away = rows * (W - 1) // W  # rows whose expert lives elsewhere
    wire = {"mxfp8": "mxfp8", "mx": "mxfp8", "hp": "bf16"}
    gemm = 2 * rows * D * H
    experts = (wire[recipe.gemm], f"{wire[recipe.gemm]}, {wire[recipe.wgrad]}")  # dgrad, wgrad
    given_back = "mxfp8" if recipe.quantizes_in_unpermute_backward else wire[recipe.combine_backward]
    nothing = (0, 0)

    def sent(forward: str, backward: str) -> tuple[int, int]:
        return away * _row_bytes(D, forward), away * _row_bytes(D, backward)

    return [
        Stop("router", (T, C), "float32", "float32", nothing, (2 * T * D * E, 4 * T * D * E)),
        Stop("dispatch", (rows, D), wire[recipe.dispatch], "bf16", sent(recipe.dispatch, "hp"), nothing),
        Stop("permute", (P, D), "mxfp8" if recipe.quantizes_in_permute else wire[recipe.dispatch], "bf16", nothing, nothing),
        Stop("w1 and w3", (P, H), *experts, nothing, (2 * gemm, 4 * gemm)),
        Stop("w2", (P, D), *experts, nothing, (gemm, 2 * gemm)),
        Stop("unpermute", (rows, D), "bf16", given_back, nothing, nothing),
        Stop("combine", (rows, D), "bf16", wire[recipe.combine_backward], sent("hp", recipe.combine_backward), nothing),
    ]


def _pair(numbers: Sequence[float]) -> str:
    return " / ".join(f"{number:.2f}" if number < 10 else f"{number:.0f}" for number in numbers) if any(numbers) else "-"


def _stops_table(title: str, stops: Sequence[Stop]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("stop", "out", "forward", "backward"):
        table.add_column(name, no_wrap=True)
    for name in ("MiB sent", "TFLOP"):
        table.add_column(f"{name}\nfwd / bwd", justify="right", no_wrap=True)
    for stop in stops:
        sent, work = [count / 2**20 for count in stop.wire_bytes], [count / 1e12 for count in stop.flops]
        table.add_row(stop.name, f"{stop.out[0]}x{stop.out[1]}", stop.forward, stop.backward, _pair(sent), _pair(work))
    table.add_section()
    sent = [sum(stop.wire_bytes[way] for stop in stops) / 2**20 for way in (0, 1)]
    work = [sum(stop.flops[way] for stop in stops) / 1e12 for way in (0, 1)]
    table.add_row("sum", "", "", "", _pair(sent), _pair(work))
    return table


def command(argv: Sequence[str]) -> int:
    """Print the tables; returns the exit status, 2 for a configuration that cannot be."""
    config = tyro.cli(ExplainConfig, prog="mxep explain", args=list(argv))
    console = Console()
    try:
        model, recipe = resolve_model(config.model), resolve_recipe(config.recipe)
        if config.ep <= 0 or config.tokens <= 0:
            raise ValueError(f"explain: --ep={config.ep} --tokens={config.tokens}, want more than 0")
        D, H, E, C = model.dim, model.expert_hidden, model.num_experts, model.top_k
        stops = layer_stops(config.tokens, D, H, E, C, config.ep, recipe)
        plain = layer_stops(config.tokens, D, H, E, C, config.ep, resolve_recipe(config.against))
    except ValueError as error:
        console.print(f"[red]mxep explain: {error}[/]")
        return 2
    total, active = model.parameters()
    num_moe = model.num_layers - model.num_dense_layers
    console.print(f"{config.model}: {total / 1e9:.2f} billion parameters, {active / 1e9:.2f} used per token, {num_moe} MoE layers")
    letters = {"T": config.tokens, "D": D, "H": H, "E": E, "C": C, "W": config.ep, "L": E // config.ep}
    for letter, value in letters.items():
        console.print(f"  {letter} {value:>7,}  {LEGEND[letter]}", highlight=False)
    console.print(_stops_table(f"One MoE layer on one rank, recipe {recipe.name}, balanced routing", stops))
    sent, plain_sent = (sum(sum(stop.wire_bytes) for stop in some) for some in (stops, plain))
    if plain_sent:
        console.print(f"sent per layer and step: {sent / 2**20:,.0f} MiB, in bf16 {plain_sent / 2**20:,.0f} MiB ({plain_sent / sent:.2f}x)")
    row = record_bytes(D)
    console.print(f"one dispatched row: {D} e4m3 + {D // MX_BLOCK} e8m0 bytes, {row} padded; in bf16 {D * _BF16} ({D * _BF16 / row:.2f}x)")
    weights = 3 * (E // config.ep) * D * H
    console.print(f"expert weights on one rank and layer: {weights * _BF16 / 2**20:,.0f} MiB in bf16")
    return 0

"""`mxep explain`: the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mxep.degrees import Degrees
from mxep.explain.stops import Stop, block_kept_bytes, fused_rows, kept_bytes, layer_stops, row_bytes
from mxep.models.presets import ModelConfig
from mxep.models.published_shape import find_model
from mxep.recipe import RECIPES, Recipe, resolve_recipe
from mxep.shapes import LEGEND, MX_BLOCK, record_bytes

_BF16 = 2
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class ExplainConfig:
    """Shapes, bytes and FLOPs of one MoE layer, operation by operation; memory of a rank; what other recipes and EP degrees would change.

    Balanced routing is assumed. Nothing is allocated and no GPU is asked: a plan for 256 ranks is made on any machine.
    """

    model: str = "dsv3_16b"
    """A preset of `mxep train`: dsv3_debug, dsv3_small, dsv3_16b, dsv3_671b, qwen3_debug, qwen3_30b_a3b, or a debug model of CPU size.
    Or a folder with a Hugging Face config.json, or such a file."""
    layers: int | None = None
    """Only the first layers of the model, as `mxep train --layers` trains them."""
    ranks: int | None = None
    """Of the whole run; without it, as many as --ep, --tp and --pp need."""
    ep: int = 8
    """W, ranks of the EP group."""
    tp: int = 1
    """Ranks that share one attention and dense FFN."""
    pp: int = 1
    """Stages of layers."""
    dp_replicate: int = 1
    """Groups of ranks that each hold the whole model, sharded."""
    tokens: int = 16384
    """T, tokens per rank and layer (batch * seq_len)."""
    recipe: str = "mxfp8_wgrad_with_hp"
    """Precision of exchanges and GEMMs."""
    against: Literal["hp"] = "hp"
    """The recipe that the totals are compared with, in bf16."""


def command(argv: Sequence[str]) -> int:
    """Print the tables; returns the exit status, 2 for a configuration that cannot be."""
    config = tyro.cli(ExplainConfig, prog="mxep explain", args=list(argv))
    console = Console()
    try:
        (name, model, notes), recipe = find_model(config.model, config.layers), resolve_recipe(config.recipe)
        if config.ep <= 0 or config.tokens <= 0:
            raise ValueError(f"explain: --ep={config.ep} --tokens={config.tokens}, want more than 0")
        if config.ranks is not None and config.ranks <= 0:
            raise ValueError(f"explain: --ranks={config.ranks}, want more than 0")
        stops = _stops_of(config, model, recipe)
        plain = _stops_of(config, model, resolve_recipe(config.against))
        memory = _memory_table(config, model, recipe)
    except ValueError as error:
        console.print(f"[red]mxep explain: {error}[/]")
        return 2
    total, active = model.parameters()
    num_moe = model.num_moe_layers
    D, E = model.dim, model.num_experts
    for note in notes:
        console.print(note)
    console.print(f"{name}: {total / 1e9:.2f} billion parameters, {active / 1e9:.2f} used per token, {num_moe} MoE layers")
    letters = {"T": config.tokens, "D": D, "H": model.expert_hidden, "E": E, "C": model.top_k, "W": config.ep, "L": E // config.ep}
    for letter, value in letters.items():
        console.print(f"  {letter} {value:>7,}  {LEGEND[letter]}", highlight=False)
    console.print(_stops_table(f"One MoE layer on one rank, recipe {recipe.name}, balanced routing", stops))
    sent, plain_sent = _sent(stops), _sent(plain)
    if plain_sent:
        console.print(f"sent per layer and step: {sent / _MIB:,.0f} MiB, in bf16 {plain_sent / _MIB:,.0f} MiB ({plain_sent / sent:.2f}x)")
    row = record_bytes(D)
    console.print(f"one dispatched row: {D} e4m3 + {D // MX_BLOCK} e8m0 bytes, {row} padded; in bf16 {D * _BF16} ({D * _BF16 / row:.2f}x)")
    if config.ep > 1:
        console.print(_fused_table(config, model, recipe))
    console.print(_recipes_table(config, model))
    console.print(_degrees_table(config, model, recipe))
    console.print(memory)
    console.print(
        "not in it: what kernels, symmetric memory, NCCL and CUDA take while they run; tensor parallelism's share of what layers keep"
    )
    return 0


def _stops_of(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> list[Stop]:
    return layer_stops(config.tokens, model.dim, model.expert_hidden, model.num_experts, model.top_k, config.ep, recipe)


def _kept(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> int:
    """Bytes that one MoE layer keeps for backward on one rank."""
    shape = (config.tokens, model.dim, model.expert_hidden, model.num_experts, model.top_k, config.ep)
    return kept_bytes(*shape, model.num_shared_experts, recipe)


def _sent(stops: Sequence[Stop]) -> int:
    """Bytes that leave the rank, both ways."""
    return sum(sum(stop.wire_bytes) for stop in stops)


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _pair(numbers: Sequence[float]) -> str:
    return " / ".join(f"{number:.2f}" if number < 10 else f"{number:.0f}" for number in numbers) if any(numbers) else "-"


def _stops_table(title: str, stops: Sequence[Stop]) -> Table:
    table = _table(title, ("operation", "out", "forward", "backward"), ("MiB sent\nfwd / bwd", "TFLOP\nfwd / bwd"))
    for stop in stops:
        sent, work = [count / _MIB for count in stop.wire_bytes], [count / 1e12 for count in stop.flops]
        table.add_row(stop.name, f"{stop.out[0]}x{stop.out[1]}", stop.forward, stop.backward, _pair(sent), _pair(work))
    table.add_section()
    sent = [sum(stop.wire_bytes[way] for stop in stops) / _MIB for way in (0, 1)]
    work = [sum(stop.flops[way] for stop in stops) / 1e12 for way in (0, 1)]
    table.add_row("sum", "", "", "", _pair(sent), _pair(work))
    return table


def _fused_table(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> Table:
    """What travels when the layer is one function, by the mode of each of its wires."""
    numbers = ("rows", "dispatch, MiB sent\nfwd / bwd", "combine, MiB sent\nfwd / bwd")
    table = _table("The layer as one function (FusedMoE), random routing", ("mode",), numbers)
    for mode, rows in fused_rows(config.tokens, model.num_experts, model.top_k, config.ep).items():
        ways = (recipe.dispatch, "hp"), ("hp", recipe.combine_backward)
        sizes = (_pair([rows * row_bytes(model.dim, precision) / _MIB for precision in wire]) for wire in ways)
        table.add_row(mode, f"{rows:,}", *sizes)
    return table


def _recipes_table(config: ExplainConfig, model: ModelConfig) -> Table:
    """What each recipe makes of the same layer."""
    table = _table("Recipes, one MoE layer on one rank", ("recipe", "dispatch", "GEMM", "wgrad"), ("MiB sent", "MiB kept"))
    for recipe in RECIPES.values():
        sent, kept = _sent(_stops_of(config, model, recipe)), _kept(config, model, recipe)
        table.add_row(recipe.name, recipe.dispatch, recipe.gemm, recipe.wgrad, f"{sent / _MIB:,.0f}", f"{kept / _MIB:,.0f}")
    return table


def _degrees_table(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> Table:
    """What each EP degree makes of the same layer: more ranks send more rows away, and each gathers fewer experts."""
    table = _table("EP degrees, one MoE layer on one rank", (), ("ranks", "experts", "MiB sent", "MiB of experts\ngathered in bf16"))
    limit = max(config.ranks or 0, config.ep)
    for degree in (2**power for power in range(limit.bit_length())):
        if degree <= limit and model.num_experts % degree == 0:
            experts = model.num_experts // degree
            weights = 3 * experts * model.dim * model.expert_hidden * _BF16
            sent = _sent(_stops_of(dataclasses.replace(config, ep=degree), model, recipe))
            table.add_row(str(degree), str(experts), f"{sent / _MIB:,.0f}", f"{weights / _MIB:,.0f}")
    return table


def _memory_table(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> Table:
    """Memory of the first rank of every stage, in GiB.

    Raises:
        ValueError: degrees that do not fit.
    """
    from mxep.explain.memory import rank_memory

    degrees = Degrees(config.ep, config.tp, config.pp, config.dp_replicate)
    ranks = config.ranks or max(config.ep, config.tp) * config.pp * config.dp_replicate
    stages = rank_memory(model, recipe, degrees, ranks)
    table = _table(
        f"Memory of one of {ranks} ranks, GiB (on GPUs: float32 weights, bf16 compute)",
        ("part",),
        [f"stage {stage}" for stage in range(len(stages))] if len(stages) > 1 else ["GiB"],
    )
    parts = {
        "weights, this rank's shards": "weights",
        "gradients": "gradients",
        "AdamW's moments": "moments",
        "gathered weights, at most": "gathered",
        "gradients on their way to the shards, at most": "summed",
        "loss, a chunk of tokens": "loss",
        "sum": "total",
    }
    for label, name in parts.items():
        table.add_row(label, *(f"{getattr(stage, name) / _GIB:,.2f}" for stage in stages))
    table.add_section()
    kept = {dense: block_kept_bytes(config.tokens, model, config.ep, recipe, dense) for dense in (False, True)}
    T_bytes = config.tokens * model.dim * _BF16
    most = [max(kept[dense] for dense, count in ((True, stage.dense_layers), (False, stage.moe_layers)) if count) for stage in stages]
    again = [stage.layers * T_bytes + layer for stage, layer in zip(stages, most, strict=True)]
    table.add_row("and full activation checkpointing keeps, with a layer that runs again", *(f"{size / _GIB:,.2f}" for size in again))
    whole = [stage.dense_layers * kept[True] + stage.moe_layers * kept[False] for stage in stages]
    table.add_row("or without it, all layers keep", *(f"{size / _GIB:,.2f}" for size in whole))
    if any(stage.quantized for stage in stages):
        table.add_row("and --cache-weights keeps, beside the gradients", *(f"{stage.quantized / _GIB:,.2f}" for stage in stages))
    return table

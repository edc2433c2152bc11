"""`mxep explain`: shapes, bytes, FLOPs and memory of a configuration, computed without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mxep.models.flops import flops_per_token
from mxep.models.presets import ModelConfig
from mxep.parallel_dims import ParallelDims
from mxep.recipe import RECIPES, Recipe, resolve_recipe
from mxep.shapes import LEGEND, MX_BLOCK, record_bytes, round_up
from mxep.train.config import TrainConfig, flag_of
from mxep.train.resolved_config import ep_degrees, resolve

_BF16 = 2
# What an H200 sustains: FLOP/s of large products in bf16 and in FP8, bytes/s of passes over memory.
_BF16_FLOPS, _FP8_FLOPS, _BANDWIDTH = 700e12, 1250e12, 4.2e12
_QUANTIZED_BYTES = _BF16 + 2  # of a weight's value: read once, written for forward and for dgrad
_SAMPLED_TOKENS = 8192  # of random routing within groups: 0.3% from the mean
_MIB, _GIB = 2**20, 2**30
_GIB_A_GB = 0.99  # that torch sees for each GB in the name of a GPU: 79.2 of an H100 with 80 GB, 139.8 of an H200 with 141


@dataclass(frozen=True)
class ExplainConfig:
    """Shapes, bytes and FLOPs of one MoE layer, FLOPs of the model, the peak memory of a GPU, and what other recipes and EP degrees change.

    Bytes and FLOPs are of one forward and its backward: of a microbatch with --pp or --accumulate. Routing is balanced. Nothing is
    allocated and no GPU is used: any machine plans a run of 256 ranks.
    """

    model: str = "dsv3_16b"
    """Preset of `mxep train` (dsv3_debug, dsv3_small, dsv3_16b, dsv3_671b, qwen3_debug, qwen3_30b_a3b, ...), or a Hugging Face
    config.json or its folder."""
    layers: int | None = None
    """Only the first layers of the model, as `mxep train --layers` trains them."""
    ranks: int | None = None
    """GPUs of the whole run. Default: as many as --ep, --tp, --pp and --dp-replicate need."""
    ep: int = 8
    """W, ranks of the EP group."""
    tp: int = 1
    """Tensor-parallel degree of attention and dense FFN."""
    pp: int = 1
    """Pipeline-parallel degree."""
    pp_schedule: Literal["1F1B", "Interleaved1F1B"] = "1F1B"
    """Memory with this schedule of `mxep train --pp`: "Interleaved1F1B" gives two stages to each rank."""
    dp_replicate: int = 1
    """Replicas of the whole model (HSDP)."""
    tokens: int = 16384
    """Tokens of one forward on one rank (batch * seq_len; with --pp, microbatch * seq_len). With --tp the ranks of a TP group share them:
    T, those that a rank routes, is tokens / tp."""
    seq_len: int | None = None
    """Tokens per sequence, which attention's FLOPs depend on. Default: as `mxep train` trains the model."""
    recipe: str = "mxfp8_wgrad_with_hp"
    """Precision of exchanges and GEMMs."""
    against: Literal["hp"] = "hp"
    """Recipe that the bytes sent are compared with: hp, which is bf16."""
    fused_layer: bool = True
    """Bytes sent, FLOPs and memory of MoE layers that run as one function, as `mxep train` runs them, or of separate blocks
    (--no-fused-layer)."""
    keep_first_product: Literal["hp", "mxfp8"] = "hp"
    """Memory with gate and up in MXFP8, as with `mxep train --keep-first-product mxfp8`."""
    cache_weights: bool = False
    """Memory with the quantised weights that `mxep train --cache-weights` keeps."""
    compile: bool = False
    """Memory with compiled layers, which keep less of dense and shared FFNs, as with `mxep train --compile`."""
    cuda_graph: bool = False
    """Memory of a step that is a CUDA graph, as with `mxep train --cuda-graph`."""
    optimizer: Literal["adamw", "adamw8bit", "adamw4bit"] = "adamw"
    """Memory with the moments of `mxep train --optimizer`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Memory with parameters and gradients of this dtype, as with `mxep train --dtype`."""
    accumulate: int = 1
    """Memory with gradients that add up over so many forwards, as with `mxep train --accumulate`: whole under FSDP, in float32."""
    optimizer_in_backward: bool = False
    """Memory with gradients that are freed during backward, as with `mxep train --optimizer-in-backward`."""
    gpu_gb: float = 80.0
    """Memory of one GPU in the GB of its name: 80 (A100, H100), 141 (H200), 180 (B200)."""

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(self.ep, self.tp, self.pp, self.dp_replicate)

    @property
    def world(self) -> int:
        return self.ranks or max(self.ep, self.tp) * self.pp * self.dp_replicate

    @property
    def routed_tokens(self) -> int:
        """T, tokens that one rank routes in a forward."""
        return self.tokens // self.tp


def command(argv: Sequence[str]) -> int:
    """Print the tables; returns 0. Raises ValueError for a configuration that is not possible."""
    config = tyro.cli(ExplainConfig, prog="mxep explain", args=list(argv))
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)
    for name in ("tokens", "ranks", "gpu_gb"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"explain: {flag_of(name)}={value}, want more than 0 and less than infinity; change it")
    shared = {name: value for name, value in vars(config).items() if name in TrainConfig.__dataclass_fields__}
    settings = resolve(TrainConfig(**shared, max_grad_norm=0), "cuda", config.world)  # refuses what `mxep train` refuses
    name, model, recipe = settings.model, settings.choice.shape, resolve_recipe(config.recipe)
    linears = _linears(config, model, recipe)
    stages = _stages_of(config, model, recipe, linears)
    memory, verdicts = _memory(config, model, recipe, linears)
    total, active = model.parameters()
    for note in settings.choice.notes:
        console.print(note)
    console.print(f"{name}: {total / 1e9:.2f} billion parameters, {active / 1e9:.2f} used per token, {model.num_moe_layers} MoE layers")
    D, E = model.dim, model.num_experts
    letters = {"T": config.routed_tokens, "D": D, "H": model.expert_hidden, "E": E, "C": model.top_k, "W": config.ep, "L": E // config.ep}
    for letter, value in letters.items():
        console.print(f"  {letter} {value:>7,}  {LEGEND[letter]}", highlight=False)
    console.print(_stages_table(f"One MoE layer on one rank, recipe {recipe.name}, balanced routing, in separate blocks", stages))
    sent, plain_sent = (_sent(config, model, each) for each in (recipe, resolve_recipe(config.against)))
    if plain_sent:
        how = f"sent per layer, fwd + bwd, {'as one function' if config.fused_layer else 'in separate blocks'}"
        console.print(f"{how}: {sent / _MIB:,.0f} MiB, in bf16 {plain_sent / _MIB:,.0f} MiB ({plain_sent / sent:.2f}x)")
    row = record_bytes(D)
    console.print(f"one dispatched row: {D} e4m3 + {D // MX_BLOCK} e8m0 bytes, {row} padded; in bf16 {D * _BF16} ({D * _BF16 / row:.2f}x)")
    if config.ep > 1:
        console.print(_fused_table(config, model, recipe))
    if recipe.gemm == "mxfp8":
        rows = crossover_rows(recipe)
        tokens = math.ceil(rows * E / (model.top_k * config.ep))
        console.print(
            f"few tokens: below about {tokens:,} tokens a rank ({rows} rows per expert) MXFP8 is slower than bf16, since every call "
            f"quantises the weights; for a dense linear layer below {rows}. Recipe(hp_below_rows={rows}) multiplies in bf16 there"
        )
        console.print(_linears_table(config, recipe, linears))
    console.print(_recipes_table(config, model))
    console.print(_ep_table(config, model, recipe))
    console.print(_flops_table(config, settings.seq_len, model))
    console.print(f"MFU and HFU divide by a GPU's dense peak in bf16, in MXFP8 as well: {_peaks()}", highlight=False)
    console.print(memory)
    for verdict in verdicts:
        console.print(verdict, highlight=False)
    console.print(
        "Not counted: CUDA's context, NCCL's buffers, cuBLAS's workspaces (up to 0.1 GiB), experts with more rows than others, what a"
        " pipeline's stages receive. selective is an upper bound. For recorded runs such estimates are between"
        " 3% below and 15% above the peak, in bf16 19%."
    )
    return 0


@dataclass(frozen=True)
class LayerStage:
    """One stage of the MoE layer on one rank: shape of its output, precision, bytes sent and FLOPs of (forward, backward)."""

    name: str
    out: tuple[int, int]
    forward: str
    backward: str
    wire_bytes: tuple[int, int]
    flops: tuple[int, int]


def layer_stages(
    T: int, D: int, H: int, E: int, C: int, W: int, recipe: Recipe, shared: int = 0, shared_in_mx: tuple[bool, bool] = (False, False)
) -> list[LayerStage]:
    """The stages of one MoE layer in the order of forward, with balanced routing; shared experts come last.

    Args:
        T, D, H, E, C, W: see `mxep.shapes.LEGEND`.
        recipe: precision of each exchange and GEMM.
        shared: shared experts of hidden width H.
        shared_in_mx: whether w1 and w3 of the shared experts, and w2, compute in `recipe`; else they compute in bf16.

    Raises:
        ValueError: E is not a multiple of W.
    """
    if E % W:
        raise ValueError(f"explain: {E} experts on {W} ranks, want a multiple; change --ep")
    L, rows = E // W, T * C
    P = round_up(rows + L * recipe.group_size_multiple_of, recipe.group_size_multiple_of)
    rows_off_rank = rows * (W - 1) // W
    wire = {"mxfp8": "mxfp8", "mx": "mxfp8", "hp": "bf16"}
    gemm, shared_gemm = 2 * rows * D * H, 2 * T * D * H * shared
    experts = (wire[recipe.gemm], f"{wire[recipe.gemm]}, {wire[recipe.wgrad]}")  # dgrad, wgrad
    unpermute_backward = "mxfp8" if recipe.quantizes_in_unpermute_backward else wire[recipe.combine_backward]
    nothing = (0, 0)

    def sent(forward: str, backward: str) -> tuple[int, int]:
        return rows_off_rank * _row_bytes(D, forward), rows_off_rank * _row_bytes(D, backward)

    of_shared = [experts if in_mx else ("bf16", "bf16") for in_mx in shared_in_mx]
    shared_stages = [
        LayerStage("shared w1, w3", (T, shared * H), *of_shared[0], nothing, (2 * shared_gemm, 4 * shared_gemm)),
        LayerStage("shared w2", (T, D), *of_shared[1], nothing, (shared_gemm, 2 * shared_gemm)),
    ]
    return [
        LayerStage("router", (T, C), "float32", "float32", nothing, (2 * T * D * E, 4 * T * D * E)),
        LayerStage("dispatch", (rows, D), wire[recipe.dispatch], "bf16", sent(recipe.dispatch, "hp"), nothing),
        LayerStage("permute", (P, D), "mxfp8" if recipe.quantizes_in_permute else wire[recipe.dispatch], "bf16", nothing, nothing),
        LayerStage("w1 and w3", (P, H), *experts, nothing, (2 * gemm, 4 * gemm)),
        LayerStage("w2", (P, D), *experts, nothing, (gemm, 2 * gemm)),
        LayerStage("unpermute", (rows, D), "bf16", unpermute_backward, nothing, nothing),
        LayerStage("combine", (rows, D), "bf16", wire[recipe.combine_backward], sent("hp", recipe.combine_backward), nothing),
        *(shared_stages if shared else []),
    ]


def crossover_rows(recipe: Recipe) -> int:
    """Rows per weight from which on FP8 GEMMs save the time that quantising the weight costs, in one pass for forward and dgrad.

    bytes per value / bandwidth = rows * FLOP per value and row * (1 / FLOP/s in bf16 - 1 / FLOP/s in FP8)

    The shape cancels out.  FP8 GEMMs are forward, dgrad and, of MX rows, wgrad, 2 FLOP each.  Passes over the rows are not counted, which
    puts the crossover higher, nor that GEMMs of few rows wait for weights, of which FP8 reads half.  Figures of an H200; kept weights have
    no crossover.

    >>> crossover_rows(RECIPES["mxfp8_wgrad_with_mx"]), crossover_rows(RECIPES["mxfp8_wgrad_with_hp"])
    (253, 379)
    """
    flops = 2 * (3 if recipe.wgrad == "mx" else 2)
    return math.ceil(_QUANTIZED_BYTES / _BANDWIDTH / (flops * (1 / _BF16_FLOPS - 1 / _FP8_FLOPS)))


def fused_rows(T: int, E: int, C: int, W: int, num_groups: int = 1, top_groups: int = 1) -> dict[str, int]:
    """Rows that leave a rank in one direction of the fused layer, by its exchange mode, expected of random routing.

    Args:
        T, E, C, W: see `mxep.shapes.LEGEND`.
        num_groups, top_groups: as in `mxep.MoEConfig`. A token whose experts are in few groups goes to fewer ranks.
    """
    L = E // W
    reached = 1 - math.comb(E - L, C) / math.comb(E, C)  # probability that one of a token's experts is on a given rank
    if top_groups < num_groups and W > 1:
        reached = _reached_in_groups(E, C, W, num_groups, top_groups)
    return {
        "rank_dedup": round(T * (W - 1) * reached),
        "all_to_all": T * C * (W - 1) // W,
        "all_gather / reduce_scatter": T * (W - 1),
    }


@functools.cache
def _reached_in_groups(E: int, C: int, W: int, num_groups: int, top_groups: int) -> float:
    """Mean share of the ranks that hold an expert of a token, of tokens with random logits: groups with high scores are chosen, so the
    experts in them are not equally likely, and there is no closed form.
    """
    import torch

    import mxep.operators  # noqa: F401, binds torch.ops.mxep
    from mxep.moe import MoEConfig
    from mxep.moe.router import route_without_gradient

    router = MoEConfig(MX_BLOCK, MX_BLOCK, E, C, score_function="sigmoid", num_groups=num_groups, top_groups=top_groups)
    logits = torch.randn(_SAMPLED_TOKENS, E, generator=torch.Generator().manual_seed(0))
    experts = route_without_gradient(logits, None, router).experts
    return float(torch.zeros(_SAMPLED_TOKENS, W).scatter(1, experts // (E // W), 1.0).mean())


def _fused_rows_of(config: ExplainConfig, model: ModelConfig) -> dict[str, int]:
    return fused_rows(config.routed_tokens, model.num_experts, model.top_k, config.ep, model.num_groups, model.top_groups)


def _row_bytes(width: int, precision: str) -> int:
    return record_bytes(width) if precision == "mxfp8" else width * _BF16


def _stages_of(config: ExplainConfig, model: ModelConfig, recipe: Recipe, linears: dict[str, str | None] | None = None) -> list[LayerStage]:
    """`linears`: the result of `_linears`; None: none is in MXFP8."""
    shared = f"layers.{model.num_layers - 1}.moe.shared_experts."
    in_mx = [(linears or {}).get(shared + name, "") is None for name in ("w1", "w2")]
    letters = config.routed_tokens, model.dim, model.expert_hidden, model.num_experts, model.top_k, config.ep
    return layer_stages(*letters, recipe, model.num_shared_experts, (in_mx[0], in_mx[1]))


def _sent(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> int:
    """Bytes that leave the rank in one layer, forward and backward: as one function in its default mode, or in separate blocks."""
    if not config.fused_layer:
        return sum(sum(stage.wire_bytes) for stage in _stages_of(config, model, recipe))
    rows = _fused_rows_of(config, model)["rank_dedup"]
    return rows * sum(_row_bytes(model.dim, wire) for wire in (recipe.dispatch, "hp", "hp", recipe.combine_backward))


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


def _stages_table(title: str, stages: Sequence[LayerStage]) -> Table:
    table = _table(title, ("operation", "out", "forward", "backward"), ("MiB sent\nfwd / bwd", "TFLOP\nfwd / bwd"))
    for stage in stages:
        sent, work = [count / _MIB for count in stage.wire_bytes], [count / 1e12 for count in stage.flops]
        table.add_row(stage.name, f"{stage.out[0]}x{stage.out[1]}", stage.forward, stage.backward, _pair(sent), _pair(work))
    table.add_section()
    sent = [sum(stage.wire_bytes[way] for stage in stages) / _MIB for way in (0, 1)]
    work = [sum(stage.flops[way] for stage in stages) / 1e12 for way in (0, 1)]
    table.add_row("sum", "", "", "", _pair(sent), _pair(work))
    return table


def _fused_table(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> Table:
    """Rows and bytes that the fused layer sends, by its exchange mode."""
    numbers = ("rows", "dispatch, MiB sent\nfwd / bwd", "combine, MiB sent\nfwd / bwd")
    table = _table("The layer as one function (FusedMoE), random routing", ("mode",), numbers)
    for mode, rows in _fused_rows_of(config, model).items():
        ways = (recipe.dispatch, "hp"), ("hp", recipe.combine_backward)
        sizes = (_pair([rows * _row_bytes(model.dim, precision) / _MIB for precision in wire]) for wire in ways)
        table.add_row(mode, f"{rows:,}", *sizes)
    return table


def _linears(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> dict[str, str | None]:
    """For each dense linear layer why `mxep train` leaves it in high precision on a Hopper GPU; None: it converts the layer."""
    from mxep.train.linear_choice import linears_by_gain

    return linears_by_gain(model, recipe, config.tokens, config.tp) if recipe.gemm == "mxfp8" else {}


def _linears_table(config: ExplainConfig, recipe: Recipe, by_gain: dict[str, str | None]) -> Table:
    """What `_linears` found, layers alike in one row."""
    from mxep.parallel.module_names import name_patterns

    table = _table(
        f"Dense linear layers, {config.tokens:,} tokens, on a Hopper GPU", ("layer", f"in {recipe.name} (--linear-fqns auto)"), ()
    )
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"  # names of layers stay whole
    for stays in dict.fromkeys(by_gain.values()):
        alike = [name for name, reason in by_gain.items() if reason == stays]
        for pattern in name_patterns(alike, [name for name in by_gain if name not in alike]):
            table.add_row(pattern, "yes, it gains" if stays is None else f"no: {stays}")
    return table


def _recipes_table(config: ExplainConfig, model: ModelConfig) -> Table:
    """Bytes that one layer sends and keeps in each recipe."""
    from mxep.train.memory import kept_bytes

    table = _table("Recipes, one MoE layer on one rank (hp: bf16)", ("recipe", "dispatch", "GEMM", "wgrad"), ("MiB sent", "MiB kept"))
    letters = (config.routed_tokens, model.dim, model.expert_hidden, model.num_experts, model.top_k, config.ep)
    for recipe in RECIPES.values():
        layer = model.num_shared_experts, recipe, config.fused_layer, config.keep_first_product
        sent, kept = _sent(config, model, recipe), kept_bytes(*letters, *layer)
        table.add_row(recipe.name, recipe.dispatch, recipe.gemm, recipe.wgrad, f"{sent / _MIB:,.0f}", f"{kept / _MIB:,.0f}")
    return table


def _ep_table(config: ExplainConfig, model: ModelConfig, recipe: Recipe) -> Table:
    """The same layer at each EP degree: more ranks send more rows, and each gathers fewer experts."""
    table = _table("EP degrees, one MoE layer on one rank", (), ("ranks", "experts", "MiB sent", "MiB of experts\ngathered in bf16"))
    for degree in ep_degrees(config.world // (config.pp * config.dp_replicate), config.tp, model.num_experts):
        experts = model.num_experts // degree
        weights = 3 * experts * model.dim * model.expert_hidden * _BF16
        sent = _sent(dataclasses.replace(config, ep=degree), model, recipe)
        table.add_row(str(degree), str(experts), f"{sent / _MIB:,.0f}", f"{weights / _MIB:,.0f}")
    return table


def _flops_table(config: ExplainConfig, seq_len: int, model: ModelConfig) -> Table:
    """FLOPs of forward and backward of `config.tokens` tokens in the counts of MFU and HFU, by recomputation mode."""
    from mxep.parallel import Recompute

    title = f"TFLOP of forward and backward of {config.tokens:,} tokens in sequences of {seq_len:,}, by --activation-checkpoint"
    modes: tuple[Recompute, ...] = get_args(Recompute)
    counts = [flops_per_token(model, seq_len, mode, config.fused_layer) for mode in modes]
    table = _table(title, ("counted",), modes)
    parts = {
        "products with weights": [flops.products for flops in counts],
        "attention, whole": [flops.attention for flops in counts],
        "recomputed": [flops.recomputed for flops in counts],
        "mfu: attention whole": [flops.model for flops in counts],
        "mfu_causal: attention halved": [flops.model_causal for flops in counts],
        "hfu: halved, and what is recomputed": [flops.hardware for flops in counts],
    }
    for label, of_token in parts.items():
        table.add_row(label, *(f"{config.tokens * count / 1e12:,.1f}" for count in of_token))
    return table


def _peaks() -> str:
    """The peaks that `mxep.device` knows, in TFLOP/s."""
    from mxep.device import PEAK_BF16

    return ", ".join(f"{gpu} {peak / 1e12:g}" for gpu, peak in PEAK_BF16.items()) + " TFLOP/s"


def _memory(config: ExplainConfig, model: ModelConfig, recipe: Recipe, linears: dict[str, str | None]) -> tuple[Table, list[str]]:
    """The peak of the pipeline rank that needs most, by recomputation mode, and a line for each mode that says whether it fits,
    for "auto" what that rank keeps. The first one has most microbatches in flight, the last one the loss, so modes differ in the rank.

    Raises:
        ValueError: degrees that do not fit the ranks or the model.
    """
    from mxep.parallel import Recompute
    from mxep.parallel.pipeline_parallel import microbatches_in_flight
    from mxep.train.memory import PEAK_OPTIONS, peak_memory, rank_memory, ranks_that_fit
    from mxep.train.recompute_budget import last_that_fits, recompute_choices
    from mxep.train.state_precision import StatePrecision

    plan = (model, recipe, config.dims, config.world, config.tokens)
    layers: dict[str, Any] = {name: getattr(config, name) for name in PEAK_OPTIONS}
    precision = StatePrecision(config.optimizer, config.dtype)
    layers["mx_linears"] = recipe.wgrad == "mx" and any(stays is None and ".attention." in name for name, stays in linears.items())
    options = {**layers, "precision": precision, "schedule": config.pp_schedule}
    modes: tuple[Recompute, ...] = get_args(Recompute)
    by_mode = {mode: peak_memory(*plan, recompute=mode, **options) for mode in modes}
    worst = [max(enumerate(of_stages), key=lambda pair: pair[1].total) for of_stages in by_mode.values()]
    capacity, of_auto = int(config.gpu_gb * _GIB_A_GB * _GIB), []
    for stage, rank in enumerate(rank_memory(*plan[:4], precision, config.pp_schedule)):
        in_flight = microbatches_in_flight(stage, config.pp, config.pp_schedule)
        choices = recompute_choices(rank, model, recipe, config.dims, config.tokens, in_flight, **layers)
        of_auto.append(choices[last_that_fits(choices, capacity)])
    stage, chosen = max(enumerate(of_auto), key=lambda pair: pair[1].needed)
    stages, peaks = zip(*worst, (stage, chosen.peak), strict=True)
    weights = "float32" if config.dtype == "float32" else "bf16"
    title = f"Memory of one of {config.world} ranks, GiB ({weights} weights, bf16 compute), by --activation-checkpoint"
    table = _table(title, ("part",), (*modes, "auto"))
    if config.pp > 1:
        table.add_row(f"PP rank of 0 to {config.pp - 1} that needs most", *map(str, stages))
    parts = {
        "weights, this rank's shards": [peak.rank.weights for peak in peaks],
        "AdamW's moments": [peak.rank.moments for peak in peaks],
        "gradients": [peak.rank.gradients for peak in peaks],
        "gradients that add up": [peak.rank.accumulated if config.accumulate > 1 or config.pp > 1 else 0 for peak in peaks],
        "gathered bf16 weights": [peak.rank.outside + peak.rank.gathered for peak in peaks],
        "gradient being reduced": [peak.rank.summed for peak in peaks],
        "exchange buffers": [peak.exchange for peak in peaks],
        "what all layers keep for backward": [peak.kept for peak in peaks],
        "backward of one layer": [peak.working for peak in peaks],
        "logits and the loss's gradients": [peak.rank.loss + peak.hidden_gradient for peak in peaks],
        "quantised weights (--cache-weights)": [peak.cached for peak in peaks],
    }
    for label, sizes in parts.items():
        if any(sizes):
            table.add_row(label, *(f"{size / _GIB:,.2f}" for size in sizes))
    table.add_section()
    table.add_row("peak: parts that exist at once", *(f"{peak.total / _GIB:,.2f}" for peak in peaks))
    verdicts, each = [], "on each" if config.pp == 1 else "at most"
    for mode, peak in zip(modes, peaks, strict=False):
        enough = ranks_that_fit(*plan, capacity, recompute=mode, **options)
        gpus = f"{config.world} x {config.gpu_gb:g} GB"
        verdict = f"{'fits' if enough == config.world else 'does not fit'} on {gpus} ({peak.total / _GIB:,.1f} GiB {each})"
        if enough is None:
            fewer = ranks_that_fit(*plan[:4], config.tp, capacity, recompute=mode, **options)  # one token a rank
            less = f"at --tokens {config.tokens}, lower it" if fewer else "nor do fewer --tokens; raise --pp, --ep or --tp"
            verdict += f"; more GPUs do not help{' ' if fewer else ', '}{less}"
        elif enough != config.world:
            verdict += f"; needs {enough} GPUs"
        verdicts.append(f"{mode}: {verdict}")
    verdicts.append(f"auto{'' if config.pp == 1 else f', PP rank {stage}'}: {chosen.in_words(capacity)}")
    return table, verdicts

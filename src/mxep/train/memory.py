"""Estimates the peak GPU memory of each rank of a training run, before anything is allocated.

Parameters are counted on models that the trainer's own code builds on the meta device, inside torch's fake process group: one process
acts as one rank of any number.  Activations are computed from the shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mxep.device import total_memory
from mxep.models.loss import CHUNK_TOKENS
from mxep.models.presets import ModelConfig
from mxep.moe.ffn import runs_fused
from mxep.moe.init import local_tensor
from mxep.parallel import Meshes, PipelineSchedule, Recompute, build_meshes
from mxep.parallel.pipeline_parallel import microbatches_in_flight
from mxep.parallel_dims import ParallelDims
from mxep.recipe import Precision, Recipe
from mxep.shapes import MX_BLOCK, record_bytes, round_up
from mxep.train.build import Build, build_stages, needs_fsdp
from mxep.train.state_precision import StatePrecision

_FLOAT32, _BF16, _GB = 4, 2, 10**9
_FLOAT32_STATE = StatePrecision()
_LARGE = 2**30  # values of a parameter whose moments are quantised
_UNUSED_SHARE = 0.03  # of the tensors' bytes: what torch's allocator reserves on top in measured runs
_GRAPH_SHARE = 0.05  # and in a step that is a CUDA graph: 16B on four H200s took 3.5% more than was estimated without this
_MOST_DOUBLINGS = 10
# Options of `stage_peak` that `mxep train` and `mxep explain` have under the same names.
PEAK_OPTIONS = ("fused_layer", "keep_first_product", "cache_weights", "compile", "accumulate", "optimizer_in_backward", "cuda_graph")


@dataclass(frozen=True)
class RankMemory:
    """Parameters of one rank and everything whose size follows from them, in bytes, for training on GPUs.

    Attributes:
        weights, gradients, moments: this rank's shards of them, in the precision of the run; AdamW has two moments.
        outside: bf16 weights of the embedding and the output projection, gathered from the start of a forward to its backward.
        gathered: bf16 weights of the layers that are gathered at the same time: two layers, in a pipeline all layers of the rank.
        summed: the largest gradient of one FSDP unit, in bf16 from backward and in float32 for the reduce-scatter.
        accumulated: float32 gradients of all gathered parameters, which FSDP adds up until a step's last backward.
        fsdp: whether a run without accumulation needs FSDP (`needs_fsdp`). Without it nothing is gathered, and no gradient is in float32.
        loss: logits of one chunk of tokens, and two float32 gradients of the output projection (of the chunk, and the sum); 0 on a stage
            without the loss.
        quantized: both MXFP8 forms of the experts, which `--cache-weights` keeps until the optimizer's step.
        dense_layers, moe_layers: of this rank.
    """

    weights: int
    gradients: int
    moments: int
    outside: int
    gathered: int
    summed: int
    accumulated: int
    fsdp: bool
    loss: int
    quantized: int
    dense_layers: int
    moe_layers: int


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of one rank, in bytes.

    Not counted: CUDA's context, NCCL's buffers, cuBLAS's workspaces (up to 0.1 GiB), experts that get more rows than others, what a
    pipeline's stages receive.  tests/train/test_memory.py compares `total` with measured runs.

    Attributes:
        rank: parameters and what follows from them.
        kept: activations that all layers keep from forward to backward.
        received: the part of `kept` that grows with the rows that the rank's experts get.
        working: temporaries of one layer's backward, and its recomputed activations.
        exchange: buffers for rows of other ranks, of forward and of backward.
        hidden_gradient: float32 gradient of the hidden states that the loss produces; 0 on a stage without the loss.
        cached: `RankMemory.quantized` if the run keeps quantized weights, else 0.
        total: the peak, with 3% for torch's allocator. It is less than the sum of all parts, which do not all exist at the same time.
    """

    rank: RankMemory
    kept: int
    received: int
    working: int
    exchange: int
    hidden_gradient: int
    cached: int
    total: int


def peak_memory(
    shape: ModelConfig,
    recipe: Recipe,
    dims: ParallelDims,
    ranks: int,
    tokens: int,
    precision: StatePrecision = _FLOAT32_STATE,
    schedule: PipelineSchedule = "1F1B",
    **options: Any,
) -> list[PeakMemory]:
    """The peak of the first GPU of each pipeline rank, assuming balanced experts.

    Args:
        ranks: of the whole run.
        tokens: of one forward on one rank (sequences times length), which the ranks of a TP group share; with a pipeline, of one
            microbatch.
        precision: of parameters and moments.
        schedule: of the pipeline.
        options: of `stage_peak`.

    Raises:
        ValueError: degrees that fit neither the ranks nor the model.
    """
    found = rank_memory(shape, recipe, dims, ranks, precision, schedule)
    in_flight = [microbatches_in_flight(stage, dims.pp, schedule) for stage in range(dims.pp)]
    return [stage_peak(rank, shape, recipe, dims, tokens, count, **options) for rank, count in zip(found, in_flight, strict=True)]


def ranks_that_fit(
    shape: ModelConfig,
    recipe: Recipe,
    dims: ParallelDims,
    ranks: int,
    tokens: int,
    capacity: int,
    precision: StatePrecision = _FLOAT32_STATE,
    schedule: PipelineSchedule = "1F1B",
    **options: Any,
) -> int | None:
    """The fewest ranks, out of `ranks` times powers of two, with every peak at most `capacity` bytes; None if no number is enough.

    More ranks shard the same model further; `dims` and `tokens` are unchanged.

    Args:
        precision, schedule, options: of `peak_memory`.
    """
    stages = rank_memory(shape, recipe, dims, ranks, precision, schedule)
    for factor in (2**doublings for doublings in range(_MOST_DOUBLINGS + 1)):
        sizes = [{name: getattr(rank, name) // factor for name in ("weights", "gradients", "moments")} for rank in stages]
        shards = [replace(rank, fsdp=rank.fsdp or factor > 1, **size) for rank, size in zip(stages, sizes, strict=True)]
        peaks = [
            stage_peak(rank, shape, recipe, dims, tokens, microbatches_in_flight(stage, dims.pp, schedule), **options).total
            for stage, rank in enumerate(shards)
        ]
        if max(peaks) <= capacity:
            return ranks * factor
    return None


def stage_peak(
    rank: RankMemory,
    shape: ModelConfig,
    recipe: Recipe,
    dims: ParallelDims,
    tokens: int,
    in_flight: int,
    *,
    recompute: Recompute | Sequence[Recompute] = "none",
    fused_layer: bool = False,
    keep_first_product: Precision = "hp",
    cache_weights: bool = False,
    compile: bool = False,
    accumulate: int = 1,
    optimizer_in_backward: bool = False,
    mx_linears: bool = False,
    cuda_graph: bool = False,
) -> PeakMemory:
    """The peak of one rank.

    Args:
        tokens: as in `peak_memory`.
        in_flight: microbatches whose forward a pipeline runs before the first backward.
        recompute: as in `mxep.parallel.recompute_blocks`, of all layers or of each: dense layers first, the last layer last.  No layer may
            keep more than a later one of its kind, or a peak between the two ends of backward would be missed.
        fused_layer, keep_first_product, cache_weights, compile, accumulate, optimizer_in_backward, cuda_graph: as in `mxep train`.
        mx_linears: attention's linear layers keep their inputs in MX, for wgrad "mx".
    """
    dense_first = [True] * rank.dense_layers + [False] * rank.moe_layers
    modes: Sequence[Recompute] = [recompute] * len(dense_first) if isinstance(recompute, str) else recompute
    own = tokens // dims.tp  # outside of attention and FFN

    @functools.cache
    def size(dense: bool, mode: Recompute, compile: bool = False) -> int:
        kept = block_kept_bytes(tokens, shape, dims.ep, recipe, dense, fused_layer, mode, keep_first_product, compile, dims.tp)
        if mx_linears and mode == "none":  # beside the bf16 values, which the norm's and attention's own backward reads
            kept += (tokens * shape.dim + own * shape.attention_width) * (MX_BLOCK + 1) // MX_BLOCK
        return kept if cache_weights else kept + block_kept_weights(shape, dims.ep, recipe, dense, fused_layer, mode)

    def backward_of(dense: bool, mode: Recompute) -> int:  # what a compiled layer makes again is there too
        whole = size(dense, "none")
        return whole + (whole - size(dense, mode) if mode in ("none", "keep_moe") else whole)

    kept = [size(dense, mode, compile) for dense, mode in zip(dense_first, modes, strict=True)]
    keep_rows = sum(not dense and mode in ("none", "keep_moe") for dense, mode in zip(dense_first, modes, strict=True))
    parts = {
        "kept": in_flight * sum(kept),
        "received": in_flight * keep_rows * received_bytes(*_moe_letters(own, shape, dims.ep), recipe, fused_layer, keep_first_product),
        "working": max(map(backward_of, dense_first, modes)),
        "exchange": 2 * _exchanged_bytes(own, shape, dims.ep, fused_layer),
        "hidden_gradient": own * shape.dim * _FLOAT32 if rank.loss else 0,
        "cached": rank.quantized if cache_weights else 0,
    }
    if not rank.fsdp and accumulate == 1:
        rank = replace(rank, outside=0, gathered=0, summed=rank.summed * _BF16 // (_BF16 + _FLOAT32))
    always = rank.weights + rank.moments + parts["exchange"] + parts["cached"] + rank.outside
    rank = replace(rank, gradients=0) if optimizer_in_backward else rank  # those of one FSDP unit, or layer, are `summed`
    early_gradients = rank.accumulated if accumulate > 1 or dims.pp > 1 else 0
    backward = rank.gathered + rank.summed + parts["working"]
    moments = (  # the peak is at one of these times
        parts["kept"] + early_gradients + rank.loss + parts["hidden_gradient"],
        parts["kept"] + early_gradients + backward,  # backward of the last layer
        max(kept) + rank.gradients + backward,  # backward of the first layer
    )
    return PeakMemory(rank, **parts, total=round((always + max(moments)) * (1 + _UNUSED_SHARE + _GRAPH_SHARE * cuda_graph)))


def check_fits(
    model: str,
    shape: ModelConfig,
    dims: ParallelDims,
    ranks: int,
    device: torch.device,
    ranks_here: int,
    precision: StatePrecision = _FLOAT32_STATE,
    optimizer_in_backward: bool = False,
) -> None:
    """Raise ValueError if a run cannot fit: its parameters, gradients and moments alone need more memory than there is.

    Their precision is the same in every recipe. Activations come on top.

    Args:
        model: its name, for the message.
        device: of this rank. A GPU holds one rank, a host's memory holds all ranks of the host.
        ranks: of the whole run.
        ranks_here: of this machine.
        precision: of parameters and moments; quantised moments are counted as if all of them were.
        optimizer_in_backward: no gradients are counted.
    """
    sharing = ranks_here if device.type == "cpu" else 1
    values = shape.parameters()[0] * dims.replicate * sharing // ranks
    state, moments = values * precision.torch_dtype.itemsize, precision.moment_bytes((_LARGE,), values)
    parts = {"parameters": state, "gradients": 0 if optimizer_in_backward else state, "AdamW's moments": moments}
    need, have = sum(parts.values()), total_memory(device)
    if need <= have:
        return
    listed = ", ".join(f"{name} {size / _GB:,.1f}" for name, size in parts.items())
    where = f"the host of {sharing} ranks" if device.type == "cpu" else "each GPU"
    raise ValueError(
        f"train: {model} does not fit on {ranks} rank{'s' * (ranks > 1)}: {where} needs {need / _GB:,.1f} GB or more "
        f"({listed}; activations come on top), has {have / _GB:,.1f} GB; use more GPUs, a smaller --model, fewer --layers, a lower "
        "--dp-replicate, --dtype bfloat16 or --optimizer adamw8bit (`mxep explain` estimates)"
    )


@functools.cache
def rank_memory(
    shape: ModelConfig,
    recipe: Recipe,
    dims: ParallelDims,
    ranks: int,
    precision: StatePrecision = _FLOAT32_STATE,
    schedule: PipelineSchedule = "1F1B",
) -> tuple[RankMemory, ...]:
    """The `RankMemory` of the first GPU of each pipeline rank.

    Raises:
        ValueError: degrees that fit neither the ranks nor the model.
    """
    dims.shards(ranks)
    return tuple(_of_rank(shape, recipe, dims, ranks, rank, precision, schedule) for rank in range(0, ranks, ranks // dims.pp))


def _of_rank(
    shape: ModelConfig, recipe: Recipe, dims: ParallelDims, ranks: int, rank: int, precision: StatePrecision, schedule: PipelineSchedule
) -> RankMemory:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        return memory_of_rank(shape, recipe, build_meshes(ranks, dims, "cpu"), precision, schedule)
    finally:
        dist.destroy_process_group()


def memory_of_rank(
    shape: ModelConfig,
    recipe: Recipe,
    meshes: Meshes,
    precision: StatePrecision = _FLOAT32_STATE,
    schedule: PipelineSchedule = "1F1B",
) -> RankMemory:
    """The `RankMemory` of this process' rank; its stages are built on the meta device."""
    stages = build_stages(shape, Build(recipe, schedule=schedule), meshes, torch.device("meta"), seed=0)
    parameters = {name: p for model in stages.values() for name, p in model.named_parameters()}
    degrees, count, moments = meshes.degrees, 0, 0
    whole: dict[str, dict[bool, int]] = {}  # gathered values by layer ("": outside of layers), then: of routed experts?
    for name, parameter in parameters.items():
        routed = ".moe.experts." in name
        local = local_tensor(parameter)
        count += local.numel()
        moments += precision.moment_bytes(parameter.shape, local.numel())
        layer = whole.setdefault(name.split(".")[1] if name.startswith("layers.") else "", {})
        divided = degrees.ep if routed else degrees.tp if _is_divided(parameter, meshes.tp) else 1  # FSDP gathers this rank's share
        layer[routed] = layer.get(routed, 0) + parameter.numel() // divided
    outside = sum(whole.pop("", {}).values())
    layers = sorted((sum(groups.values()) for groups in whole.values()), reverse=True)
    experts = sum(groups.get(True, 0) for groups in whole.values())
    dense = sum(True not in groups for groups in whole.values())
    logits = CHUNK_TOKENS * shape.vocab_size * _BF16
    return RankMemory(
        weights=count * precision.torch_dtype.itemsize,
        gradients=count * precision.torch_dtype.itemsize,
        moments=moments,
        outside=outside * _BF16,
        gathered=sum(layers if degrees.pp > 1 else layers[:2]) * _BF16,
        summed=max(values for groups in whole.values() for values in groups.values()) * (_BF16 + _FLOAT32),
        accumulated=(outside + sum(layers)) * _FLOAT32,
        fsdp=needs_fsdp(meshes, torch.bfloat16, precision.torch_dtype, accumulate=1),
        loss=logits + 2 * shape.vocab_size * shape.dim * _FLOAT32 if "output.weight" in parameters else 0,
        quantized=2 * (experts + experts // MX_BLOCK) if recipe.gemm == "mxfp8" else 0,
        dense_layers=dense,
        moe_layers=len(layers) - dense,
    )


def _is_divided(parameter: Tensor, tp_mesh: DeviceMesh) -> bool:
    """Whether a parameter outside of routed experts is sharded by tensor parallelism, not by FSDP alone."""
    if not isinstance(parameter, DTensor):
        return False
    names, tp = parameter.device_mesh.mesh_dim_names or (), tp_mesh.mesh_dim_names or ()
    return any(name in tp and not placement.is_replicate() for name, placement in zip(names, parameter.placements, strict=True))


def kept_bytes(
    T: int,
    D: int,
    H: int,
    E: int,
    C: int,
    W: int,
    shared: int,
    recipe: Recipe,
    fused_layer: bool = False,
    keep_first_product: Precision = "hp",
    compile: bool = False,
) -> int:
    """Bytes that one MoE layer keeps for backward on one rank, with balanced routing, excluding its input and row indices.

    Args:
        T, D, H, E, C, W: see `mxep.shapes.LEGEND`.
        shared: shared experts of hidden width H.
        recipe: decides what is in MX.
        fused_layer: the layer is a `FusedMoE`.
        keep_first_product: form in which a `FusedMoE` keeps gate and up.
        compile: the shared experts are compiled.
    """
    results = 0 if fused_layer else T * C * D * _BF16  # combine keeps each expert's result
    around = T * ffn_kept_bytes(shared * H, compile) + T * E * 4
    return received_bytes(T, D, H, E, C, W, recipe, fused_layer, keep_first_product) + results + around


def ffn_kept_bytes(hidden: int, compile: bool) -> int:
    """Bytes that a dense SwiGLU FFN keeps of a token: gate, up, their product, and the activated gate, which a compiled one makes again."""
    return (3 if compile else 4) * hidden * _BF16


def received_bytes(
    T: int, D: int, H: int, E: int, C: int, W: int, recipe: Recipe, fused_layer: bool = False, keep_first_product: Precision = "hp"
) -> int:
    """The part of `kept_bytes` that grows with the rows that the rank's experts get; the arguments are the same."""
    L, rows = E // W, T * C
    P = round_up(rows + L * recipe.group_size_multiple_of, recipe.group_size_multiple_of)
    mx_row, row = D + D // MX_BLOCK, D * _BF16
    arrives_in_mx = recipe.dispatch == "mxfp8" or recipe.quantizes_in_permute
    if fused_layer:  # received tokens, each once per rank; gate and up
        gate_up = 2 * (H + H // MX_BLOCK if keep_first_product == "mxfp8" else H * _BF16)
        return T * min(W, C) * (mx_row if arrives_in_mx else row) + P * gate_up
    if runs_fused(recipe):  # input rows of the GEMM; gate and up
        return P * ((mx_row if arrives_in_mx else row) + 2 * H * _BF16)
    if recipe.wgrad == "mxfp8":  # input rows of all three GEMMs, quantised along the tokens
        return P * (2 * mx_row + 3 * H * _BF16 + H + H // MX_BLOCK)
    return P * (row + 4 * H * _BF16)


def _moe_letters(T: int, model: ModelConfig, W: int) -> tuple[int, int, int, int, int, int]:
    return T, model.dim, model.expert_hidden, model.num_experts, model.top_k, W


def block_kept_bytes(
    T: int,
    model: ModelConfig,
    W: int,
    recipe: Recipe,
    dense: bool,
    fused_layer: bool = False,
    recompute: Recompute = "none",
    keep_first_product: Precision = "hp",
    compile: bool = False,
    tp: int = 1,
) -> int:
    """Bytes that one transformer layer keeps for backward on one rank: its input, norms, attention, FFN or MoE.

    Args:
        T: tokens of the sequences, which the ranks of a TP group share.
        W: see `mxep.shapes.LEGEND`.
        dense: the layer has a dense FFN.
        fused_layer: its MoE is a `FusedMoE`.
        recompute: as in `mxep.parallel.recompute_blocks`; "selective" is an upper bound.
        keep_first_product, compile: as in `kept_bytes`.
        tp: the TP degree. Attention, dense and shared FFNs gather their input of all T tokens; attention's latents are of all T as well.
    """
    D, hidden, own = model.dim, model.dense_hidden if dense else model.num_shared_experts * model.expert_hidden, T // tp
    if recompute == "full" or (recompute == "keep_moe" and dense):
        return own * D * _BF16
    gathered = T * D if hidden and tp > 1 else 0  # the input of the dense or shared FFN
    attention = T * model.attention_latents + own * (model.attention_kept - model.attention_latents)
    if recompute == "selective":  # the layer's input and the results of attention, of dense products and of exchanges
        products = (own * (2 * D + 2 * hidden + D) + attention + gathered + (T * D if tp > 1 else 0)) * _BF16
        return products + (0 if dense else _exchanged_bytes(own, model, W, fused_layer))
    second_norm = gathered if dense and tp > 1 else own * D + gathered  # its result: a dense FFN's input exists gathered alone
    # The layer's input and that of the second norm, the first norm's result, which attention gathers, and the second norm's.
    around = (2 * own * D + T * D + second_norm + attention) * _BF16
    if dense:
        return around + own * ffn_kept_bytes(hidden, compile)
    around = (2 * own * D + gathered) * _BF16 if recompute == "keep_moe" else around  # the layer's input and that of its MoE
    shared = model.num_shared_experts
    return around + kept_bytes(*_moe_letters(own, model, W), shared, recipe, fused_layer, keep_first_product, compile)


def block_kept_weights(model: ModelConfig, W: int, recipe: Recipe, dense: bool, fused_layer: bool, recompute: Recompute) -> int:
    """Bytes of the experts' weights that one transformer layer keeps for dgrad on one rank, on FP8 paths (`make_both`).

    Args:
        W, dense, fused_layer, recompute: as in `block_kept_bytes`.
    """
    keeps = recompute in ("none", "keep_moe") and not dense and recipe.gemm == "mxfp8"
    matrices = 2 if runs_fused(recipe) and not fused_layer else 3  # gate, up and down
    return keeps * matrices * (model.num_experts // W) * model.expert_hidden * model.dim


def _exchanged_bytes(T: int, model: ModelConfig, W: int, fused_layer: bool) -> int:
    """Bytes of the rows of one dispatch (MXFP8 records) and one combine (bf16) on one rank; 0 without expert parallelism."""
    rows = T * (min(W, model.top_k) if fused_layer else model.top_k)
    return rows * (record_bytes(model.dim) + model.dim * _BF16) if W > 1 else 0

"""Builds the pipeline stages of one rank and applies every kind of parallelism to them, in the required order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, repeat

import torch
from torch import nn

from mxep.models.decoder import Decoder
from mxep.models.families import build_model
from mxep.models.loss import check_mx_projection
from mxep.models.presets import AttnImplementation, ModelConfig
from mxep.models.tensor_parallel_plan import apply_tensor_parallel
from mxep.moe import RuntimeEPConfig, fuse_layers
from mxep.parallel import (
    Meshes,
    PipelineSchedule,
    Recompute,
    apply_fsdp,
    apply_mxfp8_expert_parallel,
    compile_blocks,
    convert_experts,
    convert_linears,
    recompute_blocks,
    stages_of,
)
from mxep.parallel.pipeline_parallel import stages_per_rank
from mxep.recipe import RECIPES, Precision, Recipe, resolve_recipe
from mxep.train.config import EXPERTS, TrainConfig, split_names
from mxep.train.linear_choice import linear_recipe
from mxep.train.state_precision import StatePrecision


@dataclass(frozen=True)
class Linears:
    """Dense linear layers to convert: the arguments of `mxep.parallel.convert_linears`."""

    recipe: Recipe
    fqns: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Build:
    """How to build a model of a given shape.

    Attributes:
        recipe: of the experts that `fqns` selects (see `convert_experts`); the others run in high precision.
        linears: dense layers in MXFP8; None: all of them stay in high precision.
        output: recipe of the output projection's loss (`mxep.models.loss.OutputProjection`).
        fused_experts: `mxep.moe.Experts.fused`.  fused_layer: every MoE is a `mxep.FusedMoE`.
        keep_first_product: form in which a `mxep.FusedMoE` keeps gate and up.
        recompute: see `mxep.parallel.recompute_blocks`; one mode for all layers, or one for each layer of a rank's stages in their order.
        compile_backend: of torch.compile; None: no compilation.
        schedule: of the pipeline.
        dtype: of the parameters.
        attn_implementation: see `mxep.models.document_mask`.
        accumulate: batches whose gradients are summed before a step.
    """

    recipe: Recipe
    fqns: tuple[str, ...] = ("experts",)
    linears: Linears | None = None
    output: Recipe = RECIPES["hp"]
    force_balance: bool = False
    fused_experts: bool = True
    fused_layer: bool = False
    keep_first_product: Precision = "hp"
    recompute: Recompute | tuple[Recompute, ...] = "none"
    compile_backend: str | None = None
    schedule: PipelineSchedule = "1F1B"
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    attn_implementation: AttnImplementation = "sdpa"


def build_options(config: TrainConfig) -> Build:
    """The `Build` that the options of a run ask for; of layers "auto" recomputes nothing yet. Raises ValueError for unknown recipes and
    for a compiler that torch does not have.

    Args:
        config: with linear layers as `choose_linears` returns it.
    """
    c, linears, dense = config, None, linear_recipe(config)
    if c.compile and c.compile_backend not in (backends := torch._dynamo.list_backends(exclude_tags=())):
        raise ValueError(f"--compile-backend={c.compile_backend}, want one of {', '.join(backends)}")
    if dense is not None and c.linear_fqns != "":
        linears = Linears(dense, None if c.linear_fqns is None else tuple(split_names(c.linear_fqns)), tuple(split_names(c.linear_skip)))
    return Build(
        recipe=resolve_recipe(c.recipe if c.converts(EXPERTS) else "hp"),
        fqns=tuple(split_names(c.mx_fqns)),
        linears=linears,
        output=resolve_recipe(c.output_recipe),
        force_balance=c.force_balance,
        fused_experts=c.fused_experts,
        fused_layer=c.fused_layer,
        keep_first_product=c.keep_first_product,
        recompute="none" if c.activation_checkpoint == "auto" else c.activation_checkpoint,
        compile_backend=c.compile_backend if c.compile and "model" in split_names(c.compile_components) else None,
        schedule=c.pp_schedule,
        dtype=state_precision(config).torch_dtype,
        accumulate=c.accumulate,
        attn_implementation=c.attn_implementation,
    )


def state_precision(config: TrainConfig) -> StatePrecision:
    """The precision of parameters and moments that the options of a run ask for."""
    return StatePrecision(config.optimizer, config.dtype)


def build_whole(shape: ModelConfig, build: Build) -> Decoder:
    """The whole model on the meta device, with the precision that `build` gives layers and parameters; not compiled, nothing recomputed.

    Raises:
        ValueError: `build` names experts or linear layers that do not exist, or layers whose widths MXFP8 does not support.
    """
    with torch.device("meta"):
        model = build_model(shape, resolve_recipe("hp"), build.force_balance)
    convert_experts(model, build.fqns, build.recipe)
    if build.linears is not None:
        convert_linears(model, build.linears.fqns, build.linears.recipe, build.linears.skip)
    assert model.output is not None
    check_mx_projection("output projection", build.output, shape.dim)
    model.output.recipe = build.output
    model.attn_implementation = build.attn_implementation
    if build.fused_layer:
        fuse_layers(model, RuntimeEPConfig(keep_first_product="mxfp8" if build.keep_first_product == "mxfp8" else True))
    for moe in model.moe_layers():
        moe.experts.fused = build.fused_experts
    for parameter in model.parameters():
        parameter.data = parameter.data.to(build.dtype)
    return model


def needs_fsdp(meshes: Meshes, compute: torch.dtype, dtype: torch.dtype, accumulate: int) -> bool:
    """False where FSDP would change nothing but the host's time: one rank, parameters that are read as they are, no sums in another dtype.

    Args:
        meshes: of this rank.
        compute: dtype in which the model computes.
        dtype: of the parameters.  accumulate: batches whose gradients are summed, which FSDP does in float32.

    Examples:
        >>> from mxep.parallel import build_meshes
        >>> meshes = build_meshes(1, 1, "cpu")
        >>> bf16, float32 = torch.bfloat16, torch.float32
        >>> needs_fsdp(meshes, bf16, bf16, 1), needs_fsdp(meshes, bf16, bf16, 2), needs_fsdp(meshes, bf16, float32, 1)
        (False, True, True)
    """
    alone = meshes.stage.size() * meshes.pp.size() == 1
    return not alone or compute != dtype or (dtype != torch.float32 and accumulate > 1)


def build_stages(shape: ModelConfig, build: Build, meshes: Meshes, device: torch.device, seed: int) -> dict[int, Decoder]:
    """The stages of this rank by number; without a pipeline {0: the whole model}. Weights depend on the seed only, not on the ranks.

    On the meta device nothing is initialised.

    Raises:
        ValueError: degrees that do not fit the model, or what `build_whole` raises.
    """
    pp, on_gpu = meshes.pp.size(), device.type == "cuda"
    compute = torch.bfloat16 if on_gpu else torch.float32
    shards = needs_fsdp(meshes, compute, build.dtype, build.accumulate)
    if shape.num_experts % meshes.ep.size():
        raise ValueError(f"parallelism: the EP degree {meshes.ep.size()} does not divide the {shape.num_experts} experts; choose a divisor")
    stages = {}
    modes = repeat(build.recompute) if isinstance(build.recompute, str) else iter(build.recompute)
    for stage in stages_of(meshes.pp.get_local_rank(), pp, build.schedule) if pp > 1 else [0]:
        model = build_whole(shape, build)  # before layers are removed, since `build` selects layers by name
        model.keep_stage(stage, pp * stages_per_rank(build.schedule) if pp > 1 else 1)
        apply_tensor_parallel(model, meshes.tp)
        for moe in model.moe_layers() if shards else ():
            apply_mxfp8_expert_parallel(moe, meshes.ep)
        if build.compile_backend is not None:
            compile_blocks(model.layers.values(), build.compile_backend)
        for layer, mode in zip(model.layers.values(), islice(modes, len(model.layers)), strict=True):
            recompute_blocks([layer], mode, preserve_rng_state=False)  # they draw no random numbers
        if shards:
            # With resharding, a pipeline would gather each layer again for every microbatch.
            rounds = compute != torch.float32 or build.dtype != torch.float32
            reshard, accumulates = on_gpu and pp == 1, build.accumulate > 1 or pp > 1
            apply_fsdp(model, meshes, param_dtype=compute if rounds else None, reshard_after_forward=reshard, accumulates=accumulates)
        if device.type != "meta":  # only now, since each rank has its own shard only
            model.to_empty(device=device)
            model.init_weights(seed)
        stages[stage] = model
    return stages


def merge_stages(stages: dict[int, Decoder]) -> Decoder:
    """One module with the layers of all stages of this rank, under the names of the whole model. With several stages it is never run."""
    first, *others = stages.values()
    if not others:
        return first
    with torch.device("meta"):
        whole = build_model(first.config, resolve_recipe("hp"))  # type: ignore[arg-type]
    whole.tok_embeddings, whole.norm, whole.output = first.tok_embeddings, others[-1].norm, others[-1].output
    whole.layers = nn.ModuleDict({name: layer for stage in stages.values() for name, layer in stage.layers.items()})
    return whole

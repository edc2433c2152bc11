"""What a model's weights and optimizer take on each rank: built by the trainer's own code on the meta device, nothing allocated.

The process group is torch's fake one, in which a single process plays one rank of as many as are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mxep.degrees import Degrees
from mxep.models.loss import CHUNK_TOKENS
from mxep.models.presets import ModelConfig
from mxep.parallel import build_meshes
from mxep.recipe import Recipe
from mxep.shapes import MX_BLOCK
from mxep.train.build import Build, build_stages

_FLOAT32, _BF16 = 4, 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, as the trainer has them on GPUs.

    Attributes:
        experts, others: parameters of this rank's shards (a count, not bytes): routed experts, and everything else.
        weights, gradients, moments: float32 shards of them; AdamW has two moments.
        gathered: bf16 weights that are whole while they are used, at most: those outside of layers and of two layers, or in a pipeline
            of all layers, which stay so from the first microbatch to the last.
        summed: gradients of one layer's experts, or of the rest of a layer, as backward makes them (bf16) and as they are summed
            (float32), at most. Those of embedding and output are summed when the loss's memory is free again.
        loss: logits of one chunk of tokens, and the output projection's gradient in float32, of that chunk and of all before it; 0 where
            another stage has it.  That of the hidden states, 4 bytes a value, comes on top.
        quantized: both MXFP8 forms of the experts, which `--cache-weights` keeps from their first use to the optimizer's step; not part of
            the total.
        dense_layers, moe_layers: of this rank.
    """

    experts: int
    others: int
    weights: int
    gradients: int
    moments: int
    gathered: int
    summed: int
    loss: int
    quantized: int
    dense_layers: int
    moe_layers: int

    @property
    def layers(self) -> int:
        """Of this rank."""
        return self.dense_layers + self.moe_layers

    @property
    def total(self) -> int:
        """Bytes of all of it; what layers keep for backward comes on top."""
        return self.weights + self.gradients + self.moments + self.gathered + self.summed + self.loss


def rank_memory(shape: ModelConfig, recipe: Recipe, degrees: Degrees, ranks: int) -> list[RankMemory]:
    """The first rank of every pipeline stage.

    Raises:
        ValueError: degrees that fit neither the ranks nor the model.
    """
    degrees.shards(ranks)
    return [_of_rank(shape, recipe, degrees, ranks, rank) for rank in range(0, ranks, ranks // degrees.pp)]


def _of_rank(shape: ModelConfig, recipe: Recipe, degrees: Degrees, ranks: int, rank: int) -> RankMemory:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        stages = build_stages(shape, Build(recipe), build_meshes(ranks, degrees, "cpu"), torch.device("meta"), seed=0)
        parameters = [(name, p) for model in stages.values() for name, p in model.named_parameters()]
        return _count(shape, recipe, degrees, parameters)
    finally:
        dist.destroy_process_group()


def _count(shape: ModelConfig, recipe: Recipe, degrees: Degrees, parameters: list[tuple[str, torch.nn.Parameter]]) -> RankMemory:
    own = {"experts": 0, "others": 0}
    whole: dict[str, dict[bool, int]] = {}  # values that are gathered, by layer, routed experts apart; "" is what lies outside of layers
    for name, parameter in parameters:
        routed = ".moe.experts." in name
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own["experts" if routed else "others"] += local.numel()
        layer = whole.setdefault(name.split(".")[1] if name.startswith("layers.") else "", {})
        layer[routed] = layer.get(routed, 0) + parameter.numel() // (degrees.ep if routed else 1)
    count = own["experts"] + own["others"]
    outside = sum(whole.pop("", {}).values())
    layers = sorted((sum(groups.values()) for groups in whole.values()), reverse=True)
    experts = sum(groups.get(True, 0) for groups in whole.values())
    dense = sum(True not in groups for groups in whole.values())
    has_loss = any(name == "output.weight" for name, _ in parameters)
    logits = CHUNK_TOKENS * shape.vocab_size * _BF16
    return RankMemory(
        experts=own["experts"],
        others=own["others"],
        weights=count * _FLOAT32,
        gradients=count * _FLOAT32,
        moments=2 * count * _FLOAT32,
        gathered=(outside + sum(layers if degrees.pp > 1 else layers[:2])) * _BF16,
        summed=max(values for groups in whole.values() for values in groups.values()) * (_BF16 + _FLOAT32),
        loss=logits + 2 * shape.vocab_size * shape.dim * _FLOAT32 if has_loss else 0,
        quantized=2 * (experts + experts // MX_BLOCK) if recipe.gemm == "mxfp8" else 0,
        dense_layers=dense,
        moe_layers=len(layers) - dense,
    )

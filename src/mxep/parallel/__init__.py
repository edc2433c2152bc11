"""How a model gets onto many ranks: meshes, expert, tensor, data and pipeline parallelism, recomputation, and conversion by name.

Gradients are sums everywhere: an expert's gradient already holds the tokens of its whole EP group, so averaging over data-parallel
ranks would leave it off by the EP degree.  The caller divides the loss by the number of valid tokens of all ranks instead.
"""

from mxep.degrees import Degrees
from mxep.parallel.blocks import Recompute, compile_blocks, recompute_blocks
from mxep.parallel.conversion import convert_experts
from mxep.parallel.data import apply_ddp, apply_fsdp
from mxep.parallel.experts import MXFP8ExpertParallel, apply_mxfp8_expert_parallel, parallelize_moe, shard_experts
from mxep.parallel.linears import MXLinear, convert_linears
from mxep.parallel.meshes import Meshes, build_meshes
from mxep.parallel.pipeline import HiddenStates, Pipeline, PipelineSchedule, stages_of
from mxep.parallel.tensor import ColumnShards, GatheredRegion, RowShards, SlicedSequence, slice_sequence
from mxep.parallel.weights import cache_quantized_weights

__all__ = [
    "ColumnShards",
    "Degrees",
    "GatheredRegion",
    "HiddenStates",
    "MXFP8ExpertParallel",
    "MXLinear",
    "Meshes",
    "Pipeline",
    "PipelineSchedule",
    "Recompute",
    "RowShards",
    "SlicedSequence",
    "apply_ddp",
    "apply_fsdp",
    "apply_mxfp8_expert_parallel",
    "build_meshes",
    "cache_quantized_weights",
    "compile_blocks",
    "convert_experts",
    "convert_linears",
    "parallelize_moe",
    "recompute_blocks",
    "shard_experts",
    "slice_sequence",
    "stages_of",
]

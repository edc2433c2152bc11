"""Distributes a model over many ranks: meshes, expert, tensor, data and pipeline parallelism, recomputation, and conversion by name.

Gradients are sums everywhere: an expert's gradient already holds the tokens of its whole EP group, so averaging over data-parallel
ranks would make it wrong by a factor of the EP degree.  The caller divides the loss by the number of valid tokens of all ranks instead.
"""

from typing import TYPE_CHECKING

from mxep.deprecation import renamed_attributes
from mxep.parallel.conversion import convert_experts
from mxep.parallel.data_parallel import apply_ddp, apply_fsdp
from mxep.parallel.expert_parallel import MXFP8ExpertParallel, apply_mxfp8_expert_parallel, shard_experts
from mxep.parallel.expert_parallel import parallelize_moe as parallelize_moe
from mxep.parallel.frozen_base import dequantize_base, quantize_base
from mxep.parallel.linear_gains import linear_gains
from mxep.parallel.linears import MXLinear, convert_linears
from mxep.parallel.meshes import Meshes, build_meshes
from mxep.parallel.pipeline_parallel import HiddenStates, Pipeline, PipelineSchedule, stages_of
from mxep.parallel.recompute import Recompute, compile_blocks, recompute_blocks
from mxep.parallel.tensor_parallel import ColumnShards, GatheredRegion, RowShards, SlicedSequence, slice_sequence
from mxep.parallel.undo_conversion import unconvert
from mxep.parallel.weights import cache_quantized_weights
from mxep.parallel_dims import ParallelDims

__all__ = [
    "ColumnShards",
    "GatheredRegion",
    "HiddenStates",
    "MXFP8ExpertParallel",
    "MXLinear",
    "Meshes",
    "ParallelDims",
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
    "dequantize_base",
    "linear_gains",
    "quantize_base",
    "recompute_blocks",
    "shard_experts",
    "slice_sequence",
    "stages_of",
    "unconvert",
]

if TYPE_CHECKING:
    from mxep.parallel_dims import ParallelDims as Degrees  # noqa: F401
else:
    __getattr__ = renamed_attributes(__name__, {"Degrees": "ParallelDims"}, since="0.2")

"""torchtitan 0.2: its own trainer with routed experts, and the exchange of their tokens, in MXFP8.

`--job.custom_config_module=mxep.integrations.torchtitan_0_2 --model.converters=mxep` switches it on: torchtitan imports this file for
the options (`--mxep.recipe`, `--mxep.fqns`, a table `[mxep]` in TOML), and importing it registers the converter "mxep".  Neither
torchao nor torchtitan's own MXFP8 converters, which insist on SM100, take part.

The annotations are types and not strings (no `from __future__ import annotations`): torchtitan merges the options by them.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mxep.integrations.torchtitan_experts import TopKRouting, experts_output, gpt_oss_experts, require_torchtitan
from mxep.moe.expert_mlp import ExpertWeights
from mxep.mx.rows import unflatten_rows
from mxep.ops.activation.functions import SwiGLU
from mxep.parallel import MXFP8ExpertParallel, convert_experts
from mxep.parallel.conversion import converted_recipe
from mxep.parallel.expert_parallel import shard_experts
from mxep.parallel.forwards import replace_forward
from mxep.recipe import DEFAULT_RECIPE, resolve_recipe

_INSTALL = "install mxep with its extra `torchtitan`, or torchtitan==0.2.2"
require_torchtitan(__name__, "0.2.2", _INSTALL, "0.3: mxep.integrations.torchtitan_0_3")

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.expert_parallel import ExpertParallel  # noqa: E402
from torchtitan.models.moe.moe import GroupedExperts, MoE  # noqa: E402
from torchtitan.models.moe.utils import set_token_group_alignment_size_m  # noqa: E402
from torchtitan.protocols.model_converter import register_model_converter  # noqa: E402

_log = logging.getLogger(__name__)
CONVERTER = "mxep"
_WHERE = f"torchtitan converter {CONVERTER!r}"
_GPT_OSS = "torchtitan.models.gpt_oss.model.moe", "GptOssGroupedExperts"  # by name: importing it here would import its whole model
_SPLIT_BACKWARD = "interleavedzerobubble", "zbvzerobubble", "dualpipev"  # torch.distributed.pipelining's schedules
_SWITCH_ON = f"--job.custom_config_module={__name__} --model.converters={CONVERTER}"


@dataclass
class MXEP:
    """Which experts compute in MXFP8, and how."""

    recipe: str = DEFAULT_RECIPE
    """Precision of exchanges and GEMMs, a name of mxep.recipe.RECIPES."""

    fqns: list[str] = field(default_factory=lambda: ["experts"])
    """Modules with expert weights, by dotted names or parts of them, with wildcards."""

    fused: bool = True
    """Run everything between a layer's router and its shared experts as one function, where no tensor parallelism is around it."""


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig."""

    mxep: MXEP = field(default_factory=MXEP)


class MXEPConverter:
    """torchtitan's ModelConverter: grouped GEMMs of the named experts, and the exchange of their tokens, by a recipe.

    Raises:
        ValueError: names that match no experts, an unknown recipe, options without a section `mxep`; DeepEP and expert tensor parallelism,
            which would exchange tokens without mxep; pipeline schedules that split backward.
    """

    def __init__(self, job_config: Any, parallel_dims: ParallelDims) -> None:
        options = getattr(job_config, "mxep", None)
        if options is None:
            raise ValueError(f"{_WHERE}: the job has no options `mxep`; start it with {_SWITCH_ON}")
        self.recipe = resolve_recipe(options.recipe)
        self.fqns = list(options.fqns)
        self.expert_parallel = parallel_dims.ep_enabled
        self.fused = options.fused and not parallel_dims.tp_enabled
        if parallel_dims.pp_enabled:
            _check_schedule(job_config.parallelism.pipeline_parallel_schedule)
        if self.expert_parallel:
            _check_parallelism(job_config, parallel_dims)

    def convert(self, model: nn.Module) -> None:
        """Convert in place, before torchtitan shards the model."""
        names = convert_experts(model, self.fqns, self.recipe)
        for name in names:
            layer = model.get_submodule(name.rpartition(".")[0])
            if self.fused and _can_fuse(layer):
                _fuse(layer)
            else:
                _log.info("%s: exchanged and multiplied one after the other, not in one function", name)
        # Without expert parallelism torchtitan pads the groups itself.
        set_token_group_alignment_size_m(self.recipe.group_size_multiple_of)
        if self.expert_parallel:
            ExpertParallel._apply = _apply_expert_parallel
            for name in names:
                model.get_submodule(name).register_forward_pre_hook(_check_exchange)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Does nothing: weights are quantised where they are used."""


def _check_schedule(schedule: str) -> None:
    """Raise ValueError for a schedule that runs the gradients of inputs and of weights apart: torch cannot for functions in Python."""
    if schedule.lower() in _SPLIT_BACKWARD:
        raise ValueError(
            f"{_WHERE}: --parallelism.pipeline_parallel_schedule={schedule} splits backward, which torch cannot do for mxep's autograd "
            "functions, want one that does not; use 1F1B or Interleaved1F1B"
        )


def _check_parallelism(job_config: Any, parallel_dims: ParallelDims) -> None:
    """Raise ValueError for kinds of expert parallelism that do not go through torchtitan's `ExpertParallel`."""
    backend = job_config.parallelism.expert_parallel_comm_backend
    if backend != "standard":
        raise ValueError(f"{_WHERE}: --parallelism.expert_parallel_comm_backend={backend}, want standard: mxep exchanges the tokens itself")
    if parallel_dims.etp_enabled:
        raise ValueError(
            f"{_WHERE}: --parallelism.expert_tensor_parallel_degree={parallel_dims.etp}, want 1: routed experts are not split by tensor "
            "parallelism"
        )


_torchtitan_apply = ExpertParallel._apply


def _apply_expert_parallel(self: ExpertParallel, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """`ExpertParallel._apply`: converted experts get mxep's exchange, all others torchtitan's."""
    recipe = converted_recipe(module)
    if recipe is None or type(self) is not ExpertParallel:
        return _torchtitan_apply(self, module, device_mesh)
    module._mxep_exchange = True  # type: ignore[assignment]
    if hasattr(module, "_mxep_group"):  # fused: its forward exchanges the tokens
        shard_experts(module, device_mesh)
        module._mxep_group = device_mesh.get_group().group_name  # type: ignore[assignment]
        return module
    return MXFP8ExpertParallel(recipe)._apply(module, device_mesh)


def _can_fuse(layer: Any) -> bool:
    """True if layer and experts are torchtitan's own, and scores act after the experts: a token is then sent once for all its choices."""
    own = isinstance(layer, MoE) and type(layer).forward is MoE.forward and "forward" not in vars(layer)
    return own and not layer.score_before_experts and (type(layer.experts) is GroupedExperts or _is_gpt_oss(layer.experts))


def _is_gpt_oss(experts: nn.Module) -> bool:
    return (type(experts).__module__, type(experts).__qualname__) == _GPT_OSS


def _fuse(layer: Any) -> None:
    """Let a converted layer hand tokens and choices to its experts, instead of rows in the experts' order."""
    experts = layer.experts
    experts._mxep_group = ""  # that of this rank alone, until expert parallelism has another one
    replace_forward(experts, _experts_forward)
    replace_forward(layer, _layer_forward)


def _experts_forward(experts: Any, tokens: Tensor, choices: TopKRouting) -> Tensor:
    if _is_gpt_oss(experts):
        of_layers = experts.mlp1_weight, experts.mlp1_bias, experts.mlp2_weight, experts.mlp2_bias
        weights, swiglu = gpt_oss_experts(*of_layers, experts.swiglu_limit)
    else:
        weights, swiglu = ExpertWeights(experts.w1, experts.w2, experts.w3), SwiGLU()
    return experts_output(tokens, choices, weights, converted_recipe(experts), swiglu)


def _layer_forward(layer: Any, x: Tensor) -> Tensor:
    """torchtitan's MoE layer: x (B, S, D) -> (B, S, D); its router, its count of tokens, its shared experts."""
    tokens = x.reshape(-1, x.shape[-1])
    scores, chosen, counts = layer.router(tokens, layer.expert_bias)
    with torch.no_grad():
        layer.tokens_per_expert.add_(counts)
    y = layer.experts(tokens, TopKRouting(chosen, scores, layer.router.num_experts, layer.experts._mxep_group))
    return unflatten_rows(y if layer.shared_experts is None else layer.shared_experts(tokens) + y, x.shape[:-1])


def _check_exchange(module: nn.Module, inputs: tuple) -> None:
    """Called before the first hook that exchanges tokens: a model with its own parallel style must not do it in bf16 unnoticed."""
    if not getattr(module, "_mxep_exchange", False):
        raise ValueError(
            f"{_WHERE}: {type(module).__name__} was not sharded by torchtitan's ExpertParallel, so its tokens "
            "would not be exchanged by the recipe; use a model that is, or an expert parallel degree of 1"
        )


register_model_converter(MXEPConverter, CONVERTER)

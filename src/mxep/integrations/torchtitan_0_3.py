"""torchtitan 0.3: its routed experts, and the exchange of their tokens, in MXFP8 by one override of `RoutedExperts.Config`.

`--override.imports mxep.integrations.torchtitan_0_3.mxfp8_experts` switches it on; a recipe is given as torchtitan gives arguments to an
override, `'mxep.integrations.torchtitan_0_3.mxfp8_experts={"recipe": "mxfp8_gemm"}'`.  Nothing of torchtitan is patched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.checks import check_rows
from mxep.ep.blocks import Permuted, combine, dispatch, permute, unpermute
from mxep.ep.exchange_plan import ExchangePlan
from mxep.grouped_mm.function import recipe_grouped_mm
from mxep.integrations.torchtitan_experts import TopKRouting, experts_output, gpt_oss_experts, require_torchtitan
from mxep.moe.expert_mlp import ExpertWeights
from mxep.mx.rows import unflatten_rows
from mxep.ops.activation.functions import SwiGLU
from mxep.recipe import DEFAULT_RECIPE, resolve_recipe

require_torchtitan(__name__, "0.3.0", "install torchtitan==0.3.0", "0.2: mxep.integrations.torchtitan_0_2")

import spmd_types as spmd  # noqa: E402
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import (  # noqa: E402
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402

_WHERE = f"{__name__}.mxfp8_experts"


class _ByRecipe(GroupedExperts):
    """The base of torchtitan's experts with grouped GEMMs in a recipe's precision; parameters and names are torchtitan's."""

    def __init__(self, config: Any) -> None:  # with a recipe's name
        super().__init__(config)
        self.recipe = resolve_recipe(config.recipe)

    def experts(self) -> tuple[ExpertWeights, SwiGLU]:
        raise NotImplementedError

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor | TopKRouting) -> Tensor:
        """Rows in the experts' order and their counts, as torchtitan has them; or tokens (T, D) and their choices -> (T, D), summed."""
        if not isinstance(num_tokens_per_expert_E, TopKRouting):
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights, swiglu = self.experts()
        return experts_output(x_RD, num_tokens_per_expert_E, weights, self.recipe, swiglu)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        """A (P, K), B_t (L, K, N), END offsets (L,) -> (P, N) in A's dtype."""
        if self.recipe.gemm == "hp":
            return super()._grouped_mm(A=A, B_t=B_t, offs=offs)
        return recipe_grouped_mm(A, B_t, offs, None, A.dtype, self.recipe, pad_groups=self.recipe.wgrad == "mxfp8")


class MXFP8GroupedExperts(_ByRecipe):
    """torchtitan's plain experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        recipe: str

    def experts(self) -> tuple[ExpertWeights, SwiGLU]:
        return ExpertWeights(self.w1_EFD, self.w2_EDF, self.w3_EFD), SwiGLU()


class MXFP8GptOssGroupedExperts(_ByRecipe, GptOssGroupedExperts):
    """torchtitan's experts of gpt-oss: biases, gate and up interleaved and clamped."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        recipe: str

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """torchtitan's, with a ValueError where it would add a bias once for each rank.

        With `spmd_types` the parameters are plain tensors, and torchtitan 0.3.0 reads the tensor parallel degree, by which it divides the
        second bias, from DTensors.  The sum over the ranks then has that bias as often as there are ranks.
        """
        if parallel_dims.spmd_backend == "spmd_types" and parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
            raise ValueError(
                f"{_WHERE}: --parallelism.tensor_parallel_degree={parallel_dims.tp} with --parallelism.spmd_backend=spmd_types, where each "
                "rank adds the whole second bias of gpt-oss' experts, want it once; use --parallelism.spmd_backend=partial_dtensor, or "
                "expert parallelism"
            )
        super().parallelize(parallel_dims)

    def experts(self) -> tuple[ExpertWeights, SwiGLU]:
        return gpt_oss_experts(self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED, self.swiglu_limit)


@dataclass(frozen=True, kw_only=True)
class _DispatchMetadata(LocalDispatchMetadata):
    """What combine needs: the order of torchtitan's own dispatcher, and mxep's plan of the exchange."""

    plan: ExchangePlan
    permuted: Permuted


class MXFP8TokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's order and weighting of the tokens, mxep's exchange between them; on one rank it pads the experts' groups alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        recipe: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = resolve_recipe(config.recipe)

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, _DispatchMetadata]:
        """Tokens (T, D), scores and expert ids (T, K), rows per expert (E,) -> rows (P, D), padded counts (L,), what combine needs."""
        _check_surroundings()
        check_rows(_WHERE, x_TD, quantised=self.recipe.dispatch == "mxfp8")
        rows, order, scores = self._local_reorder(x_TD, topk_scores_TK, topk_expert_ids_TK)
        group = None if self.ep_mesh is None else self.ep_mesh.get_group()
        plan = ExchangePlan.from_counts(num_local_tokens_per_expert_E.long(), group)
        permuted = permute(dispatch(rows, plan, self.recipe), plan, self.recipe)
        metadata = _DispatchMetadata(
            token_indices_experts_sorted_N=order,
            topk_scores_experts_sorted_N=scores,
            plan=plan,
            permuted=permuted._replace(rows=permuted.row_map),
        )
        return permuted.rows, permuted.padded_counts, metadata

    def combine(self, routed_output_RD: Tensor, metadata: _DispatchMetadata, x_TD: Tensor) -> Tensor:
        """Rows (P, D) -> (T, D), weighted and summed over a token's choices."""
        rows = combine(unpermute(routed_output_RD, metadata.permuted), metadata.plan, self.recipe)
        return LocalTokenDispatcher.combine(self, rows, metadata, x_TD)


class MXFP8RoutedExperts(RoutedExperts):
    """torchtitan's region of routed experts as one function: a token is sent once to each rank that holds any of its experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor) -> Tensor:
        """Tokens (B, L, D), scores and expert ids (B, L, K) -> (B, L, D), weighted and summed over a token's choices."""
        if any(parameter.dim() == 2 and _is_split(parameter) for parameter in self.inner_experts.parameters()):
            # Each rank of a tensor parallel group would add the whole of a bias; torchtitan's own forward of experts adds its part.
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        _check_surroundings()
        dispatcher, chosen = self.token_dispatcher, (topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1))
        group = "" if dispatcher.ep_mesh is None else dispatcher.ep_mesh.get_group()
        with maybe_set_sparse_mesh():
            y = self.inner_experts(x_BLD.reshape(-1, x_BLD.shape[-1]), TopKRouting(*chosen, dispatcher.num_experts, group))
        return unflatten_rows(y, x_BLD.shape[:-1])


def _is_split(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def _check_surroundings() -> None:
    """Raises ValueError where the exchange cannot run: in a compiled block, and under spmd_types' checks."""
    if torch.compiler.is_compiling():
        raise ValueError(f"{_WHERE}: a compiled block cannot hold the exchange, whose splits the host reads; use --compile.no-enable")
    if spmd.is_type_checking():
        raise ValueError(f"{_WHERE}: spmd_types does not know the types of mxep's operators; use --debug.no-spmd_typechecking")


_EXPERTS = {GroupedExperts.Config: MXFP8GroupedExperts.Config, GptOssGroupedExperts.Config: MXFP8GptOssGroupedExperts.Config}


@override(target=RoutedExperts.Config, exact=True, description="mxep: routed experts and their exchange in MXFP8")
def mxfp8_experts(cfg: RoutedExperts.Config, *, recipe: str = DEFAULT_RECIPE, fused: bool = True) -> RoutedExperts.Config:
    """The configuration of the same experts with a recipe of mxep, for every MoE layer.

    Args:
        recipe: precision of exchanges and products, by name.
        fused: everything as one function (`mxep.fused_experts`); False exchanges and multiplies one after the other, in torchtitan's own
            order and weighting of the rows.

    Raises:
        ValueError: an unknown recipe; experts or a dispatcher that are not torchtitan's plain ones.

    Examples:
        >>> # torchtitan calls it: --override.imports mxep.integrations.torchtitan_0_3.mxfp8_experts
        >>> config = mxfp8_experts(model_config.layers[0].moe.routed_experts, recipe="mxfp8_gemm")  # doctest: +SKIP
    """
    name = resolve_recipe(recipe).name
    kind = _EXPERTS.get(type(cfg.inner_experts))
    if kind is None:
        got, want = type(cfg.inner_experts).__qualname__, " or ".join(config.__qualname__ for config in _EXPERTS)
        raise ValueError(f"{_WHERE}: the experts are {got}, want {want}; leave out what else replaces them")
    if type(cfg.token_dispatcher) is not AllToAllTokenDispatcher.Config:
        got = type(cfg.token_dispatcher).__qualname__
        raise ValueError(f'{_WHERE}: the dispatcher is {got}, want AllToAllTokenDispatcher.Config; use comm_backend="standard"')
    return derive(
        cfg,
        MXFP8RoutedExperts.Config if fused else RoutedExperts.Config,
        inner_experts=derive(cfg.inner_experts, kind, recipe=name),
        token_dispatcher=derive(cfg.token_dispatcher, MXFP8TokenDispatcher.Config, recipe=name),
    )

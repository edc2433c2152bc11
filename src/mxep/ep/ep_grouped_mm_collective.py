"""`ep_grouped_mm`: all five stages around one grouped GEMM in one autograd function, with the bits of the separate blocks.

before, after  rows sorted by destination rank and inside a rank by expert; their products with their experts' weights, in the same order
forward   quantise 1x32, one packed exchange, MX (R, D); the GEMM reads it through the row map: on the FP8 paths rows are gathered into
          their experts' order and rebased in one pass; its rows are scattered into the received order and exchanged back in high
          precision, (T', N)
backward  quantise the gradient 1x32, one packed exchange, MX (R, N); dgrad reads it, and wgrad both, through the same map; dgrad's rows
          are scattered and exchanged in high precision, (T', D)
recipes   an exchange in "hp" delivers plain rows, which are quantised before the GEMM.  Where wgrad reads plain rows they are gathered
          for it; where it reads 32x1 blocks, or the GEMM plain rows, they are gathered as permute does
saves     received rows as wgrad reads them, in MX bytes or plain, not permuted ("mxfp8": 32x1 MX of the permuted ones; "hp": the permuted
          ones, which forward makes anyway), row map, group ends, the weight
host syncs  none on GPUs outside of checking mode: splits are host lists
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.checks import HIGH_PRECISION, check_alone, check_rows, check_splits, check_tensors, values_checked
from mxep.comm import Transport, group_name_of, resolve_group, transport_of
from mxep.ep.dispatch import exchange, exchange_hp
from mxep.ep.ep_grouped_mm_symmetric import LocalCall, overlapped_ep_grouped_mm
from mxep.ep.permute import index_rows
from mxep.grouped_mm.products import GemmOptions, Weights, gemm_options, multiply_rows, saved_operand, saved_tensors
from mxep.grouped_mm.wgrad_gemm import wgrad_gemm
from mxep.mx.compile import in_graph
from mxep.mx.rows import scatter
from mxep.mx.tensor import MXTensor, reject_graph_output
from mxep.mx.weight_cache import CachedWeight
from mxep.recipe import Recipe, resolve_recipe
from mxep.shapes import MX_BLOCK

_WHERE = "ep_grouped_mm"
# By the transport's name: forms that overlap exchange and GEMM, for recipes that exchange in MXFP8 both ways.  Every other transport, and
# every other recipe, takes the form of this file, which needs nothing but `Transport.exchange`.
OVERLAPPED: dict[str, Callable[[Transport, Tensor, Tensor, LocalCall], Tensor]] = {"symmetric": overlapped_ep_grouped_mm}


class _EPOptions(NamedTuple):
    """What the function does apart from its operands; hashable, so that a graph can hold it."""

    dispatch: str  # scaling mode by which rows are quantised for their exchange, "" sends them as they are
    combine: str  # the same of gradients
    gemm: GemmOptions | None  # None multiplies in high precision


@in_graph
class _EPGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        row_map: Tensor,
        offs: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group_name: str,
        options: _EPOptions,
        kept: CachedWeight | None = None,
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        rows = exchange(x, output_splits, input_splits, group_name, options.dispatch)
        weights = Weights(w, None, options.gemm, kept)
        out, operand, _ = multiply_rows(rows, weights, "forward", offs, row_map, for_wgrad=needs_w)
        assert out is not None
        ctx.save_for_backward(*saved_tensors(operand), w if needs_x or needs_w else None, row_map, offs)
        ctx.splits, ctx.options, ctx.kept = (list(output_splits), list(input_splits), group_name), options, kept
        received_order = scatter(out, row_map, rows.shape[0])
        del out, rows, operand
        return exchange_hp(received_order, input_splits, output_splits, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        data, scale, w, row_map, offs = ctx.saved_tensors
        (output_splits, input_splits, name), options, needs = ctx.splits, ctx.options, ctx.needs_input_grad[:2]
        grad = exchange(grads[0], output_splits, input_splits, name, options.combine)
        gemm, weights, d_x, d_w = options.gemm, Weights(w, None, options.gemm, ctx.kept), None, None
        num_rows = grad.shape[0]
        d_rows, operand, wgrad_map = multiply_rows(grad, weights, "dgrad", offs, row_map, *needs)
        if operand is not None:
            a, maps = saved_operand(data, scale, grad.dtype, gemm), (wgrad_map, wgrad_map)
            d_w = wgrad_gemm(operand, a, offs, gemm, w.dtype, *maps, weights.transposed)
        if d_rows is not None:
            d_x = exchange_hp(scatter(d_rows, row_map, num_rows), input_splits, output_splits, name)
        return d_x, d_w, None, None, None, None, None, None, None


def _check_weight(x: Tensor, w: Tensor, counts: Tensor, quantised: bool) -> None:
    """Raise ValueError unless weight and counts belong to rows x."""
    check_tensors(_WHERE, weight=w, num_tokens_per_expert=counts)
    if isinstance(w, MXTensor) or w.dim() != 3 or w.dtype not in HIGH_PRECISION or w.shape[2] != x.shape[1]:
        got = f"{type(w).__name__} {tuple(w.shape)} {w.dtype}"
        raise ValueError(
            f"{_WHERE}: weight is {got} for an input {tuple(x.shape)}, want a plain (L, N, D) in bfloat16 or float32; pass it as stored"
        )
    if quantised and w.shape[1] % MX_BLOCK:
        raise ValueError(f"{_WHERE}: weight is {tuple(w.shape)}, want N in multiples of {MX_BLOCK} (one MX block); pad the weights")
    for name, tensor, devices in (("weight", w, [x.device]), ("num_tokens_per_expert", counts, [x.device, torch.device("cpu")])):
        if tensor.device not in devices:
            raise ValueError(f"{_WHERE}: {name} is on {tensor.device}, want {x.device} like the input; move it there")


def _world_of(group_name: str) -> int | None:
    """The number of ranks of a process group, None if no group has that name, which the exchange reports."""
    try:
        return dist.get_world_size(resolve_group(_WHERE, group_name)) if group_name else 1
    except ValueError:
        return None


def _check_ranks(x: Tensor, output_splits: list[int], input_splits: list[int], counts: Tensor, num_experts: int, group_name: str) -> None:
    """Raise ValueError unless splits, rows and counts agree, as far as the exchange does not check it."""
    if len(output_splits) != len(input_splits) or not output_splits:
        raise ValueError(
            f"{_WHERE}: {len(output_splits)} output_splits and {len(input_splits)} input_splits, want one of each per rank of the group"
        )
    if torch.compiler.is_compiling():
        return
    check_alone(_WHERE, x.shape[0], output_splits, input_splits, group_name)
    fits = counts.numel() == len(input_splits) * num_experts
    if not fits and (world := _world_of(group_name)) not in (None, len(input_splits)):
        raise ValueError(
            f"{_WHERE}: {len(input_splits)} input_splits and as many output_splits on a group of {world} ranks, want one of each per rank; "
            "pass the group of these splits"
        )
    if fits and values_checked(counts):  # host sync: only in checking mode
        per_rank = counts.view(len(output_splits), num_experts).sum(1).tolist()
        if per_rank != list(output_splits):
            raise ValueError(
                f"{_WHERE}: num_tokens_per_expert has {per_rank} rows from the ranks, output_splits {output_splits}, want the same; "
                "pass the counts that came from the counts exchange, rank-major"
            )


def ep_grouped_mm(
    input: Tensor,
    weight: Tensor,
    input_splits: list[int],
    output_splits: list[int],
    num_tokens_per_expert: Tensor,
    group: str | ProcessGroup | None = None,
    recipe: str | Recipe | None = None,
    *,
    kept: CachedWeight | None = None,
) -> Tensor:
    """Every row times its expert's weight, on whichever rank that expert is: the five blocks around one grouped GEMM, in one call.

    Out and both gradients have the bits of dispatch, permute, grouped GEMM, unpermute and combine one after the other, with fewer passes
    over memory between them, and no permuted rows are saved where wgrad reads MX.

    Args:
        input: (T', D) bf16 or float32, rows sorted by destination rank and inside a rank by expert.
        weight: (L, N, D) bf16 or float32, this rank's experts.  D and N are multiples of 32 unless the recipe multiplies in "hp".
        input_splits: rows sent to each rank of the group, a host list.
        output_splits: rows received from each rank of the group, a host list.
        num_tokens_per_expert: (W*L,) int32 or int64, rank-major, the counts of the rows received, as the counts exchange delivers them.
        group: process group, its name, or None for WORLD; "" is this rank alone, without torch.distributed.
        recipe: a `Recipe`, a preset's name, or None for the default preset.
        kept: weight's entry in a `WeightCache`; None quantises it in every call.  Not for use in a compiled graph.

    Returns:
        (T', N) in input's dtype, rows in input's order.  Differentiable in input and weight; an expert without rows gets a gradient of
        exactly zero.

    Raises:
        ValueError: dtype, width, splits, counts or a recipe that do not fit, a GEMM path that this device does not run; in checking mode
            also splits that differ between ranks, on every rank, and counts that do not add up to output_splits.

    Examples:
        >>> x, weight = torch.randn(6, 64), torch.randn(2, 32, 64)  # 2 rows of expert 0, then 4 of expert 1
        >>> counts = torch.tensor([2, 4])
        >>> y = mxep.ep_grouped_mm(x, weight, [6], [6], counts, group="", recipe="hp")  # "": this rank alone
        >>> torch.allclose(y, torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[1].T]), atol=1e-4)
        True
    """
    recipe = resolve_recipe(recipe)
    if recipe.hp_below_rows:
        raise ValueError(
            f"{_WHERE}: recipe {recipe.name!r} has hp_below_rows={recipe.hp_below_rows}, want 0: how ranks exchange rows depends on the "
            "GEMMs here, and ranks may have other numbers of rows; call the five blocks, or mxep.fused_experts"
        )
    mode = recipe.scaling_mode.value
    reject_graph_output(input, _WHERE)
    check_rows(_WHERE, input, quantised=recipe.gemm == "mxfp8")
    _check_weight(input, weight, num_tokens_per_expert, quantised=recipe.gemm == "mxfp8")
    check_splits(_WHERE, output_splits, input_splits)
    name = group_name_of(_WHERE, group)
    num_experts, num_rows = weight.shape[0], sum(output_splits)
    _check_ranks(input, output_splits, input_splits, num_tokens_per_expert, num_experts, name)
    alignment = recipe.group_size_multiple_of
    counts = num_tokens_per_expert.to(input.device, non_blocking=True)
    row_map, _, offs = index_rows(_WHERE, counts, num_rows, len(output_splits), num_experts, alignment)
    gemm = None
    if recipe.gemm == "mxfp8":
        wgrad = recipe.wgrad if torch.is_grad_enabled() and weight.requires_grad else "none"
        gemm = gemm_options(input.device, input.dtype, recipe.gemm_path, wgrad, mode)
    transport = transport_of(name, input.device) if name and not torch.compiler.is_compiling() else None
    if gemm is not None and transport is not None and recipe.dispatch == recipe.combine_backward == "mxfp8":
        overlapped = OVERLAPPED.get(transport.name)
        if overlapped is not None:
            local = LocalCall(input_splits, output_splits, num_tokens_per_expert, row_map, offs, alignment, mode, gemm, kept)
            return overlapped(transport, input, weight, local)
    if not values_checked(counts):
        row_map = torch.where(row_map < num_rows, row_map, -1)  # unchecked counts: no kernel reads past the rows
    options = _EPOptions(mode if recipe.dispatch == "mxfp8" else "", mode if recipe.combine_backward == "mxfp8" else "", gemm)
    return _EPGroupedMM.apply(input, weight, row_map, offs, output_splits, input_splits, name, options, kept)

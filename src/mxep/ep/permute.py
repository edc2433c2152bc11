"""Stage 2, permute: received rows from rank-major into expert-major order, every expert's group padded.

Before: dispatch.  After: the experts' grouped GEMMs.
Forward: MX rows (R, D) -> (P, D), bytes unchanged, padding rows zero, one pass; plain rows too, or quantised in that pass.  Backward:
plain rows (P, D) -> (R, D); an MX gradient stays MX.  Saves the row map.  Host syncs: none, P is an upper bound.
"""

from __future__ import annotations

from typing import Any

import torch

from mxep.checks import check_count, check_rows, check_tensors, row_counts
from mxep.mx.compile import enters_graph, in_graph, leave_graph
from mxep.mx.rows import gather_as_mx, scatter
from mxep.mx.tensor import MXTensor, reject_graph_output
from mxep.mx.weight import MXWeight
from mxep.operators import direct
from mxep.recipe import check_group_alignment
from mxep.shapes import MX_BLOCK, round_up


@in_graph
class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_map: torch.Tensor, mode: str) -> torch.Tensor:
        ctx.save_for_backward(row_map)
        ctx.num_rows = rows.shape[0]
        ctx.entered = enters_graph(rows)
        return gather_as_mx(rows, row_map, mode)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (row_map,) = ctx.saved_tensors
        return leave_graph(scatter(grads[0], row_map, ctx.num_rows), ctx.entered), None, None


def _check_counts(where: str, counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int) -> list[int] | None:
    """The counts, a tensor, on the host in checking mode, else None. Raises ValueError for counts that do not fit."""
    for name, value in (("ep_degree", ep_degree), ("num_local_experts", num_local_experts), ("alignment", alignment)):
        check_count(where, name, value)
    if counts.dtype not in (torch.int32, torch.int64) or tuple(counts.shape) != (ep_degree * num_local_experts,):
        raise ValueError(
            f"{where}: num_tokens_per_expert is {tuple(counts.shape)} {counts.dtype}, want int32 or int64 of shape "
            f"({ep_degree * num_local_experts},) = ep_degree {ep_degree} * num_local_experts {num_local_experts}, rank-major; "
            "pass the counts that came from the counts exchange"
        )
    return row_counts(where, counts)


def permute_rows(
    where: str, rows: torch.Tensor, counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, mode: str = ""
) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All forms of permute; with a scaling mode as `mode`, plain rows become MX."""
    reject_graph_output(rows, where)
    check_tensors(where, input=rows)
    check_tensors(where, rows.device, num_tokens_per_expert=counts)
    if rows.dim() != 2 or isinstance(rows, MXWeight):
        raise ValueError(f"{where}: input is {type(rows).__name__} {tuple(rows.shape)}, want (rows, width), plain or an MXTensor")
    if mode:
        check_rows(where, rows, quantised=True)
    num_rows = rows.shape[0]
    row_map, padded, ends = index_rows(where, counts, num_rows, ep_degree, num_local_experts, alignment)
    return torch.Size([num_rows + 1, rows.shape[1]]), _Permute.apply(rows, row_map, mode), row_map, padded, ends


def index_rows(
    where: str, counts: torch.Tensor, num_rows: int, ep_degree: int, num_local_experts: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row map (P,), padded counts (L,) and END offsets (L,) of the rows received. Raises ValueError for counts that do not fit."""
    values = _check_counts(where, counts, ep_degree, num_local_experts, alignment)
    if values is not None and (total := sum(values)) != num_rows:
        raise ValueError(
            f"{where}: the counts {values} add up to {total}, but the input has {num_rows} rows, want as many; pass the counts "
            "that came with these rows, and cut off the rest of a larger buffer"
        )
    num_padded_rows = round_up(num_rows + num_local_experts * alignment, alignment)
    operators = torch.ops.mxep if torch.compiler.is_compiling() else direct
    return operators.permute_indices(counts, ep_degree, num_local_experts, alignment, num_padded_rows)


def permute_mxfp8_fwd_hp_bwd(
    mx: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = MX_BLOCK,
    use_mxfp8: bool = True,
    use_triton_for_bwd: bool = True,
) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reorder received rows by expert and pad each expert's group; MX forward, high precision backward.

    Args:
        mx: MXTensor (R, D), rows from rank 0 first and inside a rank by expert; a plain tensor with use_mxfp8=False.
        num_tokens_per_expert: (W*L,) int32 or int64, rank-major, as the counts exchange delivers it.
        ep_degree: W.
        num_local_experts: L.
        group_size_multiple_of: rows, a multiple of 32.
        use_mxfp8: False permutes the values of `mx` as plain rows.
        use_triton_for_bwd: accepted for compatibility; both settings run the same kernel.

    Returns:
        Size([R+1, D]), what unpermute takes; rows (P, D) with P = round_up(R + L*multiple, multiple); row map (P,) int32, -1 =
        padding; padded counts (L,) int32; END offsets (L,) int32.

    Raises:
        ValueError: a plain input with use_mxfp8=True, counts or alignment that do not fit; in checking mode also counts that do not add up
            to R: rows would be lost.

    Examples:
        >>> rows = mxep.quantize_mx(torch.randn(6, 64))  # 2 rows of expert 0, then 4 of expert 1
        >>> counts = torch.tensor([2, 4])
        >>> shape, permuted, row_map, padded, offs = mxep.permute_mxfp8_fwd_hp_bwd(rows, counts, ep_degree=1, num_local_experts=2)
        >>> padded.tolist(), offs.tolist(), row_map[:4].tolist(), row_map[32:34].tolist()
        ([32, 32], [32, 64], [0, 1, -1, -1], [2, 3])
    """
    where = "permute"
    check_tensors(where, input=mx)
    if use_mxfp8 and not isinstance(mx, MXTensor):
        raise ValueError(f"{where}: input is a plain {mx.dtype} tensor, want an MXTensor (from dispatch), or use_mxfp8=False")
    check_group_alignment(where, group_size_multiple_of)
    rows = mx.dequantize() if not use_mxfp8 and isinstance(mx, MXTensor) else mx
    return permute_rows(where, rows, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of)


def permute_and_pad(
    x: torch.Tensor, num_tokens_per_expert: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int
) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`permute_mxfp8_fwd_hp_bwd` for plain tensors, with ordinary gradients.

    Args:
        x: (R, D) of any floating dtype, rows from rank 0 first and inside a rank by expert.
        num_tokens_per_expert: (W*L,) int32 or int64, rank-major, as the counts exchange delivers it.
        ep_degree: W.
        num_local_experts: L.
        alignment: rows that every expert's group is padded to, any positive number.

    Returns:
        the five items of `permute_mxfp8_fwd_hp_bwd`: padded shape, rows (P, D), row map (P,), padded counts (L,), END offsets (L,).

    Raises:
        ValueError: counts or alignment that do not fit.

    Examples:
        >>> x = torch.arange(3.0)[:, None]  # 1 row of expert 0, then 2 of expert 1
        >>> shape, permuted, row_map, counts, offs = mxep.permute_and_pad(x, torch.tensor([1, 2]), 1, 2, alignment=2)
        >>> permuted[:4, 0].tolist(), row_map[:4].tolist(), offs.tolist()
        ([0.0, 0.0, 1.0, 2.0], [0, -1, 1, 2], [2, 4])
    """
    return permute_rows("permute_and_pad", x, num_tokens_per_expert, ep_degree, num_local_experts, alignment)


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor, experts_per_rank: int, num_ranks: int, max_len: int, alignment: int, use_cpu: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row map, padded counts and END offsets from rank-major counts.

    Args:
        tokens_per_expert_group: (num_ranks * experts_per_rank,) int32 or int64, rank-major.
        experts_per_rank: L.
        num_ranks: W.
        max_len: rows of the row map, at least the padded total.
        alignment: rows, any positive number.
        use_cpu: compute on the CPU and move the results to the input's device.

    Returns:
        row map (max_len,), padded counts (experts_per_rank,), END offsets (experts_per_rank,), all int32 on the input's device.

    Raises:
        ValueError: counts or alignment that do not fit; in checking mode also a `max_len` below the padded total.

    Examples:
        >>> counts = torch.tensor([2, 1, 1, 3])  # rank 0: 2 rows of expert 0, 1 of expert 1; rank 1: 1 and 3
        >>> row_map, padded, offs = mxep.generate_permute_indices(counts, 2, num_ranks=2, max_len=8, alignment=4)
        >>> row_map.tolist(), padded.tolist(), offs.tolist()
        ([0, 1, 3, -1, 2, 4, 5, 6], [4, 4], [4, 8])
    """
    where = "generate_permute_indices"
    check_tensors(where, tokens_per_expert_group=tokens_per_expert_group)
    check_count(where, "max_len", max_len, 0)
    counts = tokens_per_expert_group.cpu() if use_cpu else tokens_per_expert_group
    values = _check_counts(where, counts, num_ranks, experts_per_rank, alignment)
    if values is not None:
        needed = sum(round_up(max(sum(values[e::experts_per_rank]), alignment), alignment) for e in range(experts_per_rank))
        if needed > max_len:
            raise ValueError(f"{where}: max_len={max_len}, want at least {needed} rows, the padded total of these counts")
    found = torch.ops.mxep.permute_indices(counts, num_ranks, experts_per_rank, alignment, max_len)
    return tuple(item.to(tokens_per_expert_group.device) for item in found)  # type: ignore[return-value]

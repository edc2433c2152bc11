"""The weight gradients of gate and up from one gradient (M, 2H)."""

from __future__ import annotations

import torch

from mxep.reference.grouped_mm import check_into, copy_groups, grouped_wgrad_mx_rows


def grouped_wgrad_mx_halves(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    a_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_wgrad_mx_rows` of the left and of the right half of grad's columns.

    Args:
        qg, sg: (M, 2N) and (M, 2N/32), N a multiple of 32.  qa, sa, offs, path, a_map: as in `grouped_wgrad_mx_rows`.

    Returns:
        two (G, N, K) `out_dtype`, each contiguous; exactly zero for an empty group.
    """
    left, right = grouped_wgrad_mx_rows(qg, sg, qa, sa, offs, out_dtype, path, None, a_map).chunk(2, 1)
    return left.contiguous(), right.contiguous()


def grouped_wgrad_mx_halves_into(
    left: torch.Tensor,
    right: torch.Tensor,
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    path: str,
    a_map: torch.Tensor | None = None,
    few: bool = True,
) -> None:
    """`grouped_wgrad_mx_halves` of the groups that have rows, written into two gradients.

    Args:
        left, right: (G, N, K) bf16 or float32 of one dtype, contiguous; an empty group's part is left as it is.
        qg, sg, qa, sa, offs, path, a_map: as in `grouped_wgrad_mx_halves`.
        few: as in `rebase_tokens`.
    """
    made = grouped_wgrad_mx_halves(qg, sg, qa, sa, offs, left.dtype, path, a_map)
    for into, half in zip((left, right), made, strict=True):
        check_into("grouped_wgrad_mx_halves_into", into, (offs.shape[0], qg.shape[1] // 2, qa.shape[1]))
        copy_groups(into, half, offs)

"""The weight gradients of gate and up from one gradient (M, 2H): two results, and x is transposed once for both."""

from __future__ import annotations

import torch

from mxep import kernels
from mxep.device import FP8_ROADS
from mxep.kernels.fp8_grouped_mm import fp8_wgrad
from mxep.kernels.grouped_mm import gemm_path, promoted_every
from mxep.kernels.rebase import rebase_tokens
from mxep.kernels.rows import gather_mx_rows
from mxep.reference.grouped_mm import check_into
from mxep.reference.rebase import RebasedTokens


def _halves(both: RebasedTokens) -> tuple[RebasedTokens, RebasedTokens]:
    """The tokens with the left and with the right half of grad's columns."""
    half = both.grad.shape[0] // 2
    left, right = both.grad_scale[:, :half].contiguous(), both.grad_scale[:, half:].contiguous()
    return both._replace(grad=both.grad[:half], grad_scale=left), both._replace(grad=both.grad[half:], grad_scale=right)


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
    """`grouped_wgrad_mx_rows` of the left and of the right half of grad's columns. Twin: `reference.grouped_wgrad_mx_halves`.

    Args:
        qg, sg: (M, 2N) and (M, 2N/32), N a multiple of 32.  qa, sa, offs, path, a_map: as in `grouped_wgrad_mx_rows`.

    Returns:
        two (G, N, K) `out_dtype`, each contiguous; exactly zero for an empty group.
    """
    path = gemm_path(path, qg.device)
    half, blocks = qg.shape[1] // 2, sg.shape[1] // 2

    if path in FP8_ROADS:
        left, right = _halves(rebase_tokens(qg, sg, qa, sa, offs, None, a_map))
        every = promoted_every(path)
        return fp8_wgrad(left, out_dtype, promote=every), fp8_wgrad(right, out_dtype, promote=every)
    qa, sa = (qa, sa) if a_map is None else gather_mx_rows(qa, sa, a_map)
    rest = (qa, sa, offs, out_dtype, path)
    left_dw = kernels.grouped_wgrad_mx_rows(qg[:, :half], sg[:, :blocks], *rest)
    return left_dw, kernels.grouped_wgrad_mx_rows(qg[:, half:], sg[:, blocks:], *rest)


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
    """`grouped_wgrad_mx_halves` of the groups that have rows, into two gradients. Twin: `reference.grouped_wgrad_mx_halves_into`.

    Args:
        left, right: (G, N, K) bf16 or float32 of one dtype, contiguous; an empty group's part is left as it is.
        qg, sg, qa, sa, offs, path, a_map: as in `grouped_wgrad_mx_halves`.
        few: as in `rebase_tokens`.
    """
    path, half, blocks = gemm_path(path, qg.device), qg.shape[1] // 2, sg.shape[1] // 2
    for into in (left, right):
        check_into("grouped_wgrad_mx_halves_into", into, (offs.shape[0], half, qa.shape[1]))

    if path in FP8_ROADS:
        for into, tokens in zip((left, right), _halves(rebase_tokens(qg, sg, qa, sa, offs, None, a_map, few=few)), strict=True):
            fp8_wgrad(tokens, into.dtype, out=into, promote=promoted_every(path), empty="skip")
        return
    qa, sa = (qa, sa) if a_map is None else gather_mx_rows(qa, sa, a_map)
    kernels.grouped_wgrad_mx_rows_into(left, qg[:, :half], sg[:, :blocks], qa, sa, offs, path)
    kernels.grouped_wgrad_mx_rows_into(right, qg[:, half:], sg[:, blocks:], qa, sa, offs, path)

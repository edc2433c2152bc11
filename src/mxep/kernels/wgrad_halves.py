"""The weight gradients of gate and up from one gradient (M, 2H): two results, and x is transposed once for both."""

from __future__ import annotations

import torch

from mxep import kernels
from mxep.device import FP8_ROADS
from mxep.kernels.fp8_grouped_mm import fp8_wgrad
from mxep.kernels.grouped_mm import gemm_path
from mxep.kernels.rebase import rebase_tokens
from mxep.kernels.rows import gather_mx_rows


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
        both = rebase_tokens(qg, sg, qa, sa, offs, None, a_map)
        left = both._replace(grad=both.grad[:half], grad_scale=both.grad_scale[:, :half].contiguous())
        right = both._replace(grad=both.grad[half:], grad_scale=both.grad_scale[:, half:].contiguous())
        return fp8_wgrad(left, out_dtype), fp8_wgrad(right, out_dtype)
    qa, sa = (qa, sa) if a_map is None else gather_mx_rows(qa, sa, a_map)
    rest = (qa, sa, offs, out_dtype, path)
    left_dw = kernels.grouped_wgrad_mx_rows(qg[:, :half], sg[:, :blocks], *rest)
    return left_dw, kernels.grouped_wgrad_mx_rows(qg[:, half:], sg[:, blocks:], *rest)

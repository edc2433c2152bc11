"""Grouped products of rebased operands, one group after the other in float32: what the FP8 tensor-core kernels compute.

The kernels sum in the tensor cores' 14-bit accumulator and promote to float32 every `promote` of the summed dimension; here every sum
is float32.
"""

from __future__ import annotations

import torch

from mxep.reference.grouped_mm import check_tail, copy_groups, grouped_mm_hp
from mxep.reference.rebase import RebasedRows, RebasedTokens, RebasedWeight, dequantize_rows


def fp8_grouped_mm(
    rows: RebasedRows, weight: RebasedWeight, offs: torch.Tensor, out_dtype: torch.dtype, promote: int = 128, tail: str = "zero"
) -> torch.Tensor:
    """out[rows of g] = rows[rows of g] @ weight[g].T, rounded once.

    Args:
        rows: M rows of K.  weight: (G, N, K).  offs: (G,) int32 END offsets.  promote: without effect here.
        tail: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    return grouped_mm_hp(dequantize_rows(rows), weight.data.float() * weight.scale[..., None], offs, out_dtype, tail)


def fp8_wgrad(
    tokens: RebasedTokens,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    promote: int = 128,
    empty: str = "zero",
) -> torch.Tensor:
    """out[g] (+)= grad[:, tokens of g] @ a[:, tokens of g].T.

    Args:
        tokens: both operands.  out: (G, N, K) `out_dtype` to write into, None for a new one.
        accumulate: add to what `out` holds (float32 only).  promote: without effect here.
        empty: of the groups without tokens: "zero", or "skip" to leave what `out` holds.

    Returns:
        (G, N, K) `out_dtype`; exactly zero (unchanged when accumulating or skipping) for an empty group.
    """
    skip = check_tail("fp8_wgrad", empty)
    shape = (tokens.ends.shape[0], tokens.grad.shape[0], tokens.a.shape[0])
    product = torch.zeros(shape, device=tokens.grad.device)
    start = 0
    for group, end in enumerate(tokens.ends.tolist()):
        if end > start:
            grad = tokens.grad[:, start:end].float() * tokens.grad_scale[group, :, None]
            product[group] = grad @ (tokens.a[:, start:end].float() * tokens.a_scale[group, :, None]).t()
        start = end
    if out is None:
        return product.to(out_dtype)
    if skip and not accumulate:
        copy_groups(out, product, tokens.ends)
        return out
    return out.add_(product) if accumulate else out.copy_(product)

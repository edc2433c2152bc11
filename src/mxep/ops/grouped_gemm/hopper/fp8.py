"""The GEMM paths "fp8", "fp8_row" and "fp8_span": FP8 tensor cores of SM90 on rebased exponents, one per row or one per 128 columns."""

from __future__ import annotations

import torch

from mxep.ops.grouped_gemm.exact import Bytes, ExactPath
from mxep.ops.grouped_gemm.hopper.gemm import fp8_wgrad
from mxep.ops.grouped_gemm.hopper.rebase import rebase_tokens, rebase_weight
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedTokens
from mxep.ops.grouped_gemm.hopper.rows_gemm import rebase_grouped_mm, rebased_grouped_mm
from mxep.ops.grouped_gemm.hopper.rows_wgrad import rows_wgrad
from mxep.ops.grouped_gemm.reference import check_rows, is_rebased


def _gate_up(tokens: RebasedTokens) -> tuple[RebasedTokens, RebasedTokens]:
    """The tokens with the left and with the right half of grad's columns."""
    half = tokens.grad.shape[0] // 2
    gate, up = tokens.grad_scale[:, :half].contiguous(), tokens.grad_scale[:, half:].contiguous()
    return tokens._replace(grad=tokens.grad[:half], grad_scale=gate), tokens._replace(grad=tokens.grad[half:], grad_scale=up)


class Fp8Path(ExactPath):
    """Rebases in the pass that gathers, unless the rows' producer has; columnwise wgrad is that of "exact".

    Args:
        max_spread: the scale granularity of rows, a value of `MAX_SPREAD`.
    """

    def __init__(self, max_spread: int) -> None:
        self._max_spread = max_spread

    def grouped_mm(
        self,
        qa: torch.Tensor,
        sa: torch.Tensor,
        qb: torch.Tensor,
        sb: torch.Tensor,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        row_map: torch.Tensor | None,
        padding_rows: str,
        block_scale: torch.Tensor | None,
        inner: torch.Tensor | None,
        lora_b: torch.Tensor | None,
    ) -> torch.Tensor:
        if not is_rebased(sb):
            qb, sb = rebase_weight(qb, sb)  # one exponent per output column, float32 scales (G, N)
        rest = qb, sb, offs, out_dtype, padding_rows, inner, lora_b
        if (row_map if is_rebased(sa) else block_scale) is not None:
            check_rows(qa, sa, row_map, block_scale)  # raises
        if is_rebased(sa):
            return rebased_grouped_mm(qa, sa, block_scale, *rest)
        return rebase_grouped_mm(qa, sa, row_map, self._max_spread, *rest)

    def wgrad(
        self,
        grad: Bytes,
        a: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        g_map: torch.Tensor | None = None,
        a_map: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        mostly_padding: bool = False,
    ) -> torch.Tensor:
        return rows_wgrad(*grad, *a, offs, out_dtype, g_map, a_map, out, accumulate, mostly_padding)

    def wgrad_gate_up(
        self,
        grad: Bytes,
        a: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        a_map: torch.Tensor | None,
        outs: tuple[torch.Tensor | None, torch.Tensor | None],
        mostly_padding: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = _gate_up(rebase_tokens(*grad, *a, offs, None, a_map, mostly_padding=mostly_padding))
        parts = zip((gate, up), outs, strict=True)
        d_gate, d_up = (fp8_wgrad(part, out_dtype, out, empty="zero" if out is None else "skip") for part, out in parts)
        return d_gate, d_up

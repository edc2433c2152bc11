"""The GEMM paths "fp8", "fp8_row" and "fp8_span": FP8 tensor cores of SM90 on rebased exponents, one per row or one per 128 columns."""

from __future__ import annotations

import torch

from mxep.ops.grouped_gemm.exact import Bytes, ExactPath, Lora
from mxep.ops.grouped_gemm.hopper.gemm import fp8_grouped_mm, fp8_wgrad
from mxep.ops.grouped_gemm.hopper.rebase import rebase_rows, rebase_tokens, rebase_weight
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows, RebasedTokens, RebasedWeight
from mxep.ops.grouped_gemm.hopper.rows_wgrad import rows_wgrad
from mxep.ops.grouped_gemm.reference import is_rebased


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

    def prepare_weight(self, weight: Bytes) -> Bytes:
        """One exponent per output column, float32 scales (G, N); a weight that is prepared stays as it is."""
        return weight if is_rebased(weight[1]) else rebase_weight(*weight)

    def gemm(
        self,
        rows: Bytes,
        weight: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        row_map: torch.Tensor | None,
        padding_rows: str,
        lora: Lora | None = None,
    ) -> torch.Tensor:
        rebased = rebase_rows(*rows, self._max_spread, row_map, offs[-1:] if padding_rows == "skip" else None)
        return self.gemm_rebased(rebased, weight, offs, out_dtype, padding_rows, lora)

    def gemm_rebased(
        self,
        rows: RebasedRows,
        weight: Bytes,
        offs: torch.Tensor,
        out_dtype: torch.dtype,
        padding_rows: str,
        lora: Lora | None = None,
    ) -> torch.Tensor:
        return fp8_grouped_mm(rows, RebasedWeight(*self.prepare_weight(weight)), offs, out_dtype, padding_rows, *(lora or ()))

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
        empty = "zero" if outs[0] is None else "skip"  # of groups without tokens
        return fp8_wgrad(gate, out_dtype, outs[0], empty=empty), fp8_wgrad(up, out_dtype, outs[1], empty=empty)

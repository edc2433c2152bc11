"""What a grouped GEMM does beside its operands, decided once per call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxep.device import FP8_ROADS, resolve_gemm_path


class GemmOptions(NamedTuple):
    """What one grouped GEMM does beside its operands; hashable, so that a graph can hold it."""

    out_dtype: torch.dtype
    wgrad: str  # "hp", "mx" or "mxfp8", as in Recipe; "none" where w gets no gradient
    mode: str  # "rceil" or "floor"
    path: str  # resolved GEMM path
    float32_path: str  # the one of results in float32
    pad_groups: bool
    weight_dtype: torch.dtype | None = None  # to which a weight is rounded wherever it is read, None: not at all

    def path_to(self, out_dtype: torch.dtype) -> str:
        return self.float32_path if out_dtype == torch.float32 else self.path

    def wgrad_path(self, dtype: torch.dtype) -> str:
        """The path of dW in `dtype`: of a weight that is read in bf16 the one of bf16, also where dW comes in float32."""
        return self.path_to(self.weight_dtype or dtype)

    def wgrad_same_in_parts(self, dtype: torch.dtype) -> bool:
        """Whether a dW in `dtype` has the same bits where it is written beside parts of it: off the FP8 roads MX rows do not."""
        return self.wgrad != "mx" or self.wgrad_path(dtype) in ("reference", *FP8_ROADS)

    def wgrad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which wgrad makes dW of a weight of `dtype`; the autograd functions cast the rest of the way.

        FP8 tensor cores write float32 as well as bf16.  torch's bf16 GEMM, which multiplies high-precision operands, writes bf16 alone.
        """
        if self.weight_dtype is None or (self.wgrad == "mx" and self.path in ("reference", *FP8_ROADS)):
            return dtype
        return self.weight_dtype


def gemm_options(
    a: torch.Tensor,
    out_dtype: torch.dtype,
    name: str,
    wgrad: str,
    mode: str,
    pad_groups: bool,
    weight_dtype: torch.dtype | None = None,
) -> GemmOptions:
    """Options with the GEMM path of that name resolved on A's device; `wgrad` as in Recipe."""
    path = resolve_gemm_path(name, a.device)
    # "fp8" sums in 14 bits between promotions (1e-4 to 6e-4): less than a bf16 result loses, more than float32 was asked for.
    float32_path = "exact" if name == "auto" and path == "fp8" else path
    return GemmOptions(out_dtype, wgrad, mode, path, float32_path, pad_groups, weight_dtype)

"""Baselines and limits of the benchmarks: torch's grouped GEMM, a dense FP8 GEMM, a device copy; and the counts of routed rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from mxep import reference
from mxep.device import available_gemm_paths
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows, RebasedTokens, RebasedWeight


def dense_fp8(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """The product of e4m3 matrices a (R, S) and b (C, S) with one scale each and the fast accumulator; in float32 on a CPU."""
    one = torch.ones((), device=a.device)
    if a.is_cuda:
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    a, b = a.float(), b.float()
    return lambda: a @ b.t()


def copy_of(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """A device copy of random bytes that reads `num_bytes` and writes as many."""
    source = random_bytes(num_bytes, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def random_fp8(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """(rows, columns) e4m3 of normal values."""
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def random_bytes(*shape: int, device: torch.device) -> torch.Tensor:
    """uint8 of that shape: zeros would be copied faster than data."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


MAX_ERROR = 2.0e-3  # relative Frobenius norm of a bf16 result against the exact product of the MX operands


class FP8Functions(NamedTuple):
    """Signatures as in `mxep.ops.grouped_gemm.hopper.rebase_reference` and `mxep.ops.grouped_gemm.reference`."""

    rebase_rows: Callable[..., RebasedRows]
    rebase_weight: Callable[..., RebasedWeight]
    rebase_tokens: Callable[..., RebasedTokens]
    grouped_mm: Callable[..., torch.Tensor]
    wgrad: Callable[..., torch.Tensor]


def fp8_functions(device: torch.device) -> FP8Functions:
    """The kernels, or on a CPU their references. Raises ValueError for a GPU that cannot run them."""
    if device.type == "cuda":
        reason = available_gemm_paths(device)["fp8"]
        if reason is not None:
            raise ValueError(f"the FP8 GEMMs do not run on this GPU: {reason}")
    names = ("hopper.rebase", "hopper.gemm") if device.type == "cuda" else ("hopper.rebase_reference", "reference")
    rebase, products = (importlib.import_module(f"mxep.ops.grouped_gemm.{name}") for name in names)
    return FP8Functions(rebase.rebase_rows, rebase.rebase_weight, rebase.rebase_tokens, products.fp8_grouped_mm, products.fp8_wgrad)


def torch_bf16(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's own grouped GEMM, 2D x 3D or 2D x 2D; on a CPU a loop over groups."""
    if a.is_cuda:
        return torch._grouped_mm(a, b, offs=offs)
    if b.dim() == 3:
        return reference.grouped_mm_hp(a, b.transpose(1, 2), offs, torch.bfloat16)
    return reference.grouped_wgrad_hp(a.t(), b, offs, torch.bfloat16)


_SEED = 7


def even_counts(num_rows: int, num_experts: int) -> torch.Tensor:
    """(E,) int64, as even as whole rows allow.

    >>> even_counts(10, 4).tolist()
    [3, 3, 2, 2]
    """
    counts = torch.full((num_experts,), num_rows // num_experts)
    counts[: num_rows % num_experts] += 1
    return counts


def zipf_places(num_experts: int) -> torch.Tensor:
    """(E,) int64: each expert's k from 1 on, its popularity being 1/k, in an order that a fixed seed shuffles, so that all ranks agree."""
    return 1 + torch.randperm(num_experts, generator=torch.Generator().manual_seed(_SEED))


def zipf_counts(num_rows: int, num_experts: int, granule: int = 1) -> torch.Tensor:
    """(E,) int64 by the popularities 1/k.

    All counts but one are multiples of `granule`.

    >>> sorted(zipf_counts(24, 3).tolist())
    [4, 7, 13]
    """
    weights = zipf_places(num_experts).double() ** -1.0
    ends = (weights.cumsum(0) / weights.sum() * num_rows / granule).round().long() * granule
    ends[-1] = num_rows
    return torch.diff(ends, prepend=ends.new_zeros(1))


def counts_of(routing: str, num_rows: int, num_experts: int, granule: int = 1) -> torch.Tensor:
    """Counts by the routing's name, "balanced" or "zipf"."""
    if routing not in ("balanced", "zipf"):
        raise ValueError(f"routing {routing!r}, want balanced or zipf")
    return even_counts(num_rows, num_experts) if routing == "balanced" else zipf_counts(num_rows, num_experts, granule=granule)

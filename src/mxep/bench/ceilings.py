"""What this machine can do at best: a dense FP8 GEMM and a device copy, the limits beside which figures stand."""

from __future__ import annotations

from collections.abc import Callable

import torch


def dense_fp8(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """One product of e4m3 matrices a (R, S) x b (C, S) with one scale each and the fast accumulator; in float32 on a CPU."""
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
    """uint8 of that shape: zeros would run faster than data does."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

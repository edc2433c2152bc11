"""Experts modules as users write them, for the tests of ParallelStyle and conversion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.grouped_mm.function import _to_mxfp8_then_scaled_grouped_mm as mxfp8_gmm


class StackedExperts(nn.Module):
    """Weights of E SwiGLU experts, stacked; subclasses say how they multiply."""

    def __init__(self, dim: int, hidden: int, num_experts: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.num_experts = num_experts
        for name, shape in (("w1", (hidden, dim)), ("w2", (dim, hidden)), ("w3", (hidden, dim))):
            setattr(self, name, nn.Parameter(torch.randn(num_experts, *shape, generator=generator) * shape[1] ** -0.5))

    def local_weights(self) -> list[Tensor]:
        return [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]


class CallingExperts(StackedExperts):
    """Calls mxep's grouped GEMM itself."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = self.local_weights()
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        h = F.silu(mxfp8_gmm(x, w1.transpose(-2, -1), offs=ends, wgrad_with_hp=True))
        h = h * mxfp8_gmm(x, w3.transpose(-2, -1), offs=ends, wgrad_with_hp=True)
        return mxfp8_gmm(h, w2.transpose(-2, -1), offs=ends, wgrad_with_hp=True).type_as(x)


class TitanExperts(StackedExperts):
    """Calls torch's grouped GEMM in bf16, the way torchtitan's layer does."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = self.local_weights()
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        return run_grouped(w1, w2, w3, x, ends)


def run_grouped(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    h = F.silu(torch._grouped_mm(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=ends))
    h = h * torch._grouped_mm(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=ends)
    return torch._grouped_mm(h, w2.bfloat16().transpose(-2, -1), offs=ends).type_as(x)


class PublicExperts(TitanExperts):
    """The same through the public name."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in self.local_weights())
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        h = F.silu(F.grouped_mm(x, w1, offs=ends)) * F.grouped_mm(x, w3, offs=ends)
        return F.grouped_mm(h, w2, offs=ends)

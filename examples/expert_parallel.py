"""Experts of your own, sharded over ranks and fed through MXFP8: forward, backward, and how far the numbers are from bf16.

    torchrun --nproc-per-node=2 examples/expert_parallel.py

Runs on GPUs (NCCL) or, with none, on the CPU (gloo) with small dimensions.  Two things are yours: an experts module whose weights
are stacked (experts, out, in), and rows sorted by expert with a count for each.  `apply_mxfp8_expert_parallel` does the rest:

    rows (T', D) bf16 | dispatch: MXFP8 all-to-all | permute + pad | your experts | unpermute | combine: bf16 all-to-all
    backward:           bf16 all-to-all              bf16            yours          MXFP8       MXFP8 all-to-all
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mxep import apply_mxfp8_expert_parallel, close_transports, to_mxfp8_then_scaled_grouped_mm

# dim, hidden_dim, num_experts, rows per rank
GPU_SIZES = (7168, 2048, 32, 16 * 8192)
CPU_SIZES = (64, 128, 8, 512)

# dispatch hands the GEMMs rows that are MXFP8 already, so the weight gradient takes them as they are ("wgrad_with_hp").
mxfp8_grouped_mm = partial(to_mxfp8_then_scaled_grouped_mm, wgrad_with_hp=True)


class GroupedExperts(nn.Module):
    """SwiGLU experts with stacked weights; `grouped_mm(rows, weight^T, offs=ends)` multiplies each expert's rows by its weight."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, grouped_mm: Callable[..., Tensor]) -> None:
        super().__init__()
        self.grouped_mm = grouped_mm
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """x (P, D): an MXTensor in the MXFP8 pipeline; num_tokens_per_expert (L,): rows of this rank's experts, with padding."""
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        gate = self.grouped_mm(x, w1.transpose(-2, -1), offs=ends)
        up = self.grouped_mm(x, w3.transpose(-2, -1), offs=ends)
        return self.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=ends)


class MoELayer(nn.Module):
    """A MoE layer without its router: rows come sorted by expert."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, grouped_mm: Callable[..., Tensor]) -> None:
        super().__init__()
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, grouped_mm)

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return self.experts(rows, num_tokens_per_expert)


def make_layer(device: torch.device, sizes: tuple[int, int, int, int], grouped_mm: Callable[..., Tensor]) -> MoELayer:
    """A bf16 layer whose weights depend on the seed alone, so that two layers have the same weights."""
    dim, hidden_dim, num_experts, _ = sizes
    layer = MoELayer(dim, hidden_dim, num_experts, grouped_mm).to(device).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
    return layer


def run(layer: MoELayer, rows: Tensor, counts: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """One forward and backward: output, gradient of the rows, gradients of this rank's experts."""
    rows = rows.clone().requires_grad_()
    output = layer(rows, counts)
    output.backward(grad)
    return {"output": output.detach(), "dx": rows.grad, **{f"d{name}": w.grad.to_local() for name, w in layer.experts.named_parameters()}}


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """20 log10(|reference| / |reference - value|)."""
    reference, value = reference.float(), value.float()
    return (20 * torch.log10(reference.norm() / (reference - value).norm())).item()


def main() -> None:
    gpu = torch.cuda.is_available()
    sizes = GPU_SIZES if gpu else CPU_SIZES
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    ep_mesh = DeviceMesh(device.type, list(range(world)), mesh_dim_names=("ep",))

    dim, _, num_experts, num_rows = sizes
    generator = torch.Generator(device).manual_seed(1 + rank)
    rows, grad = (torch.randn(num_rows, dim, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    choices = torch.randint(num_experts, (num_rows,), device=device, generator=generator)  # what a router would choose
    counts = torch.bincount(choices, minlength=num_experts)  # rows for each expert, the rows sorted by it

    mxfp8 = make_layer(device, sizes, mxfp8_grouped_mm)
    apply_mxfp8_expert_parallel(mxfp8, ep_mesh)
    bf16 = make_layer(device, sizes, F.grouped_mm)
    apply_mxfp8_expert_parallel(bf16, ep_mesh, recipe="bf16")  # the same exchanges without quantisation

    ours, reference = run(mxfp8, rows, counts, grad), run(bf16, rows, counts, grad)
    quality = ", ".join(f"{name} {sqnr_db(reference[name], value):.1f} dB" for name, value in ours.items())
    print(f"rank {rank} of {world} on {device}, {num_rows} rows of width {dim}; SQNR against the bf16 pipeline: {quality}", flush=True)
    close_transports()  # they may hold memory of the group's other GPUs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # past Python's own end: DTensor's caches keep the group, and gloo's threads may abort a process that ends around them

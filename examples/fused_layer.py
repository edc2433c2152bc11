"""A whole MoE layer in one call, router to output, its experts spread over the ranks: forward, backward, and how far it is from bf16.

    torchrun --nproc-per-node=2 examples/fused_layer.py

Runs on GPUs (NCCL) or, with none, on the CPU (gloo) with small dimensions.  Every rank brings its own tokens and gets their outputs back
(DP -> EP -> DP), holds its own slice of the experts, and the same router as every other rank:

    x (T, D) | route | dispatch: a token once to each rank that it needs, MXFP8 | experts | combine: one sum for each token and rank | y
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

import mxep
from mxep.moe import saved_bytes

# tokens of all ranks, dim, hidden_dim, num_experts, top_k
GPU_SIZES = (131072, 4096, 1536, 128, 8)
CPU_SIZES = (512, 128, 64, 8, 2)


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """20 log10(|reference| / |reference - value|)."""
    reference, value = reference.float(), value.float()
    return (20 * torch.log10(reference.norm() / (reference - value).norm())).item()


def main() -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    all_tokens, dim, hidden_dim, num_experts, top_k = GPU_SIZES if gpu else CPU_SIZES
    local = num_experts // world  # experts on this rank

    # The whole layer once, the same on every rank, then this rank's slice of the experts.
    moe = mxep.MoE(mxep.MoEConfig(dim, hidden_dim, num_experts, top_k)).to(device, torch.bfloat16)
    moe.init_weights(0.02, torch.Generator(device).manual_seed(0))
    for parameter in moe.parameters():
        dist.broadcast(parameter.data, src=0)
    mine = slice(rank * local, (rank + 1) * local)
    gate, up, down = (w.detach()[mine] for w in (moe.experts.w1, moe.experts.w3, moe.experts.w2))
    w1 = torch.stack((gate, up), dim=2).flatten(1, 2)  # (L, 2H, D), gate in even rows and up in odd ones
    router_weight = moe.router.gate.weight.detach()  # (E, D), replicated

    # Which rows are sent: measured here. Or set it with mxep.RuntimeEPConfig(dispatch="rank_dedup"), or read it with .load("ep.json").
    tokens = all_tokens // world
    config = mxep.NetworkProfiler(tokens, dim, top_k, torch.bfloat16, num_experts=num_experts).profile()

    generator = torch.Generator(device).manual_seed(1 + rank)
    x, grad = (torch.randn(tokens, dim, device=device, generator=generator).bfloat16() for _ in range(2))

    def run(recipe: str) -> tuple[dict[str, Tensor], dict[str, int]]:
        leaves = {
            name: value.clone().requires_grad_() for name, value in (("dx", x), ("drouter", router_weight), ("dw1", w1), ("dw2", down))
        }
        x_local, router, first, second = leaves.values()
        y = mxep.fused_moe(
            x_local, router, first, None, second, None, top_k, num_experts, config, "swiglu", recipe=recipe, layout="interleaved"
        )
        kept = saved_bytes(y)
        y.backward(grad)
        dist.all_reduce(router.grad)  # the router is replicated, and each rank has the sum over its own tokens
        return {"output": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}, kept

    ours, kept = run("mxfp8_wgrad_with_hp")
    reference, _ = run("bf16")
    quality = ", ".join(f"{name} {sqnr_db(reference[name], value):.1f} dB" for name, value in ours.items())
    memory = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in kept.items())
    print(f"rank {rank} of {world} on {device}, {tokens} tokens of width {dim}, dispatch {config.dispatch}, combine {config.combine}")
    print(f"SQNR against bf16: {quality}; kept for backward: {memory}", flush=True)
    mxep.close_transports()  # they may hold memory of the group's other GPUs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

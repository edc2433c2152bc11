"""MXFP8 expert parallelism in a model of your own: its weights, its router, its training loop, and ten lines of mxep.

    torchrun --nproc-per-node=2 examples/own_model.py

Runs on GPUs (NCCL) or, with none, on the CPU (gloo).  The model below knows nothing of mxep.  It has what most MoE models have: experts
with stacked weights (experts, out, in) that multiply rows sorted by expert with torch's grouped GEMM, given the number of rows of each
expert.  `with_mxep` shards the experts over the ranks, and exchanges and multiplies rows in MXFP8.  The same model in bf16 trains next to
it, on the same tokens and from the same weights.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import mxep

DIM, HIDDEN, NUM_EXPERTS, TOP_K, TOKENS, STEPS = 64, 128, 8, 2, 256, 20


# ---- your model, as it is ----


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, DIM) * DIM**-0.5)
        self.w2 = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5)

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        # The one line that sharding asks for: a rank multiplies by its own experts.
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        h = F.silu(F.grouped_mm(rows.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=ends))
        return F.grouped_mm(h, w2.bfloat16().transpose(-2, -1), offs=ends)


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K)  # (T, C)
        order = chosen.flatten().argsort(stable=True)  # the rows, sorted by expert
        counts = chosen.flatten().bincount(minlength=NUM_EXPERTS)
        out = self.experts(x[order // TOP_K].bfloat16(), counts)[order.argsort()]  # and back into the tokens' order
        return x + (out.view(-1, TOP_K, DIM) * scores[..., None]).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(MoELayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


# ---- what mxep adds ----


def with_mxep(model: Model, ep_mesh: DeviceMesh, recipe: str) -> None:
    """Experts in this precision, spread over the mesh, in place; parameters keep their names and values."""
    mxep.convert_experts(model, "layers.*.experts", recipe)  # grouped GEMMs inside of them
    for layer in model.layers:
        mxep.apply_mxfp8_expert_parallel(layer, ep_mesh, recipe)  # shards them; dispatch before, combine after


def sum_replicated_gradients(model: nn.Module) -> None:
    """An expert's gradient is complete on its rank; what every rank has whole is summed over the ranks, here or by DDP or FSDP."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)


# ---- your training loop ----


def train(recipe: str, weights: dict[str, Tensor], ep_mesh: DeviceMesh) -> list[float]:
    """Losses of all steps, mean over the ranks."""
    device = torch.device(ep_mesh.device_type)
    model = Model().to(device)
    model.load_state_dict(weights)  # before the experts are sharded: a checkpoint of the whole model
    with_mxep(model, ep_mesh, recipe)
    assert list(model.state_dict()) == list(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # one by one: some are DTensors
    generator = torch.Generator(device).manual_seed(1 + ep_mesh.get_local_rank())
    tokens = torch.randn(TOKENS, DIM, device=device, generator=generator)  # every rank its own
    losses = []
    for _ in range(STEPS):
        loss = (model(tokens) - tokens.roll(1, dims=-1)).square().mean() / ep_mesh.size()  # gradients are sums over the ranks
        loss.backward()
        sum_replicated_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(shown := loss.detach().clone())
        losses.append(shown.item())
    return losses


def main() -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ep_mesh = DeviceMesh("cuda" if gpu else "cpu", list(range(world)), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    weights = Model().state_dict()
    mxfp8, bf16 = (train(recipe, weights, ep_mesh) for recipe in ("mxfp8_wgrad_with_hp", "bf16"))
    print(f"rank {rank} of {world}: loss {mxfp8[0]:.4f} to {mxfp8[-1]:.4f} in MXFP8, {bf16[0]:.4f} to {bf16[-1]:.4f} in bf16", flush=True)
    mxep.close_transports()  # they may hold memory of the group's other GPUs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # past Python's own end: DTensor's caches keep the group, and gloo's threads may abort a process that ends around them

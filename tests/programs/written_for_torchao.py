"""A program as a user of torchao's blocks would write it.  test_examples.py runs it with only its import lines changed.

Two ranks under torchrun; every name that the migration table lists is imported and used.
"""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchao.prototype.moe_training.ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from torchao.prototype.moe_training.ep.kernels import generate_permute_indices
from torchao.prototype.moe_training.ep.permute import permute_and_pad
from torchao.prototype.moe_training.kernels.mxfp8.comms import ToMXFP8AllToAllVDequant, to_mxfp8_a2a_dequant
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm as grouped_mm_by_its_new_name
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
from torchao.quantization.quantize_.common import KernelPreference

DIM, HIDDEN, EXPERTS, ROWS = 7168, 2048, 16, 131072


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, DIM, HIDDEN))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM))

    def forward(self, x, num_tokens_per_expert):
        from torchao.prototype.moe_training.scaled_grouped_mm import (
            _to_mxfp8_then_scaled_grouped_mm as mxfp8_gmm,
        )

        assert isinstance(x, MXTensor)
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        options = dict(offs=offsets, wgrad_with_hp=True, kernel_preference=KernelPreference.AUTO)
        hidden = F.silu(mxfp8_gmm(x, w1.transpose(-2, -1), **options))
        hidden = hidden * mxfp8_gmm(x, w3.transpose(-2, -1), scale_calculation_mode=ScaleCalculationMode.RCEIL, **options)
        return grouped_mm_by_its_new_name(hidden, w2.transpose(-2, -1), **options).type_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, rows, counts):
        return self.experts(rows, counts)


class UsersExpertParallel(ParallelStyle):
    """The user's own style, from the blocks."""

    def _partition_fn(self, name, mod, device_mesh):
        for param_name, param in mod.named_parameters(recurse=False):
            mod.register_parameter(param_name, nn.Parameter(distribute_tensor(param, device_mesh, [Shard(0)])))

    def _token_dispatch(self, mod, inputs, device_mesh):
        rows, counts = inputs
        ep_degree = device_mesh.shape[0]
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, group=device_mesh.get_group())
            received = torch.ops._c10d_functional.wait_tensor(received)
            self.input_splits = counts.view(ep_degree, -1).sum(dim=1).to(torch.device("cpu")).tolist()
            self.output_splits = received.view(ep_degree, -1).sum(dim=1).to(torch.device("cpu")).tolist()
        rows = a2a_dispatch_mxfp8_fwd_hp_bwd(
            rows,
            output_splits=self.output_splits,
            input_splits=self.input_splits,
            group_name=device_mesh.get_group().group_name,
        )
        self.shape, rows, self.indices, padded_counts, _ = permute_mxfp8_fwd_hp_bwd(rows, received, ep_degree, counts.shape[0] // ep_degree)
        return rows, padded_counts

    def _token_combine(self, mod, rows, device_mesh):
        rows = unpermute_hp_fwd_mxfp8_bwd(rows, self.indices, self.shape)
        return a2a_combine_hp_fwd_mxfp8_bwd(
            rows,
            output_splits=self.input_splits,
            input_splits=self.output_splits,
            group_name=device_mesh.get_group().group_name,
        )

    def _apply(self, module, device_mesh):
        return distribute_module(module, device_mesh, self._partition_fn, self._token_dispatch, self._token_combine)


def sqnr(reference, value):
    return (20 * torch.log10(reference.float().norm() / (reference.float() - value.float()).norm())).item()


def main():
    dist.init_process_group(backend="nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda")
    torch.manual_seed(rank)
    mesh = DeviceMesh("cuda", list(range(world)), mesh_dim_names=("ep",))
    layer = Layer()
    for weight in layer.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    layer = layer.to(device).to(torch.bfloat16)
    parallelize_module(module=layer.experts, device_mesh=mesh, parallelize_plan=UsersExpertParallel())

    rows = torch.randn(ROWS, DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
    counts = torch.full((EXPERTS,), ROWS // EXPERTS, device=device, dtype=torch.int64)
    output = layer(rows, counts)
    output.backward(torch.randn_like(output))
    w1, w2, w3 = (w.full_tensor().float() for w in layer.experts.parameters())
    for expert in (0, EXPERTS - 1):
        mine = slice(expert * ROWS // EXPERTS, (expert + 1) * ROWS // EXPERTS)
        x = rows[mine].detach().float()
        expected = (F.silu(x @ w1[expert].t()) * (x @ w3[expert].t())) @ w2[expert].t()
        assert sqnr(expected, output[mine].detach()) > 22, "output"
    assert rows.grad.dtype == torch.bfloat16
    assert rows.grad.shape == rows.shape
    assert all(isinstance(w.grad, DTensor) and w.grad.to_local().isfinite().all() for w in layer.experts.parameters())

    # The rest of the table.
    splits = [ROWS // world] * world
    there = to_mxfp8_a2a_dequant(rows.detach(), splits, splits, mesh.get_group())
    assert torch.equal(there, ToMXFP8AllToAllVDequant.apply(rows.detach(), splits, splits, mesh.get_group()))
    shape, padded, indices, padded_counts, ends = permute_and_pad(there, counts, world, EXPERTS // world, 32)
    assert torch.equal(unpermute_hp_fwd_mxfp8_bwd(padded, indices, shape), there)
    again, sizes, ends_again = generate_permute_indices(counts, EXPERTS // world, world, padded.shape[0], 32)
    assert torch.equal(again.int(), indices.int())
    assert torch.equal(sizes.int(), padded_counts.int())
    assert torch.equal(ends_again.int(), ends.int())
    scale, qdata = to_mx(rows.detach(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    mx = MXTensor.to_mx(rows.detach(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(mx.qdata.view(torch.uint8), qdata.view(torch.uint8))
    assert torch.equal(mx.scale.view(torch.uint8), scale.view(torch.uint8))
    assert sqnr(rows.detach(), mx.dequantize(torch.float32)) > 30
    dist.destroy_process_group()
    print(f"rank {rank} is done")


if __name__ == "__main__":
    main()

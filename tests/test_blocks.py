"""Recomputation and torch.compile of blocks: gradients bit for bit those of the plain block, and operators that run twice."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from tests.truth import sent_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mxep.moe import FusedMoE, MoE, MoEConfig
from mxep.parallel import Recompute, apply_mxfp8_expert_parallel, compile_blocks, recompute_blocks

D = 32


class Block(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv = nn.RMSNorm(D), nn.Linear(D, 3 * D, bias=False)
        self.moe = MoE(MoEConfig(D, hidden, 4, 2, num_shared_experts=1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.moe(x)


def gradients(block: Block, counting: bool = True) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of everything, and how often backward called which operator (compiled code would run eagerly)."""
    x = torch.randn(2, 24, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = block(x)
    calls = OperatorCalls()
    with calls if counting else contextlib.nullcontext():
        out.square().sum().backward()
    assert block.moe.tokens_per_expert.sum() == 2 * 24 * 2, "the load is counted once"
    return [x.grad, *(p.grad for p in block.parameters())], calls.counts


def test_operators_that_recomputation_runs_again() -> None:
    want, plain = gradients(Block())
    calls = {}
    for mode in ("selective", "full"):
        block = Block()
        recompute_blocks([block], mode)
        found, calls[mode] = gradients(block)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), mode
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (plain[attention], calls["selective"][attention], calls["full"][attention]) == (0, 0, 1)
    assert plain["mm"] == calls["selective"]["mm"] < calls["full"]["mm"]
    assert plain["grouped_mm_mx"] < calls["selective"]["grouped_mm_mx"] == calls["full"]["grouped_mm_mx"]


def exchanged(mode: str, fused: bool, world: int) -> tuple[list[int], list[int], list[Tensor]]:
    """Bytes of each exchange of a block, forward and backward, and the gradients."""
    block = Block()
    if fused:
        block.moe = FusedMoE.of(block.moe)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    apply_mxfp8_expert_parallel(block.moe, mesh)
    block.moe.group = mesh.get_group()
    recompute_blocks([block], mode)  # type: ignore[arg-type]
    x = torch.randn(2, 24, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with sent_bytes() as forward:
        out = block(x)
    with sent_bytes() as backward:
        out.square().sum().backward()
    return forward, backward, [x.grad, *(p.grad for p in block.parameters())]


def check_exchanges(rank: int, world: int) -> None:
    """Exchanges that recomputation repeats. Full: all but the outputs of a fused layer. Selective: the blocks' E counts of rows, which
    their plan reads on the host. keep_moe: none."""
    for fused, counts in ((False, [4 * 8]), (True, [])):
        forward, backward, want = exchanged("none", fused, world)
        assert len(forward) >= 3, "counts, tokens and outputs"
        assert len(backward) >= 2, "the gradients of both"
        again = {"full": forward[: -1 if fused else None], "selective": counts, "keep_moe": []}
        for mode, first in again.items():
            *calls, found = exchanged(mode, fused, world)
            assert calls == [forward, first + backward], f"{mode}, fused={fused}"
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), f"{mode}, fused={fused}"


def test_exchanges_that_recomputation_repeats() -> None:
    run_ranks(check_exchanges, 2)


@pytest.mark.parametrize(("mode", "fused"), [("full", False), ("full", True), ("keep_moe", True)])
def test_compiled_around_an_eager_moe(mode: Recompute, fused: bool) -> None:
    block, eager = Block(), Block()
    for each in (block, eager) if fused else ():
        each.moe = FusedMoE.of(each.moe)
    want, _ = gradients(eager)
    compile_blocks([block], backend="aot_eager")
    recompute_blocks([block], mode)
    found, _ = gradients(block, counting=False)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, want, strict=True))


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode='some', want 'none', 'keep_moe', 'selective' or 'full'"):
        recompute_blocks([], "some")  # type: ignore[arg-type]

"""Two GPUs over NCCL and over symmetric memory: accuracy of the pipeline, compiled too, and a clear error on every rank when the ranks
disagree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankError, run_ranks

import mxep
from mxep.bench import accuracy
from mxep.comm import TRANSPORTS, set_transport
from mxep.ep.exchange_plan import ExchangePlan
from mxep.recipe import resolve_recipe

pytestmark = pytest.mark.multi_gpu
BACKEND = "cpu:gloo,cuda:nccl"


def _accuracy(rank: int, world: int, transport: str) -> dict[str, dict[str, float]]:
    set_transport(transport)
    return {routing: accuracy.measure(routing, 4096, 2048, 1408, 8, torch.device("cuda", rank)) for routing in accuracy.ROUTINGS}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_accuracy(transport: str) -> None:
    for figures in run_ranks(_accuracy, 2, transport, backend=BACKEND, timeout=240):
        for routing, values in figures.items():
            for name, least in accuracy.LEAST_DB.items():
                assert values[name] >= least, (routing, name, values)


def _compiled(rank: int, world: int, transport: str) -> None:
    set_transport(transport)
    device = torch.device("cuda", rank)
    counts = accuracy.routing_counts("random", rank, 4 * world, 512).to(device)
    plan = ExchangePlan.from_counts(counts, dist.group.WORLD)
    x = torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 128, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    recipe = resolve_recipe(None)

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return accuracy.five_blocks(x, w, plan, recipe)

    results = []
    for f in (chain, torch.compile(chain, fullgraph=True)):
        x.grad = w.grad = None
        out = f(x, w)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, w.grad])
    for eager, compiled in zip(*results, strict=True):
        assert ((eager - compiled).norm() / eager.norm()).item() < 1e-3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_compiled(transport: str) -> None:
    run_ranks(_compiled, 2, transport, backend=BACKEND, timeout=240)


def _disagree(rank: int, world: int) -> str:
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    splits = [32, 32] if rank == 0 else [16, 48]
    try:
        mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, [32, 32], splits)
    except ValueError as error:
        return str(error)
    return "no error"


def test_splits_that_differ_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CHECK", "1")
    for text in run_ranks(_disagree, 2, backend=BACKEND):
        assert "rank 1 sends 16 rows to rank 0, whose output_splits await 32" in text


def _uneven(rank: int, world: int) -> None:
    """Different T per rank, and one rank receives nothing: rows return to the tokens' ranks unchanged, and so do gradients."""
    table = [[5, 0], [90, 0]]
    sent, received = table[rank], [row[rank] for row in table]
    x = torch.randn(sum(sent), 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mx = mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, received, sent)
    combined = mxep.a2a_combine_hp_fwd_mxfp8_bwd(mx.dequantize(), sent, received)
    assert torch.equal(combined, mxep.quantize_mx(x.detach()).dequantize())
    combined.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_uneven_and_empty_splits() -> None:
    run_ranks(_uneven, 2, backend=BACKEND)


def test_a_failing_rank_is_reported() -> None:
    with pytest.raises(RankError, match="no_such_attribute"):
        run_ranks(_fail, 2, backend=BACKEND)


def _fail(rank: int, world: int) -> None:
    if rank == 1:
        _ = dist.no_such_attribute
    dist.barrier()

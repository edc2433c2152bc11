"""Accuracy of the five blocks against the same pipeline in bf16: signal to quantisation noise of out, dx and dW.

Run it with torchrun, on GPUs or, where there are none, on gloo:

    torchrun --nproc-per-node=2 -m mxep.bench.accuracy --record

It fails when a figure is below what torchao's own tests ask for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mxep.bench.records import RESULTS, device_name, origin, write_records
from mxep.comm import set_transport
from mxep.device import default_backend, default_device_type
from mxep.ep.journey import combine, dispatch, permute, unpermute
from mxep.ep.plan import ExchangePlan
from mxep.grouped_mm import expert_mm
from mxep.recipe import Recipe, resolve_recipe

LEAST_DB = {"out": 28.0, "dx": 26.0, "dw": 25.0}
ROUTINGS = ("balanced", "random", "starved")
_CHUNK = 8192  # rows


def routing_counts(routing: str, rank: int, num_experts: int, rows: int) -> torch.Tensor:
    """Rows of one rank for every expert, (E,) int64: even; random; or all to a quarter of the experts.

    Raises:
        ValueError: unknown routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"accuracy: routing {routing!r}, want one of {', '.join(ROUTINGS)}")
    generator = torch.Generator().manual_seed(17 + rank)
    weights = torch.ones(num_experts) if routing == "balanced" else torch.rand(num_experts, generator=generator)
    if routing == "starved":
        weights[num_experts // 4 :] = 0
    return torch.bincount(
        torch.arange(rows) % num_experts if routing == "balanced" else torch.multinomial(weights, rows, True, generator=generator),
        minlength=num_experts,
    )


def pipeline(x: torch.Tensor, weight: torch.Tensor, plan: ExchangePlan, recipe: Recipe) -> torch.Tensor:
    """The five blocks: x (T', D), weight (L, N, D) -> (T', N)."""
    permuted = permute(dispatch(x, plan, recipe), plan, recipe)
    out = expert_mm(permuted.rows, weight, permuted.offsets, recipe)
    return combine(unpermute(out, permuted), plan, recipe)


def sqnr_db(reference: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """20 log10(|ref| / |ref - value|) over all ranks; None is this rank alone."""
    sums = torch.zeros(2, dtype=torch.float64, device=reference.device)
    for want, got in zip(reference.split(_CHUNK), value.split(_CHUNK), strict=True):  # double copies of everything would not fit
        sums += torch.stack([want.double().square().sum(), (want.double() - got.double()).square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return (10 * torch.log10(sums[0] / sums[1])).item()


def measure(routing: str, rows: int, D: int, N: int, L: int, device: torch.device) -> dict[str, float]:
    """dB of out, dx and dW of the MXFP8 pipeline against bf16, one routing, same data and weights."""
    group = dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    counts = routing_counts(routing, rank, L * world, rows).to(device)
    plan = ExchangePlan.from_counts(counts, group)
    x, weight = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in ((rows, D), (L, N, D)))
    grad = torch.randn(rows, N, generator=generator).to(device, torch.bfloat16)
    results = []
    for name in ("hp", "mxfp8_wgrad_with_hp"):
        leaves = [value.clone().requires_grad_() for value in (x, weight)]
        out = pipeline(leaves[0], leaves[1], plan, resolve_recipe(name))
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return {name: sqnr_db(a, b, group) for name, a, b in zip(LEAST_DB, *results, strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every routing, print a table on rank 0, write the record when asked; returns 1 when a figure is too low."""
    parser = argparse.ArgumentParser(prog="accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS}/accuracy-<device>-<world>.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    options = parser.parse_args(argv)
    device = torch.device(default_device_type())
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(default_backend(device.type))
    set_transport("collective", device=device)  # the bits are the same over any
    shape = {"T": 16384, "D": 7168, "N": 2048, "L": 8} if device.type == "cuda" else {"T": 1024, "D": 512, "N": 256, "L": 8}
    records, lowest = [], 0
    for routing in ROUTINGS:
        figures = measure(routing, shape["T"], shape["D"], shape["N"], shape["L"], device)
        lowest += sum(figures[name] < least for name, least in LEAST_DB.items())
        records.append(
            {
                "benchmark": "accuracy",
                "device": device_name(device),
                "world_size": dist.get_world_size(),
                "shape": shape,
                "routing": routing,
                "sqnr_db": {name: round(value, 2) for name, value in figures.items()},
                "limit": {f"{name}_at_least_db": least for name, least in LEAST_DB.items()},
                **origin(f"torchrun --nproc-per-node={dist.get_world_size()} -m mxep.bench.accuracy --record"),
            }
        )
        if dist.get_rank() == 0:
            print(f"{routing:9}", *(f"{name} {value:6.2f} dB (at least {LEAST_DB[name]:.0f})" for name, value in figures.items()), sep="  ")
    if options.record and dist.get_rank() == 0 and not lowest:
        print("wrote", write_records("accuracy", device_name(device), dist.get_world_size(), records, options.out))
    dist.destroy_process_group()
    return 1 if lowest else 0


if __name__ == "__main__":
    sys.exit(main())

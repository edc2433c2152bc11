"""Accuracy of the five blocks against the same pipeline in bf16: signal to quantisation noise of out, dx and dW.

Run it with torchrun, on GPUs or, without any, on gloo:

    torchrun --nproc-per-node=2 -m mxep.bench.accuracy --record

It fails if a figure is below what torchao's own tests require.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mxep.bench.ranks import rank_group
from mxep.bench.records import RESULTS, Record, device_name, origin, write_records
from mxep.comm import set_transport
from mxep.device import default_device_type
from mxep.ep.blocks import combine, dispatch, permute, unpermute
from mxep.ep.exchange_plan import ExchangePlan
from mxep.grouped_mm.function import expert_mm
from mxep.mx.weight_cache import CachedWeight
from mxep.recipe import Recipe, resolve_recipe

LEAST_DB = {"out": 28.0, "dx": 26.0, "dw": 25.0}
ROUTINGS = ("balanced", "random", "starved")
_CHUNK = 1 << 26  # values


def routing_counts(routing: str, rank: int, num_experts: int, rows: int) -> torch.Tensor:
    """Rows of one rank for every expert, (E,) int64: even, random, or all for a quarter of the experts.

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


def five_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: ExchangePlan,
    recipe: Recipe,
    kept: CachedWeight | None = None,
    after_stage: Callable[[torch.Tensor], object] = lambda rows: None,
) -> torch.Tensor:
    """x (T', D), weight (L, N, D) -> (T', N).

    Args:
        kept: quantised forms of the weight.  after_stage: gets the output of each of the five stages.
    """
    received = dispatch(x, plan, recipe)
    after_stage(received)
    permuted = permute(received, plan, recipe)
    after_stage(permuted.rows)
    out = expert_mm(permuted.rows, weight, permuted.offsets, recipe, kept)
    after_stage(out)
    out = unpermute(out, permuted)
    after_stage(out)
    out = combine(out, plan, recipe)
    after_stage(out)
    return out


def sqnr_db(reference: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """20 log10(|ref| / |ref - value|) over all ranks of `group`; None: this rank alone."""
    sums = torch.zeros(2, dtype=torch.float64, device=reference.device)
    flat = reference.reshape(-1), value.reshape(-1)
    for want, got in zip(*(values.split(_CHUNK) for values in flat), strict=True):  # float64 copies of everything would not fit
        sums += torch.stack([want.double().square().sum(), (want.double() - got.double()).square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return (10 * torch.log10(sums[0] / sums[1])).item()


def db_problem(arm: str, db: Mapping[str, float], least: Mapping[str, float], baseline: str) -> str | None:
    """Describes the first result of an arm that is too far from the baseline's, None if there is none."""
    for name, value in db.items():
        if not value >= least[name]:
            return f"{arm}: {name} at {value:.1f} dB from {baseline}, want at least {least[name]:.0f} dB"
    return None


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
        out = five_blocks(leaves[0], leaves[1], plan, resolve_recipe(name))
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return {name: sqnr_db(a, b, group) for name, a, b in zip(LEAST_DB, *results, strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every routing, prints a table on rank 0, writes the record with --record; returns 1 if a figure is too low."""
    parser = argparse.ArgumentParser(prog="accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS}/accuracy-<device>-<world>.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    options = parser.parse_args(argv)
    with rank_group(True, default_device_type()) as (device, group):
        set_transport("collective", group, device=device)  # the bits are the same over any
        lowest, records = _measure_all(device)
        if options.record and dist.get_rank() == 0 and not lowest:
            print("wrote", write_records("accuracy", device_name(device), dist.get_world_size(), records, options.out))
    return 1 if lowest else 0


def _measure_all(device: torch.device) -> tuple[int, list[Record]]:
    """How many figures are too low, and a record for each routing; rank 0 prints the figures."""
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
    return lowest, records


if __name__ == "__main__":
    sys.exit(main())

"""`mxep bench accuracy`: the five blocks against the same pipeline in bf16, signal to quantisation noise of out, dx and dW.

It fails if a figure is below what torchao's own tests require, and times nothing.  Also what other benchmarks compare results with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from mxep.bench.registry import Case, Setting
from mxep.comm import set_transport
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


def gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of leaves, all of which have one."""
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves)
    return found


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
        results.append([out.detach(), *gradients(leaves)])
    return {name: sqnr_db(a, b, group) for name, a, b in zip(LEAST_DB, *results, strict=True)}


def cases(setting: Setting) -> Iterator[Case]:
    """Every routing."""
    set_transport("collective", setting.group, device=setting.device)  # the bits are the same over any
    T, D, N, L = (1024, 512, 256, 8) if setting.tiny else (16384, 7168, 2048, 8)
    for routing in ROUTINGS:
        db = measure(routing, T, D, N, L, setting.device)
        yield Case(
            ", ".join([routing, *(f"{name} {value:.2f} dB" for name, value in db.items())]),
            {"T": T, "D": D, "N": N, "L": L},
            {},
            partial(db_problem, "mxfp8", db, LEAST_DB, "bf16"),
            lambda ms: {},
            {"routing": routing, "sqnr_db": {name: round(value, 2) for name, value in db.items()}},
            after=lambda: {"limit": {f"{name}_at_least_db": least for name, least in LEAST_DB.items()}},
        )

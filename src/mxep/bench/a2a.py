"""`mxep bench a2a`: rows to their ranks as MXFP8, quantised before and where it is asked dequantised behind, against the same rows in bf16.

Arms: `bf16` and `mxfp8` (`to_mxfp8_a2a_dequant`) forward and backward; `dispatch`, which hands the MX rows over as they came, by rank;
`dispatch_placed`, which ends with them in their experts' padded places, with counts known to the host; `home`, dispatch's backward, bf16
rows back to their ranks; and what these are made of, each alone: `quantize`, `exchange` of the packed records, `dequantize`, `copy`, a
device copy of the bytes that quantising and dequantising move, and where ranks share memory `peer_copy`, plain copies by copy engines of
what leaves a rank on its way home.  `bf16` is the exchange alone: its rows end as they came, by rank, with no permute behind it.

The limit of `dispatch` and of `dispatch_placed` is the exchange of their records alone, that of `home` the plain copies, that of `mxfp8`
the exchange or the copy, whichever takes longer: quantising, the wire and dequantising run beside each other.  Over symmetric memory the
hosts meet in `exchange`, and not in `mxfp8`, which may be faster than that limit where rows are few.  Every rank sends as many rows to
every expert, and every host is ahead of its GPU, as in a training step.  `bf16` goes over torch.distributed, and so does the rest unless
the ranks can share memory: then `mxfp8`, both dispatches, `exchange` and `home` go over symmetric memory (the record's `mxfp8_over` says).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from mxep.bench.ceilings import copy_of
from mxep.bench.ranks import share_memory
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.routing import even_counts
from mxep.bench.timing import Timing
from mxep.comm import group_name_of, transport_of
from mxep.comm.plain_copies import plain_copies
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep.dequant import to_mxfp8_a2a_dequant
from mxep.ep.dispatch import ExchangeHP, exchange_hp, exchange_mx
from mxep.ep.permute import permute_mxfp8_fwd_hp_bwd
from mxep.ep.placed import dispatch_placed
from mxep.ep.plan import ExchangePlan
from mxep.mx.tensor import MXTensor
from mxep.recipe import DEFAULT_RECIPE, RECIPES
from mxep.shapes import MX_BLOCK

BATCHES, SEQUENCE, WIDTH = (1, 2, 4, 8, 16), 8192, 5120  # the sizes that users of such an exchange report
DISPATCH = (131072, 7168)
EXPERTS = 8  # a rank's
LARGEST_TARGET, DISPATCH_TARGET, HOME_TARGET = 1.5, 1.9, 0.95  # of the largest batch, of `DISPATCH` into its places and home
_MODE, _RECIPE = "rceil", RECIPES[DEFAULT_RECIPE]  # whose scale rule it is


class Exchange:
    """Rows (T, D) bf16 of this rank and a gradient, and how an arm moves them."""

    def __init__(self, setting: Setting, T: int, D: int, shared: str | None = None) -> None:
        generator = torch.Generator(setting.device).manual_seed(setting.rank)
        normal = partial(torch.randn, device=setting.device, dtype=torch.bfloat16, generator=generator)
        counts = even_counts(T, EXPERTS * setting.world).view(setting.world, EXPERTS)
        self.splits = counts.sum(1).tolist()
        back = [self.splits[setting.rank]] * setting.world  # every rank sends as this one does
        self.there = (back, self.splits, group_name_of("a2a", setting.group) if setting.group is not None else "")
        self.best = self.there if shared is None else (*self.there[:2], shared)
        received = counts[setting.rank].repeat(setting.world)
        self.plan = ExchangePlan(self.best[2], setting.world, EXPERTS, self.splits, back, received)
        self.x: torch.Tensor = normal(T, D).requires_grad_()
        self.g: torch.Tensor = normal(sum(back), D)
        self.records = torch.ops.mxep.quantize_packed(self.x.detach(), _MODE)
        self.out: torch.Tensor | None = None

    def forward(self, move: Callable[..., torch.Tensor]) -> None:
        self.x.grad = self.out = None
        self.out = move(self.x, *(self.best if move is to_mxfp8_a2a_dequant else self.there))

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.g)

    def both(self, move: Callable[..., torch.Tensor]) -> dict[str, Callable[[], object]]:
        return {"forward": partial(self.forward, move), "backward": self.backward}

    def arms(self, device: torch.device) -> dict[str, dict[str, Callable[[], object]]]:
        T, D = self.x.shape
        rows = self.x.detach()
        qdata = self.records[:, :D].view(torch.float8_e4m3fn)
        scale = self.records[:, D : D + D // MX_BLOCK].view(torch.float8_e8m0fnu)
        moved = T * D * 2 * (2 + 1 + 1 / MX_BLOCK)  # read and written by quantising T rows and by dequantising as many
        transport = transport_of(self.best[2], device) if self.best[2] else None
        return {
            "bf16": self.both(ExchangeHP.apply),
            "mxfp8": self.both(to_mxfp8_a2a_dequant),
            "dispatch": {"": lambda: exchange_mx(rows, *self.best, _MODE)},
            "dispatch_placed": {"": lambda: dispatch_placed(rows, self.plan, _RECIPE)},
            "quantize": {"": lambda: torch.ops.mxep.quantize_packed(rows, _MODE)},
            "exchange": {"": lambda: exchange_hp(self.records, *self.best)},
            "dequantize": {"": lambda: torch.ops.mxep.dequantize(qdata, scale, torch.bfloat16)},
            "copy": {"": copy_of(round(moved / 2), device)},
            "home": {"": lambda: self.home(self.best)},
            **({"peer_copy": {"": self.peer_copies(transport)}} if isinstance(transport, SymmetricTransport) else {}),
        }

    def home(self, splits: tuple[list[int], list[int], str]) -> torch.Tensor:
        """What dispatch's backward does: the gradient's rows where the rows came from."""
        out_splits, in_splits, name = splits
        return exchange_hp(self.g, in_splits, out_splits, name)

    def peer_copies(self, transport: SymmetricTransport) -> Callable[[], None]:
        """The same rows to the other ranks by copy engines alone."""
        return plain_copies(transport, self.g.split(self.there[0]), max(self.splits) * self.g.shape[1] * self.g.element_size())

    def check(self) -> str | None:
        """Quantised before the exchange or the exchanged rows' values: the same bits, out and gradient."""
        qdata, scale = torch.ops.mxep.quantize(self.x.detach(), _MODE)
        values = torch.ops.mxep.dequantize(qdata, scale, torch.bfloat16)
        qdata, scale = torch.ops.mxep.quantize(self.g, _MODE)
        gradient = torch.ops.mxep.dequantize(qdata, scale, torch.bfloat16)
        out_splits, in_splits, name = self.there
        want = exchange_hp(values, out_splits, in_splits, name)
        want_gradient = exchange_hp(gradient, in_splits, out_splits, name)
        self.forward(to_mxfp8_a2a_dequant)
        self.backward()
        assert self.out is not None
        assert self.x.grad is not None
        placed = self.placed_as_by_blocks()  # by all ranks, whatever this one has found
        problem = None
        if not torch.equal(self.out.detach(), want) or not torch.equal(exchange_mx(self.x.detach(), *self.best, _MODE).dequantize(), want):
            problem = "rows are not the values of the rows that were sent"
        elif not torch.equal(self.x.grad, want_gradient):
            problem = "the gradient is not the values of the gradient that was sent"
        elif not torch.equal(self.home(self.best), self.home(self.there)):
            problem = "the rows that came home are not those that were sent"
        elif not placed:
            problem = "rows in their experts' places are not those of dispatch and permute"
        self.out = self.x.grad = None
        return problem

    def placed_as_by_blocks(self) -> bool:
        """Every place's bytes, padding too, and the groups' ends."""
        rows, counts = self.x.detach(), self.plan.num_tokens_per_expert_received.to(self.x.device)
        came, multiple = exchange_mx(rows, *self.there, _MODE), _RECIPE.group_size_multiple_of
        _, want, *_, ends = permute_mxfp8_fwd_hp_bwd(came, counts, self.plan.ep_degree, EXPERTS, multiple)
        assert isinstance(want, MXTensor)
        got, offs = dispatch_placed(rows, self.plan, _RECIPE)
        pairs = (got.qdata.view(torch.uint8), want.qdata.view(torch.uint8)), (got.scale.view(torch.uint8), want.scale.view(torch.uint8))
        return torch.equal(offs, ends) and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def judge(times: Mapping[str, Timing], T: int, D: int, world: int) -> dict[str, Figure]:
    """Ratios to bf16; forward and backward move the same bytes, so each has the same limit."""
    ms = {name: timing.median_ms for name, timing in times.items()}
    limit = max(ms["exchange"], ms["copy"])
    asked = {(BATCHES[-1] * SEQUENCE, WIDTH): LARGEST_TARGET}.get((T, D), 1.0)
    figures = {
        f"{way}_vs_bf16": Figure(
            ms[f"bf16_{way}"] / ms[f"mxfp8_{way}"], ms[f"bf16_{way}"] / (limit * (1 + (way == "total"))), asked if way == "total" else None
        )
        for way in ("total", "forward", "backward")
    }
    target = DISPATCH_TARGET if (T, D) == DISPATCH and world >= 4 else None
    for arm, aim in (("dispatch", None), ("dispatch_placed", target)):
        figures[f"{arm}_vs_nccl_bf16"] = Figure(ms["bf16_forward"] / ms[arm], ms["bf16_forward"] / ms["exchange"], aim)
    if "peer_copy" in ms:
        figures["home_vs_peer_copy"] = Figure(ms["peer_copy"] / ms["home"], 1.0, HOME_TARGET if (T, D) == DISPATCH else None)
    return figures


def cases(setting: Setting) -> Iterator[Case]:
    """The batches, then the size that dispatch is asked about."""
    shapes = [(batch * SEQUENCE, WIDTH) for batch in BATCHES] + [DISPATCH]
    if setting.tiny:
        shapes = [(256, 128)]
    elif setting.quick:
        shapes = [DISPATCH]
    shared = share_memory(setting.group, setting.device)
    for T, D in shapes:
        exchange = Exchange(setting, T, D, shared)
        wire = round(exchange.records.shape[1] / (2 * D), 4)
        yield Case(
            f"{T} rows a rank, D {D}",
            {"T": T, "D": D},
            exchange.arms(setting.device),
            exchange.check,
            partial(judge, T=T, D=D, world=setting.world),
            {"wire_bytes_vs_bf16": wire, "L": EXPERTS, "mxfp8_over": "symmetric" if shared else "collective"},
        )

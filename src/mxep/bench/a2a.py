"""`mxep bench a2a`: an all-to-all with rows quantised to MXFP8 before it, and if requested dequantised after it, against rows in bf16.

Arms: `bf16` and `mxfp8` (`to_mxfp8_a2a_dequant`) forward and backward; `dispatch`, which returns the received MX rows by rank; `home`,
dispatch's backward, which returns bf16 gradients to the ranks of their tokens; and the parts of these alone: `quantize`, `exchange` of
the packed records, `dequantize`, `copy`, a device copy of the bytes that quantising and dequantising move, and if ranks share memory
`peer_copy`, plain copies by copy engines of what a rank sends in `home`.  `bf16` is the exchange alone, without a permute.

The limit of `dispatch` is the exchange of its records alone, that of `home` the plain copies, that of `mxfp8` the longer of the exchange
and the copy: quantising, the exchange and dequantising overlap.  Over symmetric memory the hosts synchronise in `exchange` but not in
`mxfp8`, which may be faster than that limit for few rows.  Every rank sends as many rows to every expert, and every host is ahead of its
GPU, as in a training step.  `bf16` uses torch.distributed, and so does the rest unless the ranks can share memory: then `mxfp8`,
`dispatch`, `exchange` and `home` use symmetric memory (the record's `mxfp8_over` says).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from mxep.bench.baselines import copy_of, even_counts
from mxep.bench.ranks import symmetric_group
from mxep.bench.registry import Case, Figure, Setting
from mxep.comm import group_name_of, transport_of
from mxep.ep.dispatch import AllToAll, exchange_hp, exchange_mx
from mxep.ep.quantized_all_to_all import to_mxfp8_a2a_dequant
from mxep.shapes import MX_BLOCK

BATCHES, SEQUENCE, WIDTH = (1, 2, 4, 8, 16), 8192, 5120  # sizes that users of such an exchange report
DISPATCH = (131072, 7168)
EXPERTS = 8  # a rank's
LARGEST_TARGET, DISPATCH_BACKWARD_TARGET = 1.5, 0.95  # of the largest batch, and of dispatch's backward at the size `DISPATCH`
_MODE = "rceil"


class RowExchangeProblem:
    """Rows (T, D) bf16 of this rank, a gradient, and the arms."""

    def __init__(self, setting: Setting, T: int, D: int, shared: str | None = None) -> None:
        generator = torch.Generator(setting.device).manual_seed(setting.rank)
        normal = partial(torch.randn, device=setting.device, dtype=torch.bfloat16, generator=generator)
        counts = even_counts(T, EXPERTS * setting.world).view(setting.world, EXPERTS)
        self.splits = counts.sum(1).tolist()
        back = [self.splits[setting.rank]] * setting.world  # every rank sends as this one does
        self.there = (back, self.splits, group_name_of("a2a", setting.group) if setting.group is not None else "")
        self.best = self.there if shared is None else (*self.there[:2], shared)
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
        peer_copies = self.peer_copies(device)
        return {
            "bf16": self.both(AllToAll.apply),
            "mxfp8": self.both(to_mxfp8_a2a_dequant),
            "dispatch": {"": lambda: exchange_mx(rows, *self.best, _MODE)},
            "quantize": {"": lambda: torch.ops.mxep.quantize_packed(rows, _MODE)},
            "exchange": {"": lambda: exchange_hp(self.records, *self.best)},
            "dequantize": {"": lambda: torch.ops.mxep.dequantize(qdata, scale, torch.bfloat16)},
            "copy": {"": copy_of(round(moved / 2), device)},
            "home": {"": lambda: self.dispatch_backward(self.best)},
            **({} if peer_copies is None else {"peer_copy": {"": peer_copies}}),
        }

    def dispatch_backward(self, splits: tuple[list[int], list[int], str]) -> torch.Tensor:
        """Returns the gradient's rows to the ranks of their tokens."""
        out_splits, in_splits, name = splits
        return exchange_hp(self.g, in_splits, out_splits, name)

    def peer_copies(self, device: torch.device) -> Callable[[], None] | None:
        """Sends the same rows to the other ranks by copy engines alone; None if the ranks do not share memory."""
        if not self.best[2]:
            return None
        region = max(self.splits) * self.g.shape[1] * self.g.element_size()
        return transport_of(self.best[2], device).plain_copies(self.g.split(self.there[0]), region)

    def check(self) -> str | None:
        """Quantising before the exchange gives the bits of exchanging quantised values, for the output and the gradient."""
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
        problem = None
        if not torch.equal(self.out.detach(), want) or not torch.equal(exchange_mx(self.x.detach(), *self.best, _MODE).dequantize(), want):
            problem = "rows are not the values of the rows that were sent"
        elif not torch.equal(self.x.grad, want_gradient):
            problem = "the gradient is not the values of the gradient that was sent"
        elif not torch.equal(self.dispatch_backward(self.best), self.dispatch_backward(self.there)):
            problem = "the gradients that dispatch's backward returns are not those that were sent"
        self.out = self.x.grad = None
        return problem


def compute_figures(ms: Mapping[str, float], T: int, D: int) -> dict[str, Figure]:
    """Ratios to bf16; forward and backward move the same bytes, so both have the same limit."""
    limit = max(ms["exchange"], ms["copy"])
    target = LARGEST_TARGET if (BATCHES[-1] * SEQUENCE, WIDTH) == (T, D) else 1.0
    figures = {}
    for stage, passes, least in (("total", 2, target), ("forward", 1, None), ("backward", 1, None)):
        bf16 = ms[f"bf16_{stage}"]
        figures[f"{stage}_vs_bf16"] = Figure(bf16 / ms[f"mxfp8_{stage}"], bf16 / (limit * passes), least)
    figures["dispatch_vs_nccl_bf16"] = Figure(ms["bf16_forward"] / ms["dispatch"], ms["bf16_forward"] / ms["exchange"], None)
    if "peer_copy" in ms:
        figures["home_vs_peer_copy"] = Figure(ms["peer_copy"] / ms["home"], 1.0, DISPATCH_BACKWARD_TARGET if (T, D) == DISPATCH else None)
    return figures


def cases(setting: Setting) -> Iterator[Case]:
    """The batches, then the size with dispatch's target."""
    every = [(batch * SEQUENCE, WIDTH) for batch in BATCHES] + [DISPATCH]
    shared = symmetric_group(setting.group, setting.device)
    for T, D in setting.choose(every, tiny=[(256, 128)], quick=[DISPATCH]):
        exchange = RowExchangeProblem(setting, T, D, shared)
        wire = round(exchange.records.shape[1] / (2 * D), 4)
        yield Case(
            f"{T} rows a rank, D {D}",
            {"T": T, "D": D},
            exchange.arms(setting.device),
            exchange.check,
            partial(compute_figures, T=T, D=D),
            {"wire_bytes_vs_bf16": wire, "L": EXPERTS, "mxfp8_over": "symmetric" if shared else "collective"},
        )

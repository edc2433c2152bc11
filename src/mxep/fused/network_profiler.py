"""Times every mode of the fused layer's exchanges on this machine, for one size and one distribution of rows, and takes the fastest.

A row exchange sends tokens to the experts and sums to the tokens (`mxep.fused.dispatcher`).  Each of its three modes is timed both ways, in
MXFP8 and in high precision, with quantising, gathering and summing.  All ranks start each timed run together; its time is that of the
slowest rank.  Dispatch sends to the experts in forward and to the tokens in backward, combine the other way round: each takes the mode
whose two ways take least time.  "to_tokens" is timed as combine's forward sends, and as dispatch's backward sends: that one uses copy
engines where it can, so that the multiprocessors are free for wgrad; it is timed without a wgrad.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.checks import HIGH_PRECISION, check_count, check_tensors
from mxep.comm import group_name_of, resolve_group, transport_of
from mxep.fused.dispatcher import DispatchSpec, RowExchange
from mxep.fused.make_dispatcher import ep_degree, make_dispatcher
from mxep.fused.options import resolve_runtime
from mxep.fused.runtime_config import CombineMode, DispatchMode, RuntimeEPConfig, mode_of
from mxep.ops.routing.index_reference import MODES
from mxep.recipe import Recipe, resolve_recipe
from mxep.shapes import MX_BLOCK, record_bytes

_WHERE = "NetworkProfiler"
_EXPERTS_A_RANK = 16  # the default; times depend only on how many experts of a token are on one rank
_RUNS, _WARM = 20, 3
_SEED = 11
WAYS = ("to_experts", "to_tokens", "to_tokens_backward")


class ExchangeTime(NamedTuple):
    """The time of one way of one mode.

    Attributes:
        mode: see `mxep.fused.dispatcher`.  precision: "mxfp8" or "hp".
        way: of `WAYS`: "to_tokens" as combine's forward sends, "to_tokens_backward" as dispatch's backward sends.
        ms: median over the runs, of the slowest rank.  wire_bytes: of the rows sent to other ranks, mean of the ranks.
    """

    mode: str
    way: str
    precision: str
    ms: float
    wire_bytes: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second that each rank sends."""
        return self.wire_bytes / self.ms / 1e6


@dataclass(frozen=True)
class NetworkProfile:
    """The result of a profile.

    Attributes:
        times: every way of every mode.
        limit_gb_per_s: of the plainest exchange of rows in their dtype, as many to every rank; 0 on one rank.
        limit_of: the exchange that was measured for it.
        dispatch_ms, combine_ms: by the names of `RuntimeEPConfig`, forward and backward together, in the precisions of `config`.
        config: the winners.
    """

    times: list[ExchangeTime]
    limit_gb_per_s: float
    limit_of: str
    dispatch_ms: dict[DispatchMode, float]
    combine_ms: dict[CombineMode, float]
    config: RuntimeEPConfig


def draw_topk(T: int, C: int, histogram: Tensor, seed: int) -> Tensor:
    """(T, C) int64: C different experts for each token, so that the rows of all experts are as a histogram (E,) of numbers of at least 0.

    No expert has more than T rows. What a larger share lacks goes to the others, by their shares.  Each token lays the experts in a random
    order on a line, each as long as its probability, and takes those that C points at distances of 1 hit (systematic sampling): drawing
    one expert after the other would give busy ones fewer rows than their share.
    """
    generator, device = torch.Generator(histogram.device).manual_seed(seed), histogram.device
    order = torch.rand(T, histogram.shape[0], device=device, generator=generator).argsort(1)
    ends = _row_shares(histogram.double(), C)[order].cumsum(1)
    ends[:, -1] = C
    passed = (ends - torch.rand(T, 1, dtype=torch.float64, device=device, generator=generator)).ceil()  # points before each end
    hit = passed.diff(dim=1, prepend=passed.new_zeros(T, 1))
    return order.gather(1, hit.topk(C, dim=1).indices)


def _row_shares(histogram: Tensor, C: int) -> Tensor:
    """(E,) float64, the probability that a token goes to each expert: C times its share, at most 1. They sum to C."""
    likely, sure = C * histogram / histogram.sum(), torch.zeros_like(histogram, dtype=torch.bool)
    while bool((likely > 1).any()):
        sure |= likely >= 1
        others = torch.where(sure, 0.0, histogram)
        others = others if bool(others.sum() > 0) else (~sure).double()  # fewer than C experts have rows
        likely = torch.where(sure, 1.0, (C - int(sure.sum())) * others / others.sum())
    return likely


class NetworkProfiler:
    """Measures the exchanges of a fused layer on the machine it runs on. All ranks of the group call `profile` together.

    Args:
        T_local: tokens of this rank.
        D: their width, a multiple of 32.
        C: experts per token.
        dtype: bf16 or float32.
        num_experts: E, a multiple of the ranks; None takes 16 for each rank.
        group: process group, its name, or None for WORLD; "" is this rank alone.
        config: the precisions of the exchanges, and the options that the result keeps; its modes are replaced.
        recipe: precisions that `config` does not set.
        device: None is the current GPU, or the CPU where the group has no backend for GPUs.

    Raises:
        ValueError: sizes that do not fit.

    Examples:
        >>> profiler = mxep.NetworkProfiler(T_local=32, D=64, C=2, num_experts=4)
        >>> best = profiler.profile()
        >>> layer = mxep.FusedMoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2), runtime=best)
    """

    def __init__(
        self,
        T_local: int,
        D: int,
        C: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        num_experts: int | None = None,
        group: str | ProcessGroup | None = None,
        config: RuntimeEPConfig | None = None,
        recipe: str | Recipe | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group_name = group_name_of(_WHERE, group)
        self._group = resolve_group(_WHERE, self.group_name) if self.group_name else None
        world = 1 if self._group is None else dist.get_world_size(self._group)
        self.num_experts = _EXPERTS_A_RANK * world if num_experts is None else num_experts
        for name, value in (("T_local", T_local), ("D", D), ("C", C), ("num_experts", self.num_experts)):
            check_count(_WHERE, name, value)
        if D % MX_BLOCK or self.num_experts < C or dtype not in HIGH_PRECISION:
            raise ValueError(
                f"{_WHERE}: D={D}, C={C}, {dtype} with {self.num_experts} experts, want D a multiple of {MX_BLOCK}, C from 1 to the "
                "experts, bfloat16 or float32"
            )
        self.world, self.T, self.D, self.C, self.dtype = world, T_local, D, C, dtype
        self.config, self.recipe = resolve_runtime(_WHERE, config), resolve_recipe(recipe)
        on_gpu = self._group is not None and "nccl" in dist.get_backend(self._group)
        self.device = device or (torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        ep_degree(self.group_name, self.num_experts, self.device)
        self.found: NetworkProfile | None = None

    def profile(self, histogram: Tensor | None = None) -> RuntimeEPConfig:
        """Measure, keep everything in `found`, and return the configuration with the fastest modes.

        Args:
            histogram: (E,) rows per expert, for example of a trained router, the same on every rank; None: as many for every expert.

        Raises:
            ValueError: a histogram of another size, or without any row.
        """
        if histogram is None:
            histogram = torch.ones(self.num_experts)
        check_tensors(_WHERE, histogram=histogram)
        if histogram.shape != (self.num_experts,) or not bool((histogram >= 0).all()) or not bool(histogram.sum() > 0):
            raise ValueError(
                f"{_WHERE}: histogram of shape {tuple(histogram.shape)}, want ({self.num_experts},) counts of at least 0, not all 0"
            )
        rank = 0 if self._group is None else dist.get_rank(self._group)
        experts = draw_topk(self.T, self.C, histogram.to(self.device), _SEED + rank)
        scores = torch.full(experts.shape, 1 / self.C, device=self.device)
        tokens = torch.randn(self.T, self.D, device=self.device).to(self.dtype)
        times: list[ExchangeTime] = []
        for mode in MODES:
            spec = DispatchSpec(self.num_experts, self.C, self.D, self.dtype.itemsize, 0, (mode, mode), MX_BLOCK)
            dispatcher, _ = make_dispatcher(spec, experts, scores, tokens, "", self.group_name, saves=False)
            rows = torch.randn(dispatcher.scores.shape[0], self.D, device=self.device).to(self.dtype)
            times += self._times(mode, "mxfp8", dispatcher.dispatch, tokens, rows)
            times += self._times(mode, "hp", dispatcher.dispatch, tokens, rows)
        self.found = self._decide(times)
        return self.found.config

    def _times(self, mode: str, precision: str, exchange: RowExchange, tokens: Tensor, rows: Tensor) -> Iterator[ExchangeTime]:
        """The times of one mode in one precision, for tokens (T, D) and expert rows (P, D)."""
        scaling_mode = self.recipe.scaling_mode.value if precision == "mxfp8" else ""
        runs: tuple[Callable[[], object], ...] = (
            partial(exchange.to_experts, tokens, scaling_mode),
            partial(exchange.to_tokens, rows, scaling_mode),
            lambda: exchange.start_to_tokens(rows, scaling_mode)(None),
        )
        row_bytes = record_bytes(self.D) if scaling_mode else self.D * self.dtype.itemsize
        for way, run in zip(WAYS, runs, strict=True):
            sent = exchange.rows_off_rank(way.removesuffix("_backward")) * row_bytes
            yield ExchangeTime(mode, way, precision, self._ms(run), self._over_ranks(sent, dist.ReduceOp.SUM) / self.world)

    def _decide(self, times: list[ExchangeTime]) -> NetworkProfile:
        """The profile with the fastest mode of dispatch and of combine, in the precisions of `config`."""
        recipe, config = self.config.apply_to(self.recipe), self.config
        ms = {(time.mode, time.way, time.precision): time.ms for time in times}
        dispatch = {
            name: ms[mode_of(name), "to_experts", recipe.dispatch] + ms[mode_of(name), "to_tokens_backward", config.dispatch_backward]
            for name in get_args(DispatchMode)
        }
        combine = {
            name: ms[mode_of(name), "to_tokens", config.combine_forward] + ms[mode_of(name), "to_experts", recipe.combine_backward]
            for name in get_args(CombineMode)
        }
        config = replace(config, dispatch=min(dispatch, key=dispatch.__getitem__), combine=min(combine, key=combine.__getitem__))
        return NetworkProfile(times, *self._limit(), dispatch, combine, config)

    def _limit(self) -> tuple[float, str]:
        """GB/s that each rank sends in the plainest exchange of its transport, and the name of that exchange."""
        if self.world == 1:
            return 0.0, "a single rank sends nothing"
        each = -(-int(self._over_ranks(self.T, dist.ReduceOp.MAX)) // self.world)
        rows, splits = torch.randn(each * self.world, self.D, device=self.device).to(self.dtype), [each] * self.world
        region = each * self.D * self.dtype.itemsize
        run = transport_of(self.group_name, self.device).plain_copies(rows.chunk(self.world), region)
        what = "plain copies into the other ranks' memory"
        if run is None:
            run = partial(torch.ops.mxep.exchange_rows, rows, splits, splits, self.group_name)
            what = "a plain all-to-all of such rows"
        return region * (self.world - 1) / self._ms(run) / 1e6, what

    def _over_ranks(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        """A number of each rank, reduced over the ranks."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self._group is not None:
            dist.all_reduce(tensor, op, group=self._group)
        return tensor.item()

    def _ms(self, run: Callable[[], object]) -> float:
        """Median of the slowest rank's milliseconds; every run begins together, in stream order."""
        for _ in range(_WARM):
            run()
        samples = [self._over_ranks(self._one_ms(run), dist.ReduceOp.MAX) for _ in range(_RUNS)]
        return statistics.median(samples)

    def _one_ms(self, run: Callable[[], object]) -> float:
        """This rank's milliseconds of one run, which begins after an all-reduce."""
        if self._group is not None:
            dist.all_reduce(torch.zeros((), device=self.device), group=self._group)
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        torch.cuda.synchronize(self.device)  # host sync: a measurement
        return events[0].elapsed_time(events[1])

"""Which exchange is fastest here: every mode of the fused layer's exchanges under the clock, for one size and one kind of routing.

A row exchange carries tokens to the experts and sums back (dispatcher.py); each of its three modes is timed both ways, in MXFP8 and as the
rows are, quantising, gathering and adding up included.  Before every timed run all ranks meet; a run lasts as long as its slowest rank.
Dispatch goes out in forward and home in backward, combine the other way round: each takes the mode whose two ways cost least.  Home is
timed twice, for backward sends sums by other means where it can, copy engines, which leave room for wgrad; it is timed without that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.comm import group_name_of, resolve_group, transport_of
from mxep.fused.dispatcher import DispatchSpec
from mxep.fused.make_dispatcher import ep_degree, make_dispatcher
from mxep.fused.row_index import MODES
from mxep.fused.runtime_config import CombineMode, DispatchMode, RuntimeEPConfig
from mxep.recipe import Recipe, resolve_recipe
from mxep.shapes import MX_BLOCK, record_bytes

_WHERE = "NetworkProfiler"
_EXPERTS_A_RANK = 16  # where nobody says how many: only how many choices of a token meet on a rank hangs on it
_RUNS, _WARM = 20, 3
_SEED = 11
WAYS = ("out", "home", "home_backward")
_DISPATCH: dict[str, DispatchMode] = {"rank_dedup": "rank_dedup", "all_to_all": "all_to_all", "all_ranks": "all_gather"}
_COMBINE: dict[str, CombineMode] = {"rank_dedup": "rank_dedup", "all_to_all": "all_to_all", "all_ranks": "reduce_scatter"}


class ExchangeTime(NamedTuple):
    """One way of one mode.

    Attributes:
        mode: of fused/row_index.py.  precision: "mxfp8" or "hp".
        way: of `WAYS`: "out" to the experts, "home" as combine's forward or "home_backward" as dispatch's backward sends.
        ms: median of the slowest rank's.  wire_bytes: of the rows that leave for other ranks, mean of the ranks.
    """

    mode: str
    way: str
    precision: str
    ms: float
    wire_bytes: float

    @property
    def gb_per_s(self) -> float:
        """Per rank and direction."""
        return self.wire_bytes / self.ms / 1e6


@dataclass(frozen=True)
class NetworkProfile:
    """What a profile found.

    Attributes:
        times: every way of every mode.
        limit_gb_per_s: what the wire takes at best, of rows in their dtype, as many to every rank; 0 on one rank.
        limit_of: what was measured for it.
        dispatch_ms, combine_ms: by the names of `RuntimeEPConfig`, forward and backward together, in the precisions of `config`.
        config: the winners.
    """

    times: list[ExchangeTime]
    limit_gb_per_s: float
    limit_of: str
    dispatch_ms: dict[DispatchMode, float]
    combine_ms: dict[CombineMode, float]
    config: RuntimeEPConfig


def draw_choices(T: int, C: int, histogram: Tensor, seed: int) -> Tensor:
    """(T, C) int64: C different experts for each token, experts as likely as their share of a histogram (E,) of numbers from 0 on."""
    generator = torch.Generator(histogram.device).manual_seed(seed)
    uniform = torch.rand(T, histogram.shape[0], device=histogram.device, generator=generator)
    return (histogram.float().clamp(min=1e-30).log() - (-uniform.clamp(min=1e-30).log()).log()).topk(C).indices


class NetworkProfiler:
    """Measures the exchanges of a fused layer on the machine it runs on. All ranks of the group call `profile` together.

    Args:
        T_local: tokens of this rank.
        D: their width, a multiple of 32.
        C: experts per token.
        dtype: bf16 or float32.
        num_experts: E, a multiple of the ranks; None takes 16 for each rank.
        group: process group, its name, or None for WORLD; "" is this rank alone.
        config: precisions to decide for, and what the result keeps; its modes are replaced.
        recipe: where it leaves them open.
        device: where; None is the current GPU, or the CPU where the group has none.

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
        world = dist.get_world_size(resolve_group(_WHERE, self.group_name)) if self.group_name else 1
        self.num_experts = _EXPERTS_A_RANK * world if num_experts is None else num_experts
        if T_local < 1 or D < MX_BLOCK or D % MX_BLOCK or not 1 <= C <= self.num_experts or dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{_WHERE}: T_local={T_local}, D={D}, C={C}, {dtype} with {self.num_experts} experts, want a token or more, D a multiple "
                f"of {MX_BLOCK}, C from 1 to the experts, bfloat16 or float32"
            )
        self.world, self.T, self.D, self.C, self.dtype = world, T_local, D, C, dtype
        self.config, self.recipe = config or RuntimeEPConfig(), resolve_recipe(recipe)
        on_gpu = self.group_name and "nccl" in dist.get_backend(resolve_group(_WHERE, self.group_name))
        self.device = device or torch.device("cuda", torch.cuda.current_device()) if on_gpu else device or torch.device("cpu")
        ep_degree(self.group_name, self.num_experts, self.device)
        self.found: NetworkProfile | None = None

    def profile(self, histogram: Tensor | None = None) -> RuntimeEPConfig:
        """Measure, keep everything in `found`, and return the configuration with the fastest modes.

        Args:
            histogram: (E,) rows per expert as a router gave them, the same on every rank; None: every expert alike.

        Raises:
            ValueError: a histogram of another size, or without any row.
        """
        if histogram is None:
            histogram = torch.ones(self.num_experts)
        if histogram.shape != (self.num_experts,) or not bool((histogram >= 0).all()) or not bool(histogram.sum() > 0):
            raise ValueError(
                f"{_WHERE}: histogram of shape {tuple(histogram.shape)}, want ({self.num_experts},) counts from 0 on, not all 0"
            )
        group = resolve_group(_WHERE, self.group_name) if self.group_name else None
        experts = draw_choices(self.T, self.C, histogram.to(self.device), _SEED + (dist.get_rank(group) if group is not None else 0))
        scores = torch.full(experts.shape, 1 / self.C, device=self.device)
        tokens = torch.randn(self.T, self.D, device=self.device).to(self.dtype)
        times: list[ExchangeTime] = []
        for mode in MODES:
            spec = DispatchSpec(self.num_experts, self.C, self.D, self.dtype.itemsize, 0, (mode, mode), MX_BLOCK)
            dispatcher, _ = make_dispatcher(spec, experts, scores, tokens, "", self.group_name, saves=False)
            placed = torch.randn(dispatcher.scores.shape[0], self.D, device=self.device).to(self.dtype)
            for precision in ("mxfp8", "hp"):
                rule = self.recipe.scaling_mode.value if precision == "mxfp8" else ""
                runs: dict[str, Callable[[], object]] = {
                    "out": lambda exchange=dispatcher.dispatch, rule=rule: exchange.to_experts(tokens, rule),  # type: ignore[misc]
                    "home": lambda exchange=dispatcher.dispatch, rule=rule, placed=placed: exchange.to_tokens(placed, rule),  # type: ignore[misc]
                    "home_backward": lambda exchange=dispatcher.dispatch, rule=rule, placed=placed: exchange.start_to_tokens(placed, rule)(
                        None
                    ),  # type: ignore[misc]
                }
                row = record_bytes(self.D) if rule else self.D * tokens.element_size()
                for way, run in runs.items():
                    sent = dispatcher.dispatch.rows_off_rank("to_experts" if way == "out" else "to_tokens") * row
                    times.append(ExchangeTime(mode, way, precision, self._ms(run), self._mean(sent)))
        self.found = self._decide(times)
        return self.found.config

    def _decide(self, times: list[ExchangeTime]) -> NetworkProfile:
        recipe = self.config.apply_to(self.recipe)
        ms = {(time.mode, time.way, time.precision): time.ms for time in times}
        dispatch = {
            name: ms[mode, "out", recipe.dispatch] + ms[mode, "home_backward", self.config.dispatch_backward]
            for mode, name in _DISPATCH.items()
        }
        combine = {
            name: ms[mode, "home", self.config.combine_forward] + ms[mode, "out", recipe.combine_backward]
            for mode, name in _COMBINE.items()
        }
        config = replace(self.config, dispatch=min(dispatch, key=dispatch.__getitem__), combine=min(combine, key=combine.__getitem__))
        return NetworkProfile(times, *self._limit(), dispatch, combine, config)

    def _limit(self) -> tuple[float, str]:
        """GB/s that leave a rank in the plainest exchange of its transport, and which that is."""
        if self.world == 1:
            return 0.0, "nothing leaves a single rank"
        each = -(-int(self._over_ranks(self.T, dist.ReduceOp.MAX)) // self.world)
        rows, splits = torch.randn(each * self.world, self.D, device=self.device).to(self.dtype), [each] * self.world
        transport, region = transport_of(self.group_name, self.device), each * self.D * rows.element_size()
        plain_copies = getattr(transport, "plain_copies", None)  # of transports whose exchanges do more than copy
        if plain_copies is not None:
            run, what = plain_copies(rows.chunk(self.world), region), "plain copies into the other ranks' memory"
        else:
            run = partial(torch.ops.mxep.exchange_rows, rows, splits, splits, self.group_name)
            what = "a plain all-to-all of such rows"
        return region * (self.world - 1) / self._ms(run) / 1e6, what

    def _over_ranks(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.group_name:
            dist.all_reduce(tensor, op, group=resolve_group(_WHERE, self.group_name))
        return tensor.item()

    def _mean(self, value: float) -> float:
        return self._over_ranks(value, dist.ReduceOp.SUM) / self.world

    def _ms(self, run: Callable[[], object]) -> float:
        """Median of the slowest rank's milliseconds; every run begins together, in stream order."""
        for _ in range(_WARM):
            run()
        samples = [self._over_ranks(self._one_ms(run), dist.ReduceOp.MAX) for _ in range(_RUNS)]
        return statistics.median(samples)

    def _one_ms(self, run: Callable[[], object]) -> float:
        if self.group_name:
            dist.all_reduce(torch.zeros((), device=self.device), group=resolve_group(_WHERE, self.group_name))
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

"""AdamW, its schedule, the gradient norm over differently sharded parameters, and the update of the expert biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.moe import Experts, MoE
from mxep.moe.init import local_tensor
from mxep.train.adamw import AdamW
from mxep.train.state_precision import StatePrecision

BETAS = (0.9, 0.95)
_EPS = 1e-8
_FLOAT32 = StatePrecision()
_CLIP_EPS = 1e-6  # torch's, in clip_grad_norm_
DECAYS: dict[str, Callable[[float], float]] = {  # from 1 to 0 while the progress goes from 0 to 1; the names are torchtitan's
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: linear warmup, constant, then decay to `peak * floor`. It has no state.

    The decay takes the last `decay_ratio` of the steps but never begins before the end of the warmup; None: it begins there.

    >>> schedule = Schedule(peak=1.0, warmup=2, steps=6, floor=0.1)
    >>> [round(schedule.at(step), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    >>> schedule = Schedule(peak=1.0, warmup=1, steps=6, floor=0.0, decay_ratio=0.5, decay_type="linear")
    >>> [round(schedule.at(step), 3) for step in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.667, 0.333]
    """

    peak: float
    warmup: int
    steps: int
    floor: float = 0.1
    decay_ratio: float | None = None
    decay_type: str = "cosine"

    @property
    def decay_start(self) -> int:
        """The first step of the decay, which still has the peak rate."""
        return self.warmup if self.decay_ratio is None else max(self.warmup, self.steps - round(self.decay_ratio * self.steps))

    def at(self, step: int) -> float:
        """Learning rate of the optimizer step with this number, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        start = self.decay_start
        if step < start or self.decay_ratio == 0:
            return self.peak
        progress = min((step - start) / max(self.steps - start, 1), 1.0)
        return self.peak * (self.floor + (1 - self.floor) * DECAYS[self.decay_type](progress))


def build_optimizer(model: nn.Module, lr: float, weight_decay: float, precision: StatePrecision = _FLOAT32, seed: int = 0) -> AdamW:
    """AdamW with weight decay on matrices only. Stacked biases of experts are (E, H), but no matrices.

    Args:
        model: already sharded, its parameters in the dtype of `precision`.
        precision: of parameters and moments; all but float32 needs torchao.
        seed: of stochastic rounding.

    Raises:
        ValueError: torchao is missing, or a shard of a parameter ends within a block of quantised moments.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    stacked = {id(bias) for module in experts for bias in (module.b1, module.b2, module.b3)}
    groups: dict[bool, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(parameter.ndim >= 2 and id(parameter) not in stacked, []).append((name, parameter))
    options = [{"params": params, "weight_decay": weight_decay if decays else 0.0} for decays, params in groups.items()]
    try:
        optimizer = AdamW(options, lr, BETAS, _EPS, state_bits=precision.state_bits, seed=seed)
        optimizer.make_states()
    except ValueError as error:
        raise ValueError(f"--optimizer={precision.optimizer}, --dtype={precision.dtype}: {error}") from error
    return optimizer


def _copies(tensor: Tensor, world: int) -> int:
    """How many of the `world` ranks hold the same piece of this tensor."""
    if not isinstance(tensor, DTensor):
        return world
    shards = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_partial():
            raise AssertionError(f"gradient with a pending sum: {tensor.placements}")
        shards *= 1 if placement.is_replicate() else size
    return world // shards


class GradientNorms:
    """Norms of gradients, one by one, and their joint 2-norm.

    Gradients are plain tensors (equal on every rank) or DTensors on any mesh.  Each rank sums the squares of its local gradients, each
    divided by the number of ranks with the same piece; one all-reduce over all ranks adds the sums.

    Args:
        stages: pipeline stages, which have different parameters.
    """

    def __init__(self, stages: int = 1) -> None:
        self._world = dist.get_world_size() // stages if dist.is_initialized() else 1
        self._norms: dict[int, list[Tensor]] = {}  # by number of copies, a host value: as a tensor it would need a sync
        self._squares: dict[tuple[int, int], Tensor] = {}  # by number of copies and CUDA stream, sums of squares

    def add(self, grads: Sequence[Tensor]) -> None:
        """Measure these gradients of this rank."""
        if grads:
            for grad, norm in zip(grads, torch._foreach_norm([local_tensor(grad) for grad in grads], 2, dtype=torch.float32), strict=True):
                self._norms.setdefault(_copies(grad, self._world), []).append(norm)

    def squares_of(self, grad: Tensor) -> Tensor:
        """() float64, to which the caller adds the sum of the squares of this rank's part of a gradient, on the current stream.

        Each stream has its own sum: shared experts run on a second one, and of two additions at the same time one would be lost.
        """
        stream = torch._C._cuda_getCurrentRawStream(grad.device.index) if grad.is_cuda else 0
        key = _copies(grad, self._world), stream
        if key not in self._squares:
            self._squares[key] = torch.zeros((), dtype=torch.float64, device=grad.device)
        return self._squares[key]

    def joint(self) -> Tensor:
        """() float64, the 2-norm of all of them on all ranks; 0 without gradients, in which case no rank may have any."""
        sums = [torch.stack(same).double().square().sum() / copies for copies, same in self._norms.items()]
        sums += [squares / copies for (copies, _), squares in self._squares.items()]
        if not sums:
            return torch.zeros((), dtype=torch.float64)
        total = torch.stack(sums).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.sqrt()


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], stages: int = 1) -> Tensor:
    """The joint 2-norm of all gradients.

    Args:
        parameters: of this rank; with several ranks at least one has a gradient.
        stages: pipeline stages, which have different parameters.

    Returns:
        () float64.
    """
    norms = GradientNorms(stages)
    norms.add([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norms.joint()


def clipping_divisor(norm: Tensor, max_norm: float) -> Tensor | None:
    """What an optimizer divides gradients of this norm by, so that their norm is at most `max_norm`; its `grad_scale`.

    Args:
        norm: () float64.
        max_norm: the largest norm; 0: no clipping.

    Returns:
        () float32, 1 or more; None without clipping.

    Examples:
        >>> [round(clipping_divisor(torch.tensor(norm), max_norm=2.5).item(), 3) for norm in (5.0, 2.0)]
        [2.0, 1.0]
    """
    return ((norm + _CLIP_EPS) / max_norm).clamp(min=1.0).float() if max_norm > 0 else None


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, stages: int = 1) -> Tensor:
    """Scale all gradients in place so that their joint 2-norm, see `gradient_norm`, is at most `max_norm`.

    `mxep train` scales none of them: its optimizers divide by `clipping_divisor` while they step.

    Args:
        parameters: of this rank; with several ranks at least one has a gradient.
        max_norm: the largest norm; 0: no scaling.
        stages: pipeline stages, which have different parameters.

    Returns:
        () float32, the norm before scaling.

    Examples:
        >>> from mxep.train.optimizer import clip_gradients
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> parameter.grad = torch.tensor([3.0, 4.0])
        >>> norm = clip_gradients([parameter], max_norm=2.5)
        >>> norm.item(), [round(value, 4) for value in parameter.grad.tolist()]
        (5.0, [1.5, 2.0])
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(with_grad, stages)
    if max_norm > 0 and with_grad:
        scale = (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0).float()
        torch._foreach_mul_([local_tensor(parameter.grad) for parameter in with_grad], scale)  # type: ignore[arg-type]
    return norm.float()


class ExpertBiasHook:
    """Optimizer pre-hook: sums each MoE layer's load over the ranks that have the layer, and updates the expert biases.

    Args:
        layers: of this rank.
        stage: ranks that have these layers; None: all ranks.
        stages: number of pipeline stages.

    Attributes:
        counts: for each MoE layer of this rank (E,) float32: tokens per expert in the last step, over all ranks; empty before the first.
    """

    def __init__(self, layers: Sequence[MoE], stage: dist.ProcessGroup | None = None, stages: int = 1) -> None:
        self.layers, self.stage, self.stages = list(layers), stage, stages
        self.counts: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """One all-reduce for all layers."""
        if not self.layers:
            return
        flat = torch.cat([layer.tokens_per_expert for layer in self.layers])
        if dist.is_initialized():
            dist.all_reduce(flat, group=self.stage)
        nonfinite = getattr(optimizer, "found_inf", None)  # the step is skipped: equal counts leave the biases unchanged
        if nonfinite is not None:
            flat = torch.where(nonfinite > 0, 0.0, flat)
        self.counts = list(flat.split([layer.tokens_per_expert.numel() for layer in self.layers]))
        for layer, counts in zip(self.layers, self.counts, strict=True):
            if layer.config.bias_update_rate > 0:
                layer.update_expert_bias(counts)
            layer.reset_load()

    def load(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(largest expert load over the mean, of the worst layer; number of experts that no token chose), of the last step.

        0-dim float64 on `device`, equal on all ranks. No host sync.
        """
        worst, dead = torch.zeros((2,), dtype=torch.float64, device=device)
        if self.counts:
            load = torch.stack(self.counts).double()  # (layers, E)
            worst = (load.amax(1) / load.mean(1).clamp(min=1e-9)).amax()
            dead = (load == 0).sum().double()
        if self.stages > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            dist.all_reduce(dead)
            dead = dead / (dist.get_world_size() // self.stages)  # every rank of a stage has the same count
        return worst, dead


def optimizer_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """The optimizer's state but the step count, by parameter name: {"exp_avg.<name>": ..., ...}, or "exp_avg_codes.<name>" and so on."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= {f"{key}.{name}": value.detach() for key, value in optimizer.state[parameter].items() if key != "step"}
    return tensors

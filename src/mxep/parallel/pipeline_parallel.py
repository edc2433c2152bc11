"""Pipeline parallelism on torch.distributed.pipelining: the stages of this rank, run over microbatches by a schedule.

A stage's module takes what the stage before returned (the first: tokens) and keywords `labels` and `documents`; the last returns the sum
of its microbatch's loss.  Gradients stay sums: losses are divided by the caller's divisor and by nothing else, and FSDP reduces once a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from mxep.mx.first_order import first_order
from mxep.parallel.data_parallel import reshard_once

PipelineSchedule = Literal["1F1B", "Interleaved1F1B"]
_STAGES_PER_RANK = {"1F1B": 1, "Interleaved1F1B": 2}


def stages_per_rank(schedule: str) -> int:
    """Raises ValueError for an unknown schedule."""
    if schedule not in _STAGES_PER_RANK:
        raise ValueError(f"pipeline: schedule {schedule!r} is unknown, want one of {', '.join(_STAGES_PER_RANK)}")
    return _STAGES_PER_RANK[schedule]


def microbatches_in_flight(pp_rank: int, pp: int, schedule: str) -> int:
    """The most microbatches whose activations a rank keeps at a time: forward has run, backward has not.

    A microbatch in one of the two equal stages that "Interleaved1F1B" gives to a rank counts as half of one.

    Examples:
        >>> [microbatches_in_flight(rank, 4, "1F1B") for rank in range(4)]
        [4, 3, 2, 1]
        >>> [microbatches_in_flight(rank, 4, "Interleaved1F1B") for rank in range(4)]
        [6, 5, 4, 3]
    """
    stages_left = pp - pp_rank
    return stages_left if schedule == "1F1B" else stages_left + pp // 2


@dataclass(frozen=True)
class HiddenStates:
    """The tensor that one pipeline stage sends to the next.

    Attributes:
        shape: (B, S / tp, D) of one microbatch.
        dtype: of its values.

    Examples:
        >>> B, S, D, tp = 2, 4096, 2048, 1
        >>> mxep.parallel.HiddenStates((B, S // tp, D), torch.bfloat16).shape
        (2, 4096, 2048)
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype


@first_order
class _CarryLoss(torch.autograd.Function):
    """Returns `output`, and gives `loss` a gradient of one, as if it were added to the loss at the end."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.new_ones(())
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, ctx.loss


class Pipeline:
    """The stages of this rank and their schedule.

    Args:
        stages: modules by number of the stage, those of `stages_of`.
        pp_mesh: one rank of each stage, in order.
        microbatches: of a step.
        tokens_shape: (B, S) of one microbatch.
        hidden: the tensor that is sent between stages.
        device: of this rank.
        schedule: "1F1B", or "Interleaved1F1B" with two stages a rank.
        extra_loss: of a stage's module after its forward, 0-dim, already divided; None for none.

    Raises:
        ValueError: an unknown schedule, fewer microbatches than stages; with "Interleaved1F1B" also a number of them that is no multiple of
            the ranks.

    Examples:
        >>> # Needs two ranks, one for each stage.
        >>> hidden = mxep.parallel.HiddenStates((B, S, D), torch.bfloat16)  # doctest: +SKIP
        >>> pipeline = mxep.parallel.Pipeline({rank: stage}, meshes.pp, 4, (B, S), hidden, torch.device("cuda"))  # doctest: +SKIP
        >>> loss = pipeline.step(tokens, labels, divisor=valid_tokens)  # doctest: +SKIP
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        pp_mesh: DeviceMesh,
        microbatches: int,
        tokens_shape: tuple[int, int],
        hidden: HiddenStates,
        device: torch.device,
        schedule: PipelineSchedule = "1F1B",
        extra_loss: Callable[[nn.Module], Tensor] | None = None,
    ) -> None:
        count = pp_mesh.size() * stages_per_rank(schedule)
        if microbatches < count or (schedule == "Interleaved1F1B" and microbatches % pp_mesh.size()):
            raise ValueError(
                f"pipeline: {microbatches} microbatches a step for {count} stages (schedule {schedule}), want at least as many, and for "
                "Interleaved1F1B a multiple of the pipeline degree; raise the batch or --accumulate"
            )
        self.microbatches, self.has_first, self.has_last = microbatches, 0 in stages, count - 1 in stages
        self.device, self._modules = device, [*stages.values()]
        self._divisor: float | Tensor = 1.0
        tokens = torch.empty(tokens_shape, dtype=torch.int64, device="meta")
        between = torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        wrapped = []
        for index, module in stages.items():
            if extra_loss is not None:
                module.register_forward_hook(lambda module, _, output: _CarryLoss.apply(output, extra_loss(module)))
            ends = (tokens if index == 0 else between, loss if index == count - 1 else between)
            wrapped.append(PipelineStage(module, index, count, device, ends[0], ends[1], group=pp_mesh.get_group()))
        options: dict[str, Any] = {"loss_fn": lambda output, _: output / self._divisor, "scale_grads": False}
        if schedule == "Interleaved1F1B":
            self.schedule: Any = ScheduleInterleaved1F1B(wrapped, microbatches, **options)  # type: ignore[arg-type]
        else:
            self.schedule = Schedule1F1B(wrapped[0], microbatches, **options)

    def step(self, inputs: Tensor, labels: Tensor, divisor: float | Tensor, documents: tuple[Any, ...] | None = None) -> Tensor:
        """Forward and backward of all microbatches; inputs and labels (microbatches * B, S).

        Every stage gets `documents`, of its tensors (microbatches * B, ...) the microbatch's part.

        Returns:
            () float32, the loss summed over this rank's microbatches; 0 where the last stage is elsewhere.
        """
        return self._run(self.schedule.step, inputs, labels, divisor, documents)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor, documents: tuple[Any, ...] | None = None) -> Tensor:
        """The loss, as from `step`, without gradients."""
        with reshard_once(self._modules):
            return self._run(self.schedule.eval, inputs, labels, 1.0, documents)

    def _run(self, run: Callable, inputs: Tensor, labels: Tensor, divisor: float | Tensor, documents: tuple[Any, ...] | None) -> Tensor:
        self._divisor = divisor
        losses: list[Tensor] = []
        arguments = (inputs,) if self.has_first else ()
        run(*arguments, target=labels if self.has_last else None, losses=losses, return_outputs=False, labels=labels, documents=documents)
        total = torch.stack(losses).sum() * divisor if losses else torch.zeros((), device=self.device)
        return total.detach()


def stages_of(pp_rank: int, pp: int, schedule: PipelineSchedule) -> Sequence[int]:
    """The pipeline stages that a rank holds.

    Args:
        pp_rank: the rank's number in its pipeline.
        pp: ranks of the pipeline.
        schedule: "1F1B", one stage per rank; or "Interleaved1F1B", two per rank.

    Returns:
        numbers of the stages, in order.

    Raises:
        ValueError: an unknown schedule.

    Examples:
        >>> list(mxep.parallel.stages_of(1, 2, "1F1B")), list(mxep.parallel.stages_of(1, 2, "Interleaved1F1B"))
        ([1], [1, 3])
    """
    return range(pp_rank, pp * stages_per_rank(schedule), pp)

"""Steps each parameter during backward, as soon as its gradient is complete, and frees that gradient.

The gradients of one FSDP unit, or of one parameter without FSDP, exist at a time instead of all.  What needs all gradients before the
first update has another form:

    clipping by the global norm       none; the norm is measured on the way and reported
    skipping a step                   decided before backward, from the mean loss of all ranks, which is NaN without a target
    a non-finite norm, finite loss    some weights are updated already: the run ends with an error, without a checkpoint
    accumulation, pipeline            not possible: a gradient would be complete only after the last microbatch
    DDP                               not possible: it sums gradients over the ranks after the update
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxep.train.adamw import AdamW
from mxep.train.optimizer import GradientNorms


class OptimizerInBackward:
    """Hooks on every parameter of an optimizer. FSDP2 calls them too, once it has reduced a unit's gradients.

    `optimizer.step()` after backward finds no gradients; it only runs the optimizer's hooks.

    Args:
        optimizer: its parameters get the hooks.

    Raises:
        ValueError: in `norm` and the optimizer's step, if a parameter has a gradient after its update: DDP made it, of all ranks, after
            the update read that of this rank.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = mxep.train.AdamW(model.parameters(), lr=1e-3)
        >>> in_backward = mxep.train.OptimizerInBackward(optimizer)
        >>> loss = model(torch.ones(2, 64)).square().mean()
        >>> in_backward.decide(loss)
        >>> loss.backward()  # and the updates; optimizer.step() then tells a WeightCache of the new weights
        >>> model.weight.grad is None, bool(in_backward.norm() > 0)
        (True, True)
    """

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self._groups: dict[Tensor, int] = {}
        self._norms = GradientNorms()
        optimizer.make_states()  # not on the streams of a backward, nor among its activations
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._groups[parameter] = number
                parameter.register_post_accumulate_grad_hook(self._step)
        optimizer.register_step_pre_hook(self._check_freed)

    @torch.no_grad()
    def decide(self, loss: Tensor) -> None:
        """Call before backward: the step is skipped if the sum of all ranks' losses is not finite. No host sync.

        Args:
            loss: (), this rank's part of the mean over all targets.
        """
        total = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
        self.optimizer.found_inf = (~torch.isfinite(total)).float()

    def norm(self) -> Tensor:
        """The joint 2-norm of the gradients since the last call, see `mxep.train.optimizer.gradient_norm`; NaN if the step was skipped."""
        self._check_freed()
        norm = self._norms.joint()
        self._norms = GradientNorms()
        skipped = self.optimizer.found_inf
        return norm if skipped is None else torch.where(skipped > 0, torch.nan, norm)

    @torch.no_grad()
    def _step(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        group = self.optimizer.param_groups[self._groups[parameter]]  # a load replaces the groups
        self.optimizer.step_parameter(parameter, group, self._norms.squares_of(parameter.grad))
        parameter.grad = None

    def _check_freed(self, *_: Any) -> None:
        """Raise ValueError for a gradient that was made after the update. Takes and ignores the arguments of an optimizer's hooks."""
        for parameter in self._groups:
            if parameter.grad is not None:
                raise ValueError(
                    f"OptimizerInBackward: a parameter {tuple(parameter.shape)} has a gradient after its update, want none: "
                    "DistributedDataParallel sums gradients over the ranks after the update, which read those of this rank (take "
                    "mxep.parallel.apply_fsdp or torch's fully_shard, or step after backward), or a backward ran before this object was "
                    "made (set that gradient to None)"
                )

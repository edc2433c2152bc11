"""Forward and backward of one step's batches, on whatever part of the model this rank has.

Labels are cut as the ranks cut the tokens: each target counts on one rank, that of the last stage which has its place of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.models.decoder import Decoder
from mxep.models.loss import IGNORE
from mxep.parallel import HiddenStates, Meshes, Pipeline, PipelineSchedule, slice_sequence

Batch = tuple[Tensor, Tensor]  # inputs and labels, each (B, S) int64 on the CPU


class Passes:
    """Runs batches through this rank's stages.

    Args:
        stages: by number, see `mxep.train.build.build_stages`.
        meshes: this rank's place.
        batch_shape: (B, S) of one pass.
        accumulate: passes of a step.
        device: of the model.
        microbatch: sequences that go through a pipeline together.
        schedule: of the pipeline.

    Raises:
        ValueError: a step has fewer microbatches than the pipeline has stages.
    """

    def __init__(
        self,
        stages: dict[int, Decoder],
        meshes: Meshes,
        batch_shape: tuple[int, int],
        accumulate: int,
        device: torch.device,
        microbatch: int = 1,
        schedule: PipelineSchedule = "1F1B",
    ) -> None:
        self.stages, self.meshes, self.device, self.accumulate = stages, meshes, device, accumulate
        self.model = next(iter(stages.values()))
        self.pipeline: Pipeline | None = None
        self._passes = accumulate
        if meshes.pp.size() > 1:
            batch, seq_len = batch_shape
            self._passes = accumulate * (batch // microbatch)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            hidden = HiddenStates((microbatch, seq_len // meshes.tp.size(), self.model.config.dim), dtype)
            shape = (microbatch, seq_len)
            extra = self._router_loss if self.model.config.balance_loss or self.model.config.z_loss else None
            self.pipeline = Pipeline(stages, meshes.pp, self._passes, shape, hidden, device, schedule, extra)  # type: ignore[arg-type]

    def _router_loss(self, model: Decoder) -> Tensor:
        """Mean over ranks and passes of the routers' losses of the last forward."""
        return model.router_loss() / (self.meshes.stage.size() * self._passes)

    def at_hand(self, batch: Batch) -> Batch:
        """A batch in memory from which a GPU copies beside the host."""
        return batch if self.device.type == "cpu" else (batch[0].pin_memory(), batch[1].pin_memory())

    def labels_here(self, labels: Tensor) -> Tensor:
        """The targets (B, S) that count on this rank, (B, S/tp); all IGNORE where the last stage is elsewhere."""
        mine = slice_sequence(labels, self.meshes.tp, 1)
        return mine if self.pipeline is None or self.pipeline.has_last else torch.full_like(mine, IGNORE)

    def count_valid(self, batches: Sequence[Batch]) -> int:
        """Targets of these batches that count on this rank."""
        return sum(int((self.labels_here(labels) != IGNORE).sum()) for _, labels in batches)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropy over this rank's targets, nats, float32; inputs and labels (B, S). No pipeline."""
        inputs, labels = (part.to(self.device, non_blocking=True) for part in (inputs, labels))  # whole: a slice is not pinned
        return self.model(inputs, self.labels_here(labels))

    def backward(self, batches: Sequence[Batch], valid: float) -> Tensor:
        """Forward and backward of a step's `accumulate` batches, gradients of loss / valid; returns the loss summed on this rank, ()."""
        if self.pipeline is not None:
            return self.pipeline.step(*self._together(batches), valid)
        total = torch.zeros((), device=self.device)
        for index, (inputs, labels) in enumerate(batches):
            self.model.set_requires_gradient_sync(index + 1 == len(batches))  # type: ignore[operator]
            loss = self.loss(inputs, labels)
            (loss / valid + self._router_loss(self.model)).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Loss summed on this rank, without gradients; as many batches on all ranks."""
        if self.pipeline is None:
            return sum(float(self.loss(inputs, labels)) for inputs, labels in batches)
        empty = (torch.zeros_like(batches[0][0]), torch.full_like(batches[0][1], IGNORE))
        padded = [*batches, *[empty] * (-len(batches) % self.accumulate)]
        groups = [padded[start : start + self.accumulate] for start in range(0, len(padded), self.accumulate)]
        return sum(float(self.pipeline.evaluate(*self._together(group))) for group in groups)

    def _together(self, batches: Sequence[Batch]) -> Batch:
        """Batches as one, on the device: inputs (accumulate * B, S), labels (accumulate * B, S/tp)."""
        there = ([part.to(self.device, non_blocking=True) for part in parts] for parts in zip(*batches, strict=True))
        inputs, labels = map(torch.cat, there)
        return inputs, self.labels_here(labels)

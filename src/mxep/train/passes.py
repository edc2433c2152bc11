"""Forward and backward of one step's batches, on whatever part of the model this rank has.

Labels are cut as the ranks cut the tokens: each target counts on one rank, that of the last stage which has its place of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mxep.models.decoder import Decoder
from mxep.models.document_mask import PackedDocuments
from mxep.models.loss import IGNORE
from mxep.parallel import HiddenStates, Meshes, Pipeline, PipelineSchedule, slice_sequence
from mxep.train.data import Batch


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
        return model.router_loss(self.meshes.stage.get_group()) / (self.meshes.stage.size() * self._passes)

    def at_hand(self, batch: Batch) -> Batch:
        """A batch in memory from which a GPU copies beside the host."""
        return batch if self.device.type == "cpu" else tree_map_only(Tensor, Tensor.pin_memory, batch)

    def labels_here(self, labels: Tensor) -> Tensor:
        """The targets (B, S) that count on this rank, (B, S/tp); all IGNORE where the last stage is elsewhere."""
        mine = slice_sequence(labels, self.meshes.tp, 1)
        return mine if self.pipeline is None or self.pipeline.has_last else torch.full_like(mine, IGNORE)

    def count_valid(self, batches: Sequence[Batch]) -> int:
        """Targets of these batches that count on this rank."""
        return sum(int((self.labels_here(batch.labels) != IGNORE).sum()) for batch in batches)

    def attended_tokens(self, batches: Sequence[Batch]) -> float:
        """Mean over this rank's tokens of how many tokens their attention spans, as if it were not causal: S, or the document's length."""
        lengths = [batch.inputs.shape[1] if batch.documents is None else batch.documents.attended_tokens() for batch in batches]
        return sum(lengths) / len(lengths)

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropy over this rank's targets, nats, float32. No pipeline."""
        inputs, labels, documents = self._moved(batch)
        return self.model(inputs, self.labels_here(labels), documents)

    def backward(self, batches: Sequence[Batch], valid: float) -> Tensor:
        """Forward and backward of a step's `accumulate` batches, gradients of loss / valid; returns the loss summed on this rank, ()."""
        if self.pipeline is not None:
            inputs, labels, documents = self._together(batches)
            return self.pipeline.step(inputs, labels, valid, documents)
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            self.model.set_requires_gradient_sync(index + 1 == len(batches))  # type: ignore[operator]
            loss = self.loss(batch)
            (loss / valid + self._router_loss(self.model)).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Loss summed on this rank, without gradients; as many batches on all ranks."""
        if self.pipeline is None:
            return sum(float(self.loss(batch)) for batch in batches)
        empty = batches[0]._replace(inputs=torch.zeros_like(batches[0].inputs), labels=torch.full_like(batches[0].labels, IGNORE))
        padded = [*batches, *[empty] * (-len(batches) % self.accumulate)]
        groups = [padded[start : start + self.accumulate] for start in range(0, len(padded), self.accumulate)]
        return sum(float(self.pipeline.evaluate(*self._together(group))) for group in groups)

    def _together(self, batches: Sequence[Batch]) -> Batch:
        """Batches as one, on the device: inputs (accumulate * B, S), labels (accumulate * B, S/tp)."""
        moved = [self._moved(batch) for batch in batches]
        found = [batch.documents for batch in moved if batch.documents is not None]
        documents = None
        if found:
            positions, most, longest = zip(*found, strict=True)
            documents = PackedDocuments(torch.cat(positions), max(most), max(longest))
        inputs, labels = (torch.cat(parts) for parts in zip(*((batch.inputs, batch.labels) for batch in moved), strict=True))
        return Batch(inputs, self.labels_here(labels), documents)

    def _moved(self, batch: Batch) -> Batch:
        """On the device; whole, since a slice is not pinned."""
        return tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)

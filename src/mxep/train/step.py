"""One optimizer step: microbatches through this rank's pipeline stages, timing, figures, skipped steps, and profiler traces.

The trainer launches a step, then reads the figures of the previous one. If the host waited for every step, each step would start with an
empty launch queue, and a forward of many small kernels never fills it again. On four H200s that cost 4 of the 12 ms of a layer's forward.

Labels are sharded like the tokens. Each target counts on one rank: the rank of the last stage that holds its token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from mxep.device import checking
from mxep.models.decoder import Decoder
from mxep.models.document_mask import PackedDocuments
from mxep.models.loss import IGNORE
from mxep.parallel import HiddenStates, Meshes, Pipeline, PipelineSchedule, slice_sequence
from mxep.train.data.loader import Batch

PROFILE_FOLDER = "profile"
_Moment = torch.cuda.Event | float


class StepTime(NamedTuple):
    """An interval between two points in time, on the host or on a GPU's stream."""

    begin: _Moment
    end: _Moment

    def seconds(self) -> float:
        """Its length. The host waits for its end."""
        if isinstance(self.begin, float) or isinstance(self.end, float):
            return float(self.end) - float(self.begin)  # type: ignore[arg-type]
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3

    def ended(self) -> bool:
        """True if the end has been reached. Does not wait."""
        return isinstance(self.end, float) or self.end.query()


class StepClock:
    """Times steps on their device. A step is timed from the end of the previous one, so work between two steps is counted.

    Args:
        device: a GPU, whose current stream is timed, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last: _Moment | None = None

    def begin(self) -> None:
        """Call before a step. The step begins now if it is the first one, or the first after `interrupt`."""
        if self._last is None:
            self._last = self._now()

    def end(self) -> StepTime:
        """Call after the whole step has been launched."""
        assert self._last is not None
        lap = StepTime(self._last, self._now())
        self._last = lap.end
        return lap

    def interrupt(self) -> None:
        """Call before work that belongs to no step: an evaluation, a checkpoint."""
        self._last = None

    def _now(self) -> _Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class PendingStep(NamedTuple):
    """A step that has been launched.

    Attributes:
        step: its number, counted from 1.  lr: its learning rate.  valid: targets of all ranks that count in the loss.
        attended: mean number of tokens that one token's attention spans, as if it were not causal.
        figures: (4,) float64 in host memory, valid once `lap` has ended: loss summed over all ranks, gradient norm before clipping,
            largest expert load over the mean, experts that no token chose.
    """

    step: int
    lr: float
    valid: float
    attended: float
    figures: Tensor
    lap: StepTime


class SkippedStep(NamedTuple):
    """A step that did not update the weights: why, how many in a row up to this one, and how many in the whole run."""

    step: int
    reason: str
    in_a_row: int
    total: int


class SkippedSteps:
    """Counts the steps whose gradient norm was not finite. A step without a target is one of them, since its loss is 0 / 0.

    Such a step changes neither weights, moments, AdamW's step count nor expert biases; data and schedule advance.

    Args:
        allowed: how many in a row the run tolerates, those without a target not counted.

    Attributes:
        total, in_a_row: skipped so far, and since the last step that updated the weights.
        stop: why the run has to end; None until more than `allowed` in a row were skipped.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed, self.total, self.in_a_row = allowed, 0, 0
        self.stop: str | None = None

    def state_dict(self) -> dict[str, int]:
        """{"total": ..., "in_a_row": ...}."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.total, self.in_a_row = int(state["total"]), int(state["in_a_row"])

    def count(self, step: int, grad_norm: float, loss: float, valid: int) -> SkippedStep | None:
        """Take the figures of the next step and its number of targets; returns a record if it was skipped."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return None
        self.total += 1
        if not valid:
            return SkippedStep(step, "none of its tokens is a target", self.in_a_row, self.total)
        self.in_a_row += 1
        skipped = SkippedStep(step, f"gradient norm {grad_norm}, loss {loss}", self.in_a_row, self.total)
        if self.in_a_row > self.allowed:
            self.stop = (
                f"train: step {step}: {skipped.reason}; skipped {self.in_a_row} in a row, more than --max-skipped={self.allowed}; "
                "none of them changed the weights: resume with --resume and a lower --lr, or a higher --max-skipped; "
                "where an update before them destroyed the weights (every step is skipped again), resume from an earlier checkpoint with "
                "--resume-step"
            )
        return skipped


def copy_to_host(figures: Tensor) -> Tensor:
    """Copy a step's figures to host memory, asynchronously on the current stream."""
    if figures.device.type == "cpu":
        return figures
    there = torch.empty(figures.shape, dtype=figures.dtype, device="cpu", pin_memory=True)
    return there.copy_(figures, non_blocking=True)


class MicrobatchRunner:
    """Runs batches through this rank's stages.

    Args:
        stages: by number, see `mxep.train.build.build_stages`.
        meshes: the device meshes of this rank.
        batch_shape: (B, S) of one batch.
        accumulate: batches per step.
        device: of the model.
        microbatch: sequences per pipeline microbatch.
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
        self._microbatches = accumulate
        if meshes.pp.size() > 1:
            batch, seq_len = batch_shape
            self._microbatches = accumulate * (batch // microbatch)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            hidden = HiddenStates((microbatch, seq_len // meshes.tp.size(), self.model.config.dim), dtype)
            shape = (microbatch, seq_len)
            extra = self._router_loss if self.model.config.balance_loss or self.model.config.z_loss else None
            self.pipeline = Pipeline(stages, meshes.pp, self._microbatches, shape, hidden, device, schedule, extra)  # type: ignore[arg-type]

    def _router_loss(self, model: Decoder) -> Tensor:
        """The routers' losses of the last forward, as this microbatch's part of the mean over ranks and microbatches."""
        return model.router_loss(self.meshes.stage.get_group()) / (self.meshes.stage.size() * self._microbatches)

    def pinned(self, batch: Batch) -> Batch:
        """The batch in pinned memory, for asynchronous copies to a GPU."""
        return batch if self.device.type == "cpu" else tree_map_only(Tensor, Tensor.pin_memory, batch)

    def local_labels(self, labels: Tensor) -> Tensor:
        """This rank's shard (B, S/tp) of the targets (B, S); all IGNORE unless this rank has the last stage."""
        mine = slice_sequence(labels, self.meshes.tp, 1)
        return mine if self.pipeline is None or self.pipeline.has_last else torch.full_like(mine, IGNORE)

    def count_valid(self, batches: Sequence[Batch]) -> int:
        """Targets of these batches that count on this rank."""
        return sum(int((self.local_labels(batch.labels) != IGNORE).sum()) for batch in batches)

    def attended_tokens(self, batches: Sequence[Batch]) -> float:
        """Mean number of tokens that a token's attention spans, as if it were not causal: S, or the length of its document."""
        lengths = [batch.inputs.shape[1] if batch.documents is None else batch.documents.attended_tokens() for batch in batches]
        return sum(lengths) / len(lengths)

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropy over this rank's targets, nats, float32. No pipeline."""
        inputs, labels, documents = self._moved(batch)
        return self.model(inputs, self.local_labels(labels), documents)

    def backward(self, batches: Sequence[Batch], valid: Tensor, before: Callable[[Tensor], None] | None = None) -> Tensor:
        """Forward and backward of a step's `accumulate` batches, gradients of loss / valid (); returns the loss summed on this rank, ().

        `before` gets loss / valid of a batch, (), NaN without a target, before its backward begins; not with a pipeline.

        Backward runs in the calling thread.  By default torch gives it a thread for each GPU, whose caches know nothing of what forward has
        touched: the host then takes about 1.5 times as long, and one GPU gains nothing from a second thread.
        """
        with torch.autograd.set_multithreading_enabled(False):
            return self._backward(batches, valid, before)

    def _backward(self, batches: Sequence[Batch], valid: Tensor, before: Callable[[Tensor], None] | None) -> Tensor:
        if self.pipeline is not None:
            inputs, labels, documents = self._together(batches)
            return self.pipeline.step(inputs, labels, valid, documents)
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(index + 1 == len(batches))
            loss = self.loss(batch)
            mean = loss / valid
            if before is not None:
                before(mean)
            (mean + self._router_loss(self.model)).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Loss summed on this rank, without gradients. All ranks need the same number of batches."""
        if self.pipeline is None:
            return sum(float(self.loss(batch)) for batch in batches)
        empty = batches[0]._replace(inputs=torch.zeros_like(batches[0].inputs), labels=torch.full_like(batches[0].labels, IGNORE))
        padded = [*batches, *[empty] * (-len(batches) % self.accumulate)]
        groups = [padded[start : start + self.accumulate] for start in range(0, len(padded), self.accumulate)]
        return sum(float(self.pipeline.evaluate(*self._together(group))) for group in groups)

    def _together(self, batches: Sequence[Batch]) -> Batch:
        """The batches concatenated on the device: inputs (accumulate * B, S), labels (accumulate * B, S/tp)."""
        moved = [self._moved(batch) for batch in batches]
        found = [batch.documents for batch in moved if batch.documents is not None]
        documents = None
        if found:
            positions, most, longest = zip(*found, strict=True)
            documents = PackedDocuments(torch.cat(positions), max(most), max(longest))
        inputs, labels = (torch.cat(parts) for parts in zip(*((batch.inputs, batch.labels) for batch in moved), strict=True))
        return Batch(inputs, self.local_labels(labels), documents)

    def _moved(self, batch: Batch) -> Batch:
        """The whole batch on the device; a slice of it would not be pinned."""
        return tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)


class StepProfiler:
    """Records `steps` steps from step `first` on.

    Args:
        out: folder of the run.
        first: number of the first step that is recorded, counted from 1; None for none.
        steps: how many.
        device: whose kernels are recorded.
        host: record host activity too, which slows the host down. Always on for a CPU.
    """

    def __init__(self, out: Path, first: int | None, steps: int, rank: int, device: torch.device, host: bool = True) -> None:
        self.path = out / PROFILE_FOLDER / f"rank_{rank:05d}.json"
        self.first, self.steps = first, steps
        on_gpu = device.type == "cuda"
        self._activities = [ProfilerActivity.CPU] * (host or not on_gpu) + [ProfilerActivity.CUDA] * on_gpu
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Call before the step with this number."""
        if step == self.first:
            self._profile = profile(activities=self._activities)
            self._profile.start()

    def waits(self, step: int) -> bool:
        """True if the host must wait for this step: the last recorded one, and the one before the first."""
        return self.first is not None and step in (self.first - 1, self.first + self.steps - 1)

    def after(self, step: int, last: bool) -> str | None:
        """Call after the step; returns a line when a trace has been written. `last`: the run ends with this step."""
        if self._profile is None or self.first is None or (step < self.first + self.steps - 1 and not last):
            return None
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        self._profile = None
        recorded = step - self.first + 1  # fewer than asked for where the run ends first
        return f"profile of {recorded} step{'s' * (recorded > 1)}: {self.path.parent}"


def check_capturable(device: torch.device, transport: str | None) -> None:
    """Raise ValueError where a step waits for the GPU whatever its options are.

    Args:
        device: of the step.
        transport: name of the EP group's transport; None without one.
    """
    if transport not in (None, "symmetric"):
        raise ValueError(
            f"--cuda-graph: experts over several ranks by {transport} transport, which reads on the host how many rows each rank sends, "
            "want symmetric; give --ep 1 or --transport symmetric, or give --no-cuda-graph"
        )
    if checking(device):
        raise ValueError("--cuda-graph with MXEP_CHECK=1, whose checks read values on the host; unset it, or give --no-cuda-graph")

"""A training step of a model of transformers as a CUDA graph: the host launches one graph instead of thousands of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from mxep.device import checking
from mxep.step_graph import Capture, StepGraph, capture_on_gpu

if TYPE_CHECKING:
    from mxep.integrations.transformers_recompute import RecomputeBudget

_WHERE = f"{__name__}.GraphedStep"


class GraphedStep:
    """Calls a training step; from the fourth call on, or the fourth after `budget` has settled, by the replay of a CUDA graph.

    A replay repeats the recorded kernels on the recorded memory.  So every batch has the same shapes, and the step reads no value of the
    GPU on the host: no `loss.item()`, which belongs behind the call.  The optimizer has `capturable=True`.  A learning rate that changes is
    a tensor on the GPU that is filled in place.  Give no `attention_mask` where nothing is padded: a recorded step builds the mask of all
    scores from it.  Packed sequences, whose `position_ids` start anew, are an error.

    Args:
        model: of transformers, or a wrapper such as peft's, on one GPU.  Where layers are recomputed,
            `model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})` was called, since a graph cannot
            set the state of random numbers back.  Without dropout no step draws any.
        step: takes the batch's tensors and does all of a step: forward, backward, clipping, optimizer, `zero_grad()`; returns the loss, ().
        budget: decides in the first steps how many layers are kept; its `after_step` is called here, and no longer once it has settled.
        capture: records a step; for tests.

    Raises:
        ValueError: a model on a CPU without `capture`, layers that keep the state of random numbers, MXEP_CHECK=1, packed sequences, or
            inputs of other shapes than in the first call.
        RuntimeError: the step cannot be recorded; the message says why.

    Examples:
        >>> from mxep.integrations.transformers_graph import GraphedStep
        >>> # def step(tokens):
        >>> #     loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        >>> #     loss.backward()
        >>> #     optimizer.step()
        >>> #     optimizer.zero_grad()
        >>> #     return loss.detach()
        >>> # graphed = GraphedStep(model, step)
        >>> # for tokens in batches:
        >>> #     loss = graphed(tokens)  # the next call overwrites it
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Tensor],
        budget: RecomputeBudget | None = None,
        capture: Capture | None = None,
    ) -> None:
        device = next(model.parameters()).device
        if capture is None and device.type != "cuda":
            raise ValueError(f"{_WHERE}: a model on {device}, want it on a GPU, which records graphs; call the step itself")
        if device.type == "cuda" and checking(device):
            raise ValueError(f"{_WHERE}: MXEP_CHECK=1, whose checks read values on the host, want none of them; unset it")
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._step, self._budget = step, budget
        self._graph = StepGraph(device, partial(_record, capture or capture_on_gpu))

    def __call__(self, *batch: Any) -> Tensor:
        """The loss () of the step on this batch; see the class."""
        for layer in self._layers:
            if layer.gradient_checkpointing and getattr(layer._gradient_checkpointing_func, "keywords", {}).get("preserve_rng_state", True):
                raise ValueError(
                    f"{_WHERE}: {type(layer).__name__} is recomputed with the state of random numbers, which a graph cannot set back, want "
                    'none; call model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})'
                )
        if self._budget is not None and not self._budget.settled:
            loss = self._step(*batch)
            self._budget.after_step()
            return loss
        with _packed_sequences(_refuse):
            return self._graph(self._step, *batch)


def _record(capture: Capture, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record without the search for packed sequences, which reads a value; the calls before have searched and found none."""
    with _packed_sequences(lambda search, position_ids: None):
        return capture(work)


def _refuse(search: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> None:
    if search(position_ids) is not None:
        raise ValueError(f"{_WHERE}: position_ids of packed sequences, want whole ones; leave position_ids out, or call the step itself")


@contextmanager
def _packed_sequences(find: Callable[[Callable[[Tensor], Tensor | None], Tensor], None]) -> Iterator[None]:
    """Within it, transformers' masks find packed sequences in position_ids by `find`, which also gets transformers' own search."""
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = partial(find, search)
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search

"""A training step as a CUDA graph: recorded once, then replayed with other inputs, without the host between its kernels.

    first steps   run eagerly, on the graph's stream: kernels are compiled, and the optimizer's state exists before it is recorded
    next step     is recorded, which runs nothing, and then replayed
    later steps   copy their inputs into the graph's and replay it

A replay runs the recorded kernels on the recorded memory.  Parameters, moments, step counts and expert biases are updated in place, so they
are the run's own: evaluation and checkpoints read them between two replays.  What the host computed while the graph was recorded stays as
it was then.  So all that differs from step to step is a tensor on the GPU: tokens, targets, their number, the learning rate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

EAGER_STEPS = 3  # before the graph
# Records a function and returns what replays it, and the memory of its result.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def capture_on_gpu(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A `Capture` of what runs on the current stream, which is not the default stream, and on streams that wait for it.

    Raises:
        RuntimeError: the work waits for the GPU, or does something else that a graph cannot hold.
        torch.OutOfMemoryError: the graph's memory, that of the whole work, is more than there is.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # The threads of NCCL's watchdog and of the checkpoint writer may use the GPU meanwhile.
        with _without_garbage_collection(), torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            result = work()
    except Exception as error:
        first = error.__context__ or error  # a failed capture fails once more at its end
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())  # the old one still believes that it is recorded, and draws no more
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise RuntimeError(f"StepGraph: a CUDA graph cannot hold this step, run it without one (--no-cuda-graph): {first}") from error
    return graph.replay, result


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What is collected may be another CUDA graph, whose end invalidates what this thread records."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraph:
    """Calls a function of tensors, from call `EAGER_STEPS + 1` on by the replay of a graph.

    Args:
        device: of the graph's tensors; inputs may be on the CPU.
        capture: records the function.

    Examples:
        >>> def capture(work):  # instead of a GPU's
        ...     result = torch.empty(())
        ...     return lambda: result.copy_(work()), result
        >>> graph = StepGraph(torch.device("cpu"), capture)
        >>> [graph(torch.square, torch.tensor(float(step))).item() for step in range(6)]
        [0.0, 1.0, 4.0, 9.0, 16.0, 25.0]
    """

    def __init__(self, device: torch.device, capture: Capture = capture_on_gpu) -> None:
        self._device, self._capture = device, capture
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._eager_left = EAGER_STEPS
        self._inputs: Any = None
        self._recorded: tuple[Callable[[], None], Tensor] | None = None

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """function(*inputs), which the next call may overwrite.

        Args:
            function: the same in every call. It reads tensors on the GPU only.
            inputs: tuples, lists and dicts of tensors, in every call of the same structure, shapes and dtypes.

        Raises:
            ValueError: other shapes or dtypes, or other values that are no tensors, than in the first call.
            RuntimeError: the function cannot be recorded.
        """
        with _aside(self._stream):
            self._copy(inputs)
            if self._eager_left:
                self._eager_left -= 1
                return function(*self._inputs)
            if self._recorded is None:
                self._recorded = self._capture(lambda: function(*self._inputs))
            replay, result = self._recorded
            replay()
            return result

    def _copy(self, inputs: Any) -> None:
        """Put the inputs where the graph reads them."""
        if self._inputs is None:
            self._inputs = tree_map_only(Tensor, lambda given: torch.empty_like(given, device=self._device), inputs)
        own, structure = tree_flatten(self._inputs)
        for held, given in zip(own, structure.flatten_up_to(inputs), strict=True):  # dicts by key, not by order
            if isinstance(given, Tensor) != isinstance(held, Tensor):
                raise ValueError(f"StepGraph: an input is a {type(given).__name__}, want a {type(held).__name__} as in the first call")
            if isinstance(given, Tensor):
                if given.requires_grad:
                    raise ValueError("StepGraph: an input requires a gradient, which a replay would not give it, want detached inputs")
                if (held.shape, held.dtype) != (given.shape, given.dtype):
                    got, want = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (given, held))
                    raise ValueError(f"StepGraph: an input of {got}, want {want} as in the first call")
                held.copy_(given, non_blocking=True)
            elif held != given:
                raise ValueError(f"StepGraph: an input of {given!r}, want {held!r} as in the first call")


@contextmanager
def _aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on `stream`, after what is on the current stream and before what follows there; None: on a CPU."""
    if stream is None:
        yield
        return
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)

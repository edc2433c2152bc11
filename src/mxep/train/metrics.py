"""The output of a run on rank 0: printed lines, a progress bar, metrics.jsonl, TensorBoard's files, loss.png."""

from __future__ import annotations

import io
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from mxep.device import total_memory
from mxep.extras import install_command
from mxep.train.durable_files import append, replace_file
from mxep.train.output import Output, console
from mxep.train.run_folder import METRICS_FILE, set_aside
from mxep.train.step import SkippedStep

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PLOT_FILE = "loss.png"
TENSORBOARD_FOLDER = "tensorboard"
GIB = 1 << 30
_NOTE_S = 30.0


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Cross-entropy in nats per target, norm before clipping, tokens and load over all ranks, memory of rank 0.

    `tokens_per_s` and `tps` count all tokens of the sequences, `valid_tokens` the targets that the loss counts.

    `tflops` is the model's work of one rank and second (`mxep.models.flops.TokenFlops.model`), `mfu` its share of the GPU's dense bf16
    peak. `mfu_causal` is that share with causal attention halved, `hfu` the same with what activation checkpointing recomputes. The three
    are None where the peak is not known.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    valid_tokens: int
    step_s: float
    memory_gib: float
    memory_share: float
    load_max_over_mean: float
    dead_experts: int
    tps: float
    tflops: float
    mfu: float | None
    mfu_causal: float | None
    hfu: float | None

    def line(self, steps: int) -> str:
        """The printed form, torchtitan's with our figures after it; `tps` is tokens per second and rank."""
        mfu, causal, hfu = ("n/a" if share is None else f"{share:.2%}" for share in (self.mfu, self.mfu_causal, self.hfu))
        return (
            f"{_step_label(self.step, steps)}  loss: {self.loss:7.4f}  grad_norm: {self.grad_norm:7.4f}  "
            f"memory: {self.memory_gib:5.2f}GiB({self.memory_share:.2%})  tps: {self.tps:,.0f}  tflops: {self.tflops:,.2f}  mfu: {mfu}  "
            f"mfu_causal: {causal}  hfu: {hfu}  "
            f"lr: {self.lr:.2e}  expert load max/mean: {self.load_max_over_mean:.2f}  dead: {self.dead_experts}"
        )


def _step_label(step: int, steps: int) -> str:
    """The beginning of a printed line, as wide for every step of a run of so many.

    >>> _step_label(3, 200)
    'step:   3'
    """
    return f"step: {step:>{max(len(str(steps)), 2)}}"


def memory_in_use(device: torch.device, extra_bytes: int = 0) -> tuple[float, float]:
    """(GiB, share of `total_memory`): peak use so far of the memory of the GPU, or on a CPU of this process.

    `extra_bytes`: memory on the GPU outside of torch's allocator (symmetric memory). Memory of NCCL and CUDA is not counted.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device) + extra_bytes
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak / GIB, peak / total_memory(device)


def progress_notes(enabled: bool) -> Callable[[str], None]:
    """A function that takes progress messages and prints one every half minute; with `enabled` False (all ranks but 0) it prints none."""
    shown, last = console(enabled), time.monotonic()

    def note(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _NOTE_S:
            last = time.monotonic()
            shown.print(text, markup=False)

    return note


class MetricsLog:
    """Writes every record as one JSON line, prints some of them, and shows a progress bar on a terminal. Entering it opens its files.

    Output that fails is dropped and the run goes on: printed lines, lines of the JSONL, figures for TensorBoard, the plot. Each failure is
    printed once, and the JSONL gets a line of kind "lost_output" as soon as it can be written.

    Args:
        out: folder of the run.
        steps: of the whole run.
        start_step: the step that a resumed run starts from. Records of later steps, which the run wrote after its last checkpoint, are
            removed. Lines that are no record are reported and kept.
        log_every: steps between printed lines.
        enabled: False on all ranks but 0; nothing happens there.
        unit: what one token is called.
        tensorboard: write every figure to <out>/tensorboard as well.
        at_first_step: called before the first step is logged, for lines to print; until then the files stay as they are, and records wait.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        out: Path,
        steps: int,
        start_step: int = 0,
        log_every: int = 10,
        enabled: bool = True,
        unit: str = "token",
        tensorboard: bool = False,
        at_first_step: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.out, self.steps, self.log_every, self.enabled, self.unit = out, steps, log_every, enabled, unit
        self.console = console(enabled)
        self._last_step = start_step
        self._progress = Progress(console=self.console, disable=not (enabled and self.console.is_terminal), transient=True)
        self._task = self._progress.add_task("training", total=steps, completed=start_step)
        self._evaluated: set[int] = set()  # steps whose evaluation is in the file already
        self._lost: list[str] = []  # failures that are not in the JSONL yet
        self._failing = False  # the last write to the JSONL failed
        self._summary_writer = _import_tensorboard() if tensorboard and enabled else None
        self._tensorboard: SummaryWriter | None = None
        self._at_first_step = at_first_step
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # records from before the first step

    def __enter__(self) -> MetricsLog:
        if self.enabled and self._at_first_step is None:
            self._open()
        self._progress.start()
        return self

    def _open(self) -> None:
        """Remove what later steps left in the files."""
        start_step, path = self._last_step, self.out / METRICS_FILE
        if not start_step and path.exists() and path.stat().st_size:
            self.say(f"metrics: {path} is of a run from which this one does not resume; it was moved to {set_aside(path)}")
        read = _read_lines(path, self.say)
        kept = [(line, record) for line, record in read if record is None or record.get("step", 0) <= start_step]
        self._evaluated = {record["step"] for _, record in kept if record is not None and record["kind"] == "held_out"}
        replace_file(path, b"".join(line + b"\n" for line, _ in kept))
        if self._summary_writer is not None:
            with self._surviving(f"TensorBoard: {self.out / TENSORBOARD_FOLDER}", "it gets no figures"):
                hidden_from = start_step + 1 if start_step else 0  # 0: the run was killed before its first checkpoint
                self._tensorboard = self._summary_writer(str(self.out / TENSORBOARD_FOLDER), purge_step=hidden_from)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        if self.enabled and self._at_first_step is None:
            self._append_lost_output()

    def say(self, text: str) -> None:
        """Print a line of plain text; dropped if stdout fails (see `mxep.train.output`)."""
        self.console.print(text, markup=False)

    def write(self, kind: str, **values: Any) -> None:
        """Append {"kind": kind, **values} to the JSONL."""
        if not self.enabled or (kind == "held_out" and values["step"] in self._evaluated):
            return
        if self._at_first_step is not None:
            if kind not in ("step", "skipped_step"):
                self._waiting.append((kind, values))
                return
            at_first_step, self._at_first_step = self._at_first_step, None
            for line in at_first_step():
                self.say(line)
            self._open()
            for waiting, its_values in self._waiting:
                self.write(waiting, **its_values)
        self._last_step = values.get("step", self._last_step)
        self._append_lost_output()
        self._append({"kind": kind, **values})
        if self._tensorboard is not None and "step" in values:
            writer, self._tensorboard = self._tensorboard, None  # dropped at the first failure
            with self._surviving(f"TensorBoard: {self.out / TENSORBOARD_FOLDER}", "it gets no more figures"):
                tag = "/".join([kind, *(str(values[name]) for name in ("layer", "of") if name in values)])
                for name, value in values.items():
                    if name != "step" and isinstance(value, (int, float)):
                        writer.add_scalar(f"{tag}/{name}", value, values["step"])
                writer.flush()  # raises here what TensorBoard's own thread could not write
                self._tensorboard = writer

    @contextmanager
    def _surviving(self, what: str, result: str) -> Iterator[None]:
        """Report an OSError of the body instead of raising it."""
        try:
            yield
        except OSError as error:
            self._lost.append(f"{what} cannot be written: {error}; {result}, the run continues")
            self.say(self._lost[-1])

    def _append(self, record: dict[str, Any]) -> bool:
        """Append a record to the JSONL; False if it was dropped because the write failed."""
        try:
            append(self.out / METRICS_FILE, f"{json.dumps(record)}\n".encode())
        except OSError as error:
            if not self._failing:
                self._lost.append(
                    f"metrics: {self.out / METRICS_FILE} cannot be written: {error}; its lines are dropped, the run continues"
                )
                self.say(self._lost[-1])
            self._failing = True
            return False
        self._failing = False
        return True

    def _append_lost_output(self) -> None:
        """Add a line to the JSONL for each output that began to fail."""
        for stream in (self.console.file, sys.stderr):
            self._lost += stream.failures() if isinstance(stream, Output) else ()
        while self._lost and self._append({"kind": "lost_output", "step": self._last_step, "reason": self._lost[0]}):
            del self._lost[0]

    def step(self, record: StepRecord) -> None:
        """Log one step, and print it every `log_every` steps."""
        self.write("step", **asdict(record))
        self._progress.update(self._task, completed=record.step)
        if record.step == 1 or record.step % self.log_every == 0 or record.step == self.steps:
            self.say(record.line(self.steps))

    def skipped_step(self, skipped: SkippedStep) -> None:
        """Log and print one skipped step."""
        self.write("skipped_step", **skipped._asdict())
        self._progress.update(self._task, completed=skipped.step)
        label = _step_label(skipped.step, self.steps)
        self.say(f"{label}  skipped: {skipped.reason} ({skipped.in_a_row} in a row); the weights stay as they were")

    def held_out(self, step: int, loss: float, tokens: int, tokens_per_byte: float | None = 1.0) -> None:
        """Log and print one evaluation: loss in nats per token, and per byte, which compares runs with different tokenizers.

        `tokens_per_byte`: None for conversations, whose targets are a part of them; the loss per byte is None then.
        """
        per_byte = None if tokens_per_byte is None else loss * tokens_per_byte
        bits = None if per_byte is None else per_byte / math.log(2)
        self.write("held_out", step=step, loss=loss, tokens=tokens, nats_per_byte=per_byte, bits_per_byte=bits)
        also = "" if self.unit == "byte" or per_byte is None else f" ({per_byte:.4f} nats per byte)"
        self.say(f"{_step_label(step, self.steps)}  held-out loss: {loss:.4f} nats per {self.unit}{also}, {tokens:,} tokens")

    def plot(self) -> Path | None:
        """Draw the loss of all steps so far to loss.png; returns its path, None if disabled or if it could not be written."""
        if not self.enabled:
            return None
        target = self.out / PLOT_FILE
        with self._surviving(f"plot: {target}", "it is left out"):
            plot_losses({self.out.name: read_metrics(self.out / METRICS_FILE, note=lambda _: None)}, target, self.unit)
            return target
        return None


def read_metrics(path: Path, note: Callable[[str], None] = warnings.warn) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; an empty list if there is no file. Lines that are no record are skipped, and `note` takes a message."""
    return [record for _, record in _read_lines(path, note) if record is not None]


def last_step(records: Sequence[dict[str, Any]]) -> int:
    """The last step, skipped ones included, in records of a metrics.jsonl; 0 if there is none."""
    return max((record["step"] for record in records if record["kind"] in ("step", "skipped_step")), default=0)


def _read_lines(path: Path, note: Callable[[str], None]) -> list[tuple[bytes, dict[str, Any] | None]]:
    """(line without its line end, its record) of a metrics.jsonl; the record is None if the line is cut, damaged or in another format."""
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() and path.stat().st_size else []
    read = [(line, _parse_record(line)) for line in lines]
    bad = [number for number, (_, record) in enumerate(read, 1) if record is None]
    if bad:
        note(f"metrics: {path}: {len(bad)} of {len(read)} lines hold no record and are passed over, the first is line {bad[0]}")
    return read


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None unless it is an object with a kind, an integer step if any, and only numbers in a measured step.

    >>> _parse_record(b'{"kind": "step", "step": 1, "loss": 2.5}'), _parse_record(b'{"kind": "step", "st')
    ({'kind': 'step', 'step': 1, 'loss': 2.5}, None)
    """
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if type(record.get("step", 0)) is not int:
        return None
    if record["kind"] not in ("step", "held_out"):
        return record
    numbers = all(type(value) in (int, float, type(None)) for name, value in record.items() if name != "kind")
    return record if numbers and "step" in record and record.get("loss") is not None else None


def smooth(values: list[float], span: int) -> list[float]:
    """Moving average over the last `span` values (fewer at the start).

    >>> smooth([4.0, 2.0, 0.0], span=2)
    [4.0, 3.0, 1.0]
    """
    return [sum(values[max(i + 1 - span, 0) : i + 1]) / min(i + 1, span) for i in range(len(values))]


def plot_losses(runs: dict[str, list[dict[str, Any]]], target: Path, unit: str = "token") -> None:
    """Loss against step for runs by name: training loss faint and smoothed, held-out loss as points. Writes a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw_losses(figure.subplots(), runs, unit)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    replace_file(target, drawn.getvalue())


def draw_losses(axes: Any, runs: dict[str, list[dict[str, Any]]], unit: str = "token") -> None:
    """What `plot_losses` draws, on axes of matplotlib."""
    runs = {name.replace("$", r"\$"): records for name, records in runs.items()}  # matplotlib would read a formula
    for index, (name, records) in enumerate(runs.items()):
        color = f"C{index}"
        prefix = f"{name}: " if len(runs) > 1 else ""
        steps = [record["step"] for record in records if record["kind"] == "step"]
        losses = [record["loss"] for record in records if record["kind"] == "step"]
        span = max(len(losses) // 20, 1)
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        label = f"{prefix}training" + (f", mean of {span} steps" if span > 1 else "")
        width = 1.6 * (len(runs) - index)  # thinner than the ones before, which equal curves would hide
        axes.plot(steps, smooth(losses, span), color=color, linewidth=width, label=label)
        held = [(record["step"], record["loss"]) for record in records if record["kind"] == "held_out"]
        if held:
            label = f"{prefix}held out, {held[-1][1]:.3f} at the end"
            axes.plot(*zip(*held, strict=True), "o", color="black", mfc=color, markersize=6, label=label)
    if len(runs) == 1:
        axes.set_title(next(iter(runs)))
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per {unit}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _import_tensorboard() -> type[SummaryWriter]:
    """TensorBoard's writer. Raises ValueError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"--tensorboard needs TensorBoard; {install_command('tensorboard')}") from error
    return SummaryWriter

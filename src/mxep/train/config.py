"""Everything that `mxep train` can be told: one dataclass, read by tyro, kept in every checkpoint (no torch here)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import FlagCreatePairsOff

from mxep.models.presets import TRAIN_DEFAULTS, default_model, resolve_model

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class TrainConfig:
    """Train a MoE model. With no arguments: a DeepSeek-V3-shaped model that suits the machine, on the Python standard library's source.

    Options without a value here take what suits the model and the machine; the run prints them.
    """

    model: str | None = None
    """dsv3_debug_cpu, dsv3_debug, dsv3_16b or dsv3_671b."""
    recipe: str = "mxfp8_wgrad_with_hp"
    """Precision of the MoE exchanges and GEMMs; "bf16" is the high-precision arm (float32 on a CPU)."""
    data: tuple[str, ...] = ()
    """Text files, folders, .jsonl or .parquet with a `text` field; nothing means the Python standard library's source."""
    held_out_share: float = 0.02
    """Share of the documents that is kept for evaluation, chosen by a hash of their content."""
    out: Path | None = None
    """Folder of the run; runs/<model>-<recipe>, numbered when that is taken."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the run in --out (else from the newest under runs/), with its settings where none are given."""
    steps: int | None = None
    """Optimizer steps of the whole run."""
    stop_after: int | None = None
    """Stop here with a checkpoint, as a signal would; the schedule stays that of --steps."""
    batch: int | None = None
    """Sequences a rank and pass."""
    accumulate: int = 1
    """Passes a step (gradient accumulation)."""
    seq_len: int | None = None
    """Tokens a sequence."""
    lr: float | None = None
    """Highest learning rate."""
    warmup: int | None = None
    """Steps of linear warmup."""
    lr_floor: float = 0.1
    """Learning rate at the end, as a share of the highest."""
    weight_decay: float = 0.1
    """On matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    seed: int = 0
    """Of the initialisation and of the data's order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs when there are any."""
    nproc: int | None = None
    """Ranks to start; all GPUs, or 2 on a CPU. Under torchrun its ranks are used."""
    ep: int | None = None
    """Ranks that share one set of experts; as many as there are where the expert count allows."""
    cache_weights: FlagCreatePairsOff[bool] = False
    """Quantise the experts' weights once a step instead of once a pass and direction: same numbers, 2 bytes a weight more memory."""
    fused_experts: bool = True
    """Run the experts' SwiGLU as one function where the recipe has one (MXFP8 GEMMs): half as much is kept for backward; in bf16 the
    results differ in the last bits from those of one GEMM after the other."""
    force_balance: FlagCreatePairsOff[bool] = False
    """Give every expert the same number of tokens (for measurements of speed)."""
    eval_every: int | None = None
    """Steps between held-out evaluations; a third of the run. There is always one at the end."""
    eval_tokens: int = 32768
    """Targets of an evaluation, at most."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; half of the run. There is always one at the end and on Ctrl-C."""
    keep: int = 2
    """Checkpoints to keep."""
    log_every: int = 10
    """Steps between printed lines; the JSONL has every step."""

    def __post_init__(self) -> None:
        positive = ("steps", "batch", "accumulate", "seq_len", "lr", "nproc", "ep", "eval_every", "eval_tokens", "checkpoint_every")
        for name in (*positive, "keep", "log_every", "stop_after"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')}={value}, want more than 0")
        for name in ("weight_decay", "max_grad_norm", "warmup", "seed"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"--{name.replace('_', '-')}={value}, want 0 or more")
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"--lr-floor={self.lr_floor}, want 0 to 1")

    def to_json(self) -> dict[str, Any]:
        """Plain values only, for checkpoints and logs."""
        values = dataclasses.asdict(self)
        values["data"] = list(self.data)
        values["out"] = None if self.out is None else str(self.out)
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_json`. Raises ValueError on a name that there is no option for."""
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"saved settings: unknown {', '.join(unknown)}; written by another version of mxep?")
        values = dict(values)
        values["data"] = tuple(values.get("data", ()))
        values["out"] = Path(values["out"]) if values.get("out") else None
        return TrainConfig(**values)


@dataclass(frozen=True)
class Settings:
    """A `TrainConfig` with nothing left open; the fields are those of the options."""

    model: str
    steps: int
    batch: int
    seq_len: int
    lr: float
    warmup: int
    ep: int
    eval_every: int
    checkpoint_every: int


def settle(config: TrainConfig, device_type: str, world: int) -> Settings:
    """Fill what the command line left open from the model's preset and the machine.

    Raises:
        ValueError: unknown model, sequences longer than the model's, an EP degree that divides neither ranks nor experts.
    """
    model = config.model or default_model(device_type)
    shape = resolve_model(model)
    defaults = TRAIN_DEFAULTS[model]
    steps = config.steps or defaults.steps
    seq_len = config.seq_len or defaults.seq_len
    if seq_len > shape.max_seq_len:
        raise ValueError(f"--seq-len={seq_len}, want at most {model}'s max_seq_len={shape.max_seq_len}")
    ep = config.ep or max(d for d in range(1, world + 1) if world % d == 0 and shape.num_experts % d == 0)
    if world % ep:
        raise ValueError(f"--ep={ep} does not divide the {world} ranks")
    if shape.num_experts % ep:
        raise ValueError(f"--ep={ep} does not divide the {shape.num_experts} experts of {model}")
    return Settings(
        model=model,
        steps=steps,
        batch=config.batch or defaults.batch,
        seq_len=seq_len,
        lr=config.lr or defaults.lr,
        warmup=defaults.warmup if config.warmup is None else config.warmup,
        ep=ep,
        eval_every=config.eval_every or max(-(-steps // 3), 1),
        checkpoint_every=config.checkpoint_every or max(-(-steps // 2), 1),
    )


def save_config(config: TrainConfig, out: Path) -> None:
    """Write the run's options to <out>/config.json, for --resume to start from."""
    lasting = dataclasses.replace(config, resume=False, stop_after=None)
    (out / CONFIG_FILE).write_text(json.dumps(lasting.to_json(), indent=2) + "\n")


def load_config(out: Path) -> TrainConfig:
    """The options of the run in `out`. Raises ValueError when there are none or they are damaged."""
    path = out / CONFIG_FILE
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"resume: no run in {out} (no {CONFIG_FILE}); name its folder with --out") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"resume: {path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"resume: {path} is damaged: want an object, got {type(values).__name__}")
    return TrainConfig.from_json(values)

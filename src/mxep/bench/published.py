"""Our training steps compared with figures that other projects have published, counted in the same ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mxep.bench.records import Record, device_title, routing_of
from mxep.bench.training import recomputation_of, utilizations
from mxep.device import peak_bf16_flops_of
from mxep.models.flops import flops_per_token
from mxep.models.presets import MODELS, preset_of, resolve_model, train_defaults

COLUMNS = (
    "model",
    "by, source",
    "GPUs",
    "precision of the experts",
    "tokens per sequence",
    "recomputation",
    "tokens/s a GPU",
    "TFLOP/s a GPU, as published",
    "counted with attention whole",
    "counted with causal attention halved",
    "the same, and recomputation",
)
_MODELS = ("dsv3_16b", "qwen3_30b_a3b")  # presets that others have published figures for


class Published(NamedTuple):
    """A published figure; None and "" for what its source does not say.

    Attributes:
        model: in words.  preset: of that shape, to count its FLOPs; None: we have none.
        by: the project, "" where it is not known.  source: where its figures were read, and when.  gpus, precision: in words.
        seq_len: tokens per sequence.
        tokens_per_s, tflops: of one GPU.
    """

    model: str
    preset: str | None
    by: str
    source: str
    gpus: str
    precision: str
    seq_len: int | None
    tokens_per_s: tuple[int, ...]
    tflops: int | None


_NOT_READ_AGAIN = "as known to this project in November 2026, its page not read again"
PUBLISHED = (
    Published("Qwen3-30B-A3B", "qwen3_30b_a3b", "Megatron-Bridge", _NOT_READ_AGAIN, "16 x H100", "bf16", 4096, (13_000,), 299),
    Published("Qwen3-30B-A3B", "qwen3_30b_a3b", "NeMo Automodel", "its summary of August 2026", "8 x H100", "bf16", 4096, (12_040,), 277),
    Published("DeepSeek-V3-16B", "dsv3_16b", "torchtitan", _NOT_READ_AGAIN, "8 x H100", "bf16", 4096, (11_300, 11_800), None),
    Published("Mixtral-8x22B", None, "", _NOT_READ_AGAIN, "128 x H100", "FP8 in blocks", None, (), 560),
)


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The rows of `COLUMNS`: `PUBLISHED`; then arms of the records that trained one of these models on GPUs, with a forced balance."""
    found: list[list[str]] = []
    for record in records:
        name, peak = record["model"]["name"], peak_bf16_flops_of(device_title(record["device"]))
        if peak is None or preset_of(name) not in _MODELS or routing_of(record) != "forced balance":
            continue
        options = record["options"]
        length = options["seq_len"] or train_defaults(name, resolve_model(name))[1].seq_len
        for arm, step in record["steps"].items():
            tps = step["tokens_per_s"] / record["world_size"]
            shares = utilizations(record, arm).values()  # of the run itself, which knows what it computed twice
            counts = ("" if share is None else f"{share * peak / 1e12:.0f}" for share in shares)
            graph = ", as a CUDA graph" if step.get("cuda_graph") else ""
            place = f"{record['world_size']} x {device_title(record['device'])}", f"{arm}{graph}", f"{length}"
            found.append([name, "mxep", *place, recomputation_of(record, arm), f"{tps:,.0f}", "", *counts])
    others = []
    for other in PUBLISHED:
        counted = ["", ""]
        if other.preset is not None and other.seq_len is not None:
            flops = flops_per_token(MODELS[other.preset], other.seq_len)
            counted = [_range([tps * count / 1e12 for tps in other.tokens_per_s]) for count in (flops.model, flops.model_causal)]
        length = "" if other.seq_len is None else str(other.seq_len)
        published = _range(other.tokens_per_s), "" if other.tflops is None else str(other.tflops)
        by = ", ".join(filter(None, (other.by, other.source)))
        others.append([other.model, by, other.gpus, other.precision, length, "", *published, *counted, ""])
    return [*others, *found]


def _range(values: Sequence[float]) -> str:
    """
    >>> _range([11300, 11800]), _range([12000]), _range([])
    ('11,300 to 11,800', '12,000', '')
    """
    return " to ".join(f"{value:,.0f}" for value in values)

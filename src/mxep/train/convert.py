"""`mxep convert`: writes a checkpoint of `mxep train`, or a Hugging Face folder, as a Hugging Face folder in one process on a CPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors import SafetensorError
from tyro.conf import Positional

PROGRAM = "mxep convert"
WrittenDtype = Literal["bfloat16", "float32", "mxfp8"]


@dataclass(frozen=True)
class ConvertConfig:
    """Write the weights of a run as a Hugging Face folder: config.json and safetensors files under the names of the published model. Or
    write such a folder again in another format.

    The other way, `mxep train --init-from FOLDER` starts a run from such a folder.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, whose newest checkpoint is taken, or of one checkpoint; or a Hugging Face folder in bf16 or float32, FP8 with block
    scales, or MXFP8, of the architectures deepseek_v2, deepseek_v3 and qwen3_moe."""
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to create."""
    dtype: WrittenDtype = "bfloat16"
    """Dtype of the written weights; a run keeps float32 unless it had --dtype bfloat16. mxfp8: linear layers in MXFP8, as vLLM and SGLang
    load it (the format mxfp8-quantized of compressed-tensors), the rest in bf16."""
    drop_expert_bias: bool = False
    """Of a run: drop non-zero expert biases if the published architecture has none (all but DeepSeek-V3). The router then chooses other
    experts than in the run, and the loss changes."""


def command(argv: Sequence[str]) -> int:
    """Run `mxep convert <argv>`; returns the exit status, 1 if the folder cannot be written. Raises ValueError for wrong arguments."""
    config = tyro.cli(ConvertConfig, args=list(argv), prog=PROGRAM)
    try:
        for line in convert(config.run, config.out, config.dtype, config.drop_expert_bias):
            print(line)
    except (OSError, SafetensorError) as error:
        print(f"{PROGRAM}: error: {config.out} was not written: {error}; make room there, or name another folder", file=sys.stderr)
        return 1
    return 0


def convert(run: Path, out: Path, dtype: WrittenDtype = "bfloat16", drop_expert_bias: bool = False) -> list[str]:
    """Write the folder; returns lines for the user. Progress messages are printed.

    Raises:
        ValueError: no run or checkpoint, a damaged one, a model without a published architecture, a trained value that the published
            architecture lacks, `drop_expert_bias` with a Hugging Face folder, or `out` exists.
        OSError, SafetensorError: the folder cannot be written; the partial one is removed.
    """
    import torch

    from mxep.models.huggingface_files import INDEX, SINGLE
    from mxep.models.huggingface_writer import convert_published, save_published
    from mxep.train.data.tokenizer import ByteTokenizer
    from mxep.train.data.tokenizer_export import publish_tokenizer
    from mxep.train.loaded_model import open_run, read_model, trained_shape
    from mxep.train.metrics import progress_notes

    mxfp8, report = dtype == "mxfp8", progress_notes(True)
    plain = torch.float32 if dtype == "float32" else torch.bfloat16
    if (run / INDEX).exists() or (run / SINGLE).exists():
        if drop_expert_bias:
            raise ValueError(f"--drop-expert-bias, but {run} is a Hugging Face folder, whose tensors all stay, want a run; leave it out")
        convert_published(run, out, plain, mxfp8=mxfp8, report=report)
        return [f"{run} -> {out}, {dtype}"]
    manifest = open_run(run)
    name, shape = trained_shape(manifest)
    identity, settings = manifest.facts.get("identity", {}), manifest.facts.get("settings", {})
    coefficient = settings.get("balance_loss")  # None: the model's
    shape = shape if coefficient is None else dataclasses.replace(shape, balance_loss=coefficient)
    fingerprint = identity.get("tokenizer", ByteTokenizer.fingerprint)
    tokenizer = publish_tokenizer(settings.get("tokenizer"), fingerprint, bool(settings.get("chat")))
    notes = save_published(
        shape,
        read_model(manifest),
        out,
        plain,
        drop_expert_bias=drop_expert_bias,
        token_ids=tokenizer.token_ids,
        stop_ids=tokenizer.stop_ids,
        files=tokenizer.files,
        mxfp8=mxfp8,
        report=report,
    )
    notes.append(tokenizer.note)
    return [f"{manifest.path} (step {manifest.step}, {name}) -> {out}, {dtype}", *notes]

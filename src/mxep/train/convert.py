"""`mxep convert`: from a checkpoint of `mxep train` to a Hugging Face folder, layer by layer in one process, on a CPU."""

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


@dataclass(frozen=True)
class ConvertConfig:
    """Write the weights of a run as a Hugging Face folder: config.json and safetensors files under the names of the published model.

    The other way, `mxep train --init-from FOLDER` starts a run from such a folder.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, whose newest checkpoint is taken, or of one checkpoint."""
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to be made."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the written weights; a run keeps float32."""
    drop_expert_bias: bool = False
    """Leave out the experts' biases where the published architecture has none (all but DeepSeek-V3), though they are not zero: tokens then
    choose other experts than in the run, and the loss is another one."""


def command(argv: Sequence[str]) -> int:
    """Run `mxep convert <argv>`; returns the exit status, 2 when called wrongly, 1 where nothing can be written."""
    config = tyro.cli(ConvertConfig, args=list(argv), prog=PROGRAM)
    try:
        for line in convert(config.run, config.out, config.dtype, config.drop_expert_bias):
            print(line)
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        print(f"{PROGRAM}: error: {config.out} was not written: {error}; make room there, or name another folder", file=sys.stderr)
        return 1
    return 0


def convert(run: Path, out: Path, dtype: str = "bfloat16", drop_expert_bias: bool = False) -> list[str]:
    """Write the folder; returns what there is to say about it.

    Raises:
        ValueError: no run or checkpoint there, a damaged one, a model that has no published form, a trained value that this form has no
            place for, `out` exists.
        OSError, SafetensorError: it cannot be written; nothing is left there.
    """
    import torch

    from mxep.models.huggingface_files import save_published
    from mxep.train.data.tokenizer import ByteTokenizer
    from mxep.train.data.tokenizer_export import publish_tokenizer
    from mxep.train.loaded_model import open_run, read_model, trained_shape

    manifest = open_run(run)
    name, shape = trained_shape(manifest)
    identity, settings = manifest.facts.get("identity", {}), manifest.facts.get("settings", {})
    coefficient = settings.get("balance_loss")  # None: the model's
    shape = shape if coefficient is None else dataclasses.replace(shape, balance_loss=coefficient)
    tokenizer = publish_tokenizer(settings.get("tokenizer"), identity.get("tokenizer", ByteTokenizer.fingerprint))
    notes = save_published(
        shape,
        read_model(manifest),
        out,
        getattr(torch, dtype),
        drop_expert_bias=drop_expert_bias,
        token_ids=tokenizer.token_ids,
        files=tokenizer.files,
    )
    notes.append(tokenizer.note)
    return [f"{manifest.path} (step {manifest.step}, {name}) -> {out}, {dtype}", *notes]

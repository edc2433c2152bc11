"""`mxep convert`: from a checkpoint of `mxep train` to a Hugging Face folder, layer by layer in one process, on a CPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
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
    from torch import Tensor

    from mxep.models.presets import at_length
    from mxep.models.published_files import save_published
    from mxep.train.checkpoint import MANIFEST, read_manifest, read_tensors, verify
    from mxep.train.folder import CHECKPOINTS, list_checkpoints
    from mxep.train.model_choice import kept_model
    from mxep.train.tokenizer import ByteTokenizer, copy_tokenizer

    found = [run] if (run / MANIFEST).exists() else list_checkpoints(run / CHECKPOINTS)
    if not found:
        raise ValueError(f"{run} is neither a checkpoint nor a run with one, want a folder that `mxep train` made")
    manifest = read_manifest(found[-1])
    verify(manifest)
    identity = manifest.facts.get("identity", {})
    name = identity.get("model")
    if name is None:
        raise ValueError(f"{manifest.path} does not say which model it is of; not a checkpoint of mxep train, or damaged")
    settings = manifest.facts.get("settings", {})
    coefficient = settings.get("balance_loss")  # None: the model's
    choice = kept_model(identity.get("shape", {}), name)
    shape = at_length(choice.shape, identity.get("seq_len", choice.shape.max_seq_len), identity.get("yarn", "on") == "on")
    shape = shape if coefficient is None else dataclasses.replace(shape, balance_loss=coefficient)
    groups: dict[str, list[str]] = {}  # tensors of one layer are read together
    for key in manifest.shapes:
        if key.startswith("model."):
            parts = key.split(".")
            groups.setdefault(parts[2] if parts[1] == "layers" else parts[1], []).append(key)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for keys in groups.values():
            yield from ((key.removeprefix("model."), value) for key, value in read_tensors(manifest, keys).items())

    notes = save_published(shape, tensors(), out, getattr(torch, dtype), drop_expert_bias=drop_expert_bias)
    notes.append(copy_tokenizer(settings.get("tokenizer"), identity.get("tokenizer", ByteTokenizer.fingerprint), out))
    return [f"{manifest.path} (step {manifest.step}, {name}) -> {out}, {dtype}", *notes]

"""Loads the model of a run's checkpoint, or of a Hugging Face folder, in one process."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxep.json_files import typed
from mxep.models.decoder import Decoder
from mxep.models.huggingface import published_router_dtype
from mxep.models.huggingface_files import load_published
from mxep.models.huggingface_shape import read_shape
from mxep.models.presets import ModelConfig, at_length
from mxep.recipe import Recipe, resolve_recipe
from mxep.train.build import Build, build_options, build_whole
from mxep.train.checkpoint import MANIFEST, DamagedCheckpointError, Manifest, read_manifest, read_tensors, verify
from mxep.train.config import TrainConfig
from mxep.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from mxep.train.resolved_config import kept_model, routed_as_asked
from mxep.train.run_folder import CHECKPOINTS, list_checkpoints, step_of

_MODEL = "model."  # begins the names of the model's tensors in a checkpoint


@dataclass(frozen=True)
class LoadedModel:
    """What `load_model` returns.

    Attributes:
        model: with the weights of the checkpoint, in eval mode.
        config: the options of the run.
        tokenizer: of the run; None if its file is gone or has changed since.
        step: optimizer steps that the weights have.
        checkpoint: folder of the checkpoint.

    Examples:
        >>> # Not run: it needs a run of `mxep train`.
        >>> model, tokenizer = loaded.model, loaded.tokenizer  # doctest: +SKIP
    """

    model: Decoder
    config: TrainConfig
    tokenizer: Tokenizer | None
    step: int
    checkpoint: Path


def load_model(
    run: str | Path,
    step: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    recipe: str | Recipe | None = None,
) -> LoadedModel:
    """The model of a run of `mxep train`, on one device, whatever number of ranks wrote the checkpoint.

    Every file is compared with the checksum in the manifest before a tensor is read. Nothing is unpickled.

    Args:
        run: folder of a run, or of one checkpoint.
        step: the checkpoint after this step. None: the newest.
        device: where the model is built.
        dtype: of the parameters; a run keeps float32, or bf16 with `--dtype bfloat16`. The expert bias stays float32, and so does a router
            that computes in it.
        recipe: precision of the experts, of converted linear layers, and of the loss if the run has it in MXFP8. None: that of the run;
            "bf16": high precision everywhere.

    Returns:
        the model in eval mode, the run's options and tokenizer.

    Raises:
        ValueError: no run or checkpoint there, no checkpoint of that step, a damaged one, an unknown recipe.

    Examples:
        >>> # Not run: it needs a run of `mxep train`.
        >>> loaded = mxep.train.load_model("runs/dsv3_debug_cpu-mxfp8_wgrad_with_hp", device="cuda")  # doctest: +SKIP
        >>> logits = loaded.model(tokens)  # doctest: +SKIP
    """
    manifest = open_run(Path(run), step)
    try:
        config = TrainConfig.from_json(typed(manifest.facts.get("settings"), dict, "settings"))
    except ValueError as error:
        raise DamagedCheckpointError(f"load_model: {manifest.path}: {error}") from error
    build = build_options(config)
    if recipe is not None:
        chosen = resolve_recipe(recipe)
        linears = None if build.linears is None or chosen.gemm != "mxfp8" else dataclasses.replace(build.linears, recipe=chosen)
        output = chosen if build.output.gemm == "mxfp8" else build.output
        build = dataclasses.replace(build, recipe=chosen, linears=linears, output=output)
    model = _allocate(routed_as_asked(trained_shape(manifest)[1], config), build, device, dtype)
    state = model.state_dict()
    missing = [name for name in state if _MODEL + name not in manifest.shapes]
    with torch.no_grad():
        for name, value in read_model(manifest):
            if name not in state or state[name].shape != value.shape:
                raise DamagedCheckpointError(f"load_model: {manifest.path}: {name} {tuple(value.shape)} is no tensor of this model")
            state[name].copy_(value)
    if missing:
        raise DamagedCheckpointError(f"load_model: {manifest.path} has no {missing[0]}, and {len(missing) - 1} more tensors are missing")
    return LoadedModel(model, config, _tokenizer(manifest, config), manifest.step, manifest.path)


def load_published_model(folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The model in a Hugging Face folder (config.json, safetensors) in high precision, in eval mode; `device` and `dtype` of `load_model`.

    Raises:
        ValueError: files that are missing or damaged, or a model that ours do not cover.
    """
    shape, _ = read_shape(folder)
    shape = dataclasses.replace(shape, router_dtype=published_router_dtype(shape))
    model = _allocate(shape, Build(resolve_recipe("bf16")), device, dtype)
    load_published(model, folder)
    return model


def _allocate(shape: ModelConfig, build: Build, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """A model in eval mode whose parameters are not filled yet, and whose buffers are zero, since files lack some of them."""
    model = build_whole(shape, build)
    float32 = {id(moe.router.gate.weight) for moe in model.moe_layers() if moe.config.router_dtype == "fp32"}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in float32 else dtype)
    model.to_empty(device=device).eval()
    for buffer in model.buffers():
        buffer.zero_()
    return model


def open_run(run: Path, step: int | None = None) -> Manifest:
    """The manifest of a run's checkpoint, whose files have all been checked.

    Args:
        run: folder of a run, or of one checkpoint.
        step: which checkpoint of the run; None: the newest.

    Raises:
        ValueError: no run or checkpoint there, none of that step, a damaged one.
    """
    whole = (run / MANIFEST).exists()
    found = {read_manifest(run).step: run} if whole else {step_of(path): path for path in list_checkpoints(run / CHECKPOINTS)}
    if not found:
        raise ValueError(
            f"{run} is neither a checkpoint nor a run with one, want a folder of `mxep train`, or of Hugging Face with config.json"
        )
    if step is not None and step not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}, want one of {', '.join(map(str, found))}")
    manifest = read_manifest(found[max(found) if step is None else step])
    verify(manifest)
    return manifest


def trained_shape(manifest: Manifest) -> tuple[str, ModelConfig]:
    """Name and shape of the model in a checkpoint, with the YaRN that it was trained with.

    Raises:
        ValueError: the checkpoint does not say which model it is of.
    """
    identity = manifest.facts.get("identity", {})
    name = identity.get("model")
    if name is None:
        raise ValueError(f"{manifest.path} does not say which model it is of; not a checkpoint of mxep train, or damaged")
    shape = kept_model(identity.get("shape", {}), name).shape
    return name, at_length(shape, identity.get("seq_len", shape.max_seq_len), identity.get("yarn", "on") == "on")


def read_model(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the model, float32 on the CPU; at most one layer is in memory."""
    layers: dict[str, list[str]] = {}
    for key in manifest.shapes:
        if key.startswith(_MODEL):
            parts = key.split(".")
            layers.setdefault(parts[2] if parts[1] == "layers" else parts[1], []).append(key)
    for keys in layers.values():
        yield from ((key.removeprefix(_MODEL), value) for key, value in read_tensors(manifest, keys).items())


def _tokenizer(manifest: Manifest, config: TrainConfig) -> Tokenizer | None:
    identity: dict[str, Any] = manifest.facts.get("identity", {})
    try:
        tokenizer = load_tokenizer(config.tokenizer)
    except ValueError as error:
        warnings.warn(f"load_model: the tokenizer of the run cannot be read: {error}", stacklevel=3)
        return None
    if tokenizer.fingerprint != identity.get("tokenizer", ByteTokenizer.fingerprint):
        warnings.warn(f"load_model: {config.tokenizer} is another tokenizer than the run was trained with", stacklevel=3)
        return None
    return tokenizer

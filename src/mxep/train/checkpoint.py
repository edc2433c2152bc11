"""Checkpoints: torch.distributed.checkpoint in safetensors files, facts in JSON, nothing pickled, each complete or not there at all.

    <folder>/step_00000200/
      manifest.json            format, step, facts (settings, data position, ...), every tensor's shape, every file's size and CRC-32
      tensors/*.safetensors    model and optimizer, each rank its shards; readable on any number of ranks
      ranks/rank_00000.safetensors   what belongs to one rank alone (RNG)

A checkpoint is written under a hidden name and renamed when all of it is on the disk.  All ranks call each function together, and
what goes wrong on one rank is raised on every one.  The folder must be the same for all ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from mxep.train.folder import STEP_PREFIX, checkpoint_name, list_checkpoints
from mxep.train.full_disk import NotWrittenError
from mxep.train.shard_files import ShardWriter

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        path: its folder.
        step: optimizer steps taken.
        facts: JSON values given to `save_checkpoint`.
        shapes: shape of every global tensor by name.
        files: size in bytes and CRC-32 by path relative to the folder.
    """

    path: Path
    step: int
    facts: dict[str, Any]
    shapes: dict[str, list[int]]
    files: dict[str, tuple[int, int]]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    rank_tensors: dict[str, Tensor],
    facts: dict[str, Any],
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint and drop the oldest beyond `keep`; returns its path.

    Args:
        folder: where checkpoints live; made when missing.
        step: optimizer steps taken so far, names the checkpoint.
        tensors: DTensors, or plain tensors that are equal on all ranks that have them (one rank writes them); a pipeline stage has its own.
        rank_tensors: plain CPU tensors of this rank alone.
        facts: JSON values, equal on all ranks.
        keep: newest checkpoints that stay.
        group: of all ranks, for what they tell each other; None takes the default one.

    Raises:
        NotWrittenError: writing failed somewhere (disk full, no permission), or a rank is gone or silent for longer than the group's
            timeout; the checkpoints before are untouched, what was written is removed.
    """
    final = folder / checkpoint_name(step)
    partial = folder / f".{final.name}.partial"
    leader = _rank() == 0

    def prepare() -> None:
        if leader:
            for stale in folder.glob(f".{STEP_PREFIX}*.partial"):
                shutil.rmtree(stale)
            (partial / "tensors").mkdir(parents=True)
            (partial / "ranks").mkdir()

    def write() -> dict[str, tuple[int, int]]:
        mine = partial / "ranks" / f"rank_{_rank():05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in rank_tensors.items()}, mine)
        written = [mine, *(partial / "tensors").glob(f"shard-{_rank() + 1:05d}-*.safetensors")]
        for path in written:
            _flush(path)
        return {path.relative_to(partial).as_posix(): _size_and_crc(path) for path in written}

    def publish() -> None:
        if not leader:
            return
        content = {"format": FORMAT, "step": step, "facts": facts, "shapes": shapes, "files": files}
        (partial / MANIFEST).write_text(json.dumps(content, indent=1))
        _flush(partial / MANIFEST)
        if final.exists():
            _discard(final)
        os.replace(partial, final)
        _flush(folder)
        for old in list_checkpoints(folder)[:-keep]:
            _discard(old)

    what = f"checkpoint: {final} cannot be written"
    try:
        _together(what, prepare, group)
        try:
            dcp.save(tensors, storage_writer=ShardWriter(str(partial / "tensors")), process_group=group)
        except CheckpointException as error:
            raise OSError(f"{what}: {_first_failure(error)}") from error
        files = _merged(_together(what, write, group))
        shapes = _merged(_together(what, lambda: {name: list(tensor.shape) for name, tensor in tensors.items()}, group))
        _together(what, publish, group)
    except (
        OSError,
        RuntimeError,
    ) as error:  # torch raises RuntimeError where a rank is gone, or silent for longer than the group's timeout
        if leader:  # a full disk needs the room
            shutil.rmtree(partial, ignore_errors=True)
        raise NotWrittenError(str(error) if isinstance(error, OSError) else f"{what}: {error}") from error
    return final


def read_manifest(path: Path) -> Manifest:
    """What the checkpoint at `path` holds. Raises ValueError when it is missing, damaged or of another format."""
    try:
        content = json.loads((path / MANIFEST).read_text())
        if content["format"] == FORMAT:
            files = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
            return Manifest(path, int(content["step"]), dict(content["facts"]), dict(content["shapes"]), files)
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint: {path} has no {MANIFEST}; not a checkpoint of mxep, or damaged") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint: {path / MANIFEST} is damaged: {type(error).__name__} {error}") from error
    raise ValueError(f"checkpoint: {path} has format {content['format']}, this mxep reads {FORMAT}")


def load_checkpoint(manifest: Manifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill `tensors` in place; returns this rank's own tensors, empty when the checkpoint knows no such rank.

    Raises:
        ValueError: the checkpoint is of another shape, or its files are missing, truncated or altered.  Nothing was loaded then.
    """
    _check_shapes(manifest, _merged(_together("checkpoint", lambda: {name: list(tensor.shape) for name, tensor in tensors.items()})))
    _together(f"checkpoint: {manifest.path} is damaged", lambda: _check_files(manifest))
    try:
        reader = HuggingFaceStorageReader(str(manifest.path / "tensors"))
        dcp.load(tensors, storage_reader=reader)
        mine = f"ranks/rank_{_rank():05d}.safetensors"
        return load_file(manifest.path / mine) if mine in manifest.files else {}
    except CheckpointException as error:
        raise ValueError(f"checkpoint: {manifest.path} is damaged: {_first_failure(error)}") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint: {manifest.path} is damaged: {error}") from error


def verify(manifest: Manifest) -> None:
    """Read every file of a checkpoint in this process. Raises ValueError when one is missing, truncated or altered."""
    try:
        for name in manifest.files:
            _check_file(manifest, name)
    except ValueError as error:
        raise ValueError(f"checkpoint: {manifest.path} is damaged: {error}") from error


def read_tensors(manifest: Manifest, names: list[str]) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, float32, in one process and without the others.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    tensors = {name: torch.empty(manifest.shapes[name]) for name in names}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(manifest.path / "tensors")), no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"checkpoint: {manifest.path} is damaged: {_first_failure(error)}") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint: {manifest.path} is damaged: {error}") from error
    return tensors


def _check_shapes(manifest: Manifest, wanted: dict[str, list[int]]) -> None:
    """Raise ValueError naming what differs between the checkpoint and the model that is to be filled."""
    found = manifest.shapes
    differences = [f"{name} is {found[name]}, want {shape}" for name, shape in wanted.items() if name in found and found[name] != shape]
    differences += [f"{name} is missing" for name in wanted if name not in found]
    differences += [f"{name} is not in this model" for name in found if name not in wanted]
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        raise ValueError(f"checkpoint: {manifest.path} is of another shape: {shown}; use the --model and options that it was made with")


def _check_files(manifest: Manifest) -> None:
    """Size and CRC-32 of this rank's share of the files."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name in sorted(manifest.files)[_rank() :: world]:
        _check_file(manifest, name)


def _check_file(manifest: Manifest, name: str) -> None:
    path = manifest.path / name
    if not path.is_file():
        raise ValueError(f"{name} is missing")
    size, crc = manifest.files[name]
    if path.stat().st_size != size:
        raise ValueError(f"{name} has {path.stat().st_size} bytes, want {size}")
    if _size_and_crc(path)[1] != crc:
        raise ValueError(f"{name} does not match its checksum")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _together(what: str, act: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run `act` on every rank and return all results by rank; raise on every rank what the first failing one met.

    ValueError stays ValueError; anything from the file system becomes OSError.
    """
    result: Any = None
    failure: tuple[str, str] | None = None
    try:
        result = act()
    except (ValueError, OSError, SafetensorError) as error:
        failure = ("value" if isinstance(error, ValueError) else "os", str(error))
    outcomes: list[Any] = [(failure, result)]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (failure, result), group=group)
    for rank, (failed, _) in enumerate(outcomes):
        if failed is not None:
            kind, message = failed
            raise (ValueError if kind == "value" else OSError)(f"{what}: {message} (rank {rank})")
    return [outcome for _, outcome in outcomes]


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint that a kill in the middle must not leave behind as half of one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _first_failure(error: CheckpointException) -> str:
    """One line for what torch.distributed.checkpoint reports per rank."""
    for rank, failure in error.failures.items():
        cause = failure[0] if isinstance(failure, tuple) else failure
        return f"{type(cause).__name__} {cause} (rank {rank})"
    return str(error)


def _size_and_crc(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return path.stat().st_size, crc


def _flush(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints: tensors in safetensors files by torch.distributed.checkpoint, facts in JSON, nothing pickled.

    <folder>/step_00000200/
      manifest.json            format, step, facts (settings, data position, ...), every tensor's shape, every file's size and CRC-32,
                               and the SHA-256 of all that
      tensors/*.safetensors    model and optimizer, each rank its shards; readable on any number of ranks
      ranks/rank_00000.safetensors   what belongs to one rank alone (RNG)

A checkpoint is complete or absent: it is written under a hidden name and renamed when all of it is on the disk and the run still holds
its lock.  Only files that the manifest lists are read.  All ranks call each function together, and an error on one rank is raised on all.
The folder must be the same for all ranks.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import os
import traceback
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name, _HFStorageInfo
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mxep.comm.collective import gather_objects
from mxep.json_files import parse_json_object, read_small_text, typed
from mxep.train.durable_files import NotWrittenError
from mxep.train.run_folder import checkpoint_name, discard, find_checkpoint, list_checkpoints, remove_unpublished, step_of
from mxep.train.run_lock import RunLock, RunLockLostError

FORMAT = 2
_UNCHECKED_FORMAT = 1  # had no checksum of the manifest itself
MANIFEST = "manifest.json"
_CHECKSUM = "sha256"  # of the text before it in the manifest


def _without_code(frame: traceback.FrameSummary) -> tuple[Any, ...]:
    """What a line of a traceback is pickled as: Python 3.13 added a code object to it, which cannot be pickled."""
    return partial(traceback.FrameSummary, lookup_line=False, line=frame.line), (frame.filename, frame.lineno, frame.name)


# torch 2.11 sends what a rank raises to the others with its traceback; where that fails they wait for it.
copyreg.pickle(traceback.FrameSummary, _without_code)


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, truncated or altered; raised on all ranks where they act together."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        path: its folder.
        step: optimizer steps taken.
        facts: JSON values given to `save_checkpoint`.
        shapes: shape of every global tensor by name.
        files: size in bytes and CRC-32 by path relative to the folder.
        notes: lines for the user.
    """

    path: Path
    step: int
    facts: dict[str, Any]
    shapes: dict[str, list[int]]
    files: dict[str, tuple[int, int]]
    notes: tuple[str, ...] = ()


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    rank_tensors: dict[str, Tensor],
    facts: dict[str, Any],
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
    lock: RunLock | None = None,
) -> Path:
    """Write one checkpoint and drop the oldest beyond `keep`; returns its path.

    Args:
        folder: of all checkpoints; created if missing.
        step: optimizer steps taken so far; names the checkpoint.
        tensors: DTensors, or plain tensors that are equal on all ranks that have them (one rank writes them); each pipeline stage has
            its own.
        rank_tensors: plain CPU tensors that belong to this rank only.
        facts: JSON values, equal on all ranks.
        keep: number of newest checkpoints to keep.
        group: of all ranks, for messages; None: the default group.
        lock: of the run's folder, on rank 0; checked before the checkpoint gets its name. None if no other run writes there.

    Raises:
        RunLockLostError: another run has taken the folder over; nothing was published.
        NotWrittenError: writing failed on a rank (disk full, no permission), or a rank is gone or silent for longer than the group's
            timeout. Earlier checkpoints are untouched, and the partial one is removed.
    """
    final = folder / checkpoint_name(step)
    run = uuid.uuid4().hex[:12] if lock is None else lock.run
    partial = folder / f".{final.name}.{run}.partial"  # rank 0's name on all ranks, once `prepare` has run
    leader = _rank() == 0

    def prepare() -> str:
        if leader:
            remove_unpublished(folder)
            (partial / "tensors").mkdir(parents=True)
            (partial / "ranks").mkdir()
        return partial.name

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
        (partial / MANIFEST).write_bytes(_with_checksum(json.dumps(content, indent=1).removesuffix("\n}").encode()))
        for path in (partial / MANIFEST, partial / "tensors", partial / "ranks", partial):
            _flush(path)
        if lock is not None:
            lock.check()  # if another run takes over after this, it removes `partial`, and the rename below fails
        if os.path.lexists(final):
            discard(final)
        os.replace(partial, final)
        _flush(folder)
        for old in list_checkpoints(folder)[:-keep]:
            discard(old)

    what = f"checkpoint: {final} cannot be written"
    try:
        partial = folder / _together(what, prepare, group)[0]
        try:
            dcp.save(tensors, storage_writer=ShardWriter(str(partial / "tensors")), process_group=group)
        except CheckpointException as error:
            raise OSError(f"{what}: {_first_failure(error)}") from error
        files = _merged(_together(what, write, group))
        shapes = _merged(_together(what, lambda: {name: list(tensor.shape) for name, tensor in tensors.items()}, group))
        _together(what, publish, group)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a rank is gone, or silent for longer than the timeout
        if leader:  # frees the space on a full disk
            with suppress(OSError):
                discard(partial)
        raise NotWrittenError(str(error) if isinstance(error, OSError) else f"{what}: {error}") from error
    return final


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`.

    Raises:
        DamagedCheckpointError: it is missing or damaged.
        ValueError: it is of another format.
    """
    if not (path / MANIFEST).exists():
        raise DamagedCheckpointError(f"checkpoint: {path} has no {MANIFEST}; not a checkpoint of mxep, or damaged")
    with _reading(path):
        text = read_small_text(path / MANIFEST, "checkpoint")
        content = parse_json_object(text, MANIFEST)
        number = typed(content.get("format"), int, f"{MANIFEST}: format")
        if number in (FORMAT, _UNCHECKED_FORMAT):
            head = text.encode().rpartition(_checksum_begins())[0]
            if (number == FORMAT or _CHECKSUM in content) and _with_checksum(head) != text.encode():
                raise ValueError(f"{MANIFEST} does not match its checksum")
            return _parsed(path, content)
    raise ValueError(f"checkpoint: {path} has format {number}, this mxep reads {_UNCHECKED_FORMAT} and {FORMAT}")


def open_checkpoint(folder: Path, step: int | None = None) -> Manifest:
    """The manifest of a run's checkpoint after `step` steps; None: the newest. Rank 0 reads it for all ranks.

    Raises:
        ValueError: there is no such checkpoint, or what `read_manifest` raises; on all ranks.
    """
    return _together("resume", lambda: read_manifest(find_checkpoint(folder, step)) if _rank() == 0 else None)[0]


def find_good(folder: Path, damaged: int | None) -> int | None:
    """Step of the newest checkpoint in `folder` whose files are undamaged; None if there is none.

    Each rank checks its share of the files. The checkpoint of step `damaged` is skipped; None skips the newest.
    """
    newest_first = _together("resume", lambda: [step_of(path) for path in reversed(list_checkpoints(folder))])[0]
    for step in newest_first:
        with suppress(ValueError):
            if step != (newest_first[0] if damaged is None else damaged):
                _check_together(open_checkpoint(folder, step))
                return step
    return None


def load_checkpoint(manifest: Manifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill `tensors` in place; returns the tensors of this rank only, an empty dict if the checkpoint was written by fewer ranks.

    Raises:
        ValueError: the checkpoint has another shape. Nothing was loaded.
        DamagedCheckpointError: its files are missing, truncated or altered. Nothing was loaded.
    """
    _check_shapes(manifest, _merged(_together("checkpoint", lambda: {name: list(tensor.shape) for name, tensor in tensors.items()})))
    _check_together(manifest)
    with _reading(manifest.path):
        dcp.load(tensors, storage_reader=_reader(manifest))
    mine = f"ranks/rank_{_rank():05d}.safetensors"
    own = _together(f"checkpoint: {manifest.path} is damaged", lambda: load_file(manifest.path / mine) if mine in manifest.files else {})
    return own[_rank()]


def verify(manifest: Manifest) -> None:
    """Check every file of a checkpoint in this process. Raises DamagedCheckpointError if one is missing, truncated or altered."""
    with _reading(manifest.path):
        for name in manifest.files:
            _check_file(manifest, name)


def read_tensors(manifest: Manifest, names: list[str]) -> dict[str, Tensor]:
    """Read the named tensors of a checkpoint unsharded, as float32, in one process.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged.
    """
    tensors = {name: torch.empty(manifest.shapes[name]) for name in names}
    with _reading(manifest.path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        dcp.load(tensors, storage_reader=_reader(manifest), no_dist=True)
    return tensors


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns the errors of reading the checkpoint at `path` into a DamagedCheckpointError that names it."""
    try:
        yield
    except CheckpointException as error:
        raise DamagedCheckpointError(f"checkpoint: {path} is damaged: {_first_failure(error)}") from error
    except (ValueError, OSError, SafetensorError) as error:
        raise DamagedCheckpointError(f"checkpoint: {path} is damaged: {error}") from error


class ShardWriter(HuggingFaceStorageWriter):
    """Storage writer of torch.distributed.checkpoint: one safetensors file a rank, straight from the tensors' memory.

    torch's own writer first builds one `bytes` object of the whole shard: two more copies in memory, while it holds the GIL.

    Args:
        path: folder of the files.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors that the plan assigns to this rank. Tensors on a GPU are copied to the host first."""
        results, tensors, offsets = [], dict[str, Tensor](), dict[str, dict[str, list[int]]]()
        name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
        for item in plan.items:
            tensor, key = planner.resolve_data(item), item.index.fqn
            assert isinstance(tensor, Tensor)
            assert item.tensor_data is not None
            assert key not in tensors, f"{key} has two pieces on one rank"
            tensors[key] = tensor.detach().cpu().contiguous()
            offsets[key] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensor.nbytes, _HFStorageInfo(name, tensor.shape, tensor.dtype)))
        if tensors:
            save_file(tensors, self.fs.concat_path(self.path, name), metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)})
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _ListedFiles(FileSystem):
    """A file system that lists only those tensor files of a checkpoint that its manifest names."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = [str(manifest.path / name) for name in sorted(manifest.files) if name.startswith("tensors/")]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._files


def _reader(manifest: Manifest) -> HuggingFaceStorageReader:
    """A reader of the files in the manifest; torch's own reads every file in the folder, also strays of another run."""
    reader = HuggingFaceStorageReader(str(manifest.path / "tensors"))
    reader.fs = _ListedFiles(manifest)
    return reader


def _checksum_begins() -> bytes:
    return f',\n "{_CHECKSUM}": "'.encode()


def _with_checksum(head: bytes) -> bytes:
    """The text of a manifest: `head`, which is the JSON without its last bracket, then the SHA-256 of `head` as the last key."""
    return head + _checksum_begins() + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def _parsed(path: Path, content: dict[str, Any]) -> Manifest:
    """The manifest from its JSON. Raises ValueError if a value is missing or has the wrong type."""
    shapes, files = dict[str, list[int]](), dict[str, tuple[int, int]]()
    for name, shape in typed(content.get("shapes"), dict, f"{MANIFEST}: shapes").items():
        where = f"{MANIFEST}: shapes.{name}"
        shapes[name] = [typed(size, int, where) for size in typed(shape, list, where)]
        if min(shapes[name], default=0) < 0:
            raise ValueError(f"{where} is {shapes[name]}, want sizes of 0 or more")
    for name, entry in typed(content.get("files"), dict, f"{MANIFEST}: files").items():
        where = f"{MANIFEST}: files.{name}"
        numbers = [typed(number, int, where) for number in typed(entry, list, where)]
        if len(numbers) != 2:
            raise ValueError(f"{where} has {len(numbers)} numbers, want size and CRC-32")
        if len(PurePosixPath(name).parts) != 2 or name.partition("/")[0] not in ("tensors", "ranks") or name.endswith("/.."):
            raise ValueError(f"{where}: want a file in tensors/ or ranks/")
        files[name] = (numbers[0], numbers[1])
    notes = []
    if _CHECKSUM not in content:
        notes.append(f"checkpoint: {path / MANIFEST} was written before manifests had a checksum, so damage to it cannot be detected")
    there = [file.relative_to(path).as_posix() for part in ("tensors", "ranks") for file in (path / part).glob("*")]
    if strays := sorted(set(there) - set(files)):
        shown = ", ".join(strays[:3]) + (f" and {len(strays) - 3} more" if len(strays) > 3 else "")
        notes.append(f"checkpoint: {path} holds files that its manifest does not list, which are not read: {shown}")
    step = typed(content.get("step"), int, f"{MANIFEST}: step")
    if step < 0:
        raise ValueError(f"{MANIFEST}: step is {step}, want 0 or more")
    return Manifest(path, step, typed(content.get("facts"), dict, f"{MANIFEST}: facts"), shapes, files, tuple(notes))


def _check_shapes(manifest: Manifest, wanted: dict[str, list[int]]) -> None:
    """Raise ValueError with the differences between the checkpoint and the model to fill."""
    found = manifest.shapes
    differences = [f"{name} is {found[name]}, want {shape}" for name, shape in wanted.items() if name in found and found[name] != shape]
    differences += [f"{name} is missing" for name in wanted if name not in found]
    differences += [f"{name} is not in this model" for name in found if name not in wanted]
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        raise ValueError(f"checkpoint: {manifest.path} is of another shape: {shown}; use the --model and options that it was made with")


def _check_together(manifest: Manifest) -> None:
    """Check size and CRC-32 of every file; each rank reads a share. Raises DamagedCheckpointError on all ranks."""

    def check() -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        for name in sorted(manifest.files)[_rank() :: world]:
            _check_file(manifest, name)

    _together(f"checkpoint: {manifest.path} is damaged", check)


def _check_file(manifest: Manifest, name: str) -> None:
    path = manifest.path / name
    if not path.is_file():
        raise DamagedCheckpointError(f"{name} is missing")
    size, crc = manifest.files[name]
    if path.stat().st_size != size:
        raise DamagedCheckpointError(f"{name} has {path.stat().st_size} bytes, want {size}")
    if _size_and_crc(path)[1] != crc:
        raise DamagedCheckpointError(f"{name} does not match its checksum")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


_KINDS = (RunLockLostError, DamagedCheckpointError, ValueError)


def _together(what: str, act: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run `act` on every rank; returns all results by rank, or raises the error of the first failing rank on every rank.

    Errors of `_KINDS` keep their type, errors of the file system become OSError, and all others RuntimeError: a rank that left with one
    would not hear the messages that the others send, and take them for those of its next call.
    """
    result: Any = None
    failure: tuple[type[Exception], str] | None = None
    try:
        result = act()
    except (*_KINDS, OSError, SafetensorError) as error:
        failure = (next((kind for kind in _KINDS if isinstance(error, kind)), OSError), str(error))
    except Exception as error:
        failure = RuntimeError, f"{type(error).__name__}: {error}"
    outcomes = gather_objects((failure, result), group)
    for rank, (failed, _) in enumerate(outcomes):
        if failed is not None:
            kind, message = failed
            raise kind(f"{what}: {message} (rank {rank})")
    return [outcome for _, outcome in outcomes]


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _first_failure(error: CheckpointException) -> str:
    """The first rank's failure of a torch.distributed.checkpoint error, in one line."""
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

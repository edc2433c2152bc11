"""Checkpoints: round trip on other numbers of ranks, atomicity, and each way of being damaged or foreign."""

from __future__ import annotations

import json
import pickle
import traceback
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mxep.train.checkpoint import (
    DamagedCheckpointError,
    find_good,
    load_checkpoint,
    read_manifest,
    read_tensors,
    save_checkpoint,
)
from mxep.train.durable_files import NotWrittenError
from mxep.train.run_folder import find_checkpoint, list_checkpoints, remove_unpublished
from mxep.train.run_lock import RunLockLostError, lock_run_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process, no group: meant so


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.arange(12.0).view(4, 3) * scale,
        "model.b": torch.arange(3.0) * scale,
        "n": torch.tensor(2.0 * scale),
        "half": (torch.arange(8.0) * scale).to(torch.bfloat16),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "checkpoints", 7, tensors(), {"rng": torch.arange(4, dtype=torch.uint8)}, {"seed": 3})


def test_round_trip(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert (manifest.step, manifest.facts) == (7, {"seed": 3})
    into = tensors(scale=0.0)
    own = load_checkpoint(manifest, into)
    assert all(torch.equal(into[name], value) for name, value in tensors().items())
    assert own["rng"].tolist() == [0, 1, 2, 3]


def test_nothing_is_pickled(saved: Path) -> None:
    names = {path.suffix for path in saved.rglob("*") if path.is_file()}
    assert names == {".json", ".safetensors"}


def test_keeps_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / ".step_00000001.partial").mkdir(parents=True)  # left by a kill
    for step in (2, 9, 10):
        save_checkpoint(folder, step, tensors(), {}, {}, keep=2)
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000009", "step_00000010"]
    assert find_checkpoint(folder).name == "step_00000010"
    assert not list(folder.glob(".*"))


def test_the_same_step_again(saved: Path) -> None:
    save_checkpoint(saved.parent, 7, tensors(2.0), {}, {})
    into = tensors(0.0)
    load_checkpoint(read_manifest(saved), into)
    assert torch.equal(into["model.w"], tensors(2.0)["model.w"])


def test_a_failed_write_keeps_the_last_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mxep.train.checkpoint.save_file", full)
    with pytest.raises(NotWrittenError, match=r"step_00000008 cannot be written: .*No space left on device"):
        save_checkpoint(saved.parent, 8, tensors(), {"rng": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert find_checkpoint(saved.parent) == saved
    load_checkpoint(read_manifest(saved), tensors(0.0))


def test_an_error_can_be_sent_to_other_ranks_with_its_traceback() -> None:
    """As torch does it. Python 3.13's lines of a traceback have a code object."""
    try:
        Path("/nowhere").read_text()
    except OSError as error:
        sent = traceback.extract_tb(error.__traceback__)
    lines, arrived = (
        [(frame.filename, frame.lineno, frame.name, frame.line) for frame in of] for of in (sent, pickle.loads(pickle.dumps(sent)))
    )
    assert arrived == lines


@pytest.mark.parametrize("what", ["folder", "file", "link", "broken link"])
def test_partial_checkpoints_of_another_run_are_removed(saved: Path, what: str) -> None:
    stale = saved.with_name(".step_00000008.abc.partial")
    if what == "folder":
        (stale / "tensors").mkdir(parents=True)
        (stale / "tensors" / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"of other ranks, which still live")
    elif what == "file":
        stale.touch()
    else:
        stale.symlink_to(saved if what == "link" else "nowhere")
    new = save_checkpoint(saved.parent, 8, tensors(2.0), {}, {})
    assert sorted(path.name for path in saved.parent.iterdir()) == [saved.name, new.name]
    assert [path.name for path in (new / "tensors").iterdir()] == ["shard-00001-model-00001-of-00001.safetensors"]
    assert (saved / "manifest.json").exists(), "a link's target is not what is removed"


def test_a_partial_checkpoint_is_named_after_its_run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_run_folder(saved.parent, print)
    seen: list[str] = []

    def check() -> None:
        seen.extend(path.name for path in saved.parent.glob(".step_*"))

    monkeypatch.setattr(lock, "check", check)
    save_checkpoint(saved.parent, 8, tensors(), {}, {}, lock=lock)
    assert seen == [f".step_00000008.{lock.run}.partial"]
    lock.release()


def test_a_run_without_its_lock_publishes_nothing(saved: Path) -> None:
    lock = lock_run_folder(saved.parent, print)
    lock.release()
    with pytest.raises(RunLockLostError, match=r"step_00000008 cannot be written: train: the lock of .* was removed"):
        save_checkpoint(saved.parent, 8, tensors(), {}, {}, lock=lock)
    assert find_checkpoint(saved.parent) == saved


def test_a_run_that_is_taken_over_while_it_publishes_publishes_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended between the look at its lock and the renaming, for as long as another run needs to begin."""
    lock = lock_run_folder(saved.parent, print)
    monkeypatch.setattr(lock, "check", lambda: remove_unpublished(saved.parent))
    with pytest.raises(NotWrittenError, match=r"step_00000008 cannot be written: .*No such file"):
        save_checkpoint(saved.parent, 8, tensors(), {}, {}, lock=lock)
    lock.release()
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_file_that_the_manifest_does_not_list_is_not_read(saved: Path) -> None:
    """A shard of older weights under another name, which torch's reader would take for a part of the same tensors."""
    older = save_checkpoint(saved.parent, 6, tensors(5.0), {}, {})
    for name in ("shard-00000-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"):
        (saved / "tensors" / name).write_bytes(next((older / "tensors").iterdir()).read_bytes())
    manifest = read_manifest(saved)
    into = tensors(0.0)
    load_checkpoint(manifest, into)
    assert all(torch.equal(into[name], value) for name, value in tensors().items())
    assert torch.equal(read_tensors(manifest, ["model.w"])["model.w"], tensors()["model.w"])
    (note,) = manifest.notes
    assert "holds files that its manifest does not list, which are not read: tensors/shard-00000-model" in note
    assert read_manifest(older).notes == ()


def test_a_flipped_bit_of_a_manifest_is_found(saved: Path) -> None:
    """One in every byte; all of the format's number, which says whether there must be a checksum."""
    path = saved / "manifest.json"
    content = path.read_bytes()
    number = content.index(b'"format": 2') + len('"format": ')
    for place, bit in [*((place, place % 8) for place in range(len(content))), *((number, bit) for bit in range(8))]:
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"step_00000007 (is damaged|has format)"):
            read_manifest(saved)


def test_a_manifest_from_before_checksums_is_read_with_a_note(saved: Path) -> None:
    content = json.loads((saved / "manifest.json").read_text())
    del content["sha256"]
    (saved / "manifest.json").write_text(json.dumps({**content, "format": 1}, indent=1))
    manifest = read_manifest(saved)
    load_checkpoint(manifest, tensors(0.0))
    (note,) = manifest.notes
    assert "was written before manifests had a checksum, so damage to it cannot be detected" in note
    for changed in ({**content, "format": 2}, {**content, "format": 1, "sha256": "0" * 64}):
        (saved / "manifest.json").write_text(json.dumps(changed, indent=1))
        with pytest.raises(ValueError, match=r"is damaged: manifest\.json does not match its checksum"):
            read_manifest(saved)


def test_the_last_good_checkpoint(tmp_path: Path) -> None:
    saved = [save_checkpoint(tmp_path, step, tensors(), {}, {}, keep=4) for step in (1, 2, 3, 4)]
    for path in (saved[1], saved[3]):
        flip(next((path / "tensors").iterdir()))
    (saved[2] / "manifest.json").unlink()
    assert find_good(tmp_path, None) == find_good(tmp_path, 4) == 1
    assert find_good(tmp_path, 1) is None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"), [(truncate, r"bytes, want"), (flip, "does not match its checksum"), (Path.unlink, "is missing")]
)
@pytest.mark.parametrize("part", ["tensors", "ranks"])
def test_damaged_files(saved: Path, harm, message: str, part: str) -> None:
    harm(next((saved / part).iterdir()))
    into = tensors(0.0)
    with pytest.raises(ValueError, match=f"step_00000007 is damaged: {part}/.*{message}"):
        load_checkpoint(read_manifest(saved), into)
    assert all(not value.any() for value in into.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "is a list, want an object"),
        ('{"a": ' + "[" * 100_000, "too deeply nested"),
        ("\0", "is not JSON"),
        ("{}", "format is missing, want an integer"),
        ('{"format": "1"}', "format is '1', want an integer"),
        ('{"format": 1}', "shapes is missing, want an object"),
        ('{"format": 1, "step": 1, "facts": 3, "shapes": {}, "files": {}}', "facts is 3, want an object"),
        ('{"format": 1, "step": "one", "facts": {}, "shapes": {}, "files": {}}', "step is 'one', want an integer"),
        ('{"format": 1, "step": -1, "facts": {}, "shapes": {}, "files": {}}', "step is -1, want 0 or more"),
        ('{"format": 1, "step": 1, "facts": {}, "shapes": {}, "files": {"tensors/a": [1, 2, 3]}}', "files.tensors/a has 3 numbers"),
        (
            '{"format": 1, "step": 1, "facts": {}, "shapes": {}, "files": {"tensors/a": [1, [2]]}}',
            "files.tensors/a is a list, want an integer",
        ),
        ('{"format": 1, "step": 1, "facts": {}, "shapes": {}, "files": {"tensors/../../a": [1, 2]}}', "want a file in tensors/ or ranks/"),
        ('{"format": 1, "step": 1, "facts": {}, "shapes": {}, "files": {"/a": [1, 2]}}', "want a file in tensors/ or ranks/"),
        ('{"format": 1, "step": 1, "facts": {}, "shapes": {"w": [[1]]}, "files": {}}', "shapes.w is a list, want an integer"),
        ('{"format": 1, "step": 1, "facts": {}, "shapes": {"w": [-1]}, "files": {}}', r"shapes.w is \[-1\], want sizes"),
        ('{"format": 1, "step": 1, "facts": {}, "shapes": 7, "files": {}}', "shapes is 7, want an object"),
    ],
)
def test_damaged_manifest(saved: Path, content: str, message: str) -> None:
    (saved / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpointError, match=f"step_00000007 is damaged: .*manifest.json.*{message}"):
        read_manifest(saved)


def test_foreign_manifests(saved: Path) -> None:
    content = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        read_manifest(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        read_manifest(saved)
    with pytest.raises(ValueError, match="no checkpoint found"):
        find_checkpoint(saved / "tensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.b": torch.zeros(5)}, r"model\.b is \[3\], want \[5\]"),
        ({"model.c": torch.zeros(5)}, r"model\.c is missing"),
        ({"model.w": None}, r"model\.w is not in this model"),
    ],
)
def test_another_shape(saved: Path, change: dict, message: str) -> None:
    wanted = {name: value for name, value in {**tensors(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=f"another shape: {message}"):
        load_checkpoint(read_manifest(saved), wanted)


def sharded(world: int, scale: float) -> dict:
    mesh = init_device_mesh("cpu", (world,))
    values = tensors(scale)
    for name in ("model.w", "model.b"):  # three elements do not divide evenly, the last of four ranks holds none
        values[name] = distribute_tensor(values[name], mesh, [Shard(0)])
    return values


def save_on(rank: int, world: int, folder: str) -> None:
    save_checkpoint(Path(folder), 1, sharded(world, 1.0), {"rng": torch.tensor([rank])}, {})


def load_on(rank: int, world: int, folder: str) -> tuple[bool, list[int]]:
    into = sharded(world, 0.0)
    own = load_checkpoint(read_manifest(find_checkpoint(Path(folder))), into)
    whole = {name: value.full_tensor() if name in ("model.w", "model.b") else value for name, value in into.items()}
    return all(torch.equal(whole[name], value) for name, value in tensors().items()), own["rng"].tolist() if own else []


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_on, 2, str(tmp_path))
    assert run_ranks(load_on, 4, str(tmp_path)) == [(True, [0]), (True, [1]), (True, []), (True, [])]
    into = tensors(0.0)
    load_checkpoint(read_manifest(find_checkpoint(tmp_path)), into)
    assert all(torch.equal(into[name], value) for name, value in tensors().items())


def fail_to_load_on(rank: int, world: int, folder: str) -> str:
    try:
        load_checkpoint(read_manifest(find_checkpoint(Path(folder))), sharded(world, 0.0))
    except ValueError as error:
        return str(error)
    return ""


def test_damage_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_on, 2, str(tmp_path))
    flip(sorted((find_checkpoint(tmp_path) / "tensors").iterdir())[1])
    messages = run_ranks(fail_to_load_on, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "does not match its checksum" in messages[0]

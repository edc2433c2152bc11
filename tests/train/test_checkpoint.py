"""Checkpoints: round trip on other numbers of ranks, atomicity, and each way of being damaged or foreign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mxep.train.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from mxep.train.folder import find_checkpoint, list_checkpoints
from mxep.train.full_disk import NotWrittenError

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


def test_a_failed_write_leaves_the_last_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mxep.train.checkpoint.save_file", full)
    with pytest.raises(NotWrittenError, match=r"step_00000008 cannot be written: .*No space left on device"):
        save_checkpoint(saved.parent, 8, tensors(), {"rng": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert find_checkpoint(saved.parent) == saved
    load_checkpoint(read_manifest(saved), tensors(0.0))


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
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "step": 1, "facts": 3, "shapes": {}, "files": {}}',
        '{"format": 1, "step": "one", "facts": {}, "shapes": {}, "files": {}}',
        '{"format": 1, "step": 1, "facts": {}, "shapes": {}, "files": {"tensors/a": [1, 2, 3]}}',
        "\0",
    ],
)
def test_damaged_manifest(saved: Path, content: str) -> None:
    (saved / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="damaged"):
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

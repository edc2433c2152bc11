"""Checkpoints written while training continues: they have the state at the call, and a lost one is reported."""

from __future__ import annotations

import errno
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mxep.train.checkpoint_writer
from mxep.train.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from mxep.train.checkpoint_writer import CheckpointWriter, HostStaging
from mxep.train.distributed import TIMEOUT
from mxep.train.durable_files import NotWrittenError
from mxep.train.run_folder import find_checkpoint, list_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def poisoned_while_written(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    writer = CheckpointWriter(Path(folder), keep=2, background=True, timeout=TIMEOUT)
    weight = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    bias, state, facts = torch.ones(3), torch.tensor([rank]), {"position": [1]}
    held = threading.Event()

    def slow(*arguments: object) -> None:
        assert held.wait(60)
        save_checkpoint(*arguments)  # type: ignore[arg-type]

    mxep.train.checkpoint_writer.save_checkpoint = slow  # type: ignore[assignment]
    for step in (1, 2):  # the buffers are used a second time
        held.clear()
        writer.save(step, {"w": weight, "b": bias}, {"rng": state}, facts)
        for tensor in (weight.to_local(), bias):
            tensor.fill_(float("nan"))  # the worst that an optimizer step can do
        facts["position"].append(0)
        held.set()
        writer.wait()
        assert not writer.lost()
        weight.to_local().copy_(distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]).to_local())
        bias.fill_(step + 1.0)
    manifest = read_manifest(find_checkpoint(Path(folder)))
    assert manifest.facts == {"position": [1, 0]}
    into = {"w": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]), "b": torch.zeros(3)}
    assert load_checkpoint(manifest, into)["rng"].tolist() == [rank]
    assert torch.equal(into["w"].full_tensor(), torch.arange(10.0).view(5, 2))
    assert into["b"].tolist() == [2.0] * 3


def test_the_next_step_changes_nothing_that_is_saved(tmp_path: Path) -> None:
    run_ranks(poisoned_while_written, 2, str(tmp_path))


@pytest.mark.parametrize("background", [True, False])
def test_a_lost_checkpoint_is_reported_once_and_the_next_one_counts(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = CheckpointWriter(tmp_path, keep=2, background=background, timeout=TIMEOUT)
    writer.save(1, {"w": torch.ones(2)}, {}, {})
    writer.wait()
    monkeypatch.setattr("mxep.train.checkpoint.save_file", full)
    writer.save(2, {"w": torch.ones(2)}, {}, {})
    with pytest.raises(OSError, match=r"step_00000002 cannot be written: .*No space left on device"):
        writer.wait()
    assert len(writer.lost()) == 1
    assert not writer.lost()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"], "its partial files were removed"
    monkeypatch.undo()
    writer.save(3, {"w": torch.ones(2)}, {}, {})
    writer.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000003"]


def test_results_of_a_save_outlive_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    writer = CheckpointWriter(tmp_path / "file", keep=2, background=True, timeout=TIMEOUT)
    for step in (1, 2):
        writer.save(step, {"w": torch.ones(2)}, {}, {})
    with pytest.raises(OSError, match="step_00000002 cannot be written"):
        writer.wait()
    assert [str(lost).split()[1].rsplit("/", 1)[1] for lost in writer.lost()] == ["step_00000001", "step_00000002"]


def test_an_error_lets_the_checkpoint_be_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def slow(*arguments: object) -> None:
        assert started.wait(60)
        save_checkpoint(*arguments)  # type: ignore[arg-type]

    def breaks_off() -> None:
        with CheckpointWriter(tmp_path, keep=1, background=True, timeout=TIMEOUT) as writer:
            writer.save(4, {"w": torch.ones(2)}, {}, {})
            threading.Timer(0.2, started.set).start()
            raise FloatingPointError("a gradient that is not finite")

    monkeypatch.setattr(mxep.train.checkpoint_writer, "save_checkpoint", slow)
    with pytest.raises(FloatingPointError):
        breaks_off()
    assert read_manifest(find_checkpoint(tmp_path)).step == 4


def saves_beside_a_rank_that_hangs(rank: int, world: int, folder: str) -> None:
    timeout = timedelta(seconds=2)
    writer = CheckpointWriter(Path(folder), keep=2, background=True, timeout=timeout)
    writer.save(1, {"w": torch.ones(2)}, {}, {})
    writer.wait()
    never = threading.Event()
    if rank == 1:
        mxep.train.checkpoint_writer.save_checkpoint = lambda *arguments: never.wait()  # type: ignore[assignment, misc]
    begun = time.monotonic()
    writer.save(2, {"w": torch.ones(2)}, {}, {})
    with pytest.raises(NotWrittenError, match=r"step_00000002 cannot be written: .*|nothing was written in .* for 4 s"):
        writer.wait()
    assert time.monotonic() - begun < 30
    never.set()


def test_a_rank_that_hangs_costs_the_others_a_checkpoint_and_no_more_than_the_timeout(tmp_path: Path) -> None:
    run_ranks(saves_beside_a_rank_that_hangs, 2, str(tmp_path))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001"]


def saves_after_a_disk_that_stood_still(rank: int, world: int, folder: str) -> None:
    """A file system that comes back after the timeout, and an error of one rank that no file system raises."""
    writer = CheckpointWriter(Path(folder), keep=9, background=True, timeout=timedelta(seconds=2))
    flush = mxep.train.checkpoint._flush

    def stands_still(path: Path) -> None:
        time.sleep(3)
        flush(path)

    def has_no_memory(path: Path) -> None:
        raise MemoryError("of rank 1")

    for step, flushes in enumerate((flush, stands_still, flush, has_no_memory, flush), start=1):
        if rank == 1:
            mxep.train.checkpoint._flush = flushes  # type: ignore[assignment]
        writer.save(step, {"w": torch.full((2,), float(step))}, {}, {})
        if flushes is flush:
            writer.wait()
        else:
            what = "MemoryError: of rank 1 .rank 1" if flushes is has_no_memory else ""
            with pytest.raises(NotWrittenError, match=f"step_0000000{step} cannot be written: .*{what}"):
                writer.wait()


def test_a_disk_that_hangs_costs_one_checkpoint_and_not_all_later_ones(tmp_path: Path) -> None:
    run_ranks(saves_after_a_disk_that_stood_still, 2, str(tmp_path))
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step_0000000{step}" for step in (1, 3, 5)]


def test_a_shard_is_staged_in_one_block_that_serves_every_save(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(70, dtype=torch.int8), "c": torch.randn(4, 5).t(), "d": torch.tensor(2.0)}
    tensors["e"] = torch.empty(0, 3)
    staging = HostStaging(tensors)
    first = staging.copy(tensors)
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors.items())
    assert len({copy.untyped_storage().data_ptr() for copy in first.values()}) == 1
    tensors["a"].add_(1)
    second = staging.copy(tensors)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], tensors["a"])
    writer = CheckpointWriter(tmp_path, keep=1, background=True, timeout=TIMEOUT)
    writer.prepare(tensors)
    writer.save(1, tensors, {}, {})
    writer.wait()
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_checkpoint(read_manifest(find_checkpoint(tmp_path)), back)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())

"""Steps whose gradient is not finite change nothing, the run continues, and ends with a checkpoint if there are too many in a row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.steps import done, records_of, same, state_of, steps_of, trainer
from torch.distributed.tensor import DTensor

import mxep.train.checkpoint_writer
import mxep.train.trainer
from mxep.train.checkpoint import read_manifest, save_checkpoint
from mxep.train.compare import train_both
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.durable_files import NotWrittenError
from mxep.train.optimizer import gradient_norm
from mxep.train.run_folder import list_checkpoints
from mxep.train.trainer import Trainer


def not_finite(run: Trainer, steps: Collection[int]) -> None:
    """Let these steps have a gradient norm that is NaN. The gradients stay finite, so a step that is taken shows."""

    def measured(*arguments: Any) -> torch.Tensor:
        return gradient_norm(*arguments) * (math.nan if run.step_count + 1 in steps else 1.0)

    mxep.train.trainer.gradient_norm = measured  # type: ignore[assignment]


@pytest.fixture
def norms() -> Any:
    yield
    mxep.train.trainer.gradient_norm = gradient_norm


@pytest.mark.parametrize(("value", "optimizer"), [(math.nan, "adamw"), (math.inf, "adamw"), (math.nan, "adamw8bit")])
def test_a_bad_step_changes_nothing(tmp_path: Path, text: str, one_rank: None, value: float, optimizer: str) -> None:
    """NaN in every gradient; the step that is launched before the host has read of it is taken."""
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=6, cache_weights=True, optimizer=optimizer)
    loss = run.microbatches.loss
    done(run)
    before = state_of(run)
    run.microbatches.loss = lambda batch: loss(batch) * value  # type: ignore[method-assign]
    bad = run.step()
    assert len(same(before, state_of(run))) == len(before)
    run.microbatches.loss = loss  # type: ignore[method-assign]
    good = run.step()
    assert not math.isfinite(run.finish(bad).grad_norm)
    assert math.isfinite(run.finish(good).grad_norm)
    after = state_of(run)
    unchanged = [name for name in same(before, after) if not name.endswith((".expert_bias", ".tokens_per_expert"))]
    assert unchanged == []
    assert {float(value) for name, value in after.items() if name.endswith(".step")} == {2.0}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "precision"), [("mxfp8_wgrad_with_hp", {}), ("bf16", {}), ("bf16", {"optimizer": "adamw8bit", "dtype": "bfloat16"})]
)
def test_a_bad_step_changes_nothing_on_a_gpu(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, recipe: str, precision: dict[str, str]
) -> None:
    """The host does not wait to know of it."""
    monkeypatch.setenv("MXEP_CHECK", "0")  # checks of kept weights read values on the host
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        options = {
            "device": "cuda",
            "batch": 2,
            "seq_len": 256,
            "data": (text,),
            "recipe": recipe,
            "cache_weights": recipe != "bf16",
            **precision,
        }
        run = Trainer(TrainConfig(**options, fused_layer=True, steps=8), Ranks(0, 1, device), tmp_path)  # type: ignore[arg-type]
        backward = run.microbatches.backward

        def spoiled(*arguments: Any) -> torch.Tensor:
            loss = backward(*arguments)
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    (parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad).fill_(math.nan)
            return loss

        done(run)  # kernels are compiled
        before = state_of(run)
        run.microbatches.backward = spoiled  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("error")
        try:
            bad = run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(same(before, state_of(run))) == len(before)
        assert math.isnan(run.finish(bad).grad_norm)
        run.microbatches.backward = backward  # type: ignore[method-assign]
        assert math.isfinite(done(run).grad_norm)
        assert {float(value) for name, value in state_of(run).items() if name.endswith(".step")} == {2.0}
    finally:
        dist.destroy_process_group()


def bad_on_one_rank(rank: int, world: int, out: str, data: str, options: dict[str, Any]) -> tuple[int, int, bool, float]:
    """(what stayed in a step that was bad on the last rank alone, of how much, whether the next one was taken, steps of AdamW)."""
    run = trainer(rank, world, out, data=(data,), steps=6, **options)
    done(run)
    before = state_of(run)
    backward = run.microbatches.backward

    def spoiled(*arguments: Any) -> torch.Tensor:
        loss = backward(*arguments)
        grad = next(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None)
        (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(math.nan)
        return loss

    if rank == world - 1:
        run.microbatches.backward = spoiled  # type: ignore[method-assign]
    assert math.isnan(done(run).grad_norm)
    stayed = len(same(before, state_of(run)))
    run.microbatches.backward = backward  # type: ignore[method-assign]
    done(run)
    after = state_of(run)
    steps = {float(value) for name, value in after.items() if name.endswith(".step")}
    assert len(steps) == 1
    return stayed, len(before), len(same(before, after)) < len(before) / 2, steps.pop()


@pytest.mark.parametrize(
    "options", [{"recipe": "mxfp8_wgrad_with_hp", "cache_weights": True}, {"pp": 2, "batch": 2, "recipe": "hp"}], ids=["ep", "pp"]
)
def test_all_ranks_skip_a_step_that_is_bad_on_one(tmp_path: Path, text: str, options: dict[str, Any]) -> None:
    for stayed, of, taken, steps in run_ranks(bad_on_one_rank, 2, str(tmp_path), text, options):
        assert stayed == of
        assert taken
        assert steps == 2.0


def test_a_run_survives_and_reports_bad_steps(
    tmp_path: Path, text: str, one_rank: None, norms: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=8, max_skipped=2, checkpoint_every=100)
    not_finite(run, {2, 3, 5, 6, 8})
    assert run.train()
    assert steps_of(tmp_path) == [1, 4, 7]
    records = records_of(tmp_path, "skipped_step")
    assert [(record["step"], record["in_a_row"], record["total"]) for record in records] == [
        (2, 1, 1),
        (3, 2, 2),
        (5, 1, 3),
        (6, 2, 4),
        (8, 1, 5),
    ]
    assert records[0]["reason"].startswith("gradient norm nan, loss ")
    shown = capsys.readouterr().out
    assert "step:  3  skipped: gradient norm nan, loss " in shown
    assert shown.count("the weights stay as they were") == 5


def test_too_many_in_a_row_end_the_run_with_a_checkpoint(tmp_path: Path, text: str, one_rank: None, norms: None) -> None:
    """Of the weights before them; it can be resumed, and a checkpoint with the same weights replaces no older one."""
    options = {"data": (text,), "steps": 12, "checkpoint_every": 2, "evaluate": False, "keep": 2, "max_skipped": 1}
    run = trainer(0, 1, str(tmp_path), **options)
    not_finite(run, {5, 6, 7, 8, 9})
    taken: list[dict[str, torch.Tensor]] = []
    read = run._read

    def noted(launched: Any, log: Any) -> None:
        read(launched, log)
        if launched.step == 4:
            taken.append(state_of(run))

    run._read = noted  # type: ignore[method-assign]
    with pytest.raises(
        FloatingPointError, match=r"step 6: gradient norm nan.*2 in a row, more than --max-skipped=1.* none of them changed the weights: "
    ):
        run.train()
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000002", "step_00000004"]
    for first, last in ((5, 6), (5, 6)):
        again = trainer(0, 1, str(tmp_path), resume=True, **options)
        assert again.step_count == first - 1
        not_finite(again, {5, 6, 7, 8, 9})
        with pytest.raises(FloatingPointError, match=f"step {last}: "):
            again.train()
        assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000002", "step_00000004"]
    survivor = trainer(0, 1, str(tmp_path), resume=True, **{**options, "max_skipped": 5})
    assert len(same(taken[0], state_of(survivor))) == len(taken[0])
    not_finite(survivor, {5, 6, 7, 8, 9})
    assert survivor.train()
    assert steps_of(tmp_path) == [1, 2, 3, 4, 10, 11, 12]


def test_weights_that_no_checkpoint_has_are_saved(tmp_path: Path, text: str, one_rank: None, norms: None) -> None:
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=12, checkpoint_every=100, evaluate=False, max_skipped=0)
    not_finite(run, {3, 4, 5})
    with pytest.raises(FloatingPointError, match="none of them changed the weights: "):
        run.train()
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    assert read_manifest(path).facts["skipped"] == {"total": 2, "in_a_row": 2}, "step 4 had been launched when step 3 was read"
    assert read_manifest(path).step == 4


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_weights_whose_checkpoint_was_lost_are_saved(
    tmp_path: Path, text: str, one_rank: None, norms: None, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def no_room_at_four(*arguments: Any) -> Path:
        if arguments[1] == 4:
            raise NotWrittenError("no room")
        return save_checkpoint(*arguments)

    monkeypatch.setattr(mxep.train.checkpoint_writer, "save_checkpoint", no_room_at_four)
    options = {"data": (text,), "steps": 12, "checkpoint_every": 2, "evaluate": False, "max_skipped": 0, "async_checkpoint": mode}
    run = trainer(0, 1, str(tmp_path), **options)
    not_finite(run, {5, 6})
    with pytest.raises(FloatingPointError, match="none of them changed the weights: "):
        run.train()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000002", "step_00000006"]


def test_a_resumed_run_has_skipped_the_same_steps(tmp_path: Path, text: str, one_rank: None, norms: None) -> None:
    """Bit for bit: the optimizer's bias correction counts the steps that were taken, and the count in a row continues."""
    options = {"data": (text,), "steps": 7, "checkpoint_every": 100, "max_skipped": 2}
    ends = []
    for name, more in (("straight", {}), ("stopped", {"stop_after": 3}), ("stopped", {"resume": True})):
        run = trainer(0, 1, str(tmp_path / name), **options, **more)  # type: ignore[arg-type]
        not_finite(run, {2, 3, 4})
        act: Callable[[], bool] = run.train
        if name == "stopped" and not more.get("resume"):
            assert not act()
            continue
        with pytest.raises(FloatingPointError, match=r"step 4: .*3 in a row.*none of them changed the weights: "):
            act()
        ends.append(state_of(run))
    again = []
    for name in ("straight", "stopped"):
        run = trainer(0, 1, str(tmp_path / name), resume=True, **options)
        assert run.train()
        again.append(state_of(run))
    assert len(same(*ends)) == len(ends[0])
    assert len(same(*again)) == len(again[0])
    assert steps_of(tmp_path / "straight") == steps_of(tmp_path / "stopped")


def test_a_run_whose_last_step_was_skipped_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(recipe: str, out: Path) -> tuple[int, bool]:
        out.mkdir(parents=True)
        records: list[dict[str, Any]] = [{"kind": "step", "step": n, "loss": 1.0, "tokens_per_s": 1.0} for n in range(1, 5)]
        records.append({"kind": "skipped_step", "step": 5, "reason": "gradient norm nan", "in_a_row": 1, "total": 1})
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0, False

    assert train_both(("a", "b"), tmp_path, train, 5) == 0
    assert "was stopped" not in capsys.readouterr().out


def test_runs_on_different_text_are_not_compared(tmp_path: Path) -> None:
    def train(recipe: str, out: Path) -> tuple[int, bool]:
        out.mkdir(parents=True)
        records: list[dict[str, Any]] = [{"kind": "run", "step": 0, "data": {"fingerprint": recipe}}]
        records += [{"kind": "step", "step": n, "loss": 1.0, "tokens_per_s": 1.0} for n in range(1, 6)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0, False

    with pytest.raises(ValueError, match="--compare: the text has changed between the runs in "):
        train_both(("a", "b"), tmp_path, train, 5)


def test_skipped_steps_replace_no_older_checkpoint(tmp_path: Path, text: str, one_rank: None, norms: None) -> None:
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=20, evaluate=False, checkpoint_every=1, keep=2)
    not_finite(run, range(4, 21))
    with pytest.raises(FloatingPointError):
        run.train()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000002", "step_00000003"]


def test_a_run_without_a_good_step_has_a_checkpoint_to_resume(tmp_path: Path, text: str, one_rank: None, norms: None) -> None:
    options = {"data": (text,), "steps": 20, "evaluate": False, "checkpoint_every": 10}
    run = trainer(0, 1, str(tmp_path), **options)
    not_finite(run, range(1, 21))
    with pytest.raises(
        FloatingPointError, match=r"none of them changed the weights: resume with --resume.*an earlier checkpoint with --resume-step$"
    ):
        run.train()
    mxep.train.trainer.gradient_norm = gradient_norm
    assert trainer(0, 1, str(tmp_path), resume=True, **options).train()

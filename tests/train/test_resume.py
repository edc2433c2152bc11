"""Resuming with other data, lengths and batches, and with other options: allowed changes, messages, equal bits."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.steps import done, losses_of, records_of, same, state_of, steps_of, trainer, written_before

import mxep.train.resume
from mxep.train.checkpoint import read_manifest
from mxep.train.config import CHANGEABLE, TrainConfig, load_config, save_config
from mxep.train.describe import describe_mapped
from mxep.train.metrics import read_metrics
from mxep.train.optimizer import Schedule
from mxep.train.option_parser import read_options
from mxep.train.run_folder import find_checkpoint
from mxep.train.step import MicrobatchRunner


@pytest.fixture
def other(tmp_path: Path) -> str:
    path = tmp_path / "other.py"
    path.write_text(Path(subprocess.__file__).read_text() + Path(csv.__file__).read_text())
    return str(path)


def first_stage(out: Path, text: str, **options: Any) -> None:
    """Three of twelve steps."""
    run = trainer(0, 1, str(out), **{"data": (text,), "steps": 12, "stop_after": 3, "checkpoint_every": 100, **options})
    assert not run.train()


@pytest.mark.parametrize(
    ("options", "change", "order"),
    [
        ({"seq_len": 16}, "seq-len", "starts at its beginning"),
        ({"data": "other"}, "data", "starts at its beginning"),
        ({"batch": 3}, "batch", "continues"),
        ({"accumulate": 2, "seq_len": 16, "data": "other"}, "data, seq_len,batch", "starts at its beginning"),
    ],
    ids=["seq-len", "data", "batch", "all"],
)
def test_a_named_change_begins_a_stage(
    tmp_path: Path, text: str, other: str, one_rank: None, capsys, options: dict[str, Any], change: str, order: str
) -> None:
    """Refused without its name, which the message has. Weights, moments and the step continue, and the stage too, without the name."""
    first_stage(tmp_path / "run", text)
    new = {"data": (text,), "steps": 12, "checkpoint_every": 100, **options}
    new["data"] = (other,) if options.get("data") else (text,)
    named = ", ".join(name for name in ("seq-len", "batch", "data") if name in change.replace("_", "-"))
    names = sorted(name.strip().replace("_", "-") for name in change.split(","))
    unnamed = [name for name in names if name != "data"] or names  # the corpus is read after the others have been compared
    with pytest.raises(ValueError, match=f"or begin a new stage of it with --change {','.join(unnamed)}$"):
        trainer(0, 1, str(tmp_path / "run"), resume=True, **new)
    run = trainer(0, 1, str(tmp_path / "run"), resume=True, change=change, stop_after=6, **new)
    assert run.step_count == 3
    before = trainer(0, 1, str(tmp_path / "run"), resume=True, data=(text,), steps=12)
    assert len(same(state_of(before), state_of(run))) == len(state_of(run))
    assert run.sequences.sequences == (6 if order.startswith("continues") else 0)
    assert not run.train()
    shown = capsys.readouterr().out
    assert "resumed at step 3\n" in shown
    assert f"a new stage begins after step 3 ({named}); weights and moments stay" in shown
    assert f"the order of its data {order}\n" in shown
    (record,) = records_of(tmp_path / "run", "change")
    manifest = read_manifest(find_checkpoint(tmp_path / "run" / "checkpoints"))
    assert manifest.facts["stages"] == [{"step": 3, "changed": record["stage"]}]
    saved = load_config(tmp_path / "run")
    assert (saved.change, saved.data) == ("", new["data"])

    # The same command again, as a scheduler starts a job again, and the bare --resume, both to the bit of a stage that was not stopped.
    ends = []
    for name, more in (("again", {"resume": True, "change": change}), ("bare", {"resume": True})):
        subprocess.run(["cp", "-r", tmp_path / "run", tmp_path / name], check=True)
        resumed = trainer(0, 1, str(tmp_path / name), **new, **more)
        assert resumed.changes is not None
        assert resumed.changes.lines == []
        assert resumed.sequences.sequences == run.sequences.sequences
        assert resumed.train()
        ends.append(state_of(resumed))
    first_stage(tmp_path / "straight", text)
    straight = trainer(0, 1, str(tmp_path / "straight"), resume=True, change=change, **new)
    assert straight.train()
    for end in ends:
        assert len(same(end, state_of(straight))) == len(end)
    assert steps_of(tmp_path / "bare") == steps_of(tmp_path / "straight") == list(range(1, 13))


def test_options_that_may_never_change_are_refused_even_by_name(tmp_path: Path, text: str, other: str, one_rank: None) -> None:
    first_stage(tmp_path, text)
    options = {"data": (text,), "steps": 12, "resume": True, "change": "data,seq-len,batch"}
    for name, was, now in (("seed", 0, 1), ("model", "dsv3_debug_cpu", "qwen3_debug_cpu")):
        with pytest.raises(ValueError, match=f"{name} was {was}, is {now};.* give the options it was made with$"):
            trainer(0, 1, str(tmp_path), **{**options, name: now})
    made = r"\(data-parallel ranks 1 x --batch 4 x --accumulate 1; 2 with --batch 2\)"
    with pytest.raises(ValueError, match=rf"sequences_per_step was 2, is 4 {made}; give .* --change batch,seq-len$"):
        trainer(0, 1, str(tmp_path), **{**options, "batch": 4, "seq_len": 16, "change": "seq-len"})
    with pytest.raises(ValueError, match=r"data was \w+, is \w+; give .* --change data,seq-len$"):
        trainer(0, 1, str(tmp_path), **{**options, "data": (other,), "seq_len": 16, "change": "seq-len"})
    assert set(mxep.train.resume._NAMED_BY.values()) == set(CHANGEABLE)


def test_a_share_that_is_not_held_out_may_change(tmp_path: Path, text: str, other: str, one_rank: None) -> None:
    """Also of a run that an older mxep began, which compared it."""
    first_stage(tmp_path, text, validation_data=(other,))
    options = {"data": (text,), "validation_data": (other,), "steps": 12, "resume": True, "held_out_share": 0.1}
    assert trainer(0, 1, str(tmp_path), **options).step_count == 3
    written_before(find_checkpoint(tmp_path / "checkpoints"), lambda facts: facts["identity"].update(held_out_share=0.02))
    assert trainer(0, 1, str(tmp_path), **options).step_count == 3


def test_names_of_changes() -> None:
    for wrong in ("lr", "seed", "data,steps"):
        with pytest.raises(ValueError, match="want data, seq-len, batch; other options may differ without being named"):
            TrainConfig(change=wrong)
    assert describe_mapped(TrainConfig(change="data")) == ["--change=data changes nothing without --resume"]


def test_change_is_of_one_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    save_config(TrainConfig(data=("a",), change="data"), tmp_path)
    assert read_options(["--resume", "--out", str(tmp_path)]).change == ""
    assert read_options(["--resume", "--out", str(tmp_path), "--change", "data,seq-len"]).change == "data,seq-len"


def test_changed_options_are_printed(tmp_path: Path, text: str, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    first_stage(tmp_path, text, weight_decay=0.1)
    capsys.readouterr()
    options = {"data": (text,), "weight_decay": 0.2, "max_grad_norm": 0.5, "lr": 1e-4, "steps": 24, "resume": True, "stop_after": 4}
    run = trainer(0, 1, str(tmp_path), **options)
    assert {group["weight_decay"] for group in run.optimizer.param_groups} == {0.2, 0.0}
    run.train()
    shown = capsys.readouterr().out
    for line in (
        "changed: --weight-decay was 0.1, is 0.2",
        "changed: --max-grad-norm was 1.0, is 0.5",
        "changed: --steps was 12, is 24",
        "is 0.0001",
        "schedule: recomputed as if the run had begun with it; step 4 has the rate 9.9",
    ):
        assert line in shown, line
    assert "new stage" not in shown
    (record,) = records_of(tmp_path, "change")
    assert record["options"]["weight_decay"] == [0.1, 0.2]
    assert (record["step"], record["stage"]) == (3, {})
    assert record["schedule"].startswith("schedule: recomputed")


def test_a_bare_resume_prints_no_changes(tmp_path: Path, text: str, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does one that gives the number that the model's preset has."""
    first_stage(tmp_path, text)
    capsys.readouterr()
    lr = trainer(0, 1, str(tmp_path), data=(text,), steps=12, resume=True).settings.lr
    assert not trainer(0, 1, str(tmp_path), data=(text,), steps=12, resume=True, checkpoint_every=100, lr=lr, stop_after=4).train()
    shown = capsys.readouterr().out
    assert "changed" not in shown
    assert "schedule" not in shown
    assert "change" not in {record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")}


def test_a_start_that_is_refused_or_fails_in_its_first_step_changes_nothing(
    tmp_path: Path, text: str, one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The next start moves the newer checkpoint aside, and copies its metrics. One from the newest checkpoint repeats steps alone."""
    tmp_path /= "my run"
    first_stage(tmp_path, text, checkpoint_every=1)
    assert f"stopped after step 3 of 12; resume with: mxep train --resume --out '{tmp_path}'\n" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    options = {"data": (text,), "steps": 12, "resume": True, "resume_step": 2, "checkpoint_every": 100, "stop_after": 3}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ValueError, match="--tensorboard needs TensorBoard; pip install"):
            trainer(0, 1, str(tmp_path), **options, tensorboard=True).train()
    with monkeypatch.context() as patch:
        patch.setattr(MicrobatchRunner, "backward", lambda *_: torch.empty(-1))
        with pytest.raises(RuntimeError, match="negative dimension"):
            trainer(0, 1, str(tmp_path), **options, lr=1.0).train()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not trainer(0, 1, str(tmp_path), **options).train()
    moved = tmp_path / "checkpoints" / "set_aside" / "step_00000003"
    assert moved.is_dir()
    copy = tmp_path / "set_aside" / "metrics.jsonl"
    assert copy.read_bytes() == before[tmp_path / "metrics.jsonl"]
    shown = capsys.readouterr().out
    assert f"step_00000003 is newer than step 2, from which the run resumes; it was moved to {moved}" in shown
    assert f"metrics: lines of {tmp_path / 'metrics.jsonl'} after step 2 are removed; a copy with all of them is {copy}" in shown

    killed = tmp_path / "metrics.jsonl"  # in step 5, after the checkpoint of step 3
    killed.write_text(killed.read_text() + json.dumps({"kind": "step", "step": 4, "loss": 1.0}) + "\n")
    assert not trainer(0, 1, str(tmp_path), **{**options, "resume_step": None, "stop_after": 4}).train()
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert list(copy.parent.iterdir()) == [copy]


def test_a_step_to_profile_that_is_over_is_reported(tmp_path: Path, text: str, one_rank: None) -> None:
    first_stage(tmp_path, text)
    lines = {step: trainer(0, 1, str(tmp_path), data=(text,), steps=12, resume=True, profile_step=step).describe() for step in (3, 4)}
    assert "--profile-step=3 changes nothing: the run has taken 3 steps" in lines[3]
    assert not any("--profile-step" in line for line in lines[4])


def test_a_checkpoint_from_before_there_were_stages(tmp_path: Path, text: str, one_rank: None) -> None:
    first_stage(tmp_path, text)

    def edit(facts: dict[str, Any]) -> None:
        for name in ("stages", "skipped"):
            del facts[name]
        for name in ("decay_ratio", "decay_type"):
            del facts["schedule"][name]
        for name in ("change", "max_skipped", "decay_ratio", "decay_type"):
            del facts["settings"][name]

    written_before(find_checkpoint(tmp_path / "checkpoints"), edit)
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=12, checkpoint_every=100, resume=True)
    assert run.changes is not None
    assert run.changes.lines == []
    assert done(run).step == 4


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_constant_then_decay(decay_type: str) -> None:
    schedule = Schedule(2.0, warmup=4, steps=100, floor=0.1, decay_ratio=0.2, decay_type=decay_type)
    rates = [schedule.at(step) for step in range(101)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert set(rates[4:81]) == {2.0}
    assert all(before > after for before, after in itertools.pairwise(rates[80:]))
    assert rates[100] == pytest.approx(0.2)
    assert rates[90] == pytest.approx(0.2 + 1.8 * {"linear": 0.5, "sqrt": 1 - 0.5**0.5, "cosine": 0.5}[decay_type])
    longer = Schedule(2.0, warmup=4, steps=200, floor=0.1, decay_ratio=0.2, decay_type=decay_type)
    assert [longer.at(step) for step in range(81)] == rates[:81], "more steps redraw nothing of the constant part"
    assert {Schedule(2.0, 4, 100, 0.1, decay_ratio=0.0).at(step) for step in range(4, 120)} == {2.0}
    assert [Schedule(2.0, 4, 100, 0.1, decay_ratio=1.0).at(step) for step in range(100)] == [
        Schedule(2.0, 4, 100).at(s) for s in range(100)
    ]


def test_constant_then_decay_is_extended(tmp_path: Path, text: str, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    """In its constant phase: the rates are those of a run with as many steps from the start, and data is not drawn again."""
    wsd = {"data": (text,), "decay_ratio": 0.25, "decay_type": "linear", "checkpoint_every": 100}
    first_stage(tmp_path / "short", text, **wsd)
    run = trainer(0, 1, str(tmp_path / "short"), steps=16, resume=True, **wsd)
    assert run.train()
    assert trainer(0, 1, str(tmp_path / "long"), steps=16, **wsd).train()
    rates = [[r["lr"] for r in records_of(tmp_path / name, "step")] for name in ("short", "long")]
    assert rates[0] == rates[1]
    shown = capsys.readouterr().out
    assert "schedule: the steps so far would have had the same rates; the first to differ is step 11" in shown
    assert "recomputed" not in shown


def test_options_of_the_schedule_by_torchtitans_names() -> None:
    config = read_options(["--lr_scheduler.decay_ratio=0.1", "--lr-scheduler.decay-type", "sqrt"])
    assert (config.decay_ratio, config.decay_type) == (0.1, "sqrt")
    for ratio in (-0.1, 1.1):
        with pytest.raises(ValueError, match="--decay-ratio="):
            TrainConfig(decay_ratio=ratio)


def stage_on_ranks(rank: int, world: int, out: str, text: str, other: str) -> list[float]:
    """Losses of a stage with other data on two ranks, begun by two."""
    options = {"steps": 8, "checkpoint_every": 100, "recipe": "hp", "lr": 5e-4}  # a higher one amplifies another order of sums
    trainer(rank, world, out, data=(text,), stop_after=2, **options).train()
    run = trainer(rank, world, out, data=(other,), change="data", resume=True, **options)
    assert run.train()
    return torch.tensor(losses_of(out)).tolist()


def test_a_stage_on_two_ranks_and_on_one(tmp_path: Path, text: str, other: str, one_rank: None) -> None:
    losses = run_ranks(stage_on_ranks, 2, str(tmp_path / "two"), text, other)[0]
    options = {"steps": 8, "checkpoint_every": 100, "recipe": "hp", "lr": 5e-4, "batch": 4}
    trainer(0, 1, str(tmp_path / "one"), data=(text,), stop_after=2, **options).train()
    assert trainer(0, 1, str(tmp_path / "one"), data=(other,), change="data", resume=True, **options).train()
    one = losses_of(tmp_path / "one")
    assert one == pytest.approx(losses, rel=1e-5)

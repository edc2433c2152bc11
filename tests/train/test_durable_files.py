"""On a full disk a run loses output and nothing else: the metrics name what was dropped, and no file is cut. By RLIMIT_FSIZE."""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.full_disk import full_beyond

from mxep.train import rank_launcher
from mxep.train.config import TrainConfig, load_config, save_config
from mxep.train.distributed import Ranks
from mxep.train.durable_files import NotWrittenError
from mxep.train.metrics import MetricsLog, read_metrics
from mxep.train.run_folder import find_checkpoint
from mxep.train.trainer import Trainer


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def write(log: MetricsLog, *steps: int) -> None:
    for step in steps:
        log.write("step", step=step, loss=1.0 / step)


def lines(out: Path) -> list[int | str]:
    """Steps of metrics.jsonl, and reasons for which lines are missing; every line must be whole."""
    content = (out / "metrics.jsonl").read_text()
    assert content.endswith("\n")
    records = [json.loads(line) for line in content.splitlines()]
    return [record["reason"] if record["kind"] == "lost_output" else record["step"] for record in records]


@pytest.mark.parametrize("room", [0, 7, 60])  # nothing, the start of a line, a whole one and the start of the next
def test_lines_without_room_are_dropped_and_counted_as_lost(tmp_path: Path, room: int, capsys: pytest.CaptureFixture[str]) -> None:
    why = f"metrics: {tmp_path}/metrics.jsonl cannot be written: [Errno 27] File too large; its lines are dropped, the run continues"
    with MetricsLog(tmp_path, steps=9) as log:
        write(log, 1, 2)
        with full_beyond((tmp_path / "metrics.jsonl").stat().st_size + room):
            write(log, 3, 4, 5)
        assert lines(tmp_path) == [1, 2, 3][: 2 + (room == 60)], "no line is cut, not even for a while"
        write(log, 6)
        with full_beyond(0):
            write(log, 7)
    assert lines(tmp_path) == [1, 2, *([3] if room == 60 else []), why, 6, why]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written") == 2, "once for each time that it begins"


def test_a_disk_that_stays_full_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tmp_path, steps=3) as log:
        write(log, 1)
        limit = full_beyond((tmp_path / "metrics.jsonl").stat().st_size)
        limit.__enter__()
        write(log, 2, 3)
        assert log.plot() is None
    limit.__exit__(None, None, None)
    assert lines(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    shown = capsys.readouterr().out
    assert "metrics.jsonl cannot be written: [Errno 27] File too large; its lines are dropped, the run continues" in shown
    assert "loss.png cannot be written: [Errno 27] File too large; it is left out, the run continues" in shown


def test_a_run_continues_while_the_disk_is_full(tmp_path: Path, text: str, one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """From step 2 to the end of step 4 of 6: the losses of a run that had room, without those lines; the last checkpoint is there."""
    pytest.importorskip("tensorboard")
    small = {"device": "cpu", "batch": 1, "seq_len": 16, "eval_tokens": 32, "steps": 6, "eval_every": 3, "data": (text,)}
    step, disk = Trainer.step, [full_beyond(0)]

    def stepped(trainer: Trainer) -> Any:
        done = step(trainer)
        if trainer.out.name == "full" and trainer.step_count in (2, 5):
            disk[0].__enter__() if trainer.step_count == 2 else disk[0].__exit__(None, None, None)
        return done

    monkeypatch.setattr(Trainer, "step", stepped)
    for name in ("roomy", "full"):
        config = TrainConfig(**small, checkpoint_every=100, tensorboard=True)  # type: ignore[arg-type]
        assert Trainer(config, Ranks(0, 1, torch.device("cpu")), tmp_path / name).train()
    roomy, full = (
        [(record["kind"], record["step"], record.get("loss")) for record in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("roomy", "full")
    )
    assert len(roomy) == 1 + 6 + 2
    lost = [record for record in full if record[0] == "lost_output"]
    assert lost
    assert [record for record in full if record not in lost] == [record for record in roomy if record in full]
    assert {record[1] for record in roomy} - {record[1] for record in full if record not in lost} == {1, 2, 3}
    assert (tmp_path / "full" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert len(figures(tmp_path / "roomy" / "tensorboard")) == 6
    assert find_checkpoint(tmp_path / "full" / "checkpoints").name == "step_00000006"
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written") == 1


def figures(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("step/loss")]


def test_tensorboard_alone_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Its figures end, the run continues, and both the printed lines and the metrics say so once."""
    pytest.importorskip("tensorboard")
    with MetricsLog(tmp_path, steps=5, tensorboard=True) as log:
        write(log, 1, 2)
        monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.flush", no_room)
        write(log, 3, 4)
    reason = "cannot be written: [Errno 28] No space left on device; it gets no more figures, the run continues"
    why = f"TensorBoard: {tmp_path}/tensorboard {reason}"
    assert lines(tmp_path) == [1, 2, 3, why, 4]
    assert [(step, value) for step, value in figures(tmp_path / "tensorboard") if step < 3] == [(1, 1.0), (2, 0.5)]
    assert capsys.readouterr().out.count(why) == 1


def test_a_run_that_finds_no_room_to_begin_ends_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Not with a trace: the rank's report, and the line that its starter prints."""

    class EndedError(Exception):
        pass

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setenv("MXEP_FAILURES", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rank_launcher.os, "_exit", end)
    for error, line, status in (
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/config.json"),
            "'runs/a/config.json'; make room there, or name another",
            1,
        ),
        (NotWrittenError("checkpoint: a cannot be written: no room (rank 1)"), "(rank 1); make room there, or name another folder", 1),
        (FloatingPointError("train: step 7: gradient norm nan"), "error: train: step 7: gradient norm nan", 1),
        (ValueError("train: wrong"), "error: train: wrong", 2),
        (OSError(errno.EACCES, "Permission denied", "runs"), "Traceback", 1),
    ):

        def fails(config: TrainConfig, argv: Any, ranks: Any, error: Exception = error) -> bool:
            raise error

        monkeypatch.setattr("mxep.train.run.run", fails)
        monkeypatch.setattr("mxep.train.distributed.init_distributed", lambda device: nullcontext())
        with pytest.raises(EndedError, match="1"):
            rank_launcher.run_rank(TrainConfig(), [])
        child = SimpleNamespace(returncode=1)
        assert rank_launcher._explain_failure([child], tmp_path) == status  # type: ignore[list-item]
        told = capsys.readouterr().err
        assert line in told
        assert ("Traceback" in told) == (line == "Traceback")


def test_a_write_that_is_cut_off_leaves_the_old_file(tmp_path: Path) -> None:
    """Rewritten files are the options of the run, and its lines when it resumes."""
    save_config(TrainConfig(steps=7), tmp_path)
    with MetricsLog(tmp_path, steps=9) as log:
        write(log, 1, 2, 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_beyond(10):
        resumed = MetricsLog(tmp_path, steps=9, start_step=2)
        for rewrite in (lambda: save_config(TrainConfig(steps=8), tmp_path), resumed.__enter__):
            with pytest.raises(OSError, match="File too large"):
                rewrite()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert load_config(tmp_path).steps == 7
    with MetricsLog(tmp_path, steps=9, start_step=2):
        pass
    assert lines(tmp_path) == [1, 2]

"""metrics.jsonl: lines without a record, which a crash or another program left, stop no run and are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxep.bench.markdown_tables import run_table
from mxep.train.compare import summarize
from mxep.train.metrics import MetricsLog, plot_losses, read_metrics

BAD = [
    b'{"kind": "step", "step": 2, "lo',  # cut
    b"\0\0\0\0",  # bytes after a power cut on some file systems
    b'{"kind": "step", "step": 2, "loss": 1.0, "note": "\xff"}',  # not UTF-8
    b"[1, 2]",
    b"17",
    b'{"step": 2}',
    b'{"kind": "step", "step": "2", "loss": 1.0}',
    b'{"kind": "step", "step": 2, "loss": "1.0"}',
    b'{"kind": "step", "step": 2, "loss": 1.0, "tokens_per_s": "fast"}',
    b'{"kind": "step", "loss": 1.0}',
    b'{"kind": "held_out", "step": 2}',
    b"[" * 100_000,  # deeper than the parser goes
    b"",
]


def step(number: int) -> bytes:
    return json.dumps({"kind": "step", "step": number, "loss": 1.0 / number, "tokens_per_s": 10.0, "mfu": None}).encode()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Three steps of a run, a bad line of each kind between them, and a last line that was cut."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([b'{"kind": "run", "step": 0}', step(1), *BAD, step(2), step(3), b'{"kind": "held_o']))
    return path


def test_bad_lines_are_skipped_and_counted(damaged: Path) -> None:
    told = f"{len(BAD) + 1} of {len(BAD) + 5} lines hold no record and are passed over, the first is line 3"
    with pytest.warns(UserWarning, match=told):
        records = read_metrics(damaged)
    assert [(record["kind"], record.get("step")) for record in records] == [("run", 0), ("step", 1), ("step", 2), ("step", 3)]
    plot_losses({"run": records}, damaged.with_name("loss.png"))
    assert summarize({"a": records, "b": records})["ratios"] == {"tokens_per_s": 1.0, "loss": 1.0}


def test_a_comparison_has_the_losses_of_the_same_steps() -> None:
    """One arm skipped steps in the last tenth: the losses of steps before it, which were higher, took their place."""
    arm = [{"kind": "step", "step": number, "loss": 1 / number, "tokens_per_s": 10.0} for number in range(1, 101)]
    skipped = [record for record in arm if record["step"] not in (95, 96, 98, 99, 100)]
    found = summarize({"mxfp8": skipped, "bf16": arm})
    assert found["ratios"] == {"tokens_per_s": 1.0, "loss": 1.0}
    assert [arm["steps"] for arm in found["arms"].values()] == [95, 100]


def test_bad_lines_stay_when_a_run_resumes(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, and the next line is not joined with a cut one."""
    with MetricsLog(damaged.parent, steps=4, start_step=2) as log:
        log.write("step", step=3, loss=0.5)
        assert log.plot() is not None
    written = json.dumps({"kind": "step", "step": 3, "loss": 0.5}).encode()
    kept = [b'{"kind": "run", "step": 0}', step(1), *BAD, step(2), b'{"kind": "held_o']
    assert damaged.read_bytes().split(b"\n") == [*kept, written, b""]
    assert capsys.readouterr().out.count("lines hold no record and are passed over") == 1


def test_lines_of_a_run_that_is_not_resumed_are_moved(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [damaged.read_bytes()]
    for number in ("", ".2"):
        with MetricsLog(damaged.parent, steps=4) as log:
            log.write("step", step=1, loss=0.5)
        moved = damaged.parent / "set_aside" / f"metrics.jsonl{number}"
        assert moved.read_bytes() == before.pop()
        before.append(damaged.read_bytes())
        assert read_metrics(damaged) == [{"kind": "step", "step": 1, "loss": 0.5}]
        assert str(moved) in capsys.readouterr().out.replace("\n", "")


def test_a_table_of_a_damaged_record_has_the_other_steps(tmp_path: Path) -> None:
    settings = {"ep": 4, "batch": 1, "seq_len": 8, "activation_checkpoint": "full", "compile": False, "recipe": "bf16"}
    run = {"kind": "run", "settings": settings, "world": 4, "model": {"name": "m"}, "transport": "symmetric"}
    figures = {"loss": 1.0, "grad_norm": 1.0, "memory_gib": 1.0, "memory_share": 0.1, "tps": 1.0, "tflops": 1.0, "mfu": 0.1}
    lines = [json.dumps(run), json.dumps({"kind": "step", "step": 1, **figures}), '{"kind": "st']
    (tmp_path / "tutorial-h200-4.jsonl").write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="1 of 3 lines"):
        assert "| 1 | 1.0000 |" in run_table("tutorial", tmp_path)

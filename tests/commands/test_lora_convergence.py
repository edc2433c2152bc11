"""`mxep lora-convergence` on a CPU: two pieces have the results of one, the record and its table, verdicts, and errors."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mxep.bench import markdown_tables
from mxep.cli import main
from mxep.commands import lora_convergence
from mxep.commands.lora_convergence import compare_arms
from mxep.processes import start_of
from mxep.train.run_lock import lock_run_folder

SIZES = {"steps": 3, "seeds": 2, "rank": 8, "batch": 2, "seq-len": 16, "eval-every": 1, "eval-tokens": 64}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))] + ["--device", "cpu"]


def make_base(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, **sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_pieces_make_the_record_of_one_piece(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "text.py"
    text.write_text("".join(path.read_text() for path in sorted(Path(json.__path__[0]).glob("*.py"))))
    words = ["lora-convergence", "--base", str(make_base(tmp_path / "base")), "--data", str(text), *SMALL]
    assert main([*words, "--out", str(tmp_path / "whole"), "--record", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no verdict: 2 seeds have no spread, want --seeds 3 or more" in said
    (record,) = json.loads((tmp_path / "lora_convergence-cpu-1.json").read_text())
    assert markdown_tables.TABLES["lora_convergence"]([record]) in said
    assert [arm["gemm_path"] for arm in record["arms"].values()] == ["reference", None]
    starts = [[curves["held_out"][0] for curves in record["arms"][arm]["curves"]] for arm in lora_convergence.ARMS]
    assert starts[0] == pytest.approx(starts[1], rel=2e-3)  # the same base; new adapters add nothing
    assert record["arms"]["lora_bf16"]["held_out"][0] != record["arms"]["lora_bf16"]["held_out"][1]
    for _ in range(8):  # one step each
        assert main([*words, "--out", str(tmp_path / "pieces"), "--seconds", "1e-9"]) == 0
        assert "the same command continues" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "pieces"), "--record", str(tmp_path / "again"), "--at-once", "2"]) == 0
    assert "step 3 of 3" in (tmp_path / "pieces" / "lora_mx-seed1" / "log.txt").read_text()
    (again,) = json.loads((tmp_path / "again" / "lora_convergence-cpu-1.json").read_text())
    for name, arm in record["arms"].items():
        assert again["arms"][name]["held_out"] == pytest.approx(arm["held_out"], rel=1e-5)
    assert main([*words, "--out", str(tmp_path / "pieces"), "--rank", "4"]) == 2
    assert "rank=4, want 8" in capsys.readouterr().err
    text.write_text(Path(doctest.__file__).read_text())
    assert main([*words, "--out", str(tmp_path / "pieces")]) == 2
    assert "--data: the text is another one than that of the runs in" in capsys.readouterr().err
    plan = tmp_path / "pieces" / lora_convergence.PLAN_FILE
    plan.write_text(plan.read_text()[:-9])
    assert main([*words, "--out", str(plan.parent)]) == 2
    assert f"--out: {plan}" in capsys.readouterr().err, "the error names the damaged file"


def test_another_base_at_the_same_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The adapters would go on upon weights that they were not trained with."""
    base = make_base(tmp_path / "base")
    words = [
        "lora-convergence",
        "--base",
        str(base),
        "--data",
        json.__path__[0],
        *SMALL,
        "--out",
        str(tmp_path / "runs"),
        "--seconds",
        "1e-9",
    ]
    assert main(words) == 0
    assert main(words) == 0
    weights = load_file(base / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, base / "model.safetensors", {"format": "pt"})
    assert main(words) == 2
    assert "--base: the base is another one than that of the runs in" in capsys.readouterr().err


def test_a_run_that_fails_in_its_process_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = make_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    words = ["lora-convergence", "--base", str(base), "--data", json.__path__[0], *SMALL, "--out", str(tmp_path / "runs")]
    assert main([*words, "--at-once", "2"]) == 1
    said = capsys.readouterr().err
    assert "mxep lora-convergence: lora_" in said
    assert "model.safetensors" in said


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["lora-convergence", "--base", str(make_base(tmp_path / "base")), "--data", json.__path__[0], *SMALL]
    folder = tmp_path / "runs" / "lora_mx-seed0"
    folder.mkdir(parents=True)
    lock = lock_run_folder(folder, print)
    try:
        assert main([*words, "--out", str(tmp_path / "runs")]) == 2
    finally:
        lock.release()
    assert f"{folder} is in use by" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_end_with_a_state_when_the_command_that_started_them_is_killed(tmp_path: Path) -> None:
    words = ["--base", str(make_base(tmp_path / "base")), "--data", json.__path__[0], *SMALL, "--steps", "100000", "--at-once", "2"]
    command = subprocess.Popen([sys.executable, "-m", "mxep", "lora-convergence", *words, "--out", str(tmp_path / "runs")])
    folders = [tmp_path / "runs" / f"{arm}-seed0" for arm in lora_convergence.ARMS]
    try:
        wait_until(lambda: all((folder / "state.pt").exists() for folder in folders))
        pids = [json.loads(path.read_text())["pid"] for folder in folders for path in (folder / "lock").iterdir()]
        assert len(pids) == 2
        assert all(map(start_of, pids))
    finally:
        command.kill()
        command.wait()
    wait_until(lambda: not any(map(start_of, pids)))
    for folder in folders:
        state = torch.load(folder / "state.pt", weights_only=True)
        assert [entry["step"] for entry in state["records"] if entry["kind"] == "step"] == [*range(1, state["step"] + 1)]


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def run(end: float) -> list[dict]:
    records: list[dict] = [{"kind": "run", "step": 0, "gemm_path": "hp"}]
    return records + [{"kind": kind, "step": step, "loss": end} for step in range(1, 41) for kind in ("step", "held_out")]


@pytest.mark.parametrize(("ours", "within"), [(2.015, True), (2.03, False)])
def test_verdicts_by_hand(ours: float, within: bool) -> None:
    """The baseline's seeds have the mean 2.01 and the standard deviation 0.01."""
    found = compare_arms({"lora_mx": [run(ours)] * 3, "lora_bf16": [run(end) for end in (2.0, 2.01, 2.02)]}, 40)
    assert found["no_verdict"] == []
    assert found["arms"]["lora_bf16"]["held_out_std"] == 0.01
    assert found["difference"] == pytest.approx(ours - 2.01)
    assert found["within_spread"] is within


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds=0, want more than 0"),
        (["--eval-every", "300"], "--eval-every=300 of 2000 steps"),
        (["--eval-tokens", "511"], "--eval-tokens=511, want at least the 512 tokens of a sequence (--seq-len)"),
        ([], "has no config.json"),
        (["--at-once", "0"], "--at-once=0, want more than 0"),
        (["--only", "lora_mx-seed3"], "--only=lora_mx-seed3, want one of lora_mx-seed0, lora_bf16-seed0, "),
    ],
)
def test_bad_options(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["lora-convergence", "--base", str(tmp_path), "--out", str(tmp_path / "runs"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_recorded_command_names_the_text(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    text = tmp_path / "words.txt"
    text.write_text("words")
    common = ["--base", str(tmp_path / "base"), "--steps", "40", "--eval-every", "2", "--device", "cpu"]
    for given, named in ((["--data", str(text)], True), ([], False)):
        options = lora_convergence._parse([*common, *given, "--out", str(tmp_path / str(named)), "--record", str(tmp_path / "records")])
        runs = {arm: [run(2.0 + seed / 100) for seed in range(3)] for arm in lora_convergence.ARMS}
        lora_convergence._finish(runs, options, torch.device("cpu"), {"documents": 1})
        (record,) = json.loads((tmp_path / "records" / "lora_convergence-cpu-1.json").read_text())
        assert ("--data words.txt" in record["command"]) == named
        assert str(tmp_path) not in record["command"]

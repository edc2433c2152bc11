"""Whole runs: through the command line with processes of their own, and `Trainer` on gloo ranks for what must be bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.ranks import run_ranks
from tests.steps import done, records_of, steps_of, trainer
from tests.train_command import LIMIT_S, finish, start

import mxep.train.run
from mxep.moe import FusedMoE, MoE
from mxep.private_folders import scratch_folder
from mxep.train.checkpoint import DamagedCheckpointError, load_checkpoint, read_manifest
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.metrics import plot_losses, read_metrics
from mxep.train.rank_launcher import _explain_failure, _SignalForwarder
from mxep.train.run_folder import find_checkpoint, list_checkpoints


def test_a_run_and_its_files(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    done = finish("--data", text, "--steps", "4", "--out", str(out), "--accumulate", "2")
    assert done.returncode == 0, done.stderr
    named = ("recipe mxfp8_wgrad_with_hp", "2 cpu ranks", "experts over 2 (EP)", "step:  4  loss:", "held-out")
    for word in (
        *named,
        "grad_norm",
        "memory",
        "GiB",
        "tps:",
        "tflops:",
        "mfu: n/a",
        "mfu_causal: n/a",
        "hfu: n/a",
        "expert load max/mean",
        "dead",
    ):
        assert word in done.stdout, word
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4]
    assert [record["step"] for record in records if record["kind"] == "held_out"] == [2, 4]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step_00000003", "step_00000004"]


def draws(*_: object) -> None:
    torch.rand(3)


def straight_and_resumed(rank: int, world: int, folder: str, data: str) -> list[torch.Tensor]:
    """State of the random numbers at the end of both runs. Each step draws some, as dropout would; the resumed process begins elsewhere."""
    options = {"data": (data,), "steps": 6, "accumulate": 2, "checkpoint_every": 100}
    states = []
    for name, more, complete in (
        ("straight", {}, True),
        ("resumed", {"stop_after": 3}, False),
        ("resumed", {"resume": True, "from_state": 100}, True),
    ):
        run = trainer(rank, world, f"{folder}/{name}", **options, **more)  # type: ignore[arg-type]
        run.optimizer.register_step_post_hook(draws)
        assert run.train() == complete
        states.append(torch.get_rng_state())
    return [states[0], states[2]]


def with_and_without_cache(rank: int, world: int, folder: str, data: str) -> int:
    options = {"data": (data,), "steps": 4, "accumulate": 2, "checkpoint_every": 100}
    assert trainer(rank, world, f"{folder}/plain", checkpoint=False, **options).train()
    assert not trainer(rank, world, f"{folder}/cached", cache_weights=True, stop_after=2, **options).train()
    resumed = trainer(rank, world, f"{folder}/cached", cache_weights=True, resume=True, **options)
    assert resumed.train()
    return -1 if resumed.weight_cache is None else resumed.weight_cache.fills


def test_cached_weights_change_no_number(tmp_path: Path, text: str) -> None:
    fills = run_ranks(with_and_without_cache, 2, str(tmp_path), text)
    runs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "cached")]
    numbers = [[(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "step"] for records in runs]
    assert len(numbers[0]) == 4
    assert numbers[0] == numbers[1]
    held_out = [[r["loss"] for r in records if r["kind"] == "held_out"] for records in runs]
    assert held_out[0][-1] == held_out[1][-1]
    assert fills[0] > 0
    assert not list((tmp_path / "plain").glob("checkpoints/*"))
    assert list((tmp_path / "cached").glob("checkpoints/*"))


def test_resumed_run_equals_a_straight_one_bit_for_bit(tmp_path: Path, text: str) -> None:
    states = run_ranks(straight_and_resumed, 2, str(tmp_path), text)
    assert [torch.equal(*of_rank) for of_rank in states] == [True, True]
    assert not torch.equal(states[0][0], states[1][0]), "each rank has its own"
    runs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "resumed")]
    kept = [[(r["kind"], r["step"], r["loss"], r.get("grad_norm"), r.get("lr")) for r in records if "loss" in r] for records in runs]
    assert kept[0] == kept[1]
    assert len([r for r in kept[0] if r[0] == "step"]) == 6
    manifests = [read_manifest(find_checkpoint(tmp_path / name / "checkpoints")) for name in ("straight", "resumed")]
    tensors = [{name: torch.zeros(shape) for name, shape in manifest.shapes.items()} for manifest in manifests]
    for manifest, into in zip(manifests, tensors, strict=True):
        load_checkpoint(manifest, into)  # from one process, without a process group
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    assert any(name.endswith("expert_bias") and bool(value.any()) for name, value in tensors[0].items())
    assert manifests[0].facts["windows"] == manifests[1].facts["windows"] == {"sequences": 6 * 2 * 2 * 2, "seed": 0}


def two_steps_twice(rank: int, world: int, folder: str, data: str, fused: bool) -> list[float]:
    options = {"data": (data,), "recipe": "hp", "steps": 4, "batch": 1, "ep": 2, "fused_layer": fused}
    with pytest.raises(ValueError, match=r"transport .symmetric. does not run on group .* needs CUDA GPUs"):
        trainer(rank, world, folder, **options, transport="symmetric")
    run = trainer(rank, world, folder, **options)
    assert run.transport is not None
    assert (run.transport.name, run.transport.nbytes()) == ("collective", 0)
    taken = [done(run).loss for _ in range(2)]
    run.save()
    return taken + [done(run).loss for _ in range(2)]


@pytest.mark.parametrize("fused", [True, False])
def test_one_rank_resumes_with_the_losses_of_four(tmp_path: Path, text: str, one_rank: None, fused: bool) -> None:
    """Two EP groups of two, FSDP over all four, from the start and from their checkpoint, against one rank with the same batches."""
    on_four = run_ranks(two_steps_twice, 4, str(tmp_path), text, fused)[0]
    options = {"data": (text,), "recipe": "hp", "steps": 4, "batch": 4}
    fresh = trainer(0, 1, str(tmp_path / "single"), **options)
    assert [done(fresh).loss for _ in range(4)] == pytest.approx(on_four, rel=1e-5)
    accumulated = trainer(0, 1, str(tmp_path / "single"), **{**options, "batch": 1, "accumulate": 4})
    assert [done(accumulated).loss for _ in range(4)] == pytest.approx(on_four, rel=1e-5)
    resumed = trainer(0, 1, str(tmp_path), resume=True, **options)
    assert [done(resumed).loss for _ in range(2)] == pytest.approx(on_four[2:], rel=1e-5)


def test_experts_gemm_by_gemm_have_the_losses_of_fused_ones(tmp_path: Path, text: str, one_rank: None) -> None:
    runs = [trainer(0, 1, str(tmp_path), data=(text,), steps=4, fused_layer=False, fused_experts=fused) for fused in (True, False)]
    assert [{moe.experts.fused for moe in run.model.moe_layers()} for run in runs] == [{True}, {False}]
    fused, separate = ([done(run).loss for _ in range(2)] for run in runs)
    assert fused == pytest.approx(separate, rel=1e-3)
    assert "experts GEMM by GEMM" in runs[1].describe()[0]


def test_layers_as_one_function_have_the_losses_of_the_blocks(tmp_path: Path, text: str, one_rank: None) -> None:
    """And resume from their checkpoint: the names are the same. In MXFP8 they round differently, and steps make more of the difference."""
    options = {"data": (text,), "steps": 4, "recipe": "hp"}
    runs = [trainer(0, 1, str(tmp_path / str(fused)), **options, fused_layer=fused) for fused in (False, True)]
    assert [{type(moe) for moe in run.model.moe_layers()} for run in runs] == [{MoE}, {FusedMoE}]
    blocks, fused = ([done(run).loss for _ in range(2)] for run in runs)
    assert fused == pytest.approx(blocks, rel=1e-5)
    assert ["in separate blocks" in run.describe()[0] for run in runs] == [True, False]
    runs[0].save()
    resumed = trainer(0, 1, str(tmp_path / "False"), **options, resume=True, fused_layer=True)
    assert done(resumed).loss == pytest.approx(done(runs[0]).loss, rel=1e-5)
    options["recipe"] = "mxfp8_wgrad_with_hp"
    blocks, fused = (done(trainer(0, 1, str(tmp_path / f"mx{fused}"), **options, fused_layer=fused)).loss for fused in (False, True))
    assert fused == pytest.approx(blocks, rel=1e-3)


def test_checkpoints_of_something_else_are_refused(tmp_path: Path, text: str, one_rank: None) -> None:
    run = trainer(0, 1, str(tmp_path), data=(text,), steps=6)
    run.step()
    run.save()
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text() + "\nmore\n")
    for options, message in (
        ({"model": "dsv3_debug"}, "model was dsv3_debug_cpu, is dsv3_debug"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"accumulate": 3}, "sequences_per_step was 2, is 6"),
        ({"data": (str(other),)}, "data was"),
        ({"steps": 1}, "has all 1 of 1 steps; ask for more with --steps"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(0, 1, str(tmp_path), **{"data": (text,), "steps": 6, "resume": True, **options})


def test_the_command_after_damage_can_be_pasted(tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise DamagedCheckpointError("it is damaged")

    config, out = TrainConfig(), tmp_path / "my run"
    monkeypatch.setattr(mxep.train.run, "_hold_folder", lambda *_: (None, config, out, False))
    monkeypatch.setattr(mxep.train.run, "Trainer", damaged)
    monkeypatch.setattr(mxep.train.run, "find_good", lambda *_: 2)
    with pytest.raises(ValueError, match=f"it is damaged; .*: mxep train --resume --resume-step 2 --out '{out}'$"):
        mxep.train.run.run(config, [], Ranks(0, 1, torch.device("cpu")))


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    assert process.stdout is not None
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if word in line:
            return
        assert line or process.poll() is None, f"ended before {word!r}: {process.stderr and process.stderr.read()}"
    raise AssertionError(f"no {word!r} in {LIMIT_S} s")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ctrl_c_leaves_a_checkpoint_to_resume(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    process = start("--data", text, "--steps", "1000", "--out", str(out))
    wait_for(process, "step:    3  loss")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    assert "SIGINT: ending after this step" in stderr
    assert "resume with: mxep train --resume" in stdout
    manifest = read_manifest(find_checkpoint(out / "checkpoints"))
    assert manifest.step >= 3
    assert f"stopped after step {manifest.step} of 1000" in stdout
    done = finish("--resume", "--out", str(out), "--steps", str(manifest.step + 1))
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {manifest.step}" in done.stdout
    assert steps_of(out) == list(range(1, manifest.step + 2))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")
def test_a_rank_that_dies_ends_the_run(tmp_path: Path, text: str) -> None:
    process = start("--data", text, "--steps", "1000", "--out", str(tmp_path / "run"))
    wait_for(process, "step:    2  loss")
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - started < 10
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in stderr
    assert not any(Path(f"/proc/{rank}/stat").exists() for rank in ranks)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")
def test_ranks_do_not_outlive_their_starter(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start removes its temporary folder once they have ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    out = tmp_path / "run"
    process = start("--data", text, "--steps", "1000", "--out", str(out))
    wait_for(process, "step:    2  loss")
    ranks = children_of(process.pid)
    (left,) = (tmp_path / "temporary").glob("mxep-train-*")
    assert {path.name for path in left.glob("process_*")} == {f"process_{pid}.json" for pid in (process.pid, *ranks)}
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}/stat").exists() and " Z " not in Path(f"/proc/{rank}/stat").read_text() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert read_manifest(find_checkpoint(out / "checkpoints")).step >= 2
    with scratch_folder("train", tmp_path / "temporary"):
        assert not left.exists()


def test_output_of_a_rank_before_it_aborted_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As NCCL's watchdog does; its log goes with the folder of the run's start."""
    (tmp_path / "rank_1.log").write_text("x" * 9000 + "\nwatchdog: rank 1 waited 600 s for an all-reduce")
    children = [subprocess.Popen([sys.executable, "-c", program]) for program in ("", "import os; os.abort()")]
    for child in children:
        child.wait()
    assert _explain_failure(children, tmp_path) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == [
        "watchdog: rank 1 waited 600 s for an all-reduce",
        "mxep train: rank 1 was ended by SIGABRT; the others were ended",
    ]


@pytest.mark.parametrize(
    ("signals", "statuses", "broken_off"),
    [
        (0, (0, 1), False),
        (1, (1, 0), False),  # a rank failed on its way out: its last checkpoint found no room
        (1, (0, -signal.SIGKILL), False),
        (1, (1, 130), True),  # met before it could be handled; the other rank lost its neighbour
        (1, (-signal.SIGINT, -signal.SIGTERM), True),
        (2, (-signal.SIGKILL, -signal.SIGKILL), True),
    ],
)
def test_a_failure_after_ctrl_c_is_reported(signals: int, statuses: tuple[int, int], broken_off: bool) -> None:
    forwarder = _SignalForwarder([cast(subprocess.Popen, SimpleNamespace(poll=lambda status=status: status)) for status in statuses])
    forwarder.first, forwarder.killed = signal.SIGTERM if signals else None, signals > 1
    assert forwarder.aborted == broken_off


def test_errors_from_the_ranks_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    done = finish("--data", str(tmp_path / "short.txt"), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr.startswith("mxep train: error: data: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")
def test_under_torchrun(tmp_path: Path, text: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mxep", "train"]
    process = start("--data", text, "--steps", "1000", "--out", str(tmp_path / "run"), command=launcher)
    wait_for(process, "step:    2  loss")
    for pid in (*children_of(process.pid), process.pid):  # as a scheduler does; torchrun passes it on, so ranks get it twice
        os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    manifest = read_manifest(find_checkpoint(tmp_path / "run" / "checkpoints"))
    assert manifest.facts["world"] == 2
    taken = steps_of(tmp_path / "run")
    assert taken == list(range(1, manifest.step + 1)), "the checkpoint is of the last step"
    process = start("--resume", "--out", str(tmp_path / "run"), "--steps", str(manifest.step + 1), command=launcher)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    assert f"resumed at step {manifest.step}" in stdout
    assert steps_of(tmp_path / "run") == [*taken, manifest.step + 1]
    assert read_manifest(find_checkpoint(tmp_path / "run" / "checkpoints")).step == manifest.step + 1


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=[pytest.mark.gpu, pytest.mark.multi_gpu])])
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "bf16"])
def test_a_run_on_gpus_learns_and_resumes(tmp_path: Path, text: str, nproc: int, recipe: str) -> None:
    command = [sys.executable, "-m", "mxep", "train", "--device", "cuda", "--nproc", str(nproc), "--recipe", recipe, "--seq-len", "256"]
    command += ["--batch", "4", "--data", text, "--out", str(tmp_path / "run"), "--warmup", "5", "--log-every", "1"]
    for options in (["--steps", "20"], ["--steps", "24", "--resume"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    assert f"{nproc} cuda rank" in done.stdout
    records = records_of(tmp_path / "run", "step")
    assert [record["step"] for record in records] == list(range(1, 25))
    assert records[-1]["loss"] < records[0]["loss"] - 2


def test_plot_of_nothing_and_of_any_names(tmp_path: Path) -> None:
    records = [{"kind": "step", "step": i, "loss": 5.0 / i} for i in range(1, 5)] + [{"kind": "held_out", "step": 4, "loss": 1.5}]
    for runs in ({"a": records, "b": []}, {"cost_$5_^a$": records}, {"cost_$5_^a$": records, "$^$": records}):
        plot_losses(runs, tmp_path / "loss.png")  # the second is no formula
        assert (tmp_path / "loss.png").stat().st_size > 1000
        (tmp_path / "loss.png").unlink()


@pytest.mark.slow
def test_the_default_run_learns(tmp_path: Path) -> None:
    """`mxep train` without options: inside three minutes, held-out loss at most 2.7 nats per byte (single bytes 3.25, pairs 2.43)."""
    started = time.monotonic()
    command = [sys.executable, "-m", "mxep", "train", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 180
    out = tmp_path / "runs" / "dsv3_debug_cpu-mxfp8_wgrad_with_hp"
    held_out = [record["loss"] for record in records_of(out, "held_out")]
    assert held_out[-1] <= 2.7
    assert (out / "loss.png").exists()
    assert find_checkpoint(out / "checkpoints")

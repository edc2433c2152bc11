"""Observation of a run: counts of MXFP8's codes, TensorBoard, a profiler window, and the comparison of two recipes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.moe_truth import D, both
from tests.ranks import run_ranks
from tests.steps import records_of, trainer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import mxep.train.compare
import mxep.train.numerics
import mxep.train.rank_launcher
import mxep.train.step
import mxep.train.trainer
from mxep.moe import MoE
from mxep.parallel import apply_mxfp8_expert_parallel
from mxep.train.compare import train_both
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks, StopRequest, init_distributed
from mxep.train.metrics import read_metrics
from mxep.train.numerics import COUNTS, NumericsWatch, count_codes
from mxep.train.optimizer import ExpertBiasHook
from mxep.train.option_parser import read_options
from mxep.train.rank_launcher import command
from mxep.train.step import PendingStep, StepProfiler
from mxep.train.trainer import Trainer


def test_codes_at_the_end_of_the_range() -> None:
    rows = torch.full((2, 64), 500.0)  # floor leaves the scale at 1, so every value saturates; rceil doubles it
    assert count_codes(rows, "floor").tolist() == [4, 0, 128, 128, 0]
    assert count_codes(rows, "rceil").tolist() == [4, 0, 128, 0, 0]
    rows[0, 3], rows[1, 40:] = float("nan"), 0.0
    assert count_codes(rows, "rceil").tolist() == [4, 1, 128, 0, 24]


def counted(layer: MoE, x: Tensor, dy: Tensor | None = None) -> dict[str, dict[str, int]]:
    """COUNTS of a forward, and of its backward where there is a gradient, by kind; no hook is left behind."""
    watch = NumericsWatch({"moe": layer})
    with watch.counting():
        y = layer(x.clone().requires_grad_())
        if dy is not None:
            y.backward(dy)
    assert not layer.experts._forward_hooks
    assert not layer.experts._forward_pre_hooks
    return {record["of"]: {name: record[name] for name in COUNTS} for record in watch.records()}


def padded(counts: dict[str, int], times: int, blocks: int) -> dict[str, int]:
    """The counts of as many copies, with zeros around them up to so many blocks."""
    padding = blocks - times * counts["blocks"]
    assert padding >= 0
    own = {"blocks": padding, "values": 32 * padding, "zeros": 32 * padding}
    return {name: times * count + own.get(name, 0) for name, count in counts.items()}


def check_layers(world: int, x: Tensor, dy: Tensor | None, top_k: int, recipe: str) -> dict[str, dict[str, int]]:
    """The fused layer's counts. Those of the blocks are compared with them: the blocks have a row for each choice, and padding."""
    found = []
    for layer in both(recipe, top_k=top_k):
        if world > 1:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
            apply_mxfp8_expert_parallel(layer, mesh)
            layer.group = mesh.get_group()
        found.append(counted(layer, x, dy))
    blocks, fused = found
    for of in ("rows", "gradients") if dy is not None else ("rows",):
        assert fused[of]["values"] == 32 * fused[of]["blocks"] == world * x.numel()
        assert blocks[of] == padded(fused[of], top_k, blocks[of]["blocks"]), of
    return fused


def check_counts(rank: int, world: int) -> None:
    """The tokens and gradients of one choice of score 1, tokens of two choices, and an overflow of each kind in them."""
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(40, D, generator=generator).bfloat16() for _ in range(2))
    x[3, 40], x[5, 33], dy[7, 2], dy[9] = 0.0, -0.0, float("nan"), 0.0
    found = check_layers(world, x, dy, 1, "mxfp8_wgrad_with_hp")
    assert [found[of]["nonfinite_blocks"] for of in ("rows", "gradients")] == [0, world]
    assert found["rows"]["zeros"] >= 2 * world
    assert found["gradients"]["zeros"] >= D * world
    check_layers(world, x, None, 2, "mxfp8_wgrad_with_hp")
    x[rank, 50], x[:, 10] = float("inf"), 480.0  # floor leaves a block with 480 its scale of 1, which ends at 448
    rows = check_layers(world, x, None, 1, "mxfp8_wgrad_with_hp_floor")["rows"]
    assert rows["nonfinite_blocks"] == world
    assert rows["largest_codes"] >= 40 * world


def test_the_fused_layer_counts_what_the_blocks_count() -> None:
    check_counts(0, 1)


def test_the_fused_layer_counts_on_two_ranks() -> None:
    run_ranks(check_counts, 2)


def test_a_watched_run_has_the_losses_of_an_unwatched_one(tmp_path: Path, text: str, one_rank: None) -> None:
    pytest.importorskip("tensorboard")
    losses = []
    figures, blocks = {"tensorboard": True, "profile_step": 2, "profile_steps": 1}, {"fused_layer": False}
    watched_too = blocks | figures | {"numerics_every": 2}
    ways = {"plain": blocks, "watched": watched_too, "fused": {}, "fused_watched": {"numerics_every": 2}}
    for name, watched in ways.items():
        options = {"batch": 1, "seq_len": 16, "eval_tokens": 32, "steps": 3, "accumulate": 2, "data": (text,)}
        assert trainer(0, 1, tmp_path / name, **options, activation_checkpoint="full", **watched).train()
        losses.append([(record["loss"], record["grad_norm"]) for record in records_of(tmp_path / name, "step")])
    assert losses[0] == losses[1]
    assert losses[2] == losses[3] != losses[0]
    tokens = 2 * 16  # of two microbatches; in the blocks a row for each of two choices, with padding
    for name in ("watched", "fused_watched"):
        records = records_of(tmp_path / name, "numerics")
        assert [(record["step"], record["layer"], record["of"]) for record in records] == [
            (2, f"layers.{layer}.moe", kind) for layer in (1, 2, 3) for kind in ("rows", "gradients")
        ]
        for record in records:
            assert record["nonfinite_blocks"] == 0
            assert record["values"] == 32 * record["blocks"]
            assert (record["values"] == tokens * 128) == (name == "fused_watched")
            assert record["values"] - record["zeros"] > tokens * 64 * (1 if name == "fused_watched" else 2)
    trace = json.loads((tmp_path / "watched" / "profile" / "rank_00000.json").read_text())
    assert any("mxep::" in str(event.get("name")) for event in trace["traceEvents"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "watched" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("step/loss")] == [1, 2, 3]
    assert board.Scalars("step/loss")[2].value == pytest.approx(losses[0][2][0])
    assert {"held_out/loss", "step/dead_experts", "numerics/layers.1.moe/rows/zeros"} <= set(board.Tags()["scalars"])


def test_a_run_that_stopped_before_an_evaluation_evaluates_when_it_resumes(
    tmp_path: Path, text: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> StopRequest:
        request = StopRequest()
        request.signal = signal.SIGTERM
        return request

    options = {"batch": 1, "seq_len": 16, "eval_tokens": 32, "steps": 2, "eval_every": 1, "data": (text,)}
    with monkeypatch.context() as patch:
        patch.setattr(mxep.train.trainer, "StopRequest", stopped)
        assert not trainer(0, 1, tmp_path, **options).train()
    assert trainer(0, 1, tmp_path, **options, resume=True).train()
    assert [record["step"] for record in records_of(tmp_path, "held_out")] == [1, 2]


def killed_before_step(run: Trainer, number: int) -> None:
    step = run.step

    def stepped() -> PendingStep:
        if run.step_count == number - 1:
            raise RuntimeError("killed")
        return step()

    run.step = stepped  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        run.train()


def in_the_next_second() -> None:
    """TensorBoard reads files in the order of their names: a second, and for one process a number behind it, of which 10 is before 9."""
    time.sleep(1.0 - time.time() % 1.0)


def test_a_run_that_is_killed_twice_at_one_checkpoint_has_each_figure_once(tmp_path: Path, text: str, one_rank: None) -> None:
    """Where it had been stopped before it could evaluate, and before there was a checkpoint."""
    pytest.importorskip("tensorboard")
    options = {"data": (text,), "steps": 4, "eval_every": 2, "checkpoint_every": 4, "tensorboard": True}
    killed_before_step(trainer(0, 1, str(tmp_path), **options), 2)
    in_the_next_second()
    run = trainer(0, 1, str(tmp_path), **options, stop_after=2)
    run._evaluate_into = lambda log: None  # type: ignore[method-assign]  # as where a signal has come
    assert not run.train()
    in_the_next_second()
    killed_before_step(trainer(0, 1, str(tmp_path), **options, resume=True), 3)
    in_the_next_second()
    assert trainer(0, 1, str(tmp_path), **options, resume=True).train()
    found = {kind: [record["step"] for record in records_of(tmp_path, kind)] for kind in ("step", "held_out")}
    assert found == {"step": [1, 2, 3, 4], "held_out": [2, 4]}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {kind: [event.step for event in board.Scalars(f"{kind}/loss")] for kind in found} == found


def test_two_recipes_side_by_side(tmp_path: Path, text: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the command line, with the ranks in this process."""
    arms = []

    def start(config: TrainConfig, argv: Sequence[str]) -> tuple[int, bool]:
        assert read_options(argv) == config, "the ranks read their options from the command line"
        arms.append(config.recipe)
        assert config.out is not None
        return 0 if Trainer(config, Ranks(0, 1, torch.device("cpu")), config.out).train() else 1, False

    monkeypatch.setattr(mxep.train.rank_launcher, "start_ranks", start)
    small = ["--device", "cpu", "--nproc", "1", "--batch", "1", "--seq-len", "16", "--eval-tokens", "32", "--steps", "4", "--data", text]
    assert command([*small, "--compare", "bf16", "--out", str(tmp_path / "both")]) == 0
    assert arms == ["mxfp8_wgrad_with_hp", "bf16"]
    comparison = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert list(comparison["arms"]) == arms
    assert comparison["ratios"]["loss"] == pytest.approx(1, abs=0.02)
    assert (tmp_path / "both" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    first = [read_metrics(tmp_path / "both" / arm / "metrics.jsonl")[1] for arm in arms]
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-3), "same weights and data"


def test_a_comparison_with_bf16_is_one_with_bf16_as_a_whole(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers, the output projection, and gate and up as they are kept, stayed in MXFP8 where options named that for them."""
    arms = []

    def start(config: TrainConfig, argv: Sequence[str]) -> tuple[int, bool]:
        assert read_options(argv) == config, "the ranks read their options from the command line"
        arms.append((config.recipe, config.linear_recipe, config.output_recipe, config.keep_first_product))
        return 0, False

    def both(recipes: tuple[str, str], folder: Path, train: Callable[[str, Path], tuple[int, bool]], steps: int) -> int:
        return max(train(recipe, folder / recipe)[0] for recipe in recipes)

    monkeypatch.setattr(mxep.train.rank_launcher, "start_ranks", start)
    monkeypatch.setattr(mxep.train.rank_launcher, "train_both", both)
    options = ["--device", "cpu", "--nproc", "1", "--data", text, "--compare", "bf16", "--out", str(tmp_path / "both")]
    mx, hp = "mxfp8_wgrad_with_mx", "mxfp8_wgrad_with_hp"
    assert command([*options, "--output-recipe", mx, "--linear-recipe", hp]) == 0
    assert command([*options, "--output-recipe", mx, "--keep-first-product", "mxfp8"]) == 0
    assert arms == [(hp, hp, mx, "hp"), ("bf16", "bf16", "bf16", "hp"), (hp, None, mx, "mxfp8"), ("bf16", None, "bf16", "hp")]


def both_of(folder: Path, capsys: pytest.CaptureFixture[str], taken: int, skipped: int) -> str:
    """What a comparison of two such arms prints."""

    def train(recipe: str, out: Path) -> tuple[int, bool]:
        out.mkdir(parents=True, exist_ok=True)
        kinds = ["step"] * taken + ["skipped_step"] * skipped
        records = [{"kind": kind, "step": step, "loss": 1.0} for step, kind in enumerate(kinds, 1)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0, False

    assert train_both(("b", "c"), folder, train, taken + skipped) == 0
    return capsys.readouterr().out


def test_an_arm_that_was_stopped_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the other one is not begun: a scheduler that ends a job ends all of it."""
    trained = []

    def train(recipe: str, out: Path) -> tuple[int, bool]:
        trained.append(recipe)
        out.mkdir(parents=True, exist_ok=True)
        records = [{"kind": "step", "step": step, "loss": 1.0} for step in range(1, 4 if recipe == "a" else 6)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return 0, recipe in ("a", "late")

    for recipes, arms, message in (
        (("a", "b"), ["a"], "a was stopped after step 3 of 5, nothing to compare"),
        (("late", "b"), ["late"], "late was stopped after step 5 of 5, nothing to compare"),  # in its last evaluation
        (("b", "a"), ["b", "a"], "a was stopped after step 3 of 5, nothing to compare"),
    ):
        trained.clear()
        assert train_both(recipes, tmp_path, train, 5) == 0
        assert trained == arms
        assert message in capsys.readouterr().out
    assert "2 steps say nothing" in both_of(tmp_path, capsys, taken=2, skipped=0)
    assert "1 steps say nothing" in both_of(tmp_path, capsys, taken=1, skipped=4), "a step that is skipped has no figures"
    assert train_both(("c", "d"), tmp_path, lambda recipe, out: (3, False), 5) == 3


def test_a_used_folder_of_the_second_arm_is_an_error_before_the_first_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "both" / "bf16" / "checkpoints" / "step_00000003").mkdir(parents=True)
    monkeypatch.setattr(mxep.train.rank_launcher, "start_ranks", lambda config, argv: pytest.fail("trained"))
    assert command(["--compare", "bf16", "--device", "cpu", "--out", str(tmp_path / "both")]) == 2
    assert f"{tmp_path / 'both' / 'bf16'} holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize("mx_arm", [["--recipe", "bf16", "--compare", "mxfp8"], ["--recipe", "mxfp8", "--compare", "bf16"]])
def test_impossible_options_of_either_arm_are_an_error_before_the_first_is_trained(
    mx_arm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxep.train.rank_launcher, "start_ranks", lambda config, argv: pytest.fail("trained"))
    options = ["--device", "cpu", "--model", "dsv3_debug_cpu", "--out", str(tmp_path / "both")]
    assert command([*mx_arm, *options, "--linear-fqns", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert command([*mx_arm, *options, "--linear-fqns", "*"]) == 2
    assert "want multiples of 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "mxfp8_wgrad_with_hp"], "is the recipe that is trained anyway"),
        (["--compare", "fp4"], "fp4"),
    ],
)
def test_invalid_comparisons(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*options, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="resume each of the two runs in its own folder"):
        TrainConfig(compare="bf16", resume=True)


def test_without_evaluation(tmp_path: Path, text: str, one_rank: None) -> None:
    run = trainer(0, 1, tmp_path, steps=2, data=(text,), eval_every=1, evaluate=False, checkpoint=False)
    assert run.train()
    kinds = [record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert kinds == ["run", "step", "step"]
    assert run.facts()["transport"] is None
    assert "(EP)" in "".join(run.describe())


def test_the_time_of_a_step_includes_its_metrics(tmp_path: Path, text: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' load took 45 ms of every step on four GPUs, and no figure had them: the clock had been read before."""
    now, read = [0.0], ExpertBiasHook.load

    def slowly(hook: ExpertBiasHook, device: torch.device) -> tuple[Tensor, Tensor]:
        now[0] += 3600.0
        return read(hook, device)

    monkeypatch.setattr(mxep.train.step.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ExpertBiasHook, "load", slowly)
    assert trainer(0, 1, tmp_path, steps=1, data=(text,), evaluate=False, checkpoint=False).train()
    assert [record["step_s"] for record in records_of(tmp_path, "step")] == [3600.0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_computes_on_the_cpu_with_one_thread(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for threads, want in (("4", []), (None, [1])):
        monkeypatch.setenv("OMP_NUM_THREADS", threads) if threads else monkeypatch.delenv("OMP_NUM_THREADS")
        with init_distributed(device):  # type: ignore[arg-type]
            assert asked == want


def test_steps_that_a_profile_records(tmp_path: Path) -> None:
    host, device = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    for kind, wanted in (("cpu", ([host], [host])), ("cuda", ([host, device], [device]))):
        found = [StepProfiler(tmp_path, 1, 1, 0, torch.device(kind), host=both)._activities for both in (True, False)]
        assert found == [*wanted]


@pytest.mark.parametrize(("ends", "told"), [(4, "profile of 3 steps"), (3, "profile of 2 steps"), (2, "profile of 1 step:")])
def test_a_profile_reports_its_number_of_steps(tmp_path: Path, ends: int, told: str) -> None:
    """Three from the second on are asked for; where the run ends before, it has fewer."""
    profiler = StepProfiler(tmp_path, 2, 3, 0, torch.device("cpu"))
    results = []
    for step in range(1, ends + 1):
        profiler.before(step)
        results.append(profiler.after(step, last=step == ends))
    assert results[:-1] == [None] * (ends - 1)
    assert results[-1] is not None
    assert results[-1].startswith(told)
    assert (tmp_path / "profile" / "rank_00000.json").exists()

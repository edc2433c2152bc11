"""`mxep convergence` on a CPU: pieces, the same evaluations in all runs, the record, the verdict, and errors."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import pytest

from mxep.bench import markdown_tables, plots
from mxep.bench.records import RESULTS, range_verdict, read_records, write_beside
from mxep.cli import main
from mxep.commands import convergence
from mxep.commands.convergence import MAX_DIFFERENCE, ComparisonPlan, command, curve, summarize, train_options
from mxep.commands.run_pool import RunPool, SeedRun, log_tail
from mxep.train.data import text_files
from mxep.train.data.loader import ByteTokenizer, load_corpus
from mxep.train.metrics import read_metrics
from mxep.train.option_parser import read_options

RECIPES = ("mxfp8_wgrad_with_hp", "bf16")


def metrics(end: float, steps: int = 20, every: int = 1) -> list[dict]:
    """A run whose held-out loss falls from `end` + 1 to `end` half-way and stays there."""
    records: list[dict] = [{"kind": "run", "step": 0, "gemm_path": "fp8", "settings": {}}]
    for step in range(1, steps + 1):
        loss = end + max(1 - 2 * step / steps, 0)
        records.append({"kind": "step", "step": step, "loss": loss + 0.1})
        if step % every == 0:
            records.append({"kind": "held_out", "step": step, "loss": loss, "tokens": 64})
    return records


def test_means_ranges_and_verdicts_by_hand() -> None:
    found = summarize(
        {"near": [metrics(2.002), metrics(2.004)], "far": [metrics(2.01), metrics(2.03)], "bf16": [metrics(2.0), metrics(2.006)]}, 20
    )
    assert found["arms"]["bf16"]["held_out"] == [2.0, 2.006]
    assert found["arms"]["bf16"]["held_out_range"] == [2.0, 2.006]
    assert found["arms"]["near"]["training"] == [2.102, 2.104]
    assert found["ratios"] == {"near_held_out_vs_bf16": 1.0, "far_held_out_vs_bf16": round(2.02 / 2.003, 6)}
    assert found["within_target"] == {"near_held_out_vs_bf16": True, "far_held_out_vs_bf16": False}
    assert found["within_range"] == {"near": True, "far": False}
    assert found["by_seed"]["near"] == [1.001, round(2.004 / 2.006, 6)]
    assert set(found["limit"]) == set(found["target"]) == set(found["ratios"])
    assert found["target"]["near_held_out_vs_bf16"] == 1 + MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("seeds", "steps", "every", "missing"),
    [
        (3, 40, 1, []),
        (1, 40, 1, ["1 seed has no spread, want --seeds 3 or more"]),
        (2, 40, 1, ["2 seeds have no spread, want --seeds 3 or more"]),
        (3, 40, 2, ["2 of the evaluations are in the last tenth of 40 steps, want 3 or more: more --steps or a smaller --eval-every"]),
        (1, 20, 1, ["1 seed has", "2 of the evaluations"]),
    ],
)
def test_a_verdict_needs_seeds_and_evaluations(seeds: int, steps: int, every: int, missing: list[str]) -> None:
    ends = {"mxfp8": 2.0, "bf16": 2.0}
    found = summarize({name: [metrics(end + seed / 100, steps, every) for seed in range(seeds)] for name, end in ends.items()}, steps)
    assert len(found["no_verdict"]) == len(missing)
    assert all(text in said for text, said in zip(missing, found["no_verdict"], strict=True))
    record = {**found, "steps": steps, "device": "cpu", "world_size": 1, "shape": {"T": 8}, "model": {"name": "small", "parameters": 1e6}}
    said = "no verdict" if missing else "yes"
    table = markdown_tables.convergence_table([{**record, "lr": 1e-3, "data": {"unit": "byte"}}])
    assert f"| {said} |" in table
    assert ("nan" in table, "|  | no verdict |" in table) == (False, seeds == 1)
    del found["no_verdict"]
    assert range_verdict(found, "mxfp8") == "yes", "an older record"


def test_the_table_names_its_baseline() -> None:
    arms = {name: [metrics(2.0 + seed / 100, 40) for seed in range(3)] for name in ("mxfp8", "long", "bf16")}

    def record(*names: str) -> dict:
        setting = {"steps": 40, "device": "cpu", "world_size": 1, "shape": {"T": 8}, "model": {"name": "small", "parameters": 1e6}}
        return {**summarize({name: arms[name] for name in names}, 40), **setting, "lr": 1e-3, "data": {"unit": "byte"}}

    against_long, against_bf16 = record("mxfp8", "long"), record("mxfp8", "bf16")
    assert "| mean against long | its standard error | within long's seeds |" in markdown_tables.convergence_table([against_long])
    assert "| mean against bf16 | its standard error | within bf16's seeds |" in markdown_tables.convergence_table([against_bf16])
    assert "mean against the baseline" in markdown_tables.convergence_table([against_long, against_bf16])


def test_no_verdict_on_losses_that_still_fall() -> None:
    """The last tenth of 100 steps: from 1.09 to 1.00 on average, seeds 0.06 apart."""

    def falling(end: float) -> list[dict]:
        losses = [{"kind": kind, "step": step, "loss": end + (100 - step) / 100} for step in range(1, 101) for kind in ("step", "held_out")]
        return [{"kind": "run", "step": 0, "gemm_path": "fp8", "settings": {}}, *losses]

    (said,) = summarize({name: [falling(end) for end in (1.0, 1.03, 1.06)] for name in RECIPES}, 100)["no_verdict"]
    assert said == ("the baseline's loss falls by 0.0900 within the last tenth of 100 steps, its seeds differ by 0.0600; want more --steps")
    assert summarize({name: [falling(end) for end in (1.0, 1.05, 1.1)] for name in RECIPES}, 100)["no_verdict"] == []


def test_a_run_without_a_step_in_the_last_tenth_is_reported() -> None:
    skipped = [record for record in metrics(2.0) if record["kind"] != "step" or record["step"] <= 18]
    with pytest.raises(
        ValueError, match=r"mxfp8-seed1: no 'step' record in the last tenth of 20 steps, want one or more: its log\.txt says"
    ):
        summarize({"mxfp8": [metrics(2.0), skipped], "bf16": [metrics(2.0), metrics(2.0)]}, 20)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_has_no_mean(loss: float) -> None:
    """A NaN in the middle left the range of the seeds without it, and a verdict."""
    diverged = [record | ({"loss": loss} if record["kind"] == "held_out" and record["step"] == 20 else {}) for record in metrics(2.0)]
    with pytest.raises(ValueError, match=rf"bf16-seed1: a 'held_out' loss in the last tenth of 20 steps is {loss}, want finite numbers"):
        summarize({"mxfp8": [metrics(2.0)] * 3, "bf16": [metrics(2.0), diverged, metrics(2.1)]}, 20)


def test_the_recorded_comparison_has_a_verdict() -> None:
    records = read_records("convergence", Path(__file__).parent.parent.parent / RESULTS)
    assert all(convergence.missing_for_verdict(record["arms"]["bf16"], record["steps"]) == [] for record in records)
    assert records


def test_curves_keep_the_mean_training_loss_between_evaluations() -> None:
    found = curve(metrics(1.0, steps=4, every=2))
    assert found == {"step": [2, 4], "held_out": [1.0, 1.0], "training": [1.35, 1.1]}


def test_a_curve_has_no_training_loss_where_all_steps_were_skipped() -> None:
    records = [record for record in metrics(1.0, steps=4, every=2) if record["kind"] != "step" or record["step"] <= 2]
    assert curve(records) == {"step": [2, 4], "held_out": [1.0, 1.0], "training": [1.35, None]}


def test_a_record_tells_options_of_all_runs_from_those_of_an_arm(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = ("--model", "dsv3_debug_cpu", "--data", str(tmp_path / "a text.py"), "--steps", "20", "--lr", "1e-3", "--seq-len", "16")
    plan = ComparisonPlan(("mine", "bf16"), 1, given, {"mine": "--lr 2e-3 --no-fused-layer --lr-floor 0"})
    runs = plan.runs(tmp_path)
    for run in runs:
        config = read_options([*given, *run.options])
        facts = {"world": 1, "device": "cpu", "model": {"name": "dsv3_debug_cpu", "parameters": 1}}
        facts |= {"data": {"fingerprint": "a", "unit": "byte", "tokenizer": {"name": "bytes"}}, "settings": config.to_json()}
        run.folder.mkdir()
        lines = [json.dumps(record | (facts if record["kind"] == "run" else {})) for record in metrics(2.0 + (run.recipe == "mine") / 100)]
        (run.folder / "metrics.jsonl").write_text("\n".join(lines))
    options = convergence._parser().parse_args(["--out", str(tmp_path), "--record", str(tmp_path)])
    config = read_options(given)
    convergence._finish(plan, runs, options, config)
    (record,) = json.loads((tmp_path / "convergence-cpu-1.json").read_text())
    assert record["options"] == {"cache_weights": False, "fused_experts": True, "fused_layer": True, "lr_floor": 0.1}
    assert [record["lr"], *(arm.get("lr") for arm in record["arms"].values())] == [1e-3, 2e-3, None]
    assert "--data 'a text.py'" in record["command"]
    rows = {line.split(" | ")[1]: line for line in capsys.readouterr().out.splitlines() if "lr" in line}
    assert [("lr 0.002" in rows[name], "lr 0.001" in rows[name]) for name in ("mine", "bf16")] == [(True, False), (False, True)]


@pytest.mark.slow
def test_two_pieces_make_a_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text").mkdir()
    for name in ("decoder", "encoder", "scanner"):
        text = Path(sysconfig.get_path("stdlib")) / "json" / f"{name}.py"
        (tmp_path / "text" / text.name).write_bytes(text.read_bytes())
    small = ["--model", "dsv3_debug_cpu", "--steps", "10", "--seq-len", "16", "--batch", "1", "--eval-tokens", "64", "--device", "cpu"]
    out = ["--out", str(tmp_path / "runs"), "--at-once", "2"]
    assert command([*out, "--seeds", "1", "--seconds", "5", "--", "--data", str(tmp_path / "text"), *small]) == 0
    other = {"device": "cpu", "model": {"name": "other"}, "arms": {}, "steps": 10, "seq_len": 16, "tokens": 160, "lr": 1e-3}
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "convergence-cpu-1.json").write_text(json.dumps([other]))
    assert command([*out, "--resume", "--record", str(tmp_path / "records")]) == 0
    printed = capsys.readouterr()
    assert "2 runs of 10 steps" in printed.out
    assert "no verdict: 1 seed has no spread, want --seeds 3 or more; 1 of the evaluations" in printed.out
    kept, record = json.loads((tmp_path / "records" / "convergence-cpu-1.json").read_text())
    assert kept == other
    assert list(record["arms"]) == list(RECIPES)
    assert [record["arms"][name]["gemm_path"] for name in RECIPES] == ["reference", None]
    assert record["tokens"] == 10 * record["shape"]["T"] == 160
    assert "-- --data text --model dsv3_debug_cpu" in record["command"]  # no path of a machine
    for name in RECIPES:
        (curves,) = record["arms"][name]["curves"]
        assert curves["step"] == list(range(1, 11))  # whatever step the first piece ended at
        run = read_metrics(tmp_path / "runs" / f"{name}-seed0" / "metrics.jsonl")
        assert [entry["step"] for entry in run if entry["kind"] == "step"] == list(range(1, 11))
    first = [record["arms"][name]["curves"][0]["held_out"][0] for name in RECIPES]
    assert first[0] == pytest.approx(first[1], rel=2e-3)  # same initialisation and data
    assert (tmp_path / "runs" / "convergence.png").stat().st_size > 10_000
    assert "| bf16 |" in markdown_tables.TABLES["convergence"]([record | {"device": "h200"}])
    assert plots.draw({"convergence": [record]}, tmp_path / "plots") == []  # a CPU's is no record of the README
    assert [path.name for path in plots.draw({"convergence": [record | {"device": "h200"}]}, tmp_path / "plots")] == ["convergence.png"]
    path = tmp_path / "runs" / "bf16-seed0" / "metrics.jsonl"
    path.write_text(path.read_text().replace(read_metrics(path)[0]["data"]["fingerprint"], "another"))
    assert main(["convergence", *out, "--resume"]) == 2
    assert "the text has changed between the runs (" in capsys.readouterr().err
    assert main(["convergence", *out, "--seeds", "1", "--resume"]) == 2
    assert "leave out" in capsys.readouterr().err
    assert main(["convergence", *out, "--seeds", "1", "--", *small]) == 2
    assert "holds runs already" in capsys.readouterr().err


def test_a_run_that_fails_is_reported_and_the_others_do_not_start(tmp_path: Path) -> None:
    runs = [SeedRun("bf16", seed, tmp_path / str(seed), ("--recipe", "bf16")) for seed in range(2)]
    said: list[str] = []
    failed = RunPool(runs, lambda run: ["train", "--stepz", "3"], 1, None, said.append).run(lambda: "")
    assert failed == [(runs[0], 2)]
    assert "there is no option --stepz; the nearest is --steps" in log_tail(runs[0])
    assert said == ["0 failed: every run ends after its step, with a checkpoint"]
    assert not runs[1].folder.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--seed", "3"], "--seed is set by mxep convergence for each run"),
        (["--", "--quantize.grouped-mm.mx.recipe-name", "bf16"], "is set by mxep convergence for each run"),
        (["--", "--steps", "20", "--eval-every", "5"], "--eval-every=5 of 20 steps"),
        (["--", "--steps", "9", "--eval-every", "2"], "--eval-every=2 of 9 steps, want an evaluation in the last tenth: 1 or less"),
        (["--", "--step", "20"], "the nearest is --steps"),
        (["--", "--no-evaluate"], "--evaluate=False: the comparison uses the evaluations"),
        (["--", "--checkpoint.no-enable"], "--checkpoint=False: --resume continues from the checkpoints"),
        (["--recipes", "mxfp8,hp"], "bf16 is named twice"),
        (["--recipes", "mxfp9"], "'mxfp9' is unknown"),
        (["--arm", "mine"], "--arm=mine, want NAME=OPTIONS"),
        (["--arm", "a/b=--lr 1"], "--arm=a/b=--lr 1, want NAME=OPTIONS"),
        (["--arm", "bf16=--lr 1"], "bf16 is the name of another arm or of a recipe"),
        (["--arm", "mine=--lr 1", "--arm", "mine=--lr 2"], "mine is the name of another arm"),
        (["--arm", "mine=--training.steps 9"], "--arm mine: --training.steps must be the same in all runs"),
        (["--arm", "mine=--optimiser adamw8bit"], "the nearest is --optimizer"),
        (["--arm", "mine=--config mine.toml"], "--arm mine: --config must be the same in all runs"),
        (["--arm", "mine=--keep-first-product mxfp8 --no-fused-layer"], "--keep-first-product=mxfp8 with --no-fused-layer"),
        (["--arm", "mine=--recipe mxfp9"], "'mxfp9' is unknown"),
        (["--arm", "mine=--no-checkpoint"], "--checkpoint=False: --resume continues from the checkpoints"),
        (["--arm", "mine=--no-evaluate"], "--evaluate=False: the comparison uses the evaluations"),
        (["--arm", "mine=--data-field x"], "--arm mine: --data-field must be the same in all runs"),
        (["--arm", "mine=--chat"], "--arm mine: --chat must be the same in all runs"),
        (["--arm", "mine=--init-from base", "--", "--model", "qwen3_debug_cpu"], "--arm mine: --init-from must be the same in all runs"),
        (["--arm", "mine=--layers 2"], "--arm mine: another model, which must be the same in all runs"),
        (["--seconds", "0"], "--seconds=0.0, want more than 0"),
        (["--resume"], "nothing to continue"),
    ],
)
def test_bad_options(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["convergence", "--out", str(tmp_path / "runs"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_older_plan_continues_with_separate_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that began before layers were one function keep their blocks; those that begin later are compared with them."""
    begun: list[ComparisonPlan] = []
    monkeypatch.setattr(convergence, "_train", lambda plan, *_: begun.append(plan) or 0)
    out, given = ["--out", str(tmp_path)], ["--data", __file__, "--lr", "1e-3"]
    assert command([*out, "--arm", "fused=--fused-layer", "--", *given]) == 0
    assert command([*out, "--resume"]) == 0
    path = tmp_path / convergence.PLAN_FILE
    older = json.loads(path.read_text())
    del older["fused_layer"], older["file"]
    path.write_text(json.dumps(older))
    assert command([*out, "--resume"]) == 0
    plan = begun[-1]
    (tmp_path / "own.toml").write_text("fused_layer = true\ncuda_graph = true\n")
    path.write_text(json.dumps(older | {"given": [*given, "--config", str(tmp_path / "own.toml")]}))
    assert command([*out, "--resume"]) == 0
    assert "--no-fused-layer" not in begun.pop().given, "a file says what the runs have"
    found = [[read_options([*train_options(each.given, tmp_path), *each.options_of(name)]) for name in plan.recipes] for each in begun]
    assert [[config.fused_layer for config in configs] for configs in found] == [[True, True], [True, True], [True, False]]
    assert {config.lr for configs in found for config in configs} == {1e-3}


def test_the_baseline_has_nothing_in_mxfp8() -> None:
    plan = ComparisonPlan(("mxfp8", "bf16"), 1, ("--output-recipe", "mxfp8", "--keep-first-product", "mxfp8"))
    found = [read_options([*plan.given, *plan.options_of(name)]) for name in plan.recipes]
    assert [(config.output_recipe, config.keep_first_product) for config in found] == [("mxfp8", "mxfp8"), ("bf16", "hp")]
    assert ComparisonPlan(("bf16",), 1, ()).options_of("bf16") == ("--recipe", "bf16")


def test_a_file_has_no_options_of_this_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Some of them would end every run early, or train each twice."""
    (tmp_path / "ours.toml").write_text("steps = 30\nstop_after = 5\n")
    assert main(["convergence", "--out", str(tmp_path / "runs"), "--", "--config", str(tmp_path / "ours.toml")]) == 2
    assert "ours.toml: stop_after: set by mxep convergence for each run; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_file_that_changed_between_pieces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The runs that are left would have its new options, those that are done had the old ones."""
    monkeypatch.setattr(convergence, "_train", lambda *_: 0)
    file, out = tmp_path / "own.toml", ["convergence", "--out", str(tmp_path / "runs")]
    file.write_text(f'lr = 1e-3\nz_loss = 0.1\ndata = ["{__file__}"]\n')
    assert main([*out, "--", "--config", str(file)]) == 0
    assert main([*out, "--resume"]) == 0
    file.write_text(f'lr = 2e-3\nwarmup = 3\ndata = ["{__file__}"]\nz_loss = 0.1\n')
    assert main([*out, "--resume"]) == 2
    assert "own.toml: the runs began with others: lr=0.002, want 0.001; warmup=3, want not given; restore it" in capsys.readouterr().err
    path = tmp_path / "runs" / convergence.PLAN_FILE
    older = json.loads(path.read_text())
    del older["file"]
    path.write_text(json.dumps(older))
    assert main([*out, "--resume"]) == 0
    file.write_text(f'lr = 3e-3\nwarmup = 3\ndata = ["{__file__}"]\nz_loss = 0.1\n')
    assert main([*out, "--resume"]) == 2, "what an older plan lacks is kept at its first piece"
    assert "lr=0.003, want 0.002" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert main(["convergence", "--out", str(tmp_path / "file" / "runs"), "--", "--data", __file__]) == 2
    assert "file/runs/plan.json cannot be written: Not a directory; choose another --out" in capsys.readouterr().err


def test_given_options_override_the_defaults(tmp_path: Path) -> None:
    words = train_options(["--model", "dsv3_debug", "--eval-tokens", "2048"], tmp_path)
    assert "dsv3_small" not in words
    assert words.index("98304") < words.index("2048")
    assert words[-2:] == ["--eval-every", "12"]
    assert train_options(["--steps", "9"], tmp_path)[-2:] == ["--eval-every", "1"]
    (tmp_path / "given.toml").write_text("eval_tokens = 4096\ncache_weights = false\nlog_every = 3\n")
    of_file = read_options(train_options(["--model", "dsv3_debug", "--config", str(tmp_path / "given.toml")], tmp_path))
    assert (of_file.eval_tokens, of_file.cache_weights, of_file.log_every) == (4096, False, 3)
    assert (of_file.checkpoint_every, of_file.keep) == (None, 1)  # a tenth of the run
    assert train_options([], tmp_path)[:4] == ["--model", "dsv3_small", "--data", str(tmp_path / "corpus.jsonl")]


def test_a_record_takes_the_place_of_one_with_the_same_tokens_and_learning_rate(tmp_path: Path) -> None:
    record = {"benchmark": "convergence", "device": "cpu", "world_size": 1, "model": {"name": "a"}, "arms": {}}
    record |= {"steps": 10, "seq_len": 16, "tokens": 160, "lr": 1e-3}
    others = [record | {"lr": 2e-3}, record | {"tokens": 320}]
    (tmp_path / "convergence-cpu-1.json").write_text(json.dumps([record, *others]))
    write_beside(record, convergence.compared, tmp_path)
    assert read_records("convergence", tmp_path) == [*others, record]


def test_arms_have_options_of_their_own(tmp_path: Path) -> None:
    words = [
        "--out",
        str(tmp_path),
        "--seeds",
        "1",
        "--baseline",
        "long",
        "--arm",
        "low=--optimizer adamw8bit --recipe hp",
        "--arm",
        "long=--lr 1e-4",
    ]
    parser = convergence._parser()
    plan = convergence._plan(parser.parse_args([*words, "--recipes", "mxfp8", "--", "--data", __file__]))
    options = {run.name: run.options for run in plan.runs(tmp_path)}
    assert options == {
        "mxfp8-seed0": ("--recipe", "mxfp8"),
        "low-seed0": ("--optimizer", "adamw8bit", "--recipe", "hp"),
        "long-seed0": ("--lr", "1e-4"),
    }
    assert plan.recipes == ("mxfp8", "low", "long")
    assert convergence._plan(parser.parse_args(["--out", str(tmp_path), "--resume"])) == plan
    alone = convergence._plan(parser.parse_args(["--out", str(tmp_path / "alone"), "--arm", "low=--optimizer adamw8bit"]))
    assert alone.recipes == ("low", "bf16")


def test_the_corpus_holds_every_python_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"a.py": b"a = 1\n" * 30, "deep/b.py": b"b = 2\n" * 30, "site/c.py": "c = '\u00e9'\n".encode() * 30}.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(content)
    (tmp_path / "lib" / "empty.py").write_bytes(b"")
    (tmp_path / "lib" / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "lib" / "readme.txt").write_bytes(b"no source")
    roots = {"stdlib": tmp_path / "lib", "purelib": tmp_path / "lib" / "site", "platlib": tmp_path / "lib" / "site"}
    monkeypatch.setattr(text_files.sysconfig, "get_path", lambda name: str(roots[name]))
    assert [path.name for path in text_files.installed_python_files()] == ["a.py", "b.py", "empty.py", "latin.py", "c.py"]
    assert text_files.write_python_corpus(tmp_path / "corpus.jsonl") == (3, 2)
    corpus = load_corpus([str(tmp_path / "corpus.jsonl")], ByteTokenizer(), 0.3)
    assert corpus.num_train_documents + corpus.num_held_out_documents == 3
    assert len(corpus.train) + len(corpus.held_out) == 180 + 180 + 270 + 3

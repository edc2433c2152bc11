"""`mxep bench` on a CPU: tiny shapes through all of it, the records' schema, the tables, and no time where a check fails."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.bench_cases import CPU, FAST, check_schema, check_tables, measured, measured_on_ranks
from tests.once import once
from tests.ranks import run_ranks
from tests.virtual import run_virtual

from mxep import cli, reference
from mxep.bench import command, grouped_mm, markdown_tables, pipeline, plots, ranks, registry, report, tables
from mxep.bench import timing as timing_module
from mxep.bench.baselines import counts_of, zipf_counts
from mxep.bench.records import RESULTS, origin, read_records
from mxep.bench.timing import Rounds, Timing, time_arms


def text_of(records: list[dict]) -> str:
    console = Console(file=io.StringIO(), width=200)
    for table in tables.tables(records):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def records_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    """The records of a benchmark's quick run, which tests share."""
    return lambda name: once(tmp_path_factory, f"records of {name}", lambda: measured(name))


@pytest.mark.parametrize("name", ["quantize", "rows", "grouped-mm"])
def test_one_rank(name: str, records_of: Callable[[str], list[dict]]) -> None:
    records = records_of(name)
    check_schema(name, records)
    shown = text_of(records)
    assert all(arm in shown for arm in records[0]["arms"])
    assert all(ratio in shown for ratio in records[0]["ratios"])
    assert "microseconds of a call" in shown
    check_tables(markdown_tables.TABLES[name.replace("-", "_")](records))


def test_grouped_mm_merges_products_and_draws(tmp_path: Path, records_of: Callable[[str], list[dict]]) -> None:
    gemms, movers = records_of("grouped-mm"), records_of("quantize")
    assert [record["routing"] for record in gemms] == ["balanced", "zipf", "balanced"]
    assert [record.get("calls") for record in gemms] == [None, None, 10]  # few rows: so many calls under the clock at a time
    assert set(gemms[-1]["host_us_asked"]) <= set(gemms[-1]["host_us"])
    for record in gemms:
        assert {f"{kind}_vs_torch_bf16" for kind in ("forward", "dgrad", "wgrad")} <= set(record["ratios"])
        record["shape"]["G"] = 8  # what the plots show
    drawn = plots.draw({"grouped_mm": gemms, "quantize": movers}, tmp_path)
    assert [path.name for path in drawn] == ["roofline.png", "speed_up.png"]
    assert plots.draw({}, tmp_path) == []


def test_pipeline_on_two_ranks(tmp_path: Path) -> None:
    both = run_ranks(measured_on_ranks, 2, "pipeline")
    records = both[0]
    check_schema("pipeline", records)
    assert records[0]["arms"] == both[1][0]["arms"], "every rank knows the slowest rank's times"
    stages = {f"{arm}_{stage}" for arm in (*pipeline.ARMS, "mxfp8", "limit") for stage in ("forward", "backward", "total")}
    for record in records:
        assert set(record["arms"]) == stages
        assert record["world_size"] == 2
        assert {"total_vs_bf16", "forward_vs_bf16", "backward_vs_bf16", "total_vs_bf16_exchange"} <= set(record["ratios"])
        assert set(record["parts_ms"]) == set(pipeline.ARMS), "one call has no parts"
        for parts in record["parts_ms"].values():
            assert len(parts) == 2 * len(pipeline.STAGES)
            assert all(ms > 0 for ms in parts.values())
    page = markdown_tables.pipeline_tables(records)
    for title in ("Pipeline of the five blocks", "Pipeline in one call"):
        assert page.count(title) == 2, "the tutorial's two tables"
    assert page.count("| tokens | dim | hidden_dim | num_experts | fwd_bf16_ms |") == 4
    for routing, label in (("balanced", " |"), ("zipf", ", zipf |")):
        shapes = [record["shape"]["T"] for record in records if record["routing"] == routing]
        assert shapes
        assert all(page.count(f"\n| {T}{label}") == 4 * shapes.count(T) for T in shapes)
    assert "mxfp8_nccl_backward" in text_of(records)
    before = [{**record, "arms": {arm: ms for arm, ms in record["arms"].items() if not arm.startswith("mxfp8_t")}} for record in records]
    assert markdown_tables.pipeline_tables(before) == page[: page.index("Pipeline in one call")].rstrip(), "a record without that arm"
    assert [path.name for path in plots.draw({"pipeline": records}, tmp_path)] == ["pipeline_parts.png"]


def test_bf16_exchange_multiplies_in_mx() -> None:
    setting = registry.Setting(CPU, quick=True)
    run = pipeline.PipelineProblem(setting, 64, 64, 32, 4, "balanced")
    assert run.check() is None
    plain, exchanged = (run.results(arm)[0].clone() for arm in ("bf16", "bf16_exchange"))
    assert not torch.equal(plain, exchanged)
    for arm in ("bf16_exchange", "mxfp8"):
        for name, mine, want in zip(("out", "dx", "dW"), run.results(arm), run.results("mxfp8_nccl"), strict=True):
            assert torch.equal(mine, want), f"{arm} {name}: on one rank all arms quantise the same rows"
    assert run.w.kept.cache.fills == 2, "the weight is quantised once for forward and once for dgrad, outside the clock"


@pytest.mark.parametrize("name", ["grouped-mm", "quantize"])
def test_a_failing_check_prints_no_time(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def off(*args: object, **options: object) -> object:
        out = (grouped_product if name == "grouped-mm" else quantize)(*args, **options)
        first = out[0] if isinstance(out, tuple) else out
        return (first.view(torch.uint8).bitwise_not(), *out[1:]) if isinstance(out, tuple) else first * 1.01

    grouped_product, quantize = reference.grouped_mm_mx, reference.quantize
    ones, offs = torch.ones(32, 32), torch.tensor([32], dtype=torch.int32)
    mx = torch.ops.mxep.quantize(ones, "rceil")  # an operator keeps the function that it finds first: not the one below
    torch.ops.mxep.grouped_mm_mx(*mx, *(part[None] for part in mx), offs, torch.float32, "reference")
    monkeypatch.setattr(reference, "grouped_mm_mx" if name == "grouped-mm" else "quantize", off)
    monkeypatch.setattr(registry, "time_arms", lambda *args: pytest.fail("timed after a failed check"))
    assert command.command([name, "--device", "cpu", "--quick"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.err
    assert "no times" in captured.err
    assert "ms" not in captured.out.split()
    assert captured.out == ""


def _shared_memory(rank: int, world: int, name: str) -> None:
    run = pipeline.PipelineProblem(registry.Setting(CPU, quick=True), 64, 64, 32, 4, "balanced", shared=name)
    assert list(run.plans) == [*pipeline.ARMS, "mxfp8_blocks", "mxfp8"]
    assert run.check() is None
    for arm in ("mxfp8_blocks", "mxfp8"):
        for want, got in zip(run.results("mxfp8_nccl"), run.results(arm), strict=True):
            assert torch.equal(want, got), arm
    assert set(run.all_parts()["parts_ms"]) == {*pipeline.ARMS, "mxfp8_blocks"}
    ms = {f"{arm}_{part}": 1.0 for arm in (*run.plans, "limit") for part in ("forward", "backward", "total")}
    figures = pipeline.compute_figures(ms, 64, 32, "balanced")
    assert {"blocks_total_vs_bf16", "nccl_total_vs_bf16", "total_vs_bf16_exchange"} < set(figures)


def test_pipeline_over_shared_memory() -> None:
    run_virtual(_shared_memory, 1)


def test_a_failing_pipeline_prints_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "sqnr_db", lambda *args: float("nan"))
    with pytest.raises(registry.CheckFailedError, match="no times"):
        measured("pipeline")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("name", registry.BENCHMARKS)
def test_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in (([], "no CUDA GPU"), (["--device", "cuda"], "no CUDA GPU"), (["--device", "cpu"], "wants --quick")):
        assert cli.main(["bench", name, *options]) == 2
        captured = capsys.readouterr()
        assert word in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""


def test_quick_runs_do_not_change_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quantize", "--device", "cpu", "--quick", "--record"]) == 2
    assert str(RESULTS) in capsys.readouterr().err


def test_record_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(registry.BENCHMARKS, "quantize", dataclasses.replace(registry.BENCHMARKS["quantize"], rounds=FAST))
    assert cli.main(["bench", "quantize", "--device", "cpu", "--quick", "--record", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "quantize-cpu-1.json").read_text())
    check_schema("quantize", records)
    assert records[0]["command"] == "mxep bench quantize --quick --record --device cpu"
    printed = capsys.readouterr().out
    assert "fraction_of_copy" in printed
    assert printed.count(": checked, ") >= len(records), "a line as soon as a case has ended"
    assert markdown_tables.memory_table(records) in printed, "the tables of the pages"


def test_report_shows_what_has_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records_of: Callable[[str], list[dict]]) -> None:
    monkeypatch.chdir(tmp_path)
    (start, end), (top, bottom) = report.markers("grouped_mm"), report.markers("summary")
    before = f"a\n{start}\nold\n{end}\nb\n{top}\n{bottom}\n"
    assert report.render(before, "page") == before.replace("old\n", "")
    records = records_of("grouped-mm")
    RESULTS.mkdir(parents=True)
    (RESULTS / "grouped_mm-cpu-1.json").write_text(json.dumps(records))
    after = report.render(before, "page")
    assert "CPU, 256 x 128 x 64, 4 groups" in after
    assert f"{records[0]['ratios']['forward_vs_torch_bf16']:.2f}x of" in after
    assert report.render(after, "page") == after


def test_overview_shows_the_most_gpus_that_have_a_ratio() -> None:
    arms = {f"{arm}_total": {"median_ms": ms} for arm, ms in (("bf16", 30.0), ("mxfp8_nccl", 20.0), ("mxfp8", 10.0))}
    blocks, together = "nccl_total_vs_bf16", "total_vs_bf16"
    place = {"device": "h200", "date": "2026-11-22"}
    record = {**place, "shape": {"T": 64, "D": 32, "N": 96, "L": 8}, "arms": arms, "limit": {blocks: 2.0, together: 1.8}}
    pipelines = [
        {**record, "world_size": world, "routing": routing, "ratios": {blocks: 1.5, **({together: 3.0} if world == 2 else {})}}
        for world in (2, 4)
        for routing in ("balanced", "zipf")
    ]
    layer_ms = (("nccl_bf16", 9.0), ("nccl_bf16_one_function", 8.0), ("bf16", 6.0), ("mxfp8", 4.0))
    arms = {f"{arm}_total": {"median_ms": ms} for arm, ms in layer_ms}
    layer = {
        **place,
        "world_size": 2,
        "routing": "balanced",
        "recipe": "mxfp8_wgrad_with_mx",
        "mxfp8_over": "symmetric",
        "arms": arms,
        "shape": {**dict.fromkeys("DHEC", 8), "T_global": 64},
    }
    whole = "total_vs_nccl_bf16"
    layers = [{**layer, "ratios": {whole: 2.0}, "limit": {whole: 2.5}}]
    assert report.layers_overview(pipelines, layers).splitlines()[2:] == [
        "| a layer, 64 tokens, D 8, H 8, 8 experts, top 8, `mxfp8_wgrad_with_mx` | 2 x H200 "
        "| 8.0 ms | 4.0 ms | **2.00x** | 2.50x | 6.0 ms, **1.50x** |",
        "| `ep_grouped_mm`, 64 rows a GPU, D 32, N 96 | 2 x H200 | 30.0 ms | 10.0 ms | **3.00x** |  |  |",
        "| five blocks over NCCL, 64 rows a GPU, D 32, N 96 | 4 x H200 | 30.0 ms | 20.0 ms | **1.50x** | 2.00x |  |",
    ]
    assert report.summary(pipelines, layers, []).splitlines()[2:] == [
        "| a layer, 64 tokens, D 8, H 8, 8 experts, top 8, `mxfp8_wgrad_with_mx` | 2 x H200 | 8.0 ms | 4.0 ms | **2.00x** "
        "| 6.0 ms, **1.50x** |",
        "| `ep_grouped_mm`, 64 rows a GPU, D 32, N 96 | 2 x H200 | 30.0 ms | 10.0 ms | **3.00x** |  |",
    ]
    assert "| 30.0 ms | 10.0 ms (unsteady) |" in report.summary([{**pipelines[0], "unsteady": ["mxfp8_total"]}], [], [])
    later = {**layers[0], "device": "h100", "date": "2026-11-28"}
    assert "H100 | 8.0 ms" in report.summary([], [*layers, later], []).splitlines()[-1]
    assert "H200" not in report.summary([], [later, *layers], []), "the most recent record is shown"
    assert report.layers_overview([], []) == report.steps_overview([]) == report.tests_on_gpus([]) == report.summary([], [], []) == ""


def test_what_passed_on_gpus() -> None:
    counts = {"passed": 5, "failed": 1, "error": 2}
    tests = [{"device": "h200", "world_size": 2, "torch": "2.11.0+cu130", "commit": "abc", "counts": counts}]
    tests.append({**tests[0], "counts": counts | {"xfailed": 4}})
    found = {"passed": 5, "failed": 0, "errors": 0, "commit": "abc"}
    files = {"quantize": found, "p2p": {**found, "errors": 2}}
    sanitized = {"benchmark": "sanitizer_memcheck", "device": "h200", "files": files, "missing": []}
    raced = {"benchmark": "sanitizer_racecheck", "device": "h200", "files": {"quantize": found}, "missing": ["p2p", "loss"]}
    shown, sanitizers = report.tests_on_gpus(tests, [sanitized], [raced]).split("\n\n")
    assert shown.splitlines()[2:] == [
        "| 2 x H200 | 2.11.0 | 5 | 3 | abc |",
        "| 2 x H200 | 2.11.0 | 5 | 3, and 4 known to fail | abc |",
    ]
    assert sanitizers.splitlines()[2:] == [
        "| memcheck | H200 | 2 | 10 | 0 | none | abc |",
        "| racecheck | H200 | 0 | 5 | 0 | 2 of 3 | abc |",
    ]


def test_overview_shows_training_on_the_most_gpus_against_both_baselines() -> None:
    def training(world: int, **step_ms: float) -> dict:
        options = {"activation_checkpoint": "full", "compile": True, "cache_weights": False}
        arms = {arm.replace("_one", ", one function"): {"median_ms": ms} for arm, ms in step_ms.items()}
        what = {"model": {"name": "small"}, "routing": "forced balance", "shape": {"T": 64}, "options": options}
        return {"device": "h200", "date": "2026-11-22", "world_size": world, **what, "arms": arms, "steps": {}}

    two, four = training(2, mxfp8=4.0, bf16=8.0), training(4, mxfp8=5.0, mxfp8_mx=4.0, bf16_one=6.0, bf16=7.0)
    what = "small, forced balance, 64 tokens a step, full recomputation, compiled"
    options = what.removeprefix("small, ")
    assert report.steps_overview([two, four]).splitlines()[2:] == [
        f"| small | 4 x H200 | 5 ms | 7 ms | **1.40x** | 6 ms | **1.20x** | {options}, `mxfp8` |",
        f"| small | 4 x H200 | 4 ms | 7 ms | **1.75x** | 6 ms | **1.50x** | {options}, `mxfp8_mx` |",
    ]
    graphs = {**four, "options": {**four["options"], "cuda_graph": True}}
    assert report.summary([], [], [two, four, graphs]).splitlines()[2:] == [
        f"| a training step, {what}, `mxfp8` | 4 x H200 | 6 ms | 5 ms | **1.20x** |  |",
        f"| a training step, {what}, `mxfp8_mx` | 4 x H200 | 6 ms | 4 ms | **1.50x** |  |",
    ]
    larger = {**two, "model": {"name": "large"}}
    assert report.summary([], [], [two, larger]).splitlines()[2:] == [
        "| a training step, small | 2 x H200 | 8 ms | 4 ms | **2.00x** |  |",
        "| a training step, large | 2 x H200 | 8 ms | 4 ms | **2.00x** |  |",
        "",
        f"The training steps: {options}, `mxfp8`.",
    ]
    (alone,) = report.steps_overview([two]).splitlines()[2:]
    assert alone == f"| small | 2 x H200 | 4 ms | 8 ms | **2.00x** |  |  | {options}, `mxfp8` |"


def test_records_of_benchmarks_come_from_a_clean_tree() -> None:
    folder = Path(__file__).parent.parent.parent / RESULTS
    for path in folder.glob("*.json"):
        for record in json.loads(path.read_text()):
            assert "+changes" not in record["commit"], path


def test_records_name_no_path_of_a_machine() -> None:
    folder = Path(__file__).parent.parent.parent / RESULTS
    paths = [*folder.glob("*.json"), *folder.glob("*.jsonl")]
    assert any(path.suffix == ".jsonl" for path in paths)
    for path in paths:
        assert '"/' not in path.read_text(), path


def test_arms_take_turns_and_totals_add_up() -> None:
    calls: list[str] = []
    arms = {
        "a": {"": lambda: calls.append("a")},
        "b": {"forward": lambda: calls.append("f"), "backward": lambda: calls.append("b")},
    }
    found = time_arms(arms, CPU, FAST)
    assert set(found) == {"a", "b_forward", "b_backward", "b_total"}
    assert found["a"].runs == 21
    turns = "".join(calls).split("a" * 8)  # one warm run and seven timed ones a round
    assert len(turns) == 4
    assert found["b_total"].median_ms >= max(found["b_forward"].median_ms, found["b_backward"].median_ms)
    with pytest.raises(ValueError, match="at least 20"):
        Rounds(count=2, timed=3)
    assert Timing.of([2.0] * 20) == Timing(2.0, 2.0, 2.0, 20)


def test_the_cost_of_few_rows_is_shown() -> None:
    many = {"device": "h200", "world_size": 1, "shape": {"T": 131072, "D": 64}, "target": {}, "arms": {}}
    many["ratios"] = {"fraction_of_copy": 0.9, "quantize_fraction_of_copy": 0.9}
    few = [
        {**many, "shape": {"T": T, "D": D}, "calls": 10, "arms": {"quantize": {"median_ms": 0.021 * T}}, "host_us": {"quantize": 30.4}}
        for D, T in ((64, 8192), (64, 128), (32, 128))
    ]
    table = markdown_tables.memory_table([many, *few]).split("\n\n")[1]
    assert table.splitlines()[0] == "| device | few rows: microseconds of a call, device / host | T | D 32 | D 64 |"
    assert table.splitlines()[2:] == [
        "| H200 | `quantize` | 128 | 268.8 / 30 | 268.8 / 30 |",
        "| H200 | `quantize` | 8192 |  | 17203.2 / 30 |",
    ]
    assert "\n\n" not in markdown_tables.memory_table([many])
    other = {**many, "device": "h100", "ratios": {"dequantize_fraction_of_copy": 0.8, "quantize_fraction_of_copy": 0.7}}
    assert markdown_tables.memory_table([many, other]).splitlines() == [
        "| share of a copy's speed, 131072 rows, H200 / H100 | D 64 | asked |",
        "| --- | --- | --- |",
        "| `quantize` | 90% / 70% |  |",
        "| `dequantize` | - / 80% |  |",
    ]
    launched = [*few, {**few[0], "device": "h100"}, {**few[1], "device": "h100"}]
    assert report._fewest_rows_of_one_device([many, *launched, other]) == [many, few[1], few[2], other]
    assert report._fewest_rows_of_one_device([many, other]) == [many, other]
    assert tables.device_us({"arms": {"fused_total": {"median_ms": 2.0}}}, "fused") == 2000
    assert tables.device_us({"arms": {}}, "launcher") is None


def test_rounds_of_a_setting_a_case_and_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Rounds] = []

    def time_nothing(arms: dict, device: torch.device, rounds: Rounds, group: object) -> dict:
        asked.append(rounds)
        return {"some": Timing.of([1.0] * 20)}

    def cases(own: Rounds | None) -> list[registry.Case]:
        return [registry.Case("some", {"T": 1}, {"some": {"": lambda: None}}, lambda: None, lambda ms: {}, rounds=own)]

    own = Rounds(count=4, timed=5, warm_ms=1.0)
    monkeypatch.setattr(registry, "time_arms", time_nothing)
    for rounds, of_case in ((FAST, own), (None, own), (None, None)):
        monkeypatch.setattr(registry, "cases_of", lambda name, setting, of_case=of_case: cases(of_case))
        registry.run("grouped-mm", registry.Setting(CPU, rounds=rounds), "", lambda text: None)
    assert asked == [FAST, own, registry.BENCHMARKS["grouped-mm"].rounds]
    assert registry.BENCHMARKS["grouped-mm"].rounds.count >= 5


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_compiled_arm_is_compiled_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives a function up after 8 shapes and calls it as it is."""
    compiled: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(inputs[0].shape[0])
        return graph.forward

    def case(*sizes: int) -> registry.Case:
        call = torch.compile(_double, backend=count, dynamic=False)
        return registry.Case(str(sizes), {"T": sizes[0]}, {}, lambda: [call(torch.ones(size)) for size in sizes] and None, lambda ms: {})

    monkeypatch.setattr(registry, "time_arms", lambda *args: {})
    monkeypatch.setattr(registry, "cases_of", lambda name, setting: (case(size) for size in range(2, 14)))
    registry.run("quantize", registry.Setting(CPU), "", lambda text: None)
    assert compiled == list(range(2, 14))
    monkeypatch.setattr(registry, "_MOST_SHAPES", 12)
    monkeypatch.setattr(registry, "cases_of", lambda name, setting: [case(14)])
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        registry.run("quantize", registry.Setting(CPU), "", lambda text: None)


def test_unsteady_and_starved_arms_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Timing.of([1.0] * 10 + [1.07] * 10, rounds=2), Timing.of([1.0] * 10 + [1.09] * 10, rounds=2)
    assert [timing.round_spread for timing in rounds] == [1.07, 1.09]
    assert Timing.of([1.0, 1.09] * 10, rounds=2).round_spread == 1.0, "that is the runs' spread"
    times = {"steady": rounds[0], "unsteady": rounds[1], "waiting": Timing.of([1.0] * 20, 2, 0.25)}
    monkeypatch.setattr(registry, "time_arms", lambda *args: times)
    case = registry.Case("some", {"T": 1}, {}, lambda: None, lambda ms: {})
    monkeypatch.setattr(registry, "cases_of", lambda name, setting: [case])
    said: list[str] = []
    (record,) = registry.run("quantize", registry.Setting(CPU), "", said.append)
    assert (record["unsteady"], record["host_bound"]) == (["unsteady"], ["waiting"])
    assert "more than 8%: unsteady by 9%" in said[1]
    assert "more than 20%: waiting in 25%" in said[2]
    assert len(said) == 3
    assert "9%" in text_of([record])
    line = report.doubts_line([record, {"arms": {"old": {}}}])
    assert line.startswith("The records have 4 times: in 1 the medians of rounds differ by more than 8%; in 1 the device may have waited")
    assert not report.doubts_line([{"arms": {"old": {}}}])
    case = dataclasses.replace(case, after=lambda: {"host_us": {"a": 3.0, "b": 4.0}, "host_unsteady": ["b"]})
    monkeypatch.setattr(registry, "time_arms", lambda *args: {"steady": rounds[0]})
    records = registry.run("quantize", registry.Setting(CPU), "", said.append)
    assert said[-1].endswith("busy elsewhere: microseconds of the host differ between batches: b")
    assert report.doubts_line(records) == "The records have 2 times of the host: in 1 of them batches differ, as it was busy elsewhere."


def test_an_interrupted_run_keeps_what_it_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "time_arms", lambda *args: {"arm": Timing.of([1.0] * 20, 2)})

    def cases(name: str, setting: registry.Setting) -> Iterator[registry.Case]:
        yield registry.Case("first", {"T": 1, "D": 1}, {}, lambda: None, lambda ms: {})
        if broken:
            raise KeyboardInterrupt
        yield registry.Case("second", {"T": 2, "D": 1}, {}, lambda: None, lambda ms: {})

    monkeypatch.setattr(registry, "cases_of", cases)
    argv = ["rows", "--quick", "--device", "cpu", "--record", "--out", str(tmp_path)]
    broken = False
    assert command.command(argv) == 0
    whole = (tmp_path / "rows-cpu-1.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["rows-cpu-1.json"]
    broken = True
    with pytest.raises(KeyboardInterrupt):
        command.command(argv)
    assert (tmp_path / "rows-cpu-1.json").read_text() == whole, "an earlier run's record stays"
    assert [record["shape"] for record in json.loads((tmp_path / "rows-cpu-1.json.part").read_text())] == [{"T": 1, "D": 1}]


def test_a_busy_host_is_distinguished_from_a_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = {"steady": [10.0, 11.0, 10.0], "starved": [40.0, 10.0, 12.6], "once": [40.0, 10.0, 10.0]}
    monkeypatch.setattr(timing_module, "host_batches_us", lambda call, device, batch: batches[call()])
    facts = timing_module.host_facts({name: partial(str, name) for name in batches}, CPU)
    assert facts == {"host_us": {"steady": 10.0, "starved": 12.6, "once": 10.0}, "host_unsteady": ["starved"]}


def test_host_time_of_both_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(call: Callable[[], object], device: torch.device, batch: int) -> list[float]:
        call()
        return [5.0, 5.0, 5.0] if torch.autograd.is_multithreading_enabled() else [2.0, 4.0, 4.0]

    monkeypatch.setattr(timing_module, "host_batches_us", batches)
    facts = timing_module.host_facts_of({"a": {"": lambda: None}}, CPU, 1)
    assert facts == {"host_us": {"a": 5.0}, "host_us_calling_thread": {"a": 4.0}, "host_unsteady": ["a"]}


def test_runs_that_the_device_reached_first_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"a": {"": lambda: None}, "b": {"forward": lambda: None, "backward": lambda: None}}
    assert not any(timing.host_behind for timing in time_arms(arms, CPU, FAST).values()), "a host never waits for itself"
    asked = iter([True] + 5 * [False] + [True] + 14 * [False] + 20 * [True, False] + [False, False])
    monkeypatch.setattr(timing_module, "passed", lambda point: next(asked))
    one_by_one = Rounds(count=1, timed=21, warm_ms=0.0)
    found = time_arms(arms, CPU, one_by_one)
    assert found["a"].host_behind == round(2 / 21, 4)
    assert not found["a"].host_bound
    assert found["b_forward"].host_behind == found["b_total"].host_behind == round(20 / 21, 4)
    assert found["b_total"].host_bound
    assert found["b_backward"].host_behind == 0


def test_routing() -> None:
    assert zipf_counts(4096, 8, granule=32).sum() == 4096
    assert not (zipf_counts(4096, 8, granule=32) % 32).any()
    assert counts_of("balanced", 64, 8).tolist() == [8] * 8
    with pytest.raises(ValueError, match="want balanced or zipf"):
        counts_of("odd", 8, 2)
    with pytest.raises(ValueError, match="want one of quantize"):
        list(registry.cases_of("odd", registry.Setting(CPU)))


def test_every_shape_is_asked_for() -> None:
    asked = [problem for problem, _ in grouped_mm.problems(registry.Setting(torch.device("cuda", 0)))]
    assert {(p.K, p.N) for p in asked if p.G == 8} == set(grouped_mm.SHAPES)
    assert {p.G for p in asked} == {8, 32, 64, 128}
    assert "zipf" in {p.routing for p in asked}


def test_torchrun_does_not_see_our_nproc() -> None:
    assert ranks.without_nproc(["pipeline", "--nproc", "2", "--quick", "--nproc=4"]) == ["pipeline", "--quick"]


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the repository that a run is started in."""
    monkeypatch.delenv("MXEP_COMMIT", raising=False)
    here = origin("command")["commit"]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    committer = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *committer, "commit", "--quiet", "--allow-empty", "-m", "another"], check=True)
    assert origin("command")["commit"] == here


@pytest.mark.parametrize("name", ["optimizer", "quantize", "rows", "swiglu"])
def test_every_record_of_memory_bound_kernels_is_shown(name: str) -> None:
    records = read_records(name)
    whole = markdown_tables.memory_table(records)
    for missing in range(len(records)):
        assert markdown_tables.memory_table([record for i, record in enumerate(records) if i != missing]) != whole


def test_the_device_is_part_of_a_command() -> None:
    options = command._parser().parse_args(["accuracy", "--quick", "--record", "--device", "cpu", "--nproc", "4"])
    assert command._command_text(options, 4) == "torchrun --nproc-per-node=4 -m mxep bench accuracy --quick --record --device cpu"


def test_a_named_commit_goes_before_that_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree may travel with the git folder of an older commit."""
    monkeypatch.setenv("MXEP_COMMIT", "0123456789ab")
    assert origin("command")["commit"] == "0123456789ab"

"""`mxep bench train`: both arms on a CPU, the record and its plots; traces; wrong use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import mxep
from mxep import cli
from mxep.bench import markdown_tables, plots, published, training
from mxep.bench.records import RESULTS, read_records, write_beside
from mxep.bench.timing import MIN_RUNS
from mxep.bench.training import IDLE, PARTS, part_of
from mxep.models.flops import flops_per_token
from mxep.models.presets import resolve_model
from mxep.processes import start_of
from mxep.train.config import TrainConfig
from mxep.train.option_parser import read_options
from mxep.train.resolved_config import resolve


def event(name: str, start: float, length: float, kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}


def metrics(
    step_s: float, world: int = 1, model: str = "dsv3_16b", fused: bool = False, graph: bool = False, linears: str = ""
) -> list[dict]:
    config = TrainConfig(force_balance=True, fused_layer=fused, activation_checkpoint="full", cuda_graph=graph, linear_fqns=linears)
    settings = config.to_json()
    start = {
        "kind": "run",
        "step": 0,
        "settings": settings,
        "world": world,
        "gemm_path": "fp8",
        "peak_bf16_flops": 989e12,
        "model": {"name": model},
        "transport": "collective",
        "recompute": None,
    }
    steps = []
    for i in range(1, training.LEAST_STEPS + 1):
        took = step_s if training.WARM_UP < i <= training.LEAST_STEPS - training.PROFILED else 9.0
        figures = {"tflops": 1.0, "mfu": 0.3, "mfu_causal": 0.25, "hfu": 0.35, "memory_gib": 4.0, "load_max_over_mean": 1.0}
        steps.append({"kind": "step", "step": i, "loss": 2.0, "step_s": took, "tokens_per_s": 100 / took, **figures})
    return [start, *steps]


def write_traces(folder: Path) -> None:
    for arm, gemm in (("mxfp8", 20.0), ("bf16", 40.0)):
        of_all = training.PROFILED  # steps, each of which takes a part of it
        parts = ("fp8_grouped_mm", 0, of_all * gemm), ("ncclDevKernel_SendRecv", of_all * (gemm - 10), of_all * 30.0)
        events = [*(event(*part) for part in parts), event("host", 0, 900, "cpu_op")]
        (folder / arm / "profile").mkdir(parents=True)
        (folder / arm / "profile" / "rank_00000.json").write_text(json.dumps({"traceEvents": events}))


def test_parts_of_a_step() -> None:
    assert training.step_parts([event("anything", 0, 5, "cpu_op")]) == {}
    overlapping = [
        event("ncclDevKernel_AllGather", 0, 100),
        event("nvjet_tst", 10, 20),
        event("void flash_fwd", 20, 20),
        event("x", 200, 1),
    ]
    found = {part: us for part, us in training.step_parts(overlapping).items() if us}
    assert found == {"attention": 0.02, "dense GEMMs": 0.01, "exchange": 0.07, "other": 0.001, IDLE: 0.1}
    names = {
        "ncclDevKernel_ReduceScatter_Sum_bf16": "exchange", "Memcpy PtoP (Device -> Device)": "exchange",
        "fp8_grouped_mm": "grouped GEMMs", "fp8_wgrad": "grouped GEMMs", "nvjet_hsh_128x256": "dense GEMMs",
        "rebase_tokens": "quantise and move rows", "_activate_kernel": "quantise and move rows",
        "multi_tensor_apply_kernel<adam>": "optimizer",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention", "void cudnn::fusion::convert_dq_to_16bits": "attention",
        "Memset (Device)": "other",
    }  # fmt: skip
    assert {name: part_of(name) for name in names} == names
    assert set(names.values()) <= set(PARTS)
    for record in read_records("train", Path(__file__).parent.parent.parent / RESULTS):
        assert all({*step["parts_ms"]} == {*PARTS, IDLE} for step in record["steps"].values()), "older records are read with today's names"


@pytest.mark.parametrize("file", ["p2p.cu", "slots.cu"])
def test_kernels_that_write_to_other_ranks_are_exchanges(file: str) -> None:
    source = (Path(mxep.__file__).parent / "ops" / "peer_write" / file).read_text()
    kernels = re.findall(r"__global__ void __launch_bounds__\(THREADS\)\s+(\w+)\(", source)
    assert kernels
    assert {part_of(name) for name in kernels} == {"exchange"}


def test_means_and_unsteady_steps_of_a_record(tmp_path: Path) -> None:
    """Slow steps are in the mean, and halves that differ make an arm unsteady."""
    slow, even = metrics(0.1), metrics(0.15)
    counted = [step for step in slow if step["kind"] == "step"][training.COUNTED]
    for step in counted[len(counted) // 2 :]:
        step.update(step_s=0.2, tokens_per_s=500.0, loss=2.5)
    record = training.record_of({"mxfp8": slow, "bf16": even}, tmp_path, "some", "h200")
    assert record["unsteady"] == ["mxfp8"]
    assert training.mean_ms(record, "mxfp8") == pytest.approx(150)
    gaps = training.loss_gaps(record, "mxfp8", "bf16")
    assert len(gaps) == training.LAST_LOSSES
    assert (min(gaps), max(gaps)) == (0.0, 0.5), "the traced steps come after the timed ones"


def test_exposed_exchanges() -> None:
    assert training.exposed_ms([event("nccl", 0, 50)]) == (0.0, 0.0), "no GEMM, no layer"
    gemm = event("_grouped_mm_kernel", 30, 20)
    assert training.exposed_ms([gemm]) == (0.0, 0.0)
    assert training.exposed_ms([event("nccl", 0, 100), gemm, event("_grouped_mm_kernel", 60, 10)]) == (0.03, 0.04)
    waits = [event("quantize", 0, 10), gemm, event("_reduce_rows_kernel", 90, 5), event("Memcpy PtoP", 95, 10)]
    assert training.exposed_ms(waits) == (0.02, 0.05), "waiting for a flag shows as nothing"


def test_a_record_and_its_plots(tmp_path: Path) -> None:
    write_traces(tmp_path)
    record = training.record_of({"mxfp8": metrics(0.1, 4), "bf16": metrics(0.15, 4)}, tmp_path, "some", "h200")
    assert record["ratios"] == {"mxfp8_tokens_per_s_vs_bf16": 1.5}
    assert record["target"] == {"mxfp8_tokens_per_s_vs_bf16": 1.3}
    assert record["limit"] == {"mxfp8_tokens_per_s_vs_bf16": 2.0}, "40 us of GEMM and 20 us of exposed exchange, halved"
    assert record["shape"] == {"T": 100}
    assert record["arms"]["bf16"]["median_ms"] == 150
    assert record["steps"]["bf16"]["parts_ms"]["exchange"] == 0.02
    assert record["steps"]["bf16"]["transport"] == "collective"
    table = markdown_tables.train_table([record])
    what = "4 x H200, dsv3_16b, forced balance, 100 tokens a step, full recomputation"
    assert table.splitlines()[2:] == [
        f"| {what} | bf16, blocks over collective transport | 150 / 150 | 167 |  |  | 4.0 | 30.0% | 25.0% | 35.0% |  |",
        "|  | mxfp8, blocks over collective transport | 100 / 100 | 250 | 1.50x | 2.00x | 4.0 | 30.0% | 25.0% | 35.0% "
        "| +0.000 (+0.000 to +0.000) |",
    ]
    assert training.steps_table(record).row_count == 2
    for drawn in plots.draw({"train": [record]}, tmp_path):
        assert drawn.stat().st_size > 5000
    assert [*record["curves"]["bf16"]["step"]] == [*range(1, training.LEAST_STEPS + 1)]
    assert record["curves"]["bf16"]["tokens_per_s"][training.WARM_UP] == 666.7
    small = training.record_of({"mxfp8": metrics(0.1), "bf16": metrics(0.15)}, tmp_path / "nowhere", "some", "cpu")
    assert small["target"] == {}, "of the full size on four ranks"
    assert small["limit"] == {"mxfp8_tokens_per_s_vs_bf16": None}, "without a trace there is none"
    assert "| 1.50x |" in markdown_tables.train_table([small])
    assert [path.name for path in plots.draw({"train": [small]}, tmp_path)] == ["train_curves.png"], "parts of a step are in traces only"
    del small["curves"]
    assert plots.draw({"train": [small]}, tmp_path) == [], "a record from before there were curves"


def test_the_plot_of_curves_has_a_column_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of all steps, speeds of those that count; a run without curves, or on fewer ranks, is not shown."""
    runs = {"mxfp8": metrics(0.1, 4), training.ONE_FUNCTION: metrics(0.12, 4), "bf16": metrics(0.15, 4)}
    records = [training.record_of(runs, tmp_path, "some", "h200") for _ in range(4)]
    records[1]["model"] = {"name": "other"}
    records[2]["world_size"] = 2
    del records[3]["curves"]
    shown: list[list] = []

    def save(figure: Figure, name: str, folder: Path) -> Path:
        shown.append([(axes.get_title(loc="left"), [len(line.get_xdata()) for line in axes.get_lines()]) for axes in figure.axes])
        return folder / name

    monkeypatch.setattr(plots, "_save", save)
    plots.train_curves([record for record in records if training.runs_of(record)], tmp_path)
    plots.draw({"train": records}, tmp_path)
    losses, speeds = [training.LEAST_STEPS] * 6, [MIN_RUNS] * 6
    titles = [f"{name}, full recomputation, forced balance, 4 x H200" for name in ("dsv3_16b", "other")]
    assert shown == [[(titles[0], losses), (titles[1], losses), ("", speeds), ("", speeds)]] * 2


def test_the_plot_of_a_step_shows_the_most_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each run, the longest step first."""
    write_traces(tmp_path)
    records = [
        training.record_of({"mxfp8": metrics(0.1, world, model), "bf16": metrics(0.15, world, model)}, tmp_path, "some", "h200")
        for world, model in ((2, "small"), (4, "whole"), (4, "half"))
    ]
    shown: list[list[tuple[str, ...]]] = []

    def save(figure: Figure, name: str, folder: Path) -> Path:
        if name == "train_step":
            shown.append([(axes.get_title(loc="left"), *(label.get_text() for label in axes.get_yticklabels())) for axes in figure.axes])
        return folder / name

    monkeypatch.setattr(plots, "_save", save)
    for chosen in (records[:2], records):
        plots.draw({"train": chosen}, tmp_path)
    whole, half = (f"{name}, full recomputation, forced balance, 4 x H200" for name in ("whole", "half"))
    assert shown == [[(whole, "bf16", "mxfp8")], [(whole, "bf16", "mxfp8"), (half, "bf16", "mxfp8")]]


def test_steps_of_one_gpu_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the records with the most tokens."""
    write_traces(tmp_path)
    records = [
        training.record_of({"mxfp8": metrics(slow, world), "bf16": metrics(0.15, world)}, tmp_path, "some", "h200")
        for slow, world in ((0.1, 1), (0.1, 1), (0.1, 1), (0.1, 4))
    ]
    records[0]["shape"]["T"] //= 2
    for parts in records[1]["steps"].values():
        parts["parts_ms"] = {part: 3 * ms for part, ms in parts["parts_ms"].items()}
    shown = {}

    def save(figure: Figure, name: str, folder: Path) -> Path:
        shown[name] = [axes.get_xlim()[1] for axes in figure.axes]
        return folder / name

    monkeypatch.setattr(plots, "_save", save)
    plots.draw({"train": records}, tmp_path)
    assert len(shown["train_step"]) == 1
    first, second = shown["train_step_one_gpu"]
    assert first == second >= sum(records[1]["steps"]["bf16"]["parts_ms"].values())


def test_a_record_of_layers_as_one_function(tmp_path: Path) -> None:
    runs = {"mxfp8": metrics(0.1, 4, fused=True), training.ONE_FUNCTION: metrics(0.12, 4, fused=True), "bf16": metrics(0.15, 4)}
    record = training.record_of(runs, tmp_path / "nowhere", "some", "h200")
    assert record["ratios"] == {"mxfp8_tokens_per_s_vs_bf16": 1.5, "bf16, one function_tokens_per_s_vs_bf16": 1.25}
    assert record["target"] == {"mxfp8_tokens_per_s_vs_bf16": 1.3}
    table = markdown_tables.train_table([record])
    assert "| bf16, blocks over collective transport | 150 / 150 |" in table
    assert "| mxfp8, one function over collective transport | 100 / 100 |" in table
    assert "| bf16, one function over collective transport | 120 / 120 |" in table
    assert "linear layers in MXFP8" not in table


def test_a_record_names_what_else_is_in_mxfp8(tmp_path: Path) -> None:
    mx, bf16 = metrics(0.1, linears="layers.*.attention.wq"), metrics(0.15, linears="auto")
    for run in (mx[0], bf16[0]):
        run["settings"]["output_recipe"] = "mxfp8" if run is mx[0] else "bf16"
    bf16[0]["settings"]["recipe"] = "bf16"
    record = training.record_of({"mxfp8": mx, "bf16": bf16}, tmp_path, "some", "h200")
    assert {arm: step["linears"] for arm, step in record["steps"].items()} == {"mxfp8": "layers.*.attention.wq", "bf16": ""}
    assert record["options"]["output_recipe"] == "mxfp8"
    assert "linear layers in MXFP8, output projection in mxfp8 |" in markdown_tables.train_table([record])


def test_a_record_names_the_arms_that_are_cuda_graphs(tmp_path: Path) -> None:
    graph, eager = metrics(0.1, 4, fused=True, graph=True), metrics(0.12, 4, fused=True)
    record = training.record_of({"mxfp8": graph, training.ONE_FUNCTION: eager, "bf16": metrics(0.15, 4)}, tmp_path, "some", "h200")
    table = markdown_tables.train_table([record])
    assert "| mxfp8, one function over collective transport, a CUDA graph |" in table
    assert "| bf16, one function over collective transport |" in table
    assert "MXFP8 as a CUDA graph | bf16, blocks over collective transport |" in table
    for arm in record["steps"].values():
        del arm["cuda_graph"]
    assert "transport, a CUDA graph" not in markdown_tables.train_table([record]), "a record from before there were CUDA graphs"


@pytest.mark.parametrize("transport", ["symmetric", None])
def test_arms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str | None) -> None:
    """Options of each arm after the given ones; the baseline's do not depend on those. Without an EP group there is no transport."""
    told: dict[str, list[str]] = {}
    precisions: dict[str, tuple[str | None, str]] = {}
    kept: dict[str, str] = {}

    def run(command: list[str]) -> int:
        config = read_options(command[4:])
        assert config.out is not None
        told[config.out.name] = [config.recipe, str(config.fused_layer), str(config.transport), str(config.cuda_graph)]
        precisions[config.out.name] = (config.linear_recipe, config.output_recipe)
        kept[config.out.name] = config.keep_first_product
        resolve(config, "cuda", 2)
        assert (config.steps, config.profile_step) == (30, 30 - training.PROFILED + 1)
        assert (config.evaluate, config.checkpoint, config.profile_host) == (False, False, False)
        config.out.mkdir()
        (config.out / "metrics.jsonl").write_text(json.dumps({"kind": "run", "settings": config.to_json(), "transport": transport}) + "\n")
        return 0

    monkeypatch.setattr(training, "run_child", run)
    given = ["--steps=30", "--transport", "symmetric"]
    (tmp_path / "own.toml").write_text('steps = 3\nlinear_recipe = "mxfp8"\noutput_recipe = "mxfp8"\n')
    precise = ["--linear-recipe", "mxfp8", "--output-recipe=mxfp8"], ["--config", str(tmp_path / "own.toml")]
    in_mx = ["--keep-first-product", "mxfp8"]
    for extra in (["--no-fused-layer"], *precise, in_mx, ["--cuda-graph"]):
        folder = tmp_path / f"{extra[0][2:]}"
        folder.mkdir()
        for _ in training.train_arms([*given, *extra], ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"], folder):
            pass
        if extra == ["--no-fused-layer"]:
            assert [*told] == ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "bf16"]
        elif extra in precise:
            ours = {arm: ("mxfp8",) * 2 for arm in ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx")}
            assert precisions == ours | {arm: ("bf16",) * 2 for arm in ("bf16", "bf16, one function")}
        assert {kept.pop(name) for name in ("bf16, one function", "bf16") if name in kept} == {"hp"}
        assert {*kept.values()} == {"mxfp8" if extra == in_mx else "hp"}
    assert told == {
        "mxfp8_wgrad_with_hp": ["mxfp8_wgrad_with_hp", "True", "symmetric", "True"],
        "mxfp8_wgrad_with_mx": ["mxfp8_wgrad_with_mx", "True", "symmetric", "True"],
        "bf16": ["bf16", "False", "collective", "False"],
        "bf16, one function": ["bf16", "True", "collective", str(transport is None)],
    }


def test_both_arms_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "train", "--quick", "--device", "cpu", "--record", "--out", str(tmp_path), "--nproc", "1"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert "mxfp8_wgrad_with_hp_tokens_per_s_vs_bf16" in printed
    plot = tmp_path / "train-cpu-1.png"
    assert f"wrote {plot}" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    (record,) = json.loads((tmp_path / "train-cpu-1.json").read_text())
    assert record["shape"] == {"T": 64}
    assert [*record["arms"]] == ["mxfp8_wgrad_with_hp", "bf16, one function", "bf16"]
    assert all(timing["runs"] == MIN_RUNS for timing in record["arms"].values())
    assert record["command"].startswith("mxep bench train --quick")
    for arm, curves in record["curves"].items():
        assert curves["step"] == [*range(1, training.LEAST_STEPS + 1)]
        assert curves["loss"][training.COUNTED][-1] == record["steps"][arm]["loss"] < curves["loss"][0]
        assert record["steps"][arm]["tokens_per_s"] in curves["tokens_per_s"][training.COUNTED]
    assert [path.name for path in plots.draw({"train": [record]}, tmp_path / "plots")] == ["train_curves.png"]
    records = [{**record, **changes} for changes in ({"routing": "forced balance"}, {"options": {}}, {}, {"world_size": 2})]
    (tmp_path / "train-cpu-1.json").write_text(json.dumps(records[:3]))
    (tmp_path / "train-cpu-2.json").write_text(json.dumps(records[3:]))
    assert write_beside(record, training.compared, tmp_path) == tmp_path / "train-cpu-1.json"
    want = [*records[:2], record], records[3:]
    assert tuple(json.loads((tmp_path / f"train-cpu-{world}.json").read_text()) for world in (1, 2)) == want, "others stay"


def test_an_interrupted_run_leaves_the_arms_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(given: Sequence[str], recipes: Sequence[str], folder: Path) -> Iterator[dict]:
        yield {"mxfp8": metrics(0.1, 4, "dsv3_16b")}
        yield {"mxfp8": metrics(0.1, 4, "dsv3_16b"), training.ONE_FUNCTION: metrics(0.15, 4, "dsv3_16b")}
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train_arms", arms)
    (tmp_path / "train-cpu-4.json").write_text("[]")
    with pytest.raises(KeyboardInterrupt):
        training.measure([], recipes=["mxfp8_wgrad_with_mx"], quick=True, device="cpu", record=True, out=tmp_path, text="command")
    (left,) = json.loads((tmp_path / "train-cpu-4.json.part").read_text())
    assert left["ratios"] == {"mxfp8_tokens_per_s_vs_bf16, one function": 1.5}
    assert json.loads((tmp_path / "train-cpu-4.json").read_text()) == []


@pytest.mark.parametrize(
    "options",
    [{"ep": 2}, {"tp": 2}, {"dp_replicate": 2}, {"pp": 2, "microbatch": 2}, {"router_dtype": "bf16"}, {"keep_first_product": "mxfp8"}],
    ids=str,
)
def test_runs_of_other_options_are_other_records(tmp_path: Path, options: dict) -> None:
    def record(**given: Any) -> dict:
        runs = {arm: metrics(1.0, world=4) for arm in ("mxfp8_wgrad_with_hp", "bf16")}
        for run in runs.values():
            run[0]["settings"] |= {"ep": 4, **given}
        return training.record_of(runs, tmp_path / "none", "command", "h100")

    plain, other = record(), record(**options)
    for one in (plain, other, plain):
        write_beside(one, training.compared, tmp_path)
    assert json.loads((tmp_path / "train-h100-4.json").read_text()) == [other, plain]
    assert markdown_tables.trained(other) != markdown_tables.trained(plain)


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP]], ids=repr)
def test_signals_end_the_run_and_what_it_started(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """A script that replaces `mxep train`: on a signal it ends the process that it has started, after a while."""
    script, pid_file = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\ntrap 'sleep 1.5; kill $!; exit 0' TERM\nsleep 100 &\necho $! > {pid_file}\nwait\n")
    script.chmod(0o700)
    program = f"import sys; import mxep.bench.command as bench; sys.executable = {str(script)!r}; from mxep.cli import main; "
    program += "sys.exit(main(['bench', 'train', '--quick', '--device', 'cpu']))"
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started = int(pid_file.read_text())
    try:
        for number in numbers:
            command.send_signal(number)
            time.sleep(0.7)
        assert command.communicate(timeout=100)[1] == "mxep bench: interrupted\n"
        assert command.returncode == 130
        assert start_of(started) is None
    finally:
        if start_of(started) is not None:
            os.kill(started, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_ranks_end_with_a_benchmark_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    """Also by SIGKILL, which cannot be forwarded: the ranks would keep their GPUs during the next benchmark. No traceback is shown."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, sys, time, pathlib\npathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(100)\n"
    )
    program = """if True:
        import contextlib, sys
        from mxep.bench.ranks import _TORCHRUN, run_child
        with contextlib.suppress(KeyboardInterrupt):
            run_child([sys.executable, "-c", _TORCHRUN, *sys.argv[1:]])
    """
    words = [sys.executable, "-c", program, "--standalone", "--nproc-per-node=2", str(rank), str(tmp_path)]
    starter = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    files, started = [tmp_path / "0", tmp_path / "1"], list[int]()
    try:
        deadline = time.monotonic() + 100
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        started += [int(file.read_text()) for file in files]
        starter.send_signal(number)
        deadline = time.monotonic() + 40
        while any(start_of(pid) is not None for pid in started):
            assert time.monotonic() < deadline, "a rank is still running"
            time.sleep(0.1)
        assert "Traceback" not in starter.communicate(timeout=100)[1]
    finally:
        starter.kill()
        starter.wait()
        for pid in started:
            if start_of(pid) is not None:
                os.kill(pid, signal.SIGKILL)


def test_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv, words in (
        (["train", "--quick", "--device", "cpu", "--", "--recipe", "hp"], ("--recipe after --", "leave it out")),
        (
            ["train", "--quick", "--device", "cpu", "--", "--job.dump_folder=/a", "--profile_step", "7"],
            ("--job.dump_folder after --, --profile_step after --", "leave"),
        ),
        (
            ["train", "--quick", "--device", "cpu", "--", "--quantize.grouped-mm.mx.recipe-name=hp"],
            ("--quantize.grouped-mm.mx.recipe-name after --", "--out, "),
        ),
        (["train", "--quick", "--device", "cpu", "--recipes", "mxfp8,bf16"], ("--recipes bf16", "want recipes with MXFP8 GEMMs")),
        (["train", "--quick", "--device", "cpu", "--recipes", "fast"], ("'fast' is unknown", "mxfp8_wgrad_with_hp")),
        (["rows", "--quick", "--device", "cpu", "--recipes", "mxfp8"], ("--recipes are those of a training",)),
        (["rows", "--quick", "--device", "cpu", "--", "--steps", "3"], ("--steps 3 after --", "only `mxep bench train`")),
    ):
        assert cli.main(["bench", *argv]) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words), said
    (tmp_path / "ours.toml").write_text('recipe = "hp"\n')
    (tmp_path / "short.toml").write_text("[training]\nsteps = 25\n")
    quick = ["bench", "train", "--quick", "--device", "cpu", "--"]
    assert cli.main([*quick, "--config", str(tmp_path / "ours.toml")]) == 2
    assert f"recipe in {tmp_path / 'ours.toml'}, want options" in capsys.readouterr().err
    assert cli.main([*quick, "--no-such-option"]) == 2
    assert "there is no option --no-such-option" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main([*quick, "--steps=many"])
    with pytest.raises(ValueError, match="19 steps after the first 5 and before the last 3, want 20: a run was stopped"):
        training.arm_of(metrics(0.1)[:-1], tmp_path / "none.json")
    for words in (["--steps", "25"], ["--training.steps=3"], ["--config", str(tmp_path / "short.toml")]):
        assert cli.main([*quick, *words]) == 2
        assert "want at least 28: 5 to warm up, 20 that count and 3 for the profiler" in capsys.readouterr().err


def test_utilisation_of_older_records_is_computed_from_their_speed() -> None:
    """A record without mfu_causal and hfu, and the row of its arm in the table of published figures."""
    options = {"seq_len": 4096, "activation_checkpoint": "full"}
    record = {"device": "h200", "world_size": 4, "model": {"name": "qwen3_30b_a3b_of_24_layers"}, "options": options}
    record |= {"routing": "forced balance", "steps": {"bf16": {"tokens_per_s": 80000.0, "mfu": 0.5}}}
    flops = flops_per_token(resolve_model("qwen3_30b_a3b_of_24_layers"), 4096, "full")
    counts = {"mfu": flops.model, "mfu_causal": flops.model_causal, "hfu": flops.hardware}
    assert training.utilizations(record, "bf16") == pytest.approx({name: 20000 * count / 989e12 for name, count in counts.items()})
    *others, ours = published.rows([record])
    assert ours[6:] == ["20,000", "", *(f"{20000 * count / 1e12:.0f}" for count in counts.values())]
    assert ["13,000", "299", "363", "300", ""] in [row[6:] for row in others], "Megatron counts causal attention halved"
    own = {"tokens_per_s": 80000.0, "mfu": 0.5, "mfu_causal": 0.4, "hfu": 0.45}
    auto = record | {"options": record["options"] | {"activation_checkpoint": "auto", "seq_len": None}, "steps": {"bf16": own}}
    row = dict(zip(published.COLUMNS, published.rows([auto])[-1], strict=True))
    assert [f"{share * 989:.0f}" for share in (0.5, 0.4, 0.45)] == [*row.values()][-3:], "the run's own shares of the peak"
    assert "4096" in row.values(), "the preset's length"
    assert published.rows([record | {"device": "cpu"}]) == published.rows([record | {"routing": "the router's"}]) == others
    own = record | {"model": {"name": "my_model"}}
    assert training.utilizations(own, "bf16") == {"mfu": 0.5, "mfu_causal": None, "hfu": None}, "a model whose shape is not known"


def test_the_tutorials_steps(tmp_path: Path) -> None:
    """Some steps of every run that is kept, none where there is none."""
    assert markdown_tables.run_table("tutorial", tmp_path) == ""
    settings = {"ep": 2, "batch": 3, "seq_len": 64, "activation_checkpoint": "full", "compile": False, "recipe": "bf16"}
    run = {"kind": "run", "settings": settings, "world": 2, "model": {"name": "small"}, "transport": "collective"}
    step = {
        "kind": "step",
        "loss": 2.5,
        "grad_norm": 1.0,
        "memory_gib": 4.0,
        "memory_share": 0.5,
        "tps": 12345.6,
        "tflops": 7.0,
        "mfu": 0.25,
    }
    lines = [run, *({**step, "step": number} for number in range(1, 8)), {"kind": "end"}]
    (tmp_path / "tutorial-h200-2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = markdown_tables.run_table("tutorial", tmp_path)
    assert "2 x H200, small, EP 2, 3 sequences of 64 tokens a GPU,\nfull recomputation, bf16, collective transport:" in table
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")] == ["| step", "| ---", "| 1", "| 2", "| 5"]
    assert "| 5 | 2.5000 | 1.00 | 4.00 GiB (50.0%) | 12,346 | 7.0 | 25.0% |" in table
    assert markdown_tables.run_table("all_parameters", tmp_path) == ""
    lines = [{**run, "transport": None}, *({**step, "mfu_causal": 0.2, "hfu": 0.3, "step": number} for number in range(1, 101))]
    (tmp_path / "all_parameters-h200-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = markdown_tables.run_table("all_parameters", tmp_path)
    assert "full recomputation, bf16:" in table
    assert [int(line.split(" | ")[0].strip("| ")) for line in table.splitlines() if line[2:3].isdigit()] == [1, 2, *range(10, 101, 10)]
    assert "| mfu | mfu_causal | hfu |" in table
    assert "| 25.0% | 20.0% | 30.0% |" in table

"""torchtitan 0.2's own trainer on two gloo ranks (EP 2), plain and converted, by tests/programs/torchtitan_0_2_on_cpu.py."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import sys
import tempfile
from pathlib import Path

import pytest
from tests.integrations.titan import PYPROJECT, commands, python_with, run_program
from tests.once import once
from tests.pages import PAGES, ROOT

from mxep.integrations.torchtitan_experts import require_torchtitan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUIREMENTS = [*PYPROJECT["project"]["optional-dependencies"]["torchtitan"], *PYPROJECT["tool"]["uv"]["constraint-dependencies"]]
PROGRAM = ROOT / "tests" / "programs" / "torchtitan_0_2_on_cpu.py"
SWITCH_ON = ["--job.custom_config_module=mxep.integrations.torchtitan_0_2", "--model.converters=mxep"]
JOB = [
    "--model.name=deepseek_v3",
    "--model.flavor=debugmodel",
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--parallelism.expert_parallel_degree=2",
    "--optimizer.lr=3e-4",
    "--lr_scheduler.warmup_steps=0",
    "--debug.seed=0",
    "--metrics.log_freq=1",
]
STEPS = 4
ROUNDED = "mxfp8_wgrad_with_hp"
SAVED = ["--checkpoint.enable", "--checkpoint.folder=saved"]
READ = [*SAVED, "--checkpoint.load_only", "--checkpoint.load_step=1"]
TRAIN = {
    "plain": [*JOB, "--training.steps=1"],
    "converted": [*JOB, *SWITCH_ON, f"--training.steps={STEPS}"],
    "blocks": [*JOB, *SWITCH_ON, "--mxep.no-fused", "--training.steps=1"],
    "hp": [*JOB, *SWITCH_ON, "--mxep.recipe=hp", "--mxep.no-fused", "--training.steps=1"],
    "hp fused": [*JOB, *SWITCH_ON, "--mxep.recipe=hp", "--training.steps=1"],
    "compiled": [*JOB, *SWITCH_ON, "--training.steps=1", "--compile.enable", "--compile.backend=aot_eager"],
    "local": [*JOB, *SWITCH_ON, "--training.steps=1", "--parallelism.expert_parallel_degree=1"],
    "saved": [*JOB, *SWITCH_ON, "--mxep.recipe=hp", "--training.steps=3", *SAVED, "--checkpoint.interval=1"],
    "read by one": [*JOB, *SWITCH_ON, "--mxep.recipe=hp", "--training.steps=3", *READ, "--parallelism.expert_parallel_degree=1"],
    "read by plain": [*JOB, "--training.steps=3", *READ],
    "local blocks": [*JOB, *SWITCH_ON, "--mxep.no-fused", "--training.steps=1", "--parallelism.expert_parallel_degree=1"],
}
DEGREES = {
    "tp": ["--parallelism.tensor_parallel_degree=2"],
    "pp": ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"],
}
for name, degrees in DEGREES.items():
    alone = ["--parallelism.expert_parallel_degree=1", "--training.local_batch_size=2", "--training.steps=2", *degrees]
    TRAIN |= {f"{name} plain": [*JOB, *alone], name: [*JOB, *SWITCH_ON, *alone]}
FOUR = [*JOB, *SWITCH_ON, "--parallelism.data_parallel_shard_degree=2", "--activation_checkpoint.mode=none"]
PIPELINE = [*FOUR, "--parallelism.pipeline_parallel_degree=2"]
BUILD = {
    "one layer": [*FOUR, "--mxep.fqns=layers.2"],
    "no module": [*FOUR, "--mxep.fqns=expertz"],
    "no recipe": [*FOUR, "--mxep.recipe=fp7"],
    "tensor": [*FOUR, "--parallelism.tensor_parallel_degree=2"],
    "expert tensor": [*FOUR, "--parallelism.tensor_parallel_degree=2", "--parallelism.expert_tensor_parallel_degree=2"],
    "deepep": [*FOUR, "--parallelism.expert_parallel_comm_backend=deepep"],
    "split": [*PIPELINE, "--parallelism.expert_parallel_degree=1", "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"],
    "overlap": [*PIPELINE, "--parallelism.pipeline_parallel_schedule=DualPipeV"],
    "pipeline": [*PIPELINE, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
}
SMALL = ["--of", "debugmodel", "--layers", "3", "--attention", "sdpa", "--batch", "1", "--seq-len", "64"]
MEASURE = {f"measured {arm}": [*SMALL, "--arm", arm] for arm in ("bf16", "mxfp8_wgrad_with_hp")}
DOCUMENTED = commands(PAGES, "torchtitan_0_2")
BUILD |= {f"documented {number}": options for number, options in enumerate(DOCUMENTED)}
EXPERTS = [f"layers.{layer}.moe.experts" for layer in range(1, 6)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return once(tmp_path_factory, "torchtitan_0_2", run_all)


def run_all() -> dict[str, dict]:
    """Results of all runs, which one program makes, so that torchtitan is imported once."""
    command = python_with(*REQUIREMENTS)
    with tempfile.TemporaryDirectory() as folder:
        runs, out = Path(folder) / "runs.json", Path(folder) / "out.json"
        asked = {"train": TRAIN, "build": BUILD, "measure": MEASURE, "gpt-oss": {"gpt-oss": ["hp", ROUNDED]}}
        runs.write_text(json.dumps(asked))
        run_program(command, str(PROGRAM), str(runs), str(out), timeout_s=570)
        return json.loads(out.read_text())


def first_step(results: dict, name: str) -> tuple[float, float]:
    """(loss, gradient norm) of a run's first step."""
    assert results[name]["error"] is None, results[name]["error"]
    return tuple(results[name]["steps"][0])


def test_loss_falls_and_starts_as_without(results: dict) -> None:
    plain, converted = first_step(results, "plain"), first_step(results, "converted")
    assert converted != plain
    assert converted == pytest.approx(plain, rel=2e-3)  # loss and gradient norm; MXFP8 rounds each operand at 31 dB
    losses = [loss for loss, _ in results["converted"]["steps"]]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.5
    assert results["converted"]["recipes"] == dict.fromkeys(EXPERTS, "mxfp8_wgrad_with_hp")
    assert results["converted"]["exchanged"] == results["converted"]["fused"] == len(EXPERTS)


def test_one_function_or_blocks(results: dict) -> None:
    """The same layer by other operations: one function sums on the experts' rank, the blocks return all rows to the tokens' ranks."""
    plain, fused, blocks = (first_step(results, name) for name in ("plain", "hp fused", "hp"))
    assert fused == pytest.approx(plain, rel=2e-4)
    assert fused != blocks
    assert first_step(results, "converted") == pytest.approx(first_step(results, "blocks"), rel=1e-3)
    assert [results[name]["fused"] for name in ("hp fused", "hp", "blocks")] == [len(EXPERTS), 0, 0]
    assert results["blocks"]["exchanged"] == len(EXPERTS)


def test_tensor_parallelism_keeps_the_blocks(results: dict) -> None:
    """torchtitan splits the tokens between its router and its experts there."""
    assert results["tensor"]["recipes"] == dict.fromkeys(EXPERTS, "mxfp8_wgrad_with_hp")
    assert results["tensor"]["fused"] == 0
    assert results["one layer"]["fused"] == 1


@pytest.mark.parametrize("name", DEGREES)
def test_other_degrees_train(results: dict, name: str) -> None:
    plain, found = results[f"{name} plain"], results[name]
    assert (plain["error"], found["error"]) == (None, None)
    assert set(found["recipes"].values()) == {ROUNDED}
    assert len(found["steps"]) == 2
    assert found["steps"] != plain["steps"]
    for step, want in zip(found["steps"], plain["steps"], strict=True):
        assert step == pytest.approx(want, rel=1e-3)


def test_the_blocks_in_high_precision_have_torchtitans_bits(results: dict) -> None:
    """mxep's exchange, padding and order of rows, without any rounding."""
    assert first_step(results, "hp") == first_step(results, "plain")
    assert results["hp"]["exchanged"] == len(EXPERTS)


def test_compiled_blocks_compute_in_mxfp8(results: dict) -> None:
    assert first_step(results, "compiled") == first_step(results, "converted")


def test_experts_that_multiply_in_a_loop(results: dict) -> None:
    """As torchtitan's do below SM90: blocks replace the grouped GEMM that is not there, one function replaces the whole of the experts."""
    assert results["gpt-oss"]["error"] is None, results["gpt-oss"]["error"]
    assert results["gpt-oss"]["loop"]["fused"] == "True"
    assert "called neither torch._grouped_mm nor" in results["gpt-oss"]["loop"]["blocks"]


@pytest.mark.parametrize("where", ["one rank", "two ranks"])
def test_experts_of_gpt_oss(results: dict, where: str) -> None:
    """Biases, gate and up interleaved, clamped: in high precision the blocks have torchtitan's own bits."""
    assert results["gpt-oss"]["error"] is None, results["gpt-oss"]["error"]
    of_all = results["gpt-oss"]["dB"]
    found = {how: of_all[f"{how} {where}"] for how in ("hp blocks", "hp fused", f"{ROUNDED} blocks", f"{ROUNDED} fused")}
    assert set(found["hp blocks"].values()) == {999.0}
    for name, exact in found["hp fused"].items():
        rounded, in_blocks = found[f"{ROUNDED} fused"][name], found[f"{ROUNDED} blocks"][name]
        assert 22 < exact < 999, name  # torchtitan rounds before it clamps, and is 24 to 31 dB from float64 by that; this is 36 to 42
        assert 12 < rounded < 40, name
        assert rounded > min(in_blocks, 30) - 5, name  # the router's bias has eight numbers
    assert len(found["hp fused"]) == 8


def test_without_expert_parallelism(results: dict) -> None:
    local = first_step(results, "local")
    assert results["local"]["recipes"] == dict.fromkeys(EXPERTS, "mxfp8_wgrad_with_hp")
    assert local == pytest.approx(first_step(results, "converted"), rel=1e-3)
    assert results["local"]["fused"] == len(EXPERTS)
    blocks = first_step(results, "local blocks")
    assert blocks[0] == first_step(results, "blocks")[0]  # the exchange rounds nothing that the GEMM would not
    assert blocks[1] == pytest.approx(first_step(results, "plain")[1], rel=2e-3)


@pytest.mark.parametrize("name", ["read by one", "read by plain"])
def test_checkpoints(results: dict, name: str) -> None:
    """By experts that are not sharded, and by torchtitan's own; the second step after it also depends on the optimizer's moments."""
    assert [results[which]["error"] for which in ("saved", name)] == [None, None]
    for step, want in zip(results[name]["steps"], results["saved"]["steps"][1:], strict=True):
        assert step == pytest.approx(want, rel=1e-3)


def test_named_layers_alone(results: dict) -> None:
    assert results["one layer"]["recipes"] == {EXPERTS[1]: "mxfp8_wgrad_with_hp"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no module", "'expertz' matched no module with stacked 3-D expert weights; saw layers.*.moe.experts"),
        ("no recipe", "'fp7' is unknown"),
        ("expert tensor", "expert_tensor_parallel_degree=2, want 1"),
        ("deepep", "expert_parallel_comm_backend=deepep, want standard"),
        ("split", "InterleavedZeroBubble splits backward"),
        ("overlap", "DualPipeV splits backward"),
    ],
)
def test_unsupported_options_raise(results: dict, name: str, text: str) -> None:
    result = results[name]
    assert result["error"].startswith("ValueError: ")
    assert text in result["error"]
    assert result["recipes"] == {}


@pytest.mark.parametrize("name", ["one layer", "pipeline"])
def test_experts_that_another_style_sharded_do_not_run(results: dict, name: str) -> None:
    """Built, converted, and called without torchtitan's ExpertParallel."""
    assert results[name]["recipes"]
    assert results[name]["error"].startswith("ValueError: torchtitan converter 'mxep': GroupedExperts was not sharded by")


def test_documented_commands_are_understood(results: dict) -> None:
    assert DOCUMENTED
    for number in range(len(DOCUMENTED)):
        assert results[f"documented {number}"]["recipes"]


def test_the_benchmarks_ranks(results: dict) -> None:
    """benchmarks/torchtitan_0_2.py, a small model of it."""
    runs = [results[name] for name in MEASURE]
    assert [run["error"] for run in runs] == [None, None]
    plain, ours = (run["measured"] for run in runs)
    assert len(plain["losses"]) == len(plain["step_ms"]) + 1 == 3
    assert min(plain["step_ms"]) > 0
    assert ours["losses"] != plain["losses"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=2e-3)


def test_the_benchmark_checks_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import torchtitan_0_2 as benchmark
    finally:
        sys.path.pop(0)
    fine = {"bf16": {"losses": [8.0, 7.0]}, "mxfp8_wgrad_with_hp": {"losses": [8.01, 7.01]}}
    assert benchmark.problem_of(fine) is None
    for losses, word in (
        ([8.1, 7.0], "first loss 8.1000, bf16 has 8.0000"),
        ([8.0, 7.6], "went from 8.0000 to 7.6000"),
        ([float("nan")] * 2, "nan"),
    ):
        assert word in benchmark.problem_of({**fine, "mxfp8_wgrad_with_hp": {"losses": losses}})
    arms = {arm: {"losses": [8.0, 7.0], "step_ms": [9.0] * 30, "memory_gib": 1.0} for arm in ("bf16", *benchmark.RECIPES)}
    arms["mxfp8_wgrad_with_mx"]["step_ms"] = [50.0] * 10 + [6.0] * 20  # the first ones are not timed
    monkeypatch.setattr(benchmark.importlib.metadata, "version", lambda name: "some")  # torchtitan is in an environment of its own
    record = benchmark.record_of(arms, benchmark.parser().parse_args([]), "h200")
    assert record["ratios"] == {"mxfp8_wgrad_with_hp_vs_bf16": 1.0, "mxfp8_wgrad_with_mx_vs_bf16": 1.5}
    assert record["layers"] == "one function"


def test_without_torchtitan_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("mxep.integrations.torchtitan_experts.importlib.metadata.version", not_found)
    with pytest.raises(ImportError, match=r"want 0[.]2[.]2; install mxep with its extra `torchtitan`"):
        importlib.import_module("mxep.integrations.torchtitan_0_2")


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.2.1", "0.3.0", "0.20.2"])
def test_another_torchtitan_names_the_wanted_one(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """0.2.0 and 0.2.1 too, which have other options and models; 0.2.0 ended in an AttributeError."""
    monkeypatch.setattr("mxep.integrations.torchtitan_experts.importlib.metadata.version", lambda name: version)
    with pytest.raises(ImportError, match=rf"torchtitan is {version}, want 0[.]2[.]2; .*[(]0[.]3: mxep.integrations.torchtitan_0_3[)]"):
        importlib.import_module("mxep.integrations.torchtitan_0_2")


@pytest.mark.parametrize("version", ["0.2.2", "0.2.3", "0.2.10", "0.2.2.post1", "0.2.2+cu130"])
def test_later_patches_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("mxep.integrations.torchtitan_experts.importlib.metadata.version", lambda name: version)
    require_torchtitan("adapter", "0.2.2", "install it", "0.3: another one")

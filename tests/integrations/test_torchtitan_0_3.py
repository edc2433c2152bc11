"""torchtitan 0.3 with mxep's override: config tree, routed experts with EP 1 and 2, steps of its debug model, on a CPU.

tests/programs/torchtitan_0_3_on_cpu.py is the program; `pytest -m torchtitan` runs it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import tempfile
from pathlib import Path

import pytest
from tests.integrations.titan import commands, python_with, run_program
from tests.pages import PAGES, ROOT

pytestmark = [pytest.mark.torchtitan, pytest.mark.slow, pytest.mark.timeout(900)]

REQUIREMENTS = ["torchtitan==0.3.0", "torch==2.15.0"]  # 0.3.0 wants torch 2.13 or later
PROGRAM = ROOT / "tests" / "programs" / "torchtitan_0_3_on_cpu.py"
TARGET = "mxep.integrations.torchtitan_0_3.mxfp8_experts"
DOCUMENTED = commands(PAGES, "torchtitan_0_3")
EXACT_DB = 999.0  # no difference at all
MOE_LAYERS = range(1, 6)


@pytest.fixture(scope="module")
def results() -> dict:
    command = python_with(*REQUIREMENTS, timeout_s=800)
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "commands.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(DOCUMENTED))
        run_program(command, str(PROGRAM), str(asked), str(out), timeout_s=800)
        return json.loads(out.read_text())


def test_config_tree(results: dict) -> None:
    tree = results["tree"]
    assert tree["recipes"] == [["mxfp8_gemm", "mxfp8_gemm"] for _ in MOE_LAYERS]
    for layer, line in zip(MOE_LAYERS, tree["lines"], strict=True):
        assert line.startswith(f"[Override] {TARGET}: model_spec.model.layers.{layer}.moe.routed_experts ")
    assert tree["kinds"] == ["MXFP8RoutedExperts.Config"]
    assert tree["rest is the same"]
    assert tree["state is the same"]


def experts_of(results: dict, ranks: str, model: str) -> list[dict]:
    """Of every rank: dB of y, dx, dscores and the weights' gradients against torchtitan's own experts, by recipe."""
    return [found[model] for found in (results["two ranks"] if ranks == "two ranks" else [results["one rank"]])]


@pytest.mark.parametrize("model", ["deepseek", "gpt-oss"])
@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
def test_experts(results: dict, ranks: str, model: str) -> None:
    for found in experts_of(results, ranks, model):
        assert found["hp blocks"] == [EXACT_DB] * (6 if model == "deepseek" else 7)
        assert found["hp split"] == found["hp blocks" if model == "gpt-oss" else "hp"]  # biases that several ranks would add
        assert 40 < min(found["hp"]) < EXACT_DB  # in bf16, summed and rounded in other places
        for recipe in ("mxfp8_wgrad_with_hp", "mxfp8_gemm"):
            for name in (recipe, f"{recipe} blocks"):
                assert min(found[name]) >= 22, name  # three GEMMs, gate times up
                assert max(found[name][:6]) < 30, name  # behind them gpt-oss' second bias, whose gradient is a sum
        blocks = found["mxfp8_gemm blocks"][:3], found["mxfp8_wgrad_with_hp blocks"][:3]
        assert blocks[0] == blocks[1]  # the exchange rounds nothing that the GEMM would not


def test_trainer(results: dict) -> None:
    """torchtitan's own trainer, EP 2: FSDP, clipping, selective recomputation."""
    runs = results["trained"]
    assert [runs[name]["error"] for name in ("plain", "hp", "hp blocks", "mxfp8_wgrad_with_hp")] == [None] * 4
    assert runs["hp blocks"]["steps"] == runs["plain"]["steps"]
    assert runs["hp"]["kinds"] == ["MXFP8RoutedExperts"]
    assert runs["hp"]["steps"] != runs["plain"]["steps"]
    for name, relative in (("hp", 5e-4), ("mxfp8_wgrad_with_hp", 2e-3)):
        for step, plain in zip(runs[name]["steps"], runs["plain"]["steps"], strict=True):
            assert step == pytest.approx(plain, rel=relative), name


@pytest.mark.parametrize("degrees", ["tp", "tp ep", "pp"])
def test_other_degrees(results: dict, degrees: str) -> None:
    """TP 2, alone and with EP 2, and two stages of a pipeline."""
    plain = results["trained"][f"{degrees} plain"]
    assert plain["error"] is None
    for recipe, relative in (("hp", 1e-3), ("mxfp8_wgrad_with_hp", 2e-3)):
        found = results["trained"][f"{degrees} {recipe}"]
        assert (found["error"], found["kinds"]) == (None, ["MXFP8RoutedExperts"])
        assert len(found["steps"]) == 2
        for step, want in zip(found["steps"], plain["steps"], strict=True):
            assert step != want
            assert step == pytest.approx(want, rel=relative), recipe


@pytest.mark.parametrize("name", ["read by one", "read by plain"])
def test_checkpoints(results: dict, name: str) -> None:
    """By experts that are not sharded, and by torchtitan's own; the second step after it also depends on the optimizer's moments."""
    runs = results["trained"]
    assert [runs[which]["error"] for which in ("saved", name)] == [None, None]
    for step, want in zip(runs[name]["steps"], runs["saved"]["steps"][1:], strict=True):
        assert step == pytest.approx(want, rel=1e-3)


def test_tensor_parallel_biases_are_added_once(results: dict) -> None:
    """By torchtitan's own forward where it knows the degree; with `spmd_types` it does not, and its output has the bias twice."""
    runs = results["trained"]
    assert [runs[f"gpt-oss {name}"]["error"] for name in ("plain", "hp")] == [None] * 2
    assert runs["gpt-oss hp"]["steps"] == runs["gpt-oss plain"]["steps"]
    assert runs["gpt-oss hp"]["kinds"] == ["MXFP8RoutedExperts"]
    for how in ("spmd_types", "spmd_types blocks"):
        assert runs[f"gpt-oss {how}"]["error"].startswith("ValueError: mxep.integrations.torchtitan_0_3.mxfp8_experts: ")
        assert "use --parallelism.spmd_backend=partial_dtensor, or expert parallelism" in runs[f"gpt-oss {how}"]["error"]


def test_debug_model_learns(results: dict) -> None:
    losses = results["losses"]
    assert losses["hp blocks"] == losses["plain"]
    assert losses["hp"] == pytest.approx(losses["plain"], rel=1e-3)
    assert losses["mxfp8_wgrad_with_hp"][0] != losses["plain"][0]
    assert losses["mxfp8_wgrad_with_hp"][:2] == pytest.approx(losses["plain"], rel=2e-3)
    assert losses["mxfp8_wgrad_with_hp"][-1] < losses["plain"][0] - 1


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("recipe", "'fp7' is unknown"),
        ("dispatcher", "the dispatcher is MinimalAsyncEPTokenDispatcher.Config, want AllToAllTokenDispatcher.Config"),
        ("experts", "the experts are FusedGroupedExperts.Config, want GroupedExperts.Config or GptOssGroupedExperts.Config"),
    ],
)
def test_unsupported_options_raise(results: dict, what: str, text: str) -> None:
    error = results["refused"][what]
    assert error.startswith("ValueError: ")
    assert text in error


def test_a_compiled_block_says_what_to_do(results: dict) -> None:
    assert (
        "a compiled block cannot hold the exchange, whose splits the host reads; use --compile.no-enable"
        in results["one rank"]["deepseek"]["compiled"]
    )


def test_type_checking_says_what_to_do(results: dict) -> None:
    assert "use --debug.no-spmd_typechecking" in results["one rank"]["deepseek"]["type checked"]


def test_documented_commands_replace_experts(results: dict) -> None:
    assert DOCUMENTED
    assert all(results["documented"])


def test_without_torchtitan_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("mxep.integrations.torchtitan_experts.importlib.metadata.version", not_found)
    with pytest.raises(ImportError, match=r"want 0[.]3[.]0; install torchtitan==0[.]3.0"):
        importlib.import_module("mxep.integrations.torchtitan_0_3")

"""`mxep bench finetune` on a CPU: its arms train one model, wrong and failing ones are named, and a base in MX is never in bf16."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.bench_cases import CPU, check_schema, check_tables
from tests.steps import Recorder
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.bench import command, finetune, finetune_arms, markdown_tables, random_models, registry
from mxep.bench.finetune_arms import ARMS, BASELINE, MODELS, TINY, FinetuneRun, WrongResultError, measure_arm
from mxep.bench.records import read_records
from mxep.bench.transformers_step import model_config
from mxep.mx import MXWeight
from mxep.parallel.frozen_base import quantize_base

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")

from transformers.integrations.moe import ExpertsInterface  # noqa: E402

GPT_OSS = "gpt-oss-20b"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The names that arms register are gone afterwards."""
    from mxep.integrations import transformers_5

    interfaces = [interface._global_mapping for interface in (ExpertsInterface, transformers_5.EPImplementationInterface)]
    before = [dict(mapping) for mapping in interfaces]
    yield
    for mapping, names in zip(interfaces, before, strict=True):
        for name in set(mapping) - set(names):
            del mapping[name]


@pytest.fixture(scope="module", params=MODELS)
def records(request: pytest.FixtureRequest) -> list[dict]:
    kept: list[int] = []
    setting = registry.Setting(CPU, quick=True, model=request.param)
    found = registry.run("finetune", setting, "", lambda text: None, lambda so_far: kept.append(len(so_far[0]["results"])))
    assert kept == [1, 2, 3, 4, 5, 6], "an interrupted run keeps the arms that it has measured"
    return found


def test_records(records: list[dict]) -> None:
    pytest.importorskip("torchao", reason="of the 8-bit moments")
    check_schema("finetune", records)
    (record,) = records
    assert record["left_out"] == {}
    assert list(record["results"]) == list(ARMS)
    assert set(record["ratios"]) == set(finetune.RATIOS)
    assert record["target"] == {}, "a CPU reaches no target"
    for arm, found in record["results"].items():
        assert found["tokens"] == min(ARMS[arm].sequences, MODELS[record["model"]].sequences) * TINY.seq_len
        assert len(found["steps_s"]) == TINY.warm_up + TINY.timed
        assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_s"], rel=0.02)
        assert found["loss_last"] < found["loss_first"]
    firsts = [record["results"][arm]["loss_first"] for arm in ARMS if ARMS[arm].lora]
    assert max(firsts) - min(firsts) < 0.01, "one model and one batch"
    assert 0 < record["results"]["lora_mx"]["agreement"]["worst_db"] < record["results"]["lora_bf16_ours"]["agreement"]["worst_db"]


def test_table(records: list[dict]) -> None:
    left = {**records[0], "left_out": {"full": "OutOfMemoryError: 1 | 2"}}
    table = markdown_tables.finetune_table([records[0], left])
    check_tables(table)
    lines = table.splitlines()
    assert len(lines) == 2 + 2 * len(ARMS) + 1
    assert sum(line.count("x |") for line in lines) == 2


def test_a_ratio_that_was_not_measured_keeps_its_column(records: list[dict]) -> None:
    """Otherwise another ratio would be read as this one."""
    table = markdown_tables.finetune_table([{**records[0], "ratios": {"lora_mx_vs_ours_bf16": 1.05}}])
    assert "| - / 1.05x |" in table


def test_options_of_a_base_are_shown(records: list[dict]) -> None:
    table = markdown_tables.finetune_table([{**records[0], "target": {"lora_mx_base_gib": 24.0}}])
    assert table.count("| 0.0 (asked: 24 at most) |") == 1


def test_layers_that_are_kept_are_shown(records: list[dict]) -> None:
    found = {**records[0]["results"]["lora_mx"], "peak_gib": {"allocated": 59.0, "reserved": 59.5}, "memory_gib": 60.0, "kept_layers": 17}
    table = markdown_tables.finetune_table([{**records[0], "results": {"lora_mx": found}}])
    assert "| 59.0 / 59.5 (17 layers kept within 60) |" in table


def test_layers_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's memory of a GPU, by the number of layers that are kept; the record has a name of its own."""

    def peak(device: torch.device) -> int:
        return 2**30 * sum(not layer.gradient_checkpointing for layer in made[-1])

    made: list[Any] = []
    budget = importlib.import_module("mxep.integrations.transformers_recompute").RecomputeBudget

    def on_a_gpu(model: Any, gib: float) -> Any:
        made.append([module for module in model.modules() if hasattr(module, "gradient_checkpointing") and hasattr(module, "self_attn")])
        return budget(model, gib, lambda: (0, peak(CPU)))

    monkeypatch.setattr("mxep.integrations.transformers_recompute.RecomputeBudget", on_a_gpu)
    sizes = TINY._replace(layers=4, memory_gib=2.5, warm_up=finetune_arms.BUDGET_STEPS)
    found = measure_arm("lora_mx", sizes, CPU, lambda text: None)
    assert (found["memory_gib"], found["kept_layers"]) == (2.5, 2)


@pytest.mark.parametrize("memory_gib", [None, 1.5])
def test_steps_as_a_graph(memory_gib: float | None, monkeypatch: pytest.MonkeyPatch, records: list[dict]) -> None:
    """A replay, which is a call here, comes after the first steps; peft as it comes has none."""
    recorders: list[Recorder] = []
    graphed = importlib.import_module("mxep.integrations.transformers_graph").GraphedStep
    budget = importlib.import_module("mxep.integrations.transformers_recompute").RecomputeBudget

    def on_a_gpu(model: Any, step: Any, budget: Any) -> Any:
        recorders.append(Recorder(()))
        return graphed(model, step, budget, recorders[-1])

    monkeypatch.setattr("mxep.integrations.transformers_graph.GraphedStep", on_a_gpu)
    monkeypatch.setattr(
        "mxep.integrations.transformers_recompute.RecomputeBudget", lambda model, gib: budget(model, gib, lambda: (0, 2**30))
    )
    sizes = TINY._replace(cuda_graph=True, memory_gib=memory_gib).warmed_up()
    found = {arm: measure_arm(arm, sizes, CPU, lambda text: None) for arm in ("lora_mx", BASELINE)}
    assert {arm: ran["cuda_graph"] for arm, ran in found.items()} == {"lora_mx": True, BASELINE: False}
    assert found["lora_mx"].get("memory_gib") == memory_gib
    assert ("kept_layers" in found["lora_mx"]) == (memory_gib is not None)
    (recorder,) = recorders
    assert recorder.recorded == 1
    assert recorder.replays > sizes.timed, "a replay comes before those that are timed"
    table = markdown_tables.finetune_table([{**records[0], "results": found}])
    assert table.count("| `lora_mx`, CUDA graph |") == 1
    assert table.count(f"| `{BASELINE}` |") == 1


@pytest.mark.parametrize("name", MODELS)
def test_options_of_a_base_hold_for_all_layers(name: str) -> None:
    problem = finetune.FinetuneProblem(registry.Setting(torch.device("cuda"), model=name))
    problem.results["lora_mx"] = {}
    assert problem.after("lora_mx")["target"] == {"lora_mx_base_gib": MODELS[name].base_gib}
    problem = finetune.FinetuneProblem(registry.Setting(torch.device("cuda"), model=name, layers=8))
    problem.results["lora_mx"] = {}
    assert problem.after("lora_mx")["target"] == {}
    model = random_models._without_weights(model_config(MODELS[name].layers, tiny=False, name=name))
    quantize_base(model)
    stored = sum(map(finetune_arms._stored_bytes, model.parameters())) / 2**30
    assert 0.85 * MODELS[name].base_gib < stored < MODELS[name].base_gib


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_of_one_model_whatever_stores_them(name: str) -> None:
    config = model_config(1, tiny=True, name=name)
    make = random_models.model_through_mxfp4 if MODELS[name].in_mxfp4 else random_models.random_model
    plain, in_mx = (make(config, CPU, frozen) for frozen in (False, True))
    frozen = dict(in_mx.named_parameters())
    assert {name.rpartition("layers.0.")[2] for name, value in frozen.items() if isinstance(value, MXWeight)} == {
        *(f"self_attn.{letter}_proj.weight" for letter in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    for name, value in plain.named_parameters():
        got = frozen[name].dequantize() if isinstance(frozen[name], MXWeight) else frozen[name]
        assert value.eq(1).all() if "norm" in name else 0.012 < value.std() < 0.03
        assert (got - value).norm() < 0.05 * value.norm(), name
    made = type(plain)(config)
    assert torch.equal(plain.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)


def test_files_of_weights_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain, sizes = random_models.load_mxfp4, list[int]()

    def load(folder: Path, *more: Any) -> Any:
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
        if len(sizes) == 2:
            raise torch.OutOfMemoryError
        return plain(folder, *more)

    monkeypatch.setattr(random_models, "load_mxfp4", load)
    FinetuneRun("lora_mx", TINY._replace(model=GPT_OSS), CPU)
    assert not any(tmp_path.iterdir())
    with pytest.raises(torch.OutOfMemoryError):
        FinetuneRun("lora_mx", TINY._replace(model=GPT_OSS), CPU)
    assert sizes[0] == sizes[1] > 0
    assert not any(tmp_path.iterdir())


def test_files_of_weights_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_models, "_FILE_BYTES", 20_000)
    random_models.write_mxfp4(model_config(2, tiny=True, name=GPT_OSS), tmp_path, CPU)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert sum(isinstance(value, MXWeight) for value in random_models.load_mxfp4(tmp_path, CPU, in_mx=True).parameters()) == 12


class _Alive(TorchDispatchMode):
    """The most bytes of bf16 and float32, outside of the meta device, that operators have made and something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.most = dict[int, tuple[StorageWeakRef, int]](), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        if type(made) is Tensor and made.device.type != "meta" and made.dtype in (torch.bfloat16, torch.float32):
            storage = made.untyped_storage()
            self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: (ref, count) for key, (ref, count) in self.made.items() if not ref.expired()}
        self.most = max(self.most, sum(count for _, count in self.made.values()))
        return made


@pytest.mark.parametrize("in_mx", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_base_in_mx_is_never_in_bf16(name: str, in_mx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # of bf16: a dispatch mode sees its own thread
    config = model_config(8, tiny=True, name=name)
    if MODELS[name].in_mxfp4:
        random_models.write_mxfp4(config, tmp_path, CPU)
    with _Alive() as alive:
        model = random_models.load_mxfp4(tmp_path, CPU, in_mx) if MODELS[name].in_mxfp4 else random_models.random_model(config, CPU, in_mx)
    weights = list(model.parameters())
    plain = sum(value.nbytes for value in weights if not isinstance(value, MXWeight))
    largest = max(value.numel() for value in weights)
    one = 12 * largest  # while it is made: in bf16, and in float32 as the reference quantises it
    assert plain <= alive.most <= plain + one
    assert one < sum(value.numel() for value in weights if isinstance(value, MXWeight)) or not in_mx, "a whole model would be seen"


def test_records_of_a_model_have_a_file_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["--model", GPT_OSS]):
        one_arm = [
            "finetune",
            *given,
            "--arms",
            BASELINE,
            "--layers",
            "1",
            "--record",
            "--out",
            str(tmp_path),
            "--quick",
            "--device",
            "cpu",
        ]
        assert command.command(one_arm) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["finetune-cpu-1.json", f"finetune-{GPT_OSS}-cpu-1.json"]
    found = read_records("finetune", tmp_path)
    assert [record["model"] for record in found] == list(MODELS)
    assert f"--arms {BASELINE} --model {GPT_OSS} --layers 1" in found[1]["command"]
    assert f"{GPT_OSS} of 1 layers" in markdown_tables.finetune_table(found)


def test_bytes_of_weights_count_codes_and_scales() -> None:
    run = FinetuneRun("lora_mx", TINY, CPU)
    base, adapters = run.bytes_of_weights()
    parameters = list(run.model.named_parameters())
    assert adapters == sum(value.numel() * 4 for name, value in parameters if "lora_" in name), "peft keeps adapters in float32"
    want = sum(value.numel() * (33 / 32 if isinstance(value, MXWeight) else 2) for name, value in parameters if "lora_" not in name)
    assert base == want


def test_an_arm_that_fails_is_named_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    plain = finetune_arms.random_model

    def short_of_memory(config: Any, device: torch.device, in_mx: bool) -> Any:
        if not in_mx:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 57 GiB\nmore")
        return plain(config, device, in_mx)

    setting = registry.Setting(CPU, quick=True, arms=("full", BASELINE))
    with (
        mock.patch.object(finetune_arms, "random_model", short_of_memory),
        pytest.raises(registry.CheckFailedError, match="no arm has run"),
    ):
        registry.run("finetune", setting, "", lambda text: None)
    setting = registry.Setting(CPU, quick=True, arms=(BASELINE, "lora_mx"), layers=1)
    said: list[str] = []
    with mock.patch.object(finetune_arms, "random_model", short_of_memory), mock.patch.object(finetune_arms, "agreement", return_value={}):
        (record,) = registry.run("finetune", setting, "", said.append)
    assert record["left_out"] == {BASELINE: "OutOfMemoryError: CUDA out of memory. Tried to allocate 57 GiB"}
    assert list(record["results"]) == ["lora_mx"]
    assert record["ratios"] == {}
    assert sum("left out" in line for line in said) == 1
    assert "lora_mx: " in capsys.readouterr().out, "progress"
    assert "left out: OutOfMemoryError" in markdown_tables.finetune_table([record])


@pytest.mark.parametrize(("how", "problem"), [("twice", "norm of .* is off by"), ("off", "the loss is"), ("none", "gradient is 0.0")])
def test_wrong_results_have_no_times(how: str, problem: str) -> None:
    plain = FinetuneRun.loss

    def wrong(run: FinetuneRun, tokens: Tensor) -> Tensor:
        loss = plain(run, tokens)
        if run.name == BASELINE:
            return loss
        return {"twice": loss + loss - loss.detach(), "off": loss + 1, "none": loss * 0}[how]

    with mock.patch.object(FinetuneRun, "loss", wrong), pytest.raises(WrongResultError, match=problem):
        measure_arm("lora_mx", TINY, CPU, lambda line: None)


def test_an_arm_without_some_adapters_has_no_times() -> None:
    plain = finetune_arms._with_adapters

    def without_experts(model: Any, device: torch.device, ours: bool) -> Any:
        with mock.patch.object(finetune_arms, "_ON_EXPERTS", [] if ours else finetune_arms._ON_EXPERTS):
            return plain(model, device, ours)

    with (
        mock.patch.object(finetune_arms, "_with_adapters", without_experts),
        pytest.raises(WrongResultError, match=r"other adapters: .*experts"),
    ):
        measure_arm("lora_mx", TINY, CPU, lambda line: None)


def test_a_loss_that_is_not_finite_is_named() -> None:
    pytest.importorskip("torchao", reason="of the 8-bit moments")
    plain = FinetuneRun.loss
    with (
        mock.patch.object(FinetuneRun, "loss", lambda run, tokens: plain(run, tokens) * torch.nan),
        pytest.raises(WrongResultError, match="full: the gradients' norm is nan"),
    ):
        measure_arm("full", TINY, CPU, lambda line: None)


def test_layers_and_sequences_are_those_asked_for() -> None:
    setting = registry.Setting(CPU, quick=True, arms=("full_accelerate",), layers=1, sequences=3)
    (record,) = registry.run("finetune", setting, "", lambda text: None)
    assert record["shape"]["layers"] == 1
    assert record["results"]["full_accelerate"]["tokens"] == 3 * TINY.seq_len


def test_a_process_that_dies_is_an_error_here() -> None:
    assert finetune.in_own_process(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        finetune.in_own_process(os._exit, 3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["finetune", "--arms", "lora"], "--arms lora, want lora_mx"),
        (["finetune", "--layers", "0"], "--layers 0, want 1 or more"),
        (["finetune", "--cuda-graph"], "--cuda-graph on a CPU, want a GPU"),
        (["finetune", "--sequences", "-1"], "--sequences -1, want 1 or more"),
        (["finetune", "--model", "gpt-oss"], "--model gpt-oss, want Qwen3-30B-A3B or gpt-oss-20b"),
        (["linears", "--model", "gpt-oss-20b"], "want `mxep bench finetune`"),
        (["linears", "--layers", "2"], "want `mxep bench finetune`"),
    ],
)
def test_options(arguments: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        command.command([*arguments, "--quick", "--device", "cpu"])

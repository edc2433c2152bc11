"""`--converters`: the parts of a model that train in MXFP8."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.steps import TrainerWithoutPlot, losses_of, trainer
from torch import nn

from mxep.models.presets import resolve_model
from mxep.parallel import MXLinear
from mxep.parallel.linear_gains import LinearTimes, _gaining_shapes
from mxep.recipe import Recipe
from mxep.train import linear_choice
from mxep.train.config import TrainConfig, load_config
from mxep.train.distributed import Ranks
from mxep.train.option_parser import read_options
from mxep.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_rank")
TEXT = Path(__file__).parents[2] / "LICENSE"  # the same for every version of Python: rounding in MXFP8 changes losses by up to 1%
GAINING = [LinearTimes("h200", "1", 32, 128, 128, bf16=2.0, hp=1.0, mx=1.5), LinearTimes("h200", "1", 32, 96, 96, bf16=2.0, hp=1.9, mx=1.1)]


@pytest.fixture
def wide_layers_gain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a GPU where layers from (128, 128) on are faster, and from (96, 96) on with wgrad from MX bytes; with 32 tokens or more."""
    monkeypatch.setattr(sys.modules[LinearTimes.__module__], "measured_times", lambda: GAINING)
    monkeypatch.setattr(linear_choice, "resolve_gemm_path", lambda name, device: "fp8")
    _gaining_shapes.cache_clear()
    yield
    _gaining_shapes.cache_clear()


def trained(out: Path, *words: str) -> tuple[Trainer, list[float]]:
    """A run of three steps, and its losses."""
    small = ["--device", "cpu", "--batch", "2", "--seq-len", "16", "--eval-tokens", "32", "--steps", "3", "--data", str(TEXT)]
    config: TrainConfig = read_options([*small, *words])
    trainer = TrainerWithoutPlot(config, Ranks(0, 1, torch.device("cpu")), out)
    assert trainer.train()
    return trainer, losses_of(out)


def recipes(trainer: Trainer) -> tuple[set[str], set[str]]:
    """Of the experts, and of the dense layers in MXFP8."""
    experts = {moe.experts.recipe for moe in trainer.model.moe_layers()}
    dense = [module for module in trainer.model.modules() if isinstance(module, MXLinear)]
    assert all(isinstance(recipe, Recipe) for recipe in experts)
    return {recipe.name for recipe in experts}, {layer.recipe.name for layer in dense}


def test_dense_layers_train_in_mxfp8(tmp_path: Path) -> None:
    skip = ["--quantize.linear.mx.filter-fqns", "wkv_a"]  # 80 columns
    _, plain = trained(tmp_path / "bf16", "--recipe", "bf16", *skip)
    words = ["--linear-fqns", "*", *skip, "--linear-recipe", "mxfp8_wgrad_with_mx", "--cache-weights"]
    trainer, losses = trained(tmp_path / "both", *words)
    assert recipes(trainer) == ({"mxfp8_wgrad_with_hp"}, {"mxfp8_wgrad_with_mx"})
    (line,) = (line for line in trainer.describe() if line.startswith("dense linear layers in mxfp8_wgrad_with_mx: "))
    converted, _, others = line.partition("; in high precision: ")
    assert "layers.*.attention.wq, " in converted
    assert "layers.*.moe.shared_experts.w3" in converted
    assert "wkv_a" not in converted
    assert others == "layers.*.attention.wkv_a"
    assert recipes(trainer)[1] == {"mxfp8_wgrad_with_mx"}
    assert losses == pytest.approx(plain, rel=1e-2)
    assert losses != plain
    _, compiled = trained(tmp_path / "compiled", *words, "--compile", "--compile-backend", "aot_eager", "--activation-checkpoint", "full")
    assert compiled == pytest.approx(losses, rel=1e-5)


def test_dense_layers_alone(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path / "dense", "--model.converters=quantize.linear.mx", "--linear-fqns", "feed_forward,shared_experts")
    assert recipes(trainer) == ({"hp"}, {"mxfp8_wgrad_with_hp"})


def test_the_loss_in_mxfp8(tmp_path: Path) -> None:
    words = ["--recipe", "bf16", "--accumulate", "2"]
    _, plain = trained(tmp_path / "bf16", *words)
    trainer, losses = trained(tmp_path / "mx", *words, "--output-recipe", "mxfp8_wgrad_with_mx", "--cache-weights")
    assert trainer.model.output.recipe.name == "mxfp8_wgrad_with_mx"
    assert any("output projection in mxfp8_wgrad_with_mx" in line for line in trainer.describe())
    assert trainer.weight_cache.fills == 2 * 3 + 1  # both forms in each step; the evaluation needs one
    assert losses == pytest.approx(plain, rel=1e-2)
    assert losses != plain


def test_layers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = TrainConfig(device="cpu", linear_fqns="*", data=(str(TEXT),))
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.wkv_a: a weight \(80, 128\), want multiples of 32"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), tmp_path)


def test_no_layer_is_faster_on_a_cpu(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path / "run")
    assert recipes(trainer)[1] == set()
    assert load_config(tmp_path / "run").linear_fqns == ""
    assert any(line.startswith("dense linear layers: all in high precision (--linear-fqns auto") for line in trainer.describe())


@pytest.mark.usefixtures("wide_layers_gain")
def test_faster_layers_are_chosen_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained(tmp_path / "run", "--linear-skip", "wo", "--model", "qwen3_debug_cpu")
    chosen = {name for name, module in trainer.model.named_modules() if isinstance(module, MXLinear)}
    dense = {name: module for name, module in trainer.model.named_modules() if type(module) is nn.Linear and "router" not in name}
    assert chosen
    assert "layers.0.attention.wo" in dense
    assert all(min(trainer.model.get_submodule(name).weight.shape) >= 128 for name in chosen)
    assert all(min(module.weight.shape) < 128 for name, module in dense.items() if not name.endswith(".wo"))
    monkeypatch.setattr(sys.modules[LinearTimes.__module__], "measured_times", list)
    _gaining_shapes.cache_clear()
    again, _ = trained(tmp_path / "run", "--resume", "--out", str(tmp_path / "run"), "--steps", "4")
    assert {name for name, module in again.model.named_modules() if isinstance(module, MXLinear)} == chosen


@pytest.mark.usefixtures("wide_layers_gain")
@pytest.mark.parametrize(
    ("changes", "chooses"),
    [
        ({}, "layers.*.attention.wq"),
        ({"tp": 2}, ""),
        ({"recipe": "bf16"}, "auto"),
        ({"recipe": "mxfp8_wgrad_with_mx", "tp": 2}, ""),
        ({"linear_fqns": None}, None),
        ({"linear_fqns": "wo"}, "wo"),
        ({"converters": "quantize.grouped_mm.mx"}, "auto"),
    ],
)
def test_chosen_layers(changes: dict[str, Any], chooses: str | None) -> None:
    config, shape = TrainConfig(**changes), resolve_model("qwen3_debug_cpu")
    device = torch.device("cpu")
    found = linear_choice.choose_linears(config, shape, 32, device).linear_fqns
    assert (found or "").split(",")[0] == (chooses or "")
    assert (found is None) == (chooses is None)
    assert linear_choice.choose_linears(TrainConfig(), shape, 31, device).linear_fqns == "", "fewer tokens than were measured"


def test_an_unknown_layer_to_skip() -> None:
    with pytest.raises(ValueError, match=r"--linear-skip: 'wqq' matched no torch.nn.Linear, saw .*; give whole parts"):
        linear_choice.choose_linears(TrainConfig(linear_skip="wqq"), resolve_model("qwen3_debug_cpu"), 32, torch.device("cpu"))


def test_linear_options_that_change_nothing_are_reported() -> None:
    config = TrainConfig(recipe="bf16", linear_fqns="attention,typo", linear_skip="nonsense")
    (line,) = linear_choice.describe_linears(nn.Linear(4, 4), config)
    assert line == "dense linear layers in high precision: --linear-fqns and --linear-skip change nothing"
    assert linear_choice.describe_linears(nn.Linear(4, 4), TrainConfig(recipe="bf16")) == []


def described(rank: int, world: int, out: str, data: str, schedule: str) -> list[str]:
    only = {"mx_fqns": "layers.3", "linear_fqns": "layers.3.attention.wo", "pp_schedule": schedule, "print_model": True}
    return trainer(rank, world, out, data=(data,), pp=2, batch=4, steps=1, **only).describe()


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("Interleaved1F1B", 4)])
def test_a_pipeline_describes_the_layers_of_all_stages(tmp_path: Path, text: str, schedule: str, stages: int) -> None:
    """Not only those of rank 0, which prints the lines."""
    for lines in run_ranks(described, 2, str(tmp_path), text, schedule):
        assert "recipe mxfp8_wgrad_with_hp in 1 of 3 layers," in lines[0]
        assert f"FSDP2 over the ranks of each stage, {stages} stages of layers over 2 (PP, {schedule})" in lines[1]
        (linears,) = (line for line in lines if line.startswith("dense linear layers"))
        assert linears.startswith("dense linear layers in mxfp8_wgrad_with_hp: layers.3.attention.wo; in high precision: ")
        assert "(3): " in lines[-1]
        assert "(output): " in lines[-1]

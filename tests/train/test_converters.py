"""`--converters`: which parts of a model train in MXFP8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mxep.parallel import MXLinear
from mxep.recipe import Recipe
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.metrics import read_metrics
from mxep.train.option_parser import read_options
from mxep.train.trainer import Trainer

BOTH = "quantize.grouped_mm.mx,quantize.linear.mx"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(out: Path, *words: str) -> tuple[Trainer, list[float]]:
    """A run of three steps, and its losses."""
    small = ["--device", "cpu", "--batch", "2", "--seq-len", "16", "--eval-tokens", "32", "--steps", "3", "--data", json.__file__]
    config: TrainConfig = read_options([*small, *words])
    trainer = Trainer(config, Ranks(0, 1, torch.device("cpu")), out)
    assert trainer.train()
    return trainer, [record["loss"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "step"]


def recipes(trainer: Trainer) -> tuple[set[str], set[str]]:
    """Of the experts, and of the dense layers in MXFP8."""
    experts = {moe.experts.recipe for moe in trainer.model.moe_layers()}
    dense = [module for module in trainer.model.modules() if isinstance(module, MXLinear)]
    assert all(isinstance(recipe, Recipe) for recipe in experts)
    return {recipe.name for recipe in experts}, {layer.recipe.name for layer in dense}


def test_dense_layers_train_in_mxfp8(tmp_path: Path) -> None:
    skip = ["--quantize.linear.mx.filter-fqns", "wkv_a"]  # 80 columns
    _, plain = trained(tmp_path / "bf16", "--recipe", "bf16", "--converters", BOTH, *skip)
    words = ["--converters", BOTH, *skip, "--linear-recipe", "mxfp8_wgrad_with_mx", "--cache-weights"]
    trainer, losses = trained(tmp_path / "both", *words)
    assert recipes(trainer) == ({"mxfp8_wgrad_with_hp"}, {"mxfp8_wgrad_with_mx"})
    assert any("24 dense linear layers in mxfp8_wgrad_with_mx" in line for line in trainer.describe())  # 4 layers: 3 of attention, 3 of FFN
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
    config = TrainConfig(device="cpu", converters=BOTH, data=(json.__file__,))
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.wkv_a: a weight \(80, 128\), want multiples of 32"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), tmp_path)

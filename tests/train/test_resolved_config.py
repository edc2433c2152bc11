"""The model that a run trains: with YaRN or without, from a preset, from a folder, and from a run's saved options."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.steps import trainer

from mxep.cli import main
from mxep.models.huggingface import published_config
from mxep.models.presets import LEGACY_MODELS, MODELS, TRAIN_DEFAULTS, DeepSeekV3Config
from mxep.train.config import TrainConfig, load_config, save_config
from mxep.train.describe import describe_model
from mxep.train.option_parser import read_options
from mxep.train.resolved_config import keep_model, resolve
from mxep.train.trainer import Trainer


def folder(path: Path, model: str, **changes: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**published_config(MODELS[model]), **changes}))
    return path


def shape_of(**options: Any) -> DeepSeekV3Config:
    shape = resolve(TrainConfig(**options), "cpu", 1).shape
    assert isinstance(shape, DeepSeekV3Config)
    return shape


@pytest.mark.parametrize("model", ["dsv3_16b", "dsv3_671b", "dsv3_debug"])
def test_random_weights_have_yarn_beyond_the_original_length_alone(model: str) -> None:
    published = MODELS[model]
    assert isinstance(published, DeepSeekV3Config)
    for seq_len in (128, 4096):
        assert shape_of(model=model, seq_len=seq_len) == dataclasses.replace(published, yarn=None, max_seq_len=4096)
    assert shape_of(model=model, seq_len=4097) == shape_of(model=model, seq_len=512, yarn="on") == published
    assert shape_of(model=model, seq_len=8192, yarn="off") == dataclasses.replace(published, yarn=None, max_seq_len=8192)
    lines = [describe_model(resolve(TrainConfig(model=model, seq_len=8192, yarn=yarn), "cpu", 1))[0] for yarn in ("on", "off")]
    assert lines[0] == "YaRN extends a context of 4,096 tokens 40 times"
    assert lines[1] == "without YaRN, which would extend a context of 4,096 tokens 40 times, though sequences are longer: 8,192 tokens"


@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "dsv3_small"])
def test_a_model_without_yarn(model: str) -> None:
    assert resolve(TrainConfig(model=model, yarn="off"), "cpu", 1).shape == MODELS[model]
    with pytest.raises(ValueError, match=f"--yarn=on, but {model} has no YaRN"):
        resolve(TrainConfig(model=model, yarn="on"), "cpu", 1)


def test_published_weights_have_the_yarn_of_their_folder(tmp_path: Path) -> None:
    """At any length, as transformers does; its own factors, with --model and without."""
    other = {"type": "yarn", "factor": 8, "mscale": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 4096}
    with_yarn = folder(tmp_path / "with", "dsv3_16b", rope_scaling=other, max_position_embeddings=32768)
    without = folder(tmp_path / "without", "dsv3_16b", rope_scaling=None, max_position_embeddings=4096)
    for options in ({"init_from": with_yarn}, {"init_from": with_yarn, "model": "dsv3_16b"}):
        shape = shape_of(**options, seq_len=512)
        assert shape.yarn is not None
        assert (shape.yarn.factor, shape.yarn.mscale, shape_of(**options, seq_len=512, yarn="off").yarn) == (8, 1, None)
    assert shape_of(init_from=with_yarn, seq_len=30000).max_seq_len == 32768
    extended = {"init_from": without, "model": "dsv3_16b", "seq_len": 8192}
    assert shape_of(**extended).yarn is None
    assert shape_of(**extended, yarn="on").yarn == MODELS["dsv3_16b"].yarn  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="--yarn=on, but without has no YaRN"):
        shape_of(init_from=without, yarn="on")
    with pytest.raises(ValueError, match="describes another model: vocab_size is"):
        shape_of(init_from=without, model="dsv3_debug")
    with pytest.raises(ValueError, match="is a file, want a Hugging Face folder"):
        shape_of(init_from=without / "config.json")
    with pytest.raises(ValueError, match=r"--layers=2 with --init-from=.*, whose weights are of all its layers; leave --layers out"):
        shape_of(init_from=without, layers=2)
    part = folder(tmp_path / "part", "dsv3_16b", num_hidden_layers=2)  # as `mxep convert` writes it
    assert shape_of(init_from=part, model="dsv3_16b", layers=2).num_layers == 2


def test_a_model_of_a_folder_trains_as_the_nearest_preset(tmp_path: Path) -> None:
    path = folder(tmp_path / "mine", "qwen3_debug", num_hidden_layers=5, num_nextn_predict_layers=1)
    for named in (path, path / "config.json"):
        settings = resolve(TrainConfig(model=str(named)), "cpu", 2)
        assert dataclasses.replace(settings.shape, num_layers=6) == MODELS["qwen3_debug"] or settings.shape.init_std == 0.02
        defaults = TRAIN_DEFAULTS["qwen3_debug"]
        assert (settings.model, settings.batch, settings.seq_len, settings.lr) == ("mine", defaults.batch, defaults.seq_len, defaults.lr)
        assert (settings.defaults_of, settings.ep) == ("qwen3_debug", 2)
        said = describe_model(settings)
        assert "multi-token prediction is left out" in said[0]
        assert "those of qwen3_debug" in said[1]
    assert resolve(TrainConfig(model=str(path), layers=2), "cpu", 1).model == "mine_of_2_layers"
    short = folder(tmp_path / "short", "qwen3_debug", max_position_embeddings=64)
    assert resolve(TrainConfig(model=str(short)), "cpu", 1).seq_len == 64
    with pytest.raises(ValueError, match="--seq-len=65, want at most short's max_seq_len=64"):
        resolve(TrainConfig(model=str(short), seq_len=65), "cpu", 1)


def test_an_older_run_resumes_unchanged(tmp_path: Path) -> None:
    """Its settings name no shape: YaRN at 4096 tokens, torchtitan's expert bias."""
    config = TrainConfig(model="dsv3_16b", layers=8, seq_len=4096)
    values = {name: value for name, value in config.to_json().items() if name not in ("shape", "yarn")}
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = resolve(load_config(tmp_path), "cpu", 1)
    assert (settings.model, settings.yarn) == ("dsv3_16b_of_8_layers", True)
    assert settings.shape == dataclasses.replace(LEGACY_MODELS["dsv3_16b"], num_layers=8)
    again = keep_model(load_config(tmp_path), settings)
    assert resolve(again, "cpu", 1).shape == settings.shape
    (tmp_path / "config.json").write_text(json.dumps({**values, "model": "qwen3_debug", "layers": None}))
    assert resolve(load_config(tmp_path), "cpu", 1).shape == MODELS["qwen3_debug"]


def test_resuming_keeps_the_model(tmp_path: Path) -> None:
    """Even if the folder has changed; another --model is resolved, and YaRN stays as the run decided unless it is given."""
    path, out = folder(tmp_path / "mine", "dsv3_16b"), tmp_path / "run"
    (out / "checkpoints" / "step_00000003").mkdir(parents=True)
    began = resolve(config := TrainConfig(model=str(path), seq_len=4096), "cpu", 1)
    save_config(keep_model(config, began), out)
    shutil.rmtree(path)
    for argv in ([], ["--model", str(path)]):
        config = read_options(["--resume", "--out", str(out), *argv])
        assert resolve(config, "cpu", 1).shape == began.shape
        assert config.yarn == "off"
    longer = ["--resume", "--out", str(out), "--seq-len", "8192"]
    assert resolve(read_options(longer), "cpu", 1).shape.max_seq_len == 8192
    extended = resolve(read_options([*longer, "--yarn", "on"]), "cpu", 1)
    assert extended.yarn
    assert extended.shape == began.choice.shape
    assert resolve(read_options(["--resume", "--out", str(out), "--model", "qwen3_debug"]), "cpu", 1).shape == MODELS["qwen3_debug"]
    with pytest.raises(ValueError, match="'gone' is unknown"):
        resolve(read_options(["--resume", "--out", str(out), "--model", "gone"]), "cpu", 1)
    for damage in ({"name": "mine"}, {"name": "mine", "class": "DeepSeekV3Config", "dim": "wide"}, {"class": "DeepSeekV3Config"}):
        values = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**values, "shape": damage}))
        with pytest.raises(ValueError, match="saved shape"):
            resolve(read_options(["--resume", "--out", str(out)]), "cpu", 1)


def test_a_run_of_a_folder_resumes_without_it(tmp_path: Path, one_rank: None) -> None:
    """It refuses another shape or another YaRN, by name."""
    text = tmp_path / "text.txt"
    text.write_text(Path(json.__file__).read_text() * 3)
    path = folder(tmp_path / "mine", "dsv3_debug", num_hidden_layers=2)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(Path(dataclasses.__file__).read_text())
    small = {"batch": 1, "steps": 3, "data": (str(text),), "validation_data": (str(held_out),)}
    began = trainer(0, 1, str(tmp_path / "run"), **small, model=str(path), stop_after=1)
    assert not began.train()
    kept = load_config(tmp_path / "run")
    shutil.rmtree(path)
    resumed = Trainer(dataclasses.replace(kept, resume=True), began.ranks, tmp_path / "run")
    assert (resumed.step_count, resumed.shape) == (1, began.shape)
    with pytest.raises(ValueError, match="yarn was off, is on; give the options"):
        Trainer(dataclasses.replace(kept, resume=True, yarn="on"), began.ranks, tmp_path / "run")
    folder(path, "dsv3_debug", num_hidden_layers=2, moe_intermediate_size=128, initializer_range=0.5)
    with pytest.raises(ValueError, match=r"cannot be resumed exactly: shape\.expert_hidden was 256, is 128; give"):
        trainer(0, 1, str(tmp_path / "run"), **small, model=str(path), resume=True)


def test_explain_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = folder(tmp_path / "mine", "dsv3_16b")
    assert main(["explain", "--model=~/mine"]) == 0
    assert "mine: 15.7" in capsys.readouterr().out
    assert main(["explain", "--model", str(path), "--layers", "8"]) == 0
    assert "mine_of_8_layers: 4.59 billion parameters" in capsys.readouterr().out
    (path / "config.json").write_text(json.dumps({**published_config(MODELS["dsv3_16b"]), "hidden_act": "gelu"}))
    assert main(["explain", "--model", str(path)]) == 2
    assert "hidden_act is 'gelu'" in capsys.readouterr().err.replace("\n", " ")


def of_another_machine(rank: int, world: int, path: str) -> str:
    with pytest.raises(ValueError) as error:
        trainer(rank, world, f"{path}/run", model=f"{path}/{rank}/mine")
    return str(error.value)


def test_machines_with_different_files_are_reported(tmp_path: Path) -> None:
    for rank, hidden in enumerate((256, 128)):
        folder(tmp_path / str(rank) / "mine", "dsv3_debug", num_hidden_layers=2, moe_intermediate_size=hidden)
    said = run_ranks(of_another_machine, 2, str(tmp_path))
    assert said == ["model: ranks 0 and 1 read different shapes; give every machine the same files"] * 2

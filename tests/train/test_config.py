"""Options: defaults, checks, saving and loading, errors before a rank is started."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mxep.cli import COMMANDS, main
from mxep.models.presets import MODELS, TRAIN_DEFAULTS
from mxep.train.config import ROUTER_OPTIONS, TrainConfig, load_config, save_config
from mxep.train.option_parser import read_options
from mxep.train.resolved_config import resolve, routed_as_asked
from mxep.train.run_folder import choose_run_folder, list_checkpoints, locked_run_folder, newest_run


def test_settle_fills_open_options() -> None:
    settings = resolve(TrainConfig(), "cpu", 2)
    assert settings.model == "dsv3_debug_cpu"
    assert settings.steps == TRAIN_DEFAULTS["dsv3_debug_cpu"].steps
    assert settings.ep == 2
    assert resolve(TrainConfig(), "cuda", 8).model == "dsv3_debug"
    assert resolve(TrainConfig(), "cuda", 12).ep == 4  # the largest that divides 12 ranks and 8 experts
    assert resolve(TrainConfig(warmup=0, steps=3), "cpu", 1).warmup == 0
    every = [resolve(TrainConfig(steps=steps), "cpu", 1).checkpoint_every for steps in (1, 4, 11, 1000, 100_000)]
    assert every == [1, 1, 2, 100, 500], "a kill may cost a tenth of the run, 500 steps at most"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt"}, "'gpt' is unknown"),
        ({"ep": 3}, "--ep=3 does not divide the 4 ranks"),
        ({"seq_len": 10**6}, "--seq-len=1000000, want at most"),
    ],
)
def test_settle_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(TrainConfig(**options), "cpu", 4)


@pytest.mark.parametrize("options", [{"steps": 0}, {"lr": -1.0}, {"lr": float("nan")}, {"warmup": -1}, {"lr_floor": 2.0}, {"keep": 0}])
def test_bad_values(options: dict) -> None:
    with pytest.raises(ValueError, match="--" + next(iter(options)).replace("_", "-")):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": math.inf}, "--max-grad-norm=inf, want a finite number; 0 disables clipping"),
        ({"lr": math.inf}, "--lr = inf, want a finite number of 64 bits"),
        ({"held_out_share": math.nan}, "--held-out-share = nan, want a finite number"),
        ({"seed": 2**63}, "--seed = 9223372036854775808, want a whole number of 64 bits"),
        ({"data": ("caf\udce9",)}, r"--data = \['caf\\udce9'\], want text in UTF-8; give the file another name"),
        ({"out": Path("caf\udce9")}, r"--out = 'caf\\udce9', want text in UTF-8"),
    ],
)
def test_values_that_no_file_can_hold_are_refused(options: dict, message: str) -> None:
    """A run that trained with them could not be resumed."""
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


DAMAGED = {
    "{": "is not JSON",
    "[]": "is a list, want an object",
    '{"a": ' + "[" * 100_000: "too deeply nested",
    '{"unheard_of": 1}': "unknown unheard_of; written by another version of mxep",
    '{"steps": "7"}': "steps = '7', want a whole number",
    '{"steps": {"a": [1]}}': r"steps = \{'a': \[1\]\}, want a whole number",
    '{"steps": 1e400}': "1e400 is beyond float64",
    '{"seed": 100000000000000000000}': "seed = 100000000000000000000, want a whole number of 64 bits",
    '{"steps": -1}': "--steps=-1, want more than 0",
    '{"lr": [1]}': r"lr = \[1\], want a finite number",
    '{"data": null}': "data = None, want a list of strings",
    '{"data": [["a"]]}': "data = .*, want a list of strings",
    '{"converters": 3}': "converters = 3, want a string",
    '{"model": 3}': "model = 3, want a string",
    '{"compile": "no"}': "compile = 'no', want true or false",
    '{"device": "tpu"}': "device = 'tpu', want 'auto', 'cpu' or 'cuda'",
    '{"resume": "sometimes"}': "resume = 'sometimes', want true, false or 'auto'",
    r'{"out": "a\u0000b"}': "want a path",
}


def test_saved_options_are_loaded(tmp_path: Path) -> None:
    config = TrainConfig(data=("a", "b"), out=tmp_path, steps=7, resume=True, stop_after=3)
    save_config(config, tmp_path)
    assert load_config(tmp_path) == dataclasses.replace(config, resume=False, stop_after=None)
    for content, message in DAMAGED.items():
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            load_config(tmp_path)
        assert str(tmp_path / "config.json") in str(error.value)
    with pytest.raises(ValueError, match="no run in"):
        load_config(tmp_path / "nowhere")


def test_resume_takes_the_settings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("first", "second")):
        out = Path("runs") / name
        (out / "checkpoints" / "step_00000003").mkdir(parents=True)
        save_config(TrainConfig(steps=number + 5, lr=0.5, data=("x.txt",)), out)
        time.sleep(0.01)
    assert newest_run().name == "second"
    config = read_options(["--resume"])
    assert (config.steps, config.lr, config.data, config.resume) == (6, 0.5, ("x.txt",), True)
    assert config.out == Path("runs/second")
    config = read_options(["--resume", "--out", "runs/first", "--lr", "0.25"])
    assert (config.steps, config.lr) == (5, 0.25)
    arm = Path("runs/both/bf16")
    (arm / "checkpoints" / "step_00000003").mkdir(parents=True)
    save_config(TrainConfig(steps=7), arm)
    assert read_options(["--resume"]).out == arm, "of an interrupted --compare"


def test_the_fused_experts_are_switched_off_and_on_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_options([]).fused_experts
    config = read_options(["--no-fused-experts", "--out", "runs/a"])
    assert not config.fused_experts
    (Path("runs/a") / "checkpoints" / "step_00000003").mkdir(parents=True)
    save_config(config, Path("runs/a"))
    assert not read_options(["--resume"]).fused_experts
    assert read_options(["--resume", "--fused-experts"]).fused_experts
    with pytest.raises(SystemExit):
        read_options(["--help"])
    assert "--no-fused-experts" in capsys.readouterr().out


def test_choice_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(recipe="bf16")
    assert choose_run_folder(config, "m") == Path("runs/m-bf16")
    Path("runs/m-bf16").mkdir(parents=True)
    assert choose_run_folder(config, "m") == Path("runs/m-bf16-2")
    Path("runs/m-bf16/checkpoints/step_00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run already; resume it with --resume"):
        choose_run_folder(dataclasses.replace(config, out=Path("runs/m-bf16")), "m")


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/run"):
        with pytest.raises(ValueError, match=r"--out=.*file.*, but .*file is a file; choose another --out"):
            choose_run_folder(TrainConfig(out=tmp_path / out), "m")
    assert choose_run_folder(TrainConfig(out=tmp_path / "not" / "yet"), "m") == tmp_path / "not" / "yet"


@pytest.mark.parametrize("out", ["/proc/run", "long/" + "a" * 300])
def test_a_folder_that_the_system_refuses(out: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^train: the folder .* cannot be made: .*; name another folder with --out$"):
        locked_run_folder(TrainConfig(out=tmp_path / out), "m").__enter__()


@pytest.mark.parametrize("out", ["runs/mine", None])
def test_a_folder_that_cannot_be_written(out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before any text is read; root may write anywhere, so the system's answer is stubbed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).resolve() != tmp_path.resolve())
    with pytest.raises(ValueError, match=r"train: nothing can be written in .*, where .*runs/m.* would be; name another folder with --out"):
        choose_run_folder(TrainConfig(recipe="bf16", out=None if out is None else tmp_path / out), "m")
    Path("runs").mkdir()
    choose_run_folder(TrainConfig(recipe="bf16", out=None if out is None else tmp_path / out), "m")


def test_runs_that_start_together_take_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run takes our folder between the check and its creation; a named folder belongs to the run that named it."""
    monkeypatch.chdir(tmp_path)
    config, mkdir = TrainConfig(recipe="bf16"), Path.mkdir

    def beaten(path: Path, *args: object, **kwargs: object) -> None:
        monkeypatch.setattr(Path, "mkdir", mkdir)
        path.mkdir(parents=True)
        mkdir(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", beaten)
    with (
        locked_run_folder(config, "m") as first,
        locked_run_folder(config, "m") as second,
        locked_run_folder(TrainConfig(out=Path("mine")), "m") as mine,
    ):
        assert [lock.out for lock in (first, second, mine)] == [Path("runs/m-bf16-2"), Path("runs/m-bf16-3"), Path("mine")]
        (first.out / "config.json").touch()
    assert sorted(str(path) for path in Path().rglob("*")) == ["runs", "runs/m-bf16", "runs/m-bf16-2", "runs/m-bf16-2/config.json"]
    Path("mine").mkdir()
    with locked_run_folder(TrainConfig(out=Path("mine")), "m"):
        pass
    assert Path("mine").exists(), "it was there before"


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    ours = ("step_00000007", "step_123456789")
    for name in ("step_\u00b2", "step_\u0663", "step_7", "step_0000000x", "step_000000007", "step_-0000007", *ours):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000008").touch()
    assert [path.name for path in list_checkpoints(tmp_path)] == [*ours]


WRONG = {
    "unknown recipe": (["--recipe", "fp4"], "recipe: 'fp4' is unknown"),
    "unknown model": (["--model", "gpt"], "model: 'gpt' is unknown, want one of dsv3_debug_cpu, "),
    "no such folder": (["--init-from", "gone"], "--init-from=gone does not exist, want a Hugging Face folder with its config.json"),
    "no such tokenizer": (["--tokenizer", "gone"], "tokenizer: gone does not exist, want a tokenizer.json or its folder; without"),
    "ep": (["--ep", "3", "--nproc", "4"], "--ep=3 does not divide the 4 ranks; choose a divisor"),
    "no such data": (["--data", "nowhere.txt"], "data: nowhere.txt does not exist, want a file, a folder, or a pattern"),
    "no such pattern": (["--data", "*.txt"], "data: *.txt matches no file, want a file"),
    "no such option": (["--learning-rate", "1"], "there is no option --learning-rate; `mxep train --help` lists all options"),
    "nothing to resume": (["--resume"], "resume: no checkpoint found under runs/"),
    "nothing to resume there": (["--resume", "--out", "elsewhere"], "resume: no checkpoint found in elsewhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_an_error_before_anything_starts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    argv, message = WRONG[name]
    assert main(["train", "--device", "cpu", *argv]) == 2
    assert f"mxep train: error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_machines_own_ranks_report_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Under torchrun, where rank 0 is on another machine and has no error."""
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "--config", "nowhere.toml"]) == 2
    assert capsys.readouterr().err == "mxep train: error: --config: nowhere.toml does not exist, want a TOML file of options (rank 3)\n"


def test_a_gpu_asked_for_without_one(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["train", "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU here; use --device cpu" in capsys.readouterr().err


def test_command_line(capsys) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_help_is_quick() -> None:
    program = "import sys; from mxep.cli import main; main(['--help']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False"


def test_unset_options_are_json() -> None:
    assert TrainConfig.from_json(json.loads(json.dumps(TrainConfig().to_json()))) == TrainConfig()


def test_options_of_the_router_go_before_the_preset() -> None:
    """By our names, Megatron's and transformers'; without any, the product is in float32."""
    shape = MODELS["qwen3_debug_cpu"]
    assert routed_as_asked(shape, TrainConfig()) == shape
    assert shape.router_dtype == "fp32"
    given = {"router_dtype": "bf16", "balance_loss": 0.5, "balance_loss_type": "global_aux_loss", "z_loss": 0.25, "bias_update_rate": 0.0}
    names = (
        "moe-router-dtype",
        "router-aux-loss-coef",
        "moe-router-load-balancing-type",
        "moe-z-loss-coeff",
        "moe-router-bias-update-rate",
    )
    for flags in (given, dict(zip(names, given.values(), strict=True))):
        config = read_options([word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))])
        assert routed_as_asked(shape, config) == dataclasses.replace(shape, **given)  # type: ignore[arg-type]
    for name in ("balance_loss", "z_loss", "bias_update_rate"):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}=-1.0, want 0 or more"):
            TrainConfig(**{name: -1.0})
    with pytest.raises(ValueError, match="balance_loss_type='seq_aux_loss', want 'aux_loss' or 'global_aux_loss'"):
        dataclasses.replace(shape, balance_loss_type="seq_aux_loss")  # type: ignore[arg-type]


def test_published_weights_route_in_their_librarys_precision() -> None:
    start = TrainConfig(init_from=Path("folder"))
    assert routed_as_asked(MODELS["qwen3_debug"], start).router_dtype == "bf16"
    assert {routed_as_asked(MODELS[name], start).router_dtype for name in ("dsv3_16b", "dsv3_671b")} == {"fp32"}
    assert routed_as_asked(MODELS["qwen3_debug"], dataclasses.replace(start, router_dtype="fp32")).router_dtype == "fp32"


def test_an_older_run_resumes_with_its_own_router() -> None:
    values = TrainConfig().to_json()
    for name in ROUTER_OPTIONS:
        del values[name]
    config = TrainConfig.from_json(values)
    assert routed_as_asked(MODELS["qwen3_debug"], config) == dataclasses.replace(MODELS["qwen3_debug"], router_dtype="bf16")
    assert TrainConfig.from_json(TrainConfig().to_json()).router_dtype is None

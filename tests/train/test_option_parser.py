"""Options under all of their names, on the command line and in TOML; unknown options are named with the nearest known one."""

from __future__ import annotations

import dataclasses
import errno
import re
from pathlib import Path
from typing import Any

import pytest
from tests.pages import ROOT

from mxep.models.presets import FLAVORS, MODELS, TRAIN_DEFAULTS
from mxep.train import rank_launcher
from mxep.train.config import TrainConfig, option_names, save_config
from mxep.train.describe import describe_mapped, describe_router, describe_schedule
from mxep.train.optimizer import Schedule
from mxep.train.option_parser import TORCHTITAN_ONLY, read_options, read_toml
from mxep.train.rank_launcher import command, plan_ranks
from mxep.train.resolved_config import chosen_model, never_used, resolve, routed_as_asked

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_both_names_and_both_spellings() -> None:
    want = TrainConfig(steps=7, batch=16, seq_len=8192, force_balance=True, log_every=3, ep=4)
    ours = ["--steps", "7", "--batch=16", "--seq-len", "8192", "--force-balance", "--log-every", "3", "--ep", "4"]
    theirs = ["--training.steps=7", "--training.local_batch_size=16", "--training.seq_len", "8192", "--debug.moe_force_load_balance"]
    theirs += ["--metrics.log_freq=3", "--parallelism.expert_parallel_degree=4"]
    assert read_options(ours) == read_options(theirs) == read_options([word.replace("_", "-") for word in theirs]) == want


@pytest.mark.parametrize(
    ("argv", "want"),
    [
        (["--data", "a", "b"], ("a", "b")),
        (["--data", "a", "--data", "b"], ("a", "b")),
        (["--data=a", "--steps", "3", "--training.dataset_path", "b", "c"], ("a", "b", "c")),
        (["--data", "a,b", "--data", "c"], ("a,b", "c")),  # a comma is part of a file's name
    ],
)
def test_a_list_option_keeps_the_values_of_all_its_occurrences(argv: list[str], want: tuple[str, ...]) -> None:
    assert read_options(argv).data == want


def test_repeated_lists_with_commas_defaults_and_config_files(tmp_path: Path) -> None:
    config = read_options(["--mx-fqns", "layers.1", "--linear-skip=wq", "--quantize.grouped_mm.mx.fqns", "layers.2,layers.3"])
    assert (config.mx_fqns, config.linear_skip) == ("layers.1,layers.2,layers.3", "wq")
    file = ["--config", str(toml(tmp_path, 'data = ["a", "b"]\nmx-fqns = ["x", "y"]\n[validation]\ndataset_path = "v"\n'))]
    assert (read_options(file).data, read_options(file).mx_fqns, read_options(file).validation_data) == (("a", "b"), "x,y", ("v",))
    assert read_options([*file, "--data", "c", "--data", "d"]).data == ("c", "d")  # the command line overrides the file
    assert read_options(["--steps", "3", "--steps", "4"]).steps == 4


def test_no_name_belongs_to_two_options() -> None:
    names = option_names()
    assert set(names.values()) == {field.name for field in dataclasses.fields(TrainConfig)} - {"shape"}  # kept by a run, never given
    for argv in (["--shape", "{}"], ["--shape={}"]):
        with pytest.raises(ValueError, match="there is no option --shape"):
            read_options(argv)
    assert len([name for name in names if "." in name]) >= 30


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--training.local_batch_sise=3", "--training.local-batch-size"),
        ("--quantize.grouped_mm.mx.fqn=experts", "--quantize.grouped-mm.mx.fqns"),
        ("--parallelism.expert_paralel_degree=2", "--parallelism.expert-parallel-degree"),
        ("--stepz=3", "--steps"),
    ],
)
def test_an_unknown_option_is_an_error_with_the_nearest(option: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([option]) == 2
    assert capsys.readouterr().err == f"mxep train: error: there is no option {option.split('=')[0]}; the nearest is {near}\n"


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_toml_by_either_name_and_the_command_line_before_it(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        'lr = 1\nseq-len = 64\ndata = ["a", "b"]\nfused_experts = false\n[training]\nsteps = 9\n[debug]\nmoe_force_load_balance = true\n'
        '[quantize.grouped_mm.mx]\nfqns = ["layers.1", "layers.2"]\n[activation_checkpoint]\nmode = "none"\n[job]\ndump_folder = "x"\n',
    )
    config = read_options(["--config", str(path), "--seq-len", "32"])
    assert (config.lr, config.seq_len, config.data, config.steps, config.force_balance) == (1.0, 32, ("a", "b"), 9, True)
    assert (config.mx_fqns, config.fused_experts, config.out) == ("layers.1,layers.2", False, Path("x"))
    assert not read_options([f"--job.config_file={path}", "--no-force-balance"]).force_balance


def test_paths_begin_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    toml(tmp_path, 'model = "~/hf"\ntokenizer = "~/words"\ndata-cache = "~nobody-here/x"')
    config = read_options(["--config=~/run.toml", "--out=~/runs/x", "--init-from", "~/hf"])
    assert (config.out, config.init_from, config.tokenizer) == (tmp_path / "runs/x", tmp_path / "hf", tmp_path / "words")
    assert config.data_cache == Path("~nobody-here/x")
    assert config.model == str(tmp_path / "hf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstep = 3", "there is no option training.step; the nearest is training.steps"),
        ("[model]\nflavour = 'x'", "there is no option model.flavour; the nearest is model.flavor"),
        ("[training]\nsteps = 'many'", "training.steps = 'many', want a whole number"),
        ("[training]\nsteps = true", "training.steps = True, want a whole number"),
        ("[training]\nsteps = 3.5", "training.steps = 3.5, want a whole number"),
        ("[compile]\nenable = 1", "compile.enable = 1, want true or false"),
        ("recipe = 3", "recipe = 3, want a string"),
        ("data = 3", "data = 3, want a list of strings"),
        ("lr = 'x'", "lr = 'x', want a finite number"),
        ("out = 3", "out = 3, want a path"),
        (
            "[activation_checkpoint]\nmode = 'some'",
            "activation_checkpoint.mode = 'some', want 'none', 'keep_moe', 'selective'",
        ),
        ("steps = 3\n[training]\nsteps = 4", "training.steps is given twice, under another name of --steps"),
        ("resume = true", 'resume belongs on the command line (resume = "auto" alone may stand in a file)'),
        ("resume_step = 3", "resume_step belongs on the command line"),
        ("config = 'x'", "config belongs on the command line"),
        ("change = 'data'", "change belongs on the command line"),
        ("steps", "is not TOML"),
        ("a = " + "[" * 100_000, "is not TOML"),
        (".".join("a" * 3000) + " = 1", "is not TOML"),
        ("steps = " + "1" * 5000, "is not TOML"),
        ("lr = " + "1" * 400, "number of 64 bits"),
        ("[[steps]]\na = [1]", "steps = [{'a': [1]}], want a whole number"),
        ("device = [['cpu']]", "want 'auto', 'cpu' or 'cuda'"),
        ("data = [['a']]", "want a list of strings"),
        ("[metrics]\nenable_wandb = true", "metrics.enable_wandb = True, which mxep does not have; want False, or no such key"),
        ("[training]\ndtype = 'float16'", "training.dtype = 'float16', want 'float32' or 'bfloat16'"),
        ("[optimizer]\nname = 'Adam'", "optimizer.name = 'Adam', which mxep does not have; want 'AdamW', or no such key"),
        ("[activation_checkpoint]\nselective_ac_option = '2'", "activation_checkpoint.selective_ac_option = '2', which mxep does not have"),
        ("[profiling]\nprofile_frequency = 10", "there is no option profiling.profile_frequency"),
    ],
)
def test_errors_in_toml(text: str, message: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_toml(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_torchtitans_16b_file_loads() -> None:
    """Its keys are options, or are ignored and listed in the run's first lines."""
    path = Path(__file__).with_name("torchtitan_16b.toml")
    config = read_options(["--config", str(path)])
    settings = resolve(config, "cuda", 8)
    assert (settings.model, settings.ep, settings.batch, settings.seq_len, settings.lr) == ("dsv3_16b", 8, 4, 4096, 2.2e-4)
    assert (config.activation_checkpoint, config.checkpoint, config.decay_ratio) == ("selective", False, 0.8)
    (line,) = (line for line in describe_mapped(config) if "torchtitan" in line)
    assert line.startswith(f"{path} has keys of torchtitan that mean nothing here and are passed over: job.description = '16B', ")
    for text in ("training.dataset = 'c4'", "optimizer.eps = 1e-08", "quantize.grouped_mm.float8.fqns = ['experts']"):
        assert text in line
    assert line.count(" = ") == 23  # every key of the file that is no option
    assert "seq_len" not in line


def test_ignored_keys_are_no_options() -> None:
    assert not set(TORCHTITAN_ONLY) & set(option_names())
    with pytest.raises(ValueError, match=r"there is no option --optimizer\.eps"):
        read_options(["--optimizer.eps=1e-8"])


def test_an_invalid_value_names_its_toml_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--config: .*run\.toml: --steps=-1, want more than 0"):
        read_options(["--config", str(toml(tmp_path, "steps = -1"))])


def test_resume_auto_resumes_if_there_is_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--out", str(out), "--steps", "9"]
    in_file = ["--config", str(toml(tmp_path, 'resume = "auto"'))]
    for auto in (["--resume", "auto"], ["--resume=auto"], in_file):
        assert read_options([*words, *auto]).resume is False
    with pytest.raises(ValueError, match="--resume auto: every start must find the same folder; name it with --out"):
        read_options(["--resume", "auto"])
    (out / "checkpoints" / "step_00000003").mkdir(parents=True)
    save_config(TrainConfig(steps=5, lr=0.5), out)
    for auto in (["--resume", "auto"], ["--resume=auto"], in_file):
        config = read_options([*words, *auto])
        assert (config.resume, config.steps, config.lr) == ("auto", 9, 0.5)
    for alone in (["--resume"], ["--resume", "True"], ["--resume=True"]):
        assert read_options([*alone, *words]).resume is True
        assert read_options([*words, *alone]).resume is True


def test_a_step_to_resume_from(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path)]
    for step in (3, 6):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    save_config(TrainConfig(), tmp_path)
    assert read_options([*words, "--resume", "--resume-step", "3"]).resume_step == 3
    with pytest.raises(ValueError, match=r"--resume-step=4, but .* has no checkpoint of that step, want one of 3, 6"):
        read_options([*words, "--resume", "--resume-step", "4"])
    with pytest.raises(ValueError, match=r"--resume-step=3: give --resume with it$"):
        TrainConfig(resume_step=3)
    with pytest.raises(ValueError, match="--resume-step=3: give --resume with it, not auto"):
        TrainConfig(resume="auto", resume_step=3)
    for last in (2, 3):
        with pytest.raises(ValueError, match=f"--stop-after={last} with --resume-step=3, want a later step: nothing is trained"):
            TrainConfig(resume=True, resume_step=3, stop_after=last)
    assert TrainConfig(resume=True, resume_step=3, stop_after=4).stop_after == 4


def test_a_run_resumes_from_no_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not be loaded; the same folder may be named again, as a scheduler does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    words = ["--resume", "--out", str(tmp_path)]
    save_config(TrainConfig(init_from=Path("hf")), tmp_path)
    for same in ([], ["--init-from", "hf"], ["--init-from", str(tmp_path / "hf")]):
        assert read_options([*words, *same]).init_from in (Path("hf"), tmp_path / "hf")
    with pytest.raises(ValueError, match=r"--init-from=other, but .* began from hf, and resumes from its checkpoint; leave it out"):
        read_options([*words, "--init-from", "other"])
    save_config(TrainConfig(), tmp_path)
    with pytest.raises(ValueError, match=r"--init-from=hf, but .* began from random weights"):
        read_options([*words, "--init-from", "hf"])


def test_options_that_need_each_other_may_come_from_two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TOML file, the command line and the resumed run are each valid together with the others only."""
    monkeypatch.chdir(tmp_path)
    both = {"[quantize.linear.mx]\nfilter_fqns = 'wkv_a'": "converters", "converters = 'quantize.linear.mx'": "linear_skip"}
    given = {"converters": ["--converters", "quantize.linear.mx"], "linear_skip": ["--linear-skip", "wkv_a"]}
    for text, other in both.items():
        config = read_options(["--config", str(toml(tmp_path, text)), *given[other]])
        assert (config.converters, config.linear_skip) == ("quantize.linear.mx", "wkv_a")
    (Path("runs/a") / "checkpoints" / "step_00000003").mkdir(parents=True)
    save_config(TrainConfig(converters="quantize.linear.mx"), Path("runs/a"))
    assert read_options(["--resume", *given["linear_skip"]]).linear_skip == "wkv_a"
    alone = read_options([*given["linear_skip"], "--converters", "quantize.grouped_mm.mx"])
    with pytest.raises(ValueError, match=r"--linear-skip without quantize\.linear\.mx in --converters=quantize\.grouped_mm\.mx"):
        resolve(alone, "cpu", 2)


def test_missing_toml() -> None:
    with pytest.raises(ValueError, match=r"--config: nowhere.toml does not exist"):
        read_options(["--config", "nowhere.toml"])


def test_a_resumed_run_takes_toml_before_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (Path("runs/a") / "checkpoints" / "step_00000003").mkdir(parents=True)
    save_config(TrainConfig(steps=5, lr=0.5, batch=3, config=Path("gone.toml")), Path("runs/a"))
    config = read_options(["--resume", "--config", str(toml(tmp_path, "lr = 0.25\nsteps = 6")), "--steps", "7"])
    assert (config.steps, config.lr, config.batch) == (7, 0.25, 3)
    assert read_options(["--resume"]).lr == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 2}, "--cp=2: there is no context parallelism here"),
        ({"expert_tp": 2}, "--expert-tp=2: routed experts are never split"),
        ({"converters": "float8"}, "--converters=float8, which mxep does not have; want quantize.grouped_mm.mx, quantize.linear.mx"),
        ({"converters": ""}, "experts in bf16 are --recipe bf16"),
        ({"rows_cast_kernel": "cutlass"}, "--rows-cast-kernel=cutlass, want triton, cuda, torch"),
        ({"compile_components": "model,optimizer"}, "--compile-components=optimizer, want model or loss"),
        ({"dp_shard": 0}, "--dp-shard=0, want 1 or more, or -1"),
        ({"tp": 0}, "--tp=0, want more than 0"),
    ],
)
def test_unsupported_values_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        TrainConfig(**options)
    assert message in str(error.value)


def test_degrees_decide_how_many_ranks_start() -> None:
    assert plan_ranks(TrainConfig(device="cpu", dp_shard=4)) == ("cpu", 4)
    assert plan_ranks(TrainConfig(device="cpu", dp_shard=4, nproc=2)) == ("cpu", 2)
    assert plan_ranks(TrainConfig(device="cpu")) == ("cpu", 2)
    assert resolve(TrainConfig(), "cpu", 4).dp_shard == 4
    with pytest.raises(ValueError, match=r"--dp-shard=4 .* their product is not the 2 ranks"):
        resolve(TrainConfig(dp_shard=4), "cpu", 2)


def test_ranks_on_gpus_get_expandable_segments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(rank_launcher.subprocess, "Popen", lambda *arguments, env, **others: started.append(env))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for device in ("cuda", "cpu"):
        rank_launcher._start([], 0, 2, device, tmp_path, 0)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    rank_launcher._start([], 0, 2, "cuda", tmp_path, 0)
    assert [env.get("PYTORCH_ALLOC_CONF") for env in started] == ["expandable_segments:True", None, None]


def test_a_transport_needs_an_ep_degree_above_one() -> None:
    with pytest.raises(ValueError, match="--transport=symmetric with --ep=1, where no token leaves its rank"):
        resolve(TrainConfig(transport="symmetric", ep=1), "cuda", 2)
    assert resolve(TrainConfig(transport="collective", ep=1), "cuda", 2).ep == 1
    assert resolve(TrainConfig(transport="symmetric"), "cuda", 2).ep == 2


def test_presets_by_name_and_flavor() -> None:
    for (name, flavor), preset in FLAVORS.items():
        assert preset in MODELS
        assert resolve(TrainConfig(model_name=name, model_flavor=flavor), "cpu", 1).model == preset
    assert chosen_model(TrainConfig(model="dsv3_16b", model_name="deepseek_v3", model_flavor="16B")) == "dsv3_16b"
    for options in ({"model_name": "deepseek_v3"}, {"model_name": "llama3", "model_flavor": "8B"}):
        with pytest.raises(ValueError, match="want one of deepseek_v3 debugmodel"):
            chosen_model(TrainConfig(**options))
    with pytest.raises(ValueError, match="--model=dsv3_16b, but --model-name=deepseek_v3 --model-flavor=671B is dsv3_671b"):
        chosen_model(TrainConfig(model="dsv3_16b", model_name="deepseek_v3", model_flavor="671B"))


def test_the_command_lines_model_overrides_the_files_by_any_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "checkpoints" / "step_00000003").mkdir(parents=True)
    flavor, preset = "[model]\nname = 'deepseek_v3'\nflavor = '16B'", "model = 'dsv3_16b'"
    for text, words, model in (
        (flavor, ["--model", "qwen3_debug"], "qwen3_debug"),
        (flavor, ["--model-flavor", "671B"], "dsv3_671b"),
        (preset, ["--model.name=deepseek_v3", "--model.flavor=671B"], "dsv3_671b"),
    ):
        file = ["--config", str(toml(tmp_path, text))]
        assert chosen_model(read_options([*file, *words])) == model
        save_config(read_options(file), out)
        assert chosen_model(read_options(["--resume", "--out", str(out), *words])) == model
        save_config(read_options([*file, *words]), out)
        resumed = read_options(["--resume", "--out", str(out), *file])
        assert chosen_model(resumed) == "dsv3_16b"


def test_layers_of_a_preset() -> None:
    for words in (["--layers", "8"], ["--num-layers=8"]):
        config = read_options(["--model.name=deepseek_v3", "--model.flavor=16B", *words])
        settings = resolve(config, "cuda", 2)
        assert (settings.model, settings.seq_len, settings.ep) == ("dsv3_16b_of_8_layers", TRAIN_DEFAULTS["dsv3_16b"].seq_len, 2)
    with pytest.raises(ValueError, match="28 layers of dsv3_16b, want 2 "):
        resolve(TrainConfig(model="dsv3_16b", layers=28), "cuda", 2)
    with pytest.raises(ValueError, match="--layers=0, want more than 0"):
        TrainConfig(layers=0)


def test_kernel_choices_are_printed_as_what_they_map_to() -> None:
    lines = describe_mapped(TrainConfig(rows_cast_kernel="triton", columns_cast_kernel="cuda"))
    assert [line.split(" changes nothing")[0] for line in lines] == ["--rows-cast-kernel=triton", "--columns-cast-kernel=cuda"]
    assert "1x32, along rows, is a Triton kernel on GPUs" in lines[0]
    assert "32x1, along columns, is CUDA C++ on Hopper" in lines[1]
    assert describe_mapped(TrainConfig()) == []


@pytest.mark.parametrize(
    ("given", "with_effect"),
    [
        ({"pp_schedule": "Interleaved1F1B"}, {"pp": 2}),
        ({"microbatch": 2}, {"pp": 2}),
        ({"profile_steps": 5}, {"profile_step": 3}),
        ({"profile_host": False}, {"profile_step": 3}),
        ({"compile_backend": "eager"}, {"compile": True}),
        ({"eval_every": 5, "evaluate": False}, {"evaluate": True}),
        ({"eval_tokens": 512, "evaluate": False}, {"evaluate": True}),
        ({"checkpoint_every": 5, "checkpoint": False}, {"checkpoint": True}),
        ({"keep": 5, "checkpoint": False}, {"checkpoint": True}),
        ({"async_checkpoint": "disabled", "checkpoint": False}, {"checkpoint": True}),
        ({"held_out_share": 0.4, "validation_data": ("a",)}, {"validation_data": ()}),
        ({"decay_type": "sqrt", "decay_ratio": 0.0}, {"decay_ratio": 0.1}),
        ({"lr_floor": 0.5, "decay_ratio": 0.0}, {"decay_ratio": None}),
        ({"numerics_every": 9, "recipe": "bf16"}, {"recipe": "mxfp8"}),
        ({"numerics_every": 9, "converters": "quantize.linear.mx"}, {"converters": "quantize.grouped_mm.mx"}),
        ({"compile_components": "model"}, {"compile": True}),
        ({"cache_weights": True, "recipe": "bf16"}, {"recipe": "mxfp8"}),
        ({"cache_weights": True, "recipe": "bf16"}, {"linear_recipe": "mxfp8"}),
        ({"cache_weights": True, "recipe": "bf16"}, {"output_recipe": "mxfp8"}),
        ({"fused_experts": False, "fused_layer": True}, {"fused_layer": False}),
    ],
)
def test_an_option_without_effect_is_named(given: dict[str, object], with_effect: dict[str, object]) -> None:
    name = f"--{next(iter(given)).replace('_', '-')}="
    (line,) = describe_mapped(TrainConfig(**given))  # type: ignore[arg-type]
    assert line.startswith(name)
    assert "changes nothing" in line
    assert not any(name in line for line in describe_mapped(TrainConfig(**given | with_effect)))  # type: ignore[arg-type]


def test_what_is_said_about_a_default_names_the_option_that_changes_it() -> None:
    """--fused-layer is the default, which nobody gives, but for a resumed run of separate blocks."""
    (line,) = describe_mapped(TrainConfig(fused_experts=False))
    assert line.endswith("where MoE layers are one function, experts included; give --no-fused-layer for separate blocks")
    for options, device in (({"keep_first_product": "mxfp8"}, "cpu"), ({"cuda_graph": True}, "cuda")):
        for resume, way in ((False, "leave that out"), (True, "give --fused-layer")):
            with pytest.raises(ValueError, match=f"with --no-fused-layer.*; {way}"):
                resolve(TrainConfig(**options, fused_layer=False, resume=resume), device, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "used", "message"),
    [
        ({"profile_step": 9, "steps": 8}, {"steps": 9}, "--profile-step=9, want at most 8, the last step of this start"),
        ({"profile_step": 121}, {"profile_step": 120}, "--profile-step=121, want at most 120"),
        ({"profile_step": 9, "stop_after": 8}, {"stop_after": 9}, "--profile-step=9, want at most 8"),
        ({"numerics_every": 9, "steps": 8}, {"steps": 9}, "--numerics-every=9, want at most the 8 steps of the run"),
        ({"eval_tokens": 127}, {"eval_tokens": 128}, r"--eval-tokens=127, want at least the 128 tokens of a sequence \(--seq-len\)"),
        ({"eval_tokens": 127}, {"evaluate": False}, "--eval-tokens=127"),
        ({"balance_loss_type": "global_aux_loss"}, {"balance_loss": 0.1}, "--balance-loss-type=global_aux_loss without a balance loss"),
        ({"balance_loss_type": "global_aux_loss"}, {"balance_loss_type": "aux_loss"}, "want a --balance-loss above 0"),
    ],
)
def test_options_that_a_run_never_uses_are_refused(given: dict[str, Any], used: dict[str, Any], message: str) -> None:
    """Saved by a resumed run it is printed instead; only the trace is asked for at each start."""
    with pytest.raises(ValueError, match=message):
        resolve(TrainConfig(**given), "cpu", 1)
    resolve(TrainConfig(**given | used), "cpu", 1)
    if "profile_step" not in given:
        s = resolve(config := TrainConfig(**given, resume=True), "cpu", 1)
        (line,) = never_used(config, s.choice.shape, s.steps, s.seq_len)
        assert re.search(message, line)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_of_the_repository(path: Path) -> None:
    config = read_options(["--config", str(path)])
    assert chosen_model(config) in MODELS
    assert resolve(config, "cuda", config.ep or 8).model == chosen_model(config)


def test_notes_of_an_error_are_shown() -> None:
    """Only the text of an error is shown, which does not have its notes."""
    for error in (ValueError("no such thing"), OSError(errno.ENOSPC, "No space left on device")):
        error.add_note("step 7 had a gradient that was not finite")
        line, _ = rank_launcher._in_a_line(error)
        assert line is not None
        assert line.endswith("\nstep 7 had a gradient that was not finite")


def test_a_warmup_that_does_not_end_is_reported() -> None:
    line = "--warmup=20 is longer than the run of 10 steps: the rate never reaches 0.001"
    assert describe_schedule(Schedule(1e-3, warmup=20, steps=10)) == [line]
    assert describe_schedule(Schedule(1e-3, warmup=10, steps=10)) == []


def test_a_decay_that_overlaps_the_warmup_is_reported() -> None:
    line = "--decay-ratio=0.9 of 10 steps begins in the warmup of 4: the rate falls in the last 6"
    assert describe_schedule(Schedule(1e-3, warmup=4, steps=10, decay_ratio=0.9)) == [line]
    assert describe_schedule(Schedule(1e-3, warmup=4, steps=10, decay_ratio=0.6)) == []


@pytest.mark.parametrize(("warmup", "ratio", "left"), [(0, 0.1, 1), (0, 0.04, 0), (9, 0.5, 1), (10, 1.0, 0)])
def test_a_decay_without_a_lower_rate_is_reported(warmup: int, ratio: float, left: int) -> None:
    schedule = Schedule(1e-3, warmup=warmup, steps=10, decay_ratio=ratio)
    (line,) = describe_schedule(schedule)
    start = f"--decay-ratio={ratio:g} of 10 steps with the warmup of {warmup} leaves {left} to the decay"
    assert line == f"{start}, which begins at the peak rate: the rate never falls"
    assert {schedule.at(step) for step in range(warmup, 10)} <= {1e-3}
    assert describe_schedule(Schedule(1e-3, warmup=0, steps=10, decay_ratio=0.2)) == []


def test_the_router_is_described() -> None:
    """Its precision, and what balances the load."""
    shape = MODELS["qwen3_debug"]
    assert describe_router(shape, "cuda") == "router product in float32; balance loss 0.0015 (aux_loss)"
    shape = routed_as_asked(shape, TrainConfig(router_dtype="bf16", balance_loss=0.0, z_loss=1e-3, bias_update_rate=0.01))
    assert describe_router(shape, "cuda") == "router product in bf16; no balance loss, z-loss 0.001, expert bias by 0.01 a step"
    assert describe_router(shape, "cpu").startswith("router product in float32;")

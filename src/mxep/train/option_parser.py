"""Parses a command line and TOML files into a `TrainConfig`. Both accept every name of an option. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from mxep.json_files import read_small_text
from mxep.train.config import COMMA_LISTS, LISTS, TrainConfig, flag_of, load_config, option_names, option_types, value_from_file
from mxep.train.option_help import help_text
from mxep.train.resolved_config import chosen_model
from mxep.train.run_folder import CHECKPOINTS, find_checkpoint, list_checkpoints, newest_run

PROGRAM = "mxep train"
# Keys of torchtitan 0.2's TOML files without a counterpart here, by table. The run lists and ignores them.
_IGNORED_KEYS = {
    "job": ("description", "print_config", "save_config_file"),
    "profiling": ("save_traces_folder", "save_memory_snapshot_folder", "profile_freq", "profiler_active", "profiler_warmup"),
    "metrics": ("disable_color_printing", "save_tb_folder", "save_for_all_ranks"),
    "optimizer": ("implementation",),
    "training": ("dataset",),
    "parallelism": ("disable_loss_parallel",),
    "checkpoint": ("folder", "last_save_model_only", "export_dtype"),
    "quantize.linear.float8": ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name", "filter_fqns"),
    "quantize.grouped_mm.float8": ("fqns",),
    "comm": ("init_timeout_seconds", "train_timeout_seconds"),
}
# Keys of torchtitan that are ignored -> the values that mxep's behaviour matches; () for all values.
TORCHTITAN_ONLY: dict[str, tuple[Any, ...]] = {
    **{f"{table}.{key}": () for table, keys in _IGNORED_KEYS.items() for key in keys},
    "profiling.enable_profiling": (False,),
    "profiling.enable_memory_snapshot": (False,),
    "metrics.enable_wandb": (False,),
    "optimizer.name": ("AdamW",),
    "optimizer.beta1": (0.9,),
    "optimizer.beta2": (0.95,),
    "optimizer.eps": (1e-8,),
    "training.global_batch_size": (-1,),
    "training.mixed_precision_param": ("bfloat16",),
    "training.mixed_precision_reduce": ("float32",),
    "parallelism.fsdp_reshard_after_forward": ("default",),
    "parallelism.enable_async_tensor_parallel": (False,),
    "checkpoint.last_save_in_hf": (False,),
    "activation_checkpoint.selective_ac_option": ("op",),
}


def read_options(argv: Sequence[str]) -> TrainConfig:
    """The options of a start. The command line overrides the TOML file, which overrides the resumed run's options, then the defaults.

    --resume auto becomes False if there is no checkpoint.

    Raises:
        ValueError: unknown options, a file that is not TOML, --resume without a run to resume or with another --init-from, --resume auto
            without --out.
        SystemExit: bad values, after a message; or --help.
    """
    check_names(argv)
    if {"-h", "--help"} & set(argv):
        print(help_text())
        raise SystemExit(0)
    argv = join_repeated(_with_bare_resume(argv))
    first = tyro.cli(TrainConfig, args=argv, prog=PROGRAM)
    named = {field_of(word) for word in argv}
    given = {} if first.config is None else read_toml(first.config)
    below = _other_names_of_model({*given, *named})  # of the resumed run
    given |= _other_names_of_model(named)
    try:
        default = dataclasses.replace(TrainConfig(), **given)
    except ValueError as error:
        raise ValueError(f"--config: {first.config}: {error}") from error
    config = tyro.cli(TrainConfig, args=argv, prog=PROGRAM, default=default)
    if not config.resume:
        return config
    if config.resume == "auto":
        if config.out is None:
            raise ValueError("--resume auto: every start must find the same folder; name it with --out")
        if not list_checkpoints(config.out / CHECKPOINTS):
            return dataclasses.replace(config, resume=False)
    out = config.out or newest_run()
    find_checkpoint(out / CHECKPOINTS, config.resume_step)
    saved = load_config(out)
    default = dataclasses.replace(saved, **below | given)
    config = tyro.cli(TrainConfig, args=[*argv, "--out", str(out)], prog=PROGRAM, default=default)
    folders = [one and os.path.realpath(one) for one in (config.init_from, saved.init_from)]
    if folders[0] != folders[1]:
        began = "random weights" if saved.init_from is None else saved.init_from
        raise ValueError(
            f"--init-from={config.init_from}, but {out} began from {began}, and resumes from its checkpoint; leave it out, or begin a new "
            "run with another --out"
        )
    same_model = (chosen_model(config), config.layers) == (chosen_model(saved), saved.layers)
    return config if same_model else dataclasses.replace(config, shape=None)


def _other_names_of_model(given: set[str | None]) -> dict[str, None]:
    """The options that name the model in another way than `given` ones do: a file, or a resumed run, loses them."""
    if "model" in given:
        return {"model_name": None, "model_flavor": None}
    return {"model": None} if {"model_name", "model_flavor"} & given else {}


def _with_bare_resume(argv: Sequence[str]) -> list[str]:
    """The same words, with the value True added to each --resume without a value.

    >>> _with_bare_resume(["--resume", "--out", "x"]), _with_bare_resume(["--resume", "auto"])
    (['--resume', 'True', '--out', 'x'], ['--resume', 'auto'])
    """
    words = list(argv)
    for index in reversed([index for index, word in enumerate(words) if word == "--resume"]):
        if index + 1 == len(words) or words[index + 1].startswith("--"):
            words.insert(index + 1, "True")
    return words


def join_repeated(argv: Sequence[str]) -> list[str]:
    """The same words, with all values of a list option after its first name. For other options, tyro takes the last value.

    >>> join_repeated(["--data", "a", "--steps", "9", "--training.dataset-path=b", "c"])
    ['--data', 'a', 'b', 'c', '--steps', '9']
    >>> join_repeated(["--change", "data", "--change", "batch"])
    ['--change', 'data,batch']
    """
    groups: list[list[str]] = [[]]  # an option's name and values
    of_list: dict[str, list[list[str]]] = {}  # groups of each list option
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            field = field_of(word)
            groups.append([name, value] if equals and field in LISTS + COMMA_LISTS else [word])
            if field is not None and field in LISTS + COMMA_LISTS:
                of_list.setdefault(field, []).append(groups[-1])
        else:
            groups[-1].append(word)
    for field, (first, *others) in of_list.items():
        for other in others:
            first += other[1:]
            other.clear()
        if others and field in COMMA_LISTS:
            first[1:] = [",".join(first[1:])]
    return [word for group in groups for word in group]


def field_of(word: str) -> str | None:
    """The field of the option that a word of the command line names, with or without a value; None for any other word.

    >>> field_of("--training.seq-len=64"), field_of("--steps"), field_of("64")
    ('seq_len', 'steps', None)
    """
    return option_names().get(word.partition("=")[0].removeprefix("--").replace("-", "_")) if word.startswith("--") else None


def _hint(name: str, prefix: str = "") -> str:
    """What to do about an unknown name of an option: the most similar name, if one is similar at all.

    >>> _hint("training.step"), _hint("learning_rate", "--")
    ('the nearest is training.steps', '`mxep train --help` lists all options')
    """
    near = difflib.get_close_matches(name, option_names(), n=1)
    if not near:
        return "`mxep train --help` lists all options"
    return f"the nearest is {prefix}{near[0].replace('_', '-') if prefix else near[0]}"


def check_names(argv: Sequence[str]) -> None:
    """Raise ValueError for the first unknown option; the message has a similar name if there is one."""
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        section, dot, last = name.rpartition(".")
        positive = section + dot + last.removeprefix("no_")  # flags can be switched off: --no-compile, --compile.no-enable
        if word.startswith("--") and not {name, positive} & {*option_names(), "help"}:
            raise ValueError(f"there is no option {word.partition('=')[0]}; {_hint(name, '--')}")


def read_toml(path: Path) -> dict[str, Any]:
    """Values by field of `TrainConfig`; keys are names of options, dotted names may be tables. Keys in `TORCHTITAN_ONLY` are ignored.

    Raises:
        ValueError: no such file, not TOML, an unknown key (the message has a similar name if there is one), two names of one option, a
            value of the wrong type, or a key of torchtitan with a value that mxep does not support.
    """
    names, types, values = option_names(), option_types(), dict[str, Any]()
    for key, value in _read_pairs(path):
        name = key.replace("-", "_")
        if name in TORCHTITAN_ONLY:
            possible = TORCHTITAN_ONLY[name]
            if possible and value not in possible:
                want = " or ".join(map(repr, possible))
                raise ValueError(f"--config: {path}: {key} = {repr(value)[:80]}, which mxep does not have; want {want}, or no such key")
            continue
        if name not in names:
            raise ValueError(f"--config: {path}: there is no option {key}; {_hint(name)}")
        field = names[name]
        if field in values:
            raise ValueError(f"--config: {path}: {key} is given twice, under another name of {flag_of(field)}")
        if field in ("config", "resume_step", "change") or (field == "resume" and value != "auto"):  # every restart would do it again
            raise ValueError(f'--config: {path}: {key} belongs on the command line (resume = "auto" alone may stand in a file)')
        values[field] = value_from_file(f"--config: {path}: {key}", value, types[field])
    return values


def passed_over(path: Path) -> list[str]:
    """The ignored keys of torchtitan in a TOML file, with their values: "metrics.save_tb_folder = 'tb'"."""
    return [f"{key} = {value!r}" for key, value in _read_pairs(path) if key.replace("-", "_") in TORCHTITAN_ONLY]


def _read_pairs(path: Path) -> list[tuple[str, Any]]:
    """(dotted key, value) of a TOML file. Raises ValueError if there is no such file or it is not TOML."""
    if not path.exists():
        raise ValueError(f"--config: {path} does not exist, want a TOML file of options")
    text = read_small_text(path, "--config")
    try:
        return list(_flat(tomllib.loads(text)))
    except (ValueError, RecursionError) as error:  # ValueError also for a number with thousands of digits
        raise ValueError(f"--config: {path} is not TOML: {error}") from error


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""From a command line and TOML files to a `TrainConfig` (no torch here). Both know every option by all of its names."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from mxep.json_files import read_small_text
from mxep.train.config import TrainConfig, checked_value, load_config
from mxep.train.folder import CHECKPOINTS, find_checkpoint, list_checkpoints, newest_run
from mxep.train.model_choice import chosen_model

PROGRAM = "mxep train"


def read_options(argv: Sequence[str]) -> TrainConfig:
    """The options of the command line, then those of its TOML file; with --resume those of the run that goes on where neither says
    anything. --resume auto becomes no resume where there is no checkpoint.

    Raises:
        ValueError: options that there are not; a TOML file that is none; --resume without a run to go on with, --resume auto without --out.
        SystemExit: bad values, after a message, and after --help.
    """
    check_names(argv)
    argv = _with_bare_resume(argv)
    first = tyro.cli(TrainConfig, args=argv, prog=PROGRAM)
    given = {} if first.config is None else read_toml(first.config)
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
    config = tyro.cli(TrainConfig, args=[*argv, "--out", str(out)], prog=PROGRAM, default=dataclasses.replace(saved, **given))
    same_model = (chosen_model(config), config.layers) == (chosen_model(saved), saved.layers)
    return config if same_model else dataclasses.replace(config, shape=None)


def _with_bare_resume(argv: Sequence[str]) -> list[str]:
    """The same words with a value behind every --resume that has none.

    >>> _with_bare_resume(["--resume", "--out", "x"]), _with_bare_resume(["--resume", "auto"])
    (['--resume', 'True', '--out', 'x'], ['--resume', 'auto'])
    """
    words = list(argv)
    for place in reversed([place for place, word in enumerate(words) if word == "--resume"]):
        if place + 1 == len(words) or words[place + 1].startswith("--"):
            words.insert(place + 1, "True")
    return words


@functools.cache
def option_names() -> dict[str, str]:
    """Every name of every option, with underscores and without dashes before it -> its field.

    >>> option_names()["training.seq_len"], option_names()["seq_len"]
    ('seq_len', 'seq_len')
    """
    names: dict[str, str] = {}
    for field, hint in get_type_hints(TrainConfig, include_extras=True).items():
        if field == "shape":  # kept by a run, not given
            continue
        aliases = [alias for note in getattr(hint, "__metadata__", ()) for alias in getattr(note, "aliases", None) or ()]
        names |= {name.removeprefix("--").replace("-", "_"): field for name in (field, *aliases)}
    return names


def nearest(name: str) -> str:
    """The option's name, of all names, that looks most like this one.

    >>> nearest("training.step")
    'training.steps'
    """
    return difflib.get_close_matches(name, option_names(), n=1, cutoff=0.0)[0]


def check_names(argv: Sequence[str]) -> None:
    """Raise ValueError for the first word that looks like an option and is none; the message has the nearest."""
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        section, dot, last = name.rpartition(".")
        positive = section + dot + last.removeprefix("no_")  # flags can be switched off: --no-compile, --compile.no-enable
        if word.startswith("--") and not {name, positive} & {*option_names(), "help"}:
            raise ValueError(f"there is no option {word.partition('=')[0]}; the nearest is --{nearest(name).replace('_', '-')}")


def read_toml(path: Path) -> dict[str, Any]:
    """Values by field of `TrainConfig`; keys are names of options, dotted ones in tables or not.

    Raises:
        ValueError: no such file, not TOML, a key that names no option (the message has the nearest), two names of one option, a value of
            the wrong type.
    """
    if not path.exists():
        raise ValueError(f"--config: {path} does not exist")
    text = read_small_text(path, "--config")
    try:
        pairs = list(_flat(tomllib.loads(text)))
    except (ValueError, RecursionError) as error:  # the first is also that of a number with thousands of digits
        raise ValueError(f"--config: {path} is not TOML: {error}") from error
    names, hints, values = option_names(), get_type_hints(TrainConfig), dict[str, Any]()
    for key, value in pairs:
        name = key.replace("-", "_")
        if name not in names:
            raise ValueError(f"--config: {path}: there is no option {key}; the nearest is {nearest(name)}")
        field = names[name]
        if field in values:
            raise ValueError(f"--config: {path}: {key} is given twice, under another name of --{field.replace('_', '-')}")
        if field in ("config", "resume_step", "change") or (field == "resume" and value != "auto"):  # a restart would do it again
            raise ValueError(f'--config: {path}: {key} belongs on the command line (resume = "auto" alone may stand in a file)')
        values[field] = checked_value(f"--config: {path}: {key}", value, hints[field])
    return values


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

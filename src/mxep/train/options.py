"""From a command line and TOML files to a `TrainConfig` (no torch here). Both know every option by all of its names."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from mxep.train.config import TrainConfig, load_config
from mxep.train.folder import CHECKPOINTS, find_checkpoint, newest_run
from mxep.train.model_choice import chosen_model

PROGRAM = "mxep train"


def read_options(argv: Sequence[str]) -> TrainConfig:
    """The options of the command line, then those of its TOML file; with --resume those of the run that goes on where neither says
    anything.

    Raises:
        ValueError: options that there are not; a TOML file that is none; --resume without a run to go on with.
        SystemExit: bad values, after a message, and after --help.
    """
    check_names(argv)
    first = tyro.cli(TrainConfig, args=list(argv), prog=PROGRAM)
    given = {} if first.config is None else read_toml(first.config)
    default = dataclasses.replace(TrainConfig(), **given)
    config = tyro.cli(TrainConfig, args=list(argv), prog=PROGRAM, default=default)
    if not config.resume:
        return config
    out = config.out or newest_run()
    find_checkpoint(out / CHECKPOINTS)
    saved = load_config(out)
    config = tyro.cli(TrainConfig, args=[*argv, "--out", str(out)], prog=PROGRAM, default=dataclasses.replace(saved, **given))
    same_model = (chosen_model(config), config.layers) == (chosen_model(saved), saved.layers)
    return config if same_model else dataclasses.replace(config, shape=None)


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
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"--config: {path} does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config: {path} is not TOML: {error}") from error
    names, values = option_names(), dict[str, Any]()
    for key, value in _flat(content):
        name = key.replace("-", "_")
        if name not in names:
            raise ValueError(f"--config: {path}: there is no option {key}; the nearest is {nearest(name)}")
        field = names[name]
        if field in values:
            raise ValueError(f"--config: {path}: {key} is given twice, under another name of --{field.replace('_', '-')}")
        values[field] = _checked(f"--config: {path}: {key}", value, get_type_hints(TrainConfig)[field])
    if {"config", "resume", "change"} & set(values):
        raise ValueError(f"--config: {path}: config, resume and change belong on the command line")
    return values


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _checked(where: str, value: Any, hint: Any) -> Any:
    """A TOML value as a field of type `hint` holds it; a list may stand for names separated by commas."""
    choices = [choice for choice in get_args(hint) if choice is not type(None)] if get_origin(hint) in (Union, types.UnionType) else [hint]
    (kind,) = choices
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"{where} = {value!r}, want one of {', '.join(map(repr, get_args(kind)))}")
    if get_origin(kind) is tuple and (strings or isinstance(value, str)):
        return tuple(value) if strings else (value,)
    if kind is str and strings:
        return ",".join(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        wanted = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
        raise ValueError(f"{where} = {value!r}, want {wanted.get(kind, 'a list of strings')}")
    return value

"""The text of `mxep train --help`: options in torchtitan's sections, short names first (no torch here)."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import shutil
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mxep.models.presets import MODELS
from mxep.train.config import TrainConfig, flag_of, option_names, option_types

# First option of each section -> the title. A section ends where the next one begins, in the order of `TrainConfig`.
_TITLES = {
    "config": "job",
    "model": "model",
    "router_dtype": "router",
    "data": "data",
    "validation_data": "validation",
    "steps": "training",
    "optimizer": "optimizer and learning rate",
    "recipe": "precision",
    "ep": "parallelism",
    "activation_checkpoint": "memory and speed",
    "checkpoint": "checkpoint",
    "log_every": "metrics and profiling",
}
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH", tuple: "TEXT ..."}
_INDENT = 34


def sections() -> dict[str, list[str]]:
    """Title -> fields of `TrainConfig` that are options."""
    found, title = dict[str, list[str]](), ""
    for name in dict.fromkeys(option_names().values()):
        title = _TITLES.get(name, title)
        found.setdefault(title, []).append(name)
    return found


class _Formatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of options stay whole


def help_text() -> str:
    """All options by section, wrapped to the terminal's width."""
    types, docs = option_types(), _field_docs()
    width = max(min(shutil.get_terminal_size().columns, 140), 80)
    parser = argparse.ArgumentParser(
        usage="mxep train [OPTIONS]",
        description=TrainConfig.__doc__,
        add_help=False,
        formatter_class=functools.partial(_Formatter, max_help_position=_INDENT, width=width),
    )
    for title, names in sections().items():
        group = parser.add_argument_group(title)
        for name in names:
            hint, default = types[name], getattr(TrainConfig, name)
            also = [flag_of(other) for other, field in option_names().items() if field == name != other]
            text = docs[name]
            text += "" if default in (None, (), "", False) else f" (default: {'on' if hint is bool else default})"
            text += f" [{', '.join(also)}]" if also else ""
            value: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if hint is bool else {"metavar": _placeholder(hint)}
            group.add_argument(flag_of(name), help=text.replace("%", "%%"), **value)
    return parser.format_help().rstrip()


def _placeholder(hint: Any) -> str:
    """The placeholder for the value of an option.

    >>> _placeholder(int | None), _placeholder(Literal["cpu", "cuda"]), _placeholder(bool | Literal["auto"])
    ('N', '{cpu,cuda}', '[{auto}]')
    """
    kinds = [hint] if get_origin(hint) in (Literal, tuple) else [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    kind = next(kind for kind in kinds if kind is not bool)
    shown = "{" + ",".join(get_args(kind)) + "}" if get_origin(kind) is Literal else _PLACEHOLDERS[get_origin(kind) or kind]
    return f"[{shown}]" if bool in kinds else shown


def _field_docs() -> dict[str, str]:
    """The docstring of each field of `TrainConfig`, in one line."""
    (owner,) = ast.parse(inspect.getsource(TrainConfig)).body
    assert isinstance(owner, ast.ClassDef)
    docs = {}
    for field, text in zip(owner.body, owner.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(text.value.value).split()).replace("{presets}", ", ".join(MODELS))
    return docs

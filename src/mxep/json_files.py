"""Reads small JSON files that mxep may not have written: any damage is a ValueError that names the file. Imports no torch.

`read_json_object` bounds the size before it parses.  `typed` checks one value of what was parsed and names its key.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

MAX_BYTES = 256 << 20  # the largest published tokenizer.json has 34 MB
_NUMBER_DIGITS = 300  # a longer integer is no float64; Python itself refuses those of more than 4300 digits
_T = TypeVar("_T")
_KINDS = {dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def read_small_text(path: Path, what: str, max_bytes: int = MAX_BYTES) -> str:
    """The text of a regular file in UTF-8.

    Args:
        path: the file.
        what: the option or function that reads the file; the error begins with it.
        max_bytes: a larger file is refused before it is read.

    Raises:
        ValueError: no such file, not a regular file (a pipe could block for ever), not readable, too large, not UTF-8.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: {path} cannot be read: it is not UTF-8 (byte {error.start}); replace the file") from error
    except OSError as error:
        raise ValueError(f"{what}: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {path} cannot be read: {error}; replace the file") from error


def read_json_object(path: Path, what: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file; arguments and errors are those of `read_small_text`, errors also those of `parse_json_object`."""
    return parse_json_object(read_small_text(path, what, max_bytes), f"{what}: {path}")


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Args:
        text: JSON.
        where: the error begins with it.

    Raises:
        ValueError: not JSON (RFC 8259 has no NaN and Infinity), not an object, a duplicate key, a number beyond float64, half of a
            surrogate pair, too deeply nested.
    """
    try:
        content = json.loads(
            text, parse_constant=_no_constant, parse_int=_bounded_int, parse_float=_finite_float, object_pairs_hook=_unique_keys
        )
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair can be neither written nor printed
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}; replace the file") from error
    except RecursionError as error:
        raise ValueError(f"{where} is not read: its values are too deeply nested; replace the file") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not read: a string holds half of a surrogate pair; replace the file") from error
    except ValueError as error:
        raise ValueError(f"{where} is not read: {error}; replace the file") from error
    return typed(content, dict, where)


def typed(value: object, kind: type[_T], where: str) -> _T:
    """`value` if it is of `kind`: dict, list, str, int (not bool), float (or int) or bool.

    Args:
        value: of parsed JSON; None if the key is missing.
        kind: the wanted type.
        where: file and key; the error begins with it.

    Raises:
        ValueError: missing, or of another type.

    >>> typed({"steps": 3}.get("steps"), int, "manifest.json: steps")
    3
    """
    if kind is float and type(value) is int:
        return kind(value)  # type: ignore[call-arg]
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    got = "is missing" if value is None else f"is {_shown(value)}"
    raise ValueError(f"{where} {got}, want {_KINDS[kind]}")


def _shown(value: object) -> str:
    return _KINDS[type(value)] if isinstance(value, dict | list) else repr(value)[:80]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {twice!r} twice")
    return content


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _bounded_int(digits: str) -> int:
    if len(digits) > _NUMBER_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"the number {digits[:40]} is beyond float64")
    return number

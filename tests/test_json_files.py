"""Untrusted JSON: for any content of the file the result is the object, or a ValueError that names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mxep.json_files import parse_json_object, read_json_object, read_small_text, typed

DAMAGED = {
    "empty": (b"", "is not JSON"),
    "cut": (b'{"a": [1, 2', "is not JSON"),
    "no object": (b"[1, 2]", "is a list, want an object"),
    "null": (b"null", "is missing, want an object"),
    "latin-1": ('{"a": "\xe9"}'.encode("latin-1"), r"not UTF-8 \(byte 7\)"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "is not JSON"),
    "deep list": (b'{"a": ' + b"[" * 200_000, "too deeply nested"),
    "deep objects": (b'{"a": ' * 200_000, "too deeply nested"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    "exponent": (b'{"a": 1e999}', "1e999 is beyond float64"),
    "NaN": (b'{"a": NaN}', "NaN is no JSON"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is no JSON"),
    "surrogate": (b'{"a": "\\ud800"}', "half of a surrogate pair"),
    "twice": (b'{"b": {"a": 1, "c": 2, "a": 3}}', "has the key 'a' twice"),
    "large": (b'{"a": "' + b"x" * 1000 + b'"}', "more than 1000 bytes"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_names_the_file(name: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[name]
    path = tmp_path / "small.json"
    path.write_bytes(content)
    limit = 1000 if name == "large" else 2_000_000
    with pytest.raises(ValueError, match=reason) as error:
        read_json_object(path, "resume", limit)
    assert str(error.value).startswith(f"resume: {path}")


def test_paths_that_are_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "folder").mkdir()
    for name, reason in (("pipe", "no regular file"), ("folder", "no regular file"), ("nothing", "No such file")):
        with pytest.raises(ValueError, match=reason) as error:
            read_small_text(tmp_path / name, "data")
        assert str(tmp_path / name) in str(error.value)


def test_valid_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text('{"a": [1, 2.5, "\\ud83d\\ude00"], "model_max_length": 1000000000000000019884624838656, "n": null}')
    wanted = {"a": [1, 2.5, "\U0001f600"], "model_max_length": 1000000000000000019884624838656, "n": None}
    assert read_json_object(path, "tokenizer") == wanted


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        (3, int, None),
        (True, bool, None),
        (2.5, float, None),
        ("x", str, None),
        (None, int, "at is missing, want an integer"),
        (True, int, "at is True, want an integer"),
        (True, float, "at is True, want a number"),
        (1, bool, "at is 1, want true or false"),
        (3.0, int, "at is 3.0, want an integer"),
        ([1], str, "at is a list, want a string"),
        ({}, list, "at is an object, want a list"),
    ],
)
def test_one_value(value: object, kind: type, error: str | None) -> None:
    if error is None:
        assert typed(value, kind, "at") == value
        return
    with pytest.raises(ValueError) as raised:
        typed(value, kind, "at")
    assert str(raised.value) == error


def test_an_integer_is_a_number() -> None:
    number = typed(3, float, "at")
    assert repr(number) == "3.0"
    assert parse_json_object('{"a": {}}', "line 3") == {"a": {}}

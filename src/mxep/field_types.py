"""Checks option values against their type annotations. Imports no torch."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import fields
from enum import EnumType
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_Test = Callable[[Any], bool]


def check_field_types(options: Any, where: str | None = None) -> None:
    """Raise ValueError unless every field of a dataclass is of its annotated type, and every number is finite.

    A float field takes integers, and neither a float nor an int field takes a bool. A value of a Literal must have the same type (1 is not
    True). Items of containers are not checked. Whole numbers of other types than int (NumPy's) become int, since code asks for that.
    `where` begins the error message; None means the class's name.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Options:
    ...     rate: float = 1.0
    >>> check_field_types(Options(float("nan")))
    Traceback (most recent call last):
    ...
    ValueError: Options: rate=nan, want a finite number
    """
    for name, fits, want in _wanted(type(options)):  # type: ignore[arg-type]
        if not fits(value := getattr(options, name)):
            raise ValueError(f"{where or type(options).__name__}: {name}={value!r}, want {want}")
        if isinstance(value, Integral) and not isinstance(value, int):
            object.__setattr__(options, name, int(value))


@functools.cache
def _wanted(owner: type) -> tuple[tuple[str, _Test, str], ...]:
    hints = get_type_hints(owner)
    tests = {field.name: type_test(hints[field.name]) for field in fields(owner)}
    return tuple((name, fits, listed(wants)) for name, (fits, wants) in tests.items())


def type_test(hint: Any) -> tuple[_Test, list[str]]:
    """(a function that tests whether a value is of a type, the alternatives for an error message)."""
    origin = get_origin(hint)
    if origin is Literal:
        values = get_args(hint)
        return lambda value: any(type(value) is type(one) and value == one for one in values), [repr(one) for one in values]
    if origin in (Union, types.UnionType):
        parts = [type_test(part) for part in get_args(hint)]
        return lambda value: any(fits(value) for fits, _ in parts), [want for _, wants in parts for want in wants]
    simple: dict[Any, tuple[_Test, list[str]]] = {
        bool: (lambda value: type(value) is bool, ["True", "False"]),
        int: (lambda value: isinstance(value, Integral) and type(value) is not bool, ["a whole number"]),
        float: (is_finite_number, ["a finite number"]),
        type(None): (lambda value: value is None, ["None"]),
        str: (lambda value: isinstance(value, str), ["a string"]),
    }
    kind = hint if origin is None else origin
    members = f" ({' or '.join(kind.__members__)})" if isinstance(kind, EnumType) else ""
    return simple.get(kind) or ((lambda value: isinstance(value, kind)), [f"a {kind.__name__}{members}"])


def is_finite_number(value: object) -> bool:
    """True for what a field of type float may hold."""
    return isinstance(value, Real) and type(value) is not bool and math.isfinite(value)


def listed(names: list[str]) -> str:
    """Alternatives in an error message.

    >>> listed(["a string", "1", "None"])
    'a string, 1 or None'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

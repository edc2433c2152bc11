"""Names of a model's modules: matching them with patterns, and listing them in errors."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")  # parts of names that are left out


def as_patterns(fqns: str | Sequence[str] | None) -> list[str] | None:
    """Names as a list of patterns; None for every name. Raises ValueError for anything else."""
    if fqns is None or isinstance(fqns, str):
        return None if fqns is None else [fqns]
    if not isinstance(fqns, Iterable) or not all(isinstance(pattern, str) for pattern in fqns):
        raise ValueError(f"names of layers are {fqns!r}, want a string, a list of strings, or None for all")
    return list(fqns)


def matches_any(fqn: str, patterns: Iterable[str] | None) -> bool:
    """Whether a pattern matches the name (`matches_name`); None matches every name."""
    return patterns is None or any(matches_name(fqn, pattern) for pattern in patterns)


def matches_name(fqn: str, pattern: str) -> bool:
    """Whether a pattern's dotted parts are consecutive parts of the name; a part may have wildcards.

    >>> matches_name("layers.1.moe.experts", "experts"), matches_name("layers.1.moe.shared_experts", "experts")
    (True, False)
    >>> matches_name("layers.1.moe.experts", "layers.*.moe")
    True
    """
    parts, wanted = [part for part in fqn.split(".") if part not in _WRAPPERS], pattern.split(".")
    slices = (parts[start : start + len(wanted)] for start in range(len(parts) - len(wanted) + 1))
    return any(all(map(fnmatch.fnmatchcase, part, wanted)) for part in slices)


def shown_names(names: Iterable[str], most: int = 20) -> str:
    """Names for an error: those that differ in their layer's number alone as one, with a wildcard in its place.

    >>> shown_names(["layers.0.wq", "layers.1.wq", "layers.0.wo"])
    'layers.*.wq, layers.0.wo'
    >>> shown_names(["a", "b", "c"], most=2), shown_names([])
    ('a, b and 1 more', 'none')
    """
    shown = _without_numbers(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(name or "the model itself" for name in shown[:most]) or "none") + more


def name_patterns(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """Patterns that match these names and none of the others, as few as wildcards in the place of a layer's number allow.

    >>> name_patterns(["layers.0.wq", "layers.1.wq", "layers.1.wo", "layers.2.wo"], ["layers.0.wo"])
    ['layers.*.wq', 'layers.1.wo', 'layers.2.wo']
    """
    found: dict[str, None] = {}
    for name in names:
        pattern = _any_layer(name)
        found[name if any(matches_name(other, pattern) for other in others) else pattern] = None
    return list(found)


def _any_layer(name: str) -> str:
    """The name with wildcards in the place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _without_numbers(names: Iterable[str]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_any_layer(name), []).append(name)
    return [pattern if len(found) > 1 else found[0] for pattern, found in alike.items()]


def how_to_name(pattern: str, names: Iterable[str]) -> str:
    """What to do about a pattern that matched none of these names: how one is written, and the part of a name that is nearest.

    >>> how_to_name("atention", ["layers.0.attention.wq", "layers.1.attention.wq"])
    "give whole parts between dots, or wildcards; the nearest is 'attention'"
    """
    parts = [name.split(".") for name in _without_numbers(names)]
    runs = {".".join(name[a:b]) for name in parts for a in range(len(name)) for b in range(a + 1, len(name) + 1)}
    near = get_close_matches(pattern, sorted(runs), n=1)
    return "give whole parts between dots, or wildcards" + (f"; the nearest is {near[0]!r}" if near else "")


def check_patterns(where: str, patterns: Iterable[str], what: str, names: Collection[str]) -> None:
    """Raise ValueError if a pattern matches none of these names, which are those of all `what` there is."""
    for pattern in patterns:
        if not any(matches_name(name, pattern) for name in names):
            do = how_to_name(pattern, names)
            raise ValueError(f"{where}: {pattern!r} matched no {what}, saw {shown_names(names)}; {do}")

"""Compare the records of two commits: `python benchmarks/compare_records.py OLD_FOLDER NEW_FOLDER`.

Each folder holds what `mxep bench NAME --record --out FOLDER` wrote, both on one machine, one right after the other.  Every arm that both
commits measured is listed with new / old of its medians.  An arm counts as slower where that ratio is beyond its noise: the spread of the
arm's own rounds in both records, and at least 2%.  Exits with 1 if an arm is slower, with 2 if the folders share none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LEAST_NOISE = 1.02


class Arm(NamedTuple):
    """One arm of two records: its name, medians in ms, new / old, and the ratio from which it counts as slower."""

    name: str
    old_ms: float
    new_ms: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.new_ms / self.old_ms

    @property
    def slower(self) -> bool:
        return self.ratio > self.noise


def read_arms(folder: Path) -> dict[str, dict[str, Any]]:
    """Every arm in the records of a folder, by benchmark, shape, routing and name."""
    arms = {}
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            shape = ",".join(f"{letter}={size}" for letter, size in case["shape"].items())
            where = " ".join(part for part in (case["benchmark"], shape, case.get("routing"), case.get("model")) if part)
            arms |= {f"{where} {name}": arm for name, arm in case["arms"].items() if "median_ms" in arm}
    return arms


def compare(old: Path, new: Path) -> Iterator[Arm]:
    """The arms that both folders have."""
    before, after = read_arms(old), read_arms(new)
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        yield Arm(name, a["median_ms"], b["median_ms"], max(LEAST_NOISE, a["round_spread"], b["round_spread"]))


def main(arguments: Sequence[str]) -> int:
    """Print the comparison, the slowest ratio first."""
    if len(arguments) != 2:
        raise SystemExit(f"compare_records: got {len(arguments)} folders, want two: OLD_FOLDER NEW_FOLDER")
    arms = sorted(compare(*map(Path, arguments)), key=lambda arm: -arm.ratio)
    for arm in arms:
        print(f"{arm.ratio:6.3f} {'SLOWER' if arm.slower else '':6} {arm.old_ms:10.4f} {arm.new_ms:10.4f} ms  {arm.name}")
    slower = sum(arm.slower for arm in arms)
    print(f"{slower} of {len(arms)} arms slower than {arguments[0]} by more than their noise")
    return 2 if not arms else int(slower > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""launch: a variant is found again where nothing differs that it depends on, and only there. Triton itself is asked in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import jit

from mxep.ops.runtime import launch as launching
from mxep.ops.runtime.launch import launch


@triton.jit(do_not_specialize=["count"])
def _kernel(rows, stride, live, count, WIDTH: tl.constexpr):
    pass


ROWS = torch.zeros(64, dtype=torch.uint8)
PLAIN = {"rows": ROWS, "stride": 32, "live": None, "count": 7, "WIDTH": 64}


asked: list[dict] = []  # options of every kernel that Triton was asked for


class Variant:
    def __init__(self, made: list) -> None:
        self.made = made

    def __getitem__(self, grid):
        return lambda *values: self.made.append(("again", grid, values))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list:
    """What was launched; an entry "compiled" for what Triton was asked for."""
    entries: list = []

    def run(self, *values, grid, warmup, **options):
        entries.append(("compiled", grid, values))
        asked.append(options)
        return Variant(entries)

    asked.clear()
    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    monkeypatch.setattr(launching, "_variants", {})
    return entries


def test_arguments_come_in_the_kernels_order(made: list):
    for _ in range(2):
        launch(_kernel, 5, dict(reversed(PLAIN.items())), num_warps=4)
    assert [entry[0] for entry in made] == ["compiled", "again"]
    for _, grid, values in made:
        assert grid == (5, 1, 1)
        assert values[0] is ROWS
        assert values[1:] == (32, None, 7, 64)
    launch(_kernel, (5, 3), PLAIN, num_warps=4)
    assert made[-1][:2] == ("again", (5, 3, 1))


def test_what_changes_bits_is_not_left_to_tritons_defaults(made: list):
    launch(_kernel, 5, PLAIN, num_warps=4)
    launch(_kernel, 5, PLAIN, num_warps=4, enable_fp_fusion=False)
    assert [entry[0] for entry in made] == ["compiled", "compiled"]
    assert [options["enable_fp_fusion"] for options in asked] == [True, False]


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        ({"rows": torch.ones(64, dtype=torch.uint8)}, False),
        ({"rows": ROWS[16:]}, False),
        ({"rows": ROWS[1:]}, True),
        ({"rows": ROWS.view(torch.int8)}, True),
        ({"stride": 48}, False),
        ({"stride": 24}, True),
        ({"stride": 1}, True),
        ({"stride": 2**31}, True),
        ({"live": ROWS}, True),
        ({"count": 16}, False),
        ({"count": 1}, False),
        ({"count": 2**31}, True),
        ({"WIDTH": 128}, True),
    ],
)
def test_what_a_variant_depends_on(made: list, change: dict, compiled: bool):
    launch(_kernel, 5, PLAIN, num_warps=4)
    launch(_kernel, 5, {**PLAIN, **change}, num_warps=4)
    assert made[1][0] == ("compiled" if compiled else "again")


def test_options_and_the_gpu_tell_variants_apart(made: list, monkeypatch: pytest.MonkeyPatch):
    launch(_kernel, 5, PLAIN, num_warps=4)
    launch(_kernel, 5, PLAIN, num_warps=8)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 1)))
    launch(_kernel, 5, PLAIN, num_warps=4)
    assert [entry[0] for entry in made] == ["compiled"] * 3

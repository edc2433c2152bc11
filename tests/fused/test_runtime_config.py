"""RuntimeEPConfig: as JSON, its number, wrong values."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from tests.truth import raises_naming

from mxep.fused.runtime_config import CombineMode, DispatchMode
from mxep.moe import RuntimeEPConfig


def test_config_as_json(tmp_path: Path) -> None:
    config = RuntimeEPConfig("all_gather", "reduce_scatter", "hp", "mxfp8", None, "mxfp8", False, True)
    config.save(tmp_path / "ep.json")
    assert RuntimeEPConfig.load(tmp_path / "ep.json") == config
    assert RuntimeEPConfig.from_json("{}") == RuntimeEPConfig()
    every = [
        RuntimeEPConfig(d, c, combine_forward=f, dispatch_backward=b, keep_first_product=k, redispatch_x_in_backward=r)
        for d in get_args(DispatchMode)
        for c in get_args(CombineMode)
        for f in ("hp", "mxfp8") for b in ("hp", "mxfp8") for k in (True, False, "mxfp8")
        for r in (True, False)
    ]  # fmt: skip
    assert len({config.number for config in every}) == len(every)
    for words, text in (
        (("dispatch='fast'",), '{"dispatch": "fast"}'),
        (("speed", "keys of dispatch"), '{"speed": 1}'),
        (("no JSON",), "{"),
    ):
        with raises_naming("RuntimeEPConfig", *words):
            RuntimeEPConfig.from_json(text)

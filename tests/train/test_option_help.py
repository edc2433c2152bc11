"""`mxep train --help`: every option once, in a section, with its description and the names of torchtitan."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mxep.cli import main
from mxep.models.presets import MODELS
from mxep.train.config import TrainConfig
from mxep.train.option_help import help_text, sections


def test_every_option_is_in_one_section() -> None:
    shown = [name for names in sections().values() for name in names]
    assert sorted(shown) == sorted(field.name for field in fields(TrainConfig) if field.name != "shape")


@pytest.mark.parametrize("width", [60, 100, 300])
def test_help_fits_the_terminal_and_names_short_options_first(width: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\n".join(lines) == help_text()
    assert max(map(len, lines)) <= max(min(width, 140), 80)
    options = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
    assert options == [f"--{name.replace('_', '-')}" for names in sections().values() for name in names]
    text = " ".join(" ".join(lines).split())
    assert "--seq-len N Tokens per sequence. [--training.seq-len]" in text
    assert "--device {auto,cpu,cuda} Where to train; auto uses GPUs if there are any. (default: auto)" in text
    assert "--evaluate, --no-evaluate Evaluate on held-out text; off, not even at the end (for speed measurements). (default: on)" in text
    assert "--resume [{auto}]" in text
    assert f"Presets: {', '.join(MODELS)}. Model types:" in text

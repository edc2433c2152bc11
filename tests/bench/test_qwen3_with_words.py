"""benchmarks/qwen3_with_words.py writes a folder that `mxep train` takes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tests.pages import ROOT

from mxep.models.huggingface_shape import find_model
from mxep.train.data.tokenizer import load_tokenizer

pytest.importorskip("tokenizers")


def test_model_and_tokenizer(tmp_path: Path) -> None:
    program = runpy.run_path(str(ROOT / "benchmarks" / "qwen3_with_words.py"))
    assert program["main"]([str(tmp_path / "words"), "--text-bytes", "200000"]) == 0
    _, shape, notes = find_model(str(tmp_path / "words"), None)
    assert round(shape.parameters()[0] / 1e6) == 112
    assert not [note for note in notes if "default" in note]
    tokenizer = load_tokenizer(tmp_path / "words")
    assert 256 < tokenizer.vocab_size <= shape.vocab_size == 32768

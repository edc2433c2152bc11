"""Tokenizers from files: a small BPE trained here, separators of documents, errors, and runs that use it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.steps import records_of, trainer, written_before

from mxep.train.config import TrainConfig
from mxep.train.convert import convert
from mxep.train.data.loader import load_corpus
from mxep.train.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    _pieces,
    check_origin,
    load_tokenizer,
    vocabulary_fingerprint,
)
from mxep.train.data.tokenizer_export import publish_tokenizer
from mxep.train.rank_launcher import start_ranks
from mxep.train.run_folder import find_checkpoint
from mxep.train.trainer import Trainer

tokenizers = pytest.importorskip("tokenizers")

TEXT = Path(json.__file__).read_text() + Path(subprocess.__file__).read_text()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path / "cache"))


def write_bpe(folder: Path, vocab_size: int = 512, special: tuple[str, ...] = ("<start>", "<end>"), **settings: Any) -> Path:
    """A byte-level BPE of TEXT in `folder`; `settings` become tokenizer_config.json."""
    folder.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator([TEXT + "\u00e9\u20ac"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe(tmp_path_factory.mktemp("bpe") / "small", eos_token={"content": "<end>"}, bos_token="<start>")


def test_round_trip_and_separators(bpe: Path, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    documents = ["def f(x):\n    return 'h\u00e9'\n", "second"]
    tokenizer = FileTokenizer(bpe)
    ids = np.concatenate(tokenizer.encode_all([text.encode() for text in documents]))
    assert (ids.dtype, tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (np.uint16, 512, None, 1)
    assert ids[-1] == 1
    assert library.decode_batch([part.tolist() for part in np.split(ids, np.flatnonzero(ids == 1) + 1)[:-1]]) == documents
    both = write_bpe(tmp_path / "both", eos_token="<end>", bos_token="<start>", add_bos_token=True)
    assert FileTokenizer(both / "tokenizer.json").encode_all([b"one", b"two"])[1].tolist().count(0) == 1
    first = write_bpe(tmp_path / "first", bos_token="<start>")
    assert FileTokenizer(first).encode_all([b"one"])[0][0] == 0
    usual = write_bpe(tmp_path / "usual", special=("<|endoftext|>",))
    assert FileTokenizer(usual).encode_all([b"one"])[0][-1] == 0


def test_long_documents_are_encoded_in_pieces(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.train.data.tokenizer._PIECE_BYTES", 32)
    document = (TEXT[:200] + "\u20ac" * 50).encode()
    pieces = list(_pieces(document))
    assert "".join(pieces).encode() == document
    assert max(len(piece.encode()) for piece in pieces) <= 32
    assert "\n" in {piece[-1] for piece in pieces}
    library = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    assert library.decode(FileTokenizer(bpe).encode_all([document])[0].tolist()).encode() == document
    whole = FileTokenizer(bpe)
    seen: list[int] = []

    class Counted:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
            seen.append(sum(map(len, texts)))
            return library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(whole, "_tokenizer", Counted())
    found, want = (one.encode_all([document, b"a", document]) for one in (whole, FileTokenizer(bpe)))
    assert all(map(np.array_equal, found, want))
    assert len(seen) > 5
    assert max(seen) < 2 * 32


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<end>"},
        {"pad_token": {"content": "<end>"}, "unk_token": None, "add_bos_token": True},
        {"additional_special_tokens": ["<end>", {"content": "<none>"}]},
        {"added_tokens_decoder": {"1": {"content": "<end>", "special": True}, "0": {"content": "<start>", "special": False}}},
    ],
)
def test_special_tokens_that_another_file_names_are_not_decoded(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_bpe(tmp_path / "bpe", 512, ("<start>", "<end>", "<|endoftext|>"), **settings)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    for token in vocabulary["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    tokenizer = load_tokenizer(folder)
    start, end = (tokenizer.vocabulary()[name] for name in ("<start>", "<end>"))
    assert tokenizer.decode([start, *tokenizer.encode(b"import os"), end]) == "<start>import os"


def test_names_of_special_tokens_are_text(bpe: Path) -> None:
    tokenizer = FileTokenizer(bpe)
    ids = tokenizer.encode_all([b"what <end> and <start> are"])[0].tolist()
    assert (ids.count(tokenizer.eos), ids.count(0)) == (1, 0)
    assert tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json")).decode(ids) == "what <end> and <start> are"


def test_fingerprints(bpe: Path, tmp_path: Path) -> None:
    content = json.loads((bpe / "tokenizer.json").read_text())
    same = tmp_path / "tokenizer.json"
    same.write_text(json.dumps({**content, "padding": None}, indent=7))
    assert vocabulary_fingerprint(same) == vocabulary_fingerprint(bpe / "tokenizer.json")
    assert load_tokenizer(None).fingerprint == "bytes"
    other = write_bpe(tmp_path / "other", vocab_size=400, eos_token="<end>")
    start = write_bpe(tmp_path / "start", eos_token="<end>", bos_token="<start>", add_bos_token=True)
    assert len({FileTokenizer(folder).fingerprint for folder in (bpe, other, start)}) == 3


def test_bad_tokenizers(tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        FileTokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"holds no tokenizer.json; its tokenizer.model is SentencePiece's"):
        FileTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer that"):
        FileTokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"nothing says which token of .* ends a document"):
        FileTokenizer(write_bpe(tmp_path / "endless"))
    with pytest.raises(ValueError, match=r"no token '</s>', which .* its eos_token"):
        FileTokenizer(write_bpe(tmp_path / "wrong", eos_token="</s>"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=re.escape('pip install ".[tokenizers]"')):
        FileTokenizer(bpe)


def test_weights_of_another_tokenizer(bpe: Path, tmp_path: Path) -> None:
    other = write_bpe(tmp_path / "other", vocab_size=400, eos_token="<end>")
    assert "are bytes, whatever" in check_origin(ByteTokenizer(), other)
    assert "its tokenizer" in check_origin(FileTokenizer(bpe), bpe)
    assert "whatever those" in check_origin(FileTokenizer(bpe), tmp_path)
    with pytest.raises(ValueError, match="has another tokenizer than --tokenizer="):
        check_origin(FileTokenizer(bpe), other)


def test_bytes_of_the_held_out_text(tmp_path: Path, bpe: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(8):
        (texts / f"{index}.txt").write_text(TEXT[index * 900 : index * 900 + 900])
    by_bytes, by_tokens = (load_corpus([str(texts)], tokenizer, 0.3) for tokenizer in (ByteTokenizer(), FileTokenizer(bpe)))
    assert by_bytes.tokens_per_byte == 1
    assert by_tokens.held_out_bytes == by_bytes.held_out_bytes == len(by_bytes.held_out)
    assert 0.2 < by_tokens.tokens_per_byte < 0.9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"eos_token": 3}, "tokenizer_config.json: eos_token is 3, want a string"),
        ({"eos_token": ["<end>"]}, "tokenizer_config.json: eos_token is a list, want a string"),
        ({"eos_token": {}}, "tokenizer_config.json: eos_token.content is missing, want a string"),
        ({"eos_token": {"content": {"content": "<end>"}}}, "tokenizer_config.json: eos_token.content is an object, want a string"),
        ({"eos_token": True}, "tokenizer_config.json: eos_token is True, want a string"),
        ({"eos_token": "<end>", "add_bos_token": "false"}, "tokenizer_config.json: add_bos_token is 'false', want true or false"),
        ({"eos_token": "<stop>"}, "has no token '<stop>', which "),
    ],
)
def test_settings_of_other_types(settings: dict[str, Any], said: str, bpe: Path, tmp_path: Path) -> None:
    shutil.copy(bpe / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        FileTokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"a": ' * 100_000, b'{"a": "\xe9"}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\\ud800"}']
)
def test_damaged_files_are_named(file: str, content: bytes, bpe: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / file))):
        FileTokenizer(tmp_path)


def test_any_change_of_a_tokenizer_gives_a_tokenizer_or_a_named_error(bpe: Path, tmp_path: Path) -> None:
    """Values of other types anywhere in the file, also those at which the library panics."""
    draw, unnamed = random.Random(0), list[Any]()
    for number in range(200):
        content = json.loads((bpe / "tokenizer.json").read_text())
        place: Any = content
        while True:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
                break
            place = place[key]
        place[key] = draw.choice([None, -1, 2**40, 1.5, "", "\0", [], {}, [[]], True, {"type": "BPE"}])
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        try:
            FileTokenizer(tmp_path).encode_all([b"def f(): pass"])
        except ValueError as error:
            unnamed += [] if str(tmp_path) in str(error) else [(number, key, str(error))]
    assert unnamed == []


# ---- runs ----


def run_of(out: Path, **options: object) -> Trainer:
    text = out.with_name("text.py")
    text.write_text(TEXT)
    return trainer(0, 1, out, **{"eval_tokens": 128, "steps": 4, "data": (str(text),), **options})


def test_a_vocabulary_that_does_not_fit(bpe: Path, tmp_path: Path, one_rank: None) -> None:
    with pytest.raises(ValueError, match="512 tokens do not fit dsv3_debug_cpu's vocabulary of 256"):
        run_of(tmp_path / "run", tokenizer=bpe)


def test_runs_resume_only_with_their_tokenizer(tmp_path: Path, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (write_bpe(tmp_path / name, vocab_size=256, eos_token=end) for name, end in (("a", "<end>"), ("b", "<start>")))
    assert not run_of(tmp_path / "run", tokenizer=first, stop_after=1).train()
    assert f"({first})" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"tokenizer was [0-9a-f]{32}, is bytes"):
        run_of(tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"tokenizer was [0-9a-f]{32}, is [0-9a-f]{32}"):
        run_of(tmp_path / "run", tokenizer=second, resume=True)
    assert run_of(tmp_path / "run", tokenizer=first, resume=True).train()
    assert "nats per token (" in capsys.readouterr().out
    held_out = records_of(tmp_path / "run", "held_out")[-1]
    assert held_out["nats_per_byte"] < held_out["loss"]


def test_runs_from_before_there_were_tokenizers_resume(tmp_path: Path, one_rank: None) -> None:
    assert not run_of(tmp_path / "run", stop_after=1).train()
    written_before(find_checkpoint(tmp_path / "run" / "checkpoints"), lambda facts: facts["identity"].pop("tokenizer"))
    assert run_of(tmp_path / "run", resume=True).train()


def test_the_starter_refuses_before_ranks_start(tmp_path: Path) -> None:
    config = TrainConfig(device="cpu", out=tmp_path / "run", tokenizer=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        start_ranks(config, [])


def test_a_converted_run_keeps_its_tokenizer(tmp_path: Path, one_rank: None) -> None:
    folder = write_bpe(tmp_path / "bpe", vocab_size=256, eos_token="<end>")
    first = run_of(tmp_path / "run", tokenizer=folder, model="qwen3_debug_cpu")
    first.save()
    assert convert(tmp_path / "run", tmp_path / "hf")[-1] == f"with its tokenizer {folder}"
    again = FileTokenizer(tmp_path / "hf")
    assert again.fingerprint == first.tokenizer.fingerprint
    with pytest.raises(ValueError, match="has another tokenizer than --tokenizer="):
        check_origin(FileTokenizer(write_bpe(tmp_path / "other", vocab_size=300, eos_token="<end>")), tmp_path / "hf")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<start>"}')
    for changed, note in ((folder, "is another one"), (tmp_path / "gone", "cannot be read")):
        published = publish_tokenizer(str(changed), again.fingerprint)
        assert note in published.note
        assert not published.files
        assert not published.token_ids


def generated(folder: Path, eos: int | None) -> list[int]:
    """What transformers generates from a folder whose model continues everything with token 5 for ever, or with EOS."""
    transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # the first logit that is above the others wins: those of zeros are equal
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
    if eos is not None:
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor([eos]), 1.0))
    return model.generate(torch.tensor([[7, 8]]), max_new_tokens=6, do_sample=False)[0].tolist()


@pytest.mark.parametrize(
    ("model", "kind"), [("dsv3_debug_cpu", "bytes"), *(("qwen3_debug_cpu", kind) for kind in ("named", "unnamed", "bos"))]
)
def test_transformers_loads_the_tokenizer_of_a_converted_run_and_stops_at_eos(
    model: str, kind: str, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = {
        "named": {"eos_token": "<end>", "pad_token": "<pad>", "bos_token": "<start>"},
        "unnamed": {},
        "bos": {"bos_token": "<start>"},
    }
    special = ("<start>", "<end>", "<|endoftext|>", "<pad>")
    folder = None if kind == "bytes" else write_bpe(tmp_path / "bpe", 256, special, **settings[kind])
    run = run_of(tmp_path / "run", tokenizer=folder, model=model)
    run.save()
    convert(tmp_path / "run", tmp_path / "hf")
    eos, pad, bos = {"bytes": (0, None, None), "named": (1, 3, 0), "unnamed": (2, None, None), "bos": (0, None, 0)}[kind]
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [described[f"{name}_token_id"] for name in ("eos", "pad", "bos")] == [eos, pad, bos]
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (eos, eos if pad is None else pad)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = TEXT + " caf\u00e9 \u20ac <end>\n"
    if kind == "bytes":
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    else:
        assert tokenizer(TEXT).input_ids == tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer.eos_token_id == (None if kind == "bos" else eos)
    assert generated(tmp_path / "hf", eos) == [7, 8, eos]
    assert len(generated(tmp_path / "hf", 5)) == 8

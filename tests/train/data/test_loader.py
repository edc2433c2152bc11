"""Data: readable and unreadable files, the split, and the order that resuming depends on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.texts import read_documents

from mxep.train.data.corpus import document_share, split_by_share
from mxep.train.data.loader import (
    IGNORE,
    ByteTokenizer,
    TrainingSequences,
    held_out_batches,
    load_corpus,
)
from mxep.train.data.text_files import default_corpus_files


def numbered(length: int) -> np.ndarray:
    return (np.arange(length) % 251).astype(np.uint8)


def test_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    text = "def f(x):\n    return 'h\u00e9'\n"
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text


def test_default_corpus_is_the_standard_library() -> None:
    files = default_corpus_files()
    assert len(files) > 200
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
    assert files == sorted(files, key=lambda path: path.as_posix())


def test_default_split_is_stable_and_disjoint() -> None:
    documents = read_documents([])
    train, held_out = split_by_share(documents, 0.02)(documents)
    assert len(train) + len(held_out) == len(documents)
    assert not set(train) & set(held_out)
    assert 0.005 < len(held_out) / len(documents) < 0.05
    assert split_by_share(documents[::-1], 0.02)(documents[::-1])[1] == held_out[::-1]


def test_texts_folders_jsonl_and_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("second")
    (tmp_path / "folder" / "a.md").write_text("first")
    (tmp_path / "folder" / "deep" / "c.py").write_text("third")
    (tmp_path / "folder" / ".hidden").write_text("never")
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89PNG\x00\xff")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n{"text": ""}\n')
    parquet.write_table(pyarrow.table({"text": ["row", None, "last"], "n": [1, 2, 3]}), tmp_path / "rows.parquet")
    with pytest.warns(UserWarning, match="left out 1 of 4 files"):
        documents = read_documents([str(tmp_path / "folder"), str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.parquet")])
    assert documents == [b"first", b"second", b"third", b"one", b"two", b"row", b"last"]


def test_a_file_that_is_named_twice_is_reported(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} " * 20)
    once = load_corpus([str(tmp_path)], ByteTokenizer())
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"1 files are named more than once and read as often, among them .*b\.txt; name each"):
        both = load_corpus([str(tmp_path), str(tmp_path / "b.txt")], ByteTokenizer())
    assert len(both.train) > len(once.train)
    with pytest.warns(UserWarning, match=r"1 files are named more than once and read as often, among them .*b\.txt; name each"):
        held_out = load_corpus([str(tmp_path)], ByteTokenizer(), validation=[str(tmp_path / "b.txt")] * 2)
    assert held_out.num_held_out_documents == 2


BAD_FILES = {
    "empty.txt": (b"", "is empty"),
    "binary.bin": (b"ab\0cd", "not text: NUL byte at offset 2"),
    "latin1.txt": (b"caf\xe9 au lait", "not text: byte 0xe9 at offset 3 is not UTF-8"),
    "empty.jsonl": (b"\n\n", "no line with text"),
    "broken.jsonl": (b'{"text": "ok"}\n{"text": \n', "line 2 is not JSON that can be read"),
    "missing.jsonl": (b'{"text": "ok"}\n{"content": "x"}\n', r"line 2 has no field 'text', got fields \['content'\]"),
    "number.jsonl": (b'{"text": 3}\n', "field 'text' is int, want a string"),
    "digits.jsonl": (
        b'{"text": "ok"}\n{"text": "x", "id": ' + b"1" * 5000 + b"}\n",
        "line 2 is not JSON that can be read: Exceeds the limit",
    ),
    "nested.jsonl": (
        b'{"text": "x", "of": ' + b"[" * 90000 + b"]" * 90000 + b"}\n",
        "line 1 is not JSON that can be read: (maximum recursion|Stack overflow)",
    ),
    "list.jsonl": (b"[1]\n", "line 1 has no field 'text', got list"),
    "broken.parquet": (b"PAR1 nonsense", "not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=message):
        read_documents([str(tmp_path / name)])


def test_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    """Parquet writers do not check the bytes of a string."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ends, content = np.array([0, 1, 3], dtype=np.int32).tobytes(), b"a\xff\xfe"
    strings = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(content)])
    parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"data: .*rows\.parquet is not a readable parquet file: .*Invalid UTF8"):
        read_documents([str(tmp_path / "rows.parquet")])


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_documents([str(tmp_path / "nowhere.txt")])
    with pytest.raises(ValueError, match="holds no text"):
        read_documents([str(tmp_path)])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match=r"does not exist|cannot be read"):
        read_documents([str(tmp_path / "loop")])
    with pytest.raises(ValueError, match="cannot be read"):
        read_documents(["/proc/self/mem"])


def test_parquet_without_the_column(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"no column 'text', got \['content'\]"):
        read_documents([str(tmp_path / "rows.parquet")])


def test_split_of_few_documents() -> None:
    lines = b"".join(b"line %d\n" % i for i in range(100))
    train, held_out = split_by_share([lines], 0.1)([lines])
    assert train[0] + held_out[0] == lines
    assert train[0].endswith(b"\n")
    assert 0 < len(held_out[0]) < 0.2 * len(lines)
    documents = [b"a", b"b", b"b", b"c"]
    train, held_out = split_by_share(documents, 1e-9)(documents)
    assert len(train) + len(held_out) == 4
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.9])
def test_of_few_documents_the_longest_loses_its_end(share: float) -> None:
    """The document with the smallest hash was held out whole, 1,068,892 of 1,072,783 tokens of two files."""
    long = b"".join(b"a longer line %d\n" % i for i in range(5000))
    documents = [b"short one\n" * 20, long, b"short two\n" * 30, long]
    hashes = {document: document_share(document) for document in documents}
    share = share if share == 0.9 else min(share, 0.99 * min(hashes.values()))  # no hash is below it
    share = max(hashes.values()) * 1.0001 if share == 0.9 else share  # every hash is below it
    train, held_out = split_by_share(documents, share)(documents)
    (end,) = held_out
    assert [*train[:1], *train[2:]] == [documents[0], documents[2]]
    assert train[1] + end == long
    assert end.startswith(b"a longer line")
    whole = sum(map(len, documents))
    assert len(end) == pytest.approx(min(share * whole, 0.4 * len(long)), rel=0.02, abs=20)


def test_a_line_that_ended_long_before_is_not_where_a_document_is_cut() -> None:
    documents = [b"x" * 495 + b"\n" + b"y" * 504, b"z" * 900, b"w" * 800]
    train, (end,) = split_by_share(documents, 1e-3)(documents)
    assert len(end) == 3
    assert train[0] + end == documents[0]


@pytest.mark.parametrize("share", [1e-20, 0.01, 0.02, 0.03, 0.5])
@pytest.mark.parametrize("text", ["\u65e5" * 101, "\u65e5", "a\n" + "\u65e5" * 101])
def test_a_lone_document_is_cut_between_characters(text: str, share: float) -> None:
    train, held_out = split_by_share([text.encode()], share)([text.encode()])
    assert train[0].decode() + held_out[0].decode() == text
    assert held_out[0]


def test_share_out_of_range() -> None:
    with pytest.raises(ValueError, match="held_out_share"):
        load_corpus([], ByteTokenizer(), 0.9)


def test_windows_are_a_function_of_the_sequence_number() -> None:
    stream = numbered(1003)
    whole = TrainingSequences(stream, seq_len=16, batch=8, seed=3)
    inputs, labels, _ = whole.next_batch()
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    halves = [TrainingSequences(stream, seq_len=16, batch=4, rank=rank, world=2, seed=3) for rank in range(2)]
    assert torch.equal(torch.cat([half.next_batch()[0] for half in halves]), inputs)


def test_resumed_windows_continue_across_an_epoch() -> None:
    straight = TrainingSequences(numbered(200), seq_len=16, batch=5, seed=1)  # 11 windows an epoch
    batches = [straight.next_batch() for _ in range(8)]
    resumed = TrainingSequences(numbered(200), seq_len=16, batch=5, seed=1)
    first = TrainingSequences(numbered(200), seq_len=16, batch=5, seed=1)
    for _ in range(3):
        first.next_batch()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for inputs, labels, _ in batches[3:]:
        again = resumed.next_batch()
        assert torch.equal(again[0], inputs)
        assert torch.equal(again[1], labels)
    with pytest.raises(ValueError, match="belongs to seed 1"):
        TrainingSequences(numbered(200), seq_len=16, batch=5, seed=2).load_state_dict(first.state_dict())


def test_positions_begin_anew_at_every_document(tmp_path: Path) -> None:
    """Of bytes a NUL ends each document, so that they can be counted without the loader."""
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text("x" * (number % 9 + 1))
    corpus = load_corpus([str(tmp_path)], ByteTokenizer(), 0.3)
    windows = TrainingSequences(corpus.train, 16, 2, rank=1, world=2, starts=corpus.train_starts)
    held_out = held_out_batches(corpus.held_out, 16, 3, 1000, starts=corpus.held_out_starts)
    for inputs, labels, documents in [*(windows.next_batch() for _ in range(9)), *held_out]:
        assert documents is not None
        for row, positions in zip(inputs[labels[:, 0] != IGNORE], documents.positions[labels[:, 0] != IGNORE], strict=True):
            want, position = [], 0
            for token in row.tolist():
                want.append(position)
                position = 0 if token == ByteTokenizer.separator else position + 1
            real = int((row != 0).nonzero().max()) + 1
            assert positions.tolist()[:real] == want[:real]
        assert (documents.positions == 0).sum(1).max() == documents.most
        assert documents.positions.max() == documents.longest - 1


def test_an_epoch_shows_every_window_once() -> None:
    windows = TrainingSequences(numbered(167), seq_len=16, batch=1, seed=0)
    starts = {int(windows.next_batch()[0][0, 0]) for _ in range(windows.per_epoch)}
    assert len(starts) == windows.per_epoch == 10


def test_text_shorter_than_a_window() -> None:
    with pytest.raises(ValueError, match="16 tokens of training text, want at least seq_len"):
        TrainingSequences(numbered(16), seq_len=16, batch=1)
    assert TrainingSequences(numbered(17), seq_len=16, batch=2).next_batch()[0].shape == (2, 16)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_targets_do_not_depend_on_the_ranks(world: int) -> None:
    parts = [held_out_batches(numbered(150), seq_len=16, batch=2, max_tokens=10_000, rank=rank, world=world) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    targets = [int(label) for part in parts for _, labels, _ in part for label in labels.flatten() if label != IGNORE]
    assert sorted(targets) == sorted(numbered(150)[1:].tolist())


def test_held_out_is_spread_and_limited() -> None:
    batches = held_out_batches(numbered(16 * 200 + 1), seq_len=16, batch=4, max_tokens=160)
    assert sum(int((labels != IGNORE).sum()) for _, labels, _ in batches) == 160
    assert sum(len(held_out_batches(numbered(5), 16, 1, 100, rank, 2)) for rank in range(2)) == 2


@pytest.mark.parametrize("extra", [1, 2, 40, 63, 64])
def test_an_epoch_leaves_out_less_than_a_sequence(extra: int) -> None:
    """No target is used twice in an epoch, and two epochs leave out different ones."""
    seq_len, length = 64, 3 * 64 + extra
    sequences = TrainingSequences(np.arange(length), seq_len, 1, seed=0)
    assert sequences.per_epoch == length // seq_len
    seen = np.zeros((20, length), int)
    for epoch in seen:
        for _ in range(sequences.per_epoch):
            inputs, labels, _ = sequences.next_batch()
            assert torch.equal(labels[0], (inputs[0] + 1) % length), "the first token follows the last one"
            np.add.at(epoch, labels[0].numpy(), 1)
    assert seen.max() == 1
    assert (seen == 0).sum(1).tolist() == [length % seq_len] * 20
    assert seen.any(0).all()


def test_documents_of_a_sequence_that_begins_anew() -> None:
    """Documents of 5, 3 and 9 tokens, the last of which is cut by the end of the stream."""
    starts = np.array([0, 5, 8])
    position = [*range(5), *range(3), *range(9)]
    sequences = TrainingSequences(np.arange(17), 8, 1, starts=starts)
    around = 0
    for _ in range(60):
        inputs, _, documents = sequences.next_batch()
        want, begin = [], int(inputs[0, 0])
        for token in inputs[0].tolist():
            want.append(0 if not want or position[token] == 0 else want[-1] + 1)
        assert documents is not None
        assert documents.positions[0].tolist() == want
        around += begin + 8 > 17
    assert around > 10

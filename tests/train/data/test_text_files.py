"""Values of `--data` other than plain files and folders, and reading of large files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tests.texts import read_documents

from mxep.train.data import text_files
from mxep.train.data.text_files import check_cache, check_paths

PROGRAM = Path(__file__).parents[2] / "programs" / "read_damaged.py"


def names(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def test_compressed_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    lines = b'{"text": "one"}\r\n{"text": "two"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.output_stream(str(tmp_path / "b.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(b"\0"))
    with pytest.warns(UserWarning, match=r"left out 1 of 4 files .* d.tar.gz"):
        assert read_documents([str(tmp_path)]) == names("one", "two", "one", "two", "three")


def test_names_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text('{"text": "one"}\n')
    (tmp_path / "B.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    assert read_documents([str(tmp_path)]) == names("one", "two")


def test_rows_that_are_read_as_one_text_are_reported(tmp_path: Path) -> None:
    """If the file was named; in a searched folder such files are among code."""
    (tmp_path / "a.json").write_text('[{"text": "one"}]')
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"text\none\n"))
    with pytest.warns(UserWarning, match=r"a\.json: read as plain text; rows are read from \.jsonl"):
        assert read_documents([str(tmp_path / "a.json")]) == names('[{"text": "one"}]')
    with pytest.warns(UserWarning, match=r"a\.json and 1 more: read as plain text"):
        read_documents([str(tmp_path / "*")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_documents([str(tmp_path)])


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:12] + b"xx" + content[14:], lambda _: b"text"])
def test_damaged_compression(damage, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "one"}\n' * 9)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz (cannot be read|line)"):
        read_documents([str(path)])


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As --data "$TEXTS" gives where the shell knows no such variable."""
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"data: '' names nothing, want a file"):
        check_paths([""])
    assert read_documents(["."]) == names("one")


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The second pass over it would find nothing, and one without a writer blocks."""
    os.mkfifo(tmp_path / "text.jsonl")
    for name in (tmp_path / "text.jsonl", "/dev/null"):
        with pytest.raises(ValueError, match=f"data: {name} is no regular file but a pipe or a device, want a file"):
            check_paths([str(name)])


def test_another_field(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl").write_text('{"content": "one", "text": "never"}\n')
    parquet.write_table(pyarrow.table({"text": ["never"], "content": ["two"]}), tmp_path / "b.parquet")
    assert read_documents([str(tmp_path)], "content") == names("one", "two")
    for name in ("a.jsonl", "b.parquet"):
        with pytest.raises(ValueError, match=r"'code', got .*--data-field names another"):
            read_documents([str(tmp_path / name)], "code")


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("compressed", [False, True])
def test_large_text_is_read_in_parts(end: str, compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_WHOLE_BYTES", 64)
    monkeypatch.setattr(text_files, "_PART_BYTES", 16)
    path = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    for size in range(60, 130):
        text = "".join(f"l{i}\u20ac{end}" for i in range(200)).encode()[:size].decode(errors="ignore")
        path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
        parts = read_documents([str(path)])
        assert b"".join(parts).decode() == text
        assert len(parts) == 1 or max(map(len, parts)) <= 16
        assert not end or len(parts) == 1 or all(part.endswith(b"\n") for part in parts[:-1])
        assert all(part.decode() for part in parts)
    path.write_bytes(gzip.compress(b"a" * 100 + b"\0") if compressed else b"a" * 100 + b"\0")
    with pytest.raises(ValueError, match="NUL byte at offset 100"):  # even in a folder: some of it was taken already
        read_documents([str(tmp_path)])


def write_arrow(path: Path, rows: list[str | None], stream: bool = True) -> None:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(rows))), "text": rows})
    with (ipc.new_stream if stream else ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_saved(folder: Path, *files: list[str | None]) -> None:
    """A folder as `datasets.Dataset.save_to_disk` lays it out."""
    entries = [{"filename": f"data-{i:05d}-of-{len(files):05d}.arrow"} for i in range(len(files))]
    for entry, rows in zip(entries, files, strict=True):
        write_arrow(folder / entry["filename"], rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": entries, "_fingerprint": "x"}))
    (folder / "dataset_info.json").write_text("{}")


def write_rows(path: Path, kind: str) -> None:
    """A small file of that kind, as its libraries write it."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = ["one", None, "caf\u00e9 " * 3, "two"]
    table = pyarrow.table({"text": pyarrow.array(rows).dictionary_encode() if kind == "dictionary" else rows})
    lines = "".join(json.dumps({"text": row or ""}, ensure_ascii=False) + "\n" for row in rows).encode()
    match kind:
        case "stream" | "file" | "dictionary":
            ipc = pytest.importorskip("pyarrow.ipc")
            with (ipc.new_file if kind == "file" else ipc.new_stream)(str(path), table.schema) as writer:
                writer.write_table(table)
        case "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        case "jsonl":
            path.write_bytes(lines)
        case "gzip":
            path.write_bytes(gzip.compress(lines))
        case "zstd":
            with pyarrow.output_stream(str(path), compression="zstd") as stream:
                stream.write(lines)


DAMAGED = {
    "stream": "a.arrow",
    "file": "a.arrow",
    "dictionary": "a.arrow",
    "parquet": "a.parquet",
    "jsonl": "a.jsonl",
    "gzip": "a.jsonl.gz",
    "zstd": "a.jsonl.zst",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_no_damage_ends_the_process(kind: str, tmp_path: Path) -> None:
    """For any wrong byte the result is documents, or an error that names the file."""
    path = tmp_path / DAMAGED[kind]
    write_rows(path, kind)
    size = path.stat().st_size
    done = subprocess.run([sys.executable, str(PROGRAM), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["documents"] + counts["refused"] == 2 * size
    assert counts["refused"] > size // 4


def test_folders_of_the_datasets_library(tmp_path: Path) -> None:
    write_saved(tmp_path / "train", ["one", None, "two"], ["three"])
    write_saved(tmp_path / "test", ["never"])
    assert read_documents([str(tmp_path / "train")]) == names("one", "two", "three")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds the splits train, test; name one of them: .*train"):
        check_paths([str(tmp_path)])
    (tmp_path / "train" / "state.json").write_text("[]")
    with pytest.raises(ValueError, match="is a damaged data set"):
        check_paths([str(tmp_path / "train")])
    write_arrow(tmp_path / "file.arrow", ["a", "b", "c"], stream=False)
    assert read_documents([str(tmp_path / "file.arrow")]) == names("a", "b", "c")
    (tmp_path / "broken.arrow").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a readable arrow file"):
        read_documents([str(tmp_path / "broken.arrow")])


def test_a_saved_folder_without_one_of_its_files(tmp_path: Path) -> None:
    write_saved(tmp_path, ["one"], ["two"])
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"damaged data set: data-00001-of-00002\.arrow, .* is missing"):
        check_paths([str(tmp_path)])


def test_a_folder_that_the_library_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="read without it; only asked how it lays its folders out")
    train, test = (datasets.Dataset.from_dict({"text": texts}) for texts in (["row 7", "row 3"], [f"row {i}" for i in range(10)]))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "saved"), num_shards={"train": 1, "test": 3})
    assert read_documents([str(tmp_path / "saved" / "train")]) == names("row 7", "row 3")
    assert len(read_documents([str(tmp_path / "saved" / "test")])) == 10


def test_token_files_among_the_texts(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(ValueError, match=r"token files would go to .*/texts/cache, which is inside of .*/texts and"):
        check_cache(["hf://datasets/owner/name/*.txt", str(tmp_path / "texts"), str(tmp_path)], tmp_path / "texts" / "cache")
    with pytest.raises(ValueError, match="give one with --data-cache"):
        check_cache([str(tmp_path)], tmp_path)
    check_cache([str(tmp_path)], tmp_path / ".cache" / "tokens")
    check_cache([str(tmp_path / "texts"), str(tmp_path / "*.txt")], tmp_path / "cache")


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert read_documents([str(tmp_path / "*.txt")]) == names("a.txt", "b.txt")
    with pytest.raises(ValueError, match=r"\*\.rs matches no file"):
        check_paths([str(tmp_path / "*.rs")])
    (tmp_path / "d.txt").write_text("")
    with pytest.raises(ValueError, match=r"d\.txt is empty"):
        read_documents([str(tmp_path / "*.txt")])


def test_data_sets_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "datasets--owner--name"
    for commit in ("c0ffee", "decaf"):
        (folder / "snapshots" / commit / "data").mkdir(parents=True)
        (folder / "snapshots" / commit / "data" / "train-0.jsonl").write_text(f'{{"text": "{commit}"}}\n')
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("decaf")
    assert read_documents(["hf://datasets/owner/name/data/train-*.jsonl"]) == names("decaf")
    assert read_documents(["hf://datasets/owner/name@c0ffee/data"]) == names("c0ffee")
    with pytest.raises(ValueError, match="names no files"):
        check_paths(["hf://datasets/owner/name"])
    with pytest.raises(ValueError, match=r"not in the cache .* nothing is downloaded"):
        check_paths(["hf://datasets/owner/other/*.parquet"])
    with pytest.raises(ValueError, match="matches no file"):
        check_paths(["hf://datasets/owner/name/*.parquet"])


def test_links_below_a_folder(tmp_path: Path) -> None:
    """A linked folder is read, each folder once; a link that leads nowhere is an error wherever it is found."""
    folder, linked = tmp_path / "folder", tmp_path / "linked"
    folder.mkdir()
    linked.mkdir()
    (folder / "one.txt").write_text("one")
    (linked / "two.txt").write_text("two")
    (folder / "more").symlink_to(linked)
    (linked / "back").symlink_to(folder)
    assert read_documents([str(folder)]) == names("two", "one")  # more/two.txt, one.txt
    (folder / "three.txt").symlink_to(tmp_path / "gone.txt")
    for data in (folder, folder / "*.txt"):
        with pytest.raises(ValueError, match=r"three\.txt is a link to .*gone\.txt, which does not exist; fetch that file again"):
            read_documents([str(data)])


def test_a_folder_below_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    for name in ("one.txt", "closed/two.txt"):
        (tmp_path / name).write_text(name)
    listed = os.scandir

    def refused(path: str) -> object:  # root may read any folder
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ValueError, match="closed cannot be read: Permission denied"):
        read_documents([str(tmp_path)])

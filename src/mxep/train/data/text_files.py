"""Finds the files of `--data`, in a fixed order, and reads their documents one at a time.

Formats: text, jsonl, parquet and arrow; text and jsonl also compressed with gzip or zstd. Without a name, the documents are the Python
standard library's source. A document is the UTF-8 bytes of one text file, one jsonl line or one row. It is never empty and holds no NUL,
which separates documents in a stream of bytes. A text file of more than 256 MiB becomes several documents of at most 16 MiB, cut at line
ends if possible."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from mxep.extras import install_command

TEXT_FIELD = "text"
HUB = "hf://datasets/"
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})
_WHOLE_BYTES, _PART_BYTES = 1 << 28, 1 << 24  # of a text file: the most of one document, and of each part of a larger file
_ROWS = 1024  # in memory at once
_ROW_FORMATS = (".jsonl", ".parquet", ".arrow")
_COMPRESSIONS = (".gz", ".zst")
_OTHER_ROWS = (".json", ".csv", ".tsv", ".ndjson")  # usually rows, but plain text here


class NotTextError(ValueError):
    """A file is not UTF-8 text, or contains NUL."""


class RowReader(Protocol):
    """Makes documents of the rows of .jsonl, .parquet and .arrow files.

    Attributes:
        text_files: whether other files are read as well, as text.
    """

    text_files: bool

    @property
    def optional_columns(self) -> Sequence[str]:
        """Columns that a row may lack. A row that has no other value is no document."""

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The columns of a table that are read. Raises ValueError if it lacks them; `where` begins the message."""

    def document(self, row: object, where: str) -> bytes:
        """The document of one row, empty for none. Raises ValueError for a row that has none; `where` begins the message."""


@dataclass(frozen=True)
class TextRows:
    """Reads the text in one field of each row."""

    field: str = TEXT_FIELD
    text_files = True
    optional_columns = ()

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The field's column."""
        if self.field not in names:
            raise ValueError(f"data: {where} has no column {self.field!r}, got {list(names)}; --data-field names another")
        return [self.field]

    def document(self, row: object, where: str) -> bytes:
        """The field's text in UTF-8."""
        if not isinstance(row, dict) or self.field not in row:
            got = f"fields {sorted(row)}" if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"data: {where} has no field {self.field!r}, got {got}; --data-field names another")
        value = row[self.field]
        if not isinstance(value, str):
            raise ValueError(f"data: {where}: field {self.field!r} is {type(value).__name__}, want a string")
        if "\0" in value:
            raise ValueError(f"data: {where}: field {self.field!r} holds a NUL, which separates documents")
        return value.encode()


_TEXT_ROWS = TextRows()


def parse_suffixes(path: Path) -> tuple[str, str]:
    """(format, compression) of a file by its name, as lower-case suffixes; an uncompressed file has "" for the second.

    >>> parse_suffixes(Path("a.JSONL.gz")), parse_suffixes(Path("a.md"))
    (('.jsonl', '.gz'), ('.md', ''))
    """
    compression = path.suffix.lower() if path.suffix.lower() in _COMPRESSIONS else ""
    return (Path(path.stem).suffix if compression else path.suffix).lower(), compression


def has_rows(path: Path) -> bool:
    """True if the file's name says that each of its rows is a document."""
    return parse_suffixes(path)[0] in _ROW_FORMATS


def reading(path: Path) -> str:
    """How a file is read, by its name: the format of its rows, if any, and its compression.

    >>> reading(Path("a.jsonl.gz")), reading(Path("a.txt.gz")), reading(Path("a.md"))
    ('.jsonl.gz', '.gz', '')
    """
    name, compression = parse_suffixes(path)
    return (name if name in _ROW_FORMATS else "") + compression


def read_file(path: Path, rows: RowReader = _TEXT_ROWS) -> Iterator[bytes]:
    """The documents of a file; an empty text file has none.

    Raises:
        ValueError: the file is unreadable or damaged, has no row with a document, or `rows` refuses a row; pyarrow is missing.
        NotTextError: the file is not text, or has no rows and `rows` reads nothing else.
    """
    try:
        if not has_rows(path):
            if not rows.text_files:
                raise NotTextError(f"data: {path} has no rows; conversations are read from {', '.join(_ROW_FORMATS)}")
            yield from _read_text(path)
            return
        lines, found = parse_suffixes(path)[0] == ".jsonl", False
        for document in _read_jsonl(path, rows) if lines else _read_table(path, rows):
            if document:
                found = True
                yield document
        if not found:
            raise ValueError(f"data: {path} holds no {'line' if lines else 'row'} with text")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"data: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _open(path: Path) -> BinaryIO:
    """The file's bytes, decompressed."""
    _, compression = parse_suffixes(path)
    if compression == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if compression == ".zst":
        compressed = _pyarrow(path).input_stream(str(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(compressed, 1 << 20))
    return path.open("rb")


def _check_text(path: Path, content: bytes, offset: int = 0) -> None:
    """Raise NotTextError unless these bytes, which start at `offset` of a file, are UTF-8 text without NUL."""
    where = content.find(0)
    if where >= 0:
        raise NotTextError(f"data: {path} is not text: NUL byte at offset {offset + where}; want UTF-8")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte 0x{content[error.start]:02x} at offset {offset + error.start} is not UTF-8"
        raise NotTextError(f"data: {path} is not text: {reason}; want UTF-8") from None


def _read_text(path: Path) -> Iterator[bytes]:
    """A file as one document, a large file as several."""
    with _open(path) as file:
        content = file.read(_WHOLE_BYTES + 1)
        if len(content) <= _WHOLE_BYTES:
            _check_text(path, content)
            if content:
                yield content
            return
        start = offset = 0  # offset: of content[0] in the file
        while start < len(content):
            if len(content) - start <= _PART_BYTES and (more := file.read(_PART_BYTES)):
                content, offset, start = content[start:] + more, offset + start, 0
            end = cut_text(content, start, _PART_BYTES)
            _check_text(path, content[start:end], offset + start)
            yield content[start:end]
            start = end


def cut_text(content: bytes, start: int, size: int) -> int:
    """End of a part of at most `size` bytes that begins at `start`: the end of a line if possible, else between two characters.

    >>> cut_text(b"ab\\ncd", 0, 4), cut_text(b"abcd", 0, 3), cut_text(b"abcd", 0, 4)
    (3, 3, 4)
    """
    if len(content) - start <= size:
        return len(content)
    end = content.rfind(b"\n", start, start + size) + 1
    if not end:
        end = start + size
        while end > start + 1 and content[end] & 0xC0 == 0x80:  # inside of a character
            end -= 1
    return end


def _read_jsonl(path: Path, rows: RowReader) -> Iterator[bytes]:
    """The document of each line that is not blank."""
    number = offset = 0
    with _open(path) as file:
        for block in file:
            _check_text(path, block, offset)
            offset += len(block)
            for line in block.splitlines():  # a lone \r ends one, too
                number += 1
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    record = json.loads(line)
                    if b"\\ud" in line or b"\\uD" in line:  # perhaps half of a surrogate pair, which UTF-8 does not have
                        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
                except (ValueError, RecursionError) as error:  # json rejects integers of more than 4300 digits and nesting near 1000
                    raise ValueError(f"data: {where} is not JSON that can be read: {error}") from error
                yield rows.document(record, where)
    if not offset:
        raise ValueError(f"data: {path} is empty")


def _pyarrow(path: Path) -> Any:
    """The pyarrow library. Raises ValueError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"data: reading {path} needs pyarrow; {install_command('parquet')}") from error
    return pyarrow


def _read_table(path: Path, rows: RowReader) -> Iterator[bytes]:
    """The document of each row of a parquet file, one row group in memory at a time, or of an arrow file or stream (Hugging Face's datasets
    write those).

    Rows without a value are left out.
    """
    pyarrow, kind, number = _pyarrow(path), parse_suffixes(path)[0].removeprefix("."), 0
    try:
        with ExitStack() as opened:
            if kind == "parquet":  # pages are checked where they have checksums
                table = opened.enter_context(pyarrow.parquet.ParquetFile(path, page_checksum_verification=True))
                columns = rows.columns(table.schema_arrow.names, str(path))
                batches = table.iter_batches(_ROWS, columns=columns)
            else:
                file = opened.enter_context(pyarrow.OSFile(str(path)))  # not mapped: truncation during reading raises an error, not SIGBUS
                if file.read(6) == b"ARROW1":
                    table = pyarrow.ipc.open_file(file)
                    found = (table.get_batch(index) for index in range(table.num_record_batches))
                else:
                    file.seek(0)
                    found = table = pyarrow.ipc.open_stream(file)
                columns = rows.columns(table.schema.names, str(path))
                batches = (batch.select(columns) for batch in found)
            for batch in batches:
                batch.validate(full=True)  # offsets within the file, text in UTF-8: pyarrow trusts them and crashes when it reads
                for start in range(0, len(batch), _ROWS):
                    for row in batch.slice(start, _ROWS).to_pylist():
                        number += 1
                        if any(value is not None for name, value in row.items() if name not in rows.optional_columns):
                            yield rows.document(_without_none(row), f"{path} row {number}")
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"data: {path} is not a readable {kind} file: {error}") from error


def _without_none(value: Any) -> Any:
    """Without keys that are None, at any depth: Arrow gives all objects of a column the same keys.

    >>> _without_none({"a": None, "b": [{"c": None, "d": 1}]})
    {'b': [{'d': 1}]}
    """
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Source:
    """The files of one name in `--data`.

    Attributes:
        name: as given, for messages.
        files: in the order of their documents.
        searched: the files come from a folder, where some may not be text.
        quiet: no warning about files that are not text.
    """

    name: str
    files: tuple[Path, ...]
    searched: bool = False
    quiet: bool = False


def default_corpus_files() -> list[Path]:
    """The .py files of this Python's standard library in a fixed order, without installed packages.

    Raises:
        ValueError: this Python has none, as some embedded and zipped ones.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if _NOT_SOURCE.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise ValueError(f"data: this Python has no standard library source under {root}; name a text with --data")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def installed_python_files() -> list[Path]:
    """Every .py file of this Python in a fixed order, each once: its standard library and the installed packages.

    Raises:
        ValueError: there is none.
    """
    roots = dict.fromkeys(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
    outer = [root for root in roots if not any(other in root.parents for other in roots)]
    files = [path for root in outer for path in sorted(root.rglob("*.py")) if path.is_file()]
    if not files:
        raise ValueError(f"data: this Python has no .py file under {', '.join(map(str, outer))}; name a text with --data")
    return files


def write_python_corpus(target: Path) -> tuple[int, int]:
    """Write `installed_python_files` to one .jsonl; returns the numbers of files written and skipped (empty or not UTF-8).

    The file appears when it is complete.
    """
    partial = target.with_name(f".{target.name}.partial")
    taken = left_out = 0
    with partial.open("w") as file:
        for path in installed_python_files():
            try:
                documents = list(read_file(path))
            except NotTextError:
                documents = []
            for document in documents:
                file.write(json.dumps({TEXT_FIELD: document.decode()}) + "\n")
            taken, left_out = taken + bool(documents), left_out + (not documents)
    partial.replace(target)
    return taken, left_out


def find_sources(data: Sequence[str]) -> list[Source]:
    """The files of each name; without names the default corpus. No file is read yet.

    A name is a file, a folder that is searched recursively (without hidden names), a folder that Hugging Face's datasets library saved, a
    pattern with *, ? or [], or hf://datasets/OWNER/NAME[@REVISION]/PATTERN for files of a data set in the local cache.

    Raises:
        ValueError: no such file, a pipe, an empty name, a saved data set that is damaged or has several splits.
    """
    if not data:
        return [Source("the Python standard library", tuple(default_corpus_files()), searched=True, quiet=True)]
    found = []
    for name in data:
        if not name:  # Path("") is the current folder
            raise ValueError(f"data: {name!r} names nothing, want a file, a folder or a pattern; is a variable of the shell not set?")
        pattern = _in_hub_cache(name) if name.startswith(HUB) else str(Path(name).expanduser())
        path = Path(pattern)
        if path.is_dir():
            saved = _saved_dataset(path)
            found.append(Source(name, saved) if saved else Source(name, _walk(path), searched=True))
        elif path.exists():
            if not path.is_file():
                raise ValueError(f"data: {name} is no regular file but a pipe or a device, want a file: it is read more than once")
            found.append(Source(name, (path,)))
        elif matches := sorted(match for match in glob.glob(pattern, recursive=True) if not Path(match).is_dir()):
            _check_links(paths := tuple(map(Path, matches)))
            found.append(Source(name, tuple(path for path in paths if path.is_file())))
        else:
            got = "matches no file" if glob.has_magic(pattern) else "does not exist"
            raise ValueError(f"data: {name} {got}, want a file, a folder, or a pattern of files; name another text with --data")
    return found


def stream_documents(sources: Sequence[Source], rows: RowReader = _TEXT_ROWS) -> Iterator[bytes]:
    """Every document, in a fixed order.

    A named file must be readable, not empty, and text. Files of a searched folder that are not text are skipped with a warning. Named files
    of other row formats (json, csv) are read as plain text, with a warning.

    Raises:
        ValueError: what `read_file` raises; a folder without text.
    """
    for source in sources:
        found, skipped = False, []
        if not source.searched and (unread := [path for path in source.files if parse_suffixes(path)[0] in _OTHER_ROWS]):
            named = f"{unread[0]}" + (f" and {len(unread) - 1} more" if len(unread) > 1 else "")
            warnings.warn(f"data: {named}: read as plain text; rows are read from .jsonl, .parquet and .arrow, rename or convert it")
        for path in source.files:
            before = True  # no document of this file yet
            try:
                for document in read_file(path, rows):
                    found, before = True, False
                    yield document
            except NotTextError:
                if not (source.searched and before) or has_rows(path):
                    raise
                skipped.append(path.name)
            else:
                if before and not source.searched:
                    raise ValueError(f"data: {path} is empty")
        total = len(source.files)
        if not found:
            raise ValueError(f"data: {source.name} holds no text ({total} files, {len(skipped)} of them not text, the others empty)")
        if skipped and not source.quiet:
            warnings.warn(f"data: left out {len(skipped)} of {total} files in {source.name} that are not text, among them {skipped[0]}")


def check_paths(data: Sequence[str]) -> None:
    """Raise ValueError for the first name without a file."""
    if data:
        find_sources(data)


def check_cache(data: Sequence[str], cache: Path) -> None:
    """Raise ValueError if `cache` is in one of these folders, where the next run would read the token files as text."""
    for name in data:
        folder, target = Path(name).expanduser().resolve(), cache.expanduser().resolve()
        if not (folder.is_dir() and target.is_relative_to(folder)) or _hidden(target, folder):
            continue
        raise ValueError(
            f"data: token files would go to {cache}, which is inside of {name} and is read as a part of it by the next run; want another "
            "folder, give one with --data-cache"
        )


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _walk(folder: Path) -> tuple[Path, ...]:
    """Regular files below `folder`, sorted, without hidden ones; also below links to folders, each folder once.

    Raises:
        ValueError: a folder there cannot be read, or a link leads nowhere.
    """

    def refuse(error: OSError) -> None:  # os.walk leaves such folders out by default, as rglob does
        raise ValueError(f"data: folder {error.filename} cannot be read: {error.strerror}") from error

    found, entered = list[Path](), {folder.resolve()}
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        below = []
        for name in sorted(name for name in folders if not name.startswith(".")):
            if (there := Path(parent, name).resolve()) not in entered:
                entered.add(there)
                below.append(name)
        folders[:] = below
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    _check_links(found)
    return tuple(sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).as_posix()))


def _check_links(paths: Sequence[Path]) -> None:
    """Raise ValueError for the first link that leads nowhere."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"data: {path} is a link to {os.readlink(path)}, which does not exist; fetch that file again, or remove the link"
            )


def _saved_dataset(folder: Path) -> tuple[Path, ...]:
    """The arrow files of a folder that `Dataset.save_to_disk` wrote; empty for any other folder."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            raise ValueError(f"data: {folder} holds the splits {', '.join(splits)}; name one of them: {folder / splits[0]}")
        if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
            return ()
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise ValueError(f"data: {folder} was saved with rows chosen by indices; save it again after flatten_indices()")
        files = tuple(folder / entry["filename"] for entry in state["_data_files"])
    except (OSError, json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"data: {folder} is a damaged data set: {type(error).__name__} {error}") from error
    for path in files:
        if not path.is_file():
            raise ValueError(f"data: {folder} is a damaged data set: {path.name}, which its state.json names, is missing; save it again")
    return files


def _in_hub_cache(name: str) -> str:
    """hf://datasets/OWNER/NAME[@REVISION]/PATTERN as a pattern of files in huggingface_hub's cache; nothing is downloaded."""
    parts = name.removeprefix(HUB).split("/", 2)
    if len(parts) < 3 or not parts[2]:
        raise ValueError(f"data: {name} names no files; want {HUB}OWNER/NAME/PATTERN, as in {HUB}OWNER/NAME/data/train-*.parquet")
    owner, (repository, _, revision), pattern = parts[0], parts[1].partition("@"), parts[2]
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or base) / "hub").expanduser()
    folder = cache / f"datasets--{owner}--{repository}"
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    if not commit or not (folder / "snapshots" / commit).is_dir():
        raise ValueError(f"data: {name} is not in the cache {cache}, and nothing is downloaded here; fetch it before, with `hf download`")
    return str(Path(glob.escape(str(folder / "snapshots" / commit))) / pattern)

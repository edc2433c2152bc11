"""Files to documents: text, folders, jsonl and parquet; by default the Python standard library's own source.

A document is the UTF-8 bytes of one file, one jsonl line or one parquet row, never empty and without NUL, which is what separates
documents in the token stream.
"""

from __future__ import annotations

import json
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

TEXT_FIELD = "text"
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})


def default_corpus_files() -> list[Path]:
    """The .py files of this Python's standard library in a fixed order, without what was installed into it.

    Raises:
        ValueError: this Python ships none (some embedded and zipped ones).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if _NOT_SOURCE.isdisjoint(path.relative_to(root).parts)]
    if not files:
        raise ValueError(f"data: this Python has no standard library source under {root}; name a text with --data")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def installed_python_files() -> list[Path]:
    """Every .py file of this Python in a fixed order: its standard library and whatever is installed into it; no file twice.

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
    """`installed_python_files` as one .jsonl, a `text` field each; returns how many were taken and how many left out (empty, not UTF-8).

    The file is there when it is complete.
    """
    partial = target.with_name(f".{target.name}.partial")
    taken = left_out = 0
    with partial.open("w") as file:
        for path in installed_python_files():
            content = _read_bytes(path)
            if not content or _why_not_text(content):
                left_out += 1
                continue
            file.write(json.dumps({TEXT_FIELD: content.decode()}) + "\n")
            taken += 1
    partial.replace(target)
    return taken, left_out


def read_documents(data: Sequence[str]) -> list[bytes]:
    """Every document of the paths in `data`, in a fixed order; of the default corpus when `data` is empty.

    A file that is named must be readable, not empty and text.  A folder is searched through (hidden names are passed over), and
    files in it that are not text are left out with a warning.

    Raises:
        ValueError: a path that is missing, unreadable, empty or not text, a jsonl or parquet row without a `text` field, a folder
            in which there is no text, pyarrow missing for parquet.
    """
    if not data:
        return _read_all(default_corpus_files(), "the Python standard library", quiet=True)
    check_paths(data)
    documents: list[bytes] = []
    for name in data:
        path = Path(name).expanduser()
        documents += _read_all(_walk(path), name) if path.is_dir() else list(_read_file(path))
    return documents


def check_paths(data: Sequence[str]) -> None:
    """Raise ValueError for the first path that does not exist."""
    for name in data:
        if not Path(name).expanduser().exists():
            raise ValueError(f"data: {name} does not exist")


def _walk(folder: Path) -> list[Path]:
    """Regular files below `folder`, sorted, without hidden ones."""
    try:
        found = [path for path in folder.rglob("*") if path.is_file()]
    except OSError as error:
        raise ValueError(f"data: folder {folder} cannot be read: {error.strerror}") from error
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def _read_all(files: Sequence[Path], where: str, quiet: bool = False) -> list[bytes]:
    """Documents of many files; those that are plainly not text are skipped, broken jsonl and parquet are not."""
    documents: list[bytes] = []
    skipped = []
    for path in files:
        if path.suffix in (".jsonl", ".parquet"):
            documents += _read_file(path)
            continue
        content = _read_bytes(path)
        if _why_not_text(content):
            skipped.append(path.name)
        elif content:
            documents.append(content)
    if not documents:
        raise ValueError(f"data: {where} holds no text ({len(files)} files, {len(skipped)} of them not text, the others empty)")
    if skipped and not quiet:
        warnings.warn(f"data: left out {len(skipped)} of {len(files)} files in {where} that are not text, among them {skipped[0]}")
    return documents


def _read_file(path: Path) -> Iterator[bytes]:
    """Documents of one file that was asked for by name."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    content = _read_bytes(path)
    if not content:
        raise ValueError(f"data: {path} is empty")
    if reason := _why_not_text(content):
        raise ValueError(f"data: {path} is not text: {reason}; want UTF-8")
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path, content)
    else:
        yield content


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data: {path} cannot be read: {error.strerror}") from error


def _why_not_text(content: bytes) -> str:
    """Reason why these bytes are not UTF-8 text, "" when they are."""
    where = content.find(0)
    if where >= 0:
        return f"NUL byte at offset {where}"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8"
    return ""


def _document(value: object, where: str) -> bytes:
    """The bytes of one `text` field. Raises ValueError when it is no string or holds a NUL."""
    if not isinstance(value, str):
        raise ValueError(f"data: {where}: field {TEXT_FIELD!r} is {type(value).__name__}, want a string")
    if "\0" in value:
        raise ValueError(f"data: {where}: field {TEXT_FIELD!r} holds a NUL, which separates documents")
    return value.encode("utf-8", errors="replace")


def _read_jsonl(path: Path, content: bytes) -> Iterator[bytes]:
    """The `text` field of every line that is not blank."""
    found = False
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {where} is not JSON: {error}") from error
        if not isinstance(record, dict) or TEXT_FIELD not in record:
            got = f"fields {sorted(record)}" if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"data: {where} has no field {TEXT_FIELD!r}, got {got}")
        document = _document(record[TEXT_FIELD], where)
        if document:
            found = True
            yield document
    if not found:
        raise ValueError(f"data: {path} holds no line with text")


def _read_parquet(path: Path) -> Iterator[bytes]:
    """The `text` column, row by row, one row group in memory at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"data: reading {path} needs pyarrow; install it with: pip install 'mxep[parquet]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if TEXT_FIELD not in file.schema_arrow.names:
                raise ValueError(f"data: {path} has no column {TEXT_FIELD!r}, got {file.schema_arrow.names}")
            found = False
            for batch in file.iter_batches(columns=[TEXT_FIELD]):
                for value in batch.column(0).to_pylist():
                    document = b"" if value is None else _document(value, str(path))
                    if document:
                        found = True
                        yield document
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, ValueError) and str(error).startswith("data:"):
            raise
        raise ValueError(f"data: {path} is not a readable parquet file: {error}") from error
    if not found:
        raise ValueError(f"data: {path} holds no row with text")

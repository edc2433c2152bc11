"""One file to documents: text, jsonl, parquet and arrow, the first two compressed with gzip or zstd as well.

A document is the UTF-8 bytes of one text file, one jsonl line or one row, never empty and without NUL, which is what separates
documents in a stream of bytes.  Documents are read one after the other; a text file of more than 256 MiB is many of at most 16 MiB,
cut at a line's end where there is one.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

TEXT_FIELD = "text"
_WHOLE_BYTES, _PART_BYTES = 1 << 28, 1 << 24  # of a text file: read as one document up to here, else in parts
_ROWS = 1024  # in memory at once
_ROW_FORMATS = (".jsonl", ".parquet", ".arrow")
_COMPRESSIONS = (".gz", ".zst")
_OTHER_ROWS = (".json", ".csv", ".tsv", ".ndjson")  # rows for others, plain text here


class NotTextError(ValueError):
    """A file is not UTF-8 text, or has NUL in it."""


def has_rows(path: Path) -> bool:
    """Whether the file's name says that it holds documents in rows.

    >>> has_rows(Path("a.jsonl.gz")), has_rows(Path("a.txt.gz"))
    (True, False)
    """
    return _format(path) in _ROW_FORMATS


def looks_like_rows(path: Path) -> bool:
    """Whether others keep documents in rows in files of such names, which are one text here.

    >>> looks_like_rows(Path("a.json.gz")), looks_like_rows(Path("a.jsonl"))
    (True, False)
    """
    return _format(path) in _OTHER_ROWS


def reading(path: Path) -> str:
    """What a file's name says about how it is read: the format of its rows, if any, and its compression.

    >>> reading(Path("a.jsonl.gz")), reading(Path("a.txt.gz")), reading(Path("a.md"))
    ('.jsonl.gz', '.gz', '')
    """
    rows = _format(path) if has_rows(path) else ""
    return rows + _compression(path)


def read_file(path: Path, field: str = TEXT_FIELD) -> Iterator[bytes]:
    """The documents of a file, none of a text file that is empty; `field` names the column or key that holds the text.

    Raises:
        ValueError: the file is unreadable or damaged, holds no row with text, a row without the field; pyarrow is missing.
        NotTextError: the file is not text.
    """
    try:
        match _format(path):
            case ".parquet":
                documents = _read_parquet(path, field)
            case ".arrow":
                documents = _read_arrow(path, field)
            case ".jsonl":
                documents = _read_jsonl(path, field)
            case _:
                yield from _read_text(path)
                return
        found = False
        for document in documents:
            if document:
                found = True
                yield document
        if not found:
            raise ValueError(f"data: {path} holds no {'line' if _format(path) == '.jsonl' else 'row'} with text")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"data: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _compression(path: Path) -> str:
    suffix = path.suffix.lower()
    return suffix if suffix in _COMPRESSIONS else ""


def _format(path: Path) -> str:
    """The suffix that says what is in the file, whatever it is compressed with; in small letters."""
    return (Path(path.stem).suffix if _compression(path) else path.suffix).lower()


def _open(path: Path) -> BinaryIO:
    """The file's bytes, as they were before compression."""
    if _compression(path) == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if _compression(path) == ".zst":
        compressed = _pyarrow(path).input_stream(str(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(compressed, 1 << 20))
    return path.open("rb")


def _why_not_text(content: bytes, offset: int = 0) -> str:
    """Reason why these bytes, which start at `offset` of a file, are not UTF-8 text, "" when they are."""
    where = content.find(0)
    if where >= 0:
        return f"NUL byte at offset {offset + where}"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{content[error.start]:02x} at offset {offset + error.start} is not UTF-8"
    return ""


def _check_text(path: Path, content: bytes, offset: int = 0) -> None:
    if reason := _why_not_text(content, offset):
        raise NotTextError(f"data: {path} is not text: {reason}; want UTF-8")


def _read_text(path: Path) -> Iterator[bytes]:
    """A file as one document, a large one in parts."""
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
            end = _cut(content, start)
            _check_text(path, content[start:end], offset + start)
            yield content[start:end]
            start = end


def _cut(content: bytes, start: int) -> int:
    """Where a part that starts at `start` ends: at a line's end, else between two characters."""
    if len(content) - start <= _PART_BYTES:
        return len(content)
    end = content.rfind(b"\n", start, start + _PART_BYTES) + 1
    if not end:
        end = start + _PART_BYTES
        while end > start + 1 and content[end] & 0xC0 == 0x80:  # inside of a character
            end -= 1
    return end


def _document(value: object, where: str, field: str) -> bytes:
    """The bytes of one field. Raises ValueError when it is no string or holds a NUL."""
    if not isinstance(value, str):
        raise ValueError(f"data: {where}: field {field!r} is {type(value).__name__}, want a string")
    if "\0" in value:
        raise ValueError(f"data: {where}: field {field!r} holds a NUL, which separates documents")
    return value.encode("utf-8", errors="replace")


def _read_jsonl(path: Path, field: str) -> Iterator[bytes]:
    """The field of every line that is not blank."""
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
                except (ValueError, RecursionError) as error:  # Python reads no number of 4300 digits and no list in 1000 others
                    raise ValueError(f"data: {where} is not JSON that can be read: {error}") from error
                if not isinstance(record, dict) or field not in record:
                    got = f"fields {sorted(record)}" if isinstance(record, dict) else type(record).__name__
                    raise ValueError(f"data: {where} has no field {field!r}, got {got}; --data-field names another")
                yield _document(record[field], where, field)
    if not offset:
        raise ValueError(f"data: {path} is empty")


def _pyarrow(path: Path) -> Any:
    """The library. Raises ValueError where there is none."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"data: reading {path} needs pyarrow; install it with: pip install 'mxep[parquet]'") from error
    return pyarrow


def _read_parquet(path: Path, field: str) -> Iterator[bytes]:
    """The column, row by row, one row group in memory at a time."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:  # where the pages have checksums
            _check_column(path, field, file.schema_arrow.names)
            yield from _rows(file.iter_batches(_ROWS, columns=[field]), path, field)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise _unreadable(error, f"data: {path} is not a readable parquet file") from error


def _read_arrow(path: Path, field: str) -> Iterator[bytes]:
    """The column of an arrow stream, as Hugging Face's datasets writes them, or of an arrow file."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.OSFile(str(path)) as opened:  # not mapped: a file that is cut while it is read is an error and no signal
            if opened.read(6) == b"ARROW1":
                file = pyarrow.ipc.open_file(opened)
                names, batches = file.schema.names, (file.get_batch(i) for i in range(file.num_record_batches))
            else:
                opened.seek(0)
                batches = pyarrow.ipc.open_stream(opened)
                names = batches.schema.names
            _check_column(path, field, names)
            yield from _rows((batch.select([field]) for batch in batches), path, field)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise _unreadable(error, f"data: {path} is not a readable arrow file") from error


def _check_column(path: Path, field: str, names: list[str]) -> None:
    if field not in names:
        raise ValueError(f"data: {path} has no column {field!r}, got {names}; --data-field names another")


def _rows(batches: Iterable[Any], path: Path, field: str) -> Iterator[bytes]:
    """The first column of record batches, rows without a value left out."""
    for batch in batches:
        batch.validate(full=True)  # offsets within the file, text in UTF-8: what pyarrow takes on trust, and crashes on, when it reads
        for start in range(0, len(batch), _ROWS):
            for value in batch.column(0)[start : start + _ROWS].to_pylist():
                if value is not None:
                    yield _document(value, str(path), field)


def _unreadable(error: Exception, what: str) -> Exception:
    """pyarrow's errors are ValueErrors too, ours pass."""
    return error if str(error).startswith("data:") else ValueError(f"{what}: {error}")

"""What `--data` names to files in a fixed order, and those to documents; by default the Python standard library's own source."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxep.train.documents import TEXT_FIELD, NotTextError, has_rows, looks_like_rows, read_file

HUB = "hf://datasets/"
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """What one name stands for.

    Attributes:
        name: as it was given, for messages.
        files: in the order of their documents.
        searched: they were found in a folder, where some may not be text.
        quiet: nothing is said about those.
    """

    name: str
    files: tuple[Path, ...]
    searched: bool = False
    quiet: bool = False


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
    """The files behind every name, none of them read yet; the default corpus when there are no names.

    A name is a file, a folder that is searched through (hidden names are passed over), a folder that Hugging Face's datasets library
    saved, a pattern of files with *, ? or [], or hf://datasets/OWNER/NAME[@REVISION]/PATTERN for files of a data set in the local cache.

    Raises:
        ValueError: nothing there, an empty name; a saved data set of several splits, or damaged.
    """
    if not data:
        return [Source("the Python standard library", tuple(default_corpus_files()), searched=True, quiet=True)]
    found = []
    for name in data:
        if not name:  # of which a Path makes the folder where one stands
            raise ValueError(f"data: {name!r} names nothing, want a file, a folder or a pattern; is a variable of the shell not set?")
        pattern = _in_hub_cache(name) if name.startswith(HUB) else str(Path(name).expanduser())
        path = Path(pattern)
        if path.is_dir():
            saved = _saved_dataset(path)
            found.append(Source(name, saved) if saved else Source(name, _walk(path), searched=True))
        elif path.exists():
            found.append(Source(name, (path,)))
        elif matches := sorted(match for match in glob.glob(pattern, recursive=True) if Path(match).is_file()):
            found.append(Source(name, tuple(map(Path, matches))))
        else:
            raise ValueError(f"data: {name} {'matches no file' if glob.has_magic(pattern) else 'does not exist'}")
    return found


def stream_documents(sources: Sequence[Source], field: str = TEXT_FIELD) -> Iterator[bytes]:
    """Every document, in a fixed order, one after the other.

    A file that is named must be readable, not empty and text; files of a searched folder that are not text are left out with a warning.
    A warning names also files that were named and are text here, and rows elsewhere (json, csv).

    Raises:
        ValueError: what `mxep.train.documents.read_file` raises; a folder in which there is no text.
    """
    for source in sources:
        found, skipped = False, []
        if not source.searched and (rows := [path for path in source.files if looks_like_rows(path)]):
            named = f"{rows[0]}" + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
            warnings.warn(
                f"data: {named}: read as plain text as it stands; rows are read from .jsonl, .parquet and .arrow, rename or convert it"
            )
        for path in source.files:
            before = True  # any of its documents
            try:
                for document in read_file(path, field):
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
    """Raise ValueError for the first name that stands for nothing."""
    if data:
        find_sources(data)


def check_cache(data: Sequence[str], cache: Path) -> None:
    """Raise ValueError when token files in `cache` would be found by the next run that searches through one of these folders."""
    for name in data:
        folder, place = Path(name).expanduser().resolve(), cache.expanduser().resolve()
        if not (folder.is_dir() and place.is_relative_to(folder)) or _hidden(place, folder):
            continue
        raise ValueError(
            f"data: token files would go to {cache}, which is inside of {name} and is read as a part of it by the next run; want another "
            "folder, give one with --data-cache"
        )


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _walk(folder: Path) -> tuple[Path, ...]:
    """Regular files below `folder`, sorted, without hidden ones."""
    try:
        found = [path for path in folder.rglob("*") if path.is_file()]
    except OSError as error:
        raise ValueError(f"data: folder {folder} cannot be read: {error.strerror}") from error
    visible = [path for path in found if not _hidden(path, folder)]
    return tuple(sorted(visible, key=lambda path: path.relative_to(folder).as_posix()))


def _saved_dataset(folder: Path) -> tuple[Path, ...]:
    """The arrow files of a folder that `Dataset.save_to_disk` wrote, none of another folder."""
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

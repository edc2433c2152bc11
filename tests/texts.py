"""Contents of `--data`, for tests of its readers."""

from __future__ import annotations

from collections.abc import Sequence

from mxep.train.data.text_files import TEXT_FIELD, TextRows, find_sources, stream_documents


def read_documents(data: Sequence[str], field: str = TEXT_FIELD) -> list[bytes]:
    """All documents of these names, in order."""
    return list(stream_documents(find_sources(data), TextRows(field)))

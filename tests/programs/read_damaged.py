"""Reads a file of rows with each of its bytes changed, and cut after each, in a process of its own that a crash may end.

    python read_damaged.py FILE

FILE is overwritten.  Prints {"documents": how often it was read, "refused": how often with a ValueError that names it} as JSON; ends with
a traceback on any other error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mxep.train.data.text_files import read_file


def damaged(content: bytes) -> Iterator[bytes]:
    """The content with one byte changed, another bit of each, and cut to each length."""
    for index in range(len(content)):
        yield content[:index] + bytes([content[index] ^ 1 << (index * 5 + 7) % 8]) + content[index + 1 :]
        yield content[:index]


def main(path: Path) -> dict[str, int]:
    """Read all of them."""
    counts = {"documents": 0, "refused": 0}
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        try:
            assert all(isinstance(document, bytes) for document in read_file(path))
            counts["documents"] += 1
        except ValueError as error:
            if not (str(error).startswith("data:") and str(path) in str(error)):
                raise
            counts["refused"] += 1
    return counts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

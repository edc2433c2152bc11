"""Counts lines of code: Python and CUDA, without blank lines, comments and docstrings.

    python tests/programs/count_code.py src
    python tests/programs/count_code.py src --against d56204a

Prints one line per part (a folder or file directly below a package) and the total.  With `--against` the second column is the count at
that commit.  A line counts when a part of it is code; a string over several lines counts with all of them, unless it is a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath

CUDA = (".cu", ".cuh")
# A comment, or a string, in which there may be what looks like one.
COMMENT_OR_STRING = re.compile(r"""//[^\n]*|/\*.*?\*/|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


def python_lines(source: str) -> int:
    """Lines of code in a Python file.

    >>> python_lines('# comment\\ndef f():\\n    "docstring"\\n\\n    return 1  # one\\n')
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def cuda_lines(source: str) -> int:
    """Lines of code in a CUDA C++ file.

    >>> cuda_lines('// comment\\n/* two\\n   lines */ int a;\\n\\nconst char* b = "//";  // text\\n')
    2
    """
    code = COMMENT_OR_STRING.sub(lambda found: found["string"] or "\n" * found[0].count("\n"), source)
    return sum(bool(line.strip()) for line in code.splitlines())


def count(files: dict[str, str]) -> Counter[str]:
    """Lines of code per part, of files by their path below the folder that is counted."""
    parts: Counter[str] = Counter()
    for name, source in files.items():
        path = PurePosixPath(name)
        if path.suffix not in (".py", *CUDA):
            continue
        parts["/".join(path.parts[:2]).removesuffix(".py")] += cuda_lines(source) if path.suffix in CUDA else python_lines(source)
    return parts


def files_now(folder: Path) -> dict[str, str]:
    """Source files below a folder."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".py", *CUDA))
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def files_at(commit: str, folder: Path) -> dict[str, str]:
    """Source files below a folder at a commit of its repository."""
    archive = subprocess.run(["git", "archive", commit, "."], cwd=folder, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        sources = [member for member in tar if member.isfile() and PurePosixPath(member.name).suffix in (".py", *CUDA)]
        return {str(PurePosixPath(member.name)): tar.extractfile(member).read().decode() for member in sources}  # type: ignore[union-attr]


def table(now: Counter[str], before: Counter[str] | None) -> list[str]:
    """One line per part, then the total."""
    if before is None:
        rows = [(part, f"{lines:7}") for part, lines in sorted(now.items())]
        return [f"{lines}  {part}" for part, lines in (*rows, ("total", f"{now.total():7}"))]
    parts = [(part, now[part], before[part]) for part in sorted(now | before)]
    return [
        f"{lines:7} {then:7} {f'{lines / then - 1:+.1%}' if then else 'new':>8}  {part}"
        for part, lines, then in (*parts, ("total", now.total(), before.total()))
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Counts lines of code, without blank lines, comments and docstrings.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit")
    options = parser.parse_args()
    before = count(files_at(options.against, options.folder)) if options.against else None
    print("\n".join(table(count(files_now(options.folder)), before)))


if __name__ == "__main__":
    main()

"""What the documents say is true: their Python runs, links, names, commands and options exist. Numbers: test_docs_numbers.py."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.pages import DOCS, PAGE_IDS, PAGES, ROOT, blocks, plain, prose, resolves, table

import mxep
from mxep.cli import COMMANDS, main

WIDTH = 140


@pytest.fixture
def group_ends() -> Iterator[None]:
    """Whatever process group a page made is gone after."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- every page ----


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_python_blocks_run(page: Path, group_ends: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for line, more, text in blocks(page, "python"):
        code = compile("\n" * line + text, str(page), "exec")  # line numbers of the page
        assert more == "" or more.startswith("no-run:"), f"{page.name}:{line}: info string {more!r}, want none or 'no-run: reason'"
        if not more:
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name}: no file {target}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|svg|cu))`", prose(page)):
        assert any((base / name).exists() for base in (ROOT, ROOT / "src" / "mxep", page.parent)), f"{page.name}: no file {name}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_named_things_of_the_package_exist(page: Path) -> None:
    for name in set(re.findall(r"`(mxep\.[\w.]+)(?:\([^`]*\))?`", prose(page))):
        assert resolves(name), f"{page.name}: nothing is called {name}"


@pytest.mark.parametrize("path", [*PAGES, *sorted(DOCS.glob("*.py"))], ids=lambda path: path.name)
def test_ascii_and_width(path: Path) -> None:
    assert path.read_text().isascii()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= WIDTH or line.startswith("|"), f"{path.name}:{number}: {len(line)} characters"


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every `mxep ...` command line in the page's shell blocks and inline code."""
    shell = "\n".join(text for language in ("bash", "sh", "console") for _, _, text in blocks(page, language)).replace("\\\n", " ")
    for line in [*shell.splitlines(), *re.findall(r"`(mxep [^`]+)`", prose(page))]:
        for part in re.split(r"&&|;|\|", line):
            words = shlex.split(part, comments=True)
            if "mxep" in words and all(word in ("uv", "run", "$") for word in words[: words.index("mxep")]):
                yield words[words.index("mxep") + 1 :]


@functools.cache
def help_of(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        if not words or words[0].startswith("-") or not re.fullmatch(r"[a-z]+", words[0]):
            continue
        assert words[0] in COMMANDS, f"{page.name}: there is no command mxep {words[0]}"
        for flag in (word.split("=")[0] for word in words[1:] if word.startswith("--")):
            assert re.search(rf"{flag}\b(?!-)", help_of(words[0])), f"{page.name}: mxep {words[0]} has no {flag}"


def test_public_names_have_docstrings() -> None:
    for name in mxep.__all__:
        assert (getattr(mxep, name).__doc__ or "").strip(), f"mxep.{name} has no docstring"


# ---- migration.md ----

MIGRATION = DOCS / "migration.md"


def test_import_table_imports() -> None:
    rows = table(MIGRATION, "torchao", "mxep")
    for theirs, ours in rows:
        assert ours == "not there yet" or resolves(plain(ours)), f"migration.md: {ours} does not import"
        assert ours != "not there yet" or not hasattr(mxep, plain(theirs).rsplit(".", 1)[1]), f"migration.md: {theirs} is there now"
    listed = {plain(ours).removeprefix("mxep.") for _, ours in rows}
    own = {"ExchangePlan", "MoE", "MoEConfig", "quantize_mx"}  # names that torchao has no counterpart of
    assert set(mxep.__all__) <= listed | own, f"migration.md: no row for {set(mxep.__all__) - listed - own}"


def test_import_table_knows_torchao() -> None:
    pytest.importorskip("torchao", reason="the oracle is a development tool")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for theirs, _ in table(MIGRATION, "torchao", "mxep"):
            name = plain(theirs)
            if name.startswith("torchao.") and importlib.util.find_spec("triton"):
                assert resolves(name) == ("gone in 0.18" not in theirs), f"migration.md: {name}"


def test_recipe_names_are_understood() -> None:
    for row in table(MIGRATION, "torchao's `MXFP8TrainingRecipe`"):
        assert len({mxep.Recipe.named(plain(cell)).name for cell in row}) == 1, row


def test_trainer_options_exist() -> None:
    for _, ours in table(MIGRATION, "torchtitan", "mxep"):
        assert re.search(rf"{plain(ours)}\b(?!-)", help_of("train")), f"migration.md: mxep train has no {ours}"


# ---- CONTRIBUTING.md ----


def test_rooms_are_those_of_the_layering_test() -> None:
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text())
    (value,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ORDER"]
    order: list[set[str]] = ast.literal_eval(value)
    assert [set(re.findall(r"`(\w+)`", room)) for room, _ in table(ROOT / "CONTRIBUTING.md", "room")] == order

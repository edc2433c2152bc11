"""What the documents say is true: their Python runs, links, names, commands and options exist. Numbers: test_docs_numbers.py."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import json
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
from mxep.models.presets import MODELS
from mxep.models.published import published_config
from mxep.train.config import settle
from mxep.train.options import option_names, read_options, read_toml

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
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        handed_on = words[len(own) + 2 :]  # behind "--" stand options of `mxep train`
        for flag in (word.split("=")[0] for word in handed_on if word.startswith("--")):
            assert flag.removeprefix("--").replace("-", "_") in option_names(), f"{page.name}: mxep train has no {flag}"
        for flag in (word.split("=")[0] for word in own if word.startswith("--")):
            known = words[0] == "train" and flag.removeprefix("--").replace("-", "_") in option_names()
            assert known or re.search(rf"{flag}\b(?!-)", help_of(words[0])), f"{page.name}: mxep {words[0]} has no {flag}"


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
    layers = {"MoE", "MoEConfig", "FusedMoE", "SwiGLU", "fused_experts", "fused_moe", "RuntimeEPConfig", "NetworkProfiler"}
    transport = {"ExchangeError", "close_transports", "set_transport"}
    own = (
        transport | {"ExchangePlan", "ep_grouped_mm", "mxfp8_on_device_all_to_all_v_overflowed", "quantize_mx"} | layers
    )  # names that torchao has no counterpart of
    assert set(mxep.__all__) <= listed | own, f"migration.md: no row for {set(mxep.__all__) - listed - own}"


def test_import_table_knows_torchao() -> None:
    pytest.importorskip("torchao", reason="the oracle is a development tool")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for theirs, _ in table(MIGRATION, "torchao", "mxep"):
            name = plain(theirs)
            if name.startswith("torchao.") and importlib.util.find_spec("triton"):
                assert resolves(name) == ("gone in 0.18" not in theirs), f"migration.md: {name}"


# Parameters of torchao's functions that have another name here.
RENAMED = {"mx_tensor": "mx", "data_hp": "data"}


def test_signatures_are_torchaos() -> None:
    pytest.importorskip("torchao", reason="the oracle is a development tool")
    compared = 0
    for theirs, ours in table(MIGRATION, "torchao", "mxep"):
        path, name = plain(theirs).rpartition(".")[::2]
        if name != plain(ours).rpartition(".")[2] or not name.islower() or name == "to_blocked":
            continue
        try:
            oracle = getattr(importlib.import_module(path), name)
        except ModuleNotFoundError:
            continue
        there = {"args": None} if inspect.isbuiltin(oracle) else inspect.signature(oracle).parameters
        if "args" in there:  # an autograd function's `apply`
            continue
        here = inspect.signature(getattr(mxep, name)).parameters
        wanted = [RENAMED.get(parameter, parameter) for parameter in there if parameter != "is_swizzled_scales"]
        assert list(here)[: len(wanted)] == wanted, name
        for parameter, value in there.items():
            if value.default is not inspect.Parameter.empty and parameter in here:
                default = here[parameter].default
                assert getattr(default, "value", default) == getattr(value.default, "value", value.default), f"{name}: {parameter}"
        compared += 1
    assert compared >= 7


def grouped(**options: object) -> torch.Tensor:
    """A grouped GEMM of two groups that do not end at whole blocks."""
    A, offs = torch.randn(64, 64), torch.tensor([10, 64], dtype=torch.int32)
    return mxep.to_mxfp8_then_scaled_grouped_mm(options.pop("A", A), torch.randn(2, 64, 32), offs, **options)  # type: ignore[arg-type]


def dispatch(x: torch.Tensor, splits: object) -> torch.Tensor:
    return mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, splits, splits)  # type: ignore[arg-type]


REFUSED = [  # in the order of the table; its last row is a case of tests/test_compile.py
    [lambda: grouped(A=mxep.quantize_mx(torch.randn(64, 64)))],
    [lambda: dispatch(torch.randn(4, 48), [4]), lambda: mxep.to_mx(torch.randn(4, 48)), lambda: grouped(A=torch.randn(64, 48))],
    [lambda: dispatch(torch.randn(4, 64).half(), [4]), lambda: mxep.quantize_mx(torch.randn(4, 64).double())],
    [lambda: mxep.to_mx(torch.randn(4, 64), torch.float8_e5m2), lambda: mxep.to_mx(torch.randn(4, 64), block_size=16)],
    [lambda: dispatch(torch.randn(4, 64), torch.tensor([4]))],
    [lambda: grouped(wgrad_with_hp=False)],
    [lambda: grouped(wgrad_with_hp=True, kernel_preference="blackwell")],
    [lambda: mxep.permute_mxfp8_fwd_hp_bwd(mxep.quantize_mx(torch.randn(4, 64)), torch.tensor([4]), 1, 1, 48)],
    [lambda: mxep.quantize_mx(torch.randn(4, 64)).add_(1)],
    [lambda: mxep.convert_experts(torch.nn.Linear(2, 2), "experts")],
]


def test_what_is_refused_is_refused(group_ends: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = table(MIGRATION, "what", "why")
    assert len(rows) == len(REFUSED) + 1
    for row, calls in zip(rows[:-1], REFUSED, strict=True):
        for call in calls:
            with pytest.raises(ValueError) as error:
                call()
            assert row is not rows[0] or isinstance(error.value, AssertionError)


def test_recipe_names_are_understood() -> None:
    for row in table(MIGRATION, "torchao's `MXFP8TrainingRecipe`"):
        assert len({mxep.Recipe.named(plain(cell)).name for cell in row}) == 1, row


def test_trainer_options_are_those_of_the_table() -> None:
    rows = {tuple(plain(cell).removeprefix("--").replace("-", "_") for cell in row) for row in table(MIGRATION, "torchtitan", "mxep")}
    assert rows == {(name, field) for name, field in option_names().items() if "." in name}


# ---- training.md ----


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_commands_of_the_trainer_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `mxep train` and run_train.sh of a shell block becomes settings, those of its TOML file and config.json included."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    for folder, model in (("Qwen3-30B-A3B", "qwen3_30b_a3b"), ("my_shape", "dsv3_671b")):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(published_config(MODELS[model])))
    for _, _, text in blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "./run_train.sh" in words:
                variables = dict(word.split("=") for word in words[: words.index("./run_train.sh")])
                words = ["mxep", "train", f"--config={variables['CONFIG_FILE']}", *words[words.index("./run_train.sh") + 1 :]]
            if words[:2] == ["mxep", "train"] and "--resume" not in words:
                settle(read_options(words[2:]), "cuda", 8)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_toml_blocks_are_options(page: Path, tmp_path: Path) -> None:
    for _, _, text in blocks(page, "toml"):
        (tmp_path / "block.toml").write_text(text)
        assert read_toml(tmp_path / "block.toml")


def test_presets_are_those_of_the_table() -> None:
    named = {name for row in table(DOCS / "training.md", "preset") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(MODELS)


# ---- trouble.md ----


def messages_in_code() -> Iterator[str]:
    """Every text that the package holds, with "..." where a value goes."""
    for path in sorted((ROOT / "src" / "mxep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                yield re.sub(r"(?:\.\.\.)+", "...", text)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub("%[rsd]", "...", node.value)


def test_quoted_messages_are_those_of_the_code() -> None:
    quotes = [
        (line, quote) for line, _, text in blocks(DOCS / "trouble.md", "text") for quote in text.replace("\n  ", " ").splitlines() if quote
    ]
    known = list(messages_in_code())
    assert len(quotes) > 20
    for line, quote in quotes:
        assert any(quote in message for message in known), f"trouble.md:{line}: no message of the package says {quote!r}"


# ---- CONTRIBUTING.md ----


def test_rooms_are_those_of_the_layering_test() -> None:
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text())
    (value,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ORDER"]
    order: list[set[str]] = ast.literal_eval(value)
    assert [set(re.findall(r"`(\w+)`", room)) for room, _ in table(ROOT / "CONTRIBUTING.md", "room")] == order

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
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pages import DOCS, PAGE_IDS, PAGES, ROOT, blocks, cells, plain, prose, resolves, table

import mxep
from mxep.cli import COMMANDS, main
from mxep.models.huggingface import published_config
from mxep.models.presets import MODELS
from mxep.train.config import option_names
from mxep.train.option_parser import read_options, read_toml
from mxep.train.resolved_config import resolve

WIDTH = 140
NEEDS = {"lora.md": "peft", "sft.md": "trl", "dpo.md": "trl"}  # development tools that a machine may lack


@pytest.fixture
def group_ends() -> Iterator[None]:
    """Destroys a process group that a page has made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- every page ----


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL 1.16 still says it
@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_python_blocks_run(page: Path, group_ends: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason="a development tool")
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for line, more, text in blocks(page, "python"):
        code = compile("\n" * line + text, str(page), "exec")  # line numbers of the page
        assert more == "" or more.startswith("no-run:"), f"{page.name}:{line}: info string {more!r}, want none or 'no-run: reason'"
        if not more:
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name}: no file {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_linked_headings_exist(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", prose(page)):
        target = page.parent / name if name else page
        assert target.suffix != ".md" or anchor in anchors(target), f"{page.name}: {target.name} has no heading for #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|svg|cu))`", prose(page)):
        assert any((base / name).exists() for base in (ROOT, ROOT / "src" / "mxep", page.parent)), f"{page.name}: no file {name}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_named_things_of_the_package_exist(page: Path) -> None:
    for name in set(re.findall(r"`(mxep\.[\w.]+)(?:\([^`]*\))?`", prose(page))):
        assert resolves(name), f"{page.name}: nothing is called {name}"


@pytest.mark.parametrize("path", [*PAGES, *sorted(DOCS.glob("*.py"))], ids=lambda path: str(path.relative_to(ROOT)))
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


def check_words(where: str, words: list[str]) -> None:
    """That `mxep WORDS` names a command and options of it."""
    if not words or words[0].startswith("-") or not re.fullmatch(r"[a-z][a-z-]*", words[0]):
        return
    assert words[0] in COMMANDS, f"{where}: there is no command mxep {words[0]}"
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    handed_on = words[len(own) + 2 :]  # behind "--" stand options of `mxep train`
    for flag in (word.split("=")[0] for word in handed_on if word.startswith("--")):
        assert flag.removeprefix("--").replace("-", "_") in option_names(), f"{where}: mxep train has no {flag}"
    for flag in (word.split("=")[0] for word in own if word.startswith("--") and word != "--help"):
        known = words[0] == "train" and flag.removeprefix("--").replace("-", "_") in option_names()
        assert known or re.search(rf"{flag}\b(?!-)", help_of(words[0])), f"{where}: mxep {words[0]} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        check_words(page.name, words)


def test_commands_of_the_records_of_one_gpu_parse() -> None:
    parts = runpy.run_path(str(ROOT / "benchmarks" / "record_one_gpu.py"))["PARTS"]
    for part, command in parts.items():
        module, name, *words = shlex.split(command)
        if (module, name) == ("-m", "mxep"):
            check_words(part, words)
        elif module != "-m":
            assert (ROOT / module).is_file(), part


# ---- README.md ----


@pytest.mark.parametrize("number", range(len(blocks(ROOT / "README.md", "python"))))
def test_readme_snippet_runs_alone(number: int, tmp_path: Path) -> None:
    """Each in a process of its own, as somebody who copies it would run it."""
    _, _, text = blocks(ROOT / "README.md", "python")[number]
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# ---- howto/own_model.md ----


def test_experts_of_the_page_compile_under_expert_parallelism(group_ends: None) -> None:
    names: dict[str, Any] = {}
    exec(blocks(DOCS / "howto" / "own_model.md", "python")[0][2], names)
    compiled = torch.compile(names["model"].moe.experts, backend="aot_eager")
    compiled(torch.randn(32, 256, dtype=torch.bfloat16), names["counts"]).sum().backward()


# ---- the site: mkdocs.yml and reference/ ----

PACKAGES = ("mxep", "mxep.comm", "mxep.ep", "mxep.fused", "mxep.grouped_mm", "mxep.moe", "mxep.mx", "mxep.parallel", "mxep.train")


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    assert len(set(listed)) == len(listed), "mkdocs.yml lists a page twice"
    assert set(listed) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"log.md"}


def documented() -> dict[int, str]:
    """Every object that a page of reference/ documents, by its id, with the name that it is documented under."""
    names = [name for page in DOCS.glob("reference/*.md") for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]
    assert len(names) == len(set(names)), "reference/ documents a name twice"
    return {
        id(getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])): name
        for name in names
        if "titan" not in name
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_has_every_public_name(package: str) -> None:
    module, known = importlib.import_module(package), documented()
    for name in module.__all__:
        assert id(getattr(module, name)) in known, f"{package}.{name} is on no page of docs/reference/"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_can_be_rendered(package: str) -> None:
    """A docstring each; in its lists of parameters a line for each, which the API reference is made of."""
    module = importlib.import_module(package)
    for name in module.__all__:
        thing = getattr(module, name)
        text = inspect.cleandoc(thing.__doc__ or "") + "\n"
        assert text.strip() or not (inspect.isclass(thing) or inspect.isfunction(thing)), f"{package}.{name} has no docstring"
        for section in re.findall(r"^ *(?:Args|Attributes):\n((?:^ +.*\n)+)", text, re.MULTILINE):
            assert not re.search(r"  \w+(?:, \w+)*: ", section.lstrip().replace("\n    ", "\n")), (
                f"{package}.{name}: two parameters on one line"
            )
            assert not re.search(r"^ *\w+(?:, \w+)+: ", section, re.MULTILINE), f"{package}.{name}: one description of two parameters"


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
    models = {"unconvert", "quantize_base", "dequantize_base", "linear_cross_entropy"}
    own = (
        {"ExchangePlan", "ep_grouped_mm", "mxfp8_on_device_all_to_all_v_overflowed", "quantize_mx"} | layers | transport | models
    )  # no counterpart
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


def test_refused_code_is_refused(group_ends: None) -> None:
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
                resolve(read_options(words[2:]), "cuda", 8)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_toml_blocks_are_options(page: Path, tmp_path: Path) -> None:
    for _, _, text in blocks(page, "toml"):
        (tmp_path / "block.toml").write_text(text)
        assert read_toml(tmp_path / "block.toml")


def test_presets_are_those_of_the_table() -> None:
    named = {name for row in table(DOCS / "training.md", "preset") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(MODELS)


# ---- models.md ----

MODELS_PAGE = DOCS / "models.md"


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def keys_of(path: Path, *names: str) -> set[str]:
    """First words of the string keys of a test module's dictionaries, without importing the module. Of a tuple the last one counts."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
            assert isinstance(node.value, ast.Dict)
            keys = [key.elts[-1] if isinstance(key, ast.Tuple) else key for key in node.value.keys]
            found |= {str(key.value).split()[0] for key in keys if isinstance(key, ast.Constant)}
    return found


def test_models_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", MODELS_PAGE.read_text())
    assert len(named) > 15
    for file, name in named:
        assert name in functions_of(ROOT / file), f"models.md: {file} has no {name}"
    proofs = {row[0]: row[1] for row in table(MODELS_PAGE, "column", "tests")}
    for column in table_header(MODELS_PAGE, "architecture", "experts")[1:-1]:
        assert any(column in covered for covered in proofs), f"models.md: no test is named for {column!r}"


def table_header(page: Path, *columns: str) -> list[str]:
    return next(cells(line) for line in page.read_text().splitlines() if line.startswith("|") and cells(line)[: len(columns)] == [*columns])


def test_models_page_lists_presets_with_their_records() -> None:
    rows = table(MODELS_PAGE, "preset", "Hugging Face `model_type`")
    assert [plain(name) for name, *_ in rows] == list(MODELS)
    for name, model_type, records in rows:
        preset = plain(name)
        assert model_type == published_config(MODELS[preset])["model_type"]
        for record in re.findall(r"`([a-z_]+-h200-\d)`", records):
            (path,) = (ROOT / "benchmarks" / "results").glob(f"{record}.json*")
            text = path.read_text()
            assert re.search(rf'"{preset}(_of_\d+_layers)?"', text), f"models.md: {record} has no {preset}"


def test_models_page_lists_the_architectures_of_the_tests() -> None:
    tests = Path("tests/integrations")
    rows = table(MODELS_PAGE, "architecture", "experts")
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == keys_of(tests / "test_transformers_5.py", "MODELS", "OTHERS")
    recognised = {name for row in table(MODELS_PAGE, "architecture", "activation") for name in re.findall(r"`(\w+)`", row[0])}
    shown = {re.sub("Text$", "", name) for name in recognised | listed}
    assert {re.sub("Text$", "", name) for name in keys_of(tests / "test_transformers_activations.py", "MODELS")} <= shown
    for row in rows:
        for record in re.findall(r"`([a-z_]+-h200-\d)`", row[-1]):
            assert f'"{row[-1].partition(":")[0]}"' in (ROOT / "benchmarks" / "results" / f"{record}.json").read_text()


# ---- troubleshooting.md ----


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
        (line, quote)
        for line, _, text in blocks(DOCS / "troubleshooting.md", "text")
        for quote in text.replace("\n  ", " ").splitlines()
        if quote
    ]
    known = list(messages_in_code())
    assert len(quotes) > 20
    for line, quote in quotes:
        assert any(quote in message for message in known), f"troubleshooting.md:{line}: no message of the package says {quote!r}"


# ---- CONTRIBUTING.md ----


def test_layers_are_those_of_the_layering_test() -> None:
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text())
    (value,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ORDER"]
    order: list[set[str]] = ast.literal_eval(value)
    assert [set(re.findall(r"`(\w+)`", names)) for names, _ in table(ROOT / "CONTRIBUTING.md", "package or module")] == order

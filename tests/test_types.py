"""What editors and type checkers see of mxep: every public name with its signature, and a user's mistakes."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mxep

ROOT = Path(__file__).parent.parent
FACADES = ("mx", "ep", "comm", "grouped_mm", "moe", "fused", "parallel")

RIGHT = """
import torch

import mxep
import mxep.integrations.transformers_5
from mxep import FusedMoE, MoE, MoEConfig, Recipe
from mxep.moe import RuntimeEPConfig, fuse_layers
from mxep.parallel import Degrees, ParallelDims, build_meshes

config = MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2, score_function="sigmoid")
layer: MoE = MoE(config, recipe=Recipe("mine", wgrad="mx"))
fused: FusedMoE = mxep.FusedMoE(config, "hp", RuntimeEPConfig(dispatch="all_gather"))
names: list[str] = mxep.convert_experts(torch.nn.Sequential(layer), "0", {"0": "hp"})
fuse_layers(torch.nn.Sequential(layer))
scale, data = mxep.to_mx(torch.zeros(32, 64), scaling_mode=mxep.ScaleCalculationMode.RCEIL)
out, splits = mxep.mxfp8_on_device_all_to_all_v(torch.zeros(4, 32), torch.tensor([4]), 8)
dequantized: torch.Tensor = mxep.quantize_mx(data).dequantize()
meshes = build_meshes(2, ParallelDims(ep=2), "cpu")
of_mxep_0_1 = Degrees(ep=2)
paths = mxep.device.available_gemm_paths(torch.device("cpu"))
version: str = mxep.__version__
"""
WRONG = {  # a user's line: mypy's code of the error
    "mxep.does_not_exist(1)": "attr-defined",
    "from mxep import does_not_exist": "attr-defined",
    "mxep.moe.does_not_exist": "attr-defined",
    "mxep.parallel.does_not_exist": "attr-defined",
    "from mxep.moe import FusedMoe": "attr-defined",
    "mxep.MoEConfig(hiden=32)": "call-arg",
    "mxep.MoEConfig(dim=64, hidden=32, num_experts=4)": "call-arg",
    "mxep.MoEConfig('64', 32, 4, 2)": "arg-type",
    "mxep.MoEConfig(64, 32, 4, 2, score_function='relu')": "arg-type",
    "mxep.Recipe('mine', wgrad='bf16')": "arg-type",
    "mxep.MoE(64)": "arg-type",
    "mxep.FusedMoE(mxep.MoEConfig(64, 32, 4, 2), runtime='all_gather')": "arg-type",
    "mxep.RuntimeEPConfig(dispatch='broadcast')": "arg-type",
    "mxep.convert_experts('model')": "arg-type",
    "mxep.convert_linears(torch.nn.Linear(32, 32), skip=1)": "arg-type",
    "mxep.quantize_mx([1.0])": "arg-type",
    "mxep.quantize_mx(torch.zeros(32)).dequantise()": "attr-defined",
    "mxep.set_transport(1)": "arg-type",
    "mxep.mxfp8_on_device_all_to_all_v(torch.zeros(4, 32), [4], 8)": "arg-type",
    "a, b, c = mxep.to_mx(torch.zeros(32))": "misc",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy prints about a user's file, about the tests on GPUs, and about a file with mistakes of the kinds that those may have.

    mypy has its own settings, as for a user without a configuration.  Only packages without types are left out as in this repository's:
    what `mypy` has found out about torch then holds here too, and the cache begins as a copy of the repository's.
    """
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "user.py").write_text("\n".join([*RIGHT.splitlines(), *(f"reveal_type({name})" for name in public_names()), *WRONG]) + "\n")
    (folder / "planted.py").write_text("from mxep.mx.tensor import no_name, MXTensor\nMXTensor(1)\nMXTensor(1, 2, shape=3)\n")
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    untyped = [module for override in overrides if "ignore_missing_imports" in override for module in override["module"]]
    (folder / "mypy.ini").write_text("[mypy]\n" + "".join(f"[mypy-{module}]\nignore_missing_imports = True\n" for module in untyped))
    own, kept = ROOT / ".mypy_cache", ROOT / ".mypy_cache" / "user"
    if own.exists() and not kept.exists():
        shutil.copytree(own, kept, ignore=shutil.ignore_patterns("user"))
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.(multi_)?gpu\b", path.read_text())]
    options = [f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={kept}", "--explicit-package-bases"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, (folder / "user.py", folder / "planted.py", *marked))]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def public_names() -> list[str]:
    public = [f"mxep.{name}" for name in mxep.__all__]
    return public + [f"mxep.{facade}.{name}" for facade in FACADES for name in importlib.import_module(f"mxep.{facade}").__all__]


@pytest.mark.slow
def test_mypy_passes_a_right_program_and_finds_the_mistakes_of_a_wrong_one(checked: str) -> None:
    public = public_names()
    lines = [*RIGHT.splitlines(), *public, *WRONG]
    first = len(lines) - len(WRONG)
    said: dict[int, str] = {}
    for number, text in re.findall(r"\buser\.py:(\d+): (.*)", checked):
        said[int(number) - 1] = said.get(int(number) - 1, "") + text

    right = {lines[number]: message for number, message in said.items() if number < first and "error" in message}
    assert not right, f"mypy refuses what is right: {right}"
    unseen = [lines[number] for number, message in said.items() if re.search(r'Revealed type is "Any"', message)]
    assert not unseen, f"mypy knows no type of {unseen}"
    missed = {line: said.get(first + at) for at, (line, code) in enumerate(WRONG.items()) if f"[{code}]" not in said.get(first + at, "")}
    assert not missed, f"mypy did not find these mistakes: {missed}"
    assert len([number for number in said if len(RIGHT.splitlines()) <= number < first]) == len(public)


@pytest.mark.slow
def test_gpu_tests_call_what_exists(checked: str) -> None:
    """Functions, arguments and attributes of modules: continuous integration has no GPU, so a signature that changed would go unnoticed."""
    seen = re.compile(r"Missing (positional|named) arg|Unexpected keyword|Module \"mxep.*no attr")
    wrong = [line for line in checked.splitlines() if seen.search(line) and "user.py:" not in line]
    found = [line for line in wrong if "planted.py:" in line]
    assert len(found) == 3, checked
    assert wrong == found


@pytest.mark.slow
def test_pyright_passes_a_right_program_and_finds_the_mistakes_of_a_wrong_one(tmp_path: Path) -> None:
    """basedpyright is pyright with its Node from PyPI; "standard" are pyright's own settings."""
    pytest.importorskip("basedpyright")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "user.py").write_text("\n".join([*RIGHT.splitlines(), *WRONG]) + "\n")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong_lines = {one["range"]["start"]["line"]: one["message"] for one in found if one["severity"] == "error"}
    first = len(RIGHT.splitlines())
    right = {line: message for line, message in wrong_lines.items() if line < first}
    assert not right, f"pyright refuses what is right: {right}"
    missed = [line for number, line in enumerate(WRONG, first) if number not in wrong_lines]
    assert not missed, f"pyright did not find these mistakes: {missed}"


@pytest.mark.parametrize("module", [mxep, mxep.moe])
def test_completion_names_what_there_is(module: object) -> None:
    names = dir(module)
    assert set(module.__all__) <= set(names)
    tree = ast.parse(inspect.getsource(module))
    for_checkers = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for imported in ast.walk(node)
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }
    loaded = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(module.__all__) <= for_checkers | loaded, "a public name is missing from the imports under TYPE_CHECKING"
    for name in for_checkers:
        assert getattr(module, name) is not None, f"type checkers are shown {name}, which is not there at run time"


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src/mxep/py.typed").is_file()

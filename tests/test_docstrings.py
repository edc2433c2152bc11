"""Every public function and class has an example in its docstring, and all examples run: on a CPU, in a process group of one rank."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxep

ROOT = Path(__file__).parent.parent
PACKAGES = ("mxep", "mxep.mx", "mxep.ep", "mxep.comm", "mxep.grouped_mm", "mxep.moe", "mxep.fused", "mxep.parallel", "mxep.train")
# Functions that guides and the troubleshooting page use, outside of the packages above.
IN_GUIDES = ("mxep.device.available_gemm_paths", "mxep.device.resolve_gemm_path", "mxep.train.optimizer.clip_gradients")
NOT_RUN = {  # a comment in the example says why
    "mxep.parallel.Pipeline",
    "mxep.integrations.torchtitan_0_3.mxfp8_experts",
    "mxep.train.load_model",
    "mxep.train.LoadedModel",
}
LINES = range(1, 8)  # of one example, without its output


def public_names() -> list[str]:
    """What the reference pages document, what the packages export, and what the guides use."""
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md")))
    exported = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    return [*dict.fromkeys([*re.findall(r"^::: (\S+)", pages, re.MULTILINE), *exported, *IN_GUIDES])]


def find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def docstring_of(name: str) -> str:
    """The docstring; an adapter's is read from its source, since its library may be missing."""
    if ".integrations." not in name:
        return inspect.getdoc(find(name)) or ""
    module, _, attribute = name.rpartition(".")
    tree = ast.parse((ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text())
    kinds = ast.FunctionDef, ast.ClassDef
    return next(ast.get_docstring(node) or "" for node in tree.body if isinstance(node, kinds) and node.name == attribute)


def has_docstring(name: str) -> bool:
    """True for a function or class of mxep; tuples, and the Literal types of options, have no docstring of their own."""
    if ".integrations." in name:
        return True
    found = find(name)
    return inspect.isroutine(found) or inspect.isclass(found)


NAMES = list(
    {name if ".integrations." in name else id(find(name)): name for name in reversed(public_names()) if has_docstring(name)}.values()
)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    mxep.close_transports()
    dist.destroy_process_group()


def examples_of(name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(docstring_of(name), {"torch": torch, "mxep": mxep}, name, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str, one_rank: None) -> None:
    test = examples_of(name)
    assert "Examples:" in test.docstring, f"{name} has no section 'Examples:' in its docstring"
    lines = [line for example in test.examples for line in example.source.splitlines()]
    assert len(lines) in LINES, f"{name}: the example has {len(lines)} lines, want {LINES.start} to {LINES.stop - 1}"
    skipped = [example for example in test.examples if doctest.SKIP in example.options]
    assert bool(skipped) == (name in NOT_RUN), f"{name}: doctest: +SKIP is for {NOT_RUN}"
    assert not skipped or ">>> # " in test.docstring, f"{name}: no comment says why the example does not run"
    if "transformers" in name or "peft" in name:
        pytest.importorskip("transformers", minversion="5.23")
        if "peft" in name:
            pytest.importorskip("peft")
        importlib.import_module(name.rpartition(".")[0])  # with any warnings of the libraries
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def modules_with_examples() -> list[str]:
    """Without adapters, whose libraries may be missing."""
    files = [file.relative_to(ROOT / "src").with_suffix("") for file in (ROOT / "src").rglob("*.py") if ">>> " in file.read_text()]
    return sorted(".".join(file.parts) for file in files if "integrations" not in file.parts)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_a_module_run(name: str, one_rank: None) -> None:
    """Those of functions that are not public, too."""
    module, names = importlib.import_module(name), {"torch": torch, "mxep": mxep}
    assert doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS).failed == 0


def parameters_of(thing: Any) -> list[str]:
    """The parameters of a function, or of a class that users create."""
    if inspect.isclass(thing):
        made_by_users = {"__init__", "__new__"} & set(vars(thing)) and not issubclass(thing, (Exception, Enum))
        if not made_by_users:
            return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(thing)
    return [name for name, parameter in signature.parameters.items() if parameter.kind not in kinds and not name.startswith("_")]


@pytest.mark.parametrize("name", [name for name in NAMES if ".integrations." not in name])
def test_docstring_describes_parameters_and_result(name: str) -> None:
    """Parameters are under "Args:", those that a class keeps under "Attributes:"; functions that return something have "Returns:"."""
    thing, text = find(name), docstring_of(name)
    described = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))
    missing = [parameter for parameter in parameters_of(thing) if parameter not in described]
    assert not missing, f"{name}: the docstring does not describe {missing}"
    if inspect.isfunction(thing):
        assert ("Returns:" in text) == (inspect.signature(thing).return_annotation != "None"), f"{name}: 'Returns:' is missing or wrong"
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(inspect.getsource(thing))))
        assert "Raises:" in text or not raises, f"{name}: raises errors that its docstring does not list"

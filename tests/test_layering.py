"""Imports point one way, and nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "mxep"

# Packages and modules in order; each may import those of earlier rows, and itself.
ORDER = [
    {"shapes", "deprecation"},
    {"field_types"},
    {"device", "extras", "json_files", "parallel_dims", "operators", "processes", "step_graph"},
    {"recipe", "private_folders"},
    {"checks"},
    {"mx"},
    {"ops"},
    {"reference"},
    {"comm"},
    {"placements"},
    {"grouped_mm"},
    {"ep"},
    {"moe"},
    {"fused"},
    {"parallel"},
    {"models"},
    {"train", "integrations"},
    {"bench"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
FACADES = {Path("__init__.py"), Path("moe/__init__.py")}  # their names are loaded at first use
ROW = {package: row for row, packages in enumerate(ORDER) for package in packages}
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    packages: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import of {node.module}, want absolute"
            names = [f"mxep.{alias.name}" for alias in node.names] if node.module == "mxep" else [node.module]
        packages |= {name.split(".")[1] for name in names if name.startswith("mxep.")}
    return packages


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    if path.relative_to(SOURCE) in FACADES:
        return
    package = package_of(path)
    assert package in ROW, f"{path}: {package!r} is not in ORDER"
    for other in imported_packages(path):
        assert other == package or ROW[other] < ROW[package], f"{path} imports mxep.{other}, which is not below mxep.{package}"


def test_the_check_finds_a_wrong_import(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("from mxep.moe import layer\nimport mxep.cli\nfrom mxep import train\n")
    assert imported_packages(file) == {"moe", "cli", "train"}


def imported_files(path: Path, files: dict[str, Path]) -> set[str]:
    """Modules that a file imports, wherever the import is: in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in files:
                name = name.rpartition(".")[0]
            found |= {name} - {""}
    return found


def import_cycles(source: Path) -> list[list[str]]:
    """Import cycles among the files of a package, without facades: the modules of each in the order in which they import each other."""
    files = {".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__"): path
             for path in source.rglob("*.py") if path.relative_to(source) not in FACADES}  # fmt: skip
    imports = {name: imported_files(path, files) - {name} for name, path in files.items()}
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(trail[trail.index(name) :])
        elif name not in done:
            for other in sorted(imports[name]):
                walk(other, [*trail, name])
            done.add(name)

    for name in sorted(files):
        walk(name, [])
    return found


def test_no_import_cycle_between_files() -> None:
    assert import_cycles(SOURCE) == []


def test_the_check_finds_a_planted_cycle(tmp_path: Path) -> None:
    part = tmp_path / "pack" / "part"
    part.mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("from pack.part import a\n")  # a facade
    (part / "__init__.py").write_text("from pack.part.d import D\n")
    (part / "a.py").write_text("def lazy():\n    from pack.part.b import x\n")
    (part / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.part import c\n")
    (part / "c.py").write_text("import pack.part.a\n")
    (part / "d.py").write_text("import os\n")
    assert import_cycles(tmp_path / "pack") == [["pack.part.a", "pack.part.b", "pack.part.c"]]
    (part / "d.py").write_text("import pack.part\n")
    assert ["pack.part", "pack.part.d"] in import_cycles(tmp_path / "pack")


def test_only_device_asks_the_hardware() -> None:
    asks = ("get_device_capability", "get_device_properties", "is_available()")
    for path in FILES:
        if path.name == "device.py" and path.parent == SOURCE:
            continue
        text = path.read_text()
        assert not [ask for ask in asks if ask in text], f"{path} asks the hardware itself, want mxep.device"


def test_import_is_light() -> None:
    code = "import sys, mxep; assert 'torch' not in sys.modules; from mxep import MXTensor; assert 'mxep.ops.kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    "name", ["parallel.apply_mxfp8_expert_parallel", "moe.saved_bytes", "device.available_gemm_paths", "comm.set_transport"]
)
def test_modules_are_attributes_of_the_package(name: str) -> None:
    """In a fresh process: pages name them as mxep.MODULE.NAME."""
    subprocess.run([sys.executable, "-c", f"import mxep; mxep.{name}"], check=True, timeout=120)


def test_names_of_the_package_resolve() -> None:
    import mxep

    for name in mxep.__all__:
        assert getattr(mxep, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        mxep.no_such_name  # noqa: B018

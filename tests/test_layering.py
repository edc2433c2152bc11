"""Imports point one way, every kernel has a twin, and nothing happens at import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "mxep"

# Rooms in order; a room may import rooms of earlier rows, and its own.
ORDER = [
    {"shapes", "recipe", "device", "degrees", "operators", "json_files", "field_types"},
    {"private_folders"},
    {"mx"},
    {"reference"},
    {"kernels"},
    {"comm"},
    {"bias", "placements"},
    {"gemm_options"},
    {"ep", "grouped_mm", "wgrad"},
    {"moe"},
    {"parallel"},
    {"models"},
    {"train", "integrations"},
    {"bench"},
    {"doctor", "explain", "profile", "convergence"},
    {"cli"},
]
ROW = {room: row for row, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import of {node.module}, want absolute"
            names = [f"mxep.{alias.name}" for alias in node.names] if node.module == "mxep" else [node.module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("mxep.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in ROW, f"{path}: room {room!r} has no place in ORDER"
    for other in imported_rooms(path):
        if other.startswith("__"):
            continue
        assert ROW[other] <= ROW[room], f"{path} imports mxep.{other}, which stands behind mxep.{room}"
        if ROW[other] == ROW[room] and other != room:
            assert {other, room} <= {"shapes", "recipe", "degrees", "device", "operators", "field_types", "ep", "grouped_mm", "wgrad"}, (
                f"{path}: sideways import of {other}"
            )


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("from mxep.moe import layer\nimport mxep.cli\nfrom mxep import train\n")
    assert imported_rooms(file) == {"moe", "cli", "train"}


def test_only_device_asks_the_hardware() -> None:
    asks = ("get_device_capability", "get_device_properties", "is_available()")
    for path in FILES:
        if path.name == "device.py" and path.parent == SOURCE:
            continue
        text = path.read_text()
        assert not [ask for ask in asks if ask in text], f"{path} asks the hardware itself, want mxep.device"


def public_functions(module) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(getattr(module, name)) for name in module.__all__}


def test_kernels_and_twins() -> None:
    from mxep import kernels, reference
    from mxep.operators import OPERATORS

    ours, twins = public_functions(kernels), public_functions(reference)
    assert set(ours) == set(twins)
    for name, signature in twins.items():
        assert list(ours[name].parameters) == list(signature.parameters), name
    assert set(OPERATORS) == set(twins) | {"exchange_rows", "exchange_quantized", "exchange_dequantized"}


def test_fakes_cover_every_operator() -> None:
    from mxep.operators import OPERATORS
    from mxep.reference import fakes

    assert all(callable(getattr(fakes, name)) for name in OPERATORS)


def test_import_is_light() -> None:
    code = "import sys, mxep; assert 'torch' not in sys.modules; from mxep import MXTensor; assert 'mxep.kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", ["parallel.parallelize_moe", "moe.saved_bytes", "device.available_gemm_paths", "comm.set_transport"])
def test_modules_need_no_import_of_their_own(name: str) -> None:
    """In a fresh process: pages name them as mxep.MODULE.NAME."""
    subprocess.run([sys.executable, "-c", f"import mxep; mxep.{name}"], check=True, timeout=120)


def test_names_of_the_package_resolve() -> None:
    import mxep

    for name in mxep.__all__:
        assert getattr(mxep, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        mxep.no_such_name  # noqa: B018

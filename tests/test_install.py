"""How mxep is installed and started: one version, one way to name an extra, `python -m mxep`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mxep
from mxep.cli import main
from mxep.extras import EXTRAS, install_command

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def files_of_the_project() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if Path(name).suffix in (".py", ".md", ".toml", ".sh", ".yml", "")]


def test_the_version_is_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert ROOT / PROJECT["tool"]["hatch"]["version"]["path"] == Path(mxep.__file__)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mxep {mxep.__version__}\n"
    assert f"## [{mxep.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_python_m_mxep_is_the_command_line() -> None:
    for module in ("mxep", "mxep.cli"):  # the second is that of mxep 0.1
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"mxep {mxep.__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "mxep", "no-such-command"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no command 'no-such-command'" in done.stderr


def test_every_commands_paths_begin_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell leaves the ~ after = as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["convergence", "--resume", "--out=~/runs"]) == 2
    assert f"nothing to continue in {tmp_path}/runs (" in capsys.readouterr().err


def test_extras_are_those_of_the_project() -> None:
    imported = {"sgl_deep_gemm": "deep_gemm", "flash_attn_4": "flash_attn"}  # packages whose module has another name
    named = {
        name: [re.match(r"[\w-]+", package)[0].replace("-", "_") for package in packages]
        for name, packages in PROJECT["project"]["optional-dependencies"].items()
    }
    wanted = {name: tuple(imported.get(module, module) for module in modules) for name, modules in named.items()}
    assert {name: extra.modules for name, extra in EXTRAS.items()} == wanted
    assert install_command("parquet").startswith('pip install ".[parquet]"')


def test_no_text_installs_mxep_from_an_index() -> None:
    """No package index has mxep: an extra is installed as `.[name]` from a checkout."""
    wrong = re.compile(r"mxep\[[a-z]|(?:pip|uv) (?:install|add) (?:-\S+ )*[\"']?mxep\b(?!\.git)")
    assert wrong.search('pip install "mxep' + '[parquet]"')
    assert wrong.search("pip install -U " + "mxep")
    assert not wrong.search('pip install ".[parquet]"')
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files_of_the_project()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wrong.search(line) and "(mxep[" not in line
    ]
    assert not found

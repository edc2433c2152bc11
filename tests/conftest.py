"""What every test needs: GPU tests skip with a reason where there is no GPU, checking mode is on, and outputs can be poisoned."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from mxep.bench.records import device_name, origin, write_records

os.environ.setdefault("MXEP_CHECK", "1")
if "MXEP_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    # Tests of one GPU on several: workers share them out ("0,1"), and each sees one. Nothing has touched CUDA yet.
    gpus = os.environ["MXEP_TEST_GPUS"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(gpus)]

_POISON_FLOAT, _POISON_INT = 0xFF, 0xA5  # bytes: NaN in every float format, no likely value of an integer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record", action="store_true", help="write the summary of a GPU run to benchmarks/results/gpu_tests-<gpu>-<gpus>.json"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--gpu-record"):
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu-record: this machine has no GPU that torch can use")
    count = torch.cuda.device_count()
    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")}
    name = device_name(torch.device("cuda", 0))
    command = shlex.join(["pytest", *config.invocation_params.args])
    record = {"benchmark": "gpu_tests", "device": name, "world_size": count, "counts": counts, **origin(command)}
    terminalreporter.write_line(f"wrote {write_records('gpu_tests', name, count, [record])}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        wanted = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if present < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA GPU(s), this machine has {present}"))
        if item.get_closest_marker("torchtitan") and "torchtitan" not in config.option.markexpr:
            item.add_marker(
                pytest.mark.skip(reason="installs another torch, several GB, into an environment of its own: pytest -m torchtitan")
            )


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `torch.empty` comes full of NaN (0xA5 bytes in integers), and so does GPU memory that torch's C++ takes from the cache."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        out = empty(*args, **options)
        if out.numel():
            out.view(-1).view(torch.uint8).fill_(_POISON_FLOAT if out.dtype.is_floating_point else _POISON_INT)
        return out

    monkeypatch.setattr(torch, "empty", poisoned)
    if torch.cuda.is_available():
        large = torch.full((256 << 20,), _POISON_FLOAT, dtype=torch.uint8, device="cuda")
        small = [torch.full((256 << 10,), _POISON_FLOAT, dtype=torch.uint8, device="cuda") for _ in range(64)]
        del large, small


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """A context manager in which every host sync that torch knows of raises."""

    @contextlib.contextmanager
    def forbidden() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidden


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def every_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The tests of a module on the CPU, and again on a GPU where there is one: the device of every tensor they make."""
    if request.param != "cpu":
        torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)

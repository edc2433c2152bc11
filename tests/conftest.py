"""Fixtures and hooks of all tests: GPU tests are skipped with a reason without a GPU, checking mode is on, outputs can be poisoned."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Tests start hundreds of processes, and each would compile torch's sources anew, 6 s: they share bytecode while this session lasts.
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = tempfile.mkdtemp(prefix="mxep-tests-bytecode-")
    sys.dont_write_bytecode = False
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)
if "PYTEST_XDIST_WORKER" in os.environ:  # a thread for each worker and for each rank that it starts: the cores are shared out already
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from tests.poison import POISON_FLOAT, poisoned_memory

from mxep.bench.records import device_name, origin, write_beside
from mxep.device import available_gemm_paths

os.environ.setdefault("MXEP_CHECK", "1")
# Under nohup SIGHUP is ignored, and every process that a test starts would inherit that: a trainer then rightly runs on without a terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "MXEP_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share several GPUs out, and each sees one ("0,1") or some ("0+1,2+3", for tests of two). Nothing has touched CUDA yet.
    gpus = os.environ["MXEP_TEST_GPUS"].split(",")
    mine = gpus[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = mine.replace("+", ",")

_MOST_WORKERS = 8
_KEPT_BYTES = 1 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record", action="store_true", help="write the summary of a GPU run to benchmarks/results/gpu_tests-<gpu>-<gpus>.json"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """As with `-n auto --dist worksteal`, where pytest-xdist is there and nobody says otherwise."""
    if config.pluginmanager.hasplugin("xdist") and "PYTEST_XDIST_WORKER" not in os.environ and config.option.numprocesses is None:
        config.option.numprocesses = "auto"
        if config.option.dist == "no":
            config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Workers of `-n auto`: a core each, but no more than share a GPU or this machine's memory well; none where single tests are named."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if all("::" in name for name in config.args) else min(cores, _MOST_WORKERS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nothing that exists by now has to be looked at again: a full collection over it takes 0.4 s, and a training does several."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if not config.getoption("--gpu-record") or "PYTEST_XDIST_WORKER" in os.environ:  # a worker, which knows of its own tests only
        return
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return terminalreporter.write_line(f"no record of a run that ended early ({pytest.ExitCode(exitstatus).name})")
    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu-record: this machine has no GPU that torch can use")
    count = torch.cuda.device_count()
    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")}
    name = device_name(torch.device("cuda", 0))
    command = shlex.join(["pytest", *config.invocation_params.args])
    record = {"benchmark": "gpu_tests", "device": name, "world_size": count, "counts": counts, **origin(command)}
    terminalreporter.write_line(f"wrote {write_beside(record, lambda of: of['torch'])}")


@pytest.hookimpl(trylast=True)  # of the tests that are selected
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
    items[:] = slow_first(items, getattr(config, "workerinput", {"workercount": 1})["workercount"])


def slow_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each worker begins with its share of the slow tests, so that none is left with a long one at the end.

    Slow tests of one file stay together, as one of them may wait for what another one makes.  pytest-xdist's "worksteal" hands the tests
    out in one run of them for each worker, and moves what is left from the ends of these runs.
    """
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for _, of_file in itertools.groupby(slow, key=lambda item: item.path):
        min(shares, key=len).extend(of_file)
    others, found = iter([item for item in items if item.get_closest_marker("slow") is None]), list[pytest.Item]()
    for worker, share in enumerate(shares):
        size = (len(items) - len(found)) // (workers - worker)
        found += [*share, *itertools.islice(others, max(size - len(share), 0))]
    return [*found, *others]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws from a seed of its own name: the same whatever ran before it, and another with MXEP_TEST_SEED."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()) + int(os.environ.get("MXEP_TEST_SEED", "0")))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Empties torch's cache after a large test: other processes run tests on the same GPU. What a file has imported is frozen, too."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def poison() -> Iterator[None]:
    """`poisoned_memory`, and GPU memory that torch's C++ takes from the cache is full of NaN, too."""
    if torch.cuda.is_available():
        large = torch.full((256 << 20,), POISON_FLOAT, dtype=torch.uint8, device="cuda")
        small = [torch.full((256 << 10,), POISON_FLOAT, dtype=torch.uint8, device="cuda") for _ in range(64)]
        del large, small
    with poisoned_memory():
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def nccl() -> Iterator[torch.device]:
    """The GPU of a group of one rank, with deterministic algorithms."""
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward
    yield device
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


@pytest.fixture
def hopper() -> None:
    """Skips a test where the FP8 GEMMs do not run."""
    reason = available_gemm_paths(torch.device("cuda"))["fp8"]
    if reason is not None:
        pytest.skip(reason)


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

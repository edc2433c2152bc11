"""Which transport a group takes: by name, by the environment, by what the machine can do; warnings and errors."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import raises_naming, seeded

from mxep import ep_grouped_mm, fused_moe, mxfp8_on_device_all_to_all_v
from mxep.comm import close_transports, register, set_transport, symmetric_setup, transport, transport_of
from mxep.comm.collective import CollectiveTransport
from mxep.comm.host_allgather import HostAllGather
from mxep.comm.symmetric_setup import group_problem
from mxep.device import gpu_identity, host_identity, peer_access_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class StandIn:
    """A stub for the transport that `make_symmetric` makes on GPUs."""

    name = "symmetric"

    def __init__(self, *args: Any) -> None:
        self.args, self.closed = args, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    close_transports()
    dist.destroy_process_group()


def test_transport_by_name(group: str) -> None:
    assert transport_of(group, CPU).name == "collective"
    assert set_transport("collective") == set_transport("auto", group) == "collective"
    with raises_naming("'nccl' is unknown", "'collective' or 'symmetric'"):
        set_transport("nccl")
    with raises_naming("set_transport", "no process group named 'experts'", "pass group.group_name"):
        set_transport("collective", "experts")
    with raises_naming("timeout_s=0", "more than 0"):
        set_transport("collective", timeout_s=0)
    with raises_naming("timeout_s='60'", "want seconds"):
        set_transport("collective", timeout_s="60")  # type: ignore[arg-type]
    with raises_naming("'symmetric' does not run", "needs CUDA GPUs", "cpu", "take 'collective'"):
        set_transport("symmetric")
    assert transport_of(group, CPU).name == "collective", "an error changes nothing"


def test_transport_by_the_environment(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_TRANSPORT", "symmetric")
    with raises_naming("'symmetric' does not run"):
        torch.ops.mxep.exchange_rows(torch.ones(2, 3), [2], [2], group)
    monkeypatch.setenv("MXEP_TRANSPORT", "collective")
    assert torch.ops.mxep.exchange_rows(torch.ones(2, 3), [2], [2], group).shape == (2, 3)


def test_auto_is_collective_on_a_cpu_and_on_one_rank_without_a_warning(
    group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(transport.MAKERS, "symmetric", lambda *_: pytest.fail("there is nothing to share"))
    for device in (CPU, GPU):
        assert set_transport("auto", group, device=device) == "collective"
    assert not caplog.records


def _unreachable_gpus(rank: int, world: int) -> list[str]:
    """Stubbed GPUs without peer access."""
    said: list[str] = []
    transport._log.warning = lambda text, *args: said.append(text % args)
    symmetric_setup.gpu_identity = lambda device: f"GPU-{rank}"
    symmetric_setup.peer_access_problem = lambda device, peers: f"GPU {rank} has no peer access"
    for _ in range(3):
        assert transport_of(dist.group.WORLD.group_name, GPU).name == "collective"
    return said


def test_auto_says_why_it_is_not_symmetric() -> None:
    for said in run_ranks(_unreachable_gpus, 2):
        assert len(said) == 1
        assert "not over symmetric memory: rank 0: GPU 0 has no peer access" in said[0]


def test_groups_that_cannot_share_memory() -> None:
    """On stubbed machines, since tests have no second host and no GPU without peer access."""
    fine = [("a", "GPU-1", None), ("a", "GPU-2", None)]
    assert group_problem(fine) is None
    assert "2 hosts" in str(group_problem([*fine, ("b", "GPU-1", None)]))
    assert "rank 1: no peer access" in str(group_problem([fine[0], ("a", "GPU-2", "no peer access")]))
    assert "two of its ranks are on one GPU" in str(group_problem([fine[0], fine[0]]))


def test_peer_access_is_asked_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mocked query: GPU 0 reaches GPU 1 and not GPU 2."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b == 1)
    monkeypatch.setattr("mxep.device.gpu_identity", lambda device: f"GPU-{device.index}")
    gpu = torch.device("cuda", 0)
    assert peer_access_problem(gpu, ["GPU-0", "GPU-1"]) is None
    assert "GPU 0 has no peer access to GPU 2" in str(peer_access_problem(gpu, ["GPU-1", "GPU-2"]))
    assert "GPU-9 of another rank is not visible" in str(peer_access_problem(gpu, ["GPU-9"]))
    assert "on cpu" in str(peer_access_problem(CPU, []))


def test_this_machine_has_one_identity() -> None:
    assert host_identity() == host_identity() != ""
    assert gpu_identity(CPU) == "cpu"


def _two_nodes(rank: int, world: int) -> str:
    """A group over two nodes, one of them stubbed."""
    symmetric_setup.host_identity, symmetric_setup.gpu_identity = lambda: f"node {rank}", lambda device: "GPU-0"
    symmetric_setup.peer_access_problem = lambda device, peers: None
    said: list[str] = []
    transport._log.warning = lambda text, *args: said.append(text % args)
    assert set_transport("auto", device=GPU) == "collective"
    with raises_naming("2 hosts"):
        set_transport("symmetric", device=GPU)
    x = torch.full((2, 4), float(rank))
    assert torch.ops.mxep.exchange_rows(x, [1, 1], [1, 1], dist.group.WORLD.group_name)[:, 0].tolist() == [0, 1]
    return said[0]


def test_a_group_over_two_nodes_is_collective_and_says_so() -> None:
    for said in run_ranks(_two_nodes, 2):
        assert "its ranks are on 2 hosts" in said


def _shared(rank: int, world: int) -> None:
    """Two stubbed GPUs with peer access, and CPU rows of the same group."""
    symmetric_setup._set_up = StandIn
    transport._log.warning = lambda text, *args: pytest.fail(text % args)
    world_name, closed_later = dist.group.WORLD.group_name, []

    assert transport_of(world_name, GPU).name == "symmetric"
    assert transport_of(world_name, GPU).args == (dist.group.WORLD, GPU, 45)  # run_ranks' own time limit
    closed_later.append(transport_of(world_name, GPU))
    assert transport_of(world_name, CPU).name == "collective"
    assert transport_of(world_name, GPU) is closed_later[0], "GPU rows came first"

    group = dist.new_group(timeout=datetime.timedelta(seconds=7))
    assert transport_of(group.group_name, CPU).name == "collective"
    assert transport_of(group.group_name, GPU).args == (group, GPU, 7)
    assert transport_of(group.group_name, CPU).name == "collective", "CPU rows came first"
    x = torch.full((2, 4), float(rank))
    assert torch.ops.mxep.exchange_rows(x, [1, 1], [1, 1], group.group_name)[:, 0].tolist() == [0, 1]

    for name, on_cpu in (("auto", "collective"), ("symmetric", "symmetric"), ("collective", "collective")):
        for timeout_s in (None, 3):
            assert set_transport(name, group, timeout_s=timeout_s, device=GPU) == transport_of(group.group_name, GPU).name
            if name != "collective":
                closed_later.append(transport_of(group.group_name, GPU))
                assert closed_later[-1].args == (group, GPU, timeout_s or 7)
            assert transport_of(group.group_name, CPU).name == on_cpu, "a name holds for rows on all devices, 'auto' for one"
    close_transports()
    assert all(old.closed for old in closed_later)


def test_auto_takes_symmetric_memory_for_gpus_with_the_groups_time_limit() -> None:
    run_ranks(_shared, 2, timeout=45)


def test_a_backend_without_a_time_limit() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert symmetric_setup.timeout_of(dist.group.WORLD, GPU) == symmetric_setup.DEFAULT_TIMEOUT_S
    dist.destroy_process_group()


def test_a_new_group_of_an_old_name_gets_a_transport_of_its_own(group: str) -> None:
    old: Any = StandIn()
    register(group, old)
    assert transport_of(group, CPU) is old
    kept = dist.group.WORLD  # a destroyed group is gone even if an object still refers to it
    dist.destroy_process_group()
    with raises_naming("no process group named"):
        torch.ops.mxep.exchange_rows(torch.ones(2, 3), [2], [2], group)
    assert old.closed
    old.closed = False
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == group
    assert dist.group.WORLD is not kept
    assert transport_of(group, CPU).name == "collective"
    assert not old.closed, "closed once"


def test_a_group_that_is_recreated_between_two_exchanges(group: str) -> None:
    old: Any = StandIn()
    register(group, old)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert transport_of(dist.group.WORLD.group_name, CPU).name == "collective"
    assert old.closed


def _fails_on_one_rank(rank: int, world: int) -> list[list[str]]:
    """Rank 1 gets no symmetric memory, before or after the host all-gather; or rank 0 gets no file."""
    at, made, said, errors = "", [], [], []

    class Half(StandIn):
        def __init__(self, memory: Any, rendezvous: HostAllGather, *args: Any) -> None:
            super().__init__(*args)
            if rank == 1 and at == "before":
                raise RuntimeError("peer handles are forbidden")
            rendezvous.all_gather([])
            if rank == 1:
                raise RuntimeError("no memory for events")
            made.append(self)

    def no_file(world: int) -> Any:
        raise OSError("no space")

    transport._log.warning = lambda text, *args: said.append(text % args)
    symmetric_setup.gpu_identity, symmetric_setup.peer_access_problem = lambda device: f"GPU-{rank}", lambda device, peers: None
    symmetric_setup.SymmetricTransport, symmetric_setup.CudaCopyStreams = Half, lambda device: None
    for at in ("before", "after", "file"):
        if at == "file":
            symmetric_setup.shared_file = no_file
        start = time.monotonic()
        assert set_transport("auto", device=GPU) == transport_of(dist.group.WORLD.group_name, GPU).name == "collective"
        with pytest.raises(ValueError, match="transport 'symmetric' does not run") as error:
            set_transport("symmetric", device=GPU)
        errors.append(str(error.value))
        assert time.monotonic() - start < 15, "no rank waits for the time limit"
        assert len(made) == (0 if at == "before" or rank == 1 else 2)
        assert all(one.closed for one in made)
    return [said, errors]


def test_all_ranks_fall_back_when_one_fails() -> None:
    for texts in run_ranks(_fails_on_one_rank, 2, timeout=60):
        for before, after, file in texts:
            assert "rank 1 could not make it: RuntimeError: peer handles are forbidden" in before
            assert "rank 1 could not make it: RuntimeError: no memory for events" in after
            assert "rank 0 made no file that the ranks could share: OSError: no space" in file


def test_a_transport_made_in_inference_mode_can_be_used_in_training(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setitem(transport.MAKERS, "symmetric", lambda *_: made.append(torch.zeros(1)) or StandIn())
    monkeypatch.setenv("MXEP_TRANSPORT", "symmetric")
    with torch.inference_mode():
        assert transport_of(group, GPU).name == "symmetric"
        assert torch.is_inference_mode_enabled()
    made[0].add_(1)  # as it counts its exchanges; an error for a tensor of inference mode


_FORKS = """
import mmap, os, sys
from mxep.comm import ExchangeError, close_transports, register
from mxep.comm.collective import CollectiveTransport
from mxep.comm.host_allgather import HostAllGather, rendezvous_bytes

rendezvous, peer = (HostAllGather(SHARED, rank, 2, 0.3) for SHARED in [mmap.mmap(-1, rendezvous_bytes(2))] for rank in (0, 1))


class Transport:
    close = rendezvous.close


def forked(act):
    if (child := os.fork()) == 0:
        act()
        sys.exit(0)  # as a program ends, with its exit handlers
    assert os.waitpid(child, 0)[1] == 0


def error_of_the_peer():
    try:
        peer.all_gather([])
    except ExchangeError as error:
        return str(error)


def use():
    try:
        rendezvous.all_gather([])
    except ValueError as error:
        assert f"was forked from rank 0, process {os.getppid()}" in str(error), error
    else:
        raise AssertionError("a forked process took part")
    rendezvous.fail("of the child")
    rendezvous.close()


def have_its_own():
    register("group", Transport())
    Transport.close = lambda self: print("closed its own", flush=True)


register("group", Transport())
forked(lambda: None)
assert "nothing from rank 0" in error_of_the_peer()
forked(close_transports)
forked(use)
assert "nothing from rank 0" in error_of_the_peer(), "a forked process does not take part as the rank"
forked(have_its_own)
close_transports()
assert "rank 0 has closed its transport" in error_of_the_peer()
"""


def test_a_forked_process_that_ends_does_not_close_the_transport() -> None:
    ran = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "closed its own\n"


def test_all_transports_are_closed_even_if_one_fails() -> None:
    """At the end of a process the device may be broken for one group's memory."""

    class Broken(StandIn):
        def close(self) -> None:
            super().close()
            raise RuntimeError("an illegal memory access")

    made = [Broken(), StandIn(), Broken()]
    for number, one in enumerate(made):
        register(f"one {number}", one)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        close_transports()
    assert all(one.closed for one in made)
    close_transports()


def test_a_cuda_device_without_an_index_is_the_current_one(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setitem(transport.MAKERS, "symmetric", lambda name, device, timeout_s: made.append(device) or StandIn())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert set_transport("symmetric", group, device="cuda") == "symmetric"
    assert made == [torch.device("cuda", 3)], "the device that tensors on it have"


class LoggingTransport(CollectiveTransport):
    """A user's transport: the example of `mxep.comm.transport`."""

    name = "logging"
    log: ClassVar[list[str]] = []

    def exchange(self, rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> torch.Tensor:
        self.log.append(f"{sum(input_splits)} rows leave rank {self.rank}")
        return super().exchange(rows, output_splits, input_splits)


def _user_transport(rank: int, world: int) -> None:
    """Registered by one entry of MAKERS: every exchange uses it, with the bits of the transport that it wraps."""
    transport.MAKERS["logging"] = LoggingTransport.make
    log, group = LoggingTransport.log, dist.group.WORLD
    router = torch.randn(2 * world, 64, generator=seeded(9))
    w1, w2 = torch.randn(2, 128, 64, generator=seeded(rank)), torch.randn(2, 64, 64, generator=seeded(rank))
    x = torch.randn(2 * world, 64, generator=seeded(20 + rank))
    splits, counts = [2] * world, torch.ones(2 * world, dtype=torch.int64)
    found: list[list[torch.Tensor]] = []
    for name in ("collective", "logging"):
        assert set_transport(name) == name
        log.clear()
        rows = x.clone().requires_grad_()
        outs = [ep_grouped_mm(rows, w1, splits, splits, counts), fused_moe(rows, router, w1, None, w2, None, 2, 2 * world, group=group)]
        outs.append(mxfp8_on_device_all_to_all_v(rows, torch.tensor(splits), 2 * world)[0])
        sum(out.float().sum() for out in outs).backward()
        found.append([*(out.detach() for out in outs), rows.grad])
        assert bool(log) == (name == "logging")
    assert all(map(torch.equal, *found))
    assert log[0] == f"{2 * world} rows leave rank {rank}"
    close_transports()


def test_a_transport_of_a_user() -> None:
    run_ranks(_user_transport, 2)

"""Which transport a group takes: by name, by the environment, by what the machine can do, and what is said where it cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.truth import raises_naming

from mxep.comm import close_transports, set_transport, transport, transport_of
from mxep.comm.transport import group_problem
from mxep.device import gpu_identity, host_identity, peer_access_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    close_transports()
    dist.destroy_process_group()


def test_by_name(group: str) -> None:
    assert transport_of(group, CPU).name == "collective"
    assert set_transport("collective") == set_transport("auto", group) == "collective"
    with raises_naming("'nccl' is unknown", "'collective' or 'symmetric'"):
        set_transport("nccl")
    with raises_naming("timeout_s=0", "more than 0"):
        set_transport("collective", timeout_s=0)
    with raises_naming("symmetric memory does not run", "needs CUDA GPUs", "cpu", "take 'collective'"):
        set_transport("symmetric")
    assert transport_of(group, CPU).name == "collective", "an error changes nothing"


def test_by_the_environment(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_TRANSPORT", "symmetric")
    with raises_naming("symmetric memory does not run"):
        torch.ops.mxep.exchange_rows(torch.ones(2, 3), [2], [2], group)
    monkeypatch.setenv("MXEP_TRANSPORT", "collective")
    assert torch.ops.mxep.exchange_rows(torch.ones(2, 3), [2], [2], group).shape == (2, 3)


def test_auto_is_collective_on_a_cpu_and_alone_without_a_word(
    group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "_make_symmetric", lambda *_: pytest.fail("there is nothing to share"))
    for device in (CPU, GPU):
        assert set_transport("auto", group, device=device) == "collective"
    assert not caplog.records


def _unreachable_gpus(rank: int, world: int) -> list[str]:
    """GPUs that do not reach each other, made up."""
    said: list[str] = []
    transport._log.warning = lambda text, *args: said.append(text % args)
    transport.gpu_identity = lambda device: f"GPU-{rank}"
    transport.peer_access_problem = lambda device, peers: f"GPU {rank} has no peer access"
    for _ in range(3):
        assert transport_of(dist.group.WORLD.group_name, GPU).name == "collective"
    return said


def test_auto_says_why_it_is_not_symmetric() -> None:
    for said in run_ranks(_unreachable_gpus, 2):
        assert len(said) == 1
        assert "not over symmetric memory: rank 0: GPU 0 has no peer access" in said[0]


def test_groups_that_cannot_share_memory() -> None:
    """The machines are made up: no second host and no GPU without peer access is at hand."""
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
    """A group that spans nodes, the second one made up."""
    transport.host_identity, transport.gpu_identity = lambda: f"node {rank}", lambda device: "GPU-0"
    transport.peer_access_problem = lambda device, peers: None
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

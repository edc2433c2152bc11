"""Old names work and warn, at the line that uses them."""

from __future__ import annotations

import importlib
import sys

import pytest
from torch.distributed.device_mesh import init_device_mesh

import mxep
from mxep.deprecation import renamed_attributes, warn_deprecated


def test_a_renamed_attribute_warns_at_its_user() -> None:
    old_name = renamed_attributes("mxep.parallel", {"Old": "ParallelDims"}, since="0.2")
    with pytest.warns(DeprecationWarning, match=r"^mxep.parallel.Old: deprecated since mxep 0.2, renamed to mxep.parallel.ParallelDims"):
        assert old_name("Old") is mxep.parallel.ParallelDims
    with pytest.raises(AttributeError, match=r"module 'mxep.parallel' has no attribute 'Other'"):
        old_name("Other")


def test_the_warning_names_the_line_of_the_caller() -> None:
    def function_with_an_old_name() -> None:
        warn_deprecated("old", "new", since="0.2")

    with pytest.warns(DeprecationWarning, match="old: ") as caught:
        function_with_an_old_name()
    assert caught[0].filename == __file__


def test_old_names_of_0_1(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        DeprecationWarning, match=r"^mxep.parallel.Degrees: deprecated since mxep 0.2, renamed to mxep.parallel.ParallelDims; use"
    ):
        assert mxep.parallel.Degrees is mxep.parallel.ParallelDims
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
    with pytest.warns(DeprecationWarning, match=r"^mxep.parallel.parallelize_moe: deprecated since mxep 0.3, renamed to") as caught:
        assert mxep.parallel.parallelize_moe(moe=layer, ep_mesh=mesh) is layer
    assert caught[0].filename == __file__
    assert layer.group is mesh.get_group()
    monkeypatch.delitem(sys.modules, "mxep.ep.journey", raising=False)  # warns when it is imported, once in a process
    with pytest.warns(DeprecationWarning, match=r"^mxep.ep.journey: deprecated since mxep 0.2, renamed to mxep.ep.blocks; use that"):
        importlib.import_module("mxep.ep.journey")

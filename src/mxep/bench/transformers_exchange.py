"""`mxep bench transformers-ep`: the same experts spread over the ranks, tokens exchanged, by the adapter and by transformers' own exchange.

Arms: `all_to_all`, transformers' exchange over NCCL around its grouped GEMMs, in bf16; `mxep` and `mxep_mx`, the adapter's, over the
transport that the group takes.  Every rank brings as many tokens, and all experts are as likely.  The limit is one dense GEMM for every
product of a rank's share of the rows, and no exchange.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mxep.bench.registry import Case, Setting
from mxep.bench.transformers_experts import BASELINE as PRODUCTS
from mxep.bench.transformers_experts import OURS, Problem, models, registered
from mxep.comm import transport_of

BASELINE = "all_to_all"


class Exchange(Problem):
    """Experts of this rank and every way in which tokens reach those of all ranks; `mesh`: EP over all ranks, TP of one."""

    baseline = BASELINE

    def __init__(self, setting: Setting, name: str, mesh: DeviceMesh) -> None:
        super().__init__(setting, name)
        self.experts._is_expert_parallel = True
        ways = importlib.import_module("transformers.distributed.expert_parallel").EPImplementationInterface()
        self.exchanges = {arm: ways[arm](self.experts, mesh["ep"], mesh["tp"]) for arm in (BASELINE, *OURS)}

    def output(self, arm: str) -> Tensor:
        """y of an arm (T, D)."""
        self.experts.config._experts_implementation = PRODUCTS  # of transformers' own exchange; the adapter's has its own
        y: Tensor = self.exchanges[arm](self.leaves[0], self.choices, self.leaves[1])
        return y


def cases(setting: Setting) -> Iterator[Case]:
    """A layer of every model. Raises ValueError where the adapter's transformers is not installed."""
    registered()
    mesh = init_device_mesh(setting.device.type, (setting.world, 1), mesh_dim_names=("ep", "tp"))
    transport = transport_of(mesh["ep"].get_group().group_name, setting.device).name
    for name in models(setting):
        case = Exchange(setting, name, mesh).case()
        yield replace(case, facts={**case.facts, "transport": transport})

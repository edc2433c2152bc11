"""The meshes of every kind of parallelism over the same ranks.

Ranks count pipeline stages first, then replicas, then shards; the ranks of a TP group and of an EP group are consecutive.  Inside a stage
every rank has tokens of its own (under tensor parallelism: its share of the same sequences).  So an EP group may consist of any of a
stage's ranks, tensor-parallel ranks included (Megatron's parallel folding).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mxep.checks import check_count
from mxep.parallel_dims import ParallelDims


@dataclass(frozen=True)
class Meshes:
    """The meshes of one rank.

    Attributes:
        dp: all ranks of the stage: what every rank has whole in forward is sharded over it.  (replicate, shard) under HSDP, else 1-D;
            so are the other two of FSDP's.
        ep: the EP group of this rank, consecutive ranks.
        dp_mod_ep: the ranks that hold the same experts; these are sharded again over it.
        tp: the TP group of this rank, consecutive ranks.
        dp_mod_tp: the ranks that hold the same TP shards; these are sharded again over it.
        pp: one rank of each stage.
        stage: all ranks of the stage, 1-D.
        degrees: what they were built from.

    Examples:
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> meshes.dp.size(), meshes.ep.size(), meshes.tp.size()
        (1, 1, 1)
    """

    dp: DeviceMesh
    ep: DeviceMesh
    dp_mod_ep: DeviceMesh
    tp: DeviceMesh
    dp_mod_tp: DeviceMesh
    pp: DeviceMesh
    stage: DeviceMesh
    degrees: ParallelDims

    @property
    def data_rank(self) -> int:
        """The number of the part of the batch that this rank's TP group and pipeline take."""
        coordinates = self.dp_mod_tp.get_coordinate()
        assert coordinates is not None
        return coordinates[0] if len(coordinates) == 1 else coordinates[0] * self.dp_mod_tp.size(1) + coordinates[1]

    @property
    def data_world(self) -> int:
        """The number of parts of the batch."""
        return self.dp_mod_tp.size()


def build_meshes(world_size: int, degrees: ParallelDims | int, device_type: str) -> Meshes:
    """Meshes for `world_size` ranks; torch.distributed must be initialised.

    With 4 ranks and ep=2: dp {0 1 2 3}, ep {0 1} {2 3}, dp_mod_ep {0 2} {1 3}.
    With 8 ranks, tp=2 and ep=4: tp {0 1} {2 3} {4 5} {6 7}, ep {0 1 2 3} {4 5 6 7}, dp_mod_ep {0 4} {1 5} {2 6} {3 7}.
    With 4 ranks, pp=2 and ep=2: dp {0 1} {2 3}, ep {0 1} {2 3}, pp {0 2} {1 3}.

    Args:
        world_size: all ranks.
        degrees: how the ranks are divided; an int is the EP degree alone.
        device_type: "cuda" or "cpu".

    Returns:
        the meshes of this rank.

    Raises:
        ValueError: degrees that do not fit each other or `world_size`.

    Examples:
        >>> meshes = mxep.parallel.build_meshes(torch.distributed.get_world_size(), mxep.parallel.ParallelDims(ep=1), "cpu")
        >>> meshes.ep.size()
        1
    """
    degrees = ParallelDims(ep=degrees) if isinstance(degrees, int) else degrees
    check_count("build_meshes", "world_size", world_size)
    shards = degrees.shards(world_size)
    # The shards are counted twice, as (rest, tp) and as (rest, ep); the smaller of the two degrees is the innermost dimension of both.
    inner, larger = min(degrees.ep, degrees.tp), max(degrees.ep, degrees.tp)
    sizes = (degrees.pp, degrees.replicate, shards // larger, larger // inner, inner)
    root = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "replicate", "outer", "middle", "inner"))

    def replicated(mesh: DeviceMesh) -> DeviceMesh:
        return DeviceMesh._concatenate([root["replicate"], mesh]) if degrees.replicate > 1 else mesh

    def shared_by(degree: int, name: str) -> tuple[DeviceMesh, DeviceMesh]:
        """(mesh of the ranks that share something among `degree`, mesh of the ranks that hold the same share)."""
        if degree == larger:
            share, rest = root["middle", "inner"]._flatten(name), root["outer"]
        else:
            share, rest = root["inner"], root["outer", "middle"]._flatten(f"dp_mod_{name}")
        return share, replicated(rest)

    dp = replicated(root["outer", "middle", "inner"]._flatten("shard"))
    ep, dp_mod_ep = shared_by(degrees.ep, "ep")
    tp, dp_mod_tp = (ep, dp_mod_ep) if degrees.tp == degrees.ep else shared_by(degrees.tp, "tp")
    stage = root["replicate", "outer", "middle", "inner"]._flatten("stage")
    return Meshes(dp, ep, dp_mod_ep, tp, dp_mod_tp, root["pp"], stage, degrees)

"""How many ranks share what, and whether that fits (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from mxep.field_types import check_field_types


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks share what; what is left of the world is data parallelism.

    Attributes:
        ep: ranks that share one set of experts.
        tp: ranks that share the heads and the hidden width of dense layers.
        pp: stages that share the layers.
        replicate: copies of everything that FSDP shards (HSDP); 1 shards over all.
        cp: always 1.

    Examples:
        >>> mxep.parallel.ParallelDims(ep=8, tp=2).ep
        8
    """

    ep: int = 1
    tp: int = 1
    pp: int = 1
    replicate: int = 1
    cp: int = 1

    def shards(self, world_size: int) -> int:
        """Ranks of one stage and replica.

        Raises:
            ValueError: degrees that do not fit each other or `world_size`.
        """
        check_field_types(self, "parallelism")
        for name in ("ep", "tp", "pp", "replicate", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallelism: {name}={getattr(self, name)}, want 1 or more")
        if self.cp > 1:
            raise ValueError(
                f"parallelism: cp={self.cp}, but mxep has no context parallelism (torchtitan has); shorten the sequences, or shard "
                "their activations outside of attention with tensor parallelism"
            )
        if world_size % (self.pp * self.replicate * self.tp):
            raise ValueError(
                f"parallelism: {world_size} ranks are not divisible by pp * replicate * tp = {self.pp} * {self.replicate} * {self.tp}; "
                "choose degrees whose product divides the ranks"
            )
        shards = world_size // (self.pp * self.replicate)
        if shards % self.ep:
            raise ValueError(
                f"parallelism: {world_size} ranks / (pp {self.pp} * replicate {self.replicate}) = {shards}, which is not divisible by the "
                f"EP degree {self.ep}; choose a divisor of it"
            )
        if max(self.ep, self.tp) % min(self.ep, self.tp):
            raise ValueError(
                f"parallelism: neither of ep={self.ep} and tp={self.tp} divides the other, want groups that lie inside each other; "
                "choose powers of two"
            )
        return shards

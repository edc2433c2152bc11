"""`RuntimeEPConfig`: modes and precisions of the fused layer's exchanges, and what its forward saves. Can be stored as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from mxep.field_types import check_field_types
from mxep.json_files import parse_json_object, read_small_text
from mxep.recipe import Precision, Recipe

KeepFirst = Literal[True, False, "mxfp8"]
DispatchMode = Literal["rank_dedup", "all_to_all", "all_gather"]
CombineMode = Literal["rank_dedup", "all_to_all", "reduce_scatter"]
_MAX_BYTES = 1 << 20  # of a file


def mode_of(name: DispatchMode | CombineMode) -> str:
    """The mode of the row exchange (`mxep.fused.dispatcher`) that an option names: an all-gather and a reduce-scatter are one."""
    return "all_ranks" if name in ("all_gather", "reduce_scatter") else name


@dataclass(frozen=True)
class RuntimeEPConfig:
    """Modes and precisions of a fused layer's exchanges, and what its forward saves. It must be the same on every rank of a group.

    Attributes:
        dispatch: rows that dispatch sends, and rows of its backward.  "rank_dedup": a token once to each rank that has one of its experts;
            "all_to_all": once for each choice; "all_gather": every token to every rank.
        combine: rows that combine sends, and rows of its backward.  "rank_dedup": one sum for each token and rank; "all_to_all": a row for
            each choice; "reduce_scatter": a sum for every token from every rank, zero from ranks without a chosen expert.
        dispatch_forward: "mxfp8" or "hp" (the tokens' dtype) on the wire; None is the recipe's.
        combine_backward: the same for the output's gradient.
        combine_forward: the same for the sums of expert outputs; no GEMM follows them, so MXFP8 costs accuracy there.
        dispatch_backward: the same for the sums of input gradients.
        keep_first_product: keep gate and up (the first product, P x 2H) for backward.  "mxfp8" keeps them quantised 1x32, in 33/64 of
            bf16's bytes: forward's own results do not change, backward's activation reads the quantised values (docs/numerics.md has the
            cost).  False recomputes them from the dispatched tokens.
        redispatch_x_in_backward: save the layer's input, which the residual stream holds anyway, instead of the dispatched tokens, and
            dispatch it again in backward: the same bytes.  Over symmetric memory, copy engines send them during backward's first GEMMs.
        scratch_rows: the most expert rows (received and padded) for which gate and up, the activation and the down GEMM are computed at a
            time; None: all at once.  More rows are computed in chunks of whole experts, whose bounds the device decides, and backward
            recomputes gate and up of all chunks but the last.  At least the tokens of all ranks, rounded up to the padding, since all may
            choose one expert.  "auto": None where the host knows the number of received rows; else (symmetric memory without
            `cpu_sync_on_runtime`) the balanced share, tokens of all ranks x C / W, and its usual deviation (less of it with
            `keep_first_product="mxfp8"`), instead of the worst case.
        cpu_sync_on_runtime: over symmetric memory, the host waits once per forward for the number of received rows, so that saved tensors
            have their size and there is one chunk.  The collective transport always waits where there is more than one rank.  The
            wait pays where routing is uneven: with one chunk, backward recomputes no gate and up.
        keep_dgrad_weights: on GPUs with FP8 GEMM paths, forward quantises each weight for its own product and for dgrad in one pass, and
            keeps the latter, one byte a weight, for backward.  False quantises the weights again in backward, which costs 0.5 ms more for
            600 million weights of one layer on an H100.  Without effect on weights that a `WeightCache` keeps.

    Raises:
        ValueError: an unknown mode or precision, or a number of rows below 1.

    Examples:
        >>> runtime = mxep.RuntimeEPConfig(dispatch="all_gather", combine="reduce_scatter", combine_forward="hp")
        >>> layer = mxep.FusedMoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2), runtime=runtime)
        >>> layer.runtime.dispatch
        'all_gather'
    """

    dispatch: DispatchMode = "rank_dedup"
    combine: CombineMode = "rank_dedup"
    dispatch_forward: Precision | None = None
    combine_forward: Precision = "hp"
    combine_backward: Precision | None = None
    dispatch_backward: Precision = "hp"
    keep_first_product: KeepFirst = True
    redispatch_x_in_backward: bool = False
    scratch_rows: int | Literal["auto"] | None = "auto"
    cpu_sync_on_runtime: bool = False
    keep_dgrad_weights: bool = True

    def __post_init__(self) -> None:
        check_field_types(self)
        if isinstance(self.scratch_rows, int) and self.scratch_rows < 1:
            raise ValueError(f"RuntimeEPConfig: scratch_rows={self.scratch_rows}, want 'auto', None or a number of rows from 1 on")

    @property
    def wires(self) -> tuple[str, str]:
        """(mode of dispatch, mode of combine); see `mxep.fused.dispatcher`."""
        return mode_of(self.dispatch), mode_of(self.combine)

    @property
    def number(self) -> int:
        """A number that no other configuration has; ranks compare it."""
        chosen = ((DispatchMode, self.dispatch), (CombineMode, self.combine), (KeepFirst, self.keep_first_product))
        precisions = self.combine_forward == "mxfp8", self.dispatch_backward == "mxfp8"
        switches = self.redispatch_x_in_backward, self.cpu_sync_on_runtime, self.keep_dgrad_weights
        scratch = 1 + self.scratch_rows if isinstance(self.scratch_rows, int) else self.scratch_rows == "auto"
        digits = (*(get_args(kind).index(value) for kind, value in chosen), *precisions, *switches, scratch)
        return sum(int(digit) * 3**place for place, digit in enumerate(digits))

    def apply_to(self, recipe: Recipe) -> Recipe:
        """The recipe with this configuration's precisions of the exchanges. Raises ValueError where they contradict it."""
        dispatch, combine = self.dispatch_forward or recipe.dispatch, self.combine_backward or recipe.combine_backward
        if (dispatch, combine) == (recipe.dispatch, recipe.combine_backward):
            return recipe
        return replace(recipe, dispatch=dispatch, combine_backward=combine)

    def to_json(self) -> str:
        """One JSON object with a key for each attribute."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> RuntimeEPConfig:
        """What `to_json` wrote; keys that are missing have their defaults. Raises ValueError for anything else."""
        try:
            given = parse_json_object(text, "the text")
        except ValueError as error:
            raise ValueError(f"RuntimeEPConfig: no JSON object as to_json() writes it: {error}") from error
        names = [field.name for field in fields(RuntimeEPConfig)]
        if not set(given) <= set(names):
            got = sorted(set(given) - set(names))
            raise ValueError(f"RuntimeEPConfig: {got} in the JSON, want an object with keys of {', '.join(names)}")
        return RuntimeEPConfig(**given)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> RuntimeEPConfig:
        """Read what `save` wrote. Raises ValueError for another content, and for a file that cannot be read."""
        return RuntimeEPConfig.from_json(read_small_text(Path(path), "RuntimeEPConfig.load", _MAX_BYTES))

"""How the fused layer exchanges: `RuntimeEPConfig`, written by hand or by a measurement, kept as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from mxep.field_types import check_field_types
from mxep.json_files import parse_json_object, read_small_text
from mxep.recipe import Precision, Recipe

KeepFirst = Literal[True, False, "mxfp8"]
DispatchMode = Literal["rank_dedup", "all_to_all", "all_gather"]
CombineMode = Literal["rank_dedup", "all_to_all", "reduce_scatter"]
_DISPATCH = ("rank_dedup", "all_to_all", "all_gather")
_COMBINE = ("rank_dedup", "all_to_all", "reduce_scatter")
_KEEP = (False, True, "mxfp8")
_MAX_BYTES = 1 << 20  # of a file
_WIRE = {"all_gather": "all_ranks", "reduce_scatter": "all_ranks"}  # see mxep.fused.dispatcher


@dataclass(frozen=True)
class RuntimeEPConfig:
    """Modes and precisions of a fused layer's exchanges, and what its forward keeps. Every rank of a group must bring the same.

    Attributes:
        dispatch: which rows carry the tokens out, and the gradients of tokens home.  "rank_dedup": a token once to each rank that holds
            one of its experts; "all_to_all": once for each choice; "all_gather": every token to every rank.
        combine: which rows carry the experts' sums home, and gradients of the output out.  "rank_dedup": one sum for each token and rank;
            "all_to_all": a row for each choice; "reduce_scatter": a sum for every token from every rank, zero where none of it was chosen.
        dispatch_forward: "mxfp8" or "hp" (the tokens' dtype) on the wire; None is what the recipe says.
        combine_backward: the same for the output's gradient.
        combine_forward: the same for the sums of expert outputs; no GEMM follows them, so MXFP8 costs accuracy there.
        dispatch_backward: the same for the sums of input gradients.
        keep_first_product: keep gate and up (the first product, P x 2H) for backward.  "mxfp8" keeps them quantised 1x32, in 33/64 of
            bf16's bytes: forward's own results do not change, backward's activation reads the quantised values (docs/numerics.md says
            what that costs).  False makes them again from the wire's bytes.
        redispatch_x_in_backward: keep the layer's input alone, which the residual stream holds anyway, in place of the dispatched tokens,
            and dispatch them once more in backward: the same bytes, over symmetric memory by copy engines beside backward's first GEMMs
            where a rank needs most tokens.
        scratch_rows: places of rows, as received for the experts and padded, that the first product, the activation and the second product
            are worked out for at a time; None: for all at once.  Where there are more, their experts are worked through in passes that the
            device cuts out, each of whole experts, and backward makes the first product of all passes but the last again.  At least the
            tokens of all ranks, rounded up to the padding, since all may choose one expert.  "auto": None where the host knows how many
            rows came; where it does not (symmetric memory without `cpu_sync_on_runtime`) the balanced share, tokens of all ranks x C / W,
            and what its spread takes, instead of the worst case.
        cpu_sync_on_runtime: over symmetric memory, let the host wait once per forward for the number of rows that came, so that what is
            kept has their size and there is one pass; the collective transport always does where there is more than one rank.

    Raises:
        ValueError: a mode or precision that there is not, or a number of rows below 1.

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

    def __post_init__(self) -> None:
        check_field_types(self)
        if isinstance(self.scratch_rows, int) and self.scratch_rows < 1:
            raise ValueError(f"RuntimeEPConfig: scratch_rows={self.scratch_rows}, want 'auto', None or a number of rows from 1 on")

    @property
    def wires(self) -> tuple[str, str]:
        """Dispatch's and combine's modes see `mxep.fused.dispatcher`."""
        return _WIRE.get(self.dispatch, self.dispatch), _WIRE.get(self.combine, self.combine)

    @property
    def number(self) -> int:
        """A number that tells configurations apart."""
        own = (_DISPATCH.index(self.dispatch), _COMBINE.index(self.combine), self.combine_forward == "mxfp8")
        kept = _KEEP.index(self.keep_first_product), self.redispatch_x_in_backward, self.cpu_sync_on_runtime
        scratch = 1 + self.scratch_rows if isinstance(self.scratch_rows, int) else self.scratch_rows == "auto"
        digits = (*own, self.dispatch_backward == "mxfp8", *kept, scratch)
        return sum(int(digit) * 3**place for place, digit in enumerate(digits))

    def apply_to(self, recipe: Recipe) -> Recipe:
        """The recipe with the precisions of the exchanges that this configuration sets. Raises ValueError where they contradict it."""
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

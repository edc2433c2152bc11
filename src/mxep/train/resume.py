"""What may change when a run resumes: data, sequence length and batch if `--change` names them; other options are reported.

A change of data, sequence length or batch begins a new stage of the run, which keeps weights, moments and the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxep.field_types import listed
from mxep.json_files import typed
from mxep.models.presets import TRAINING_FIELDS
from mxep.train.checkpoint import Manifest
from mxep.train.config import PER_START, TrainConfig, flag_of
from mxep.train.optimizer import Schedule

Difference = tuple[Any, Any]  # (old, new)
_NAMED_BY = {"data": "data", "held_out_share": "data", "seq_len": "seq-len", "yarn": "seq-len", "sequences_per_step": "batch"}
_ORDER = ("data", "seq_len")  # these determine the order of the sequences; the batch does not


def stage_changes(
    manifest: Manifest, wanted: Mapping[str, Any], named: Sequence[str], legacy: Mapping[str, Any], factors: Mapping[str, int]
) -> dict[str, Difference]:
    """The allowed differences between this start and the checkpoint's run.

    Args:
        wanted: identity of this start, as far as it is known.
        named: what may differ, see `TrainConfig.change`.
        legacy: identity values for older runs, which did not save them.
        factors: of the sequences of a step, by name.

    Raises:
        ValueError: something differs that is not named, or that must never differ.
    """
    identity = typed(manifest.facts.get("identity", {}), dict, f"checkpoint: {manifest.path}: identity")
    different = identity_differences({**legacy, **identity}, wanted)
    refused = [name for name in different if _NAMED_BY.get(name) not in named]
    if refused:
        shown = [f"{name} was {different[name][0]}, is {different[name][1]}" for name in refused]
        if "sequences_per_step" in refused and isinstance(was := different["sequences_per_step"][0], int):
            shown[refused.index("sequences_per_step")] += f" ({_ways_to(was, factors)})"
        names = {_NAMED_BY.get(name, "") for name in different}
        way = f", or begin a new stage of it with --change {','.join(sorted({*named, *names}))}" if all(names) else ""
        raise ValueError(f"resume: {manifest.path} cannot be resumed exactly: {'; '.join(shown)}; give the options it was made with{way}")
    return different


def _ways_to(product: int, factors: Mapping[str, int]) -> str:
    """The factors, and the values of each that alone make their product this one.

    >>> _ways_to(8, {"data-parallel ranks": 1, "--batch": 3, "--accumulate": 4}), _ways_to(4, {"--batch": 3})
    ('data-parallel ranks 1 x --batch 3 x --accumulate 4; 8 with --batch 2', '--batch 3; 4 with --batch 4')
    """
    now = math.prod(factors.values())
    ways = [f"{name} {value * product // now}" for name, value in factors.items() if value * product % now == 0]
    parts = " x ".join(f"{name} {value}" for name, value in factors.items())
    return f"{parts}; {product} with {listed(ways)}" if ways else parts


def identity_differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Difference]:
    """The values of `wanted` that differ in `found`: name -> (old, new). The shape is compared field by field, without TRAINING_FIELDS.

    >>> identity_differences({"seed": 1, "shape": {"dim": 32, "z_loss": 0}}, {"seed": 1, "shape": {"dim": 64, "z_loss": 1}})
    {'shape.dim': (32, 64)}
    """
    flat_found, flat_wanted = _with_shape(found), _with_shape(wanted)
    return {name: (flat_found.get(name), value) for name, value in flat_wanted.items() if flat_found.get(name) != value}


def _with_shape(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity with the shape's fields as values of their own."""
    shape = identity.get("shape") or {}
    others = {name: value for name, value in identity.items() if name != "shape"}
    return others | {f"shape.{name}": value for name, value in shape.items() if name not in TRAINING_FIELDS}


def keeps_order(stage: Mapping[str, Difference]) -> bool:
    """True if the order of the training sequences continues."""
    return not set(_ORDER) & set(stage)


@dataclass(frozen=True)
class Changes:
    """How a start differs from the run that it resumes.

    Attributes:
        step: optimizer steps taken so far.
        stage: differences that begin a new stage, by name; empty if the stage continues.
        options: options that changed, by name; None: not given.
        schedule: a line about the learning rate; None if every step keeps its rate.
    """

    step: int
    stage: dict[str, Difference]
    options: dict[str, Difference]
    schedule: str | None

    @property
    def lines(self) -> list[str]:
        """A line for each option, for the schedule, and for a new stage."""
        lines = [f"changed: {flag_of(name)} was {_shown(was)}, is {_shown(now)}" for name, (was, now) in self.options.items()]
        lines += [] if self.schedule is None else [self.schedule]
        if self.stage:
            names = ", ".join(dict.fromkeys(_NAMED_BY[name] for name in self.stage))
            order = "continues" if keeps_order(self.stage) else "starts at its beginning"
            lines.append(f"a new stage begins after step {self.step} ({names}); weights and moments stay, the order of its data {order}")
        return lines


def find_changes(manifest: Manifest, config: TrainConfig, schedule: Schedule, stage: dict[str, Difference]) -> Changes:
    """The differences between this start and the checkpoint's run; `stage` is the result of `stage_changes`."""
    facts, options = manifest.facts, dict[str, Difference]()
    before = Schedule(**facts["schedule"]) if "schedule" in facts else schedule
    if "settings" in facts:
        was, now = TrainConfig.from_json(facts["settings"]).to_json(), config.to_json()
        for values, drawn in ((was, before), (now, schedule)):  # compare the values in use, since the options may be unset
            values |= {"lr": drawn.peak, "warmup": drawn.warmup, "steps": drawn.steps}
        options = {name: (was[name], now[name]) for name in now if name not in (*PER_START, "out", "shape") and was[name] != now[name]}
    return Changes(manifest.step, stage, options, schedule_change(before, schedule, manifest.step))


def schedule_change(before: Schedule, now: Schedule, step: int) -> str | None:
    """A line about how the learning rate changes after `step` steps; None if every step keeps its rate.

    >>> cosine = Schedule(peak=1.0, warmup=0, steps=10, floor=0.0)
    >>> schedule_change(cosine, Schedule(peak=1.0, warmup=0, steps=20, floor=0.0), step=5)
    'schedule: recomputed as if the run had begun with it; step 6 has the rate 0.854, it would have had 0.5'
    >>> stable = [Schedule(peak=1.0, warmup=0, steps=steps, decay_ratio=0.2) for steps in (10, 20)]
    >>> schedule_change(*stable, step=5)
    'schedule: the steps so far would have had the same rates; the first to differ is step 10, with 1 instead of 0.55'
    """
    apart = next((at for at in range(max(before.steps, now.steps)) if before.at(at) != now.at(at)), None)
    if apart is None:
        return None
    if apart < step:
        rates = f"step {step + 1} has the rate {now.at(step):.3g}, it would have had {before.at(step):.3g}"
        return f"schedule: recomputed as if the run had begun with it; {rates}"
    rates = f"step {apart + 1}, with {now.at(apart):.3g} instead of {before.at(apart):.3g}"
    return f"schedule: the steps so far would have had the same rates; the first to differ is {rates}"


def _shown(value: Any) -> str:
    return "not given" if value is None or value == [] else ", ".join(value) if isinstance(value, list) else str(value)

"""Which model a run trains: named by its options, described by a folder, or kept by a run that goes on (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mxep.models.presets import (
    FLAVORS,
    LEGACY_MODELS,
    DeepSeekV3Config,
    ModelConfig,
    Yarn,
    default_model,
    first_layers,
    resolve_model,
    shape_from_json,
    shape_to_json,
)
from mxep.models.published_shape import check_published_config, find_model, read_shape

if TYPE_CHECKING:
    from mxep.train.config import TrainConfig


@dataclass(frozen=True)
class ModelChoice:
    """What the options come to.

    Attributes:
        name: of a preset or a folder, and of how many layers.
        shape: as published, with the YaRN that the model can have.
        yarn: whether its weights have been trained with YaRN so far; None for random ones.
        notes: lines about what of its config.json is left out.
    """

    name: str
    shape: ModelConfig
    yarn: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def extension(self) -> Yarn | None:
        """The YaRN that the model can have."""
        return self.shape.yarn if isinstance(self.shape, DeepSeekV3Config) else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a run to keep: `TrainConfig.shape`."""
        return {"name": self.name, **shape_to_json(self.shape)}

    def applies_yarn(self, asked: str, seq_len: int) -> bool:
        """Whether a run of `seq_len` tokens a sequence applies YaRN; `asked` is its --yarn.

        Raises:
            ValueError: asked for, but the model has none.
        """
        if self.extension is None:
            if asked == "on":
                raise ValueError(f"--yarn=on, but {self.name} has no YaRN (no rope_scaling); leave it out")
            return False
        if asked != "auto":
            return asked == "on"
        return seq_len > self.extension.original_seq_len if self.yarn is None else self.yarn


def choose_model(config: TrainConfig, device_type: str) -> ModelChoice:
    """The model of a run; what a run has kept goes before all files.

    Raises:
        ValueError: no such model or folder; a config.json that our models do not cover, or of another model than --model.
    """
    named = chosen_model(config)
    if config.shape is not None:
        return kept_model(config.shape, named or default_model(device_type), config.layers)
    folder = config.init_from
    if folder is not None and folder.is_file():
        raise ValueError(f"--init-from={folder} is a file, want the folder with its config.json and weights")
    if named is None and folder is not None:
        named = str(folder)
    name, shape, notes = find_model(named or default_model(device_type), config.layers)
    if folder is None:
        return ModelChoice(name, shape, notes=tuple(notes))
    check_published_config(shape, folder, any_yarn=True)  # its notes come once more when the weights are read
    theirs, _ = read_shape(folder)
    if not isinstance(theirs, DeepSeekV3Config) or not isinstance(shape, DeepSeekV3Config):
        return ModelChoice(name, shape)
    return ModelChoice(name, replace(shape, yarn=theirs.yarn or shape.yarn), theirs.yarn is not None)


def kept_model(values: dict[str, Any], named: str, layers: int | None = None) -> ModelChoice:
    """The model that a run has kept.

    Args:
        values: what `ModelChoice.to_json` gave; empty of a run begun before runs kept it, whose model is the preset `named`, the first
            `layers` of it, as it was then.

    Raises:
        ValueError: values that are no model, no such preset.
    """
    if values == {}:
        name, shape = first_layers(named, resolve_model(named, LEGACY_MODELS), layers)
        return ModelChoice(name, shape, yarn=True)  # it was applied at every length
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ValueError(f"saved shape: got {values!r}, want an object with a name")
    return ModelChoice(values["name"], shape_from_json({key: value for key, value in values.items() if key != "name"}))


def chosen_model(config: TrainConfig) -> str | None:
    """The preset or path that the options name, by --model or by --model-name and --model-flavor; None when they name none.

    Raises:
        ValueError: a name without a flavor or the other way round, a pair that there is not, two different presets.
    """
    name, flavor = config.model_name, config.model_flavor
    if name is None and flavor is None:
        return config.model
    found = FLAVORS.get((name or "", flavor or ""))
    if found is None:
        pairs = ", ".join(f"{known} {size}" for known, size in FLAVORS)
        raise ValueError(f"--model-name={name} --model-flavor={flavor}, want one of {pairs}; or --model with a preset")
    if config.model not in (None, found):
        raise ValueError(f"--model={config.model}, but --model-name={name} --model-flavor={flavor} is {found}; give one of them")
    return found

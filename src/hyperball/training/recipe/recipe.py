"""A recipe: everything a training run is determined by, as one frozen value that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hyperball import files
from hyperball.training.recipe.fields import RecipeError, Section, differences, plain, read_section
from hyperball.training.recipe.sections import (
    AdversarialConfig,
    DataConfig,
    EngineConfig,
    HomotopyConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ProjectionConfig,
    RegularizerConfig,
    ScheduleConfig,
    StartConfig,
)

DEFAULT_EPOCHS = 10


@dataclass(frozen=True)
class Recipe(Section):
    """A training run as a value; a variant is `recipe.override({"model.magnitude": "log", "seed": 1})`.

    Give `epochs` or `steps`; without either it is 10 epochs. The batch size is that of all devices together.

    >>> recipe = Recipe(epochs=2).override({"model.magnitude": "tanh"})
    >>> Recipe.from_dict(recipe.to_dict()) == recipe
    True
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    regularizers: RegularizerConfig = field(default_factory=RegularizerConfig)
    projection: ProjectionConfig = field(default_factory=ProjectionConfig)
    adversarial: AdversarialConfig = field(default_factory=AdversarialConfig)
    homotopy: HomotopyConfig = field(default_factory=HomotopyConfig)
    start: StartConfig = field(default_factory=StartConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    seed: int = 0

    def check(self) -> None:
        self.require(self.epochs is None or self.epochs >= 1, "epochs", ">= 1 or null")
        self.require(self.steps is None or self.steps >= 1, "steps", ">= 1 or null")
        self.require(self.batch_size >= 1, "batch_size", ">= 1")
        self.require(0 <= self.seed < 2**63, "seed", "in 0..2**63 - 1")
        if self.epochs is not None and self.steps is not None:
            raise RecipeError(
                f"`epochs` and `steps` exclude each other, got {self.epochs} and {self.steps}; set one to null"
            )
        self._check_decoupled()

    def _check_decoupled(self) -> None:
        """What acts on decoupled layers needs some, and what changes the length of filters needs it to be free."""
        wanted = {
            "projection.every": self.projection.every is not None,
            "regularizers.orthogonality": self.regularizers.orthogonality > 0,
            "regularizers.weighted_gradients": self.regularizers.weighted_gradients != "none",
            "homotopy.steps": self.homotopy.steps > 0,
        }
        for name, asked in wanted.items():
            if asked and self.model.magnitude is None:
                raise RecipeError(f"`{name}` acts on decoupled layers and needs a `model.magnitude`, got null")
        for name in ("projection.every", "regularizers.weighted_gradients"):
            if wanted[name] and self.model.weighting != "none":
                raise RecipeError(f'`{name}` needs `model.weighting` "none", got {self.model.weighting!r}')

    def total_steps(self, steps_per_epoch: int) -> int:
        """The steps of the whole run."""
        return self.steps if self.steps is not None else (self.epochs or DEFAULT_EPOCHS) * steps_per_epoch

    def differences(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """The dotted fields in which two recipes differ, with both values."""
        return differences(self, other)

    def to_dict(self) -> dict[str, Any]:
        """Mappings, lists, texts, numbers and None alone."""
        return plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of a plain mapping; what is absent has its default."""
        return read_section(cls, values)

    def to_file(self, path: str | Path) -> None:
        """Write .json, .yaml or .yml, whole or not at all."""
        files.write_tree(Path(path), self.to_dict())

    @classmethod
    def from_file(cls, path: str | Path) -> Recipe:
        """Read .json, .yaml or .yml."""
        try:
            return cls.from_dict(files.read_tree(Path(path)))
        except (RecipeError, files.FileError) as error:
            raise RecipeError(f"{path}: {error}") from None

"""What a trained network is attacked with: plain data that a table's entry and a cell's file hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hyperball.training.recipe import Recipe

SOURCE_SEEDS = 1000  # the source of seed s is trained with seed s + 1000
SOURCE = "source"


@dataclass(frozen=True)
class Part:
    """Attacks on the same images, in one file RUN/attacks/NAME.json.

    Args:
        attacks: texts of `hyperball.attacks.parse` by the names that tables print.
        epsilons: one budget, or several: a sweep, a curve for every attack.
        images: test images, evenly over the classes; None is all of them.
        checks: on how many images the masking checks run; 0 leaves them out.
    """

    name: str
    attacks: Mapping[str, str]
    epsilons: tuple[str, ...] = ("8/255",)
    images: int | None = None
    checks: int = 0

    @property
    def is_sweep(self) -> bool:
        return len(self.epsilons) > 1

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Part:
        return cls(**{**tree, "epsilons": tuple(tree["epsilons"])})

    def words(self) -> str:
        """Which attacks, at which budgets, on how many images."""
        budget = f"{len(self.epsilons)} budgets" if self.is_sweep else self.epsilons[0]
        images = "all images" if self.images is None else f"{self.images:,} images"
        checks = f", masking checks on {self.checks}" if self.checks else ""
        return f"{', '.join(self.attacks)} at {budget} on {images}{checks}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"epsilons": list(self.epsilons), "attacks": dict(self.attacks)}


@dataclass(frozen=True)
class Attacks:
    """What the finished networks of an entry are attacked with.

    Args:
        parts: for every seed.
        last: for the first seed alone, when all else is done: what takes longest.
        source: the network on which the images of transfer attacks are made, trained once a seed.
        published: the paper's numbers by the names of the attacks; "none" is the natural accuracy.
        shown: the attacks that the table prints, in its order.
        quick: what `--scale quick` puts in place of `parts`.
        rank: entries of a higher rank are begun when all seeds of a lower one are.
    """

    parts: tuple[Part, ...]
    source: Recipe
    last: tuple[Part, ...] = ()
    published: Mapping[str, float] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    quick: tuple[Part, ...] = ()
    rank: int = 0

    def trained(self, source: Recipe) -> Attacks:
        """The same with the source of this recipe."""
        return replace(self, source=source)

    def reduced(self) -> Attacks:
        """Those of `--scale quick`."""
        return replace(self, parts=self.quick, last=())

    def words(self) -> str:
        """All attacks, and those on the first seed's network alone."""
        last = (f"for the first seed {part.words()}" for part in self.last)
        return f"attacks: {'; '.join((*(part.words() for part in self.parts), *last))}"

    def parts_of(self, seed_is_first: bool) -> tuple[Part, ...]:
        """All that a network of the first seed, or of another, is attacked with."""
        return (*self.parts, *(self.last if seed_is_first else ()))

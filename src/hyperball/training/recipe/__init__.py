"""The recipe: everything a training run is determined by, its sections, and the fields they are made of."""

from hyperball.training.recipe.recipe import Recipe

__all__ = ["Recipe"]

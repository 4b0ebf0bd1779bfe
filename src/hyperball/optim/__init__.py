"""Optimization of decoupled layers: weight projection, weighted gradients, orthogonality, parameter groups."""

from hyperball.optim.gradients import WeightedGradients
from hyperball.optim.parameters import parameter_groups
from hyperball.optim.projection import WeightProjection
from hyperball.optim.regularizers import orthogonality

__all__ = [
    "WeightProjection",
    "WeightedGradients",
    "orthogonality",
    "parameter_groups",
]

"""Hyperball: neural layers with a radius."""

from hyperball import angular, functional, implicit, nn, optim, radial
from hyperball.diagnose import diagnose
from hyperball.freeze import freeze

__version__ = "0.1.0"

__all__ = [
    "angular",
    "diagnose",
    "freeze",
    "functional",
    "implicit",
    "nn",
    "optim",
    "radial",
]

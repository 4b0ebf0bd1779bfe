"""Hyperball: neural layers with a radius."""

from hyperball import angular, functional, implicit, nn, optim, radial
from hyperball.diagnose import diagnose
from hyperball.explain import explain
from hyperball.freeze import freeze

__version__ = "0.1.0"

__all__ = [
    "angular",
    "diagnose",
    "explain",
    "freeze",
    "functional",
    "implicit",
    "nn",
    "optim",
    "radial",
]

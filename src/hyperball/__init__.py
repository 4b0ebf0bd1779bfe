"""Hyperball: neural layers with a radius."""

from hyperball import angular, convert, functional, implicit, models, nn, optim, radial
from hyperball.bounds import bounds
from hyperball.convert import convert_model
from hyperball.diagnose import diagnose
from hyperball.explain import explain
from hyperball.freeze import freeze

__version__ = "0.1.0"

__all__ = [
    "angular",
    "bounds",
    "convert",
    "convert_model",
    "diagnose",
    "explain",
    "freeze",
    "functional",
    "implicit",
    "models",
    "nn",
    "optim",
    "radial",
]

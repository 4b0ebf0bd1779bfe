"""Hyperball: neural layers with a radius."""

from hyperball import angular, convert, functional, implicit, models, nn, optim, radial
from hyperball._version import __version__ as __version__
from hyperball.bounds import bounds
from hyperball.convert import convert_model
from hyperball.diagnose import diagnose
from hyperball.explain import explain
from hyperball.freeze import freeze

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

"""Hyperball: neural layers with a radius."""

from hyperball import angular, functional, implicit, nn, optim, radial

__version__ = "0.1.0"

__all__ = [
    "angular",
    "functional",
    "implicit",
    "nn",
    "optim",
    "radial",
]

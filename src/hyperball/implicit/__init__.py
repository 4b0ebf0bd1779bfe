"""Layers defined as the answer to an optimization problem."""

from .adjoint import Implicit, Unrolled
from .argmin import argmin
from .bracketed import BracketedScalar
from .constrained import AugmentedLagrangian
from .linear import ConjugateGradient, Dense
from .solution import ConvergenceError, ConvergenceWarning, Solution
from .solvers import LBFGS, GradientDescent, Newton

__all__ = [
    "LBFGS",
    "AugmentedLagrangian",
    "BracketedScalar",
    "ConjugateGradient",
    "ConvergenceError",
    "ConvergenceWarning",
    "Dense",
    "GradientDescent",
    "Implicit",
    "Newton",
    "Solution",
    "Unrolled",
    "argmin",
]

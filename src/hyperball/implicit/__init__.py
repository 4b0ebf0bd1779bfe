"""Layers defined as the answer to an optimization problem."""

from hyperball.implicit.adjoint import Implicit, Unrolled
from hyperball.implicit.argmin import argmin
from hyperball.implicit.bracketed import BracketedScalar
from hyperball.implicit.constrained import AugmentedLagrangian
from hyperball.implicit.linear import ConjugateGradient, Dense
from hyperball.implicit.solution import ConvergenceError, ConvergenceWarning, Solution
from hyperball.implicit.solvers import LBFGS, GradientDescent, Newton

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

"""Attacks on classifiers of images, what their numbers are worth, and adversarial training."""

from hyperball.attacks.arguments import parse_epsilon
from hyperball.attacks.bench import perturb
from hyperball.attacks.curves import Curve, robustness_curve
from hyperball.attacks.evaluation import Robustness, evaluate_robustness
from hyperball.attacks.gradient import NoGradient, fast_fgsm, fgsm, pgd, trades_loss
from hyperball.attacks.journal import RecordError
from hyperball.attacks.methods.auto import APGD, AutoAttack, MissingExtra
from hyperball.attacks.methods.black_box import Noise, Square, Transfer
from hyperball.attacks.methods.table import names, parse
from hyperball.attacks.methods.task import Attack
from hyperball.attacks.methods.white_box import BIM, FGSM, PGD, Surrogate
from hyperball.attacks.surrogate import declarative_layers, surrogate

__all__ = [
    "APGD",
    "BIM",
    "FGSM",
    "PGD",
    "Attack",
    "AutoAttack",
    "Curve",
    "MissingExtra",
    "NoGradient",
    "Noise",
    "RecordError",
    "Robustness",
    "Square",
    "Surrogate",
    "Transfer",
    "declarative_layers",
    "evaluate_robustness",
    "fast_fgsm",
    "fgsm",
    "names",
    "parse",
    "parse_epsilon",
    "perturb",
    "pgd",
    "robustness_curve",
    "surrogate",
    "trades_loss",
]

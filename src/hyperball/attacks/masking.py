"""Signs of masked gradients (Athalye et al. 2018, Carlini et al. 2019): every check that fails gives a doubt, in words.

Checks run on a sample of the images that are classified rightly. One attack counts as stronger than another where it
breaks more images than the other by 1 % of the sample and by two standard deviations of that difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hyperball.attacks.battery import TOLERANCE, Battery, Check, percent, sampled, stronger
from hyperball.attacks.bench import Bench
from hyperball.attacks.gradient import PIXELS, NoGradient, gradient
from hyperball.attacks.methods.auto import APGD, DLR_CLASSES, MissingExtra, pyautoattack
from hyperball.attacks.methods.black_box import Noise, Square, Transfer
from hyperball.attacks.methods.table import parse
from hyperball.attacks.methods.task import Attack, Verdict, cross_entropy, margin
from hyperball.attacks.methods.white_box import BIM, FGSM, PGD, Surrogate
from hyperball.attacks.surrogate import KINDS, declarative_layers

STEPS = 20
RESTARTS = 5
QUERIES = 500
DRAWS = 10
RESTART_GAIN = 0.1
SQUARE_SHARE = 0.02
ZERO_SHARE = 0.01
RANDOM_SHARE = 0.1
RUNGS = 8
FEW = 30  # images: fewer would show none but gross masking
SAME = 1e-4  # of the largest logit: what rounding may change between two calls
JOINT = 1e-2  # and what another batch size may, by TF32
SURFACE = (1 / 8, 1 / 4, 1 / 2, 1.0)
SURFACE_WORDS = 1 << 22


def ladder(bench: Bench) -> list[float]:
    """epsilon, 4 epsilon, 16 epsilon, …, and the distance at which every image is within reach; few in any case."""
    reach, epsilon = bench.norm.reach(bench.inputs.shape[1:]), bench.epsilon
    steps: list[float] = []
    factor = max(4.0, (reach / epsilon) ** (1 / RUNGS)) if epsilon > 0 else 4.0
    while 0 < epsilon < reach and len(steps) < RUNGS:
        steps.append(epsilon)
        epsilon *= factor
    return [*steps, reach]


def growth(battery: Battery) -> Check:
    """Accuracy falls to chance or below as epsilon grows, from the image itself: a random start would do that alone."""
    budgets = ladder(battery.bench)
    shares = [battery.run(BIM(steps=STEPS), epsilon).accuracy for epsilon in budgets]
    chance = 1 / battery.bench.classes
    allowed = chance + max(TOLERANCE, 2 * math.sqrt(chance * (1 - chance) / len(battery)))
    numbers = {"epsilon": budgets, "accuracy": shares, "chance": chance}
    doubt = None
    if shares[-1] > allowed:
        doubt = (
            f"BIM-{STEPS} leaves {percent(shares[-1])} of {len(battery)} images right at epsilon {budgets[-1]:.3g}, "
            f"where any image may become any other; it should be at most chance, {percent(chance)}"
        )
    return Check("accuracy falls to chance as epsilon grows", numbers, doubt)


def iterative(battery: Battery) -> Check:
    """Many steps are at least as strong as one."""
    one, many = battery.run(FGSM()), battery.run(PGD(steps=STEPS))
    numbers = {"fgsm": one.accuracy, "pgd": many.accuracy}
    doubt = None
    if stronger(one.verdict, many.verdict):
        doubt = (
            f"FGSM leaves {percent(one.accuracy)} of {len(battery)} images right and PGD-{STEPS} "
            f"{percent(many.accuracy)}: many steps should be at least as strong as one"
        )
    return Check("iterative attacks are at least as strong as a single step", numbers, doubt)


def black_box(battery: Battery) -> Check:
    """Gradients are at least as strong as chance and queries."""
    white = battery.run(PGD(steps=STEPS, restarts=RESTARTS))
    others: list[Attack] = [Noise(k=DRAWS), *([Square(queries=QUERIES)] if has_square(battery) else [])]
    found = {str(attack): battery.run(attack) for attack in others}
    numbers = {"pgd": white.accuracy} | {name: outcome.accuracy for name, outcome in found.items()}
    worst = min(found, key=lambda name: found[name].accuracy)
    doubt = None
    if stronger(found[worst].verdict, white.verdict):
        doubt = (
            f"{worst}, which sees no gradient, leaves {percent(found[worst].accuracy)} of {len(battery)} images right "
            f"and PGD-{STEPS} with {RESTARTS} restarts {percent(white.accuracy)}: white box should not be weaker"
        )
    return Check("white box is at least as strong as black box", numbers, doubt)


def restarts(battery: Battery) -> Check:
    """Further random starts gain little."""
    outcome = battery.run(PGD(steps=STEPS, restarts=RESTARTS))
    shares = [stage["accuracy"] for stage in outcome.stages]
    gain = shares[0] - shares[-1]
    error = math.sqrt(max(gain * (1 - gain), 0) / len(battery))
    doubt = None
    if gain > RESTART_GAIN + 2 * error:
        doubt = (
            f"{RESTARTS} random starts of PGD-{STEPS} leave {percent(shares[-1])} of {len(battery)} images right where "
            f"one leaves {percent(shares[0])}: a loss on which the start matters so much hides its maxima"
        )
    return Check("restarts gain little", {"accuracy": shares, "gain": gain}, doubt)


def has_square(battery: Battery) -> bool:
    """Whether Square can run: in L2 it is pyautoattack's."""
    try:
        return bool(Square().stages(battery.bench.task(battery.index[:1])))
    except MissingExtra:
        return False


def square_against_apgd(battery: Battery) -> Check:
    """Square breaks hardly any image that APGD, on either of its losses, does not."""
    title = "Square breaks nothing that APGD does not"
    if not has_square(battery):
        text = "this check was left out: Square in L2 needs pyautoattack; pip install 'hyperball[attack]'"
        return Check(title, {}, f"{title}: {text}")
    try:
        pyautoattack()
        rivals: list[Attack] = [APGD(), *([APGD(loss="dlr")] if battery.bench.classes >= DLR_CLASSES else [])]
    except MissingExtra:
        rivals = [PGD(steps=STEPS, restarts=RESTARTS), PGD(steps=STEPS, loss="margin")]
    square = battery.run(Square(queries=QUERIES))
    standing = torch.stack([battery.run(rival).verdict.correct for rival in rivals]).all(0)
    alone = int((~square.verdict.correct & standing).sum())
    name = rivals[0].name
    numbers = {name: float(standing.double().mean()), "square": square.accuracy, "broken_by_square_alone": alone}
    doubt = None
    if alone > max(1, SQUARE_SHARE * len(battery)):
        doubt = (
            f"Square with {QUERIES} queries breaks {alone} of {len(battery)} images that {name.upper()} does not: "
            "gradients miss what random search finds"
        )
    return Check(title, numbers, doubt)


def slopes(battery: Battery) -> Iterator[tuple[Tensor, Any]]:
    """(gradient, task) of every batch of the sample."""
    for part in battery.index.split(battery.bench.batch_size):
        task = battery.bench.task(part)
        yield gradient(task.model, task.x, lambda logits, y=task.y: cross_entropy(logits, y).sum()), task  # type: ignore[misc]


def gradients(battery: Battery) -> Check:
    """Gradients are there and finite."""
    zero = broken = 0
    for slope, _ in slopes(battery):
        flat = slope.flatten(1)
        sound = flat.isfinite().all(1)
        broken += int((~sound).sum())
        zero += int((sound & (flat == 0).all(1)).sum())
    count = len(battery)
    numbers = {"zero": zero / count, "non_finite": broken / count}
    parts = []
    if zero / count > ZERO_SHARE:
        parts.append(f"{percent(zero / count)} have a gradient of exactly zero")
    if broken:
        parts.append(f"{percent(broken / count)} have a gradient that is not finite")
    doubt = (
        f"of {count} images {' and '.join(parts)}: gradient attacks cannot move them as they should" if parts else None
    )
    return Check("gradients are finite and not zero", numbers, doubt)


@torch.no_grad()
def surface(battery: Battery) -> Check:
    """The margin grows faster along the gradient than along random directions."""
    along, aside, beaten = torch.zeros(len(SURFACE)), torch.zeros(len(SURFACE)), 0
    for slope, task in slopes(battery):
        directions = task.norm.direction(slope), task.norm.corner(task.draw(SURFACE_WORDS), task.x)
        rise = [[_rise(task, share, direction) for share in SURFACE] for direction in directions]
        along += torch.stack([gain.sum().cpu() for gain in rise[0]])
        aside += torch.stack([gain.sum().cpu() for gain in rise[1]])
        beaten += int((rise[1][2] > rise[0][2] + 1e-6).sum())
    count = len(battery)
    numbers = {
        "share_of_epsilon": list(SURFACE), "margin_along_gradient": (along / count).tolist(),
        "margin_along_random": (aside / count).tolist(), "random_beats_gradient": beaten / count,
    }  # fmt: skip
    doubt = None
    if beaten / count > RANDOM_SHARE:
        doubt = (
            f"for {percent(beaten / count)} of {count} images half the budget in a random direction harms more than "
            f"along the gradient (mean margins {aside[2] / count:+.3g} and {along[2] / count:+.3g}): for those the "
            "gradient is no guide"
        )
    return Check("the gradient points uphill", numbers, doubt)


def _rise(task: Any, share: float, direction: Tensor) -> Tensor:
    point = torch.clamp(task.x + share * task.epsilon * direction, *PIXELS)
    return (margin(task.model(point), task.y) - margin(task.model(task.x), task.y)).float()


def transfer(battery: Battery) -> Check | None:
    """Images made on an undefended copy harm no more than those made on the model."""
    if battery.bench.source is None:
        return None
    own, title = battery.run(PGD(steps=STEPS)), "white box is at least as strong as transfer"
    try:
        foreign = battery.run(Transfer())
    except NoGradient:
        return Check(title, {}, f"{title}: this check was left out, for the source gives no gradient")
    doubt = None
    if stronger(foreign.verdict, own.verdict):
        doubt = (
            f"images made on the source model leave {percent(foreign.accuracy)} of {len(battery)} right and those made "
            f"on the model itself {percent(own.accuracy)}: transfer should not be stronger than white box"
        )
    return Check(title, {"pgd": own.accuracy, "transfer": foreign.accuracy}, doubt)


def declarative(battery: Battery) -> Check | None:
    """Surrogate gradients of declarative layers find no more than their own."""
    layers = declarative_layers(battery.bench.model)
    if not layers:
        return None
    own = battery.run(PGD(steps=STEPS))
    found = {kind: battery.run(Surrogate(kind=kind, steps=STEPS)) for kind in KINDS}
    kind = min(found, key=lambda name: found[name].accuracy)
    numbers = {"layers": len(layers), "pgd": own.accuracy} | {name: item.accuracy for name, item in found.items()}
    doubt = None
    if stronger(found[kind].verdict, own.verdict):
        doubt = (
            f"PGD-{STEPS} through {kind} surrogates of {len(layers)} declarative layers leaves "
            f"{percent(found[kind].accuracy)} of {len(battery)} images right and through their own gradients "
            f"{percent(own.accuracy)}: the inner problem hides gradients"
        )
    return Check("surrogates of declarative layers find no more", numbers, doubt)


@torch.no_grad()
def function(battery: Battery) -> Check:
    """The model is a function of one image, and gives logits."""
    task = battery.bench.task(battery.index[: battery.bench.batch_size])
    first, second = task.model(task.x).float(), task.model(task.x).float()
    alone = torch.cat([task.model(task.x[:1]), task.model(task.x[-1:])]).float()
    scale = float(first.abs().amax().clamp(min=1e-12))
    random = float((first - second).abs().amax()) / scale
    joint = float((alone - first[[0, -1]]).abs().amax()) / scale
    chances = bool(((first >= 0).all() & ((first.sum(1) - 1).abs() < SAME).all()).item())
    parts = []
    if not random <= SAME:
        parts.append(f"two calls differ by {percent(random)} of the largest logit, so attacks need eot > 1")
    elif not joint <= JOINT:
        change = f"change by {percent(joint)}" if math.isfinite(joint) else "become something that is not finite"
        parts.append(f"logits of an image {change} with the rest of its batch")
    if chances:
        parts.append("outputs are probabilities, whose logarithm the loss takes once more")
    numbers = {"random": random, "batch": joint, "probabilities": chances}
    return Check("the model is a fixed function to logits", numbers, "; ".join(parts) or None)


def requested(battery: Battery, asked: Mapping[str, Verdict]) -> Check | None:
    """Of the sample, no attack asked for without gradients breaks more than all with them, the checks' own included.

    One step alone may well be weaker than a search, so that one of many steps must have been asked for.
    """
    attacks = [parse(text) for text in asked]
    black = {str(attack): asked[str(attack)] for attack in attacks if not attack.white_box}
    if not black or not any(attack.white_box and not isinstance(attack, FGSM) for attack in attacks):
        return None
    own: list[Attack] = [PGD(steps=STEPS, restarts=RESTARTS), PGD(steps=STEPS, loss="margin")]
    masks = [asked[str(attack)].correct[battery.index] for attack in attacks if attack.white_box]
    masks += [battery.run(attack).verdict.correct for attack in own]
    masks += [
        held.verdict.correct
        for (text, budget), held in battery.held.items()
        if budget == battery.bench.epsilon and parse(text).white_box
    ]
    white = sampled(torch.stack(masks).all(0))
    rivals = {name: sampled(verdict.correct[battery.index]) for name, verdict in black.items()}
    worst = min(rivals, key=lambda name: float(rivals[name].correct.double().mean()))
    shares = [float(verdict.correct.double().mean()) for verdict in (white, rivals[worst])]
    doubt = None
    if stronger(rivals[worst], white):
        doubt = (
            f"{worst} leaves {percent(shares[1])} of {len(battery)} images right and all attacks by gradients together "
            f"{percent(shares[0])}: black box should not be stronger"
        )
    numbers = {"white box": shares[0], worst: shares[1]}
    return Check("no black box attack asked for is the strongest", numbers, doubt)


def size(battery: Battery) -> Check | None:
    """The sample is large enough to show anything."""
    count = len(battery)
    if count >= FEW:
        return None
    text = f"the checks saw {count} image{'' if count == 1 else 's'} that the model has right: too few to show masking"
    return Check("the sample is large enough", {"images": count}, text)


def finite(verdicts: Mapping[str, Verdict]) -> Check:
    """Logits are finite on the images themselves and on attacked ones; others count as wrong."""
    shares = {name: float(verdict.loss.isinf().double().mean()) for name, verdict in verdicts.items()}
    parts = [f"{percent(share)} of the images under {name}" for name, share in shares.items() if share]
    doubt = f"logits are not finite, which counts as wrong, for {' and '.join(parts)}" if parts else None
    return Check("logits are finite", shares, doubt)


GRADIENT_CHECKS: tuple[Callable[[Battery], Check | None], ...] = (
    gradients, surface, growth, iterative, restarts, black_box, square_against_apgd, transfer, declarative,
)  # fmt: skip


def masking_checks(
    bench: Bench, clean: Verdict, images: int = 256, asked: Mapping[str, Verdict] | None = None
) -> list[Check]:
    """Every check on a sample of so many images, with what the attacks asked for found on all of them.

    A model without gradients gets a doubt instead.
    """
    battery = Battery(bench, clean, images)
    share, chance = float(clean.correct.double().mean()), 1 / bench.classes
    start = Check("clean accuracy is above chance", {"clean": share, "chance": chance})
    if share <= chance + TOLERANCE:
        text = f"clean accuracy is {percent(share)}, no better than chance ({percent(chance)}): attacks show nothing"
        start = Check(start.name, start.numbers, text)
    if not len(battery):
        return [start, Check("the sample is large enough", {"images": 0}, "no image is right, so no check could run")]
    if bench.epsilon == 0:
        return [start, Check("the budget is above zero", {"epsilon": 0.0}, "epsilon is 0: nothing was attacked")]
    try:
        found = [*(check(battery) for check in GRADIENT_CHECKS), requested(battery, asked or {})]
    except NoGradient:
        text = "the model has no gradient with respect to its input: no white-box attack or check could run"
        found = [Check("gradients are finite and not zero", {}, text)]
    found = [size(battery), *found]
    return [start, function(battery), *(check for check in found if check is not None)]

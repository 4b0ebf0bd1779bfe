"""Robustness of a model: attacks on a set of images, masking checks, and one JSON record with conditions and doubts.

A record is one JSON object (format 1):

* `conditions`: epsilon (and its text), norm, images, classes, batch_size, seed, check_images, device, tf32, versions,
  SHA-256 of model, source, inputs and labels, `answers` (logits of a few images), and what the caller adds as `about`;
* `clean`: accuracy, and of every image `correct` (a text of 0 and 1), `loss` and `distance`;
* `attacks`: in the order asked for: `attack` (its text), `conditions`, `accuracy`, `stages` (accuracy after each),
  `seconds`, `mean_distance` (of images that it broke), `versions`, `checked` (whether the masking checks have seen it),
  and of every image `correct`, `loss`, `distance`;
* `worst_case`: the share of images that withstand all of the attacks;
* `checks`: name, passed, numbers, doubt; `doubts`: the sentences of those that failed.

Losses are cross entropies; null stands for a number that is not finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperball._version import versions
from hyperball.attacks import captured
from hyperball.attacks.arguments import budget_text, check_count, check_path, device_of
from hyperball.attacks.battery import percent
from hyperball.attacks.bench import Bench, Outcome, Progress, check_attack, make_bench
from hyperball.attacks.conditions import FORMAT, PACKAGES, identify
from hyperball.attacks.journal import (
    Journal,
    RecordError,
    are_numbers,
    check_identity,
    from_tree,
    journal_path,
    read_json,
    to_tree,
)
from hyperball.attacks.lock import alone
from hyperball.attacks.masking import finite, masking_checks
from hyperball.attacks.methods.auto import seeded
from hyperball.attacks.methods.table import parse, parse_all
from hyperball.attacks.methods.task import Attack, Verdict
from hyperball.files import write_json

SWITCHED_OFF = "masking checks were switched off, so nothing says whether gradients are masked"
SHOWN = {"norm": str, "epsilon_text": str, "images": int, "seed": int}  # conditions that a table prints
KINDS: dict[str, Any] = {
    "conditions": dict, "clean": dict, "attacks": list, "worst_case": int | float, "checks": list, "doubts": list,
}  # fmt: skip
DEFAULT_ATTACKS = ("fgsm", "bim", "pgd")


@dataclass(frozen=True)
class Robustness:
    """A record, and questions to it."""

    record: dict[str, Any]

    @property
    def doubts(self) -> list[str]:
        return list(self.record["doubts"])

    @property
    def clean_accuracy(self) -> float:
        return float(self.record["clean"]["accuracy"])

    @property
    def worst_case(self) -> float:
        return float(self.record["worst_case"])

    def accuracy(self, attack: str | Attack) -> float:
        """The accuracy under an attack, by its text or value."""
        return float(self._entry(attack)["accuracy"])

    def verdict(self, attack: str | Attack) -> Verdict:
        """Whether each image withstood an attack, its loss and its distance; a slim record has NaN for those two."""
        return from_tree(self._entry(attack))

    def _entry(self, attack: str | Attack) -> dict[str, Any]:
        text = str(parse(attack))
        for entry in self.record["attacks"]:
            if entry["attack"] in (attack, text):
                return dict(entry)
        known = ", ".join(entry["attack"] for entry in self.record["attacks"])
        raise KeyError(f"the record has no attack {attack!r}; it has {known}")

    def table(self) -> str:
        """Accuracies with their conditions, and every doubt below."""
        held = self.record["conditions"]
        budget = f"{held['norm']} {held['epsilon_text']}, n={held['images']}, seed {held['seed']}"
        rows = [("clean", self.clean_accuracy), *((e["attack"], e["accuracy"]) for e in self.record["attacks"])]
        rows.append(("all of them", self.worst_case))
        width = max(len(name) for name, _ in rows)
        lines = [f"accuracy ({budget})", *(f"  {name:<{width}}  {percent(share):>7}" for name, share in rows)]
        lines += ["doubts: none" if not self.doubts else "doubts:", *(f"  - {doubt}" for doubt in self.doubts)]
        return "\n".join(lines)

    def slim(self) -> Robustness:
        """The record without the losses and distances of single images, which are nine tenths of it; masks remain."""
        heavy = ("loss", "distance")
        clean = {key: held for key, held in self.record["clean"].items() if key not in heavy}
        entries = [{key: held for key, held in entry.items() if key not in heavy} for entry in self.record["attacks"]]
        return Robustness(self.record | {"clean": clean, "attacks": entries})

    def write(self, path: str | Path) -> None:
        """Write the record, whole or not at all."""
        write_json(Path(path), self.record)

    @classmethod
    def read(cls, path: str | Path) -> Robustness:
        """The record of a file, which must be one."""
        record = read_json(Path(path))
        if not _has(record, KINDS) or not _has(record["conditions"], SHOWN):
            raise RecordError(f"{path} is no record of robustness; move it away, or write elsewhere")
        damage = _damage(record)
        if damage:
            raise RecordError(f"{path} is no record of robustness, or a damaged one: {damage}; move it away")
        return cls(record)


def _has(tree: Any, kinds: Mapping[str, Any]) -> bool:
    return isinstance(tree, dict) and all(isinstance(tree.get(key), kind) for key, kind in kinds.items())


def _damage(record: dict[str, Any]) -> str:
    """What is wrong in the parts of a record, or nothing."""
    if not all(_has(check, {"name": str, "doubt": str | None}) and "doubt" in check for check in record["checks"]):
        return "a check says nothing of its doubt"
    count = record["conditions"]["images"]
    for entry in ({"attack": "clean", "stages": [], **record["clean"]}, *record["attacks"]):
        if not _has(entry, {"attack": str, "accuracy": int | float, "stages": list, "correct": str}):
            return "an attack lacks its text, accuracy, stages or images"
        for key in ("correct", "loss", "distance"):
            held = entry.get(key, entry["correct"])  # a slim record has neither losses nor distances
            if not isinstance(held, str | list) or len(held) != count:
                return f"`{key}` of {entry['attack']} is not of {count} images"
            if isinstance(held, list) and not are_numbers(held):
                return f"`{key}` of {entry['attack']} holds something else than numbers"
    try:
        parse_all([entry["attack"] for entry in record["attacks"]])
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def evaluate_robustness(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    *,
    epsilon: float | str = "8/255",
    attacks: str | Attack | Iterable[str | Attack] = DEFAULT_ATTACKS,
    norm: str = "linf",
    batch_size: int | None = None,
    seed: int = 0,
    source: Any = None,
    checks: bool = True,
    check_images: int = 256,
    path: str | Path | None = None,
    resume: bool = True,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Robustness:
    """Attack a model on images in [0, 1] (or bytes) and say what the numbers are worth.

    Args:
        model: From images to logits, in evaluation mode, with its normalization inside; it stays on its device.
        attacks: Texts such as "pgd(steps=50, restarts=5)", values, or one text with commas.
        batch_size: None is 256, or on a GPU as many images as have the pixels of 2,000 of CIFAR.
        source: An undefended model for the attack "transfer" and the check of that name.
        checks: Whether the masking checks run, on `check_images` images that are classified rightly.
        path: Where the record goes. What is done goes to a journal beside it; the same call goes on from there, and
            attacks of a record that is there already are kept and not run again.
        about: Names and numbers to keep among the conditions.
        progress: Called with what is done, the batches done and the batches in all.
    """
    chosen = parse_all(attacks)
    check_count("check_images", check_images)
    check_count("seed", seed, least=0)
    _check_about(about)
    target = check_path(path)
    with seeded(seed, device_of(model, torch.device("cpu"))):  # where a model draws, the caller's generators stay
        bench = make_bench(
            model, inputs, labels,
            epsilon=epsilon, norm=norm, batch_size=batch_size, seed=seed, source=source, progress=progress,
        )  # fmt: skip
        for attack in chosen:
            check_attack(bench, attack)
        identity = identify(bench, model, source) | {"check_images": check_images}
        conditions = identity | {
            "epsilon_text": budget_text(bench.epsilon),
            "versions": versions(PACKAGES),
            "about": dict(about or {}),
        }
        try:
            with alone(target):
                return _evaluate(bench, chosen, identity, conditions, checks, target, resume)
        finally:
            captured.release()


def _evaluate(
    bench: Bench,
    chosen: list[Attack],
    identity: dict[str, Any],
    conditions: dict[str, Any],
    checks: bool,
    target: Path | None,
    resume: bool,
) -> Robustness:
    previous = _previous(target, identity) if target is not None and resume else None
    done = {} if previous is None else {entry["attack"]: entry for entry in previous["attacks"]}
    held = [] if previous is None else previous["checks"]
    lacking = checks and (not held or bool(_unchecked(done.values())))
    if previous is not None and not lacking and all(str(attack) in done for attack in chosen):
        return Robustness(previous)
    chosen = [*map(parse, done), *(attack for attack in chosen if str(attack) not in done)]
    journal = Journal(None if target is None else journal_path(target), identity, resume)
    bench = replace(bench, journal=journal)
    clean = bench.clean()
    entries = [done.get(str(attack)) or _entry(attack, bench.run(attack, clean), bench.epsilon) for attack in chosen]
    verdicts = {entry["attack"]: from_tree(entry) for entry in entries}
    sound = finite({"clean": clean, **verdicts})
    if checks:
        found = masking_checks(bench, clean, identity["check_images"], verdicts)
        held = [check.to_dict() for check in (*found, sound)]
        entries = [entry | {"checked": True} for entry in entries]
    doubts = _doubts(held, sound.doubt, _unchecked(entries))
    result = Robustness(_record(conditions, clean, entries, held, doubts))
    if target is not None:
        result.write(target)
    journal.close()
    return result


def _unchecked(entries: Iterable[dict[str, Any]]) -> list[str]:
    """The attacks that the masking checks have not seen."""
    return [entry["attack"] for entry in entries if not entry["checked"]]


def _doubts(held: list[dict[str, Any]], sound: str | None, unchecked: list[str]) -> list[str]:
    """The doubts of checks, or that there were none, and what came after them."""
    if not held:
        doubts = [SWITCHED_OFF]
    else:
        doubts = [check["doubt"] for check in held if check["doubt"]]
        if unchecked:
            doubts.append(f"{', '.join(unchecked)} came without masking checks, and no check compared it with others")
    return doubts if sound is None or sound in doubts else [*doubts, sound]


def _previous(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """A record that is there already, if it is of this evaluation."""
    if not path.exists():
        return None
    record = Robustness.read(path).record
    check_identity(path, record["conditions"], identity)
    defaults = {"versions": record["conditions"].get("versions", {}), "checked": bool(record["checks"])}
    return record | {"attacks": [defaults | entry for entry in record["attacks"]]}


def _check_about(about: Mapping[str, Any] | None) -> None:
    """Refuse what JSON cannot hold before anything has run."""
    try:
        json.dumps(dict(about or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`about` must be names and numbers that JSON can hold ({error})") from None


def _entry(attack: Attack, outcome: Outcome, epsilon: float) -> dict[str, Any]:
    verdict = outcome.verdict
    moved = verdict.distance[~verdict.correct & (verdict.distance > 0) & (verdict.distance < math.inf)]
    return {
        "attack": str(attack),
        "conditions": attack.conditions(epsilon),
        "white_box": attack.white_box,
        "accuracy": outcome.accuracy,
        "stages": outcome.stages,
        "seconds": round(outcome.seconds, 3),
        "mean_distance": float(moved.mean()) if len(moved) else None,
        "versions": versions(PACKAGES),
        "checked": False,
        **to_tree(verdict),
    }


def _record(
    conditions: dict[str, Any],
    clean: Verdict,
    entries: list[dict[str, Any]],
    checks: list[dict[str, Any]],
    doubts: list[str],
) -> dict[str, Any]:
    standing = torch.stack([clean.correct, *(from_tree(entry).correct for entry in entries)]).all(0)
    return {
        "kind": "robustness",
        "format": FORMAT,
        "conditions": conditions,
        "clean": {"accuracy": float(clean.correct.double().mean()), **to_tree(clean)},
        "attacks": entries,
        "worst_case": float(standing.double().mean()),
        "checks": checks,
        "doubts": doubts,
    }

"""RUN/robustness.json: all that attacks on one trained network found, as one object of plain JSON (format 1).

* `kind` "robust cell", `format`; `cell`: row, column, seed, and the seed of the transfer source;
* `natural`: `accuracy` on the attacked images, `images`, and `trained`, the accuracy that training recorded;
* `attacks`: `name`, `attack` (its text), `epsilon`, `epsilon_text`, `norm`, `images`, `accuracy`, `white_box`,
  `conditions` (steps, step, restarts, queries …), `stages` (accuracy after each), `seconds`, `published` (the paper's
  number in percent, or null) and `withstood`: a bit an image, first image first, as base64;
* `sweeps`: `name`, `attack`, `images`, `epsilon` and `accuracy` (lists), `published` and `located`: the budget at which
  the curve passes the paper's number, or null;
* `worst_case`: the share of all images that withstand every attack on all of them at one budget, whatever its part;
* `checks` (name, passed, numbers, doubt), `check_images`, and `doubts`: sentences, those of sweeps among them;
* `conditions`: device, TF32, batch size, seed, versions, SHA-256 of network, source and data;
* `parts`: what was planned, and `missing`: names of parts that are not done.

Accuracies are shares in [0, 1].
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperball.attacks import Robustness, parse
from hyperball.attacks.battery import percent, stronger
from hyperball.attacks.journal import from_tree, read_json
from hyperball.experiments.plan import Part
from hyperball.files import FileError, read_tree, write_json
from hyperball.on_disk import RECORD
from hyperball.training.storage.record import Record

ROBUSTNESS = "robustness.json"
FOLDER = "attacks"
KIND, FORMAT = "robust cell", 1
SHARED = ("norm", "seed", "device", "tf32", "batch_size", "versions", "model_sha256", "source_sha256", "data_sha256")
SAME = ("epsilon", "norm", "images", "model_sha256", "data_sha256")  # what parts must share to be one worst case
TRANSFER = "transfer "


def part_path(run_dir: Path, part: Part) -> Path:
    """Where the record of a part's attacks is."""
    return run_dir / FOLDER / f"{part.name}.json"


def curve_path(run_dir: Path, part: Part, text: str) -> Path:
    """Where the curve of one attack of a sweep is."""
    name = next(name for name, held in part.attacks.items() if held == text)
    return run_dir / FOLDER / f"{part.name}-{name.replace(' ', '-')}.json"


def write_record(run_dir: Path, record: dict[str, Any]) -> None:
    write_json(run_dir / ROBUSTNESS, record)


def assembled(run_dir: Path, plan: Mapping[str, Any], is_done: Callable[[Path, Part], bool]) -> dict[str, Any]:
    """The record of a run's folder, of those parts of the plan that are done."""
    planned = [Part.from_dict(tree) for tree in plan["planned"]]
    done = [part for part in planned if is_done(run_dir, part)]
    found = {part.name: Robustness.read(part_path(run_dir, part)).record for part in done if not part.is_sweep}
    published = plan["published"]
    curves = [line for part in done if part.is_sweep for line in sweeps(run_dir, part, published)]
    largest = max(found.values(), key=lambda record: record["conditions"]["images"], default=None)
    checked = next((record for record in found.values() if record["checks"]), None)
    told = {name: list(lines(part, found[name], published)) for part in planned if (name := part.name) in found}
    joined = [line for name, held in told.items() if is_like(found[name], largest) for line in held]
    return {
        "kind": KIND,
        "format": FORMAT,
        "cell": plan["cell"],
        "natural": natural(run_dir, largest),
        "attacks": [line for held in told.values() for line in held],
        "sweeps": curves,
        "worst_case": worst_case(joined),
        "checks": [] if checked is None else checked["checks"],
        "check_images": None if checked is None else checked["conditions"]["check_images"],
        "doubts": list(doubts(planned, found, curves, checked)),
        "conditions": {} if largest is None else {key: largest["conditions"].get(key) for key in SHARED},
        "parts": [part.to_dict() for part in planned],
        "missing": [part.name for part in planned if part not in done],
    }


def parts_done(run_dir: Path) -> list[dict[str, Any]]:
    """The parts of the plan that a folder's record says are done; none where it cannot be read."""
    try:
        record = read_tree(run_dir / ROBUSTNESS)
        return [part for part in record["parts"] if part["name"] not in record["missing"]]
    except (FileError, KeyError, TypeError):
        return []


def is_like(record: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Whether two records are of the same budget, images and weights."""
    if other is None:
        return False
    mine, theirs = record["conditions"], other["conditions"]
    return all(mine.get(key) == theirs.get(key) for key in SAME)


def worst_case(attacks: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of images that withstand every attack on the most images, at the first such line's budget.

    From the bits of single images of a record's `attacks`; None without a line.
    """
    if not attacks:
        return None
    whole = max(attacks, key=lambda line: line["images"])
    count = whole["images"]
    alike = [line for line in attacks if all(line[key] == whole[key] for key in ("images", "epsilon", "norm"))]
    marks = [unpacked(line["withstood"], count) for line in alike]
    return sum(map(all, zip(*marks, strict=True))) / count


def natural(run_dir: Path, largest: dict[str, Any] | None) -> dict[str, Any]:
    """Accuracy without an attack: on the attacked images, and as training recorded it."""
    trained = Record.read(run_dir).results["last"]["top1"] if (run_dir / RECORD).exists() else None
    if largest is None:
        return {"accuracy": None, "images": None, "trained": trained}
    return {"accuracy": largest["clean"]["accuracy"], "images": largest["conditions"]["images"], "trained": trained}


def lines(part: Part, record: dict[str, Any], published: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """One line an attack of a part."""
    entries = {entry["attack"]: entry for entry in record["attacks"]}
    held = record["conditions"]
    for name, text in part.attacks.items():
        entry = entries[str(parse(text))]
        yield {
            "name": name,
            "attack": entry["attack"],
            **{key: held[key] for key in ("epsilon", "epsilon_text", "norm", "images")},
            **{key: entry[key] for key in ("accuracy", "white_box", "conditions", "stages", "seconds")},
            "published": published.get(name),
            "withstood": packed(entry["correct"]),
        }


def packed(marks: str) -> str:
    """A text of 0 and 1 as base64 of its bits."""
    return base64.b64encode(np.packbits([mark == "1" for mark in marks]).tobytes()).decode()


def unpacked(text: str, count: int) -> list[bool]:
    """The marks of `packed`."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count)
    return [bool(bit) for bit in bits]


def sweeps(run_dir: Path, part: Part, published: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """One line a curve."""
    for name, text in part.attacks.items():
        curve = read_json(curve_path(run_dir, part, text))
        target = published.get(name)
        yield {
            "name": name,
            "attack": curve["conditions"]["attack"],
            "images": curve["conditions"]["images"],
            "epsilon": curve["values"],
            "accuracy": curve["accuracies"],
            "published": target,
            "located": None if target is None else crossing(curve["values"], curve["accuracies"], target / 100),
            "doubts": curve["doubts"],
        }


def crossing(budgets: list[float], accuracies: list[float], target: float) -> float | None:
    """The smallest budget at which the line through the points has come down to the target; None where it does not."""
    points = sorted(zip(budgets, accuracies, strict=True))
    if points and points[0][1] == target:
        return points[0][0]
    for (a, high), (b, low) in itertools.pairwise(points):
        if high > target >= low:
            return a + (b - a) * (high - target) / (high - low)
    return None


def doubts(
    planned: list[Part], found: Mapping[str, dict[str, Any]], curves: list[dict[str, Any]], checked: Any
) -> Iterator[str]:
    """What the checks doubt, where a transferred attack is stronger than the same one by gradients, and rises."""
    if checked is None:
        yield "masking checks were not run, so nothing says whether gradients are masked"
    else:
        yield from checked["doubts"]
    for part in planned:
        if part.name in found:
            yield from weaker_than_transfer(part, found[part.name])
    for curve in curves:
        yield from (f"{curve['name']}: {text}" for text in curve["doubts"])


def weaker_than_transfer(part: Part, record: dict[str, Any]) -> Iterator[str]:
    """Doubts about attacks that harm less than the same attack made on another network."""
    entries = {entry["attack"]: entry for entry in record["attacks"]}
    for name, text in part.attacks.items():
        own = part.attacks.get(name.removeprefix(TRANSFER)) if name.startswith(TRANSFER) else None
        if own is not None:
            white, black = (entries[str(parse(held))] for held in (own, text))
            if stronger(from_tree(black), from_tree(white)):
                yield (
                    f"{name.removeprefix(TRANSFER)} made on another network leaves {percent(black['accuracy'])} right "
                    f"and made on the network itself {percent(white['accuracy'])}: the network's own gradient misleads"
                )

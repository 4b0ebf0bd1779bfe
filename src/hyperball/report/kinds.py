"""The records that are no runs: published tables, attacks, robustness curves, benchmarks and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperball.experiments.claims import Claim, read_claims, read_words
from hyperball.on_disk import is_number
from hyperball.report.files import (
    RecordError,
    all_numbers,
    check_shares,
    clipped,
    flat,
    mapping,
    number_list,
    numbers,
    objects,
    pairs,
    sequence,
    shown,
    texts,
)
from hyperball.report.pictures import Curves, Features, Filters, read_curves, read_features, read_filters

MOST_NUMBERS = 5000
KNOWN = {"row", "column", "published", "values", "best", "doubts", "mean", "std", "difference", "kind", "diverged"}


@dataclass(frozen=True)
class Number:
    """One number of a published table: the paper's, and ours by seed; `extra` are means of further metrics.

    `diverged` are the seeds whose networks did not converge.
    """

    row: str
    column: str
    published: float | str | None
    values: tuple[float, ...]
    best: tuple[float, ...] = ()
    doubts: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    kind: str = "published"
    seeds: tuple[str, ...] = ()
    extra: dict[str, float] = field(default_factory=dict)
    diverged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """A table.json: what an experiment found beside what its paper says, at one scale."""

    name: str
    folder: Path
    experiment: str
    title: str
    source: str
    metric: str
    scale: str
    protocol: str
    notes: tuple[str, ...]
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Attack:
    """A robustness record: accuracies by attack under one budget, with doubts."""

    name: str
    path: Path
    conditions: dict[str, Any]
    clean: float | None
    attacks: dict[str, float]
    worst: float | None
    doubts: tuple[str, ...]

    @property
    def recipe(self) -> dict[str, Any]:
        about = self.conditions.get("about")
        recipe = about.get("recipe") if isinstance(about, dict) else None
        return recipe if isinstance(recipe, dict) else {}


@dataclass(frozen=True)
class Robustness:
    """Accuracy over budgets, severities or shares of outliers."""

    name: str
    path: Path
    over: str
    points: tuple[tuple[float, float], ...]
    conditions: dict[str, Any]
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Located:
    """The budget, for pixels in [0, 1], at which a network has the paper's number under an attack."""

    attack: str
    published: str
    epsilon: float


@dataclass(frozen=True)
class RobustCell:
    """What all attacks on one trained network of a table found, as attack records and curves."""

    name: str
    path: Path
    label: str
    attacks: tuple[Attack, ...]
    curves: tuple[Robustness, ...]
    doubts: tuple[str, ...]
    located: tuple[Located, ...] = ()

    def accuracy(self, attack: str) -> float | None:
        """The accuracy under an attack, by the name that the table prints."""
        return next((entry.attacks[attack] for entry in self.attacks if attack in entry.attacks), None)


@dataclass(frozen=True)
class Part:
    """Rows of a benchmark that were measured together; `fits` are times over sizes."""

    name: str
    rows: tuple[dict[str, Any], ...]
    conditions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fits: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Bench:
    """A benchmark: conditions, notes, and rows by part."""

    name: str
    what: str
    conditions: dict[str, str]
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claims:
    """What papers say, with a verdict each, and what the words in it mean."""

    name: str
    words: str
    claims: tuple[Claim, ...]


Record = Claims | Published | Attack | Robustness | RobustCell | Bench | Features | Filters | Curves


def read_published(tree: Mapping[str, Any], path: Path, name: str) -> Published:
    """A table.json; entries that are no numbers of a table are refused."""
    everything = sequence(tree, "numbers", path.name)
    entries = [read_number(entry, path.name) for entry in everything[:MOST_NUMBERS]]
    cut = (f"{MOST_NUMBERS:,} of {len(everything):,} numbers are shown",) if len(everything) > MOST_NUMBERS else ()
    scale = clipped(tree.get("scale", "unknown scale"))
    protocol = tree.get("protocol") or tree.get("reduction") or ("the published schedule" if scale == "paper" else "")
    return Published(
        name, path.parent, clipped(tree.get("experiment")), clipped(tree.get("title", tree.get("experiment"))),
        clipped(tree.get("source", "")), clipped(tree.get("metric", "error")), scale,
        next(iter(texts([protocol])), ""), (*texts(tree.get("notes")), *cut), tuple(entries),
    )  # fmt: skip


def read_number(entry: Any, file: str) -> Number:
    """One entry of a table: whatever is not of the form that a table has refuses it."""
    if not isinstance(entry, dict):
        raise RecordError(f"{file}: an entry of `numbers` must be an object, got {shown(entry)}")
    for key in ("row", "column"):
        if not is_plain(entry.get(key, "")):
            raise RecordError(f"{file}: `{key}` must be a text, got {shown(entry[key])}")
    about = f"{file}: {clipped(entry.get('row', ''))}, {clipped(entry.get('column', ''))}"
    for key in ("doubts", "seeds", "diverged"):
        if not isinstance(entry.get(key, []), list):
            raise RecordError(f"{about}: `{key}` must be a list, got {shown(entry[key])}")
    facts = {
        clipped(key): clipped(value) for key, value in entry.items() if key not in KNOWN and isinstance(value, str)
    }
    extra = {key: value for key, value in numbers(entry).items() if key not in KNOWN}
    for key, held in (entry["also"] if isinstance(entry.get("also"), dict) else {}).items():
        if number_list(held):
            extra[clipped(key)] = statistics.fmean(number_list(held))
    return Number(
        clipped(entry.get("row", "")), clipped(entry.get("column", "")), papers_number(entry.get("published"), about),
        all_numbers(entry, "values", about), all_numbers({"best": [], **entry}, "best", about),
        texts(entry.get("doubts")), facts, clipped(entry.get("kind") or "published"), texts(entry.get("seeds")), extra,
        texts(entry.get("diverged")),
    )  # fmt: skip


def papers_number(value: Any, about: str) -> float | str | None:
    """What a paper prints: a number, or a text such as "N/C"; None, like a number that is not finite, for nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or is_number(value):
        return value
    if not isinstance(value, str):
        raise RecordError(f"{about}: `published` must be a number, a text or null, got {shown(value)}")
    return clipped(value)


def is_plain(value: Any) -> bool:
    return isinstance(value, str) or is_number(value)


def read_attack(tree: Mapping[str, Any], path: Path, name: str) -> Attack:
    """What `hyperball attack` writes."""
    clean = mapping(tree, "clean", path.name).get("accuracy")
    if not is_number(clean):
        raise RecordError(f"{path.name}: `clean.accuracy` must be a number, got {shown(clean)}")
    attacks = {clipped(line["attack"]): float(line["accuracy"]) for line in attack_lines(tree, "attack", path.name)}
    worst = tree.get("worst_case")
    check_shares({"clean.accuracy": clean, "worst_case": worst, **attacks}, path.name)
    return Attack(
        name, path, mapping(tree, "conditions", path.name), float(clean), attacks,
        float(worst) if is_number(worst) else None, texts(tree.get("doubts")),
    )  # fmt: skip


def read_robustness(tree: Mapping[str, Any], path: Path, name: str) -> Robustness:
    """What `hyperball.attacks.robustness_curve` writes."""
    points = pairs(tree, ("values", "accuracies"), path.name)
    if not points:
        raise RecordError(f"{path.name}: `values` and `accuracies` share no finite numbers")
    check_shares({f"accuracies at {x:g}": y for x, y in points}, path.name)
    held = tree.get("conditions")
    return Robustness(
        name, path, clipped(tree.get("over", "")), points, held if isinstance(held, dict) else {},
        texts(tree.get("doubts")),
    )  # fmt: skip


def read_robust_cell(tree: Mapping[str, Any], path: Path, name: str) -> RobustCell:
    """RUN/robustness.json of a table under attack; attacks of one budget on the same images are one record."""
    held = tree.get("conditions")
    conditions = held if isinstance(held, dict) else {}
    natural, cell = mapping(tree, "natural", path.name), mapping(tree, "cell", path.name)
    lines = attack_lines(tree, "name", path.name)
    shares = {"natural.accuracy": natural.get("accuracy"), "worst_case": tree.get("worst_case")}
    check_shares({**shares, **{line["name"]: line["accuracy"] for line in lines}}, path.name)
    budgets: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        budgets.setdefault(tuple(str(line.get(key)) for key in ("norm", "epsilon_text", "images")), []).append(line)
    doubts, attacks = texts(tree.get("doubts")), []
    for members in budgets.values():
        first = {key: members[0].get(key) for key in ("norm", "epsilon", "epsilon_text", "images")}
        whole = first["images"] == natural.get("images")
        clean, worst = natural.get("accuracy"), tree.get("worst_case")
        attacks.append(Attack(
            name, path, {**conditions, **first}, float(clean) if whole and is_number(clean) else None,
            {clipped(line["name"]): float(line["accuracy"]) for line in members},
            float(worst) if whole and is_number(worst) else None, doubts,
        ))  # fmt: skip
    sweeps = objects(sequence({"sweeps": [], **tree}, "sweeps", path.name))
    curves = [sweep_curve(entry, conditions, path, name) for entry in sweeps]
    check_shares({f"{c.conditions['attack']} at {x:g}": y for c in curves for x, y in c.points}, path.name)
    label = f"{clipped(cell.get('row', ''))}, {clipped(cell.get('column', ''))}"
    return RobustCell(
        name, path, label, tuple(attacks), tuple(curve for curve in curves if curve.points), doubts,
        tuple(located(entry) for entry in sweeps if is_number(entry.get("located"))),
    )  # fmt: skip


def attack_lines(tree: Mapping[str, Any], name: str, file: str) -> list[dict[str, Any]]:
    """What a record has of each attack, by a name and with an accuracy."""
    lines = sequence(tree, "attacks", file)
    for line in lines:
        if not (isinstance(line, dict) and isinstance(line.get(name), str) and is_number(line.get("accuracy"))):
            raise RecordError(f"{file}: an entry of `attacks` must have `{name}` and `accuracy`, got {shown(line)}")
    return lines


def sweep_curve(entry: Mapping[str, Any], conditions: Mapping[str, Any], path: Path, name: str) -> Robustness:
    points = pairs(entry, ("epsilon", "accuracy"), path.name)
    shared = {**conditions, "attack": entry.get("name"), "images": entry.get("images")}
    return Robustness(name, path, "epsilon", points, shared, ())


def located(entry: Mapping[str, Any]) -> Located:
    return Located(clipped(entry.get("name")), clipped(entry.get("published")), float(entry["located"]))


def read_written(tree: Mapping[str, Any], path: Path, name: str) -> Claims:
    """A claims.json."""
    try:
        return Claims(name, read_words(tree), read_claims(tree))
    except ValueError as error:
        raise RecordError(f"{path.name}: {error}") from error


def read_bench(tree: Mapping[str, Any], path: Path, name: str) -> Bench:
    """What `hyperball bench` writes, or any object with conditions and lists of rows."""
    sections = tree.get("sections")
    if isinstance(sections, dict):
        parts = [read_part(clipped(key), held) for key, held in sections.items() if isinstance(held, dict)]
    else:
        parts = [Part(clipped(key), rows_of(value)) for key, value in tree.items()]
    parts = [part for part in parts if part.rows]
    if not parts:
        raise RecordError(f"{path.name}: a benchmark must hold a list of rows with numbers")
    return Bench(
        name, clipped(tree.get("what", "")), plain_facts(tree, "what", "schema"), tuple(parts), texts(tree.get("notes"))
    )


def read_part(name: str, held: Mapping[str, Any]) -> Part:
    conditions = held.get("conditions")
    facts = plain_facts(conditions) if isinstance(conditions, dict) else {}
    return Part(name, rows_of(held.get("rows")), facts, texts(held.get("notes")), tuple(objects(held.get("fits"))))


def plain_facts(tree: Mapping[str, Any], *without: str) -> dict[str, str]:
    """The texts, numbers and answers (yes or no) of a mapping, versions among them, as texts."""
    versions = tree.get("versions")
    held = {**tree, **(versions if isinstance(versions, dict) else {})}
    held = {key: ("yes" if value else "no") if isinstance(value, bool) else value for key, value in held.items()}
    return {clipped(key): texts([value])[0] for key, value in held.items() if key not in without and is_plain(value)}


def rows_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The objects with a number in them or in an object of theirs, where a value is a list of such."""
    return tuple(entry for entry in objects(value) if numbers(flat(entry)))


Reader = Callable[[Mapping[str, Any], Path, str], Record]
KINDS: dict[str, Reader] = {
    "claims": read_written,
    "features2d": read_features,
    "filters": read_filters,
    "curves": read_curves,
    "robustness curve": read_robustness,
    "robust cell": read_robust_cell,
}


def reader_of(tree: Mapping[str, Any], path: Path) -> Reader | None:
    """What reads an object, told by its `kind` or its fields; None for a foreign one."""
    kind = tree.get("kind")
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    if "experiment" in tree and "numbers" in tree:
        return read_published
    if {"attacks", "clean", "conditions"} <= set(tree):
        return read_attack
    if "what" in tree or {"schema", "sections"} <= set(tree) or path.parent.name == "bench":
        return read_bench
    return None

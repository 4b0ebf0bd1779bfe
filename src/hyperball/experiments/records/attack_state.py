"""What of a plan of attacks is done: records under other conditions are not the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperball.attacks import RecordError, parse
from hyperball.attacks.arguments import parse_epsilon
from hyperball.attacks.journal import read_json
from hyperball.experiments.plan import Part
from hyperball.experiments.records.robustness import FOLDER, curve_path, part_path
from hyperball.files import FileError, read_tree, write_json
from hyperball.on_disk import CHECKPOINTS, RECIPE
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.storage.checkpoint import CheckpointError, read_document, saved_steps
from hyperball.training.storage.record import Record

WEIGHTS = "weights.json"


def is_done(run_dir: Path, part: Part) -> bool:
    """Whether every attack of a part is in its files, under the conditions of the plan."""
    try:
        return not attacks_lacking(run_dir, part)
    except RecordError:
        return False


def attacks_lacking(run_dir: Path, part: Part) -> list[str]:
    """The texts of a part's attacks that are not in its files; a RecordError where those are of another plan."""
    texts = list(part.attacks.values())
    if part.is_sweep:
        return [text for text in texts if not record_of(curve_path(run_dir, part, text), part, run_dir)]
    record = record_of(part_path(run_dir, part), part, run_dir)
    if not record:
        return texts
    try:
        known = {entry["attack"] for entry in record["attacks"]}
        unchecked = part.checks > 0 and not record["checks"]
    except (KeyError, TypeError):
        raise RecordError(f"{part_path(run_dir, part)} is no record of attacks; remove it") from None
    return [text for text in texts if unchecked or str(parse(text)) not in known]


def record_of(path: Path, part: Part, run_dir: Path) -> dict[str, Any]:
    """A file of a part, {} where there is none; one of another plan is refused."""
    if not path.exists():
        return {}
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("conditions"), dict):
        raise RecordError(f"{path} is no record of attacks; remove it")
    known = record["conditions"] | ({"epsilons": record.get("values")} if part.is_sweep else {})
    difference = unlike(known, asked(part, run_dir))
    if difference:
        raise RecordError(f"{path} is of another plan: {difference}; move it away to attack anew")
    return record


def asked(part: Part, run_dir: Path) -> dict[str, Any]:
    """The conditions that a part asks for; without those that the run's folder does not tell."""
    budgets = [parse_epsilon(text) for text in part.epsilons]
    seed, total = seed_and_images(run_dir)
    wanted: dict[str, Any] = {"seed": seed, "images": images_of(part, total)}
    if part.is_sweep:
        return wanted | {"epsilons": budgets}
    return wanted | {"epsilon": budgets[0], "check_images": max(part.checks, 1)}


def images_of(part: Part, total: int | None) -> int | None:
    """How many images a part attacks, of so many; None where nothing says."""
    if part.images is None or total is None:
        return total if part.images is None else part.images
    return min(part.images, total)


def seed_and_images(run_dir: Path) -> tuple[int | None, int | None]:
    """The seed of a run and how many images it was tested on, where its folder says so."""
    try:
        seed: int | None = Recipe.from_file(run_dir / RECIPE).seed
    except (FileError, RecipeError):
        seed = None
    try:
        total = Record.read(run_dir).conditions.get("test_samples")
    except FileError:
        return seed, None
    return seed, total if isinstance(total, int) else None


def unlike(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first condition in which a record is not what was asked for; "" where none is."""
    for key, value in wanted.items():
        if value is not None and known.get(key) != value:
            return f"`{key}` is {known.get(key)!r} there and {value!r} here"
    return ""


def weights_differ(run_dir: Path, source_dir: Path) -> str:
    """Why attacks in a folder are of other weights than the checkpoints there; "" where they are not or none tells."""
    try:
        known = read_tree(run_dir / FOLDER / WEIGHTS)
    except FileError:
        return ""
    present = weights(run_dir, source_dir)
    if isinstance(known, dict):
        for name, digest in present.items():
            if name in known and known[name] != digest:
                return f"{run_dir / FOLDER} holds attacks on other weights of the {name}; move it away to attack anew"
    return ""


def weights(run_dir: Path, source_dir: Path) -> dict[str, str]:
    """The SHA-256 of the latest weights of a network and its source, of those that are there."""
    found = {"network": digest_of(run_dir), "source": digest_of(source_dir)}
    return {name: digest for name, digest in found.items() if digest}


def digest_of(run_dir: Path) -> str:
    folder = run_dir / CHECKPOINTS
    try:
        return str(read_document(folder / f"step-{saved_steps(folder)[-1]:09d}.json")["tensors"]["sha256"])
    except (IndexError, KeyError, TypeError, CheckpointError):
        return ""


def keep_weights(run_dir: Path, source_dir: Path) -> None:
    """Write down which weights are attacked, or refuse where it were others."""
    difference = weights_differ(run_dir, source_dir)
    if difference:
        raise RecordError(difference)
    write_json(run_dir / FOLDER / WEIGHTS, weights(run_dir, source_dir))

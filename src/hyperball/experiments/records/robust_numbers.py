"""What attacks on the networks of a table found: numbers over seeds, doubts, and the budgets of the paper."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.attacks import parse
from hyperball.attacks.arguments import parse_epsilon
from hyperball.experiments.plan import Attacks
from hyperball.experiments.records.attack_state import images_of, seed_and_images, unlike
from hyperball.experiments.records.broken import leave_out
from hyperball.experiments.records.robustness import KIND, ROBUSTNESS
from hyperball.experiments.table import Experiment
from hyperball.experiments.text import far_apart
from hyperball.files import FileError, read_tree
from hyperball.on_disk import is_number


@dataclass(frozen=True)
class Attacked:
    """What a folder says of attacks on its network, as far as it is what the plan asks for.

    `attacks` and `sweeps` are lines by the names of attacks; `clean` is the accuracy on the attacked images as they
    are, and `trained` that which training recorded, where both are of all test images.
    """

    attacks: dict[str, dict[str, Any]]
    sweeps: dict[str, dict[str, Any]]
    doubts: list[str]
    clean: float | None = None
    trained: float | None = None


def attacked(folder: Path, plan: Attacks) -> Attacked | None:
    """What the record of a folder says, None where there is none; what is broken or of another plan is left out."""
    path = folder / ROBUSTNESS
    if not path.exists():
        return None
    try:
        record = read_tree(path)
        if record["kind"] != KIND:
            return None
        seed, total = seed_and_images(folder)
        checks = max((part.checks for part in plan.parts), default=0) or None
        held = {"seed": record["conditions"].get("seed"), "check_images": record["check_images"]}
        difference = unlike(held, {"seed": seed, "check_images": checks}) if record["attacks"] else ""
        if difference:
            leave_out(path, f"it is of another plan: {difference}")
            return None
        doubts = [str(sentence) for sentence in record["doubts"]]
        lines = [plain(line) for line in record["attacks"]], [plain(line) for line in record["sweeps"]]
        clean = both_clean(record["natural"], total)
    except (FileError, KeyError, TypeError, ValueError, AttributeError) as error:
        leave_out(path, f"it is no record of attacks ({type(error).__name__}: {error})")
        return None
    single, swept = (
        {line["name"]: line for line in found if not of_another_plan(line, plan, total, path)} for found in lines
    )
    return Attacked(single, swept, doubts, *clean)


def both_clean(natural: Mapping[str, Any], total: int | None) -> tuple[float | None, float | None]:
    """Accuracy without an attack as measured with the attacks and as training recorded it, where that can be told."""
    found = natural["accuracy"], natural["trained"]
    known = all(map(is_number, found)) and natural["images"] == total
    return found if known else (None, None)


def plain(line: dict[str, Any]) -> dict[str, Any]:
    """A line of attacks or of sweeps, or an error where it lacks what tables show."""
    single = is_number(line["epsilon"])
    numbers = (line["accuracy"],) if single else (*line["accuracy"], *line["epsilon"])
    optional = (line["published"], *(() if single else (line["located"],)))
    if not all(map(is_number, numbers)) or not all(value is None or is_number(value) for value in optional):
        raise ValueError(f"{line['name']} has something else than numbers")
    return {**line, "name": str(line["name"]), "images": int(line["images"]), "attack": str(line["attack"])}


def of_another_plan(line: dict[str, Any], plan: Attacks, total: int | None, path: Path) -> bool:
    """Whether a line was measured under other conditions than the plan's, which is said."""
    swept = isinstance(line["epsilon"], list)
    for part in (*plan.parts, *plan.last):
        if part.is_sweep == swept and line["name"] in part.attacks:
            budgets = [parse_epsilon(text) for text in part.epsilons]
            wanted = {
                "attack": str(parse(part.attacks[line["name"]])), "images": images_of(part, total),
                "epsilon": budgets if swept else budgets[0],
            }  # fmt: skip
            difference = unlike(line, wanted)
            if difference:
                leave_out(path, f"{line['name']} is of another plan: {difference}")
            return bool(difference)
    return True


def attacked_numbers(
    attacks: Attacks | None, folders: Mapping[int, Path]
) -> Iterator[tuple[str, float | None, dict[int, float]]]:
    """(name, the paper's number, ours in percent by seed) of every attack that the table shows."""
    if attacks is None:
        return
    records = {seed: found for seed, folder in folders.items() if (found := attacked(folder, attacks))}
    planned = {name for part in (*attacks.parts, *attacks.last) for name in part.attacks}
    for name in attacks.shown:
        if name in planned:
            ours = {
                seed: 100 * record.attacks[name]["accuracy"]
                for seed, record in records.items()
                if name in record.attacks
            }
            yield name, attacks.published.get(name), ours


def told_doubts(experiment: Experiment, folders: Mapping[str, Sequence[Path]]) -> list[str]:
    """What to know before believing the numbers under attack: doubts by network, and where the paper's budgets lie.

    `folders` are those of an entry's runs, by its name.
    """
    texts, seen = [], list[Attacked]()
    for entry in experiment.entries:
        if entry.attacks is None:
            continue
        plan = entry.attacks
        records = [found for folder in folders.get(entry.name, ()) if (found := attacked(folder, plan))]
        seen += records
        where = f"{entry.row}, {entry.column}"
        for sentence, count in counted([record.doubts for record in records]):
            texts.append(f"doubt: {where} ({count} of {len(records)} seeds): {sentence}")
        if records and not any(record.doubts for record in records):
            texts.append(f"no doubts: {where} ({len(records)} seeds)")
        texts += [f"budget: {where}: {text}" for text in located(plan, records)]
    return [*texts, *clean_words(seen)]


def clean_words(records: Sequence[Attacked]) -> list[str]:
    """How far clean accuracy as training recorded it is from that by which images under attack are judged."""
    gaps = [abs(held.clean - held.trained) for held in records if held.clean is not None and held.trained is not None]
    if not gaps:
        return []
    return [
        f"clean is what training recorded; measured again with the attacks, which judge images by that, it differs by "
        f"{100 * statistics.fmean(gaps):.2f} points on average and {100 * max(gaps):.2f} at most ({len(gaps)} networks)"
    ]


def counted(lists: Sequence[Sequence[str]]) -> list[tuple[str, int]]:
    """Sentences that say the same with other numbers, once, with how many of the lists hold one."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for sentences in lists:
        said = {
            "".join(c for c in sentence if not (c.isdigit() or c in ".%+-")): sentence for sentence in sentences[::-1]
        }
        counts.update(said.keys())
        found = said | found
    return [(sentence, counts[bare]) for bare, sentence in found.items()]


def located(attacks: Attacks, records: Sequence[Attacked]) -> Iterator[str]:
    """The budgets at which our networks have the paper's numbers."""
    for name in attacks.shown:
        lines = [record.sweeps[name] for record in records if name in record.sweeps]
        known = [line for line in lines if line["published"] is not None]
        if known:
            at = [255 * line["located"] for line in known if line["located"] is not None]
            place = f"{budgets(at)}/255 ({len(at)} of {len(known)} seeds)" if at else "none of the budgets"
            yield f"{name} gives the paper's {known[0]['published']} % at {place}"


def budgets(at: Sequence[float]) -> str:
    """The mean of budgets, or where they are far apart each of them: "{15.51, 0.87, 15.45}"."""
    if far_apart(at):
        return f"{{{', '.join(f'{value:.2f}' for value in at)}}}"
    return f"{statistics.fmean(at):.2f}"

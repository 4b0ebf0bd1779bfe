"""Accuracy under attack with its doubts, and accuracy against budgets, severities and shares of outliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hyperball.report.charts import Chart, Series
from hyperball.report.files import clipped, flat, is_number
from hyperball.report.folder import Found
from hyperball.report.kinds import Attack, RobustCell, Robustness
from hyperball.report.page import Gallery, Section
from hyperball.report.records import Run
from hyperball.report.sections.lines import MOST_LINES, colors, mean_and_band
from hyperball.report.tables import MISSING, Cell, Table, family, gathered, operator, percent, protocol, spread

Entry = TypeVar("Entry")
Owners = Mapping[Path, Run]
LEAD = (
    "Accuracy in percent, mean ± standard deviation over seeds. Numbers of different budgets, norms or numbers of "
    "images never share a row. A doubt says why a number may be too high: hover over it, or read the list below."
)
PIXELS = 255.0


def robustness_section(found: Found) -> Section | None:
    """All attack records and robustness curves; None where there are none."""
    cells = found.of(RobustCell)
    told = {cell.path.parent for cell in cells}  # whose single attacks need not be shown again
    attacks = [entry for entry in found.of(Attack) if not told & set(entry.path.parents)]
    curves = [entry for entry in found.of(Robustness) if not told & set(entry.path.parents)]
    attacks += [entry for cell in cells for entry in cell.attacks]
    curves += [entry for cell in cells for entry in cell.curves]
    if not attacks and not curves:
        return None
    owners = {run.folder: run for run in found.runs}
    tables = tuple(attack_table(group, owners) for group in grouped(attacks, lambda one: heading(one, owners)).values())
    charts = [curve_chart(group, owners) for group in grouped(curves, lambda one: axis(one, owners)).values()]
    everything: list[Attack | Robustness] = [*attacks, *curves]
    said = [(named(entry, owners), doubt) for entry in everything for doubt in entry.doubts]
    return Section(
        "Robustness", LEAD, tables, doubts=gathered(said), remarks=budgets(cells), part="robustness",
        galleries=(Gallery("Robustness curves", tuple(charts)),) if charts else (),
    )  # fmt: skip


def grouped(entries: Sequence[Entry], key: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def budgets(cells: Sequence[RobustCell]) -> tuple[str, ...]:
    """Where the paper's numbers would lie: the mean budget over seeds."""
    found: dict[str, list[float]] = {}
    for sentence, at in (pair for cell in cells for pair in cell.located):
        found.setdefault(sentence, []).append(PIXELS * at)
    return tuple(f"{sentence} at {spread(held)}/255 (n = {len(held)})" for sentence, held in found.items())


def budget(entry: Attack) -> str:
    """The conditions that numbers of one table share."""
    held = entry.conditions
    size = held.get("epsilon_text", held.get("epsilon", "?"))
    images = held.get("images")
    counted = f", {images:,} images" if is_number(images) and isinstance(images, int) else ""
    data = flat(entry.recipe).get("data.name")
    return clipped(f"{f'{data}, ' if data else ''}{held.get('norm', 'norm ?')} {size}{counted}")


def heading(entry: Attack, owners: Owners) -> str:
    """The budget, and the scale of the table that a network was trained for, where there is one."""
    return f"{budget(entry)}{scale_words(entry, owners)}"


def scale_words(entry: Attack | Robustness, owners: Owners) -> str:
    held = owner(entry.path, owners)
    return f", scale {held.scale}" if held is not None and held.scale else ""


def axis(entry: Robustness, owners: Owners) -> str:
    held = entry.conditions
    return f"{entry.over} {held.get('attack')} {held.get('norm')} {held.get('images')}{scale_words(entry, owners)}"


def owner(path: Path, owners: Owners) -> Run | None:
    """The run in whose folder, or in a folder of whose folder, a record lies."""
    return next((owners[folder] for folder in list(path.parents)[:3] if folder in owners), None)


def recipe_of(entry: Attack | Robustness, owners: Owners) -> dict[str, Any]:
    held = owner(entry.path, owners)
    recipe = entry.recipe if isinstance(entry, Attack) else {}
    return recipe or (held.recipe if held is not None else {})


def named(entry: Attack | Robustness, owners: Owners) -> str:
    """What a line or row is called: its model and operator, or the file."""
    recipe = recipe_of(entry, owners)
    if not recipe:
        return entry.name.removesuffix(".json")
    tree = flat(recipe)
    method, share = tree.get("adversarial.method", "none"), tree.get("adversarial.share", 1.0)
    trained = f", trained on {method}" if method != "none" else ""
    half = f" and clean ({share:g})" if trained and is_number(share) and share != 1 else ""
    norm = f", {tree['model.norm']} norm" if tree.get("model.norm") not in (None, "batch") else ""
    return clipped(f"{operator(tree)}{norm}{trained}{half}")


def attack_table(entries: Sequence[Attack], owners: Owners) -> Table:
    """One row a recipe, one column an attack, over the seeds."""
    attacks = list(dict.fromkeys(name for entry in entries for name in entry.attacks))
    groups = grouped(entries, lambda entry: protocol(recipe) if (recipe := recipe_of(entry, owners)) else entry.name)
    rows, operators = [], []
    for members in groups.values():
        first = members[0]
        told = tip(members, owners)
        doubts = list(dict.fromkeys(doubt for entry in members for doubt in entry.doubts))
        worst = [entry.worst for entry in members if entry.worst is not None]
        clean = [entry.clean for entry in members if entry.clean is not None]
        cells = [Cell(percent([m.attacks[name] for m in members if name in m.attacks]), tip=told) for name in attacks]
        rows.append((
            Cell(named(first, owners), remark=model_of(first, owners)), Cell(str(len(members))),
            Cell(percent(clean), tip=told), *cells, Cell(percent(worst), tip=told),
            Cell(f"{len(doubts)} ⚠" if doubts else MISSING, tip="\n".join(doubts), tone="worse" if doubts else ""),
        ))  # fmt: skip
        operators.append(family(recipe_of(first, owners)))
    columns = ("", "seeds", "clean", *attacks, "all of them", "doubts")
    return Table(columns, tuple(rows), operators=tuple(operators), heading=heading(entries[0], owners))


def model_of(entry: Attack, owners: Owners) -> str:
    return clipped(flat(recipe_of(entry, owners)).get("model.name", ""))


def tip(entries: Sequence[Attack], owners: Owners) -> str:
    """Conditions of a row, for hovering."""
    held = entries[0].conditions
    lines = [", ".join(entry.name for entry in entries[:3]) + (" …" if len(entries) > 3 else "")]
    lines.append(budget(entries[0]))
    lines.append(f"seeds {', '.join(clipped(recipe_of(entry, owners).get('seed', '?')) for entry in entries)}")
    lines += [f"{name} {clipped(held[name])}" for name in ("device", "seed", "batch_size", "commit") if name in held]
    versions = held.get("versions")
    lines += [f"torch {clipped(versions['torch'])}"] if isinstance(versions, dict) and "torch" in versions else []
    return "\n".join(lines)


def curve_chart(entries: Sequence[Robustness], owners: Owners) -> Chart:
    """Accuracy over one axis under one set of conditions, a line a recipe."""
    first = entries[0]
    over_pixels = first.over == "epsilon" and first.conditions.get("norm") != "l2"
    scale = PIXELS if over_pixels else 100.0 if first.over == "outliers" else 1.0
    label = {"epsilon": "ε · 255" if over_pixels else "ε", "outliers": "% of points"}.get(first.over, first.over)
    groups = grouped(entries, lambda entry: protocol(held) if (held := recipe_of(entry, owners)) else entry.name)
    names = [named(members[0], owners) for members in groups.values()]
    series = []
    for name, color, members in zip(names, colors(names), groups.values(), strict=True):
        lines = [tuple((scale * x, 100 * y) for x, y in sorted(entry.points)) for entry in members]
        mean, band = mean_and_band(lines)
        series.append(Series(name, mean, color, band=band, operator=family(recipe_of(members[0], owners))))
    attack = first.conditions.get("attack")
    chance = first.conditions.get("chance")
    title = f"Accuracy under {clipped(attack)}" if attack else f"Accuracy over {first.over}"
    marks = ((100 * chance, "chance"),) if is_number(chance) else ()
    counted = first.conditions.get("images")
    note = f"{counted:,} images" if isinstance(counted, int) and not isinstance(counted, bool) else ""
    note += scale_words(first, owners)
    doubts = len({doubt for entry in entries for doubt in entry.doubts})
    note += f"; {doubts} doubts, see below" if doubts else ""
    return Chart(
        title,
        label,
        "%",
        tuple(series[:MOST_LINES]),
        " %",
        note.removeprefix("; ").removeprefix(", "),
        (0.0, 100.0),
        references=marks,
    )

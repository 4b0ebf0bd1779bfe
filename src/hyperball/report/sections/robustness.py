"""Accuracy under attack with its doubts, and accuracy against budgets, severities and shares of outliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from hyperball.experiments.text import far_apart
from hyperball.on_disk import is_number
from hyperball.report.charts import Chart, Series
from hyperball.report.doubts import Doubt, counted, distinct, gathered
from hyperball.report.files import clipped, flat
from hyperball.report.folder import Found, owner, recipe_of
from hyperball.report.kinds import Attack, Located, Published, RobustCell, Robustness
from hyperball.report.page import Gallery, Section
from hyperball.report.records import Run
from hyperball.report.sections.lines import BAND, MOST_LINES, colors, first_of, mean_and_band
from hyperball.report.tables import (
    BASELINE,
    FAMILIES,
    MISSING,
    Cell,
    Table,
    differing,
    ending,
    family,
    label,
    operator,
    protocol,
    trimmed,
)

Entry = TypeVar("Entry")
Kind = TypeVar("Kind", Attack, Robustness)
Owners = Mapping[Path, Run]
Tables = Mapping[Path, Sequence[str]]  # the names of published tables by their folder
LEAD = (
    "Accuracy in percent, mean ± standard deviation over seeds. Numbers of different budgets, norms or numbers of "
    "images never share a row. A doubt says why a number may be too high: hover over it, or read the list below."
)
PIXELS = 255.0
NOWHERE = f"{MISSING}: at none of the budgets of the sweep; several numbers are one a network, where they are far apart"


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
    known: dict[Path, list[str]] = {}
    for published in found.of(Published):
        known.setdefault(published.folder, []).append(published.experiment)
    named_groups = grouped(attacks, lambda one: heading(one, owners)).values()
    tables = tuple(attack_table(group, owners, known) for group in named_groups)
    charts = [curve_chart(group, owners, known) for group in grouped(curves, lambda one: axis(one, owners)).values()]
    said: list[tuple[str, Doubt]] = []
    for group in named_groups:
        for name, members in by_recipe(group, owners):
            said += [(name, doubt) for doubt in attack_doubts(members, owners)]
    for name, networks in by_recipe(curves, owners):
        said += [(name, doubt) for doubt in curve_doubts(networks, owners)]
    return Section(
        "Robustness", LEAD, (*tables, *budget_tables(cells, owners, known)), doubts=gathered(said), part="robustness",
        doubt_count=len(distinct(doubt for _, doubt in said)),
        galleries=(Gallery("Robustness curves", tuple(charts)),) if charts else (),
    )  # fmt: skip


def grouped(entries: Sequence[Entry], key: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def budget_tables(cells: Sequence[RobustCell], owners: Owners, tables: Tables) -> tuple[Table, ...]:
    """Where the paper's numbers would lie, one table a data set and scale."""
    swept = [cell for cell in cells if cell.curves]
    groups = grouped(swept, lambda cell: f"{data_of(cell.curves[0], owners)} {scale_words(cell.curves[0], owners)}")
    held = (members for members in groups.values() if any(cell.located for cell in members))
    return tuple(budget_table(members, owners, tables) for members in held)


def budget_table(cells: Sequence[RobustCell], owners: Owners, tables: Tables) -> Table:
    """The budgets at which networks have the paper's numbers, a row a network, a column an attack.

    The mean over seeds, or each where they are far apart.
    """
    columns = tuple(dict.fromkeys(one.attack for cell in cells for one in cell.located))
    rows, operators = [], []
    for name, members in grouped(cells, lambda cell: cell.label).items():
        found = grouped([one for cell in members for one in cell.located], lambda one: one.attack)
        if not found:
            continue
        rows.append((Cell(name), *(budget_cell(found.get(attack, []), len(members)) for attack in columns)))
        operators.append(family(recipe_of(members[0].curves[0], owners)))
    first = cells[0].curves[0]
    shared = ", ".join(filter(None, (data_of(first, owners), scale_words(first, owners))))
    return Table(
        ("", *columns), tuple(rows), operators=tuple(operators), scale=scale_of(first, owners),
        heading=f"ε · 255 at which our networks have the paper's numbers, {shared}", caption=NOWHERE,
        table=tables_of([cell.curves[0] for cell in cells], tables),
    )  # fmt: skip


def budget_cell(found: Sequence[Located], seeds: int) -> Cell:
    if not found:
        return Cell(MISSING)
    held = [PIXELS * one.epsilon for one in found]
    fewer = f" [{len(held)} of {seeds}]" if len(held) < seeds else ""
    each = ", ".join(f"{value:.2f}" for value in held) + fewer
    return Cell(
        each if far_apart(held) else ending(held, networks=seeds),
        remark=f"paper {found[0].published} %",
        sort=fmean(held),
    )


def budget(entry: Attack) -> str:
    """The conditions that numbers of one table share."""
    held = entry.conditions
    size = held.get("epsilon_text", held.get("epsilon", "?"))
    images = held.get("images")
    many = f", {images:,} images" if is_number(images) and isinstance(images, int) else ""
    return clipped(f"{held.get('norm', 'norm ?')} {size}{many}")


def heading(entry: Attack, owners: Owners) -> str:
    """The data set, the budget, and the scale of the table that a network was trained for, where there is one."""
    return ", ".join(filter(None, (data_of(entry, owners), budget(entry), scale_words(entry, owners))))


def data_of(entry: Attack | Robustness, owners: Owners) -> str:
    return clipped(flat(recipe_of(entry, owners)).get("data.name", ""))


def scale_of(entry: Attack | Robustness, owners: Owners) -> str:
    held = owner(entry.path, owners)
    return held.scale if held is not None else ""


def scale_words(entry: Attack | Robustness, owners: Owners) -> str:
    scale = scale_of(entry, owners)
    return f"scale {scale}" if scale else ""


def tables_of(entries: Sequence[Attack | Robustness], tables: Tables) -> str:
    """The published tables in whose folders records lie, one a line."""
    names = [name for entry in entries for folder in entry.path.parents for name in tables.get(folder, ())]
    return "\n".join(dict.fromkeys(names))


def axis(entry: Robustness, owners: Owners) -> str:
    """What the lines of one chart share."""
    held = entry.conditions
    shared = (entry.over, held.get("attack"), held.get("norm"), held.get("images"), held.get("chance"))
    return f"{shared} {data_of(entry, owners)} {scale_words(entry, owners)}"


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


def trained_networks(owners: Owners) -> dict[tuple[str, str], tuple[set[str], set[str]]]:
    """The seeds of all networks of a recipe and scale, attacked or not, and those of them that did not converge."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for run in owners.values():
        if run.is_finished or run.diverged:
            every, lost = found.setdefault((protocol(run.recipe), run.scale), (set(), set()))
            every.add(clipped(run.seed))
            lost |= {clipped(run.seed)} if run.diverged else set()
    return found


def attack_table(entries: Sequence[Attack], owners: Owners, tables: Tables) -> Table:
    """One row a recipe, one column an attack, over the seeds; a number that some networks lack says so."""
    columns = columns_of(entries)
    rows, operators, trained = [], [], trained_networks(owners)
    for name, members in by_recipe(entries, owners):
        first, told = members[0], tip(members, owners)
        every, lost = trained.get((protocol(recipe_of(first, owners)), scale_of(first, owners)), (set(), set()))
        count = len(every | set(by_seed(members, owners)))
        shared = {"worst case": most_attacked(members)}
        found = [one_each(column, shared.get(column, members), owners)[0] for column in columns]
        cells = [attack_cell(values, len(lost), count, told) for values in found]
        doubts = attack_doubts(members, owners)
        sentences = "\n".join(doubt.sentence for doubt in doubts)
        rows.append((
            Cell(name, remark=model_of(first, owners)),
            Cell(str(count)), *cells,
            Cell(str(len(doubts)) if doubts else MISSING, tip=sentences, sort=len(doubts),
                 tone="worse" if doubts else "", doubted=bool(doubts)),
        ))  # fmt: skip
        operators.append(family(recipe_of(first, owners)))
    missing = sum(cell.text == MISSING for row in rows for cell in row[2:-1])
    table = Table(
        ("", "seeds", *columns, "doubts"), tuple(rows), operators=tuple(operators),
        heading=heading(entries[0], owners), table=tables_of(entries, tables), scale=scale_of(entries[0], owners),
    )  # fmt: skip
    return trimmed(table, missing)


def attack_cell(shares: Sequence[float], lost: int, networks: int, told: str) -> Cell:
    """Accuracies in percent; a dash where no network has one, be it that some did not converge."""
    values = [100 * share for share in shares]
    return Cell(ending(values, lost, networks), sort=fmean(values), tip=told) if values else Cell(MISSING, tip=told)


def most_attacked(entries: Sequence[Attack]) -> list[Attack]:
    """Those that withstood as many attacks as any: a worst case of fewer is another number."""
    most = max((entry.attacks.keys() for entry in entries), key=len)
    return [entry for entry in entries if most <= entry.attacks.keys()]


def by_recipe(entries: Sequence[Kind], owners: Owners) -> list[tuple[str, list[Kind]]]:
    """Entries about networks that differ in the seed alone under a name of their own, the baseline before operators.

    One that names no recipe stands alone. Where a name fits several networks, what their recipes differ in is added.
    """
    found = grouped(entries, lambda entry: protocol(recipe) if (recipe := recipe_of(entry, owners)) else entry.name)
    groups = sorted(found.values(), key=lambda members: rank(family(recipe_of(members[0], owners))))
    names = [named(members[0], owners) for members in groups]
    trees = [flat(recipe_of(members[0], owners)) for members in groups]
    for name in {name for name in names if names.count(name) > 1}:
        rivals = [at for at, other in enumerate(names) if other == name]
        keys = differing([trees[at] for at in rivals])
        for at in rivals:
            names[at] = clipped(f"{name}, {label(trees[at], keys)}")
    return list(zip(names, groups, strict=True))


def rank(operator: str) -> int:
    """Where an operator stands in a list: the baseline first, what is no known operator last."""
    order = (BASELINE, *FAMILIES)
    return order.index(operator) if operator in order else len(order)


def by_seed(entries: Sequence[Kind], owners: Owners) -> dict[str, list[Kind]]:
    return grouped(entries, lambda entry: seed_of(entry, owners) or entry.name)


def columns_of(entries: Sequence[Attack]) -> tuple[str, ...]:
    return ("clean", *dict.fromkeys(name for entry in entries for name in entry.attacks), "worst case")


def attack_doubts(members: Sequence[Attack], owners: Owners) -> tuple[Doubt, ...]:
    """What records say against their numbers, and where two records of a seed disagree."""
    doubts = [doubt for entry in members for doubt in doubts_about(entry, owners)]
    rivals = [doubt for name in columns_of(members) for doubt in one_each(name, members, owners)[1]]
    return distinct([*doubts, *rivals])


def accuracy(entry: Attack, name: str) -> float | None:
    """The accuracy that a column of an attack table prints."""
    return {"clean": entry.clean, "worst case": entry.worst}.get(name, entry.attacks.get(name))


def one_each(name: str, entries: Sequence[Attack], owners: Owners) -> tuple[list[float], list[Doubt]]:
    """One accuracy a seed, that of the first record that has it, and doubts where another record disagrees."""
    values, doubts = [], []
    for members in by_seed(entries, owners).values():
        held = [(entry, value) for entry in members if (value := accuracy(entry, name)) is not None]
        values += [value for _, value in held[:1]]
        for entry, value in held[1:]:
            if value != held[0][1]:
                said = f"{name}: {entry.name} says {100 * value:.2f} % instead of {100 * held[0][1]:.2f} %"
                doubts.append(
                    Doubt(run_name(held[0][0], owners), f"{said}, and is not counted", seed_of(entry, owners))
                )
    return values, doubts


def seed_of(entry: Attack | Robustness, owners: Owners) -> str:
    recipe = recipe_of(entry, owners)
    return clipped(recipe.get("seed", 0)) if recipe else ""


def run_name(entry: Attack | Robustness, owners: Owners) -> str:
    held = owner(entry.path, owners)
    return entry.name if held is None else held.name


def doubts_about(entry: Attack | Robustness, owners: Owners) -> list[Doubt]:
    return [Doubt(run_name(entry, owners), text, seed_of(entry, owners)) for text in entry.doubts]


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


def curve_chart(entries: Sequence[Robustness], owners: Owners, tables: Tables) -> Chart:
    """Accuracy over one axis under one set of conditions, a line a recipe."""
    first = entries[0]
    over_pixels = first.over == "epsilon" and first.conditions.get("norm") != "l2"
    scale = PIXELS if over_pixels else 100.0 if first.over == "outliers" else 1.0
    over = {"epsilon": "ε · 255" if over_pixels else "ε", "outliers": "% of points"}.get(first.over, first.over)
    found, doubts, groups = [], list[Doubt](), by_recipe(entries, owners)
    for name, members in groups:
        doubts += curve_doubts(members, owners)
        firsts = [held[0] for held in by_seed(members, owners).values()]
        mean, band = mean_and_band([tuple((scale * x, 100 * y) for x, y in sorted(one.points)) for one in firsts])
        found += [(name, family(recipe_of(members[0], owners)), mean, band)] if mean else []
    drawn, cut = first_of(found, MOST_LINES, "lines", lambda line: line[0])
    chosen = colors([operator or name for name, operator, _, _ in drawn])
    series = tuple(
        Series(name, mean, color, band=band, operator=operator)
        for (name, operator, mean, band), color in zip(drawn, chosen, strict=True)
    )
    attack, chance = first.conditions.get("attack"), first.conditions.get("chance")
    title = f"Accuracy under {clipped(attack)}" if attack else f"Accuracy over {first.over}"
    apart = len(groups) - len(found)
    spread = BAND if any(band for _, _, _, band in drawn) else ""
    notes = [curve_note(first, owners), spread, cut, f"not drawn: {apart} whose seeds share no point" if apart else ""]
    notes.append(f"{counted(len(distinct(doubts)))}, see above" if doubts else "")
    return Chart(
        title, over, "%", series, " %", "; ".join(filter(None, notes)), (0.0, 100.0),
        references=((100 * chance, "chance"),) if is_number(chance) else (),
        table=tables_of(entries, tables), scale=scale_of(first, owners),
    )  # fmt: skip


def curve_doubts(members: Sequence[Robustness], owners: Owners) -> tuple[Doubt, ...]:
    """What records say against their curves, and where a seed has two curves under the same conditions."""
    doubts = [doubt for entry in members for doubt in doubts_about(entry, owners)]
    for group in grouped(members, lambda entry: axis(entry, owners)).values():
        for first, *others in by_seed(group, owners).values():
            for entry in others:
                said = f"{entry.name} is another curve of this seed with other numbers, and is not drawn"
                differs = sorted(entry.points) != sorted(first.points)
                doubts += [Doubt(run_name(first, owners), said, seed_of(entry, owners))] if differs else []
    return distinct(doubts)


def curve_note(entry: Robustness, owners: Owners) -> str:
    """The data set, the number of images and the scale."""
    images = entry.conditions.get("images")
    said = f"{images:,} images" if isinstance(images, int) and not isinstance(images, bool) else ""
    return ", ".join(filter(None, (data_of(entry, owners), said, scale_words(entry, owners))))

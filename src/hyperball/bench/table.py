"""Records as text: an aligned table for a terminal, and the same in Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hyperball.bench import cards
from hyperball.bench.records import Record, Row, Section

Column = tuple[str, str]  # work and mode

HEAD = (
    "case", "work", "dtype", "mode", "subject", "reference", "ms", "p20–p80", "ref. ms", "ratio", "p20–p80", "memory",
    "aim", "verdict",
)  # fmt: skip
RIGHT = {"ms", "ref. ms", "ratio", "memory", "aim"}
TITLES = {
    "conv": "One convolution",
    "train": "Training steps",
    "pool": "Robust pooling",
    "projection": "Projections",
    "inference": "Frozen inference",
    "scaling": "Scaling",
}


def number(value: float | None, digits: int = 3) -> str:
    """Three digits that matter, never in exponent notation."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - len(str(int(abs(value))))) if abs(value) >= 1 else digits
    return f"{value:.{places}f}"


def between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{number(low)}–{number(high)}"


def memory(row: Row) -> str:
    """The ratio of peaks, and the maps kept for the backward where they were counted."""
    parts = [] if row.memory_ratio is None else [f"{row.memory_ratio:.2f}"]
    return ", ".join([*parts, *([] if row.kept_maps is None else [f"{row.kept_maps:.2f} maps"])])


def aim(row: Row) -> str:
    parts = [f"≤ {number(row.aim)}"] if row.aim is not None else []
    parts += [f"≤ {row.seconds_aim:g} s"] if row.seconds_aim is not None else []
    return ", ".join([*parts, *([f"memory ≤ {row.memory_aim:.2f}"] if row.memory_aim is not None else [])])


def verdict(row: Row) -> str:
    """ "reached", "not reached", or nothing where nothing is aimed at."""
    if not row.verdicts:
        return ""
    if all(row.verdicts):
        return "reached"
    return "not reached" if False in (row.reached, row.seconds_reached) else "memory not reached"


def cells(row: Row) -> list[str]:
    return [
        row.case, row.work, row.dtype, row.mode, row.subject, row.reference, number(row.median_ms),
        between(row.p20_ms, row.p80_ms), number(row.reference_median_ms), f"{row.ratio:.3f}",
        between(row.ratio_p20, row.ratio_p80), memory(row), aim(row), verdict(row),
    ]  # fmt: skip


def aligned(rows: Iterable[Row]) -> str:
    """A table for a terminal; dtype and mode that are always the same stand above it, and notes under it."""
    rows = list(rows)
    if not rows:
        return "nothing was measured"
    body = [cells(row) for row in rows]
    same = [place for place in (2, 3) if len(rows) > 1 and len({line[place] for line in body}) == 1]
    shown = [place for place in range(len(HEAD)) if place not in same and any(line[place] for line in body)]
    lines = [[line[place] for place in shown] for line in [list(HEAD), *body]]
    heads = [HEAD[place] for place in shown]
    widths = [max(len(line[i]) for line in lines) for i in range(len(shown))]
    text = [
        "  ".join(f"{c:>{w}}" if h in RIGHT else f"{c:<{w}}" for c, w, h in zip(line, widths, heads, strict=True))
        for line in lines
    ]
    above = [", ".join(f"{HEAD[place]} {body[0][place]}" for place in same)] if same else []
    notes = dict.fromkeys(f"{row.subject}, {row.case}: {row.note}" for row in rows if row.note)
    return "\n".join(line.rstrip() for line in [*above, *text, *notes])


def fits_table(fits: Sequence[dict[str, Any]]) -> str:
    """Slopes of time against batch and channels for a terminal."""
    return "\n".join(
        f"{fit['axis']:<9} {fit['mode']:<6} {fit['subject']:<14} slope {number(fit['slope'], 2):>5}   "
        + ", ".join(f"{size}: {number(ms)}" for size, ms in zip(fit["sizes"], fit["ms"], strict=True))
        for fit in fits
    )


def markdown(record: Record) -> str:
    """Every section as a Markdown table, then what was reached, predictions for other cards and slopes."""
    parts = [tables(name, section) for name, section in record.sections.items() if name != "scaling"]
    parts.append(summary(record))
    parts += [cards.markdown(record)] if cards.predictions(record) else []
    scaling = record.sections.get("scaling")
    parts += [slopes(scaling)] if scaling and scaling.fits else []
    return "\n\n".join(part for part in parts if part)


def put(text: str, record_name: str, document: str) -> str:
    """The document with the text between its markers <!-- bench: RECORD --> and <!-- /bench -->."""
    begin, end = f"<!-- bench: {record_name} -->\n", "\n<!-- /bench -->"
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the document has no lines {begin.strip()} and {end.strip()}")
    return before + begin + text + end + after


def doubt(section: Section) -> str:
    """The end of a title: whether cases of the section are missing."""
    return ", partial" if section.missing else ""


def moment(date: str) -> str:
    """A date and time to the minute."""
    return date[: len("2026-11-16T01:30")].replace("T", " ")


def older(section: Section) -> list[str]:
    """A line for every earlier run that rows are left of: how many they are, its conditions and its notes."""
    lines = []
    for date, held in section.earlier.items():
        rows = [row for row in section.rows if row.date == date]
        cases = len({(row.case, row.work, row.dtype) for row in rows})
        what = f"{counted(len(rows), 'row')} of {counted(cases, 'case')} ({described({**held, 'date': ''})})"
        lines += ["; ".join([f"kept from {moment(date)}: {what}", *held.get("notes", ())])]
    return lines


def counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def remarks(section: Section) -> list[str]:
    """What is missing of a section, its notes, and what is left of earlier runs."""
    missing = [f"partial: {section.conditions['partial']}"] if section.missing else []
    return [*missing, *section.notes, *older(section)]


def conditions_line(section: Section) -> str:
    """The conditions of a section's last run, and the dates of rows that earlier ones left."""
    dates = ", ".join(moment(date) for date in section.earlier)
    return described(section.conditions) + (f"; in part of {dates}" if dates else "")


def described(held: Mapping[str, Any]) -> str:
    versions = held.get("versions", {})
    shown = [f"{name} {versions[name]}" for name in ("torch", "triton", "hyperball") if versions.get(name)]
    threads = [] if "NVIDIA" in str(held.get("device")) else [f"{held.get('threads')} threads"]
    parts = [held.get("device", ""), *shown, *threads, moment(str(held.get("date", "")))]
    return ", ".join(part for part in parts if part) + ("; the machine was busy" if held.get("busy") else "")


def tables(name: str, section: Section) -> str:
    """A section's title with its conditions, its rows and its notes."""
    title = f"**{TITLES.get(name, name)}{doubt(section)}** ({conditions_line(section)})"
    notes = [f"- {note}" for note in remarks(section)]
    return "\n".join([title, *(["", *pivot(section.rows)] if section.rows else []), *(["", *notes] if notes else [])])


def pivot(rows: Sequence[Row]) -> list[str]:
    """One line a case, dtype, subject, reference and date; the works and modes are columns of ratios."""
    lines: dict[tuple[str, ...], dict[Column, Row]] = {}
    for row in rows:
        key = row.case, row.dtype, row.subject, row.reference, moment(row.date)
        lines.setdefault(key, {})[row.work, row.mode] = row
    one_mode = len({row.mode for row in rows}) == 1
    heads = {(row.work, row.mode): row.work if one_mode else f"{row.work}, {row.mode}" for row in rows}
    main = main_column(rows)
    time = "ref. ms" if len(heads) == 1 else f"ref. ms: {heads[main]}"
    head = ["case", "dtype", "subject", "reference", "measured", time, *heads.values(), "memory", "aim", "verdict"]
    return grid(head, [pivoted(key, found, heads, main) for key, found in lines.items()])


def main_column(rows: Iterable[Row]) -> Column:
    """The work and mode whose times of the reference and memory are shown: in a graph, and with an aim, if any is."""
    best = max(rows, key=lambda row: (row.mode == "graph", bool(aim(row))))
    return best.work, best.mode


def pivoted(key: tuple[str, ...], found: dict[Column, Row], heads: dict[Column, str], main: Column) -> list[str]:
    """The cells of one line; a line without the main column shows the time of another, and names it."""
    column = main if main in found else main_column(found.values())
    time = number(found[column].reference_median_ms) + ("" if column == main else f" ({heads[column]})")
    ratios = [f"{found[place].ratio:.2f}" if place in found else "" for place in heads]
    aimed = [row for row in found.values() if aim(row)]
    wanted = "; ".join(dict.fromkeys(aim(row) for row in aimed))
    said = [verdict(row) for row in aimed]
    missed = [f"{row.work}, {row.mode}: {text}" for row, text in zip(aimed, said, strict=True) if text != "reached"]
    outcome = "" if not aimed else "; ".join(missed) or "reached"
    outcome = "not reached" if len(missed) == len(aimed) == 1 and said[0] == "not reached" else outcome
    outcome += "".join(f", {number(row.seconds)} s" for row in aimed if row.seconds_aim is not None)
    return [*key, time, *ratios, memory(found[column]), wanted, outcome]


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, without the columns that are empty."""
    shown = [place for place in range(len(head)) if any(line[place] for line in body)]
    chosen = [[line[place] for place in shown] for line in [head, *body]]
    lines = ["| " + " | ".join(line) + " |" for line in chosen]
    return [lines[0], "|" + "---|" * len(shown), *lines[1:]]


def summary(record: Record) -> str:
    """How many aims were reached, and which were not."""
    rows = [row for section in record.sections.values() for row in section.rows]
    aimed = [row for row in rows if row.verdicts]
    missed = [row for row in aimed if verdict(row) != "reached"]
    if not aimed:
        return ""
    partial = ", ".join(TITLES.get(name, name) for name, section in record.sections.items() if section.missing)
    lines = [
        f"**Aims**: {len(aimed) - len(missed)} of {len(aimed)} reached" + (f"; partial: {partial}." if partial else ".")
    ]
    if missed:
        lines += ["", "Not reached:", "", *(f"- {sentence(row)}" for row in missed)]
    return "\n".join(lines)


def sentence(row: Row) -> str:
    what = f"{row.case}, {row.work}, {row.dtype}, {row.mode}: {row.subject} over {row.reference}"
    parts = [f"{row.ratio:.2f} (aim {number(row.aim)})"] if row.reached is False else []
    parts += [f"{number(row.seconds)} s (aim {row.seconds_aim:g} s)"] if row.seconds_reached is False else []
    parts += [f"peak memory {row.memory_ratio:.2f} (aim {row.memory_aim})"] if row.memory_reached is False else []
    return f"{what} {', '.join(parts)}"


def slopes(section: Section) -> str:
    """Time against batch and against channels, with the slopes."""
    lines = [f"**Where cost grows{doubt(section)}** ({conditions_line(section)})", ""]
    for axis in dict.fromkeys(fit["axis"] for fit in section.fits):
        chosen = [fit for fit in section.fits if fit["axis"] == axis]
        sizes = sorted({size for fit in chosen for size in fit["sizes"]})
        head = [f"{axis}, ms", "mode", *map(str, sizes), "slope"]
        lines += [*grid(head, [sloped(fit, sizes) for fit in chosen]), ""]
    lines += [f"- {note}" for note in remarks(section)]
    return "\n".join(lines).rstrip()


def sloped(fit: dict[str, Any], sizes: Sequence[int]) -> list[str]:
    """The cells of a line of times by size, with the slope."""
    times = dict(zip(fit["sizes"], fit["ms"], strict=True))
    cells = [number(times[size]) if size in times else "" for size in sizes]
    return [fit["subject"], fit["mode"], *cells, number(fit["slope"], 2)]

"""Benchmarks: bars of ratios over a reference beside what is aimed at, and times over sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperball.on_disk import is_number
from hyperball.report.charts import Chart, Series
from hyperball.report.files import clipped, flat, number_list
from hyperball.report.kinds import Bench, Part
from hyperball.report.page import Bar, Bars, Section
from hyperball.report.sections.lines import MOST_LINES, colors, first_of
from hyperball.report.tables import Cell, Table, family_of

MOST_BARS, MOST_FIGURES, MOST_ROWS = 40, 10, 1000
PLACES = ("case", "shape", "network", "model", "batch")  # what was measured, which groups bars
SUBJECTS = ("subject", "operator", "kernel", "variant")  # what a bar stands for
SHARED = ("work", "mode", "dtype", "how")  # under which conditions, which separates figures
DAY = len("2026-11-16")  # of a date and time
SIZES = ("batch", "n", "size", "length", "points", "elements", "channels", "width")


def bench_sections(records: Sequence[Bench]) -> list[Section]:
    """One section a record."""
    return [bench_section(record) for record in records]


def bench_section(record: Bench) -> Section:
    """Every part's first figure, then every part's second and so on, those with an aim before others."""
    ranked: list[tuple[int, bool, Bars | Chart]] = []
    cut = []
    for part in record.parts:
        bars, said = first_of(part_bars(part), MOST_FIGURES, f"figures of {part.name}")
        own: list[Bars | Chart] = [*bars, *fit_charts(part)]
        ranked += [(place, not has_aim(figure), figure) for place, figure in enumerate(own)]
        cut += [f"{said}; the table has all."] if said else []
    figures = [figure for _, _, figure in sorted(ranked, key=lambda entry: entry[:2])]
    held = record.parts[0].conditions
    device = record.conditions.get("device", held.get("device", ""))
    badges = [device, f"torch {held.get('torch', record.conditions.get('torch', '?'))}", dates(record)]
    tables = tuple(part_table(part) for part in record.parts)
    return Section(
        f"Benchmark: {record.name.removesuffix('.json')}", record.what, tables, tuple(figures),
        facts=tuple(facts_of(record)), remarks=(*record.notes, *cut), badges=tuple(text for text in badges if text),
        part="benchmarks",
    )  # fmt: skip


def has_aim(figure: Bars | Chart) -> bool:
    return isinstance(figure, Bars) and figure.goals


def facts_of(record: Bench) -> list[str]:
    """The conditions of a record and those that all its parts share, then what is told of single parts."""
    first = record.parts[0].conditions
    shared = {key: first[key] for key in first if all(part.conditions.get(key) == first[key] for part in record.parts)}
    facts = [f"{key.replace('_', ' ')}: {value}" for key, value in {**shared, **record.conditions}.items()]
    for part in record.parts:
        own = {key: value for key, value in part.conditions.items() if key not in shared}
        told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in own.items())
        facts += [f"{part.name}: {text}" for text in (told, *part.notes) if text]
    return facts


def dates(record: Bench) -> str:
    """The day that a benchmark was measured on, or the first and the last of several; "undated" where none is told."""
    held = [where.get("date", "")[:DAY] for where in (record.conditions, *(part.conditions for part in record.parts))]
    days = sorted(filter(None, held))
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "undated"


def part_bars(part: Part) -> list[Bars]:
    """Bars of ratios, a figure for every reference and set of conditions; those with an aim first."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in part.rows:
        if ratio_of(row) is not None:
            groups.setdefault(tuple(said(row, key) for key in ("reference", *SHARED)), []).append(row)
    found = []
    for key, rows in groups.items():
        conditions = ", ".join(text for text in key[1:] if text)
        found.append(ratio_bars(part.name, conditions, rows))
        remembered = [row for row in rows if is_number(row.get("memory_ratio"))]
        if remembered:
            swapped = [{**row, "ratio": row["memory_ratio"], "aim": row.get("memory_aim")} for row in remembered]
            found.append(ratio_bars(part.name, conditions, swapped, "Peak memory over"))
    return sorted(found, key=lambda bars: not bars.goals)


def said(row: Mapping[str, Any], key: str) -> str:
    """A field of a row as a text; nothing where there is none."""
    if not is_plain(row.get(key)):
        return ""
    return f"batch {row[key]}" if key == "batch" else clipped(row[key])


def ratio_of(row: Mapping[str, Any]) -> float | None:
    """The ratio that a row states, or that of a kernel to its floor."""
    if is_number(row.get("ratio")):
        return float(row["ratio"])
    if is_number(row.get("us")) and is_number(row.get("floor_us")) and row["floor_us"] > 0:
        return float(row["us"]) / float(row["floor_us"])
    return None


def is_speed(row: Mapping[str, Any]) -> bool:
    """Whether a ratio is one of throughputs, where more is better."""
    ours = row.get("ours")
    return isinstance(ours, dict) and "images_per_second" in ours


def aim_of(row: Mapping[str, Any]) -> float | None:
    """The aim that a row states."""
    return float(row["aim"]) if is_number(row.get("aim")) else None


def is_plain(value: Any) -> bool:
    return (isinstance(value, str) and bool(value)) or is_number(value)


def subject_of(row: Mapping[str, Any]) -> str:
    return next(filter(None, (said(row, key) for key in SUBJECTS)), "")


def place_of(row: Mapping[str, Any]) -> str:
    return ", ".join(text for key in PLACES if (text := said(row, key)))


def ratio_bars(part: str, conditions: str, rows: Sequence[dict[str, Any]], word: str = "Time over") -> Bars:
    """Bars of one reference under the same conditions, by what was measured."""
    subjects = list(dict.fromkeys(map(subject_of, rows)))
    color = dict(zip(subjects, colors(subjects), strict=True))
    order = {place: index for index, place in enumerate(dict.fromkeys(map(place_of, rows)))}
    shown = sorted(rows, key=lambda row: order[place_of(row)])[:MOST_BARS]
    bars = tuple(
        Bar(subject_of(row) or place_of(row), ratio, times(ratio), operator_of(row), tip(row),
            color[subject_of(row)], aim_of(row), place_of(row) if subject_of(row) else "", is_speed(row))
        for row in shown
        if (ratio := ratio_of(row)) is not None
    )  # fmt: skip
    over = "the floor" if "floor_us" in rows[0] else said(rows[0], "reference") or "plain"
    over = "the DataLoader loop" if is_speed(rows[0]) else over
    more = f"{len(shown)} of {len(rows)} bars, all in the table" if len(rows) > MOST_BARS else ""
    word = "Speed over" if is_speed(rows[0]) else word
    return Bars(
        f"{word} {over}" + (f": {part}" if part != "rows" else ""),
        bars,
        "; ".join(filter(None, (conditions, more))),
        1.0,
        over,
    )


def times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.2g}×"


def operator_of(row: Mapping[str, Any]) -> str:
    """The family of what was measured, where it is a known one."""
    keys = ("operator", "subject", "network", "kernel")
    return next(filter(None, (family_of(said(row, key)) for key in keys)), "")


def tip(row: Mapping[str, Any]) -> str:
    """Everything that a row says."""
    return "\n".join(
        f"{clipped(key).replace('.', ' ')} {clipped(value)}" for key, value in flat(row).items() if is_plain(value)
    )


def fit_charts(part: Part) -> list[Chart]:
    """Times over sizes, logarithmic, from a section's fits or from rows that differ in a size."""
    found: dict[tuple[str, str], list[Series]] = {}
    for fit in part.fits:
        points = tuple(zip(number_list(fit.get("sizes")), number_list(fit.get("ms"))))
        if len(points) > 1 and all(y > 0 for _, y in points):
            slope = f" (slope {fit['slope']:.2f})" if is_number(fit.get("slope")) else ""
            key = (clipped(fit.get("axis", "size")), clipped(fit.get("mode", "")))
            found.setdefault(key, []).append(Series(clipped(fit.get("subject", "")) + slope, points))
    if not found:
        found = size_series(part.rows)
    return [scaling_chart(part.name, axis, mode, series) for (axis, mode), series in found.items()]


def scaling_chart(part: str, axis: str, mode: str, series: Sequence[Series]) -> Chart:
    series, cut = first_of(series, MOST_LINES, "lines")
    chosen = colors([line.name for line in series])
    lines = tuple(
        Series(line.name, line.points, color, operator=operator_of({"subject": line.name}))
        for line, color in zip(series, chosen, strict=True)
    )
    title = f"Time over {axis}: {part}" + (f", {mode}" if mode else "")
    return Chart(title, axis, "ms", lines, " ms", cut, log=True, log_x=True)


def size_series(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[Series]]:
    """Lines over a size that takes at least three values while all else that names a row stays the same."""
    found: dict[tuple[str, str], list[Series]] = {}
    for axis in SIZES:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            time = next((row[key] for key in ("median_ms", "ms", "ours_ms") if is_number(row.get(key))), None)
            if is_number(row.get(axis)) and time is not None:
                lines.setdefault(name_without(row, axis), []).append((float(row[axis]), float(time)))
        kept = [
            Series(name, tuple(sorted(points))) for name, points in lines.items() if len({x for x, _ in points}) > 2
        ]
        if kept:
            found[axis, ""] = kept
    return found


def name_without(row: Mapping[str, Any], axis: str) -> str:
    """What names a row apart from a size."""
    keys = (*PLACES, *SUBJECTS, *SHARED, "reference")
    return " · ".join(text for key in keys if key != axis and (text := said(row, key))) or axis


def part_table(part: Part) -> Table:
    """Every row as it was measured, numbers of objects in it among them, behind a fold."""
    leaves = [flat(row) for row in part.rows]
    keys = list(dict.fromkeys(key for row in leaves for key, value in row.items() if is_plain(value)))
    words = [key for key in keys if any(isinstance(row.get(key), str) for row in leaves)]
    columns = [*words, *(key for key in keys if key not in words)]
    rows = tuple(tuple(value_cell(row.get(key)) for key in columns) for row in leaves[:MOST_ROWS])
    heads = tuple(clipped(key).replace("_", " ").replace(".", ", ") for key in columns)
    operators = tuple(operator_of(row) for row in part.rows[:MOST_ROWS])
    count = f"all {len(rows)} rows" if len(part.rows) <= MOST_ROWS else f"{len(rows):,} of {len(part.rows):,} rows"
    return Table(heads, rows, len(words), operators=operators, folded=f"{part.name}: {count}")


def value_cell(value: Any) -> Cell:
    if is_number(value):
        return Cell(f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}", sort=float(value))
    return Cell(clipped(value) if is_plain(value) else "–")

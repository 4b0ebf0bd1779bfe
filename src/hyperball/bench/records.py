"""What a benchmark leaves behind: rows with their spread, the conditions of their section, and verdicts, as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hyperball._version import __version__
from hyperball.files import write_bytes

SCHEMA = 1
MEMORY = {
    True: "peak of the allocator's count over what was allocated before",
    False: "peak of the allocations that torch's profiler lists, in a call that is not timed",
}
STATE = ("missing", "partial", "older")  # entries of conditions about the rows of the section, not about a run
BUSY = 0.5  # load average over cores from which a CPU's times are doubtful


@dataclass(frozen=True)
class Row:
    """A subject against a reference: times in ms (median, 20th and 80th percentile), ratio, memory, aim, verdict.

    `ratio` is subject / reference, the median over the rounds; `reached`, `memory_reached` and `seconds_reached`, which
    is about the subject's own time, are None where nothing is aimed at. `kept_maps` is what the backward keeps beside
    input and parameters, in activation maps. `date` is empty for a row that was measured under the conditions of its
    section, and else the date of those under its `earlier`.
    """

    section: str
    case: str
    work: str
    mode: str
    dtype: str
    subject: str
    reference: str
    median_ms: float
    p20_ms: float | None
    p80_ms: float | None
    reference_median_ms: float
    reference_p20_ms: float | None
    reference_p80_ms: float | None
    ratio: float
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    rounds: int | None = None
    threads: int | None = None
    peak_mib: float | None = None
    reference_peak_mib: float | None = None
    memory_ratio: float | None = None
    kept_maps: float | None = None
    aim: float | None = None
    reached: bool | None = None
    memory_aim: float | None = None
    memory_reached: bool | None = None
    seconds_aim: float | None = None
    seconds_reached: bool | None = None
    note: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What is measured: rows of the same key replace each other."""
        return self.case, self.work, self.mode, self.dtype, self.subject, self.reference

    @property
    def seconds(self) -> float:
        """The subject's time in seconds."""
        return self.median_ms / 1e3

    @property
    def verdicts(self) -> tuple[bool, ...]:
        """Whether each thing that is aimed at was reached."""
        held = (self.reached, self.seconds_reached, self.memory_reached)
        return tuple(value for value in held if value is not None)


NAMES = {entry.name for entry in fields(Row)}
NEEDED = {entry.name for entry in fields(Row)[:7]} | {"median_ms", "reference_median_ms", "ratio"}


@dataclass
class Section:
    """The rows of one section with the conditions of its last run; `notes` says what was left out and why.

    Rows that earlier runs left have a `date`, and `earlier` holds the conditions and notes of each such date. Where
    cases were not measured, `conditions` has them with the reasons under `missing`, and in words under `partial`; it
    counts the rows of each earlier date under `older`.
    """

    conditions: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, str]:
        """Cases that were to be measured and were not, with the reasons."""
        held: dict[str, str] = self.conditions.get("missing", {})
        return held


@dataclass
class Record:
    """All that was measured on one device, section by section."""

    device: str
    sections: dict[str, Section] = field(default_factory=dict)


def verdict(value: float | None, aim: float | None) -> bool | None:
    """value ≤ aim, or None where there is no aim or no value."""
    return None if value is None or aim is None else value <= aim


def slug(device: str) -> str:
    """A device's name as a file name: "NVIDIA GeForce RTX 4090" is rtx-4090."""
    text = re.sub(r"\((R|TM|tm)\)|@.*|\b(NVIDIA|GeForce|AMD|Intel|CPU|Processor|\d+-Core)\b", " ", device)
    short = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return short or "unknown"


def cpu_name() -> str:
    """The processor's own name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and slug(names[0]) != "unknown" else platform.machine()


def device_name(device: str) -> str:
    """The GPU's name, or "CPU" with the processor's."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"CPU {cpu_name()}"


def default_path(device: str, quick: bool = False) -> Path:
    """results/bench/<device>.json under the current folder; quick runs have a file of their own."""
    name = ("cpu-" if device == "cpu" else "") + slug(device_name(device)) + ("-quick" if quick else "")
    return Path("results") / "bench" / f"{name}.json"


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_average() -> float | None:
    """Processes that wanted a core in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def conditions(setting: Any, load: float | None) -> dict[str, Any]:
    """Versions, device, threads, the load before anything ran and how times were taken."""
    import torch

    cores = os.cpu_count() or 1
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(setting.device),
        "versions": {
            "hyperball": __version__, "torch": str(torch.__version__), "triton": version_of("triton"),
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if setting.on_gpu else None,
            "python": platform.python_version(), "bcos": version_of("bcos"),
        },
        "threads": torch.get_num_threads(), "cores": cores, "load_average": load,
        "busy": setting.device == "cpu" and load is not None and load > BUSY * cores,
        "quick": setting.quick, "rounds_at_most": setting.rounds,
        "statistic": "median with the 20th and 80th percentile over rounds in which subjects take turns",
        "data": "normal random numbers, channels_last; on a GPU tensors rotate beyond twice its cache",
        "memory": MEMORY[setting.on_gpu],
        "timer": "CUDA events" if setting.on_gpu else "clock; with one thread processor time",
    }  # fmt: skip


def as_json(record: Record) -> dict[str, Any]:
    held = {"schema": SCHEMA, **asdict(record)}
    for part in held["sections"].values():
        part["rows"] = [{name: value for name, value in row.items() if name != "date" or value} for row in part["rows"]]
        if not part["earlier"]:
            del part["earlier"]
    return held


def refuse_to_mix(path: Path, device: str, quick: bool) -> None:
    """Raise where a record at `path` is of another device, or quick where this one is not or the other way around."""
    if not path.exists():
        return
    held = read(path)
    parts = list(held.sections.values())
    devices = [held.device, *(part.conditions.get("device", held.device) for part in parts)]
    other = next((name for name in devices if name != device), None)
    if other is not None:
        raise ValueError(f"{path} holds times of {other}, and this is {device}: write to another file")
    if any(bool(part.conditions.get("quick")) != quick for part in parts):
        kinds = ("a full record", "--quick") if quick else ("times of --quick", "a full record")
        raise ValueError(f"{path} holds {kinds[0]}, and {kinds[1]} must not be mixed into it: write to another file")


def joined(earlier: Record, later: Record) -> Record:
    """The sections of both, the later ones in the place of earlier ones; nothing replaces rows by none."""
    if earlier.device != later.device:
        raise ValueError(f"times of {later.device} cannot be joined with those of {earlier.device}")
    empty = Section({})
    kept = {name for name, part in later.sections.items() if not part.rows and earlier.sections.get(name, empty).rows}
    return Record(
        later.device, {**earlier.sections, **{name: part for name, part in later.sections.items() if name not in kept}}
    )


def merged(before: Section | None, later: Section) -> Section:
    """The later section, and with their date and conditions the earlier rows whose like it does not have."""
    if before is None:
        return replace(later)
    date = str(before.conditions.get("date", "unknown date"))
    past = {key: value for key, value in before.conditions.items() if key not in STATE}
    known = {**before.earlier, date: {**past, "notes": list(before.notes)}}
    old = {row.key: replace(row, date=row.date or date) for row in before.rows}
    rows = list({**old, **{row.key: row for row in later.rows}}.values())
    counts = Counter(row.date for row in rows if row.date)
    older = {"older": ", ".join(f"{count} rows of {date}" for date, count in counts.items())} if counts else {}
    earlier = {date: held for date, held in known.items() if date in counts}
    return replace(later, conditions={**later.conditions, **older}, rows=rows, earlier=earlier)


def marked(section: Section, missing: Mapping[str, str], cases: int) -> Section:
    """The section with what is missing of so many cases in its conditions."""
    held = {key: value for key, value in section.conditions.items() if key not in ("missing", "partial")}
    if missing:
        held |= {"partial": missing_text(missing, cases), "missing": dict(missing)}
    return replace(section, conditions=held)


def missing_text(missing: Mapping[str, str], cases: int) -> str:
    """ "7 of 8 cases; not measured (interrupted by SIGINT): resnet18, batch 128, training step, bf16"."""
    parts = [f"not measured ({why}): {'; '.join(labels)}" for why, labels in by_reason(missing).items()]
    return "; ".join([f"{cases - len(missing)} of {cases} cases", *parts])


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """What has the same reason, under it."""
    found: dict[str, list[str]] = {}
    for label, why in reasons.items():
        found.setdefault(why, []).append(label)
    return found


def first_of_each(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason: the first that has it and the number of the others."""
    return [
        f"{labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''}: {why}"
        for why, labels in by_reason(reasons).items()
    ]


def write(record: Record, path: Path) -> None:
    """Write a record; sections of an earlier file about the same device stay where they are not measured again."""
    merged = joined(read(path), record) if path.exists() else record
    write_bytes(path, (json.dumps(as_json(merged), indent=1, ensure_ascii=False) + "\n").encode())


def read(path: Path) -> Record:
    """The record in a file; a file that is none is refused with what is wrong about it."""
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} holds no JSON: {error}") from None
    if not isinstance(held, dict) or held.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no record of `hyperball bench` (schema {SCHEMA})")
    parts = [held.get("sections"), held.get("partial", {})]
    if not isinstance(held.get("device"), str) or not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} must hold `device` and `sections`")
    sections, begun = ({name: section(name, given, path) for name, given in part.items()} for part in parts)
    for name, part in begun.items():
        part.conditions |= {"partial": "not measured to its end", "missing": {"the other cases": "interrupted"}}
        sections[name] = merged(sections.get(name), part)
    return Record(held["device"], sections)


def section(name: str, held: Any, path: Path) -> Section:
    """One section of a record that was read."""
    kinds = {"conditions": dict, "rows": list}
    if not isinstance(held, dict) or not all(isinstance(held.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"{path}: section {name} must hold `conditions` and `rows`")
    rows = [row(given, f"{path}: {name}, row {index}") for index, given in enumerate(held["rows"])]
    earlier = dict(held.get("earlier", {}))
    undated = sorted({entry.date for entry in rows if entry.date} - set(earlier))
    if undated:
        raise ValueError(f"{path}: section {name} has rows of {undated[0]}, and `earlier` no conditions of that date")
    notes, fits = list(held.get("notes", ())), list(held.get("fits", ()))
    return Section(dict(held["conditions"]), rows, notes, fits, earlier)


def row(held: Mapping[str, Any], where: str) -> Row:
    missing, unknown = sorted(NEEDED - set(held)), sorted(set(held) - NAMES)
    if missing or unknown:
        raise ValueError(f"{where}: {'missing ' + missing[0] if missing else 'unknown field ' + unknown[0]}")
    if verdict(held["ratio"], held.get("aim")) != held.get("reached"):
        raise ValueError(f"{where}: `reached` is not what ratio {held['ratio']} and aim {held.get('aim')} say")
    if verdict(held["median_ms"] / 1e3, held.get("seconds_aim")) != held.get("seconds_reached"):
        told = f"{held['median_ms'] / 1e3:g} s and aim {held.get('seconds_aim')}"
        raise ValueError(f"{where}: `seconds_reached` is not what {told} say")
    spreads = dict.fromkeys(("p20_ms", "p80_ms", "reference_p20_ms", "reference_p80_ms"))
    return Row(**{**spreads, **held})

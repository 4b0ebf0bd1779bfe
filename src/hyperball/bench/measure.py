"""From a case to its rows: build the subjects, read their peak memory, take turns, compare."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hyperball.bench import memory, timing
from hyperball.bench.case import Case, Make, Setting, surroundings
from hyperball.bench.records import Row, verdict
from hyperball.bench.timing import Spread, Step, Times

LONGEST = 160  # characters of a reason that is told
LAUNCHED = 10.0  # milliseconds of steps in a row that Python launches, so that it runs ahead as in a training loop


@dataclass
class Built:
    """The subjects of a case that could be built: steps, peak memory and maps kept; `failed` says what could not."""

    steps: dict[str, list[Step]] = field(default_factory=dict)
    peak: dict[str, float | None] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def sets_of(case: Case, setting: Setting) -> int:
    return timing.sets_over_cache(case.bytes_each, timing.cache_bytes(setting.device))


def build(case: Case, setting: Setting) -> Built:
    """Build every subject; one that fails is left out and named."""
    built, sets = Built(), sets_of(case, setting)
    for name, make in case.subjects.items():
        try:
            steps = made(name, make, sets, built, setting.device)
            for _ in range(1 if setting.quick else timing.WARMUP):
                steps[0]()
            built.steps[name] = steps
            if name in case.kept:
                built.kept[name] = case.kept[name]()
            if name in case.notes:
                built.notes[name] = case.notes[name]()
        except Exception as error:
            built.failed.append(f"{case.name}, {case.dtype}, {name}: {reason(error)}")
    return built


def made(name: str, make: Make, sets: int, built: Built, device: str) -> list[Step]:
    """A subject's steps, after its peak memory was read with one set of tensors."""
    step, built.peak[name] = memory.with_peak(lambda: make(1)[0], device)
    if sets == 1:
        return [step]
    del step
    return make(sets)


def reason(error: BaseException) -> str:
    """An error's type and the first line of its message, cut where it is long: out of memory, CUDA lists processes."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {shortened(line)}".removesuffix(": ")


def shortened(line: str) -> str:
    """A line of at most so many characters, cut between words."""
    return line if len(line) <= LONGEST else line[:LONGEST].rpartition(" ")[0] + " …"


def warm(case: Case) -> None:
    """One call of every subject, so that kernels are compiled and on disk."""
    with surroundings(case):
        for make in case.subjects.values():
            make(1)[0]()
        torch.cuda.synchronize()


def times_of(case: Case, mode: str, built: Built, setting: Setting) -> Times:
    """Milliseconds a step, each subject's over alternating rounds."""
    timer = timing.event_ms if setting.on_gpu else timing.cpu_ms if torch.get_num_threads() == 1 else timing.clock_ms
    calls: dict[str, Step] = {}
    counts: dict[str, int] = {}
    together = LAUNCHED if setting.on_gpu and mode == "eager" else 1.0
    for name, steps in built.steps.items():
        steps[0]()
        counts[name] = max(len(steps), timing.enough(timer(steps[0]), together))
        call = timing.repeated(steps, counts[name])
        try:
            calls[name] = timing.captured(call) if mode == "graph" else call
        except Exception as error:
            built.failed.append(f"{case.name}, {case.dtype}, {name}, not captured: {reason(error)}")
            torch.cuda.synchronize()
    for call in calls.values():
        call()
    found = timing.in_turn(calls, setting.rounds, setting.seconds, timer)
    return {name: [value / counts[name] for value in values] for name, values in found.items()}


def measure(case: Case, setting: Setting) -> tuple[list[Row], list[str]]:
    """The rows of a case, and what failed."""
    with surroundings(case):
        threads = torch.get_num_threads()
        built = build(case, setting)
        rows: list[Row] = []
        for mode in case.modes if built.steps else ():
            times = times_of(case, mode, built, setting)
            rows += rows_of(case, mode, times, built, None if setting.on_gpu else threads)
    failed = built.failed
    del built
    clean(setting)
    return rows, failed


def clean(setting: Setting) -> None:
    """Give back what a case held."""
    gc.collect()
    if setting.on_gpu:
        torch.compiler.reset()
        torch.cuda.empty_cache()


def rows_of(case: Case, mode: str, times: Times, built: Built, threads: int | None) -> list[Row]:
    """One row for every pair of which both sides were timed."""
    pairs = [(ours, reference) for ours, reference in case.compared if ours in times and reference in times]
    return [compare(case, mode, pair, times, built, threads) for pair in pairs]


def compare(
    case: Case, mode: str, pair: tuple[str, str], times: Mapping[str, list[float]], built: Built, threads: int | None
) -> Row:
    subject, reference = pair
    ours, theirs = timing.spread(times[subject]), timing.spread(times[reference])
    ratio, aim = timing.ratios(times[subject], times[reference]), case.aim(subject, reference, mode)
    peaks = built.peak.get(subject), built.peak.get(reference)
    over = round(peaks[0] / peaks[1], 3) if peaks[0] and peaks[1] else None
    ratio = Spread(*(round(value, 4) for value in (ratio.median, ratio.p20, ratio.p80)))
    return Row(
        case.section, case.name, case.work, mode, case.dtype, subject, reference,
        round(ours.median, 5), round(ours.p20, 5), round(ours.p80, 5),
        round(theirs.median, 5), round(theirs.p20, 5), round(theirs.p80, 5), ratio.median, ratio.p20, ratio.p80,
        rounds=len(times[subject]), threads=threads, peak_mib=rounded(peaks[0], 1),
        reference_peak_mib=rounded(peaks[1], 1), memory_ratio=over, kept_maps=rounded(built.kept.get(subject), 3),
        aim=aim.time, reached=verdict(ratio.median, aim.time),
        memory_aim=aim.memory, memory_reached=verdict(over, aim.memory), seconds_aim=aim.seconds,
        seconds_reached=verdict(round(ours.median, 5) / 1e3, aim.seconds), note=built.notes.get(subject, ""),
    )  # fmt: skip


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)

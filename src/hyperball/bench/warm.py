"""Compile every kernel before anything is timed: in several processes, whose caches on disk the timing one reads.

A process is given DEVICE DTYPE SECTION:INDEX …, and calls those cases once.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from hyperball.bench.case import Case, Setting

ALONE = ("train", "inference")  # sections with cases so long that each gets a process of its own
PROGRAM = "import sys; from hyperball.bench.warm import main; sys.exit(main(sys.argv[1:]))"
LIMIT = 90.0  # seconds; what is not compiled by then is compiled by the timing process


def section_cases(name: str, setting: Setting) -> list[Case]:
    made: list[Case] = importlib.import_module(f"hyperball.bench.sections.{name}").cases(setting)
    return made


def groups(sections: Sequence[str], setting: Setting, processes: int) -> list[list[str]]:
    """Labels of cases for each process, long ones alone and first; FGSM steps and PGD have no kernels of their own."""
    alone: list[list[str]] = []
    rest: list[str] = []
    for name in sections:
        for index, case in enumerate(section_cases(name, setting)):
            if case.work.startswith(("FGSM", "PGD")) or (name == "conv" and case.work == "forward"):
                continue
            if name in ALONE:
                alone.append([f"{name}:{index}"])
            else:
                rest.append(f"{name}:{index}")
    count = max(1, min(processes - len(alone), len(rest)))
    return alone + [rest[start::count] for start in range(count) if rest[start::count]]


def start(sections: Sequence[str], setting: Setting) -> list[subprocess.Popen[bytes]]:
    """Start the processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM, setting.device, setting.dtype or "-"]
    made = groups(sections, setting, os.cpu_count() or 1)
    return [subprocess.Popen([*command, *labels], env=environment, stdout=subprocess.DEVNULL) for labels in made]


def finish(processes: Sequence[subprocess.Popen[bytes]], say: Callable[[str], None]) -> None:
    """Wait for the processes; those that take longer than the limit are ended."""
    until = time.monotonic() + LIMIT
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    failed = sum(process.returncode != 0 for process in processes)
    say(f"kernels compiled in {len(processes)} processes" + (f", {failed} of which failed" if failed else ""))


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that were started."""
    for process in processes:
        process.terminate()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Call the cases of the labels once."""
    from hyperball.bench.measure import warm

    device, dtype, *labels = arguments
    setting = Setting(device, None if dtype == "-" else dtype)
    failures = 0
    for label in labels:
        name, _, index = label.partition(":")
        try:
            warm(section_cases(name, setting)[int(index)])
        except Exception as error:  # the timing process meets it again and says so
            failures += 1
            print(f"{label}: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
    return 1 if failures else 0

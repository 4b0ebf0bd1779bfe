"""Compile every kernel before anything is timed: in several processes, whose caches on disk the timing one reads.

A process is given DEVICE DTYPE SECTION:INDEX …, calls those cases once, and writes a line for each: its label, and why
where it failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hyperball.bench.case import Setting
from hyperball.bench.choice import Plan, planned, section_cases
from hyperball.bench.records import first_of_each

ALONE = ("train", "inference")  # sections with cases so long that each gets a process of its own
PROGRAM = "import sys; from hyperball.bench.warm import main; sys.exit(main(sys.argv[1:]))"
PATIENCE = 5.0  # seconds that a process has to end
LIMIT = 90.0  # seconds; what is not compiled by then is compiled by the timing process
DONE, FAILED = "done", "failed"


@dataclass
class Compiler:
    """A process, the cases that it calls by their labels SECTION:INDEX, and what it says."""

    process: subprocess.Popen[bytes]
    cases: dict[str, str]
    output: IO[bytes]
    errors: IO[bytes]
    late: bool = False

    def failures(self) -> dict[str, str]:
        """Cases that it did not call to their end, with the reasons."""
        lines = [line.split("\t", 2) for line in text_of(self.output).splitlines() if "\t" in line]
        told = {line[1]: "\t".join(line[2:]) for line in lines if line[0] in (DONE, FAILED)}
        called = {line[1] for line in lines if line[0] == DONE}
        return {case: told.get(place) or self.end() for place, case in self.cases.items() if place not in called}

    def end(self) -> str:
        """Why the process ended before its work did."""
        from hyperball.bench.measure import shortened

        if self.late:
            return f"not within {LIMIT:g} s"
        if self.process.returncode < 0:
            return f"ended by {signal.Signals(-self.process.returncode).name}"
        said = [line for line in text_of(self.errors).splitlines() if line.strip()]
        return shortened(said[-1]) if said else f"exit code {self.process.returncode}"


def text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def groups(plans: Mapping[str, Plan], processes: int) -> list[dict[str, str]]:
    """Cases for each process, SECTION:INDEX and in words, long ones alone and first.

    FGSM steps, PGD and forward passes have no kernels of their own.
    """
    alone: list[dict[str, str]] = []
    rest: list[tuple[str, str]] = []
    for name, plan in plans.items():
        for index, (entry, case) in enumerate(plan.cases.items()):
            kernels = not case.work.startswith(("FGSM", "PGD")) and not (name == "conv" and case.work == "forward")
            if entry in plan.chosen and kernels:
                place = (f"{name}:{index}", f"{name}, {entry}")
                alone += [dict([place])] if name in ALONE else []
                rest += [] if name in ALONE else [place]
    count = max(1, min(processes - len(alone), len(rest)))
    return alone + [dict(rest[start::count]) for start in range(count) if rest[start::count]]


def start(plans: Mapping[str, Plan] | Sequence[str], setting: Setting) -> list[Compiler]:
    """Start the processes for the chosen cases, or for all of the sections named."""
    plans = plans if isinstance(plans, Mapping) else planned(plans, setting)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM, setting.device, setting.dtype or "-"]
    return [started([*command, *cases], cases, environment) for cases in groups(plans, os.cpu_count() or 1)]


def started(command: list[str], cases: dict[str, str], environment: Mapping[str, str]) -> Compiler:
    output, errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 pipes would fill while nobody reads
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    return Compiler(process, cases, output, errors)


def finish(compilers: Sequence[Compiler], say: Callable[[str], None]) -> None:
    """Wait for the processes, end those that take longer than the limit, and tell of each case that failed and why."""
    until = time.monotonic() + LIMIT
    for compiler in compilers:
        try:
            compiler.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            compiler.late = True
            ended(compiler.process)
    failures = {case: why for compiler in compilers for case, why in compiler.failures().items()}
    cases = sum(len(compiler.cases) for compiler in compilers)
    say(f"kernels of {cases - len(failures)} of {cases} cases compiled in {len(compilers)} processes")
    for line in first_of_each(failures):
        say(f"not compiled ahead: {line}")


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force where it does not listen."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stop(compilers: Sequence[Compiler]) -> None:
    """End the processes that still run, and forget what they said."""
    for compiler in compilers:
        if compiler.process.poll() is None:
            compiler.process.terminate()
    for compiler in compilers:
        ended(compiler.process)
        compiler.output.close()
        compiler.errors.close()


def main(arguments: Sequence[str]) -> int:
    """Call the cases of the labels once."""
    from hyperball.bench.measure import reason, warm

    device, dtype, *places = arguments
    setting = Setting(device, None if dtype == "-" else dtype)
    failures = 0
    for place in places:
        name, _, index = place.partition(":")
        try:
            warm(section_cases(name, setting)[int(index)])
            print(DONE, place, sep="\t", flush=True)
        except Exception as error:  # the timing process meets it again and says so
            failures += 1
            print(FAILED, place, reason(error), sep="\t", flush=True)
    return 1 if failures else 0

"""`attack`: the robustness of a run, with doubts."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hyperball._signals import terminable
from hyperball.attacks import (
    Attack,
    Curve,
    RecordError,
    Robustness,
    names,
    parse,
)
from hyperball.attacks.bench import check_attack, make_bench
from hyperball.attacks.methods.table import parse_all
from hyperball.cli.parsing import UsageError, parser
from hyperball.cli.progress import SECONDS
from hyperball.data import corruptions
from hyperball.experiments.attacking import Subject, Sweep, curve_path, load, record_path, run_attacks, run_curve
from hyperball.rows import nearest

CORRUPTION = "corruption:"


def read_sweep(text: str) -> Sweep:
    """An attack, or the name of a corruption, which "corruption:" before it tells from an attack of that name.

    >>> read_sweep("bim"), read_sweep("blur"), read_sweep("corruption:noise")
    (BIM(steps=10, step=None), 'blur', 'noise')
    """
    marked, name = text.startswith(CORRUPTION), text.removeprefix(CORRUPTION)
    if marked and name not in corruptions.names():
        raise ValueError(f"unknown corruption {name!r}; {nearest(name, corruptions.names())}")
    if marked or (name in corruptions.names() and name not in names()):
        return name
    if name.isidentifier() and name not in names():
        raise ValueError(f"unknown attack or corruption {name!r}; {nearest(name, (*names(), *corruptions.names()))}")
    return parse(text)


def attack(given: Sequence[str]) -> int:
    """`hyperball attack RUN --eps 8/255 --attacks fgsm,bim,pgd,auto`."""
    own = read(given)
    check(own)
    sweep = None if own.curve is None else read_sweep(own.curve)
    common = {"batch_size": own.batch_size, "seed": own.seed, "resume": not own.fresh}
    with terminable(), shown(own.run) as progress, remedies():
        subject = load(own.run, own.images, own.data_root, own.accelerator, own.source)
        path = record_path(subject, own.eps, own.norm, own.seed) if own.out is None else Path(own.out)
        if isinstance(sweep, Attack):  # refused before any attack has run
            check_sweep(subject, sweep, own.norm)
        found = run_attacks(
            subject, path, own.eps, own.attacks,
            norm=own.norm, checks=not own.no_checks, progress=progress, **common,
        )  # fmt: skip
        curve = target = None
        if sweep is not None:
            target = curve_path(path, sweep)
            curve = run_curve(subject, target, sweep, own.norm, progress=progress, **common)
    say(found, curve, path, target, own.json)
    return 0


def check(own: Any) -> None:
    """Refuse attacks that are none, a record without a name, and a GPU that is not there."""
    for option, text, reader in (("--attacks", own.attacks, parse_all), ("--curve", own.curve, read_sweep)):
        try:
            _ = None if text is None else reader(text)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{option}: {error}") from None
    if own.out is not None and not Path(own.out).name:
        raise UsageError(f"--out must be the name of a file, got {own.out!r}")
    if own.accelerator == "cuda" and not torch.cuda.is_available():
        raise UsageError("--accelerator must be cpu or auto where torch finds no GPU, got cuda")


def check_sweep(subject: Subject, sweep: Attack, norm: str) -> None:
    """Refuse a curve whose attack lacks something."""
    inputs, labels = subject.inputs[:2], subject.labels[:2]
    check_attack(make_bench(subject.model, inputs, labels, epsilon=0.0, norm=norm, source=subject.source), sweep)


@contextmanager
def remedies() -> Iterator[None]:
    """What helps against a record of another evaluation, as options of the command line."""
    try:
        yield
    except RecordError as error:
        text = str(error).replace("write elsewhere", "write elsewhere with --out")
        raise RecordError(re.sub(r"pass resume=False( \(--fresh\))?", "give --fresh", text)) from None


def read(given: Sequence[str]) -> Any:
    """The options."""
    options = parser("attack")
    options.add_argument("run", metavar="RUN", help="the folder of the run")
    options.add_argument(
        "--eps", default="8/255", help="the budget for pixels in [0, 1]: 8/255 or 0.03 (default: 8/255)"
    )
    text = 'such as fgsm,bim,"pgd(steps=50, restarts=5)",auto (default: fgsm,bim,pgd)'
    options.add_argument("--attacks", default="fgsm,bim,pgd", help=text)
    options.add_argument("--norm", default="linf", choices=("linf", "l2"), help="(default: linf)")
    options.add_argument("--images", type=int, metavar="N", help="that many test images (default: all)")
    options.add_argument("--batch-size", type=int, metavar="N", help="(default: 256, more on a GPU)")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    options.add_argument("--source", metavar="RUN", help="the run of an undefended network, for transfer attacks")
    damages = ", ".join(name for name in corruptions.names() if name not in names())
    text = (
        "also accuracy under that attack, from 0 to 128/255, or in L2 to 8; or under a corruption, severities 0 to 5: "
        f"{damages}, corruption:noise"
    )
    options.add_argument("--curve", metavar="ATTACK", help=text)
    options.add_argument("--no-checks", action="store_true", help="leave the masking checks out")
    options.add_argument("--fresh", action="store_true", help="begin anew where there is a record already")
    options.add_argument("--out", metavar="FILE", help="the record (default: RUN/attacks/ and a name)")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    options.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    return options.parse_args(given)


def say(found: Robustness, curve: Curve | None, path: Path, target: Path | None, as_json: bool) -> None:
    if as_json:
        numbers = {entry["attack"]: entry["accuracy"] for entry in found.record["attacks"]}
        brief: dict[str, Any] = {"record": str(path), "clean": found.clean_accuracy, "attacks": numbers}
        brief |= {"worst_case": found.worst_case, "doubts": found.doubts}
        print(json.dumps(brief | ({"curve": curve.to_dict(), "curve_record": str(target)} if curve else {})))
        return
    print(found.table())
    if curve is not None:
        print("\n".join(curve_lines(curve)))
    print(f"record: {path}")
    if curve is not None:
        print(f"curve: {target}")


def curve_lines(curve: Curve) -> Iterator[str]:
    """The curve as lines of text, its doubts below."""
    over = curve.over == "epsilon"
    yield f"accuracy under {curve.conditions['attack']} by epsilon" if over else f"accuracy by severity of {curve.over}"
    for value, accuracy in zip(curve.values, curve.accuracies):
        mark = f"{value:6.3f}" if over else f"{value:6.0f}"
        if over and curve.conditions["norm"] == "linf":
            mark = f"{255 * value:5.1f}/255"
        yield f"  {mark}  {100 * accuracy:5.1f} %"
    yield from (f"  - {doubt}" for doubt in curve.doubts)


@contextmanager
def shown(run: str) -> Iterator[Callable[[str, int, int], None]]:
    """A line that is written over on a terminal, one every few seconds elsewhere; an interruption says how to go on."""
    live, spoken = sys.stderr.isatty(), 0.0

    def progress(text: str, done: int, total: int) -> None:
        nonlocal spoken
        if done < total and time.monotonic() - spoken < (0.1 if live else SECONDS):
            return
        if live or time.monotonic() - spoken >= SECONDS:
            spoken = time.monotonic()
            line = f"{text}: {bar(done, total) if live else ''}{done}/{total} batches"
            print(line, end="\x1b[K\r" if live else "\n", file=sys.stderr, flush=True)

    try:
        yield progress
    except KeyboardInterrupt:
        print(f"\nwhat is done is kept; give the same command again to go on with {run}", file=sys.stderr)
        raise
    finally:
        if live:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


def bar(done: int, total: int, width: int = 24) -> str:
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{' ' * (width - filled)}] "

"""`bench`: time the layers against torch's own in one run, after checking their numbers."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from hyperball._errors import Terminated
from hyperball.cli.documents import read_document
from hyperball.cli.parsing import UsageError, choose, parser

SECTIONS = ("conv", "train", "pool", "projection", "inference", "scaling")
ALIASES = {"decoupled": "conv", "pooling": "pool"}
SOON = 2.0  # seconds
DTYPES = ("fp32", "tf32", "bf16", "fp16")


def bench(given: Sequence[str]) -> int:
    """`hyperball bench [SECTION …] [OPTIONS]`."""
    own = parse(given)
    if own.markdown is not None:
        from hyperball.bench import read
        from hyperball.bench.table import markdown, put

        text = markdown(read(own.markdown))
        if own.into is None:
            print(text)
        else:
            document = read_document(own.into)
            document.replace(put(text, own.markdown.as_posix(), document.text))
        return 0
    return measure(chosen(own.sections), own)


def parse(given: Sequence[str]) -> argparse.Namespace:
    options = parser("bench")
    options.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} or all (the default)")
    options.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, unless said")
    options.add_argument("--dtype", choices=DTYPES, help="one dtype for all; each section has its own without it")
    options.add_argument("--quick", action="store_true", help="fewer shapes and rounds: a minute on a CPU")
    options.add_argument("--out", type=Path, metavar="FILE", help="the record; results/bench/<device>.json without it")
    options.add_argument(
        "--cases", action="append", default=[], metavar="TEXT",
        help="measure only cases that hold the text in their line of progress, as 'cnn9, batch 128' or PGD; may be "
        "given several times. Other rows of the record stay, with their date",
    )  # fmt: skip
    options.add_argument("--no-tests", action="store_true", help="leave the checkout's tests out; the self-check stays")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="print a record as Markdown and measure nothing")
    options.add_argument("--into", type=Path, metavar="DOC", help="put --markdown's text between a document's markers")
    own = options.parse_args(given)
    if own.into is not None and own.markdown is None:
        raise UsageError("--into needs --markdown FILE")
    if own.markdown is not None:
        check_nothing_else(own)
    if not all(text.strip() for text in own.cases):
        raise UsageError("--cases needs a text that a case holds, as PGD, got an empty one")
    return own


def check_nothing_else(own: argparse.Namespace) -> None:
    """Refuse what only a measurement has a use for."""
    for name, given in vars(own).items():
        if name not in ("markdown", "into", "debug") and given:
            said = " ".join(given) if name == "sections" else f"--{name.replace('_', '-')}"
            raise UsageError(f"--markdown measures nothing: it takes no {said}")


def chosen(names: Sequence[str]) -> list[str]:
    """The sections of names and aliases, each once; all of them for "all" or for no name."""
    for name in names:
        choose("section", name, (*SECTIONS, "all", *ALIASES))
    if not names or "all" in names:
        return list(SECTIONS)
    return list(dict.fromkeys(ALIASES.get(name, name) for name in names))


def check_target(path: Path, asked: bool) -> None:
    """Raise before anything is timed where the record could not be written."""
    if path.is_dir():
        raise UsageError(f"--out must be a file, got the folder {path}")
    if asked and not path.parent.is_dir():
        raise UsageError(f"--out must be in a folder that is there, got {path}")


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the block as `KeyboardInterrupt` and `Terminated`.

    One that comes soon after another is passed over, so that what was measured is written and printed in peace:
    `timeout` signals a process and then its group, to which it belongs.
    """
    last = -math.inf

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > SOON:
            last = time.monotonic()
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    inside = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGINT, signal.SIGTERM] if inside else []  # other threads may not set handlers
    heard = {number: signal.getsignal(number) for number in numbers}
    heard = {number: handler for number, handler in heard.items() if handler is not signal.SIG_IGN}
    try:
        for number in heard:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def measure(sections: list[str], own: argparse.Namespace) -> int:
    import torch

    there = torch.cuda.is_available()
    if own.device == "cuda" and not there:
        raise UsageError("--device cuda needs a CUDA device, and torch finds none")
    device = own.device or ("cuda" if there else "cpu")
    if device == "cpu" and own.dtype == "tf32":
        raise UsageError("--dtype tf32 needs a CUDA device: it is a mode of a GPU's matrix units")
    from hyperball.bench import Setting, run
    from hyperball.bench.checks import CheckFailed
    from hyperball.bench.records import default_path
    from hyperball.bench.run import CasesFailed

    path = own.out or default_path(device, own.quick)
    check_target(path, own.out is not None)
    try:
        with signals():
            setting = Setting(device, own.dtype, own.quick)
            run(sections, setting, path, not own.no_tests, cases=own.cases, debug=own.debug)
    except (CheckFailed, CasesFailed) as failure:
        print(f"hyperball bench: {failure}", file=sys.stderr)
        return 1
    return 0

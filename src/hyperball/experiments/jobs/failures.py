"""Cells that failed: why, in one line of their logs, and who is tried again as the device's memory was full."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 160  # characters of another library's error in one line
TAIL = 16_000  # bytes of a log that are looked at
TRIES = 2  # more, of a cell for which there was no memory beside others
FULL = re.compile(
    r"OutOfMemoryError|(CUDA|HIP)\b.{0,20}out of memory|(CUBLAS|CUDNN)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
)
TRACEBACK = "Traceback (most recent call last):"
NAMED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b(: |$)")  # an error's name, behind a traceback
SENTENCE = re.compile(r"(?<=\w\w[.!?])\s+(?=[A-Z])")


def first_sentence(text: str, longest: int = LONGEST) -> str:
    """A text up to the end of its first sentence; whole words of one that is longer."""
    sentence = SENTENCE.split(text, maxsplit=1)[0]
    return sentence if len(sentence) <= longest else f"{sentence[: longest - 2].rpartition(' ')[0] or sentence[:99]} …"


def length_of(path: Path) -> int:
    """The bytes of a log; none where there is no log."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def lines_of(path: Path, since: int = 0) -> list[str]:
    """The last lines that say something of a log, behind its first `since` bytes."""
    try:
        text = path.read_bytes()[since:][-TAIL:].decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def last_words(lines: Sequence[str]) -> str:
    """Why a process ended: the line with which its last traceback names the error, or the last line of all.

    Errors of CUDA have further lines of advice behind that one.
    """
    beyond = next((at for at in range(len(lines), 0, -1) if lines[at - 1] == TRACEBACK), len(lines))
    return next((line for line in lines[beyond:] if NAMED.match(line)), lines[-1] if lines else "")


def out_of_memory(lines: Sequence[str]) -> str:
    """The last of some lines which says that a device had no memory left, or nothing."""
    return next((line for line in reversed(lines) if FULL.search(line)), "")


def write_down(path: Path, error: BaseException) -> None:
    """Add an error to a log, whole, where it can be written."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
        log.writelines(traceback.format_exception(error))


@dataclass
class Room:
    """How many cells run side by side: `count`, and fewer after one of them found no memory beside the others.

    `beside` holds the most that ran beside each, `most` how many may beside one that is tried again.
    """

    count: int
    beside: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)

    def has_place(self, name: str, running: Sequence[str]) -> bool:
        """Whether a cell may begin beside those that run."""
        limits = [self.most[other] + 1 for other in (name, *running) if other in self.most]
        return len(running) < min([self.count, *limits])

    def begin(self, name: str, running: Sequence[str]) -> None:
        """Note who runs beside whom."""
        self.beside[name] = 0
        for each in (name, *running):
            self.beside[each] = max(self.beside.get(each, 0), len(running))

    def again(self, name: str, left: int) -> bool:
        """Whether a cell for which there was no memory is tried again, beside half as many at most; at last alone.

        Others begin only while no more run than were `left`, or than it will run with.
        """
        beside, tries = self.beside.get(name, 0), self.tries.get(name, 0)
        if not beside or tries == TRIES:
            return False
        fewer = beside // 2
        self.tries[name], self.most[name] = tries + 1, fewer if tries + 1 < TRIES else 0
        self.count = min(self.count, max(left, fewer + 1))
        return True

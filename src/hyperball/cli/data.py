"""`data`: prepare and verify a set."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hyperball._signals import terminable
from hyperball.cli.parsing import parser
from hyperball.cli.progress import SECONDS


class Downloads:
    """A line every few seconds about the bytes that arrive."""

    def __init__(self) -> None:
        self.spoken = 0.0

    def __call__(self, name: str, received: int, total: int | None) -> None:
        done = total is not None and received >= total
        if done or time.monotonic() - self.spoken >= SECONDS:
            self.spoken = time.monotonic()
            share = f" of {total / 1e6:,.1f}" if total else ""
            print(f"{name}: {received / 1e6:,.1f}{share} MB", file=sys.stderr, flush=True)


def data(given: Sequence[str]) -> int:
    """`hyperball data NAME`."""
    options = parser("data")
    options.add_argument("name", metavar="NAME", help="one of `hyperball list data`")
    options.add_argument(
        "--root", "--data-root", metavar="FOLDER", help="the folder of the sets (default: HYPERBALL_DATA)"
    )
    options.add_argument("--download", action="store_true", help="bring the official files where they are not there")
    own = options.parse_args(given)
    from hyperball.data import prepare

    with terminable():
        print(prepare(own.name, own.root, own.download, progress=Downloads()))
    return 0

"""`bench`: the benchmarks of a checkout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hyperball.cli.parsing import UsageError, parser


def find_script() -> Path:
    """benchmarks/run.py of the checkout that the package or the current folder belongs to."""
    for start in (Path(__file__).resolve(), Path.cwd() / "x"):
        for folder in start.parents:
            script = folder / "benchmarks" / "run.py"
            if script.is_file() and (folder / "src" / "hyperball").is_dir():
                return script
    raise UsageError("the benchmarks are not part of the installed package; run this in a checkout of hyperball")


def bench(given: Sequence[str]) -> int:
    """`hyperball bench [SECTION …]`."""
    options = parser("bench")
    options.add_argument(
        "sections", nargs="*", metavar="SECTION", help="decoupled, pooling, projection; all without one"
    )
    own = options.parse_args(given)
    return subprocess.run([sys.executable, str(find_script()), *own.sections], check=False).returncode

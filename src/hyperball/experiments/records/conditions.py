"""RUN/conditions.json: what further tests of a trained network found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyperball.experiments.records.broken import leave_out, odd_metrics
from hyperball.files import FileError, read_tree
from hyperball.on_disk import is_number

CONDITIONS = "conditions.json"


def conditions_in(folder: Path) -> dict[str, Any]:
    """What was measured under conditions, by their names; what is broken is named and left out."""
    path = folder / CONDITIONS
    if not path.exists():
        return {}
    try:
        tree = read_tree(path)
    except FileError as error:
        leave_out(path, str(error))
        return {}
    if not isinstance(tree, dict):
        leave_out(path, f"must be a mapping, got {tree!r}")
        return {}
    found = {}
    for name, metrics in tree.items():
        if problem := odd_metrics(metrics) or ("" if any(map(is_number, metrics.values())) else "it has no number"):
            leave_out(path, f"{name}: {problem}")
        else:
            found[name] = metrics
    return found

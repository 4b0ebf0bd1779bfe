"""`train`, `resume` and `evaluate`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperball._errors import is_first_process
from hyperball.cli import recipes
from hyperball.cli.parsing import UsageError, parser
from hyperball.cli.progress import in_epochs, progress
from hyperball.diagnose import jsonable
from hyperball.files import FileError
from hyperball.on_disk import RECORD
from hyperball.training import Metrics, Record, read_recipe
from hyperball.training import evaluate as measure
from hyperball.training import resume as go_on
from hyperball.training import train as run
from hyperball.training.process.allocator import keep_freed_memory

NOT_FINITE = "not finite"


def add_place(options: Any, devices: bool = True) -> None:
    """Options of where a run's data is and what it computes on."""
    options.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    options.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    if devices:
        text = 'processes, each with a device; "all" is every GPU; under torchrun its own (default: auto, which is one)'
        options.add_argument("--devices", default="auto", metavar="N", help=text)


def count(text: str) -> int | str:
    """The number of `--devices`, which `train` checks."""
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else text


def train(given: Sequence[str]) -> int:
    """`hyperball train [RECIPE] [--FIELD=VALUE …]`."""
    options = recipes.RecipeParser("train", "[RECIPE] [--out FOLDER] [--FIELD=VALUE ...]")
    options.add_argument(
        "recipe",
        nargs="?",
        help="a .yaml or .json file, or a name of `hyperball list recipes`; without one, the defaults",
    )
    options.add_argument("-o", "--out", metavar="FOLDER", help="where the run is written (default: runs/ and a name)")
    options.add_argument("--resume", action="store_true", help="go on with the run in that folder, if there is one")
    options.add_argument("--download", action="store_true", help="bring the official files where they are not there")
    # jsonargparse rewrites --print_config to --print_config=, which a flag without a value would refuse.
    text = "print the recipe and do nothing else"
    options.add_argument("--print_config", "--print-config", nargs="?", const="", metavar="", help=text)
    add_place(options)
    options.add_recipe()
    asked = {text: f"{text}=" for text in ("--print_config", "--print-config")}
    own, changes = options.read([asked.get(text, text) for text in given])
    recipe = recipes.build(own["recipe"], changes)
    if own["print_config"]:
        raise UsageError(f"--print_config takes no value, got {own['print_config']!r}; redirect what it prints")
    if own["print_config"] is not None:
        print(recipes.as_yaml(recipe), end="")
        return 0
    folder = recipes.run_folder(own["out"], own["recipe"], recipe)
    keep_freed_memory()
    with progress() as shown:
        record = run(
            recipe, folder, resume=own["resume"], data_root=own["data_root"], download=own["download"],
            accelerator=own["accelerator"], devices=count(own["devices"]), progress=shown,
        )  # fmt: skip
    return say(record, folder)


def resume(given: Sequence[str]) -> int:
    """`hyperball resume RUN`."""
    options = parser("resume")
    options.add_argument("run", metavar="RUN", help="the folder of the run")
    add_place(options)
    own = options.parse_args(given)
    keep_freed_memory()
    with progress() as shown:
        record = go_on(
            own.run, data_root=own.data_root, accelerator=own.accelerator,
            devices=count(own.devices), progress=shown,
        )  # fmt: skip
    return say(record, Path(own.run))


def say(record: Record, folder: Path) -> int:
    """The result of a run, from the first process alone."""
    if is_first_process():
        last, timing = record.results["last"], record.timing
        if lacking := [name for name in ("samples", "loss", "epoch") if name not in last]:
            where = folder / RECORD
            raise FileError(f"{where}: `results.last` has no `{lacking[0]}`; remove the file to resume the run")
        seconds = f" in {timing['seconds']:.1f} s" if "seconds" in timing else ""
        print(
            f"{folder}: {percent(last['top1'])} on {last['samples']:,} test samples, loss {decimal(last['loss'])}, "
            f"after {in_epochs(last['epoch'])}{seconds}{doubt(last)}"
        )
    return 0


def percent(share: float | None) -> str:
    return NOT_FINITE if share is None or not math.isfinite(share) else f"{100 * share:.2f} %"


def decimal(value: float | None) -> str:
    return NOT_FINITE if value is None or not math.isfinite(value) else f"{value:.4f}"


def doubt(found: Mapping[str, Any]) -> str:
    """A warning about logits that are not finite, or nothing."""
    count = found.get("nonfinite") or 0
    return f"; the logits of {count:,} of {found['samples']:,} samples are not finite" if count else ""


def evaluate(given: Sequence[str]) -> int:
    """`hyperball evaluate RUN [--data.FIELD=VALUE …]`."""
    options = recipes.RecipeParser("evaluate", "RUN [--json] [--data.FIELD=VALUE ...]")
    options.add_argument("run", metavar="RUN", help="the folder of the run")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--last", action="store_true", help="the last weights, not their average, where both exist")
    add_place(options, devices=False)
    options.add_recipe("data")
    own, changes = options.read(given)
    recipe = read_recipe(own["run"]).override(changes)
    found = measure(
        own["run"], data=recipe.data if changes else None, data_root=own["data_root"],
        accelerator=own["accelerator"], average=not own["last"],
    )  # fmt: skip
    tree = jsonable({"run": own["run"], "changes": changes, **found.as_dict()})
    print(json.dumps(tree, allow_nan=False) if own["json"] else table(found))
    return 0


OPTIONAL = ("top5", "map6_raw", "voc6_raw", "voc6_softmax")  # not for sets of few classes
NAMES = {
    "samples": "test samples",
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "loss": "cross-entropy",
    "ece": "calibration error",
    "map_softmax": "mean average precision, softmax",
    "map_raw": "mean average precision, raw logits",
    "map6_raw": "the same, first 6 classes",
    "voc6_raw": "the same, interpolated",
    "voc6_softmax": "the same, softmax",
}


def table(found: Metrics) -> str:
    """The metrics, one a line."""
    values = found.as_dict()
    width = max(map(len, NAMES.values()))
    lines = []
    for key, name in NAMES.items():
        value = values[key]
        if key == "samples":
            text = f"{value:,}"
        elif value is None and key in OPTIONAL:
            continue
        else:
            text = decimal(value) if key == "loss" else percent(value)
        lines.append(f"{name:<{width}}  {text:>10}")
    return "\n".join(lines) + doubt(values).replace("; ", "\n", 1)

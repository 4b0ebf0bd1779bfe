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

from hyperball.attacks import Attack, Curve, RecordError, Robustness, evaluate_robustness, parse, robustness_curve
from hyperball.attacks.bench import Progress, make_bench
from hyperball.attacks.curves import check_attack
from hyperball.attacks.methods.table import parse_all
from hyperball.cli.parsing import UsageError, parser
from hyperball.cli.progress import SECONDS
from hyperball.experiments.attacked import fixed, network_and_images
from hyperball.training import load_model, read_recipe
from hyperball.training.engine import settings

FOLDER = "attacks"


def run_attacks(
    run_dir: str | Path,
    eps: str | float = "8/255",
    attacks: str | Sequence[str] = "fgsm,bim,pgd",
    *,
    norm: str = "linf",
    images: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    source: str | Path | None = None,
    checks: bool = True,
    data_root: str | Path | None = None,
    accelerator: str = "auto",
    path: str | Path | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> Robustness:
    """Attack the network of a run on its test images; the record goes to RUN/attacks/ unless `path` says otherwise.

    `images` takes that many of them, evenly over the classes; `source` is the run of an undefended network.
    """
    recipe = read_recipe(run_dir)
    model, inputs, labels = network_and_images(run_dir, images, data_root, accelerator)
    other = None if source is None else fixed(load_model(source, data_root=data_root).to(inputs.device))
    about = {"run": Path(run_dir).name, "source": source and Path(source).name, "recipe": recipe.to_dict()}
    with settings(recipe):  # TF32 as the recipe says, which by default is off
        return evaluate_robustness(
            model, inputs, labels,
            epsilon=eps, attacks=attacks, norm=norm, batch_size=batch_size, seed=seed, source=other, checks=checks,
            path=path or record_path(run_dir, eps, norm, len(labels), seed, source), resume=resume, about=about,
            progress=progress,
        )  # fmt: skip


def record_path(
    run_dir: str | Path, eps: str | float, norm: str, images: int, seed: int, source: str | Path | None = None
) -> Path:
    """RUN/attacks/linf-8_255-n10000-seed0.json, with -source-NAME where there is a source."""
    origin = "" if source is None else f"-source-{slug(Path(source).resolve().name)}"
    return Path(run_dir) / FOLDER / f"{norm}-{slug(str(eps))}-n{images}-seed{seed}{origin}.json"


def curve_path(record: Path, attack: Attack) -> Path:
    """linf-8_255-n10000-seed0-curve-pgd-steps-50.json, beside the record."""
    return record.with_name(f"{record.stem}-curve-{slug(str(attack))}.json")


def slug(text: str) -> str:
    """The text as a part of a file's name.

    >>> slug("pgd(step='2/255', restarts=5)")
    'pgd-step-2_255-restarts-5'
    """
    return re.sub(r"[^\w.+-]+", "-", text.replace("/", "_")).strip("-")


def attack(given: Sequence[str]) -> int:
    """`hyperball attack RUN --eps 8/255 --attacks fgsm,bim,pgd,auto`."""
    own = read(given)
    check(own)
    path = Path(own.out) if own.out else None
    common = {"norm": own.norm, "batch_size": own.batch_size, "seed": own.seed, "resume": not own.fresh}
    place = {"data_root": own.data_root, "accelerator": own.accelerator, "images": own.images}
    with shown(own.run) as progress, remedies():
        sweep = prepared(own) if own.curve else None
        found = run_attacks(
            own.run, own.eps, own.attacks, **common, **place,
            source=own.source, checks=not own.no_checks, path=path, progress=progress,
        )  # fmt: skip
        images = found.record["conditions"]["images"]
        path = path or record_path(own.run, own.eps, own.norm, images, own.seed, own.source)
        curve = None
        if sweep is not None:
            target = curve_path(path, sweep["attack"])
            with settings(read_recipe(own.run)):
                curve = robustness_curve(**sweep, **common, path=target, progress=progress)
    say(found, curve, path, own.json)
    return 0


def check(own: Any) -> None:
    """Refuse attacks that are none, and a GPU that is not there."""
    for option, text, reader in (("--attacks", own.attacks, parse_all), ("--curve", own.curve, parse)):
        try:
            _ = None if text is None else reader(text)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{option}: {error}") from None
    if own.accelerator == "cuda" and not torch.cuda.is_available():
        raise UsageError("--accelerator must be cpu or auto where torch finds no GPU, got cuda")


def prepared(own: Any) -> dict[str, Any]:
    """The arguments of the curve, refused before any attack has run if its own lacks something."""
    model, inputs, labels = network_and_images(own.run, own.images, own.data_root, own.accelerator)
    other = None if own.source is None else fixed(load_model(own.source, data_root=own.data_root).to(inputs.device))
    bench = make_bench(model, inputs[:2], labels[:2], epsilon=0.0, norm=own.norm, source=other)
    chosen = parse(own.curve)
    check_attack(bench.at(1.0), chosen)
    return {"model": model, "inputs": inputs, "labels": labels, "source": other, "attack": chosen}


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
    text = "also accuracy under that attack, from 0 to 128/255, or in L2 to 8"
    options.add_argument("--curve", metavar="ATTACK", help=text)
    options.add_argument("--no-checks", action="store_true", help="leave the masking checks out")
    options.add_argument("--fresh", action="store_true", help="begin anew where there is a record already")
    options.add_argument("--out", metavar="FILE", help="the record (default: RUN/attacks/ and a name)")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    options.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    return options.parse_args(given)


def say(found: Robustness, curve: Curve | None, path: Path, as_json: bool) -> None:
    if as_json:
        numbers = {entry["attack"]: entry["accuracy"] for entry in found.record["attacks"]}
        brief: dict[str, Any] = {"record": str(path), "clean": found.clean_accuracy, "attacks": numbers}
        brief |= {"worst_case": found.worst_case, "doubts": found.doubts}
        print(json.dumps(brief | ({"curve": curve.to_dict()} if curve else {})))
        return
    print(found.table())
    if curve is not None:
        print(f"accuracy under {curve.conditions['attack']} by epsilon")
        for value, accuracy in zip(curve.values, curve.accuracies):
            budget = f"{255 * value:5.1f}/255" if curve.conditions["norm"] == "linf" else f"{value:6.3f}"
            print(f"  {budget}  {100 * accuracy:5.1f} %")
        print(*(f"  - {doubt}" for doubt in curve.doubts), sep="\n", end="\n" if curve.doubts else "")
    print(f"record: {path}")


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

"""The network of any run under attack: what is loaded, where records go, and the attacks under a recipe's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperball import data
from hyperball.attacks import Attack, Curve, Robustness, evaluate_robustness, parse_epsilon, robustness_curve
from hyperball.attacks.arguments import budget_text
from hyperball.data import DataError
from hyperball.experiments.devices import device_of
from hyperball.training import Recipe, load_model, read_recipe
from hyperball.training.process.engine import settings
from hyperball.training.sets import Source, load_set

FOLDER = "attacks"
Sweep = Attack | str  # an attack over budgets, or a corruption over severities


@dataclass(frozen=True)
class Subject:
    """The network of a run, its test images, and the network on which images of transfer attacks are made."""

    run: str | Path
    recipe: Recipe
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    source_run: str | Path | None = None
    source: nn.Module | None = None


def load(
    run: str | Path,
    images: int | None = None,
    data_root: str | Path | None = None,
    accelerator: str = "auto",
    source: str | Path | None = None,
) -> Subject:
    """What is attacked; `images` takes that many test images, evenly over the classes; `source` is a run."""
    try:
        model, inputs, labels = network_and_images(run, images, data_root, accelerator)
    except DataError as error:
        if not str(error).startswith("`n` must"):
            raise
        raise DataError(str(error).replace("`n`", "`images`", 1)) from None
    other = None if source is None else fixed(load_model(source, data_root=data_root).to(inputs.device))
    return Subject(run, read_recipe(run), model, inputs, labels, source, other)


def run_attacks(subject: Subject, path: Path, eps: str, attacks: str, **options: Any) -> Robustness:
    """Attack the network of a run on its test images; the record goes to `path`."""
    source = None if subject.source_run is None else Path(subject.source_run).name
    about = {"run": Path(subject.run).name, "source": source, "recipe": subject.recipe.to_dict()}
    with settings(subject.recipe):  # TF32 as the recipe says, which by default is off
        return evaluate_robustness(
            subject.model, subject.inputs, subject.labels,
            epsilon=eps, attacks=attacks, source=subject.source, path=path, about=about, **options,
        )  # fmt: skip


def run_curve(subject: Subject, path: Path, sweep: Sweep, norm: str, **options: Any) -> Curve:
    """Accuracy over the budget of an attack or the severity of a corruption; the curve goes to `path`."""
    chosen: dict[str, Any] = {"over": sweep}
    if isinstance(sweep, Attack):
        chosen = {"attack": sweep, "norm": norm, "source": subject.source}
    with settings(subject.recipe):
        return robustness_curve(subject.model, subject.inputs, subject.labels, path=path, **chosen, **options)


def record_path(subject: Subject, eps: str | float, norm: str, seed: int) -> Path:
    """RUN/attacks/linf-8_255-n10000-seed0.json, with -source-NAME where there is a source."""
    origin = "" if subject.source_run is None else f"-source-{file_part(Path(subject.source_run).resolve().name)}"
    budget = file_part(budget_text(parse_epsilon(eps)))
    return Path(subject.run) / FOLDER / f"{norm}-{budget}-n{len(subject.labels)}-seed{seed}{origin}.json"


def curve_path(record: Path, sweep: Sweep) -> Path:
    """linf-8_255-n10000-seed0-curve-pgd-steps-50.json or …-curve-corruption-blur.json, beside the record."""
    text = str(sweep) if isinstance(sweep, Attack) else f"corruption-{sweep}"
    return record.with_name(f"{record.stem}-curve-{file_part(text)}.json")


def file_part(text: str) -> str:
    """The text as a part of a file's name.

    >>> file_part("pgd(step='2/255', restarts=5)")
    'pgd-step-2_255-restarts-5'
    """
    return re.sub(r"[^\w.+-]+", "-", text.replace("/", "_")).strip("-")


def network_and_images(
    run_dir: str | Path, images: int | None, data_root: str | Path | None, accelerator: str
) -> tuple[nn.Module, Tensor, Tensor]:
    """The network of a run, and its test images, on one device."""
    config = read_recipe(run_dir).data
    whole = data.load(config.name, data_root)
    dataset = load_set(config, Source(dataset=whole))
    if dataset.kind != "images":
        raise ValueError(f"attacks are for images, but {run_dir} was trained on the {dataset.kind} of {dataset.name}")
    test = dataset.test if images is None else dataset.test.subset(images)
    if isinstance(test, data.Files):
        test = data.decode(test, config.image_size)
    device = device_of(accelerator)
    test = test.to(device)
    return fixed(load_model(run_dir, dataset=whole).to(device)), test.inputs, test.labels


def fixed(network: nn.Module) -> nn.Module:
    """The network without gradients of its weights, which an attack does not need; on a GPU channels last."""
    network.requires_grad_(False)
    on_gpu = any(parameter.is_cuda for parameter in network.parameters())
    return network.to(memory_format=torch.channels_last) if on_gpu else network

"""torchvision's and timm's models by name, converted where an operator, a pooling or a projection is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

AUXILIARY = ("googlenet", "inception_v3")
CONVERT_OPTIONS = ("magnitude", "angular", "weighting", "pool", "projection", "skip", "convolutions", "keep_shortcuts")


def create(source: str, name: str, num_classes: int | None, options: Mapping[str, Any]) -> nn.Module:
    """The model, with random weights unless `pretrained=True`, converted if any option of `convert_model` is given."""
    given = dict(options)
    conversion = {key: given.pop(key) for key in CONVERT_OPTIONS if key in given}
    pretrained = given.pop("pretrained", False)
    if not isinstance(pretrained, bool):
        raise TypeError(f"`pretrained` must be True or False, got {pretrained!r}")
    make = {"torchvision": from_torchvision, "timm": from_timm}[source]
    model = make(name, num_classes, pretrained, given)
    if all(conversion.get(key) is None for key in ("magnitude", "pool", "projection")):
        return model
    from hyperball.convert.model import convert_model

    return convert_model(model, inplace=True, **conversion)[0]


def load(package: str) -> Any:
    """An optional package, or an error that names the extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        raise ImportError(f"{top} is needed for {top}'s models: pip install 'hyperball[vision]' ({error})") from error


def unknown(source: str, name: str, known: list[str]) -> ValueError:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"{source} has {len(known)} models"
    return ValueError(f"unknown {source} model {name!r}; {hint}")


def from_torchvision(name: str, num_classes: int | None, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    models = load("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise unknown("torchvision", name, known)
    if num_classes is not None:
        options["num_classes"] = num_classes
    if name in AUXILIARY:
        options.setdefault("aux_logits", False)  # with auxiliary heads, training gives a tuple
    if pretrained:
        classes = options.pop("num_classes", None)
        model = models.get_model(name, weights="DEFAULT", **options)
        return model if classes is None else with_classes(model, classes)
    if name in AUXILIARY:
        options.setdefault("init_weights", False)
    built: nn.Module = refuse_unknown_options(models.get_model, name, weights=None, **options)
    return built


def refuse_unknown_options(make: Any, name: str, **options: Any) -> Any:
    try:
        return make(name, **options)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise ValueError(f"{name} refuses an option: {error}") from error
        raise


def with_classes(model: nn.Module, num_classes: int) -> nn.Module:
    """The model with its classifier, the last linear layer, replaced by one for another number of classes."""
    from hyperball.convert.structure import find_classifier

    path = find_classifier(model)
    old = None if path is None else model.get_submodule(path)
    if path is None or not isinstance(old, nn.Linear):
        raise ValueError(f"`num_classes`: {type(model).__name__} has no linear classifier to replace")
    if old.out_features != num_classes:
        parent, _, last = path.rpartition(".")
        made = nn.Linear(old.in_features, num_classes, old.bias is not None)
        setattr(model.get_submodule(parent), last, made)
    return model


def from_timm(name: str, num_classes: int | None, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    timm = load("timm")
    base = name.partition(".")[0]
    if not timm.is_model(name):
        raise unknown("timm", name, timm.list_models())
    tags = timm.list_pretrained(f"{base}.*") if "." in name else []
    if tags and name not in tags:
        raise unknown("timm", name, tags)
    if num_classes is not None:
        options["num_classes"] = num_classes
    model: nn.Module = refuse_unknown_options(timm.create_model, name, pretrained=pretrained, **options)
    return model

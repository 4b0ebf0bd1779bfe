"""Models in files: safetensors, with the name and the options that make the model again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hyperball.convert import storage
from hyperball.convert.recipes import TABLED, check_recipe, model_recipe, stored_form
from hyperball.models.registry import create, describe


def save(
    model: nn.Module,
    path: str | Path,
    *,
    name: str,
    num_classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's state with what `create` needs to build it: `load(path)` gives it back.

    `options` are those that `create` was given (texts, numbers, values of tables); `report` is kept, for people.
    """
    plain = {key: stored_form(value) if isinstance(value, TABLED) else value for key, value in (options or {}).items()}
    name, num_classes, plain = check_recipe(name, num_classes, plain)
    if "/" not in name:
        describe(name)
    made = {"name": name, "num_classes": num_classes, "options": plain}
    return storage.save(model, path, metadata={"model": made, **({"report": dict(report)} if report else {})})


def load(path: str | Path) -> nn.Module:
    """The model that `save` wrote, with its weights; nothing is unpickled or downloaded."""
    tensors, metadata = storage.read(path)
    name, num_classes, options = model_recipe(path, metadata)
    try:
        model = create(name, num_classes, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} holds a model that cannot be made from its metadata: {error}") from error
    storage.load_state(model, tensors)
    return model

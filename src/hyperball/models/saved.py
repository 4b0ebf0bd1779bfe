"""Models in files: safetensors, with the name and the options that make the model again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hyperball.convert import storage
from hyperball.models.registry import create


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

    `options` are those that `create` was given (texts and numbers); `report` is kept beside them, for people.
    """
    made = {"name": name, "num_classes": num_classes, "options": dict(options or {})}
    return storage.save(model, path, metadata={"model": made, **({"report": dict(report)} if report else {})})


def load(path: str | Path) -> nn.Module:
    """The model that `save` wrote, with its weights; nothing is unpickled or downloaded."""
    tensors, metadata = storage.read(path)
    made = metadata.get("model")
    if not isinstance(made, dict) or "name" not in made:
        raise ValueError(f"{path} does not say which model it holds; create one and use hyperball.convert.load")
    options = {**made.get("options", {})}
    options.pop("pretrained", None)
    model = create(made["name"], made.get("num_classes"), **options)
    storage.load_state(model, tensors)
    return model

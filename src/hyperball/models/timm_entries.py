"""Our models among timm's: `timm.create_model("hyperball_resnet32")`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hyperball.models.classified import Classified
from hyperball.models.external import load
from hyperball.models.registry import create, describe, names

PREFIX = "hyperball_"
IGNORED = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
REFUSED = {
    "features_only": "gives no feature maps; `forward_features` gives what the classifier is given",
    "drop_path_rate": "has no stochastic depth; `drop_rate` is dropout before the classifier",
}


def register_with_timm() -> tuple[str, ...]:
    """Make every image model of ours known to timm under `hyperball_NAME`; returns those names.

    timm's `in_chans` is our `in_channels`, num_classes=0 leaves the classifier out, and `drop_rate` is dropout before
    it. There are no pretrained weights.
    """
    registry = load("timm.models")
    here = sys.modules[__name__]
    added = []
    for name in names():
        if len(describe(name).input_shape) == 3:
            entry = entrypoint(name)
            setattr(here, entry.__name__, entry)
            if not registry.is_model(entry.__name__):
                registry.register_model(entry)
            added.append(entry.__name__)
    return tuple(added)


def entrypoint(name: str) -> Any:
    """timm's function of one model: it is called with `pretrained` and the user's options."""

    def make(pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            raise ValueError(f"there are no pretrained weights of {PREFIX}{name}")
        given = {key: value for key, value in options.items() if key not in IGNORED}
        for key, reason in REFUSED.items():
            if given.pop(key, None):
                raise ValueError(f"`{key}`: {PREFIX}{name} {reason}")
        if "in_chans" in given:
            given["in_channels"] = given.pop("in_chans")
        return build(name, given)

    make.__name__ = make.__qualname__ = f"{PREFIX}{name}"
    make.__module__ = __name__
    make.__doc__ = describe(name).description
    return make


def build(name: str, given: dict[str, Any]) -> nn.Module:
    """The model with what timm reads of one: `pretrained_cfg`, `num_classes` and dropout before the classifier."""
    rate, classes = given.pop("drop_rate", 0.0), given.pop("num_classes", None)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"`drop_rate` must be in [0, 1), got {rate!r}")
    model = create(name, classes or None, **given)
    if isinstance(model, Classified):
        model.drop_rate = float(rate)
        if classes == 0:
            model.reset_classifier(0)
    elif rate or classes == 0:
        raise ValueError(f"{PREFIX}{name} takes neither `drop_rate` nor num_classes=0")
    held: Any = model
    held.pretrained_cfg = held.default_cfg = configuration(name, model, given)
    return model


def configuration(name: str, model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """timm's description of a model: the size of its input, its classes and where its classifier is."""
    channels, height, width = describe(name).input_shape
    channels, size = given.get("in_channels", channels), given.get("image_size")
    plain = {} if channels == 3 else {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    return {
        "url": "",
        "architecture": f"{PREFIX}{name}",
        "num_classes": getattr(model, "num_classes", describe(name).num_classes),
        "input_size": (channels, size or height, size or width),
        "pool_size": None,
        "classifier": getattr(model, "head_name", None),
        **plain,
    }


__all__ = ["register_with_timm"]

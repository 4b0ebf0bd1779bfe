"""Our models among timm's: `timm.create_model("hyperball_resnet32")`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hyperball.models.external import load
from hyperball.models.registry import create, describe, names

PREFIX = "hyperball_"
IGNORED = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "in_chans")


def register_with_timm() -> tuple[str, ...]:
    """Make every image model of ours known to timm under `hyperball_NAME`; returns those names.

    timm's `in_chans` is our `in_channels`. There are no pretrained weights.
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
        if options.get("in_chans") is not None:
            given["in_channels"] = options["in_chans"]
        return create(name, given.pop("num_classes", None), **given)

    make.__name__ = make.__qualname__ = f"{PREFIX}{name}"
    make.__module__ = __name__
    make.__doc__ = describe(name).description
    return make


__all__ = ["register_with_timm"]

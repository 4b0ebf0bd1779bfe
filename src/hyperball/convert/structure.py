"""Where a model's shortcuts, its classifier and its global pooling are, read off its modules.

Nothing is traced, so any model can be read. The rules:

* A 1×1 convolution lies on a residual shortcut if part of its path says "shortcut" or "skip", or "downsample" where it
  is all that the outermost such part convolves; or else if it is the only convolution of one child of a block, changes
  the channels or the size, does not continue the convolution before it, and the block's other convolutions, two at
  least, form a chain from the same input channels to the same output channels, with the same stride in all, and this
  is so for no other convolution of the block.
* The classifier is what timm's configuration names, or else the last layer with weights: a linear layer, or a 1×1
  convolution with nothing normalizing behind it.
* The global pooling is an average pooling to one position, called `global_pool` or with no convolution but the
  classifier registered after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import nn

from hyperball.convert.layers import is_convolution

SHORTCUT_WORDS = ("shortcut", "skip")
AMBIGUOUS_WORD = "downsample"  # also what ConvNeXt and others call the step between two stages
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def convolutions(model: nn.Module) -> dict[str, Any]:
    """Every convolution by its first path, in order."""
    return {name: module for name, module in model.named_modules() if is_convolution(module)}


def is_pointwise(module: Any) -> bool:
    return is_convolution(module) and all(size == 1 for size in module.kernel_size)


def shortcut_reason(model: nn.Module, name: str, conv: Any) -> str | None:
    """Why a convolution counts as that of a residual shortcut, or None."""
    if not is_pointwise(conv):
        return None
    parts = name.split(".")
    if any(word in part.lower() for part in parts for word in SHORTCUT_WORDS):
        return "a 1×1 convolution on a residual shortcut, by its name"
    named = next((depth for depth, part in enumerate(parts, 1) if AMBIGUOUS_WORD in part.lower()), 0)
    if named and len(convolutions(model.get_submodule(".".join(parts[:named])))) == 1:
        return "a 1×1 convolution on a residual shortcut, by its name"
    if conv.in_channels == conv.out_channels and all(step == 1 for step in conv.stride):
        return None
    for depth in range(len(parts)):
        block = model.get_submodule(".".join(parts[:depth]))
        if not isinstance(block, CONTAINERS) and runs_beside(block, parts[depth], conv) and is_alone(block, conv):
            return "a 1×1 convolution on a residual shortcut, by the channels of its block"
    return None


def runs_beside(block: nn.Module, child: str, conv: Any) -> bool:
    """Whether `conv` is all that `child` convolves, and the rest of the block leads from its input to its output."""
    if list(convolutions(block.get_submodule(child)).values()) != [conv]:
        return False
    every: list[Any] = list(convolutions(block).values())
    place = next(index for index, other in enumerate(every) if other is conv)
    rest = every[:place] + every[place + 1 :]
    if len(rest) < 2 or rest[0].in_channels != conv.in_channels or rest[-1].out_channels != conv.out_channels:
        return False
    if any(one.out_channels != two.in_channels for one, two in pairwise(rest)):
        return False
    step = math.prod(conv.stride)
    if step != math.prod(math.prod(other.stride) for other in rest):
        return False
    continues = every[place - 1].out_channels == conv.in_channels if place else conv.out_channels == rest[0].in_channels
    return step > 1 or not continues


def is_alone(block: nn.Module, conv: Any) -> bool:
    """Whether no other 1×1 convolution of the block runs beside the rest: a block has one shortcut (NASNet has two)."""
    for name, child in block.named_children():
        inside = list(convolutions(child).values())
        if (
            len(inside) == 1
            and inside[0] is not conv
            and is_pointwise(inside[0])
            and runs_beside(block, name, inside[0])
        ):
            return False
    return True


def find_classifier(model: nn.Module) -> str | None:
    """The path of the classifier, or None where no layer looks like one."""
    configuration = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    named = configuration.get("classifier") if isinstance(configuration, Mapping) else None
    for path in (named,) if isinstance(named, str) else tuple(named or ()):
        if has_submodule(model, path) and is_linear_map(model.get_submodule(path)):
            return str(path)
    weighted: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = bool(weighted) and name.startswith(f"{weighted[-1][0]}.")  # of a projected classifier
        if is_weighted(module) and not inside:
            weighted.append((name, module))
    if len(weighted) < 2:
        return None
    name, last = weighted[-1]
    return name if is_linear_map(last) else None


def has_submodule(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_weighted(module: Any) -> bool:
    """A layer with weights of its own; normalization counts, so that what is normalized is not the last layer."""
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    return is_convolution(module) or isinstance(module, (nn.Linear, *norms))


def is_linear_map(module: Any) -> bool:
    return isinstance(module, nn.Linear) or is_pointwise(module)


def pools_globally(module: Any) -> bool:
    """Whether it averages all positions into one: torch's adaptive pooling, or timm's fast one."""
    if isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
        size = module.output_size
        return all(one == 1 for one in (size if isinstance(size, tuple | list) else (size,)))
    return type(module).__name__ == "FastAdaptiveAvgPool" and type(module).__module__.startswith("timm.")


def find_global_pools(model: nn.Module, accept: Any = pools_globally) -> list[str]:
    """The paths of the poolings between the convolutions and the classifier."""
    classifier = find_classifier(model)
    order = list(model.named_modules())
    last = max(
        (i for i, (name, module) in enumerate(order) if is_convolution(module) and name != classifier), default=0
    )
    return [
        name
        for i, (name, module) in enumerate(order)
        if accept(module) and (i > last or "global_pool" in name.split("."))
    ]
